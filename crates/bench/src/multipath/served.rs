//! A server of the harness's own: a subject's stack behind the NBD export, on a number of reactors.
//!
//! The program has no multipath with a lock, so this process puts that variant behind the same export, ring
//! and queues; it also serves the stacks without a lock, for comparison. The harness starts the process and
//! ends it by a signal. It serves one export under any name, and distributes connections over its reactors
//! in turn.

use super::stacks::{Shared, Subject};
use backends::ZeroPages;
use exports::Turn;
use exports::nbd::{DeviceFacts, Front};
use proto::nbd::server::{Config, Found, Handshake, Step};
use proto::nbd::{ExportId, ExportInfo, Session};
use queue::{Queue, QueueConfig, Queues};
use ring::{Event, KernelRing, RingConfig, Wait, Waker};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Depth of each queue.
const DEPTH: u16 = 128;
/// Default size of a null device.
const SIZE: u64 = 250 << 30;

/// A connection after its handshake.
struct Newcomer {
    fd: OwnedFd,
    session: Session,
    leftover: Vec<u8>,
}

/// Serves a subject on a socket with a number of reactors, until the process ends.
pub(super) fn serve(subject: Subject, reactors: u16, socket: &Path) -> io::Result<()> {
    let shared = Shared::new::<KernelRing>(subject, reactors, DEPTH);
    let mut inboxes: Vec<(Sender<Newcomer>, Waker)> = Vec::new();
    for number in 0..reactors {
        let (mail, inbox) = channel();
        let (ready, is_ready) = channel();
        let shared = shared.clone();
        std::thread::spawn(move || {
            let ring = KernelRing::new(RingConfig::default()).expect("a ring");
            ready.send(ring.waker()).expect("the starting thread waits for it");
            Reactor::new(ring, &shared, number).run(&inbox);
        });
        inboxes.push((mail, is_ready.recv().map_err(io::Error::other)?));
    }
    let listener = UnixListener::bind(socket)?;
    for number in 0.. {
        let (stream, _) = listener.accept()?;
        // A client that only checked whether the server listens has disconnected.
        let Ok(Some(newcomer)) = greet(stream) else { continue };
        let (mail, waker) = &inboxes[number % inboxes.len()];
        mail.send(newcomer).map_err(io::Error::other)?;
        waker.wake();
    }
    Ok(())
}

/// Serves the handshake. Returns `None` if the client left.
fn greet(mut stream: UnixStream) -> io::Result<Option<Newcomer>> {
    let found = Found { id: ExportId(0), name: "bench".to_owned(), info: ExportInfo::new(SIZE) };
    let (exports, mut handshake) = (vec![found], Handshake::new(Config::default()));
    let mut leftover: Vec<u8> = Vec::new();
    loop {
        stream.write_all(&std::mem::take(handshake.output()))?;
        match handshake.poll() {
            Step::Ready(session) => return Ok(Some(Newcomer { fd: stream.into(), session, leftover })),
            Step::StartTls | Step::Closed(_) => return Ok(None),
            Step::NeedInput => {}
        }
        let used = handshake.input(&leftover, &exports);
        leftover.drain(..used);
        if handshake.output().is_empty() && handshake.poll() == Step::NeedInput {
            let mut bytes = [0; 4096];
            match stream.read(&mut bytes)? {
                0 => return Ok(None),
                got => leftover.extend_from_slice(&bytes[..got]),
            }
        }
    }
}

struct Reactor {
    ring: KernelRing,
    queues: Queues<KernelRing>,
    front: Front,
}

impl Reactor {
    fn new(mut ring: KernelRing, shared: &Shared, number: u16) -> Reactor {
        let pages = Arc::new(ZeroPages::new().expect("memory"));
        let zeroes = ring.add_foreign(pages.memory());
        let mut queues = Queues::default();
        let id = queues.vacant();
        let config = QueueConfig { id, depth: DEPTH, segments_per_tag: 4, timeout_ns: None };
        let stack = shared.stack(number, DEPTH, Some(zeroes));
        queues.insert(Queue::new(config, stack).expect("a stack that fits"));
        let mut front = Front::default();
        let facts = DeviceFacts {
            zero_copy_reads: true,
            allows_zero_copy: true,
            inline: false,
            sparse: false,
            opaque: false,
            compare_and_write: false,
        };
        front.add_queue(id, DEPTH, facts, Arc::default());
        Reactor { ring, queues, front }
    }

    /// Runs like a reactor of the program, with one front-end and one queue.
    fn run(mut self, inbox: &Receiver<Newcomer>) {
        use exports::Front as _;
        let (mut finished, mut done) = (Vec::new(), Vec::new());
        loop {
            let more = self.queues.any_touched() || self.front.is_dirty();
            self.ring.turn(if more { Wait::No } else { Wait::UntilEvent }).expect("the ring works");
            self.ring.read_clock();
            let mut has_mail = false;
            while let Some(event) = self.ring.next_event() {
                match event {
                    Event::Io { queue, cookie, result } => {
                        self.queues.touch(queue).complete(cookie, result, &mut self.ring);
                    }
                    Event::Woken => has_mail = true,
                    event => {
                        self.front.event(event, &mut Turn { ring: &mut self.ring, queues: &mut self.queues });
                    }
                }
            }
            while has_mail && let Ok(Newcomer { fd, session, leftover }) = inbox.try_recv() {
                let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
                self.front.adopt(fd, session, queue::QueueId(0), &leftover, turn).expect("a socket");
            }
            self.queues.turn(&mut self.ring, &mut finished);
            if !finished.is_empty() {
                let now = self.ring.read_clock();
                for &id in &finished {
                    let queue = self.queues.get_mut(id);
                    queue.account(now);
                    queue.swap_done(&mut done);
                    for end in done.drain(..) {
                        let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
                        self.front.done(id, end, turn);
                    }
                }
            }
            self.front.commit(&mut Turn { ring: &mut self.ring, queues: &mut self.queues });
        }
    }
}
