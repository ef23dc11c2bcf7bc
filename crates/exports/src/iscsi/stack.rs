//! Tasks in the device's stack: tags, submission and completion.

use super::connection::READ_AHEAD_MAX;
use super::program::Running;
use super::task::{Fate, Memory, Phase, TaskId, Work};
use super::{FRONT, Front, Turn};
use block::{Bytes, Data, Flags, Op, Request, Segment, Status};
use queue::{Done, Owner, QueueId};
use scsi::{BlockIo, Outcome, Program, ScsiStatus, Sense};

/// Number of low bits of an owner's number that name the task; the bits above name the request of a
/// program.
pub(super) const TASK_BITS: u32 = 20;
/// Request number for tasks that have only one request.
pub(super) const SINGLE: u8 = 0;

/// Returns the owner of a task's block request.
pub(super) fn owner_of(id: TaskId, slot: u8) -> Owner {
    Owner::new(FRONT, u32::from(slot) << TASK_BITS | id)
}

/// Returns the owner of a block request of this front-end.
pub(super) fn owner_with(number: u32) -> Owner {
    Owner::new(FRONT, number)
}

impl Front {
    /// Returns the queue of a task's logical unit.
    #[inline]
    pub(super) fn queue_of(&self, id: TaskId) -> Option<QueueId> {
        let task = self.tasks.of(id);
        let session = self.sessions.get(task.session as usize)?.as_ref()?;
        Some(session.lun(task.lun)?.queue)
    }

    /// Submits the block request of a task whose data is complete. If necessary, waits for memory or a tag.
    pub(super) fn enter_stack(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        let task = self.tasks.of(id);
        let Work::Io(io) = task.work else { return };
        let Some(queue_id) = self.queue_of(id) else { return self.end_without_device(id, turn) };
        let Some(Some(served)) = self.queues.get(usize::from(queue_id.0)) else {
            return self.end_without_device(id, turn);
        };
        let mut req = Request::new(io.op, Bytes(io.offset), Bytes(io.len));
        req.flags = io.flags;
        match io.op {
            Op::Read => {
                // A digest covers bytes that must not change before they are sent.
                let digest = self.connection(task.connection).is_some_and(|c| c.data_digest);
                let facts = served.facts;
                if facts.inline {
                    if !self.has_room(id, io.len) {
                        return;
                    }
                    self.tasks.of_mut(id).reads_inline = true;
                }
                if (facts.zero_copy_reads || facts.allows_zero_copy) && !digest {
                    req.flags |= Flags::ZERO_COPY;
                }
                if !facts.zero_copy_reads || digest {
                    if !self.hold(id, io.len as u32, turn) {
                        return;
                    }
                    if let Memory::Own(memory) = self.tasks.of(id).memory {
                        req.data = Data::One(memory);
                    }
                }
            }
            Op::Write => match task.memory {
                Memory::Own(memory) | Memory::Chunk(_, memory) if u64::from(memory.len) >= io.len => {
                    req.data = Data::One(memory.slice(0, io.len as u32));
                }
                _ => {
                    // The expected length is less than a block: nothing is written.
                    self.tasks.of_mut(id).work =
                        Work::Ended(Box::new(Outcome::check(Sense::INVALID_FIELD_IN_CDB)));
                    return self.advance(id, turn);
                }
            },
            _ => {}
        }
        let Some(Some(served)) = self.queues.get_mut(usize::from(queue_id.0)) else { return };
        let queue = turn.queues.touch(queue_id);
        let tag = if served.starved.is_empty() { queue.tag() } else { None };
        let Some(tag) = tag else { return self.starve(id, queue_id, turn) };
        let task = self.tasks.of_mut(id);
        (task.phase, task.in_stack) = (Phase::Stack, 1);
        let is_traced = task.is_traced;
        if task.reads_inline
            && let Some(connection) =
                self.connections.get_mut(task.connection as usize).and_then(Option::as_mut)
        {
            connection.reading += io.len;
        }
        if is_traced {
            self.trace_request(id, (queue_id, tag), &req, false, turn);
        }
        turn.queues.get_mut(queue_id).submit(tag, owner_of(id, SINGLE), req, turn.ring);
    }

    /// Returns whether a read that completes inline may start now; otherwise it waits until others have
    /// been sent.
    fn has_room(&mut self, id: TaskId, len: u64) -> bool {
        let index = self.tasks.of(id).connection;
        let Some(connection) = self.connection_mut(index) else { return true };
        let ahead = connection.reading + connection.unsent.bytes;
        if ahead > 0 && ahead + len > READ_AHEAD_MAX {
            connection.room.push_back(id);
            self.tasks.of_mut(id).phase = Phase::Room;
            return false;
        }
        true
    }

    /// Starts reads that waited until others had been sent.
    pub(super) fn feed_room(&mut self, index: u32, turn: &mut Turn<'_>) {
        for _ in 0..self.connection(index).map_or(0, |connection| connection.room.len()) {
            let Some(id) = self.connection_mut(index).and_then(|c| c.room.pop_front()) else { return };
            self.tasks.of_mut(id).phase = Phase::Begun;
            self.advance(id, turn);
            if let Some(connection) = self.connection_mut(index)
                && connection.room.back() == Some(&id)
            {
                // The read has to wait again, and stays first in the queue.
                connection.room.rotate_right(1);
                return;
            }
        }
    }

    /// Ends a task whose device was removed while it waited.
    fn end_without_device(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        let task = self.tasks.of_mut(id);
        task.phase = Phase::Begun;
        task.work = Work::Ended(Box::new(Outcome::check(Sense::LUN_NOT_SUPPORTED)));
        self.advance(id, turn);
    }

    /// Makes a task wait for a tag of its queue.
    pub(super) fn starve(&mut self, id: TaskId, queue: QueueId, turn: &mut Turn<'_>) {
        // If a program has requests in flight, they may use the chunk.
        if self.tasks.of(id).in_stack == 0 && !self.settle(id, turn) {
            self.tasks.of_mut(id).work = Work::Ended(Box::new(Outcome::status(ScsiStatus::Busy)));
            return self.advance(id, turn);
        }
        let Some(Some(served)) = self.queues.get_mut(usize::from(queue.0)) else { return };
        served.starved.push_back(id);
        self.starved += 1;
        let task = self.tasks.of_mut(id);
        task.phase = Phase::Tag;
        let session = task.session;
        if let Some(session) = self.session_mut(session) {
            session.begins_to_wait();
        }
    }

    /// Removes an aborted task from those that wait for a tag.
    pub(super) fn leave_starved(&mut self, id: TaskId) {
        self.queues.iter_mut().flatten().for_each(|served| served.starved.retain(|&waiting| waiting != id));
        self.starved -= 1;
        self.stops_waiting(id);
    }

    /// Gives free tags to the tasks that wait for them.
    pub(super) fn feed_starved(&mut self, turn: &mut Turn<'_>) {
        for index in 0..self.queues.len() {
            let queue = QueueId(index as u16);
            while let Some(Some(served)) = self.queues.get_mut(index) {
                if served.starved.is_empty() {
                    break;
                }
                let Some(tag) = turn.queues.get_mut(queue).tag() else { break };
                turn.queues.get_mut(queue).release(tag);
                // The remaining tasks wait behind this one, which must find the list empty to take the tag.
                let mut rest = std::mem::take(&mut served.starved);
                let Some(id) = rest.pop_front() else { break };
                self.starved -= 1;
                self.stops_waiting(id);
                let task = self.tasks.of_mut(id);
                task.phase = Phase::Begun;
                self.advance(id, turn);
                let Some(Some(served)) = self.queues.get_mut(index) else { break };
                let more = !served.starved.is_empty();
                while let Some(later) = served.starved.pop_front() {
                    rest.push_front(later);
                }
                served.starved = rest;
                if more {
                    // A program is waiting for more tags.
                    break;
                }
            }
        }
    }

    /// Records that an inline read has left the stack, so that waiting reads may start.
    fn inline_read_done(&mut self, id: TaskId) {
        let task = self.tasks.of(id);
        let (index, len) = (task.connection, if let Work::Io(io) = &task.work { io.len } else { 0 });
        let Some(connection) = self.connection_mut(index) else { return };
        connection.reading -= len;
        if !connection.room.is_empty() {
            self.mark(index);
        }
    }

    /// Handles the completion of a block request.
    pub(super) fn request_done(&mut self, queue_id: QueueId, done: Done, turn: &mut Turn<'_>) {
        let number = done.owner.index();
        let (id, slot) = (number & ((1 << TASK_BITS) - 1), (number >> TASK_BITS) as u8);
        let queue = turn.queues.get_mut(queue_id);
        let data = match queue.request(done.tag).data {
            Data::One(segment) => segment,
            // Requests are submitted with single segments only.
            Data::Run { .. } => Segment::EMPTY,
        };
        queue.release(done.tag);
        if u32::from(slot) >= super::detached::SLOTS {
            let slot = slot & !(super::detached::SLOTS as u8);
            return self.detached_request_done(id, slot, done.status, turn);
        }
        let task = self.tasks.of_mut(id);
        task.in_stack -= 1;
        if let Work::Program(_) = task.work {
            return self.program_request_done(id, slot, done.status, turn);
        }
        if std::mem::take(&mut task.reads_inline) {
            self.inline_read_done(id);
        }
        let task = self.tasks.of_mut(id);
        if task.fate != Fate::Own {
            task.work = Work::None;
            return self.end_task(id, &Outcome::good(0), turn);
        }
        let Work::Io(io) = std::mem::replace(&mut task.work, Work::None) else { return };
        if done.status.is_ok() && io.op == Op::Read {
            let data = data.slice(0, data.len.min(io.transfer));
            return self.end_read(id, data, io.wanted, turn);
        }
        if !done.status.is_ok()
            && let Some(program) = self.explain(id, &io, done.status)
        {
            // The sense data depends on the state of a zone.
            let task = self.tasks.of_mut(id);
            (task.work, task.phase) = (Work::Program(Running::new(program)), Phase::Begun);
            return self.start_program(id, turn);
        }
        let outcome = scsi::complete(&io, done.status);
        self.end_task(id, &outcome, turn);
    }

    /// Returns the program that finds out why a request failed, if that takes one.
    #[cold]
    fn explain(&self, id: TaskId, io: &BlockIo, status: Status) -> Option<Box<Program>> {
        let task = self.tasks.of(id);
        let lun = self.session(task.session)?.lun(task.lun)?;
        scsi::explain(&lun.nexus, io, status)
    }
}
