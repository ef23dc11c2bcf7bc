//! Behaviour that both engines must have; each test runs on both. An unavailable engine is reported and
//! skipped.

mod files;
mod life;
mod sockets;

use crate::*;
use block::{Cookie, Segment, Tag};
use queue::{IoId, Nanos, QueueId, Ring};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Runs a test on both engines; on io_uring only where it is available.
fn on_both(config: RingConfig, test: impl Fn(KernelRing)) {
    for engine in [Choice::Epoll, Choice::Uring] {
        match KernelRing::new(RingConfig { engine, ..config.clone() }) {
            Ok(ring) => test(ring),
            Err(error) if engine == Choice::Uring => eprintln!("skipped on io_uring: {error}"),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Few and small chunks, so that they run out regularly.
fn tight() -> RingConfig {
    RingConfig { receive_buffers: 3, receive_buffer_len: 1024, ..RingConfig::default() }
}

/// The next event; waits at most a minute, because the machine may be busy.
#[track_caller]
fn next(ring: &mut KernelRing) -> Event {
    within(ring, Duration::from_secs(60)).expect("an event")
}

/// The next event, if one arrives within `time`.
fn within(ring: &mut KernelRing, time: Duration) -> Option<Event> {
    let guard = IoId { queue: QueueId(u16::MAX), cookie: Cookie { tag: Tag(0), generation: 0 } };
    let deadline = Instant::now() + time;
    ring.read_clock();
    ring.timer(guard, ring.now().after(time.as_nanos() as u64));
    loop {
        match ring.next_event() {
            Some(Event::Io { queue: QueueId(u16::MAX), .. }) => return None,
            Some(event) => {
                ring.cancel(guard);
                // The timer's event is among the others, which must keep their order.
                let mut others = Vec::new();
                while let Some(other) = ring.next_event() {
                    if !matches!(other, Event::Io { queue: QueueId(u16::MAX), .. }) {
                        others.push(other);
                    }
                }
                others.into_iter().rev().for_each(|other| ring.put_back(other));
                return Some(event);
            }
            None => {
                assert!(Instant::now() < deadline + Duration::from_secs(60), "the timer never came");
                ring.turn(Wait::UntilEvent).unwrap();
                ring.read_clock();
            }
        }
    }
}

fn id(generation: u32) -> IoId {
    IoId { queue: QueueId(7), cookie: Cookie { tag: Tag(513), generation } }
}

#[track_caller]
fn io_result(ring: &mut KernelRing, expected: IoId) -> i64 {
    match next(ring) {
        Event::Io { queue, cookie, result } => {
            assert_eq!((queue, cookie), (expected.queue, expected.cookie));
            result
        }
        other => panic!("{other:?}"),
    }
}

/// A socket of the ring, and its peer.
fn pair(ring: &mut KernelRing, owner: u32) -> (SocketId, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (ring.add_socket(OwnedFd::from(ours), owner).unwrap(), theirs)
}

fn filled(ring: &mut KernelRing, len: u32, with: impl Fn(usize) -> u8) -> Segment {
    let segment = ring.allocate(len).unwrap();
    ring.bytes_mut(segment).iter_mut().enumerate().for_each(|(at, byte)| *byte = with(at));
    segment
}

/// A pattern that reveals misplaced bytes.
fn pattern(at: usize) -> u8 {
    (at % 251) as u8 ^ (at / 251) as u8
}

/// CPU time of this thread.
fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid destination.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn later(ring: &mut KernelRing, ms: u64) -> Nanos {
    ring.read_clock().after(ms * 1_000_000)
}
