//! Memory that clients can make the server hold: bounded for each connection, reused afterwards, and without
//! delay for other clients.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::raw::{Raw, request};
use blockyard_tests::server::{Engine, Sandbox, Server, noise};
use proto::nbd::CommandFlags;
use std::time::{Duration, Instant};

on_both_engines!(
    memory_of_a_thousand_unread_replies_is_bounded,
    memory_of_payloads_that_never_arrive_is_bounded,
    memory_of_closed_connections_is_reused,
);

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
/// The limit of one connection, 64 MiB, and a margin for the process itself.
const MORE_MAX: u64 = 100 * MIB;

const READ: u16 = 0;
const WRITE: u16 = 1;

/// Runs `test` on a file and on memory, filled and warmed up, so that the server's normal memory is in use
/// already.
fn on_each(engine: Engine, more: &[&str], test: impl Fn(&Server)) {
    let sandbox = Sandbox::new(engine);
    let file = format!("file:{}", sandbox.noise("image", SIZE as usize).display());
    for stack in [&file, "ram:64M"] {
        let server = sandbox.serve(stack, more);
        let mut peer = Peer::connect(&server.socket(), "disk");
        for offset in (0..SIZE).step_by(4 << 20) {
            peer.write(offset, &noise(offset, 4 << 20), CommandFlags::empty()).unwrap();
            peer.read(offset, 4 << 20).unwrap();
        }
        peer.disconnect();
        test(&server);
    }
}

/// Returns the most memory that the server holds while another client works for a second, and at least twenty
/// rounds: a request that waited for a stalled client would never complete.
fn watch(server: &Server) -> u64 {
    let mut peer = Peer::connect(&server.socket(), "disk");
    let (start, mut most, mut turns) = (Instant::now(), 0, 0u64);
    while turns < 20 || start.elapsed() < Duration::from_secs(1) {
        let data = noise(turns, 65536);
        let offset = turns * 65536 % SIZE;
        peer.write(offset, &data, CommandFlags::empty()).unwrap();
        assert!(peer.read(offset, 65536).unwrap() == data);
        most = most.max(server.resident());
        turns += 1;
    }
    peer.disconnect();
    most
}

/// Returns `count` reads of a megabyte.
fn reads(count: u64) -> Vec<u8> {
    (0..count).flat_map(|cookie| request(0, READ, cookie, cookie % 64 * MIB, 1 << 20)).collect()
}

fn memory_of_a_thousand_unread_replies_is_bounded(engine: Engine) {
    on_each(engine, &[], |server| {
        let before = server.resident();
        let mut raw = Raw::go(&server.socket(), "disk");
        // The socket accepts these few bytes even while the server does not read.
        raw.send(&reads(1000));
        let more = watch(server).saturating_sub(before);
        assert!(more < MORE_MAX, "{} MiB more for one connection", more / MIB);
        // The connection was not dropped: a client that starts reading gets all of it.
        let mut reader = raw;
        for _ in 0..1000 {
            let (_, error) = reader.simple_reply();
            assert_eq!(error, 0);
            reader.take(1 << 20);
        }
    });
}

fn memory_of_payloads_that_never_arrive_is_bounded(engine: Engine) {
    on_each(engine, &[], |server| {
        let before = server.resident();
        // 20 times 32 MiB announced, 64 KiB of each sent.
        let stalled: Vec<Raw> = (0..20)
            .map(|_| {
                let mut raw = Raw::go(&server.socket(), "disk");
                raw.send(&request(0, WRITE, 1, 0, 32 << 20));
                raw.send(&[1; 65536]);
                raw
            })
            .collect();
        let more = watch(server).saturating_sub(before);
        assert!(more < MORE_MAX, "{} MiB more for what never came", more / MIB);
        drop(stalled);
    });
}

fn memory_of_closed_connections_is_reused(engine: Engine) {
    // All connections are on one thread, which keeps memory for the next one.
    on_each(engine, &["--queues", "1"], |server| {
        let before = server.resident();
        for turn in 1..=8 {
            let mut raw = Raw::go(&server.socket(), "disk");
            raw.send(&reads(300));
            // Now the server holds its maximum for this connection.
            raw.simple_reply();
            std::thread::sleep(Duration::from_millis(100));
            drop(raw);
            server.settle();
            let more = server.resident().saturating_sub(before);
            assert!(more < MORE_MAX, "{} MiB more after {turn} connections", more / MIB);
        }
    });
}

/// The memory of an idle export. Applies to an optimised binary.
#[test]
fn a_file_export_uses_at_most_fourteen_mebibytes() {
    if !blockyard_tests::server::is_release() {
        return blockyard_tests::tools::skip("this binary is not optimised (./x test has one that is)");
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve(&format!("file:{}", sandbox.image("image", SIZE).display()), &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(0, &[1; 4096], CommandFlags::FUA).unwrap();
    peer.read(0, 4096).unwrap();
    // Most of it is the program itself, which other processes share.
    assert!(server.anonymous() <= 3 * MIB, "{} KiB are its own", server.anonymous() / 1024);
    let resident = server.resident();
    eprintln!("resident with a client: {} KiB", resident / 1024);
    assert!(resident <= 14 * MIB, "{} KiB are resident", resident / 1024);
}
