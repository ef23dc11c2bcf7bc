//! Memory that clients can make the server hold: bounded for each connection, used again after it, and
//! nobody else waits for it.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::raw::{Raw, request};
use blockyard_tests::server::{Engine, Sandbox, Server, noise};
use proto::nbd::CommandFlags;
use std::time::{Duration, Instant};

on_both_engines!(
    a_thousand_reads_that_nobody_reads_are_bounded,
    payloads_that_never_come_are_bounded,
    memory_of_past_connections_is_used_again,
);

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
/// What one connection may hold, 64 MiB, and room for what the process needs besides.
const MORE_MAX: u64 = 100 * MIB;

const READ: u16 = 0;
const WRITE: u16 = 1;

/// A file and memory, full of data and warmed up: what a server uses in peace it uses now.
fn on_each(engine: Engine, more: &[&str], test: impl Fn(&Server)) {
    let sandbox = Sandbox::new(engine);
    let file = format!("file:{}", sandbox.noise("image", SIZE as usize).display());
    for stack in [&file, "ram:64M"] {
        let server = sandbox.serve(stack, more);
        let mut peer = Peer::connect(&server.socket(), "disk");
        for offset in (0..SIZE).step_by(4 << 20) {
            peer.write(offset, &noise(offset, 4 << 20), CommandFlags::NONE).unwrap();
            peer.read(offset, 4 << 20).unwrap();
        }
        peer.disconnect();
        test(&server);
    }
}

/// The most memory that the server holds while another client works for a second, and twenty turns at least: what
/// waits for one that stalls waits for ever.
fn watch(server: &Server) -> u64 {
    let mut peer = Peer::connect(&server.socket(), "disk");
    let (start, mut most, mut turns) = (Instant::now(), 0, 0u64);
    while turns < 20 || start.elapsed() < Duration::from_secs(1) {
        let data = noise(turns, 65536);
        let offset = turns * 65536 % SIZE;
        peer.write(offset, &data, CommandFlags::NONE).unwrap();
        assert!(peer.read(offset, 65536).unwrap() == data);
        most = most.max(server.resident());
        turns += 1;
    }
    peer.disconnect();
    most
}

/// So many reads of a megabyte.
fn reads(count: u64) -> Vec<u8> {
    (0..count).flat_map(|cookie| request(0, READ, cookie, cookie % 64 * MIB, 1 << 20)).collect()
}

fn a_thousand_reads_that_nobody_reads_are_bounded(engine: Engine) {
    on_each(engine, &[], |server| {
        let before = server.resident();
        let mut raw = Raw::go(&server.socket(), "disk");
        // The socket takes these few bytes even while the server does not read.
        raw.send(&reads(1000));
        let more = watch(server).saturating_sub(before);
        assert!(more < MORE_MAX, "{} MiB more for one connection", more / MIB);
        // It was not dropped: whoever reads after all gets all of it.
        let mut reader = raw;
        for _ in 0..1000 {
            let (_, error) = reader.simple_reply();
            assert_eq!(error, 0);
            reader.take(1 << 20);
        }
    });
}

fn payloads_that_never_come_are_bounded(engine: Engine) {
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

fn memory_of_past_connections_is_used_again(engine: Engine) {
    // All connections are one thread's, which keeps what it once needed for the next one.
    on_each(engine, &["--queues", "1"], |server| {
        let before = server.resident();
        for turn in 1..=8 {
            let mut raw = Raw::go(&server.socket(), "disk");
            raw.send(&reads(300));
            // By then the server holds for it whatever it will hold.
            raw.simple_reply();
            std::thread::sleep(Duration::from_millis(100));
            drop(raw);
            server.settle();
            let more = server.resident().saturating_sub(before);
            assert!(more < MORE_MAX, "{} MiB more after {turn} connections", more / MIB);
        }
    });
}

/// What an export costs at rest. Holds for an optimised binary.
#[test]
fn a_file_export_takes_twelve_mebibytes_at_most() {
    if !blockyard_tests::server::is_release() {
        return blockyard_tests::tools::skip("this binary is not optimised (./x test has one that is)");
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve(&format!("file:{}", sandbox.image("image", SIZE).display()), &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(0, &[1; 4096], CommandFlags::FUA).unwrap();
    peer.read(0, 4096).unwrap();
    let resident = server.resident();
    eprintln!("resident with a client: {} KiB", resident / 1024);
    assert!(resident <= 12 * MIB, "{} KiB are resident", resident / 1024);
}
