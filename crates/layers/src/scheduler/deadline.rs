//! mq-deadline: chooses the next request as the kernel's `__dd_dispatch_request` does (block/mq-deadline.c).
//!
//! Requests are dispatched in batches of one direction, in sector order. A batch ends after `fifo_batch`
//! requests, or when no request lies ahead. Then reads are chosen, unless writes wait and have been passed
//! over `writes_starved` times. A batch begins with the oldest request if its deadline has expired or no
//! request lies ahead; else where the last batch of its direction ended.

use super::lists::Lists;
use super::values::{Parameter, Snapshot};
use block::{Op, Tag};
use queue::Nanos;

pub(super) const READ: usize = 0;
pub(super) const WRITE: usize = 1;

/// The state of one queue.
#[derive(Default, Debug)]
pub(super) struct Deadline {
    /// The first byte of the last dispatched request of each direction.
    position: [u64; 2],
    direction: usize,
    /// Requests dispatched in the current batch.
    batched: u64,
    /// Number of batches of reads since writes began to wait.
    starved: u64,
}

/// Returns the direction: operations that change the device count as writes.
pub(super) fn class(op: Op) -> usize {
    if op.is_write() { WRITE } else { READ }
}

/// Returns the deadline of a request that arrives now.
pub(super) fn deadline(class: usize, now: Nanos, values: &Snapshot) -> Nanos {
    now.after(values.get(if class == READ { Parameter::ReadExpire } else { Parameter::WriteExpire }))
}

impl Deadline {
    /// Returns the next request to dispatch, with its class.
    pub(super) fn next(&mut self, lists: &Lists, now: Nanos, values: &Snapshot) -> Option<(usize, Tag)> {
        let ahead = lists.next_from(self.direction, self.position[self.direction]);
        if let Some(lead) = ahead
            && self.batched < values.get(Parameter::FifoBatch)
        {
            return Some(self.take(lists, self.direction, lead));
        }
        let direction = self.turn(lists, values)?;
        let oldest = lists.oldest(direction)?;
        let is_late = lists.group(oldest).deadline <= now;
        let lead = match lists.next_from(direction, self.position[direction]) {
            Some(lead) if !is_late => lead,
            _ => oldest,
        };
        self.batched = 0;
        Some(self.take(lists, direction, lead))
    }

    /// Returns the direction of the next batch.
    fn turn(&mut self, lists: &Lists, values: &Snapshot) -> Option<usize> {
        let (reads, writes) = (lists.oldest(READ).is_some(), lists.oldest(WRITE).is_some());
        if reads {
            if !writes || self.starved < values.get(Parameter::WritesStarved) {
                self.starved += u64::from(writes);
                return Some(READ);
            }
        } else if !writes {
            return None;
        }
        self.starved = 0;
        Some(WRITE)
    }

    fn take(&mut self, lists: &Lists, direction: usize, lead: Tag) -> (usize, Tag) {
        self.direction = direction;
        self.position[direction] = lists.group(lead).start;
        self.batched += 1;
        (direction, lead)
    }
}
