//! The front-ends of one reactor, side by side: which of them an event or an ended request is for.
//!
//! A front-end that is asked about a queue that it does not serve does nothing: closing a device asks all of them.

use crate::{fuse, nbd, ublk};
use block::Bytes;
use queue::{Done, QueueId, Queues};
use ring::{Event, KernelRing};

/// The number of a front-end, in the owners of its requests and in its tokens. Below 15.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrontNumber {
    /// NBD connections.
    Nbd = 0,
    /// Queues of ublk devices.
    Ublk = 1,
    /// Devices shown as files.
    Fuse = 2,
}

const NBD: u8 = FrontNumber::Nbd as u8;
const UBLK: u8 = FrontNumber::Ublk as u8;
const FUSE: u8 = FrontNumber::Fuse as u8;

/// What a front-end works with during a turn.
pub struct Turn<'a> {
    /// The thread's ring.
    pub ring: &'a mut KernelRing,
    /// The thread's queues.
    pub queues: &'a mut Queues<KernelRing>,
}

/// What turns what hosts ask for into requests of a queue, and what ends there into answers, on one reactor.
pub trait Front {
    /// Something that the ring was asked for has come or ended.
    fn event(&mut self, event: Event, turn: &mut Turn<'_>);

    /// A request of its own has ended. The tag is the front-end's to release.
    fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>);

    /// The end of a batch: hand out what has gathered, and take up what waited for room.
    fn commit(&mut self, turn: &mut Turn<'_>);

    /// Whether [`commit`](Front::commit) has something left to do, so that the thread must not sleep.
    fn is_dirty(&self) -> bool;

    /// Take in nothing more for the device behind this queue. `now`: whatever it still owes its clients, let go of
    /// them; else what was taken in is answered first.
    fn close_lane(&mut self, queue: QueueId, now: bool, turn: &mut Turn<'_>);

    /// Whether clients of the device behind this queue are still there.
    fn is_open(&self, queue: QueueId) -> bool;

    /// The device behind this queue is gone; nobody was there any more.
    fn drop_lane(&mut self, queue: QueueId, turn: &mut Turn<'_>);
}

/// All of them.
#[derive(Default)]
pub struct Fronts {
    /// NBD connections.
    pub nbd: nbd::Front,
    /// Queues of ublk devices.
    pub ublk: ublk::Front,
    /// Devices shown as files.
    pub fuse: fuse::Front,
}

impl Fronts {
    fn all(&mut self) -> [&mut dyn Front; 3] {
        [&mut self.nbd, &mut self.ublk, &mut self.fuse]
    }

    /// Something has come or ended that is not a node's.
    ///
    /// # Panics
    /// When it is for a front-end that there is not: that is our own bug.
    pub fn event(&mut self, event: Event, turn: &mut Turn<'_>) {
        match event {
            Event::Ended { token, .. } => match token.front {
                UBLK => self.ublk.event(event, turn),
                FUSE => self.fuse.event(event, turn),
                other => unreachable!("no front-end has number {other}"),
            },
            socket => self.nbd.event(socket, turn),
        }
    }

    /// A request has ended.
    ///
    /// # Panics
    /// As [`event`](Fronts::event).
    pub fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>) {
        match done.owner.front() {
            FUSE => self.fuse.done(queue, done, turn),
            NBD => self.nbd.done(queue, done, turn),
            UBLK => self.ublk.done(queue, done, turn),
            other => unreachable!("no front-end has number {other}"),
        }
    }

    /// The end of a batch.
    pub fn commit(&mut self, turn: &mut Turn<'_>) {
        self.all().into_iter().for_each(|front| front.commit(turn));
    }

    /// Whether [`commit`](Fronts::commit) has something left to do.
    pub fn is_dirty(&self) -> bool {
        self.nbd.is_dirty() || self.ublk.is_dirty() || self.fuse.is_dirty()
    }

    /// See [`Front::close_lane`].
    pub fn close_lane(&mut self, queue: QueueId, now: bool, turn: &mut Turn<'_>) {
        self.all().into_iter().for_each(|front| front.close_lane(queue, now, turn));
    }

    /// Whether anybody is still there.
    pub fn is_open(&self, queue: QueueId) -> bool {
        self.nbd.is_open(queue) || self.ublk.is_open(queue) || self.fuse.is_open(queue)
    }

    /// The device behind this queue changed while its queue was frozen: what may be counted on, and its size.
    /// Of the size, front-ends whose clients cannot ask for more than the kernel knows of need not be told.
    pub fn refit_lane(&mut self, queue: QueueId, facts: nbd::DeviceFacts, size: Bytes) {
        self.nbd.refit_lane(queue, facts, size);
        self.ublk.refit_lane(queue, facts.lends);
        self.fuse.refit_lane(queue, facts.lends);
    }

    /// See [`Front::drop_lane`].
    pub fn drop_lane(&mut self, queue: QueueId, turn: &mut Turn<'_>) {
        self.all().into_iter().for_each(|front| front.drop_lane(queue, turn));
    }
}
