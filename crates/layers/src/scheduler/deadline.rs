//! mq-deadline: which request is next. The kernel's `__dd_dispatch_request`, block/mq-deadline.c.
//!
//! Requests go in batches of one direction, in the order of sectors. A batch ends after `fifo_batch` requests, or when
//! none lies ahead. Then reads are chosen, unless writes wait and have been passed over `writes_starved` times. A batch
//! begins with the request whose time has come, or that has waited longest where none lies ahead; else where the last
//! batch of its direction ended.

use super::lines::Lines;
use super::values::{Now, Parameter};
use block::{Op, Tag};
use queue::Nanos;

pub(super) const READ: usize = 0;
pub(super) const WRITE: usize = 1;

/// The state of one queue.
#[derive(Default, Debug)]
pub(super) struct Deadline {
    /// Where the last request of each direction began.
    position: [u64; 2],
    direction: usize,
    /// Requests of the batch so far.
    batched: u64,
    /// Batches of reads while writes waited.
    starved: u64,
}

/// The direction: what changes the device is a write.
pub(super) fn class(op: Op) -> usize {
    if op.is_write() { WRITE } else { READ }
}

/// When a request of that class is to go before others.
pub(super) fn deadline(class: usize, now: Nanos, values: &Now) -> Nanos {
    now.after(values.get(if class == READ { Parameter::ReadExpire } else { Parameter::WriteExpire }))
}

impl Deadline {
    /// The next to go, with its class.
    pub(super) fn next(&mut self, lines: &Lines, now: Nanos, values: &Now) -> Option<(usize, Tag)> {
        let ahead = lines.next_from(self.direction, self.position[self.direction]);
        if let Some(lead) = ahead
            && self.batched < values.get(Parameter::FifoBatch)
        {
            return Some(self.take(lines, self.direction, lead));
        }
        let direction = self.turn(lines, values)?;
        let oldest = lines.oldest(direction)?;
        let is_late = lines.group(oldest).deadline <= now;
        let lead = match lines.next_from(direction, self.position[direction]) {
            Some(lead) if !is_late => lead,
            _ => oldest,
        };
        self.batched = 0;
        Some(self.take(lines, direction, lead))
    }

    /// Whose turn it is.
    fn turn(&mut self, lines: &Lines, values: &Now) -> Option<usize> {
        let (reads, writes) = (lines.oldest(READ).is_some(), lines.oldest(WRITE).is_some());
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

    fn take(&mut self, lines: &Lines, direction: usize, lead: Tag) -> (usize, Tag) {
        self.direction = direction;
        self.position[direction] = lines.group(lead).start;
        self.batched += 1;
        (direction, lead)
    }
}
