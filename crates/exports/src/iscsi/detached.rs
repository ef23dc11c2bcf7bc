//! Programs that continue without their command: SANITIZE, which is not stopped by an abort, a reset or the
//! end of its session (SBC-4 section 4.11.2).
//!
//! Such a program has its own entry instead of a task, so that its command can end at any time. It ends
//! early only with its device.

use super::stack::{TASK_BITS, owner_with};
use super::task::{Phase, TaskId, Work};
use super::trace::request_event;
use super::{Front, Turn};
use block::{Bytes, Data, Request, Segment, Status};
use queue::{Claim, CommandEvent, CommandPoint, QueueId, Ring};
use scsi::program::{Buffer, Completed, ProgramIo, ProgramMemory, Step};
use scsi::{Outcome, Program, ScsiStatus};

/// Offset added to a request's number in its owner; requests of tasks have smaller numbers.
pub(super) const SLOTS: u32 = 0x80;

/// A program without a task.
pub(super) struct Detached {
    program: Box<Program>,
    queue: QueueId,
    scratch: Segment,
    claim: Option<Claim>,
    is_exclusive: bool,
    /// Whether the program waits for its claim, or for a tag for `next`.
    is_waiting: bool,
    next: Option<ProgramIo>,
    completed: Vec<Completed>,
    in_stack: u8,
    /// The command that names the program's requests in the device's trace; `None` if it is not traced.
    traced: Option<CommandPoint>,
    /// The command and its order of arrival, until it has a response.
    command: Option<(TaskId, u64)>,
    /// Whether the device is being removed.
    is_dropped: bool,
}

impl Front {
    /// Detaches the program from its task, which then waits for the outcome.
    pub(super) fn detach_program(&mut self, id: TaskId, program: Box<Program>, turn: &mut Turn<'_>) {
        let needs = program.needs();
        let scratch = match needs.scratch {
            0 => Some(Segment::EMPTY),
            len => turn.ring.allocate(len),
        };
        let (Some(queue), Some(scratch)) = (self.queue_of(id), scratch) else {
            return self.end_task(id, &Outcome::status(ScsiStatus::Busy), turn);
        };
        let claim = needs.exclusive.filter(|range| !range.is_empty());
        let claim = claim.map(|range| Claim::new(queue::Stripes::of(range.start, range.end - range.start)));
        let task = self.tasks.of_mut(id);
        task.phase = Phase::Detached;
        let (arrival, is_traced) = (task.arrival, task.is_traced);
        let traced = is_traced.then(|| self.command_point(id, CommandEvent::Begun));
        let entry = Detached {
            program,
            queue,
            scratch,
            claim,
            is_exclusive: false,
            is_waiting: true,
            next: None,
            completed: Vec::new(),
            in_stack: 0,
            traced,
            command: Some((id, arrival)),
            is_dropped: false,
        };
        let index = self.detached.iter().position(Option::is_none).unwrap_or_else(|| {
            self.detached.push(None);
            self.detached.len() - 1
        });
        self.detached[index] = Some(Box::new(entry));
        self.count_client(queue, 1);
        self.retry_detached(turn);
    }

    /// Continues the programs that wait for a claim or a tag.
    pub(super) fn retry_detached(&mut self, turn: &mut Turn<'_>) {
        for index in 0..self.detached.len() {
            let Some(entry) = &mut self.detached[index] else { continue };
            if entry.is_dropped && entry.in_stack == 0 {
                self.end_detached(index, turn);
                continue;
            }
            if !std::mem::take(&mut entry.is_waiting) {
                continue;
            }
            if let (Some(claim), false) = (&mut entry.claim, entry.is_exclusive) {
                if !turn.queues.get_mut(entry.queue).is_guarded() {
                    // No exclusive access to the range is possible, so the operation fails before it has
                    // begun.
                    self.end_detached(index, turn);
                    continue;
                }
                if !turn.queues.touch(entry.queue).acquire(claim) {
                    entry.is_waiting = true;
                    continue;
                }
                entry.is_exclusive = true;
            }
            if let Some(io) = entry.next.take()
                && !submit(index, entry, io, turn)
            {
                continue;
            }
            let completed = entry.completed.pop();
            self.step_detached(index, completed, turn);
        }
    }

    /// Handles a completed request of a detached program.
    pub(super) fn detached_request_done(
        &mut self,
        index: u32,
        slot: u8,
        status: Status,
        turn: &mut Turn<'_>,
    ) {
        let index = index as usize;
        let Some(Some(entry)) = self.detached.get_mut(index) else { return };
        entry.in_stack -= 1;
        if entry.is_dropped {
            if entry.in_stack == 0 {
                self.end_detached(index, turn);
            }
            return;
        }
        let completed = Completed { slot, status };
        if entry.is_waiting {
            // Step the program again when its next request has been submitted.
            return entry.completed.push(completed);
        }
        self.step_detached(index, Some(completed), turn);
    }

    fn step_detached(&mut self, index: usize, completed: Option<Completed>, turn: &mut Turn<'_>) {
        let mut completed = completed;
        loop {
            let Some(Some(entry)) = self.detached.get_mut(index) else { return };
            let scratch = match entry.scratch.len {
                0 => &mut [],
                _ => turn.ring.bytes_mut(entry.scratch),
            };
            let step = entry.program.step(completed.take(), &mut ProgramMemory { data_out: &[], scratch });
            match step {
                Step::Submit(io) => {
                    if !submit(index, entry, io, turn) {
                        return;
                    }
                }
                Step::Wait => {
                    completed = entry.completed.pop();
                    if completed.is_none() {
                        return;
                    }
                }
                Step::Respond(outcome) => self.respond_detached(index, &outcome, turn),
                Step::Finished(outcome) => {
                    self.respond_detached(index, &outcome, turn);
                    return self.end_detached(index, turn);
                }
            }
        }
    }

    /// Ends the command of a program, if it still exists.
    fn respond_detached(&mut self, index: usize, outcome: &Outcome, turn: &mut Turn<'_>) {
        let command =
            self.detached.get_mut(index).and_then(Option::as_mut).and_then(|entry| entry.command.take());
        let Some((id, arrival)) = command else { return };
        let is_same = |task: &super::task::Task| task.phase == Phase::Detached && task.arrival == arrival;
        if self.tasks.find(id).is_some_and(is_same) {
            self.end_task(id, outcome, turn);
        }
    }

    /// Drops a program that has no request in the stack.
    fn end_detached(&mut self, index: usize, turn: &mut Turn<'_>) {
        let Some(mut entry) = self.detached.get_mut(index).and_then(Option::take) else { return };
        if let Some(claim) = entry.claim.take() {
            let queue = turn.queues.touch(entry.queue);
            match entry.is_exclusive {
                true => queue.release_claim(claim.stripes()),
                false => queue.withdraw_claim(&claim),
            }
        }
        if entry.scratch.len > 0 {
            turn.ring.free(entry.scratch);
        }
        self.count_client(entry.queue, -1);
        if let Some((id, arrival)) = entry.command {
            let is_same = |task: &super::task::Task| task.phase == Phase::Detached && task.arrival == arrival;
            if self.tasks.find(id).is_some_and(is_same) {
                let sense = scsi::sanitize::SANITIZE_FAILED;
                self.end_task(id, &Outcome::check(sense), turn);
            }
        }
    }

    /// Ends the programs of a device that is being removed, as soon as their requests have completed.
    pub(super) fn drop_detached(&mut self, queue: QueueId, turn: &mut Turn<'_>) {
        self.detached.iter_mut().flatten().filter(|entry| entry.queue == queue).for_each(|entry| {
            entry.is_dropped = true;
        });
        self.retry_detached(turn);
    }
}

/// Submits a request. Returns `false` if it waits for a tag.
fn submit(index: usize, entry: &mut Detached, io: ProgramIo, turn: &mut Turn<'_>) -> bool {
    let queue = turn.queues.touch(entry.queue);
    let Some(tag) = queue.tag() else {
        (entry.next, entry.is_waiting) = (Some(io), true);
        return false;
    };
    let data = match &io.buffer {
        Buffer::Scratch(range) => entry.scratch.slice(range.start, range.end - range.start),
        // Detached programs have no data-out of their own.
        Buffer::None | Buffer::DataOut(_) => Segment::EMPTY,
    };
    let mut req = Request::new(io.op, Bytes(io.offset), Bytes(io.len));
    (req.flags, req.data) = (io.flags, Data::One(data));
    entry.in_stack += 1;
    if let Some(point) = &entry.traced {
        // The command may already have ended in the trace.
        let event = request_event(tag, &req, entry.command.is_none());
        queue.command(&CommandPoint { event, ..*point }, turn.ring);
    }
    let owner = owner_with((SLOTS | u32::from(io.slot)) << TASK_BITS | index as u32);
    if entry.is_exclusive {
        queue.submit_exclusive(tag, owner, req, turn.ring);
    } else {
        queue.submit(tag, owner, req, turn.ring);
    }
    true
}

/// Takes the program out of a task's work, if it continues without the task.
pub(super) fn take_program(work: &mut Work) -> Option<Box<Program>> {
    match work {
        Work::Program(running) if running.survives_abort() => match std::mem::replace(work, Work::None) {
            Work::Program(running) => Some(running.into_program()),
            _ => None,
        },
        _ => None,
    }
}
