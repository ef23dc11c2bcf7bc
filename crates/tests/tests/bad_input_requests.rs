//! Invalid input after the handshake: the protocol's error or a closed connection; other clients are served
//! meanwhile, at full speed.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::raw::{Raw, request};
use blockyard_tests::server::{Engine, Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, until};
use proto::nbd::CommandFlags;
use std::path::Path;

on_both_engines!(
    a_bad_request_magic_closes_only_its_connection,
    unknown_commands_fail_with_einval,
    payloads_of_refused_writes_are_skipped,
    an_oversized_write_closes_the_connection,
    a_stalled_client_delays_no_other,
    disconnected_clients_leave_no_resources,
    random_requests_never_crash_the_server,
    a_session_ends_after_its_replies,
);

const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

const SIZE: u64 = 16 << 20;
/// The longest read or write.
const PAYLOAD_MAX: u32 = 32 << 20;

/// Runs `attack` on a file and on memory. Afterwards the server must work, with as many descriptors as
/// before, when clients had already connected to each of its threads.
fn survives(engine: Engine, attack: impl Fn(&Server)) {
    let sandbox = Sandbox::new(engine);
    let file = format!("file:{}", sandbox.image("image", SIZE).display());
    for stack in [&file, "ram:16M"] {
        let mut server = sandbox.serve(stack, &[]);
        (0..8).for_each(|_| server.check_health("disk"));
        server.settle();
        let before = server.descriptors();
        attack(&server);
        server.check_health("disk");
        let closed = until(PATIENCE, || (server.descriptors() <= before).then_some(()));
        assert!(closed.is_some(), "{} descriptors before, {} after", before, server.descriptors());
    }
}

/// Runs another client during `attack` and after it: a request that waited for a stalled client would never
/// complete.
fn at_full_speed_beside(socket: &Path, attack: impl FnOnce()) {
    let mut peer = Peer::connect(socket, "disk");
    attack();
    let data = noise(5, 4096);
    for turn in 0..500 {
        let offset = turn * 4096 % SIZE;
        peer.write(offset, &data, CommandFlags::empty()).unwrap();
        assert_eq!(peer.read(offset, 4096).unwrap(), data);
    }
    peer.disconnect();
}

fn a_bad_request_magic_closes_only_its_connection(engine: Engine) {
    survives(engine, |server| {
        let mut other = Peer::connect(&server.socket(), "disk");
        for magic in [0, 0x2560_9514, 0x21e4_1c71, u32::MAX] {
            let mut raw = Raw::go(&server.socket(), "disk");
            let mut bytes = request(0, READ, 1, 0, 512);
            bytes[..4].copy_from_slice(&u32::to_be_bytes(magic));
            raw.send(&bytes);
            raw.expect_closed(0);
            assert_eq!(other.read(0, 512).map(|data| data.len()), Ok(512));
        }
    });
}

fn unknown_commands_fail_with_einval(engine: Engine) {
    survives(engine, |server| {
        let mut raw = Raw::go(&server.socket(), "disk");
        for (cookie, command) in [8, 9, 100, u16::MAX].into_iter().enumerate() {
            raw.send(&request(0, command, cookie as u64, 0, 512));
            assert_eq!(raw.simple_reply(), (cookie as u64, EINVAL));
        }
        // No context was selected; a flush has no range; the flags are undefined.
        for bytes in [
            request(0, BLOCK_STATUS, 7, 0, 512),
            request(0, FLUSH, 7, 512, 0),
            request(0, FLUSH, 7, 0, 512),
            request(1 << 15, READ, 7, 0, 512),
            // The flag for unfragmented replies, where replies cannot be fragmented.
            request(4, READ, 7, 0, 512),
            request(0, READ, 7, SIZE, 512),
            request(0, READ, 7, u64::MAX, u32::MAX),
            request(0, CACHE, 7, SIZE - 512, 1024),
        ] {
            raw.send(&bytes);
            assert_eq!(raw.simple_reply(), (7, EINVAL), "{bytes:02x?}");
        }
        for command in [TRIM, WRITE_ZEROES] {
            raw.send(&request(0, command, 8, SIZE - 512, 1024));
            assert_eq!(raw.simple_reply(), (8, ENOSPC));
            raw.send(&request(0, command, 8, u64::MAX - 511, 512));
            assert_eq!(raw.simple_reply(), (8, ENOSPC));
        }
        raw.send(&request(0, READ, 9, 0, 512));
        assert_eq!(raw.simple_reply(), (9, 0));
        raw.take(512);
    });
}

fn payloads_of_refused_writes_are_skipped(engine: Engine) {
    survives(engine, |server| {
        let mut raw = Raw::go(&server.socket(), "disk");
        // The payload looks like a request, and must not be parsed as one.
        let payload: Vec<u8> = request(0, WRITE, 666, 0, 0).into_iter().cycle().take(28 * 10_000).collect();
        let len = payload.len() as u32;
        for (flags, offset, error) in
            [(0, SIZE - 512, ENOSPC), (0, u64::MAX, ENOSPC), (1 << 14, 0, EINVAL), (2, 0, EINVAL)]
        {
            raw.send(&request(flags, WRITE, 3, offset, len));
            raw.send(&payload);
            assert_eq!(raw.simple_reply(), (3, error), "{flags:#x} {offset}");
        }
        raw.send(&request(0, READ, 4, 0, 512));
        assert_eq!(raw.simple_reply(), (4, 0));
        raw.take(512);
    });
}

#[test]
fn writes_to_a_read_only_export_are_skipped() {
    let sandbox = Sandbox::default();
    let image = sandbox.noise("image", SIZE as usize);
    let server = sandbox.serve(&format!("file:{},ro", image.display()), &[]);
    let mut raw = Raw::go(&server.socket(), "disk");
    raw.send(&request(0, WRITE, 1, 0, 4096));
    raw.send(&[0; 4096]);
    assert_eq!(raw.simple_reply(), (1, EPERM));
    for command in [TRIM, WRITE_ZEROES] {
        raw.send(&request(0, command, 2, 0, 4096));
        assert_eq!(raw.simple_reply(), (2, EPERM));
    }
    raw.send(&request(0, READ, 3, 0, 4096));
    assert_eq!(raw.simple_reply(), (3, 0));
    assert_eq!(raw.take(4096), noise(SIZE, 4096));
}

fn an_oversized_write_closes_the_connection(engine: Engine) {
    survives(engine, |server| {
        for len in [PAYLOAD_MAX + 512, 1 << 31, u32::MAX] {
            let mut raw = Raw::go(&server.socket(), "disk");
            raw.send(&request(0, WRITE, 1, 0, len));
            let _ = raw.offer(&[0; 65536]);
            raw.expect_closed(16);
        }
    });
}

fn a_stalled_client_delays_no_other(engine: Engine) {
    survives(engine, |server| {
        let socket = server.socket();
        let mut stalled: Vec<Raw> = Vec::new();
        at_full_speed_beside(&socket, || {
            for _ in 0..8 {
                // In a header, in a small payload, in the largest one.
                let parts: [&[u8]; 3] = [
                    &request(0, READ, 1, 0, 512)[..13],
                    &[request(0, WRITE, 1, 8 << 20, 8192), vec![1; 4095]].concat(),
                    &[request(0, WRITE, 1, 0, PAYLOAD_MAX), vec![1; 100_000]].concat(),
                ];
                for part in parts {
                    let mut raw = Raw::go(&socket, "disk");
                    raw.send(part);
                    stalled.push(raw);
                }
            }
        });
        // One of them completes its request.
        let late = &mut stalled[1];
        late.send(&[1; 4097]);
        assert_eq!(late.simple_reply(), (1, 0));
        // The others disconnect in the middle of theirs: no part of an incomplete write may exist.
        let last = stalled.len() - 1;
        drop(stalled.drain(3..=last));
        let mut peer = Peer::connect(&socket, "disk");
        assert!(peer.read(8 << 20, 8192).unwrap() == [1; 8192]);
    });
}

fn disconnected_clients_leave_no_resources(engine: Engine) {
    survives(engine, |server| {
        for turn in 0..20 {
            let mut raw = Raw::go(&server.socket(), "disk");
            for cookie in 0..20 {
                raw.send(&request(0, READ, cookie, 0, 1 << 20));
            }
            if turn % 2 == 0 {
                raw.simple_reply();
            }
            raw.send(&request(0, WRITE, 99, 0, 1 << 20));
            raw.send(&[0; 70_000]);
        }
    });
}

fn random_requests_never_crash_the_server(engine: Engine) {
    survives(engine, |server| {
        for seed in 0..60 {
            let bytes = noise(seed + 1000, 28 * 40);
            let mut raw = Raw::go(&server.socket(), "disk");
            let mut reader = Raw { stream: raw.stream.try_clone().unwrap() };
            let replies = std::thread::spawn(move || reader.expect_closed(usize::MAX));
            for part in bytes.chunks_exact(28) {
                // Headers with a magic and small ranges, so that some of them are valid.
                let offset = u64::from(part[9]) << 16 | u64::from(part[10] & 1) << 9;
                let (flags, command) = (u16::from(part[0] & 31), u16::from(part[1] % 9));
                let len = u32::from(part[11]) << 9;
                if raw.offer(&request(flags, command, 5, offset, len)).is_err() {
                    break;
                }
                if command == WRITE && raw.offer(&vec![part[12]; len as usize]).is_err() {
                    break;
                }
            }
            raw.stream.shutdown(std::net::Shutdown::Write).ok();
            replies.join().expect("the server closes once it has answered");
        }
    });
}

fn a_session_ends_after_its_replies(engine: Engine) {
    survives(engine, |server| {
        let mut raw = Raw::go(&server.socket(), "disk");
        let mut bytes = Vec::new();
        for cookie in 0..50 {
            bytes.extend(request(0, READ, cookie, 4096 * cookie, 4096));
        }
        bytes.extend(request(0, DISC, 99, 0, 0));
        // Bytes after the end of a session belong to no request.
        bytes.extend(request(0, READ, 100, 0, 4096));
        raw.send(&bytes);
        let mut seen: Vec<u64> = Vec::new();
        for _ in 0..50 {
            let (cookie, error) = raw.simple_reply();
            assert_eq!(error, 0);
            raw.take(4096);
            seen.push(cookie);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..50).collect::<Vec<_>>());
        raw.expect_closed(0);
    });
}
