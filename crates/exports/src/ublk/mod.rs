//! The ublk export: tags of a kernel block device's queue, served as requests on one reactor thread.
//!
//! The driver has a table of descriptors, one for each tag of each queue, and ends our command for a tag when a
//! request has come under it. The tag of the driver is the tag of our queue. When the request is done, one command
//! tells the driver so and waits for the next. All commands of a turn go to the kernel with whatever the stack asked
//! for, in one call.
//!
//! *Invariant:* of each tag exactly one of the driver, the stack and this front has something to do: its [`Stage`]
//! says who. So a command's end needs no more name than its tag.
//! *Invariant:* memory that was named to the driver stays until the driver has answered the command that named it.
//!
//! Not here: making devices and their life ([`::ublk`] and the engine), and which nodes a stack has.

mod batch;
mod driver;
mod lane;
mod mode;
mod modelled;
mod request;
#[cfg(test)]
mod tests;
mod tuples;

use crate::fronts::{Front as FrontOfTurn, Turn};
use ::ublk::Descriptors;
use batch::Batch;
use block::{Bytes, Integrity, Region};
pub use driver::{Batches, Driver, KernelBuffers, LaneMemory};
use lane::{Lane, Waiting};
pub use mode::{Choice, Circumstances, DataMode, NotPossible, UnknownMode};
pub use modelled::ModelRing;
use queue::{Done, FileId, QueueId, Queues};
use ring::{Event, Token};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// What others may know and change of a lane.
#[derive(Debug, Default)]
pub struct LaneShared {
    /// The device's size in bytes: nothing beyond it is let in.
    pub size: AtomicU64,
    /// Tags that the driver has not taken back.
    pub tags: AtomicU32,
    /// Requests whose data was in memory shared with their client.
    pub in_client_memory: AtomicU64,
    /// The first errno, positive, with which the driver refused a command; 0: it refused none.
    pub refused: AtomicI32,
}

/// A queue of a ublk device, or a part of one, that is to be served.
#[derive(Debug)]
pub struct LaneConfig {
    /// The hardware queue behind it. Its first `depth` tags are left to us.
    pub queue: QueueId,
    /// The character device, a file of this thread's ring.
    pub file: FileId,
    /// The descriptors of the queue.
    pub descriptors: Descriptors,
    /// Which queue of the device.
    pub q_id: u16,
    /// The driver's number for our first tag: 0, unless several threads share the queue.
    pub first_tag: u16,
    /// How many tags.
    pub depth: u16,
    /// The way of data.
    pub mode: DataMode,
    /// A read may be answered by memory of the stack's own.
    pub lends: bool,
    /// The most that a request moves; a multiple of the page size.
    pub io_max: Bytes,
    /// The device was made for commands about many tags at once. Then the lane has all tags of its queue.
    pub batch: bool,
    /// The driver knows ioctl-encoded commands.
    pub encoded: bool,
    /// The device has integrity data, of this shape. Then data comes by user copy.
    pub integrity: Option<Integrity>,
    /// Memory that clients share, if they do.
    pub client_memory: Option<ClientMemory>,
    /// What others see of it.
    pub shared: Arc<LaneShared>,
}

/// Memory that clients of a device have mapped, too. The stack must not look at data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientMemory {
    /// A region of this thread's ring, which closing the lane gives back.
    pub region: Region,
    /// How long it is, in bytes.
    pub len: u64,
    /// What the driver calls it.
    pub index: u16,
}

/// Why a queue cannot be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OpenLaneError {
    /// No address space for its buffers.
    #[error(
        "no address space for the buffers of its tags (raise `ulimit -v`, or give a smaller depth or request)"
    )]
    Memory,
    /// The ring has no table of buffers, or no room in it.
    #[error("the kernel has no room to register the buffers of its tags (choose the data mode copy)")]
    KernelBuffers,
}

/// The ublk queues of one reactor.
#[derive(Default)]
pub struct Front {
    /// By the number of the hardware queue.
    lanes: Vec<Option<Lane>>,
    /// Tags that wait for memory or room.
    waiting: Waiting,
    /// Queues with something to tell the driver at the end of the turn.
    telling: Vec<QueueId>,
}

impl Front {
    /// Serve a queue: fetch its tags.
    ///
    /// # Errors
    /// Nothing was begun then; the file and the clients' memory of the configuration are still the caller's.
    pub fn open_lane<D: Driver>(&mut self, config: LaneConfig, ring: &mut D) -> Result<(), OpenLaneError> {
        let index = usize::from(config.queue.0);
        let lane = Lane::open(config, ring)?;
        if self.lanes.len() <= index {
            self.lanes.resize_with(index + 1, || None);
        }
        self.lanes[index] = Some(lane);
        Ok(())
    }

    /// The device behind this queue changed: whether it lends memory now.
    pub fn refit_lane(&mut self, queue: QueueId, lends: bool) {
        if let Some(Some(lane)) = self.lanes.get_mut(usize::from(queue.0)) {
            lane.lend(lends);
        }
    }

    /// A command, or a copy, for one of our tags has ended.
    #[inline]
    pub fn ended<D: Driver>(&mut self, token: Token, result: i64, ring: &mut D, queues: &mut Queues<D>) {
        let Some(lane) = self.lanes.get_mut(usize::from(token.index)).and_then(Option::as_mut) else {
            return;
        };
        if Batch::is_command(token.number) {
            lane.batch_ended(token.number, result, ring);
        } else {
            lane.ended(token.number as u16, result, ring, queues, &mut self.waiting);
        }
        list(&mut self.telling, QueueId(token.index), lane);
    }

    /// A request that we submitted is over.
    #[inline]
    pub fn request_done<D: Driver>(
        &mut self,
        queue: QueueId,
        done: Done,
        ring: &mut D,
        queues: &mut Queues<D>,
    ) {
        let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else { return };
        let req = queues.get_mut(queue).request(done.tag);
        lane.done(done.tag.0, req, done.status, ring, &mut self.waiting);
        list(&mut self.telling, queue, lane);
    }

    /// The end of a turn: take up what waited for memory or room, and tell the driver what is done.
    pub fn take_up<D: Driver>(&mut self, ring: &mut D, queues: &mut Queues<D>) {
        for _ in 0..self.waiting.len() {
            let Some((queue, tag)) = self.waiting.pop_front() else { break };
            let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else {
                continue;
            };
            lane.take_up(tag, ring, queues, &mut self.waiting);
            list(&mut self.telling, queue, lane);
        }
        if !self.telling.is_empty() {
            self.tell(ring);
        }
    }

    /// Tell the driver of what is done, in batches.
    #[inline(never)]
    fn tell<D: Driver>(&mut self, ring: &mut D) {
        for queue in self.telling.drain(..) {
            if let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) {
                lane.is_listed = false;
                lane.flush(ring);
            }
        }
    }

    /// Whether [`take_up`](Front::take_up) may have something to do.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty() || !self.telling.is_empty()
    }

    /// Whether every tag is the driver's, or nobody's: no request has come that the driver was not told the end of.
    pub fn is_idle(&self) -> bool {
        self.lanes.iter().flatten().all(Lane::is_idle)
    }

    /// Whether the driver has not taken back all tags of the device behind this queue.
    pub fn has_tags(&self, queue: QueueId) -> bool {
        let lane = self.lanes.get(usize::from(queue.0)).and_then(Option::as_ref);
        lane.is_some_and(|lane| lane.live() > 0)
    }

    /// Have the driver give back its tags, as if we had died: the device fails or holds back what is asked for from
    /// then on. Those that have a request come back when that is done.
    pub fn withdraw<D: Driver>(&mut self, queue: QueueId, ring: &mut D) {
        if let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) {
            lane.withdraw(ring);
        }
    }

    /// Forget a queue of which the driver has taken back all tags. The file is given back.
    pub fn close<D: Driver>(&mut self, queue: QueueId, ring: &mut D) -> Option<FileId> {
        let lane = self.lanes.get_mut(usize::from(queue.0))?.take()?;
        debug_assert!(self.waiting.iter().all(|waiting| waiting.0 != queue), "{queue:?} has tags that wait");
        Some(lane.close(ring))
    }
}

/// Remember a lane that has something to tell. What it cannot tell yet, the end of its last telling brings up again.
#[inline]
fn list(telling: &mut Vec<QueueId>, queue: QueueId, lane: &mut Lane) {
    if lane.can_tell() && !lane.is_listed {
        lane.is_listed = true;
        telling.push(queue);
    }
}

impl FrontOfTurn for Front {
    #[inline]
    fn event(&mut self, event: Event, turn: &mut Turn<'_>) {
        if let Event::Ended { token, result } = event {
            self.ended(token, result, turn.ring, turn.queues);
        }
    }

    #[inline]
    fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>) {
        self.request_done(queue, done, turn.ring, turn.queues);
    }

    fn commit(&mut self, turn: &mut Turn<'_>) {
        if self.has_waiting() {
            self.take_up(turn.ring, turn.queues);
        }
    }

    fn is_dirty(&self) -> bool {
        self.has_waiting()
    }

    /// It is the driver that takes tags back, once the device is stopped. When that does not come about, they are
    /// withdrawn.
    fn close_lane(&mut self, queue: QueueId, now: bool, turn: &mut Turn<'_>) {
        if now {
            self.withdraw(queue, turn.ring);
        }
    }

    fn is_open(&self, queue: QueueId) -> bool {
        self.has_tags(queue)
    }

    fn drop_lane(&mut self, queue: QueueId, turn: &mut Turn<'_>) {
        if let Some(file) = self.close(queue, turn.ring) {
            turn.ring.remove_file(file);
        }
    }
}
