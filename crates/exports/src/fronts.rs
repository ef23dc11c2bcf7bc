//! The front-ends of one reactor, and the dispatch of events and completed requests to them.
//!
//! A front-end ignores calls about a queue that it does not serve: closing a device calls all front-ends.

use crate::facts::DeviceFacts;
use crate::{fuse, iscsi, nbd, ublk, vhost};
use block::Bytes;
use queue::{Done, Owner, QueueId, Queues};
use ring::{Event, KernelRing};

/// Number of a front-end, used in the owners of its requests and in its tokens. Always below 15.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrontNumber {
    /// NBD connections.
    Nbd = 0,
    /// Queues of ublk devices.
    Ublk = 1,
    /// Devices exported as FUSE files.
    Fuse = 2,
    /// iSCSI sessions. The owner of a connection's socket uses this number, too.
    Iscsi = 3,
    /// Virtqueues of vhost-user devices.
    VhostUser = 4,
}

const NBD: u8 = FrontNumber::Nbd as u8;
const UBLK: u8 = FrontNumber::Ublk as u8;
const FUSE: u8 = FrontNumber::Fuse as u8;
const ISCSI: u8 = FrontNumber::Iscsi as u8;
const VHOST_USER: u8 = FrontNumber::VhostUser as u8;

/// The thread's resources, passed to a front-end for one turn (one iteration of the reactor loop).
pub struct Turn<'a> {
    /// The thread's ring.
    pub ring: &'a mut KernelRing,
    /// The thread's queues.
    pub queues: &'a mut Queues<KernelRing>,
}

/// A front-end of a reactor: turns requests of hosts into requests of a queue, and completions into replies.
pub trait Front {
    /// Handles an event of the ring for this front-end.
    fn event(&mut self, event: Event, turn: &mut Turn<'_>);

    /// Handles the completion of one of the front-end's requests. The front-end must release the tag.
    fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>);

    /// Ends a batch: sends the gathered replies, and continues requests that waited for memory, tags or
    /// space in the ring.
    fn commit(&mut self, turn: &mut Turn<'_>);

    /// Returns whether [`commit`](Front::commit) has work left, so that the thread must not sleep.
    fn is_dirty(&self) -> bool;

    /// Accepts no more requests for the device of this queue. With `now`, disconnects its clients without
    /// replies; otherwise answers the requests accepted before.
    fn close_queue(&mut self, queue: QueueId, now: bool, turn: &mut Turn<'_>);

    /// Returns whether the device of this queue still has clients.
    fn is_open(&self, queue: QueueId) -> bool;

    /// Removes the device of this queue, which must have no clients.
    fn remove_queue(&mut self, queue: QueueId, turn: &mut Turn<'_>);
}

/// All front-ends of a reactor.
#[derive(Default)]
pub struct Fronts {
    /// NBD connections.
    pub nbd: nbd::Front,
    /// Queues of ublk devices.
    pub ublk: ublk::Front,
    /// Devices exported as FUSE files.
    pub fuse: fuse::Front,
    /// iSCSI sessions.
    pub iscsi: iscsi::Front,
    /// Virtqueues of vhost-user devices.
    pub vhost: vhost::Front,
}

impl Fronts {
    fn all(&mut self) -> [&mut dyn Front; 5] {
        [&mut self.nbd, &mut self.ublk, &mut self.fuse, &mut self.iscsi, &mut self.vhost]
    }

    /// Dispatches an event that is not for a node.
    ///
    /// # Panics
    /// If the front-end does not exist, which is a bug.
    pub fn event(&mut self, event: Event, turn: &mut Turn<'_>) {
        match event {
            Event::Ended { token, .. } => match token.front {
                UBLK => self.ublk.event(event, turn),
                FUSE => self.fuse.event(event, turn),
                VHOST_USER => self.vhost.event(event, turn),
                other => unreachable!("no front-end has number {other}"),
            },
            Event::Received { owner, .. }
            | Event::ReceiveEnded { owner, .. }
            | Event::Filled { owner, .. }
            | Event::Sent { owner, .. }
            | Event::Closed { owner, .. } => match Owner(owner).front() {
                NBD => self.nbd.event(event, turn),
                ISCSI => self.iscsi.event(event, turn),
                other => unreachable!("no front-end with sockets has number {other}"),
            },
            Event::Io { .. } | Event::Woken => unreachable!("{event:?} is the reactor's"),
        }
    }

    /// Dispatches a completed request.
    ///
    /// # Panics
    /// See [`event`](Fronts::event).
    pub fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>) {
        match done.owner.front() {
            FUSE => self.fuse.done(queue, done, turn),
            ISCSI => self.iscsi.done(queue, done, turn),
            NBD => self.nbd.done(queue, done, turn),
            VHOST_USER => self.vhost.done(queue, done, turn),
            UBLK => self.ublk.done(queue, done, turn),
            other => unreachable!("no front-end has number {other}"),
        }
    }

    /// Calls [`Front::commit`] of all front-ends.
    pub fn commit(&mut self, turn: &mut Turn<'_>) {
        self.all().into_iter().for_each(|front| front.commit(turn));
    }

    /// Returns whether [`commit`](Fronts::commit) has work left.
    pub fn is_dirty(&self) -> bool {
        self.nbd.is_dirty()
            || self.ublk.is_dirty()
            || self.fuse.is_dirty()
            || self.iscsi.is_dirty()
            || self.vhost.is_dirty()
    }

    /// See [`Front::close_queue`].
    pub fn close_queue(&mut self, queue: QueueId, now: bool, turn: &mut Turn<'_>) {
        self.all().into_iter().for_each(|front| front.close_queue(queue, now, turn));
    }

    /// Returns whether the device of this queue still has clients.
    pub fn is_open(&self, queue: QueueId) -> bool {
        self.nbd.is_open(queue)
            || self.ublk.is_open(queue)
            || self.fuse.is_open(queue)
            || self.iscsi.is_open(queue)
            || self.vhost.is_open(queue)
    }

    /// Updates the facts about the device of this queue and its size after it was reconfigured, while the
    /// queue is frozen. ublk and FUSE ignore the size: the kernel checks requests against its own.
    pub fn update_queue(&mut self, queue: QueueId, facts: DeviceFacts, size: Bytes) {
        self.nbd.update_queue(queue, facts, size);
        self.ublk.update_queue(queue, facts.zero_copy_reads);
        self.fuse.update_queue(queue, facts.zero_copy_reads);
        self.iscsi.update_queue(queue, facts);
        self.vhost.update_queue(queue, facts, size);
    }

    /// See [`Front::remove_queue`].
    pub fn remove_queue(&mut self, queue: QueueId, turn: &mut Turn<'_>) {
        self.all().into_iter().for_each(|front| front.remove_queue(queue, turn));
    }
}
