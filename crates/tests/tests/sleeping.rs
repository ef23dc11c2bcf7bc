//! I/O threads sleep while requests wait: for child requests, for the range lock of unaligned direct writes,
//! for a disk.

use blockyard_tests::disk::{Loop, missing_loop};
use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Engine, Sandbox};
use proto::nbd::{Command, Request};
use std::time::{Duration, Instant};

on_both_engines!(a_split_device_without_child_requests_sleeps);

/// Most turns of a second in which a few requests end. A thread that does not sleep takes a hundred thousand.
const TURNS_MAX: u64 = 2000;

/// Sends these requests, waits for all answers, and returns the time.
fn carry_out(peer: &mut Peer, requests: &[(Request, &[u8])]) -> Duration {
    let start = Instant::now();
    for (request, payload) in requests {
        peer.send(*request, payload);
    }
    for _ in requests {
        let answer = peer.receive();
        assert_eq!(answer.error, None);
    }
    start.elapsed()
}

fn a_split_device_without_child_requests_sleeps(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let more =
        ["--layer", "delay,write=400ms", "--limits", "max_sectors=8", "--queues", "1", "--depth", "16"];
    let server = sandbox.serve("ram:64M", &more);
    let mut peer = Peer::connect(&server.socket(), "disk");
    let before = sandbox.turns("disk");
    // The first uses all child requests, twice; the second waits for some.
    let data = vec![7; 512 << 10];
    let writes =
        [0, 1].map(|number| (Request::new(Command::Write, number, number << 20, 512 << 10), &data[..]));
    let took = carry_out(&mut peer, &writes);
    assert!(took >= Duration::from_millis(800), "the second found child requests: {took:?}");
    let turns = sandbox.turns("disk") - before;
    println!("{turns} turns in {took:?}");
    assert!(turns <= TURNS_MAX, "{turns} turns in {took:?}");
}

#[test]
fn threads_sleep_while_unaligned_direct_writes_wait() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let slow = ["--layer", "delay,read=200ms,write=200ms"];
    let mut disk = Loop::serve(&sandbox, "slow", "ram:16M", &slow);
    let stack = format!("file:{},direct=on", disk.path());
    let mut server = sandbox.serve(&stack, &["--queues", "2"]);
    let mut peers = [0, 1].map(|_| Peer::connect(&server.socket(), "disk"));
    let before = sandbox.turns("disk");
    let start = Instant::now();
    // Four sub-block writes to one block, through two threads: each reads the block and writes it back, which
    // takes 400 ms. The block is not the device's first, which is checked before it is written.
    std::thread::scope(|scope| {
        for (number, peer) in peers.iter_mut().enumerate() {
            scope.spawn(move || {
                let numbers = [0, 1].map(|index| number as u64 * 2 + index);
                let data = numbers.map(|number| [number as u8 + 1; 100]);
                let write = |at: usize| {
                    let request = Request::new(Command::Write, numbers[at], 4096 + 100 * numbers[at], 100);
                    (request, &data[at][..])
                };
                carry_out(peer, &[write(0), write(1)]);
            });
        }
    });
    let took = start.elapsed();
    let turns = sandbox.turns("disk") - before;
    println!("{turns} turns in {took:?}");
    assert!(took >= Duration::from_millis(1600), "they did not wait for each other: {took:?}");
    assert!(turns <= TURNS_MAX, "{turns} turns in {took:?}");
    let read = peers[0].read(4096, 400).expect("a read");
    for (index, part) in read.chunks(100).enumerate() {
        assert_eq!(part, [index as u8 + 1; 100], "part {index}");
    }
    peers.into_iter().for_each(Peer::disconnect);
    server.terminate();
    disk.server.terminate();
}
