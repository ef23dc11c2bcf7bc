//! The target of the simulation: the real front-end on a ring of the simulation's thread, and a disk that
//! completes requests when the simulation decides.

use super::SessionFault;
use super::model::{BLOCK, BLOCKS, Shared};
use block::{Cookie, Data, Op, Request, Status};
use exports::iscsi::{
    ConnectionSetup, Front, Limits, LunSetup, SessionCounters, SessionId, SessionSetup, Wake,
};
use exports::{DeviceFacts, Front as _, Turn};
use proto::iscsi::parameters::{ConnectionParameters, Parameters};
use queue::{Cx, Node, Queue, QueueConfig, QueueId, Queues, RangeLock, Ring as _, Stack, Verdict};
use ring::{Choice, Event, KernelRing, RingConfig, Wait};
use scsi::{Access, Attributes, Identity, LogicalUnit, Lun, Media, NexusLoss, NexusName};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// Turns after which a target that still has work counts as stuck.
const TURNS_MAX: u32 = 10_000;

/// The disk below the logical unit.
struct Disk {
    shared: Arc<Mutex<Shared>>,
    fault: Option<SessionFault>,
}

impl Node<KernelRing> for Disk {
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        let mut shared = self.shared.lock().expect("no panic");
        if shared.holds {
            shared.held.push(io);
            return Verdict::Held;
        }
        drop(shared);
        self.perform(req, cx)
    }

    fn reap(&mut self, _: Cookie, req: &mut Request, _: i64, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        self.perform(req, cx)
    }
}

impl Disk {
    fn perform(&self, req: &Request, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        let mut shared = self.shared.lock().expect("no panic");
        let at = req.offset.0 as usize / BLOCK;
        match (req.op, req.data) {
            (Op::Read, Data::One(segment)) => {
                let bytes = cx.ring.bytes_mut(segment);
                bytes[..req.len.0 as usize].copy_from_slice(&shared.content(at, req.len.0 as usize));
            }
            (Op::Write, Data::One(segment)) => {
                let bytes = cx.ring.bytes(segment)[..req.len.0 as usize].to_vec();
                match self.fault {
                    Some(SessionFault::LostWrite) if shared.is_fault_due() => {}
                    // The data is written after the end of its command, and possibly of its session.
                    Some(SessionFault::LateWrite) if shared.is_fault_due() => shared.late.push((at, bytes)),
                    _ => shared.apply(at, &bytes),
                }
            }
            _ => {}
        }
        Verdict::Up(Status::Ok)
    }
}

/// A session at the target.
pub(super) struct Opened {
    pub(super) id: SessionId,
    pub(super) is_gone: Arc<AtomicBool>,
    nexus: Arc<scsi::Nexus>,
}

/// Negotiated parameters of all sessions of a run.
#[derive(Clone, Copy)]
pub(super) struct Agreed {
    pub(super) parameters: Parameters,
    pub(super) connection: ConnectionParameters,
    pub(super) depth: u16,
}

pub(super) struct Target {
    ring: KernelRing,
    queues: Queues<KernelRing>,
    front: Front,
    queue: QueueId,
    has_mail: Arc<AtomicBool>,
    unit: Arc<LogicalUnit>,
    exchange: Arc<exports::iscsi::Exchange>,
    fault: Option<SessionFault>,
}

impl Target {
    pub(super) fn new(
        shared: Arc<Mutex<Shared>>,
        depth: u16,
        memory: u64,
        fault: Option<SessionFault>,
    ) -> Target {
        // With epoll, the events of a turn depend only on earlier calls, so runs can be replayed.
        let config = RingConfig { engine: Choice::Epoll, ..RingConfig::default() };
        let ring = KernelRing::new(config).expect("a ring");
        let (mut queues, mut front) = (Queues::default(), Front::default());
        let queue = queues.vacant();
        let mut stack = Stack::default();
        stack.backend(Box::new(Disk { shared, fault }));
        let config = QueueConfig { id: queue, depth, segments_per_tag: 4, timeout_ns: None };
        let mut own = Queue::new(config, stack).expect("a queue");
        own.guard(&Arc::new(RangeLock::default()));
        queues.insert(own);
        let facts = DeviceFacts {
            zero_copy_reads: false,
            allows_zero_copy: false,
            inline: false,
            sparse: false,
            opaque: false,
            compare_and_write: false,
        };
        front.add_queue(queue, facts, Arc::default());
        let has_mail = Arc::new(AtomicBool::new(false));
        let flag = has_mail.clone();
        let wake: Wake = Arc::new(move || flag.store(true, SeqCst));
        front.limit(Limits { memory, stall: None }, Some(Box::new(|_| {})), Some(wake));
        let identity = Identity::new("BLKYARD", "disk", "1", "0123456789abcdef");
        let unit = LogicalUnit::new(identity, Media::new(BLOCKS as u64, BLOCK as u32), Attributes::default());
        Target { ring, queues, front, queue, has_mail, unit, exchange: Arc::default(), fault }
    }

    /// Opens a session of an initiator, as a login does after the one before has ended.
    pub(super) fn open(&mut self, initiator: usize, agreed: &Agreed, exp_cmd_sn: u32) -> Opened {
        let name = NexusName {
            initiator: format!("iqn.2026-11.example:host{initiator}"),
            isid: [0, 2, 0x3D, 0, 0, initiator as u8],
            target: "iqn.2026-11.example:disk".to_owned(),
            portal_group: 1,
            relative_port: 1,
        };
        let nexus = self.unit.attach_nexus(name, Lun::new(0), Access::ReadWrite);
        let is_gone = Arc::new(AtomicBool::new(false));
        let gone = is_gone.clone();
        let wider = u16::from(self.fault == Some(SessionFault::WideWindow));
        let setup = SessionSetup {
            number: 1,
            target: "iqn.2026-11.example:disk".to_owned(),
            parameters: agreed.parameters,
            luns: vec![LunSetup { lun: Lun::new(0), queue: self.queue, nexus: nexus.clone() }],
            exp_cmd_sn,
            queue_depth: agreed.depth + wider,
            send_targets: Arc::new(|_| None),
            pings: None,
            exchange: self.exchange.clone(),
            counters: Arc::<SessionCounters>::default(),
            when_gone: Some(Box::new(move |_| gone.store(true, SeqCst))),
        };
        Opened { id: self.front.open_session(setup), is_gone, nexus }
    }

    /// Adds a connection; returns the initiator's end. `None`: the session is ending.
    pub(super) fn connect(&mut self, session: SessionId, cid: u16, agreed: &Agreed) -> Option<UnixStream> {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        ours.set_nonblocking(true).expect("a socket");
        let setup = ConnectionSetup { cid, parameters: agreed.connection, stat_sn: 1, when_gone: None };
        let mut turn = Turn { ring: &mut self.ring, queues: &mut self.queues };
        self.front.adopt(session, OwnedFd::from(theirs), setup, &[], &mut turn).ok().map(|_| ours)
    }

    pub(super) fn end(&mut self, session: SessionId) {
        let mut turn = Turn { ring: &mut self.ring, queues: &mut self.queues };
        self.front.end_session(session, exports::iscsi::EndReason::Reinstated, &mut turn);
    }

    /// Removes the I_T nexus of a session that has ended.
    pub(super) fn forget(&mut self, session: &Opened) {
        self.unit.detach_nexus(&session.nexus, NexusLoss::Loss);
    }

    /// Completes a request that the disk holds.
    pub(super) fn complete(&mut self, io: Cookie) {
        self.queues.touch(self.queue).complete(io, 0, &mut self.ring);
    }

    /// Runs turns until the target is idle without further input.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        let (mut idle, mut finished, mut done) = (0, Vec::new(), Vec::new());
        for _ in 0..TURNS_MAX {
            self.ring.turn(Wait::No).map_err(|why| why.to_string())?;
            self.ring.read_clock();
            let mut is_busy = self.queues.any_touched() || self.front.is_dirty();
            while let Some(event) = self.ring.next_event() {
                is_busy = true;
                match event {
                    Event::Io { queue, cookie, result } => {
                        self.queues.touch(queue).complete(cookie, result, &mut self.ring)
                    }
                    Event::Woken => {}
                    event => {
                        self.front.event(event, &mut Turn { ring: &mut self.ring, queues: &mut self.queues })
                    }
                }
            }
            if self.has_mail.swap(false, SeqCst) {
                is_busy = true;
                self.front.woken(&mut Turn { ring: &mut self.ring, queues: &mut self.queues });
            }
            self.queues.turn(&mut self.ring, &mut finished);
            for &id in &finished {
                let queue = self.queues.get_mut(id);
                queue.account(self.ring.read_clock());
                queue.swap_done(&mut done);
                for end in done.drain(..) {
                    is_busy = true;
                    self.front.done(id, end, &mut Turn { ring: &mut self.ring, queues: &mut self.queues });
                }
            }
            self.front.commit(&mut Turn { ring: &mut self.ring, queues: &mut self.queues });
            idle = if is_busy { 0 } else { idle + 1 };
            // A socket that was written to is reported by the turn after the next.
            if idle >= 3 {
                return Ok(());
            }
        }
        Err("the target does not come to rest".to_owned())
    }
}
