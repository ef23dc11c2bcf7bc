//! The vhost-user export: serves virtqueues of virtio block devices, on one reactor thread.
//!
//! A virtqueue is served by a hardware queue whose tags identify the requests that were popped. Guest memory
//! is registered with the ring, and the spans of a descriptor chain become the segments of a request, so a
//! backend that does not access data reads directly into the guest. All other backends get bounce buffers,
//! and the data is copied once. Requests that complete in a turn are published with one store and at most one
//! interrupt.
//!
//! While a queue is busy, the driver's kicks are suppressed and the queue is checked each turn. When it has
//! been empty for longer than its [`PollBudget`](poll::PollBudget) allows, kicks are enabled, the queue is
//! checked once more, and the thread may sleep.
//!
//! *Invariant:* guest memory stays mapped while a request of the virtqueue is in flight: a ring is torn down
//! only when all of its requests have completed.
//! *Invariant:* a driver that violates the specification stops only its own ring.
//!
//! Not here: the messages that set rings up ([`proto::vhost_user`] and `attach`), and the layout of
//! virtqueues ([`virtio`]).

mod active;
mod poll;
mod virtqueue;
mod zones;

use crate::facts::DeviceFacts;
use crate::fronts::{Front as FrontOfTurn, FrontNumber, Turn};
pub use active::{GuestRegionSetup, RingSetup, StartError};
use block::Bytes;
use queue::{Done, QueueId};
use ring::{Event, Token};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use virtio::blk::{Config, Malformed};
use virtio::ring::RingError;
use virtqueue::Virtqueue;

/// Largest request in bytes: the largest block of the ring's arena.
pub const REQUEST_MAX: u64 = 32 << 20;
/// Maximum number of segments of a request: as many as one file operation takes.
pub const SEGMENTS_MAX: u16 = 64;
/// Maximum bytes of bounce buffers that requests of a virtqueue hold, unless a single request needs more.
const BOUNCE_MAX: u64 = 64 << 20;

/// State of a virtqueue that other threads read.
#[derive(Default)]
pub struct VirtqueueShared {
    /// Whether the driver violated the specification, so that the device needs a reset.
    pub is_broken: AtomicBool,
    /// Number of kicks received.
    pub kicks: AtomicU64,
    /// Number of interrupts sent.
    pub interrupts: AtomicU64,
    /// Requests whose data user space copied to or from guest memory.
    pub copied: AtomicU64,
}

/// Violations of the specification by a driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Broken {
    /// The ring or a descriptor chain is invalid.
    #[error(transparent)]
    Ring(RingError),
    /// A chain is not a valid request.
    #[error(transparent)]
    Request(Malformed),
}

/// Notifies the control plane that a driver violated the specification. Called on the reactor's thread.
pub type Alarm = Arc<dyn Fn(Broken) + Send + Sync>;

/// Configuration of a virtqueue.
pub struct VirtqueueConfig {
    /// The hardware queue. Its first `depth` tags are reserved for the virtqueue.
    pub queue: QueueId,
    /// Number of tags: the maximum number of requests in flight.
    pub depth: u16,
    /// Properties of the device.
    pub facts: DeviceFacts,
    /// Whether a write can be durable when it completes.
    pub fua: bool,
    /// Whether writes are durable only after a flush.
    pub has_write_cache: bool,
    /// Mask of the alignment that memory of requests requires.
    pub alignment_mask: u64,
    /// The configuration space, against which requests are checked.
    pub config: Config,
    /// The device's ID string, padded with zeroes.
    pub id: [u8; virtio::blk::ID_LEN as usize],
    /// Longest time for which an empty queue is polled, in nanoseconds.
    pub poll_ns: u64,
    /// State shared with other threads.
    pub shared: Arc<VirtqueueShared>,
    /// Called once when the driver violates the specification.
    pub alarm: Alarm,
}

/// Called when a ring has stopped, with the base at which it continues.
pub type Stopped = Box<dyn FnOnce(u32) + Send>;

/// The virtqueues of one reactor.
#[derive(Default)]
pub struct Front {
    /// Virtqueues by the number of their hardware queue.
    virtqueues: Vec<Option<Virtqueue>>,
    /// Virtqueues with completions to publish, requests to check for, or a ring to tear down.
    busy: Vec<QueueId>,
    /// The vector that is swapped with `busy`.
    spare: Vec<QueueId>,
}

impl Front {
    /// Adds a virtqueue, without a ring.
    pub fn add_queue(&mut self, config: VirtqueueConfig) {
        let index = usize::from(config.queue.0);
        if self.virtqueues.len() <= index {
            self.virtqueues.resize_with(index + 1, || None);
        }
        self.virtqueues[index] = Some(Virtqueue::new(config));
    }

    fn virtqueue(&mut self, queue: QueueId) -> Option<&mut Virtqueue> {
        self.virtqueues.get_mut(usize::from(queue.0))?.as_mut()
    }

    /// Starts to serve a ring. The virtqueue must not have one.
    ///
    /// # Errors
    /// The ring is not in guest memory, or the thread's ring cannot refer to it; everything is undone.
    pub fn start(&mut self, queue: QueueId, setup: RingSetup, turn: &mut Turn<'_>) -> Result<(), StartError> {
        let virtqueue = self.virtqueues.get_mut(usize::from(queue.0)).and_then(Option::as_mut);
        let virtqueue = virtqueue.ok_or(StartError::Closed)?;
        virtqueue.start(setup, turn)?;
        list(&mut self.busy, virtqueue);
        Ok(())
    }

    /// Stops the virtqueue's ring: no more requests are popped, and `stopped` is called when those in flight
    /// have completed. If the virtqueue has no ring, `stopped` is dropped.
    pub fn stop(&mut self, queue: QueueId, stopped: Stopped, turn: &mut Turn<'_>) {
        if let Some(virtqueue) = self.virtqueues.get_mut(usize::from(queue.0)).and_then(Option::as_mut) {
            virtqueue.stop(Some(stopped), turn);
            list(&mut self.busy, virtqueue);
        }
    }

    /// Sends interrupts to another eventfd, or to none, from now on.
    pub fn set_call(&mut self, queue: QueueId, call: Option<Arc<OwnedFd>>, turn: &mut Turn<'_>) {
        self.virtqueue(queue).into_iter().for_each(|virtqueue| virtqueue.set_call(call.clone(), turn));
    }

    /// Reports errors to another eventfd, or to none, from now on.
    pub fn set_err(&mut self, queue: QueueId, err: Option<Arc<OwnedFd>>, turn: &mut Turn<'_>) {
        self.virtqueue(queue).into_iter().for_each(|virtqueue| virtqueue.set_err(err.clone(), turn));
    }

    /// Replaces the configuration space, because the driver changed it or the device was resized.
    pub fn set_config(&mut self, queue: QueueId, config: Config) {
        self.virtqueue(queue).into_iter().for_each(|virtqueue| virtqueue.set_config(config));
    }

    /// Updates the facts about the device of this queue and its size.
    pub fn update_queue(&mut self, queue: QueueId, facts: DeviceFacts, size: Bytes) {
        self.virtqueue(queue).into_iter().for_each(|virtqueue| virtqueue.refit(facts, size));
    }

    /// Returns whether a queue must be checked again without waiting for an event.
    pub fn has_work(&self) -> bool {
        !self.busy.is_empty()
    }
}

/// Records a virtqueue that has work at the end of the turn.
fn list(busy: &mut Vec<QueueId>, virtqueue: &mut Virtqueue) {
    if !std::mem::replace(&mut virtqueue.is_listed, true) {
        busy.push(virtqueue.queue());
    }
}

/// Returns the token for watching a virtqueue's kicks. The generation distinguishes the watches of its rings.
fn token(queue: QueueId, generation: u32) -> Token {
    Token { front: FrontNumber::VhostUser as u8, index: queue.0, number: generation }
}

impl FrontOfTurn for Front {
    fn event(&mut self, event: Event, turn: &mut Turn<'_>) {
        let Event::Ended { token, result } = event else { return };
        let Some(virtqueue) = self.virtqueues.get_mut(usize::from(token.index)).and_then(Option::as_mut)
        else {
            return;
        };
        if result >= 0 && virtqueue.kicked(token.number, turn) {
            list(&mut self.busy, virtqueue);
        }
    }

    #[inline]
    fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>) {
        let Some(virtqueue) = self.virtqueues.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else {
            return;
        };
        virtqueue.done(done, turn);
        list(&mut self.busy, virtqueue);
    }

    fn commit(&mut self, turn: &mut Turn<'_>) {
        if self.busy.is_empty() {
            return;
        }
        std::mem::swap(&mut self.busy, &mut self.spare);
        for queue in self.spare.drain(..) {
            let Some(virtqueue) = self.virtqueues.get_mut(usize::from(queue.0)).and_then(Option::as_mut)
            else {
                continue;
            };
            virtqueue.is_listed = false;
            if virtqueue.commit(turn) {
                list(&mut self.busy, virtqueue);
            }
        }
    }

    fn is_dirty(&self) -> bool {
        self.has_work()
    }

    /// Stops the ring as if the front-end had gone. `now` is ignored: requests in flight refer to guest
    /// memory until they complete.
    fn close_queue(&mut self, queue: QueueId, _now: bool, turn: &mut Turn<'_>) {
        if let Some(virtqueue) = self.virtqueues.get_mut(usize::from(queue.0)).and_then(Option::as_mut) {
            virtqueue.stop(None, turn);
            list(&mut self.busy, virtqueue);
        }
    }

    fn is_open(&self, queue: QueueId) -> bool {
        let virtqueue = self.virtqueues.get(usize::from(queue.0)).and_then(Option::as_ref);
        virtqueue.is_some_and(Virtqueue::is_active)
    }

    fn remove_queue(&mut self, queue: QueueId, _turn: &mut Turn<'_>) {
        if let Some(virtqueue) = self.virtqueues.get_mut(usize::from(queue.0)) {
            debug_assert!(virtqueue.as_ref().is_none_or(|virtqueue| !virtqueue.is_active()));
            *virtqueue = None;
        }
    }
}
