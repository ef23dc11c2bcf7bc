//! Measures the server's CPU time per message: batches of 64-byte requests answered with 4 KiB each, on this
//! ring with both engines and on a minimal epoll loop.
//!
//! `cargo run --release -p blockyard-ring --example ping [rounds]`

#![forbid(unsafe_code)]

use block::Segment;
use blockyard_ring::{Choice, Event, KernelRing, RingConfig, Wait};
use queue::Ring;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use rustix::time::{ClockId, clock_gettime};
use std::io::{IoSlice, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const REQUEST: usize = 64;
const REPLY: usize = 4096;
const CONNECTIONS: usize = 4;

/// CPU time of this thread.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Sends a batch on each connection and reads the replies of each, `rounds` times.
fn drive(mut sockets: Vec<UnixStream>, rounds: usize, batch: usize) {
    let request = vec![1; REQUEST * batch];
    let mut reply = vec![0; REPLY * batch];
    for _ in 0..rounds {
        sockets.iter_mut().for_each(|socket| socket.write_all(&request).expect("the server takes requests"));
        sockets.iter_mut().for_each(|socket| socket.read_exact(&mut reply).expect("the server answers"));
    }
}

/// Serves with the ring until all peers have disconnected.
fn serve_ring(engine: Choice, sockets: Vec<UnixStream>) {
    let mut ring =
        KernelRing::new(RingConfig { engine, ..RingConfig::default() }).expect("the engine is available");
    let reply = ring.allocate(REPLY as u32).expect("4 KiB");
    let mut open = sockets.len();
    let mut have = [0; CONNECTIONS];
    let mut sending = [false; CONNECTIONS];
    let ids: Vec<_> =
        (0u32..).zip(sockets).map(|(n, fd)| ring.add_socket(fd.into(), n).expect("a socket")).collect();
    ids.iter().for_each(|id| ring.receive(*id));
    let mut list: Vec<Segment> = Vec::new();
    while open > 0 {
        ring.turn(Wait::UntilEvent).expect("a turn");
        ring.read_clock();
        while let Some(event) = ring.next_event() {
            match event {
                Event::Received { owner, segment, chunk, .. } => {
                    have[owner as usize] += segment.len as usize;
                    ring.give_back(chunk);
                }
                Event::Sent { owner, .. } => sending[owner as usize] = false,
                Event::ReceiveEnded { socket, .. } => ring.close(socket),
                Event::Closed { .. } => open -= 1,
                _ => {}
            }
        }
        for (n, id) in ids.iter().enumerate() {
            if have[n] >= REQUEST && !sending[n] {
                list.clear();
                list.resize((have[n] / REQUEST).min(1024), reply);
                have[n] -= list.len() * REQUEST;
                sending[n] = true;
                ring.send(*id, &list);
            }
        }
    }
}

/// Serves with a bare loop of `epoll_wait`, one `recv` and one `sendmsg`.
fn serve_epoll_loop(sockets: Vec<UnixStream>) {
    let mut room = vec![0u8; 64 << 10];
    let reply = vec![0u8; REPLY];
    let mut events = Vec::with_capacity(64);
    let mut have = [0; CONNECTIONS];
    let mut open = sockets.len();
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll set");
    for (n, fd) in (0u64..).zip(&sockets) {
        epoll::add(&set, fd, epoll::EventData::new_u64(n), epoll::EventFlags::IN).expect("a socket");
    }
    while open > 0 {
        events.clear();
        epoll::wait(&set, spare_capacity(&mut events), None).expect("events");
        for event in &events {
            let n = event.data.u64() as usize;
            let got = recv(&sockets[n], &mut room[..], RecvFlags::empty()).map_or(0, |(got, _)| got);
            if got == 0 {
                epoll::delete(&set, &sockets[n]).expect("a socket of the set");
                open -= 1;
                continue;
            }
            have[n] += got;
            let list = vec![IoSlice::new(&reply); have[n] / REQUEST];
            have[n] %= REQUEST;
            // The socket is blocking, so everything is sent.
            let mut no_control = SendAncillaryBuffer::default();
            sendmsg(&sockets[n], &list, &mut no_control, SendFlags::NOSIGNAL).expect("a peer that reads");
        }
    }
}

fn measure(name: &str, rounds: usize, batch: usize, serve: impl FnOnce(Vec<UnixStream>) + Send + 'static) {
    let (ours, theirs): (Vec<_>, Vec<_>) =
        (0..CONNECTIONS).map(|_| UnixStream::pair().expect("a socket pair")).unzip();
    let server = std::thread::spawn(move || {
        let before = cpu();
        serve(ours);
        cpu() - before
    });
    let start = Instant::now();
    drive(theirs, rounds, batch);
    let wall = start.elapsed();
    let used = server.join().expect("the server ends");
    let messages = (rounds * batch * CONNECTIONS) as f64;
    println!(
        "{name:9} batch {batch:3}: {:6.3} us CPU a message, {:8.0} messages/s",
        used.as_secs_f64() * 1e6 / messages,
        messages / wall.as_secs_f64()
    );
}

fn main() {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(20_000);
    for batch in [1, 4, 16, 32] {
        let rounds = rounds / batch;
        for _ in 0..3 {
            measure("io_uring", rounds, batch, |sockets| serve_ring(Choice::Uring, sockets));
            measure("epoll", rounds, batch, |sockets| serve_ring(Choice::Epoll, sockets));
            measure("plain", rounds, batch, serve_epoll_loop);
        }
    }
}
