//! Clients that use up resources: memory for requests that they never complete or replies that they never
//! read, connections, handshakes. An honest client notices a bounded delay at most.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::raw::{Raw, go_data, option_error, request};
use blockyard_tests::server::{Engine, Sandbox, Server, noise};
use blockyard_tests::tools::{raise_file_limit, until};
use proto::nbd::CommandFlags;
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

on_both_engines!(
    announced_payloads_do_not_block_other_clients,
    incomplete_payloads_do_not_block_other_clients,
    unread_replies_do_not_block_other_clients,
    many_large_writes_share_a_bounded_budget,
    a_stalled_request_is_disconnected_and_an_idle_client_is_not,
);

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const READ: u16 = 0;
const WRITE: u16 = 1;
const LARGEST: u32 = 32 << 20;

/// The longest allowed delay of an honest client: the time after which an idle holder of memory is
/// disconnected, the interval of that check, and a margin for a machine that is busy with other tests.
const DELAY_MAX: Duration = Duration::from_secs(10);

fn serve(sandbox: &Sandbox, more: &[&str]) -> Server {
    let file = format!("file:{}", sandbox.noise("image", SIZE as usize).display());
    sandbox.serve(&file, more)
}

/// Writes and reads back, and connects, repeatedly; returns the longest time of one of these.
fn honest_work(socket: &Path, lens: &[usize], turns: u64) -> Duration {
    let mut worst = Duration::ZERO;
    let mut peer = Peer::connect(socket, "disk");
    let mut timed = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        worst = worst.max(start.elapsed());
    };
    for turn in 0..turns {
        for &len in lens {
            let (data, offset) = (noise(turn, len), turn * len as u64 % (SIZE - len as u64 + 1));
            let offset = offset & !4095;
            timed(&mut || peer.write(offset, &data, CommandFlags::empty()).expect("an honest write"));
            timed(&mut || assert!(peer.read(offset, len as u64).expect("an honest read") == data));
        }
        timed(&mut || Peer::connect(socket, "disk").disconnect());
    }
    peer.disconnect();
    worst
}

fn is_bounded(what: &str, worst: Duration) {
    eprintln!("{what}: an honest client waited for {worst:?} at most");
    assert!(worst < DELAY_MAX, "{what}: an honest client waited for {worst:?}");
}

/// Stops the attackers, whatever the test's result.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn announced_payloads_do_not_block_other_clients(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let server = serve(&sandbox, &[]);
    honest_work(&server.socket(), &[4096, LARGEST as usize], 1);
    let before = server.resident();
    // Each sends 29 bytes: a header that announces 32 MiB, and one byte of them.
    let attackers: Vec<Raw> = (0..200)
        .map(|_| {
            let mut raw = Raw::go(&server.socket(), "disk");
            raw.send(&request(0, WRITE, 1, 0, LARGEST));
            raw.send(&[1]);
            raw
        })
        .collect();
    let worst = honest_work(&server.socket(), &[4096, 65536, 1 << 20, LARGEST as usize], 4);
    is_bounded("200 announced payloads", worst);
    let more = server.resident().saturating_sub(before);
    assert!(more < 100 * MIB, "{} MiB more for 200 bytes", more / MIB);
    drop(attackers);
}

fn incomplete_payloads_do_not_block_other_clients(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let server = serve(&sandbox, &["--queues", "1", "--nbd-limits", "memory=256M"]);
    let (payload, socket) = (noise(1, 8 << 20), server.socket());
    let attack = || {
        let mut raw = Raw::go(&socket, "disk");
        raw.send(&request(0, WRITE, 1, 0, 8 << 20));
        raw.stream.set_nonblocking(true).unwrap();
        raw
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // 40 at a time that send all but the last byte, as far as the server reads; disconnected ones return.
        scope.spawn(|| {
            let mut attackers: Vec<(Raw, usize)> = (0..40).map(|_| (attack(), 0)).collect();
            while !stop.load(Relaxed) {
                for (raw, sent) in &mut attackers {
                    use std::io::{ErrorKind, Write};
                    match raw.stream.write(&payload[*sent..payload.len() - 1]) {
                        Ok(len) => *sent += len,
                        Err(why) if why.kind() == ErrorKind::WouldBlock => {}
                        Err(_) => (*raw, *sent) = (attack(), 0),
                    }
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let _stop = Stop(&stop);
        let counted = until(Duration::from_secs(60), || {
            sandbox.run(&["show", "disk"]).ok().contains("limit hits").then_some(())
        });
        // Small requests need no memory of the shared budget; large ones wait until the stalled requests have
        // ended.
        let small = honest_work(&server.socket(), &[4096, 65536, 1 << 19], 20);
        let large = honest_work(&server.socket(), &[16 << 20], 2);
        counted.expect("it is counted that requests wait for memory");
        assert!(small < Duration::from_secs(2), "a small request waited for {small:?}");
        is_bounded("40 payloads short of a byte in 256 MiB", large);
    });
    server.await_log("NBD clients were disconnected, the last one because others waited for its memory");
    assert!(server.resident() < 500 * MIB, "{} MiB", server.resident() / MIB);
}

fn unread_replies_do_not_block_other_clients(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let server = serve(&sandbox, &["--queues", "1", "--nbd-limits", "memory=256M"]);
    let _attackers: Vec<Raw> = (0..80)
        .map(|_| {
            let mut raw = Raw::go(&server.socket(), "disk");
            raw.send(&request(0, READ, 1, 0, 8 << 20));
            raw.send(&request(0, READ, 2, 0, 8 << 20));
            raw
        })
        .collect();
    let small = honest_work(&server.socket(), &[4096, 65536], 20);
    let large = honest_work(&server.socket(), &[16 << 20], 2);
    assert!(small < Duration::from_secs(2), "a small request waited for {small:?}");
    is_bounded("160 replies of 8 MiB that nobody reads in 256 MiB", large);
    assert!(server.resident() < 500 * MIB, "{} MiB", server.resident() / MIB);
    let shown = sandbox.run(&["show", "disk"]).ok();
    assert!(shown.contains("memory-disconnects="), "{shown}");
}

/// Half-received payloads that together exceed the budget are completed one after the other.
fn many_large_writes_share_a_bounded_budget(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let server = serve(&sandbox, &["--queues", "1", "--nbd-limits", "memory=16M"]);
    std::thread::scope(|scope| {
        for number in 0..8u64 {
            let socket = server.socket();
            scope.spawn(move || {
                let mut peer = Peer::connect(&socket, "disk");
                let data = noise(number, 8 << 20);
                for _ in 0..4 {
                    peer.write(number * 8 * MIB, &data, CommandFlags::empty()).expect("a large write");
                    assert!(peer.read(number * 8 * MIB, 8 << 20).expect("a large read") == data);
                }
                peer.disconnect();
            });
        }
    });
    let shown = sandbox.run(&["show", "disk"]).ok();
    assert!(!shown.contains("disconnects="), "nobody stalled: {shown}");
}

fn a_stalled_request_is_disconnected_and_an_idle_client_is_not(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let server = serve(&sandbox, &["--nbd-limits", "stall=2s"]);
    let mut idle = Raw::go(&server.socket(), "disk");
    let mut slow = Raw::go(&server.socket(), "disk");
    slow.send(&request(0, WRITE, 7, 0, 20));
    let parts = [
        request(0, WRITE, 1, 0, LARGEST),
        [request(0, WRITE, 1, 0, LARGEST), vec![1; 500_000]].concat(),
        [request(0, WRITE, 1, 0, 4096), vec![1; 100]].concat(),
        request(0, READ, 1, 0, 4096)[..11].to_vec(),
    ];
    let mut halves: Vec<Raw> = parts
        .iter()
        .map(|part| {
            let mut raw = Raw::go(&server.socket(), "disk");
            raw.send(part);
            raw
        })
        .collect();
    // A client that sends a byte now and then is slow, but not stalled.
    for _ in 0..20 {
        slow.send(&[1]);
        std::thread::sleep(Duration::from_millis(400));
    }
    assert_eq!(slow.simple_reply().0, 7);
    halves.iter_mut().for_each(|raw| raw.expect_closed(0));
    idle.send(&request(0, READ, 9, 0, 4096));
    assert_eq!(idle.simple_reply(), (9, 0));
    idle.take(4096);
    server.await_log("because it sent part of a request and then nothing (see --nbd-limits stall)");
    let shown = sandbox.run(&["show", "disk"]).ok();
    assert!(shown.contains("stall-disconnects=4") && shown.contains("stall=2s"), "{shown}");
}

#[test]
fn connections_beyond_an_exports_limit_are_refused_with_the_reason() {
    let sandbox = Sandbox::default();
    let server = serve(&sandbox, &["--nbd-limits", "connections=3"]);
    let mut there: Vec<Raw> = (0..3).map(|_| Raw::go(&server.socket(), "disk")).collect();
    let mut refused = Raw::greeted(&server.socket());
    refused.option(7, &go_data("disk"));
    let (_, kind, text) = refused.option_reply();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert_eq!(kind, option_error(2), "{text}");
    assert!(text.contains("--nbd-limits connections"), "{text}");
    server.await_log("NBD clients were refused");
    assert!(sandbox.run(&["show", "disk"]).ok().contains("connections=1"), "it is counted");
    // The connection slot of a disconnected client is free at once.
    there.pop();
    let again = until(Duration::from_secs(20), || {
        let mut raw = Raw::greeted(&server.socket());
        raw.option(7, &go_data("disk"));
        (raw.option_reply().1 != option_error(2)).then_some(())
    });
    again.expect("there is room again");
    drop(there);
}

#[test]
fn connections_beyond_a_peers_limit_are_refused() {
    let sandbox = Sandbox::default();
    let topology = "nbd-limits = \"per-peer=2\"\n[device.disk]\nstack = \"ram:1M\"\n[[export]]\ndevice = \"disk\"\n\
                    nbd = \"unix:disk.sock\"\n";
    let server = sandbox.up(topology, 1);
    let there: Vec<Raw> = (0..2).map(|_| Raw::go(&server.socket(), "disk")).collect();
    let mut refused = Raw::greeted(&server.socket());
    refused.option(7, &go_data("disk"));
    let (_, kind, text) = refused.option_reply();
    assert_eq!(kind, option_error(2));
    assert!(String::from_utf8_lossy(&text).contains("--nbd-limits per-peer"));
    drop(there);
}

/// An attacker opens as many incomplete handshakes as it can; a slow client is still served.
#[test]
fn slow_handshakes_survive_a_flood_of_others() {
    raise_file_limit();
    let sandbox = Sandbox::default();
    let server = serve(&sandbox, &[]);
    let (socket, stop, opened) = (server.socket(), AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = VecDeque::new();
            while !stop.load(Relaxed) {
                held.extend(UnixStream::connect(&socket).ok());
                opened.fetch_add(1, Relaxed);
                if held.len() > 1500 {
                    held.pop_front();
                }
            }
        });
        let _stop = Stop(&stop);
        let start = Instant::now();
        for _ in 0..5 {
            let mut raw = Raw::connect(&socket);
            raw.take(18);
            std::thread::sleep(Duration::from_millis(500));
            raw.send(&3u32.to_be_bytes());
            std::thread::sleep(Duration::from_millis(500));
            raw.option(7, &go_data("disk"));
            while raw.option_reply().1 != 1 {}
            raw.send(&request(0, READ, 1, 0, 4096));
            assert_eq!(raw.simple_reply(), (1, 0));
        }
        let took = start.elapsed();
        let rate = opened.load(Relaxed) as f64 / took.as_secs_f64();
        eprintln!("{rate:.0} connections a second beside them; five slow clients took {took:?}");
        assert!(took < Duration::from_secs(5) + DELAY_MAX, "{took:?}");
    });
}
