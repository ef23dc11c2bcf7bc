//! Invalid input during the handshake: the right error or a closed connection, and a server that continues
//! unaffected.

use blockyard_tests::peer::Peer;
use blockyard_tests::raw::{CLIENT_FLAGS, Raw, go_data, option_bytes, option_error};
use blockyard_tests::server::{Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, until};
use std::io::Read;

const ERR_UNSUP: u32 = option_error(1);
const ERR_POLICY: u32 = option_error(2);
const ERR_INVALID: u32 = option_error(3);
const ERR_UNKNOWN: u32 = option_error(6);
const ERR_TOO_BIG: u32 = option_error(9);

const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const LIST: u32 = 3;
const STARTTLS: u32 = 5;
const INFO: u32 = 6;
const GO: u32 = 7;
const STRUCTURED_REPLY: u32 = 8;
const SET_META_CONTEXT: u32 = 10;

fn serve(sandbox: &Sandbox) -> Server {
    sandbox.serve("ram:16M", &[])
}

/// Checks that the server works after all of `attack`, with no more descriptors than before.
fn survives(attack: impl Fn(&Server)) {
    let sandbox = Sandbox::default();
    let mut server = serve(&sandbox);
    (0..8).for_each(|_| server.check_health("disk"));
    server.settle();
    let before = server.descriptors();
    attack(&server);
    server.check_health("disk");
    let closed = until(PATIENCE, || (server.descriptors() <= before).then_some(()));
    assert!(closed.is_some(), "{} descriptors before, {} after", before, server.descriptors());
}

#[test]
fn garbage_in_place_of_a_greeting_closes_the_connection() {
    survives(|server| {
        for seed in 0..50 {
            let mut raw = Raw::connect(&server.socket());
            raw.take(18);
            // The first byte has no valid flags.
            let mut bytes = noise(seed, 4096);
            bytes[0] |= 0x80;
            // The server may close before it has read all of it.
            let _ = raw.offer(&bytes);
            raw.expect_closed(0);
        }
    });
}

#[test]
fn an_http_request_is_refused() {
    survives(|server| {
        let mut raw = Raw::connect(&server.socket());
        raw.take(18);
        raw.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
        raw.expect_closed(0);
    });
}

#[test]
fn unknown_client_flags_close_the_connection() {
    survives(|server| {
        for bit in 2..32 {
            let mut raw = Raw::connect(&server.socket());
            raw.take(18);
            raw.send(&(CLIENT_FLAGS | 1 << bit).to_be_bytes());
            raw.expect_closed(0);
        }
    });
}

#[test]
fn a_client_may_disconnect_at_any_byte_of_the_handshake() {
    let mut whole = CLIENT_FLAGS.to_be_bytes().to_vec();
    whole.extend(option_bytes(STRUCTURED_REPLY, &[]));
    whole.extend(option_bytes(GO, &go_data("disk")));
    survives(|server| {
        for end in 0..whole.len() {
            let mut raw = Raw::connect(&server.socket());
            raw.send(&whole[..end]);
            raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
            raw.expect_closed(4096);
        }
    });
}

#[test]
fn a_handshake_may_arrive_byte_by_byte() {
    survives(|server| {
        let mut raw = Raw::connect(&server.socket());
        let mut bytes = CLIENT_FLAGS.to_be_bytes().to_vec();
        bytes.extend(option_bytes(GO, &go_data("disk")));
        bytes.iter().for_each(|byte| raw.send(&[*byte]));
        raw.take(18);
        let (option, kind, _) = raw.option_reply();
        assert_eq!((option, kind), (GO, 3), "the reply describes the export");
    });
}

#[test]
fn a_bad_option_magic_closes_the_connection() {
    survives(|server| {
        let mut raw = Raw::greeted(&server.socket());
        let mut bytes = option_bytes(LIST, &[]);
        bytes[3] ^= 1;
        raw.send(&bytes);
        raw.expect_closed(0);
    });
}

#[test]
fn unknown_options_are_refused_and_the_handshake_continues() {
    survives(|server| {
        let mut raw = Raw::greeted(&server.socket());
        // 4 was reserved and never used.
        for option in [0, 4, 12, 99, 0x8000_0001, u32::MAX] {
            raw.option(option, b"whatever");
            let (to, kind, _) = raw.option_reply();
            assert_eq!((to, kind), (option, ERR_UNSUP));
        }
        raw.option(LIST, &[]);
        assert_eq!(raw.option_reply().1, 2, "an export");
        assert_eq!(raw.option_reply().1, 1, "the end of the list");
    });
}

#[test]
fn malformed_options_are_refused_and_the_handshake_continues() {
    let long_name = go_data(&"n".repeat(4097));
    let mut longer_than_it_is = go_data("disk");
    longer_than_it_is[3] = 200;
    let mut longer_than_memory = go_data("disk");
    longer_than_memory[..4].fill(0xff);
    let mut more_requests_than_there_are = go_data("disk");
    more_requests_than_there_are[9] = 3;
    let trailing = [go_data("disk"), vec![0]].concat();
    let mut not_text = go_data("disk");
    not_text[5] = 0xff;
    survives(|server| {
        let mut raw = Raw::greeted(&server.socket());
        for option in [INFO, GO] {
            for data in [
                &[][..],
                &[0, 0, 0],
                &long_name,
                &longer_than_it_is,
                &longer_than_memory,
                &more_requests_than_there_are,
                &trailing,
                &not_text,
            ] {
                raw.option(option, data);
                let (to, kind, _) = raw.option_reply();
                assert_eq!((to, kind), (option, ERR_INVALID), "{data:?}");
            }
            raw.option(option, &go_data("nobody"));
            assert_eq!(raw.option_reply().1, ERR_UNKNOWN);
        }
        for (option, data, wanted) in [
            (LIST, &b"x"[..], ERR_INVALID),
            (STRUCTURED_REPLY, b"x", ERR_INVALID),
            (STARTTLS, b"", ERR_POLICY),
            // Refused before structured replies were negotiated.
            (SET_META_CONTEXT, b"", ERR_INVALID),
        ] {
            raw.option(option, data);
            assert_eq!(raw.option_reply().1, wanted, "option {option}");
        }
    });
}

#[test]
fn an_oversized_option_is_skipped_or_closes_the_connection() {
    survives(|server| {
        // Longer than any valid option: skipped, and refused.
        let mut raw = Raw::greeted(&server.socket());
        raw.option(GO, &vec![b'n'; 1 << 20]);
        let (to, kind, _) = raw.option_reply();
        assert_eq!((to, kind), (GO, ERR_TOO_BIG));
        raw.option(LIST, &[]);
        assert_eq!(raw.option_reply().1, 2);
        // Options that announce more data than the server reads.
        for len in [u32::MAX, 1 << 31, 64 << 20] {
            let mut raw = Raw::greeted(&server.socket());
            let mut header = option_bytes(GO, &[]);
            header[12..16].copy_from_slice(&len.to_be_bytes());
            raw.send(&header);
            raw.expect_closed(0);
        }
    });
}

#[test]
fn too_many_options_close_the_connection() {
    survives(|server| {
        let mut raw = Raw::greeted(&server.socket());
        let mut reader = Raw { stream: raw.stream.try_clone().unwrap() };
        let replies = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // A reset means that the server closed with unread data.
            let _ = reader.stream.read_to_end(&mut bytes);
            bytes.len() / 20
        });
        for _ in 0..2000 {
            if raw.offer(&option_bytes(99, &[])).is_err() {
                break;
            }
        }
        // If the server did not close, the read timeout would have to pass; here all replies have arrived.
        let replies = replies.join().unwrap();
        assert!(replies < 4000, "2000 options were answered");
        raw.expect_closed(usize::MAX);
    });
}

#[test]
fn an_unknown_export_name_closes_the_connection() {
    survives(|server| {
        for name in [&b"nobody"[..], &[0xff; 8], &[b'n'; 5000]] {
            let mut raw = Raw::greeted(&server.socket());
            raw.option(EXPORT_NAME, name);
            raw.expect_closed(0);
        }
    });
}

#[test]
fn abort_is_acknowledged_and_closes_the_connection() {
    survives(|server| {
        let mut raw = Raw::greeted(&server.socket());
        raw.option(ABORT, &[]);
        assert_eq!(raw.option_reply(), (ABORT, 1, Vec::new()));
        raw.expect_closed(0);
    });
}

/// More than the server's limit at a time: new clients are accepted nevertheless.
#[test]
fn half_open_connections_do_not_block_new_clients() {
    survives(|server| {
        let half_open: Vec<Raw> = (0..400).map(|_| Raw::connect(&server.socket())).collect();
        for _ in 0..10 {
            let mut peer = Peer::connect(&server.socket(), "disk");
            peer.read(0, 512).unwrap();
            peer.disconnect();
        }
        drop(half_open);
    });
}

#[test]
fn random_options_never_crash_the_server() {
    survives(|server| {
        for seed in 100..200 {
            let bytes = noise(seed, 3000);
            let mut raw = Raw::greeted(&server.socket());
            // Well-formed headers, so that the code after the checks of the header is reached.
            for (number, data) in bytes.chunks(37).enumerate() {
                let option = u32::from(data[0] % 13);
                let data = &data[1..1 + usize::from(data[1]) % (data.len() - 1)];
                if option != EXPORT_NAME && raw.offer(&option_bytes(option, data)).is_err() {
                    break;
                }
                assert!(number < 100);
            }
            raw.stream.shutdown(std::net::Shutdown::Write).ok();
            raw.expect_closed(1 << 20);
        }
    });
}
