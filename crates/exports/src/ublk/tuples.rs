//! Integrity data between the driver and the stack: the second phase of a request, after its data and under
//! the same tag.
//!
//! The driver has the tuples at a separate offset of the character device; the stack has separate
//! operations for them. The order for a write is: data in, tuples in, data to the stack, tuples to the
//! stack. For a read: data from the stack, data out, tuples from the stack, tuples out.
//!
//! *Invariant:* memory passed to the ring stays valid until the operation has completed; it is freed when
//! the request is complete.

use super::driver::Driver;
use super::served_queue::{ServedQueue, Stage, Waiting};
use ::ublk::user_copy_integrity_offset;
use block::{Data, Integrity, Op, Request, Segment, Status, Tag};
use queue::{FileOp, Owner, Queues};

/// Phase of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Data,
    Tuples,
}

/// The tuples of a tag's request.
#[derive(Clone, Copy, Debug)]
struct Aside {
    phase: Phase,
    memory: Segment,
}

/// The tuples of all tags of a served queue.
pub(super) struct Tuples {
    shape: Integrity,
    asides: Box<[Aside]>,
}

impl Tuples {
    pub(super) fn new(shape: Integrity, tags: u16) -> Tuples {
        let none = Aside { phase: Phase::Data, memory: Segment::EMPTY };
        Tuples { shape, asides: vec![none; tags.into()].into() }
    }
}

impl ServedQueue {
    fn aside(&mut self, tag: u16) -> Option<&mut Aside> {
        self.tuples.as_mut().map(|tuples| &mut tuples.asides[usize::from(tag)])
    }

    /// Returns whether a request with tuples has finished its data phase.
    pub(super) fn is_past_data(&self, tag: u16) -> bool {
        let tuples = self.tuples.as_ref();
        tuples.is_some_and(|tuples| tuples.asides[usize::from(tag)].phase == Phase::Tuples)
    }

    /// Prepares a tag for a request with tuples. Returns `false` if the device has none, or the range is
    /// not a whole number of intervals.
    #[inline(never)]
    pub(super) fn expect_tuples(&mut self, tag: u16) -> bool {
        let Some(tuples) = &mut self.tuples else { return false };
        tuples.asides[usize::from(tag)].phase = Phase::Data;
        let slot = &mut self.slots[usize::from(tag)];
        slot.has_tuples = slot.asked.req.len.is_aligned(tuples.shape.interval.0);
        slot.has_tuples
    }

    /// Allocates memory for a request's tuples. Returns `false` if there is none at present.
    #[inline(never)]
    pub(super) fn provide_tuples<D: Driver>(&mut self, tag: u16, ring: &mut D) -> bool {
        let req = self.slots[usize::from(tag)].asked.req;
        let Some(tuples) = &mut self.tuples else { return false };
        let aside = &mut tuples.asides[usize::from(tag)];
        if aside.memory.len == 0 {
            // A tuple is shorter than the data that it protects, so the length is below that of the largest
            // request.
            let len = tuples.shape.len_for(req.len) as u32;
            aside.memory = ring.allocate(len).unwrap_or(Segment::EMPTY);
        }
        aside.memory.len > 0
    }

    /// Starts copying the tuples of a write, after its data.
    #[inline(never)]
    pub(super) fn fill_tuples<D: Driver>(&mut self, tag: u16, ring: &mut D, waiting: &mut Waiting) {
        let Some(aside) = self.aside(tag) else { return };
        aside.phase = Phase::Tuples;
        let memory = aside.memory;
        let offset = user_copy_integrity_offset(self.config.q_id, self.config.first_tag + tag, 0);
        let read = FileOp::Read { offset };
        let started = ring.copy(self.token(tag), self.config.file, read, memory).is_ok();
        self.slots[usize::from(tag)].stage = if started { Stage::Filling } else { Stage::Starved };
        if !started {
            waiting.push_back((self.config.queue, tag));
        }
    }

    /// Handles the end of the copy of a write's data, or of its tuples.
    #[inline(never)]
    pub(super) fn filled_with_tuples<D: Driver>(
        &mut self,
        tag: u16,
        result: i64,
        ring: &mut D,
        queues: &mut Queues<D>,
        waiting: &mut Waiting,
    ) {
        let slot = &self.slots[usize::from(tag)];
        let (data, memory) = (slot.asked.data_len, slot.memory);
        let Some(aside) = self.aside(tag) else { return };
        match aside.phase {
            Phase::Data if result == i64::from(data) => self.fill_tuples(tag, ring, waiting),
            Phase::Tuples if result == i64::from(aside.memory.len) => {
                aside.phase = Phase::Data;
                self.submit(tag, Data::One(memory), ring, queues);
            }
            _ => self.not_filled(tag, result, ring),
        }
    }

    /// Continues a request, whose data is done, with its tuples: they are submitted to the stack at the end
    /// of the turn.
    #[inline(never)]
    pub(super) fn turn_to_tuples(&mut self, tag: u16, waiting: &mut Waiting) {
        let Some(aside) = self.aside(tag) else { return };
        aside.phase = Phase::Tuples;
        self.slots[usize::from(tag)].stage = Stage::Between;
        waiting.push_back((self.config.queue, tag));
    }

    /// Submits the write or read of a request's tuples.
    pub(super) fn submit_tuples<D: Driver>(&mut self, tag: u16, ring: &mut D, queues: &mut Queues<D>) {
        let Some(memory) = self.aside(tag).map(|aside| aside.memory) else { return };
        let slot = &mut self.slots[usize::from(tag)];
        slot.stage = Stage::InStack;
        let asked = slot.asked.req;
        let op = if asked.op == Op::Read { Op::ReadTuples } else { Op::WriteTuples };
        let req = Request { data: Data::One(memory), ..Request::new(op, asked.offset, asked.len) };
        let owner = Owner::new(crate::fronts::FrontNumber::Ublk as u8, tag.into());
        queues.touch(self.config.queue).submit(Tag(tag), owner, req, ring);
    }

    /// Handles the completion of a request's data, or of its tuples, by the stack. Returns whether the
    /// request is complete.
    #[inline(never)]
    pub(super) fn done_with_tuples<D: Driver>(
        &mut self,
        tag: u16,
        (data, status): (Data, Status),
        ring: &mut D,
        waiting: &mut Waiting,
    ) -> bool {
        let takes_data = self.slots[usize::from(tag)].asked.takes_data();
        match (status.is_ok(), takes_data, self.is_past_data(tag)) {
            (false, ..) | (true, false, true) => return true,
            (true, false, false) => self.turn_to_tuples(tag, waiting),
            (true, true, false) => self.hand_over(tag, data, ring, waiting),
            (true, true, true) => self.hand_over_tuples(tag, ring, waiting),
        }
        false
    }

    /// Copies the tuples of a read to the request's memory.
    #[inline(never)]
    pub(super) fn hand_over_tuples<D: Driver>(&mut self, tag: u16, ring: &mut D, waiting: &mut Waiting) {
        let Some(memory) = self.aside(tag).map(|aside| aside.memory) else { return };
        let offset = user_copy_integrity_offset(self.config.q_id, self.config.first_tag + tag, 0);
        let write = FileOp::Write { offset, durable: false };
        let started = ring.copy(self.token(tag), self.config.file, write, memory).is_ok();
        self.slots[usize::from(tag)].stage = if started { Stage::Emptying } else { Stage::Full };
        if !started {
            waiting.push_back((self.config.queue, tag));
        }
    }

    /// Handles the end of the copy of a read's data, or of its tuples, to the client. Returns `None` if the
    /// request is not complete.
    #[inline(never)]
    pub(super) fn emptied_with_tuples(
        &mut self,
        tag: u16,
        result: i64,
        waiting: &mut Waiting,
    ) -> Option<i32> {
        let result_to_commit = self.slots[usize::from(tag)].result;
        let aside = self.aside(tag)?;
        match aside.phase {
            Phase::Data if result == i64::from(result_to_commit) => {
                self.turn_to_tuples(tag, waiting);
                None
            }
            Phase::Tuples if result == i64::from(aside.memory.len) => Some(result_to_commit),
            _ => Some(-libc::EIO),
        }
    }

    /// Frees the tuples of a completed request.
    #[inline(never)]
    pub(super) fn free_tuples<D: Driver>(&mut self, tag: u16, ring: &mut D) {
        if let Some(aside) = self.aside(tag).filter(|aside| aside.memory.len > 0) {
            ring.free(std::mem::replace(&mut aside.memory, Segment::EMPTY));
        }
    }
}
