//! The ublk export: serves tags of a kernel block device's queues, on one reactor thread.
//!
//! The driver has a table of descriptors, one for each tag of each queue, and completes our command for a
//! tag when it has a request. The driver's tag is also the tag of our queue. When the request is done, a
//! single command commits its result and fetches the next request. All commands of a turn are submitted
//! with those of the stack, in one call.
//!
//! *Invariant:* each tag is owned by either the driver, the stack or this front-end, as recorded in its
//! stage, so the tag is enough to identify a command.
//! *Invariant:* memory passed to the driver stays valid until the driver has completed the command.
//!
//! Not here: creation and life cycle of devices ([`::ublk`] and the engine), and the nodes of a stack.

mod batch;
mod driver;
mod mode;
mod modelled;
mod request;
mod served_queue;
#[cfg(test)]
mod tests;
mod tuples;

use crate::fronts::{Front as FrontOfTurn, Turn};
use ::ublk::Descriptors;
use batch::Batch;
use block::{Bytes, Integrity, Region};
pub use driver::{Batches, Driver, KernelBuffers, QueueMemory};
pub use mode::{Choice, Circumstances, DataMode, NotPossible, UnknownMode};
pub use modelled::ModelRing;
use queue::{Done, FileId, QueueId, Queues};
use ring::{Event, Token};
use served_queue::{ServedQueue, Waiting};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// State of a served queue that other threads read and change.
#[derive(Debug, Default)]
pub struct ServedQueueShared {
    /// Size of the device in bytes: requests beyond it are refused.
    pub size: AtomicU64,
    /// Number of tags that the driver has not aborted.
    pub tags: AtomicU32,
    /// Number of requests whose data was in memory shared with the client.
    pub in_client_memory: AtomicU64,
    /// First errno, positive, with which the driver refused a command, or 0.
    pub refused: AtomicI32,
}

/// Configuration of a served queue: a queue of a ublk device, or a part of one.
#[derive(Debug)]
pub struct ServedQueueConfig {
    /// The hardware queue. Its first `depth` tags are reserved for the driver's tags.
    pub queue: QueueId,
    /// The character device, a file of this thread's ring.
    pub file: FileId,
    /// The descriptors of the queue.
    pub descriptors: Descriptors,
    /// Number of the device's queue.
    pub q_id: u16,
    /// The driver's tag that corresponds to our first tag: 0, unless several threads share the queue.
    pub first_tag: u16,
    /// Number of tags.
    pub depth: u16,
    /// Data mode.
    pub mode: DataMode,
    /// Whether reads may be zero-copy: answered from memory of the stack.
    pub zero_copy_reads: bool,
    /// Largest request in bytes; a multiple of the page size.
    pub io_max: Bytes,
    /// Whether the device uses commands for many tags at once. If so, one thread serves all tags of the
    /// device's queue.
    pub batch: bool,
    /// Whether the driver supports ioctl-encoded commands.
    pub encoded: bool,
    /// Integrity format of the device, if any. If it has one, data is moved by user copy.
    pub integrity: Option<Integrity>,
    /// Memory shared with clients, if any.
    pub client_memory: Option<ClientMemory>,
    /// State shared with other threads.
    pub shared: Arc<ServedQueueShared>,
}

/// Memory that clients of a device have mapped as well. The stack must not access request data in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientMemory {
    /// A region of this thread's ring, released when the queue is closed.
    pub region: Region,
    /// Length in bytes.
    pub len: u64,
    /// The driver's index of this memory.
    pub index: u16,
}

/// Reasons why a queue cannot be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OpenQueueError {
    /// There is no address space for the buffers.
    #[error(
        "no address space for the buffers of its tags (raise `ulimit -v`, or give a smaller depth or request)"
    )]
    Memory,
    /// The ring has no buffer table, or the table is full.
    #[error("the kernel has no room to register the buffers of its tags (choose the data mode copy)")]
    KernelBuffers,
}

/// The ublk queues of one reactor.
#[derive(Default)]
pub struct Front {
    /// Served queues by the number of their hardware queue.
    queues: Vec<Option<ServedQueue>>,
    /// Tags that wait for memory or space in the ring.
    waiting: Waiting,
    /// Queues with completions to commit at the end of the turn.
    committing: Vec<QueueId>,
}

impl Front {
    /// Starts serving a queue: fetches its tags.
    ///
    /// # Errors
    /// Nothing was started; the file and the client memory in the configuration still belong to the caller.
    pub fn add_queue<D: Driver>(
        &mut self,
        config: ServedQueueConfig,
        ring: &mut D,
    ) -> Result<(), OpenQueueError> {
        let index = usize::from(config.queue.0);
        let served = ServedQueue::open(config, ring)?;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] = Some(served);
        Ok(())
    }

    /// Updates whether the device of this queue supports zero-copy reads.
    pub fn update_queue(&mut self, queue: QueueId, zero_copy_reads: bool) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue.0)) {
            served.lend(zero_copy_reads);
        }
    }

    /// Handles the completion of a tag's command or copy.
    #[inline]
    pub fn ended<D: Driver>(&mut self, token: Token, result: i64, ring: &mut D, queues: &mut Queues<D>) {
        let Some(served) = self.queues.get_mut(usize::from(token.index)).and_then(Option::as_mut) else {
            return;
        };
        if Batch::is_command(token.number) {
            served.batch_ended(token.number, result, ring);
        } else {
            served.ended(token.number as u16, result, ring, queues, &mut self.waiting);
        }
        list(&mut self.committing, QueueId(token.index), served);
    }

    /// Handles a request that the stack has completed.
    #[inline]
    pub fn request_done<D: Driver>(
        &mut self,
        queue: QueueId,
        done: Done,
        ring: &mut D,
        queues: &mut Queues<D>,
    ) {
        let Some(served) = self.queues.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else { return };
        let req = queues.get_mut(queue).request(done.tag);
        served.done(done.tag.0, req, done.status, ring, &mut self.waiting);
        list(&mut self.committing, queue, served);
    }

    /// Continues waiting tags at the end of a turn, and commits completions.
    pub fn take_up<D: Driver>(&mut self, ring: &mut D, queues: &mut Queues<D>) {
        for _ in 0..self.waiting.len() {
            let Some((queue, tag)) = self.waiting.pop_front() else { break };
            let Some(served) = self.queues.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else {
                continue;
            };
            served.take_up(tag, ring, queues, &mut self.waiting);
            list(&mut self.committing, queue, served);
        }
        if !self.committing.is_empty() {
            self.commit_batches(ring);
        }
    }

    /// Commits completions of queues with batches.
    #[inline(never)]
    fn commit_batches<D: Driver>(&mut self, ring: &mut D) {
        for queue in self.committing.drain(..) {
            if let Some(served) = self.queues.get_mut(usize::from(queue.0)).and_then(Option::as_mut) {
                served.is_listed = false;
                served.flush(ring);
            }
        }
    }

    /// Returns whether [`take_up`](Front::take_up) may have work.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty() || !self.committing.is_empty()
    }

    /// Returns whether no tag has a request whose result has not been committed.
    pub fn is_idle(&self) -> bool {
        self.queues.iter().flatten().all(ServedQueue::is_idle)
    }

    /// Returns whether the driver still has to abort tags of the device of this queue.
    pub fn has_tags(&self, queue: QueueId) -> bool {
        let served = self.queues.get(usize::from(queue.0)).and_then(Option::as_ref);
        served.is_some_and(|served| served.live() > 0)
    }

    /// Cancels the fetch commands, as if the server had died: the driver then fails or holds back requests.
    /// Tags that have a request are returned when it is done.
    pub fn withdraw<D: Driver>(&mut self, queue: QueueId, ring: &mut D) {
        if let Some(served) = self.queues.get_mut(usize::from(queue.0)).and_then(Option::as_mut) {
            served.withdraw(ring);
        }
    }

    /// Removes a queue whose tags the driver has all aborted. Returns the file.
    pub fn close<D: Driver>(&mut self, queue: QueueId, ring: &mut D) -> Option<FileId> {
        let served = self.queues.get_mut(usize::from(queue.0))?.take()?;
        debug_assert!(self.waiting.iter().all(|waiting| waiting.0 != queue), "{queue:?} has tags that wait");
        Some(served.close(ring))
    }
}

/// Records a queue with completions to commit. Completions that cannot be committed yet are committed when
/// the queue's last commit has completed.
#[inline]
fn list(committing: &mut Vec<QueueId>, queue: QueueId, served: &mut ServedQueue) {
    if served.can_commit() && !served.is_listed {
        served.is_listed = true;
        committing.push(queue);
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

    /// The driver aborts the tags once the device is stopped. With `now`, they are withdrawn instead.
    fn close_queue(&mut self, queue: QueueId, now: bool, turn: &mut Turn<'_>) {
        if now {
            self.withdraw(queue, turn.ring);
        }
    }

    fn is_open(&self, queue: QueueId) -> bool {
        self.has_tags(queue)
    }

    fn remove_queue(&mut self, queue: QueueId, turn: &mut Turn<'_>) {
        if let Some(file) = self.close(queue, turn.ring) {
            turn.ring.remove_file(file);
        }
    }
}
