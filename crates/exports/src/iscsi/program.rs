//! Commands that consist of several block requests: executes the requests of a `scsi::Program`.

use super::detached::take_program;
use super::stack::owner_of;
use super::task::{Fate, Memory, Phase, TaskId, Work};
use super::{Front, Turn};
use block::{Bytes, Data, Op, Request, Segment, Status};
use queue::{Claim, QueueId, Ring};
use scsi::program::{Buffer, Completed, Needs, ProgramIo, ProgramMemory, Step, Target};
use scsi::{Outcome, Program, Sense};

/// A program in progress.
pub(super) struct Running {
    program: Box<Program>,
    pub(super) needs: Needs,
    /// Exclusive access to a range of the device.
    claim: Option<Claim>,
    /// Whether the claim was granted.
    is_exclusive: bool,
    /// A request that waits for a tag.
    waiting: Option<ProgramIo>,
    /// Requests that completed while another one waited for a tag.
    completed: Vec<Completed>,
}

impl Running {
    /// Returns whether the program continues when its command is aborted.
    pub(super) fn survives_abort(&self) -> bool {
        self.program.survives_abort()
    }

    /// Returns the program, which has not begun.
    pub(super) fn into_program(self) -> Box<Program> {
        self.program
    }
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("needs", &self.needs).finish_non_exhaustive()
    }
}

impl Running {
    pub(super) fn new(program: Box<Program>) -> Box<Running> {
        let needs = program.needs();
        let claim = needs.exclusive.as_ref().filter(|range| !range.is_empty());
        let claim = claim.map(|range| Claim::new(queue::Stripes::of(range.start, range.end - range.start)));
        Box::new(Running { program, needs, claim, is_exclusive: false, waiting: None, completed: Vec::new() })
    }
}

/// 04/44/00: no exclusive access to a range of the device is possible, which is a configuration error.
const NOT_EXCLUSIVE: Sense = Sense::new(scsi::sense::Key::HardwareError, 0x44, 0x00);

impl Front {
    /// Starts a program whose data-out is complete, or continues one that waited for a claim or a tag.
    pub(super) fn start_program(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        if let Some(program) = take_program(&mut self.tasks.of_mut(id).work) {
            return self.detach_program(id, program, turn);
        }
        let task = self.tasks.of(id);
        let Work::Program(running) = &task.work else { return };
        let scratch = running.needs.scratch;
        if scratch > 0 && task.scratch.len < scratch {
            if scratch > super::memory::DATA_MAX {
                return self.end_program(id, Outcome::check(Sense::INVALID_FIELD_IN_CDB), turn);
            }
            let Some(memory) = self.allocate_for(id, scratch, turn.ring) else {
                return self.await_memory(id, turn);
            };
            self.tasks.of_mut(id).scratch = memory;
        }
        let Some(queue) = self.queue_of(id) else {
            return self.end_program(id, Outcome::check(Sense::LUN_NOT_SUPPORTED), turn);
        };
        let Work::Program(running) = &mut self.tasks.of_mut(id).work else { return };
        if let (Some(claim), false) = (&mut running.claim, running.is_exclusive) {
            if !turn.queues.get_mut(queue).is_guarded() {
                return self.end_program(id, Outcome::check(NOT_EXCLUSIVE), turn);
            }
            // The queue wakes the front-end when it should try the claim again.
            if !turn.queues.touch(queue).acquire(claim) {
                if !self.settle(id, turn) {
                    return self.end_program(id, Outcome::check(Sense::COMMUNICATION_FAILURE), turn);
                }
                self.tasks.of_mut(id).phase = Phase::Claim;
                if !self.claims.contains(&id) {
                    self.claims.push(id);
                }
                return;
            }
            running.is_exclusive = true;
        }
        let task = self.tasks.of_mut(id);
        task.phase = Phase::Stack;
        let Work::Program(running) = &mut task.work else { return };
        if let Some(io) = running.waiting.take()
            && !self.submit_of_program(id, io, turn)
        {
            return;
        }
        self.step_program(id, None, turn);
    }

    /// Tries the claims of waiting programs again.
    pub(super) fn retry_claims(&mut self, turn: &mut Turn<'_>) {
        for id in std::mem::take(&mut self.claims) {
            if self.tasks.find(id).is_some_and(|task| task.phase == Phase::Claim) {
                self.tasks.of_mut(id).phase = Phase::Begun;
                self.advance(id, turn);
            }
        }
    }

    /// Handles a completed block request of a program.
    pub(super) fn program_request_done(&mut self, id: TaskId, slot: u8, status: Status, turn: &mut Turn<'_>) {
        let task = self.tasks.of(id);
        if task.fate != Fate::Own {
            if task.in_stack == 0 && task.phase == Phase::Stack {
                self.end_program(id, Outcome::good(0), turn);
            }
            return;
        }
        let completed = Completed { slot, status };
        if let Work::Program(running) = &mut self.tasks.of_mut(id).work
            && running.waiting.is_some()
        {
            // Step the program again when the waiting request has been submitted.
            return running.completed.push(completed);
        }
        self.step_program(id, Some(completed), turn);
    }

    fn step_program(&mut self, id: TaskId, completed: Option<Completed>, turn: &mut Turn<'_>) {
        let mut completed = completed;
        loop {
            let task = self.tasks.of_mut(id);
            let Work::Program(running) = &mut task.work else { return };
            let data_out = match task.memory {
                Memory::Own(memory) | Memory::Chunk(_, memory) => {
                    memory.slice(0, memory.len.min(running.needs.data_out))
                }
                Memory::None => Segment::EMPTY,
            };
            let scratch = task.scratch;
            // Both segments are parts of the ring's memory: the data-out is copied only if the program
            // reads it.
            let step = with_memory(turn.ring, data_out, scratch, |memory| {
                running.program.step(completed.take(), memory)
            });
            match step {
                Step::Submit(io) => {
                    if !self.submit_of_program(id, io, turn) {
                        return;
                    }
                }
                Step::Wait => {
                    let Work::Program(running) = &mut self.tasks.of_mut(id).work else { return };
                    completed = running.completed.pop();
                    if completed.is_none() {
                        return;
                    }
                }
                // Programs that respond early are detached: see `start_program`.
                Step::Respond(outcome) | Step::Finished(outcome) => {
                    return self.end_program(id, outcome, turn);
                }
            }
        }
    }

    /// Submits a request of a program. Returns `false` if it waits for a tag.
    fn submit_of_program(&mut self, id: TaskId, io: ProgramIo, turn: &mut Turn<'_>) -> bool {
        let queue_id = match &io.unit {
            Target::Own => self.queue_of(id),
            Target::Other(nexus) => {
                let session = self.session(self.tasks.of(id).session);
                let mut luns = session.into_iter().flat_map(|session| session.luns.iter().flatten());
                luns.find(|lun| std::sync::Arc::ptr_eq(&lun.nexus, nexus)).map(|lun| lun.queue)
            }
        };
        let Some(queue_id) = queue_id.filter(|queue| self.has_queue(*queue)) else {
            let completed = Completed { slot: io.slot, status: Status::Offline };
            self.step_program(id, Some(completed), turn);
            return false;
        };
        let queue = self.queues.get(usize::from(queue_id.0)).and_then(Option::as_ref);
        if io.op == Op::CompareAndWrite && !queue.is_some_and(|queue| queue.facts.compare_and_write) {
            self.step_program(id, Some(Completed { slot: io.slot, status: Status::NotSupported }), turn);
            return false;
        }
        let task = self.tasks.of(id);
        let part = |memory: Segment, range: &std::ops::Range<u32>| {
            let is_inside = range.start <= range.end && range.end <= memory.len;
            is_inside.then(|| memory.slice(range.start, range.end - range.start))
        };
        let data = match (&io.buffer, task.memory) {
            (Buffer::None, _) => Some(Segment::EMPTY),
            (Buffer::DataOut(range), Memory::Own(memory) | Memory::Chunk(_, memory)) => part(memory, range),
            (Buffer::DataOut(_), Memory::None) => None,
            (Buffer::Scratch(range), _) => part(task.scratch, range),
        };
        let data = data.expect("a program stays within the memory that it asked for");
        let queue = turn.queues.touch(queue_id);
        let Some(tag) = queue.tag() else {
            let task = self.tasks.of_mut(id);
            let Work::Program(running) = &mut task.work else { return false };
            running.waiting = Some(io);
            self.starve(id, queue_id, turn);
            return false;
        };
        let mut req = Request::new(io.op, Bytes(io.offset), Bytes(io.len));
        (req.flags, req.data) = (io.flags, Data::One(data));
        let task = self.tasks.of_mut(id);
        task.in_stack += 1;
        let Work::Program(running) = &task.work else { return false };
        let is_own = matches!(io.unit, Target::Own);
        let is_exclusive = running.is_exclusive && is_own;
        if task.is_traced {
            let is_foreign = self.queue_of(id) != Some(queue_id);
            self.trace_request(id, (queue_id, tag), &req, is_foreign, turn);
        }
        let queue = turn.queues.get_mut(queue_id);
        if is_exclusive {
            queue.submit_exclusive(tag, owner_of(id, io.slot), req, turn.ring);
        } else {
            queue.submit(tag, owner_of(id, io.slot), req, turn.ring);
        }
        true
    }

    /// Ends a program, and releases its claim.
    fn end_program(&mut self, id: TaskId, outcome: Outcome, turn: &mut Turn<'_>) {
        self.release_claim(id, turn);
        let task = self.tasks.of_mut(id);
        task.work = Work::None;
        self.end_task(id, &outcome, turn);
    }

    fn release_claim(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        let Some(queue) = self.queue_of(id) else { return };
        let Work::Program(running) = &mut self.tasks.of_mut(id).work else { return };
        let Some(claim) = running.claim.take() else { return };
        let queue = touch_if(turn, queue);
        if running.is_exclusive {
            queue.release_claim(claim.stripes());
        } else {
            queue.withdraw_claim(&claim);
        }
    }

    /// Withdraws the claim of a task that was aborted while waiting for it.
    pub(super) fn withdraw_claim(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        self.claims.retain(|&waiting| waiting != id);
        self.release_claim(id, turn);
    }
}

fn touch_if<'a>(turn: &'a mut Turn<'_>, queue: QueueId) -> &'a mut queue::Queue<ring::KernelRing> {
    turn.queues.touch(queue)
}

/// Calls `step` with the two parts of a program's memory.
fn with_memory(
    ring: &mut ring::KernelRing,
    data_out: Segment,
    scratch: Segment,
    step: impl FnOnce(&mut ProgramMemory<'_>) -> Step,
) -> Step {
    match (data_out.len, scratch.len) {
        (_, 0) => {
            let data_out = if data_out.len > 0 { ring.bytes(data_out) } else { &[] };
            step(&mut ProgramMemory { data_out, scratch: &mut [] })
        }
        (0, _) => step(&mut ProgramMemory { data_out: &[], scratch: ring.bytes_mut(scratch) }),
        _ => {
            let (data_out, scratch) = ring.bytes_of_two(data_out, scratch);
            step(&mut ProgramMemory { data_out, scratch })
        }
    }
}
