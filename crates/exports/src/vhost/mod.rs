//! The vhost-user export: serves virtqueues of virtio block devices, on one reactor thread.
//!
//! A virtqueue is a lane: a hardware queue of its own, whose tags are requests that were popped. Guest memory
//! is registered with the ring, and the spans of a descriptor chain become the segments of a request, so a
//! backend that does not access data reads straight into the guest. All others get memory of ours, and the data
//! is copied once. Requests that complete in a turn are published with one store and at most one interrupt.
//!
//! While a queue is busy, the driver's kicks are suppressed and the queue is checked each turn; when it is empty
//! for longer than its [`PollBudget`](poll::PollBudget) allows, kicks are enabled, it is checked once more, and
//! the thread may sleep.
//!
//! *Invariant:* guest memory stays mapped while a request of the lane is in flight: a ring is taken down only
//! when all its requests have completed.
//! *Invariant:* a driver that violates the specification stops its own ring and nothing else.
//!
//! Not here: the messages that set rings up ([`proto::vhost_user`] and `attach`), and the layout of virtqueues
//! ([`virtio`]).

mod active;
mod lane;
mod poll;

use crate::facts::DeviceFacts;
use crate::fronts::{Front as FrontOfTurn, FrontNumber, Turn};
pub use active::{GuestRegionSetup, RingSetup, StartError};
use block::Bytes;
use lane::Lane;
use queue::{Done, QueueId};
use ring::{Event, Token};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use virtio::blk::{Config, Malformed};
use virtio::ring::RingError;

/// Most bytes of a request: what the largest block of the ring's arena holds.
pub const REQUEST_MAX: u64 = 32 << 20;
/// Most segments of a request, which are as many as one file operation takes.
pub const SEGMENTS_MAX: u16 = 64;
/// Most bytes that requests of a lane hold in memory of ours, unless a single one needs more.
const BOUNCE_MAX: u64 = 64 << 20;

/// State of a lane that other threads read.
#[derive(Default)]
pub struct LaneShared {
    /// The driver violated the specification, and the device needs a reset.
    pub is_broken: AtomicBool,
    /// Kicks that arrived.
    pub kicks: AtomicU64,
    /// Interrupts that were sent.
    pub interrupts: AtomicU64,
    /// Requests whose data was copied through memory of ours.
    pub copied: AtomicU64,
}

/// How a driver violated the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Broken {
    /// The ring or a descriptor chain is invalid.
    #[error(transparent)]
    Ring(RingError),
    /// A chain is no request.
    #[error(transparent)]
    Request(Malformed),
}

/// Notifies the control plane that a driver violated the specification. Called on the reactor's thread.
pub type Alarm = Arc<dyn Fn(Broken) + Send + Sync>;

/// Configuration of a lane.
pub struct LaneConfig {
    /// The hardware queue. Its first `depth` tags are reserved for the lane.
    pub queue: QueueId,
    /// Number of tags: most requests in flight.
    pub depth: u16,
    /// What the device guarantees.
    pub facts: DeviceFacts,
    /// Whether a write can be durable when it completes.
    pub fua: bool,
    /// Whether writes are durable only after a flush.
    pub has_write_cache: bool,
    /// Mask of the alignment that memory of requests needs.
    pub alignment_mask: u64,
    /// The configuration space, against which requests are checked.
    pub config: Config,
    /// The device's ID string, filled up with zeroes.
    pub id: [u8; virtio::blk::ID_LEN as usize],
    /// Longest time that the queue is polled when it is empty, in nanoseconds.
    pub poll_ns: u64,
    /// State shared with other threads.
    pub shared: Arc<LaneShared>,
    /// Called once when the driver violates the specification.
    pub alarm: Alarm,
}

/// Called when a ring was stopped, with the base at which it continues.
pub type Stopped = Box<dyn FnOnce(u32) + Send>;

/// The virtqueues of one reactor.
#[derive(Default)]
pub struct Front {
    /// Lanes by the number of their hardware queue.
    lanes: Vec<Option<Lane>>,
    /// Lanes with completions to publish, requests to look for, or a ring to take down.
    busy: Vec<QueueId>,
    /// The vector that is swapped with `busy`.
    spare: Vec<QueueId>,
}

impl Front {
    /// Adds a lane, without a ring.
    pub fn open_lane(&mut self, config: LaneConfig) {
        let index = usize::from(config.queue.0);
        if self.lanes.len() <= index {
            self.lanes.resize_with(index + 1, || None);
        }
        self.lanes[index] = Some(Lane::new(config));
    }

    fn lane(&mut self, queue: QueueId) -> Option<&mut Lane> {
        self.lanes.get_mut(usize::from(queue.0))?.as_mut()
    }

    /// Starts to serve a ring. The lane must have none.
    ///
    /// # Errors
    /// The ring is not in guest memory, or the thread's ring cannot refer to it; nothing is left behind.
    pub fn start(&mut self, queue: QueueId, setup: RingSetup, turn: &mut Turn<'_>) -> Result<(), StartError> {
        let lane = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut);
        let lane = lane.ok_or(StartError::Closed)?;
        lane.start(setup, turn)?;
        list(&mut self.busy, lane);
        Ok(())
    }

    /// Stops the lane's ring: no request is popped any more, and `stopped` is called when those in flight have
    /// completed. Without a ring it is dropped.
    pub fn stop(&mut self, queue: QueueId, stopped: Stopped, turn: &mut Turn<'_>) {
        if let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) {
            lane.stop(Some(stopped), turn);
            list(&mut self.busy, lane);
        }
    }

    /// Sends interrupts to another eventfd from now on, or to none.
    pub fn set_call(&mut self, queue: QueueId, call: Option<Arc<OwnedFd>>, turn: &mut Turn<'_>) {
        self.lane(queue).into_iter().for_each(|lane| lane.set_call(call.clone(), turn));
    }

    /// Sends errors to another eventfd from now on, or to none.
    pub fn set_err(&mut self, queue: QueueId, err: Option<Arc<OwnedFd>>, turn: &mut Turn<'_>) {
        self.lane(queue).into_iter().for_each(|lane| lane.set_err(err.clone(), turn));
    }

    /// Replaces the configuration space: the driver changed it, or the device has another size.
    pub fn set_config(&mut self, queue: QueueId, config: Config) {
        self.lane(queue).into_iter().for_each(|lane| lane.set_config(config));
    }

    /// Updates the facts about the device of this queue and its size.
    pub fn refit_lane(&mut self, queue: QueueId, facts: DeviceFacts, size: Bytes) {
        self.lane(queue).into_iter().for_each(|lane| lane.refit(facts, size));
    }

    /// Whether a queue has to be checked again without waiting for an event.
    pub fn has_work(&self) -> bool {
        !self.busy.is_empty()
    }
}

/// Records a lane that has work at the end of the turn.
fn list(busy: &mut Vec<QueueId>, lane: &mut Lane) {
    if !std::mem::replace(&mut lane.is_listed, true) {
        busy.push(lane.queue());
    }
}

/// The token of a watch on a lane's kicks. The generation distinguishes the watches of its rings.
fn token(queue: QueueId, generation: u32) -> Token {
    Token { front: FrontNumber::VhostUser as u8, index: queue.0, number: generation }
}

impl FrontOfTurn for Front {
    fn event(&mut self, event: Event, turn: &mut Turn<'_>) {
        let Event::Ended { token, result } = event else { return };
        let Some(lane) = self.lanes.get_mut(usize::from(token.index)).and_then(Option::as_mut) else {
            return;
        };
        if result >= 0 && lane.kicked(token.number, turn) {
            list(&mut self.busy, lane);
        }
    }

    #[inline]
    fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>) {
        let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else { return };
        lane.done(done, turn);
        list(&mut self.busy, lane);
    }

    fn commit(&mut self, turn: &mut Turn<'_>) {
        if self.busy.is_empty() {
            return;
        }
        std::mem::swap(&mut self.busy, &mut self.spare);
        for queue in self.spare.drain(..) {
            let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else {
                continue;
            };
            lane.is_listed = false;
            if lane.commit(turn) {
                list(&mut self.busy, lane);
            }
        }
    }

    fn is_dirty(&self) -> bool {
        self.has_work()
    }

    /// The ring is stopped as if the front-end had gone. `now` makes no difference: requests in flight refer to
    /// guest memory until they complete.
    fn close_lane(&mut self, queue: QueueId, _now: bool, turn: &mut Turn<'_>) {
        if let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) {
            lane.stop(None, turn);
            list(&mut self.busy, lane);
        }
    }

    fn is_open(&self, queue: QueueId) -> bool {
        let lane = self.lanes.get(usize::from(queue.0)).and_then(Option::as_ref);
        lane.is_some_and(Lane::is_active)
    }

    fn drop_lane(&mut self, queue: QueueId, _turn: &mut Turn<'_>) {
        if let Some(lane) = self.lanes.get_mut(usize::from(queue.0)) {
            debug_assert!(lane.as_ref().is_none_or(|lane| !lane.is_active()));
            *lane = None;
        }
    }
}
