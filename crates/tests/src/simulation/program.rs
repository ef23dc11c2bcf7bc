//! Simulated driver programs, for the node of `exec:` devices: correct in their replies, random in their
//! timing, order and lifetime.
//!
//! All connections to one program share its disk, which a restart keeps. A connection is lost, falls silent
//! or sends an invalid reply at any time; the requests that the program has then are executed or not, and
//! none is executed after the connection was closed. Slots of the shared memory are read and written late,
//! and have garbage afterwards, so a slot that is reused too early, or not written again for a replay, loses
//! data.

use backends::exec::{Exec, ExecNode, ExecSpec, SLOT_LEN};
use backends::nbd::{Connected, ConnectionChannel, Connector, Loss, ServerTimeouts};
use block::{Bytes, Segment};
use proto::exec::{FUA, Features, NO_UNMAP, REPLY_LEN, REQUEST_LEN, Ready};
use queue::Ring as _;
use sim::{Peer, Rng, SimRing, SimStream};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Nodes that wait for a connection, with their shared memory.
type Waiting = Arc<Mutex<Vec<(Segment, Arc<ConnectionChannel<SimStream, ()>>)>>>;

/// The connector of one node.
struct NodeConnector(Segment, Waiting);

impl Connector<SimStream, ()> for NodeConnector {
    fn connect(&self, channel: Arc<ConnectionChannel<SimStream, ()>>, _: Loss) {
        self.1.lock().unwrap().push((self.0, channel));
    }
}

/// One program, and the device over it.
pub(super) struct Program {
    ready: Ready,
    exec: Exec,
    disk: Rc<RefCell<Vec<u8>>>,
    waiting: Waiting,
    /// The shared memory of each queue's node. Empty until it is plugged in.
    memories: Vec<Segment>,
    built: Cell<usize>,
    /// A connection fails at one of so many steps.
    trouble: u64,
    /// The host gives up a silent program.
    timed: bool,
    woken: Arc<AtomicBool>,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "program {:?}, trouble 1/{}, {:?}", self.ready, self.trouble, self.exec)
    }
}

impl Program {
    /// Draws a program of that size. `unreliable`: requests may fail for lack of a connection, or because the
    /// program loses its connection again and again.
    pub(super) fn random(rng: &mut Rng, size: Bytes, queues: u16, unreliable: bool) -> Program {
        let reconnect =
            if unreliable { Duration::from_millis(rng.below(50)) } else { Duration::from_secs(1 << 30) };
        let timeout = rng.chance(700).then(|| Duration::from_millis(rng.between(1000, 10_000)));
        let timeouts = ServerTimeouts { timeout, reconnect };
        let mut features = Features::from_bits_truncate(rng.below(128) as u32) - Features::READ_ONLY;
        features.set(Features::MULTI, features.contains(Features::MULTI) || queues > 1);
        let (transfer_max, depth_max) =
            (*rng.pick(&[4096, 12288, 65536, SLOT_LEN]), rng.between(1, 3) as u32);
        let ready = Ready { features, size: size.0, block: 512, transfer_max, depth_max };
        let spec = ExecSpec { command: "sim".to_owned(), timeouts, read_only: false };
        Program {
            ready,
            exec: Exec::new(spec, ready).expect("limits of a disk"),
            disk: Rc::new(RefCell::new(vec![0; size.0 as usize])),
            waiting: Arc::default(),
            memories: Vec::new(),
            built: Cell::new(0),
            trouble: if unreliable { *rng.pick(&[50, 300]) } else { *rng.pick(&[300, 2000, 1 << 40]) },
            timed: timeout.is_some(),
            woken: Arc::default(),
        }
    }

    /// Whether it refuses discards or write zeroes.
    pub(super) fn can_refuse(&self) -> bool {
        !self.ready.features.contains(Features::DISCARD | Features::WRITE_ZEROES)
    }

    /// Allocates the shared memory of the nodes, one of each queue.
    pub(super) fn plug(&mut self, queues: u16, ring: &mut SimRing) {
        let mut memory = || ring.allocate(self.ready.depth_max * SLOT_LEN);
        self.memories = (0..queues).map(|_| memory().expect("a ring without faults has memory")).collect();
    }

    /// Creates the next queue's node.
    pub(super) fn node(&self) -> ExecNode<SimStream> {
        let memory = self.memories[self.built.get() % self.memories.len()];
        self.built.set(self.built.get() + 1);
        let (woken, connector) = (self.woken.clone(), NodeConnector(memory, self.waiting.clone()));
        let waker = Arc::new(move || woken.store(true, Relaxed));
        let node = self.exec.node(memory.region.into(), waker, Arc::new(connector));
        node.expect("one node, or a program that takes several connections")
    }

    /// Delivers requested connections, at times. Returns whether nodes must check.
    pub(super) fn step(&mut self, rng: &mut Rng, ring: &mut SimRing) -> bool {
        let mut waiting = self.waiting.lock().unwrap();
        if !waiting.is_empty() && rng.chance(200) {
            let (memory, channel) = waiting.remove(0);
            if !channel.is_closed() {
                let served = Served {
                    ready: self.ready,
                    disk: self.disk.clone(),
                    memory,
                    rng: rng.fork(),
                    input: Vec::new(),
                    pending: Vec::new(),
                    open: true,
                    silent: false,
                    trouble: self.trouble,
                    timed: self.timed,
                };
                let connected = Connected { stream: ring.connect(Box::new(served)), session: () };
                assert!(channel.deliver(connected).is_ok(), "a node that has a connection asked for one");
            }
        }
        self.woken.swap(false, Relaxed)
    }
}

/// A request as the program reads it.
#[derive(Clone, Copy, Debug)]
struct Wire {
    tag: u64,
    operation: u16,
    flags: u16,
    len: usize,
    offset: usize,
    place: usize,
}

impl Wire {
    fn slot(&self) -> usize {
        self.place / SLOT_LEN as usize
    }
}

/// One connection, on the program's side.
struct Served {
    ready: Ready,
    disk: Rc<RefCell<Vec<u8>>>,
    memory: Segment,
    rng: Rng,
    input: Vec<u8>,
    pending: Vec<Wire>,
    open: bool,
    silent: bool,
    trouble: u64,
    /// The host gives up a silent program.
    timed: bool,
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "program with {} pending", self.pending.len())
    }
}

impl Served {
    /// Executes a request, and returns its reply. The slot of a write has garbage then.
    fn answer(&mut self, request: &Wire, shared: &mut [u8]) -> Vec<u8> {
        let mut disk = self.disk.borrow_mut();
        let blocks = &mut disk[request.offset..request.offset + request.len];
        match request.operation {
            0 => shared[request.place..request.place + request.len].copy_from_slice(blocks),
            1 => {
                let slot = &mut shared[request.place..request.place + request.len];
                blocks.copy_from_slice(slot);
                slot.fill(0xD5);
            }
            2 => {}
            _ => blocks.fill(0),
        }
        let mut reply = vec![0; REPLY_LEN];
        reply[..8].copy_from_slice(&request.tag.to_le_bytes());
        reply
    }

    /// Executes or drops the unanswered requests, for good.
    fn settle(&mut self, shared: &mut [u8]) {
        self.open = false;
        for request in std::mem::take(&mut self.pending) {
            if self.rng.chance(500) {
                self.answer(&request, shared);
            } else if request.operation < 2 {
                shared[request.place..request.place + request.len].fill(0xD6);
            }
        }
    }

    fn go_wrong(&mut self, shared: &mut [u8]) -> Vec<u8> {
        let last = self.pending.pop().map(|request| self.answer(&request, shared));
        match self.rng.below(4) {
            // The connection is cut within a reply.
            0 | 1 => {
                let mut sent = last.unwrap_or_default();
                sent.truncate(self.rng.below(sent.len() as u64 + 1) as usize);
                self.settle(shared);
                sent
            }
            2 if self.timed => {
                self.silent = true;
                Vec::new()
            }
            // A reply is sent twice, or is to no request.
            _ => {
                self.silent = true;
                last.unwrap_or_else(|| vec![0x5A; REPLY_LEN]).repeat(2)
            }
        }
    }

    fn check(&self, request: &Wire) {
        let Wire { operation, flags, len, offset, place, .. } = *request;
        let Ready { features, size, transfer_max, depth_max, .. } = self.ready;
        let needed = match operation {
            0 | 1 => Features::empty(),
            2 => Features::FLUSH,
            3 => Features::DISCARD,
            _ => Features::WRITE_ZEROES,
        };
        assert!(operation < 5 && features.contains(needed), "{request:?} to a program of {features:?}");
        let allowed = match operation {
            0 | 2 => 0,
            _ if !features.contains(Features::FUA) && operation < 4 => 0,
            4 if !features.contains(Features::FUA) => NO_UNMAP,
            4 => FUA | NO_UNMAP,
            _ => FUA,
        };
        assert!(flags & !allowed == 0, "{request:?} has flags that it must not have");
        assert!(offset % 512 == 0 && len % 512 == 0 && (len > 0) == (operation != 2), "{request:?}");
        assert!(offset + len <= size as usize, "{request:?} is past the end");
        let slots = depth_max as usize * SLOT_LEN as usize;
        assert!(operation > 1 || len <= transfer_max as usize && place + len <= slots, "{request:?}");
        assert!(self.pending.len() < depth_max as usize, "more requests than the program takes");
        let has_slot = |other: &Wire| other.operation < 2 && other.slot() == request.slot();
        assert!(operation > 1 || !self.pending.iter().any(has_slot), "{request:?} in a slot that is in use");
    }
}

impl Peer for Served {
    fn shared_memory(&self) -> Option<Segment> {
        Some(self.memory)
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
        while self.input.len() >= REQUEST_LEN {
            let bytes: Vec<u8> = self.input.drain(..REQUEST_LEN).collect();
            let number = |at: usize, len: usize| {
                bytes[at..at + len].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
            };
            let request = Wire {
                tag: number(0, 8),
                operation: number(8, 2) as u16,
                flags: number(10, 2) as u16,
                len: number(12, 4) as usize,
                offset: number(16, 8) as usize,
                place: number(24, 8) as usize,
            };
            self.check(&request);
            self.pending.push(request);
        }
    }

    fn step(&mut self, shared: &mut [u8]) -> Vec<u8> {
        if !self.open || self.silent {
            return Vec::new();
        }
        if self.rng.below(self.trouble) == 0 {
            return self.go_wrong(shared);
        }
        if self.pending.is_empty() || self.rng.chance(300) {
            return Vec::new();
        }
        let index = self.rng.below(self.pending.len() as u64) as usize;
        let request = self.pending.swap_remove(index);
        self.answer(&request, shared)
    }

    fn is_open(&self) -> bool {
        self.open
    }

    fn hang_up(&mut self, shared: &mut [u8]) {
        self.settle(shared);
    }
}
