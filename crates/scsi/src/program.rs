//! Commands of several block requests: state machines that ask for memory and requests, and never do them.
//!
//! The transport gets the data-out and the scratch memory that [`Program::needs`] names, then calls
//! [`Program::step`] without a completion. From then on:
//! - [`Step::Submit`]: it starts the request and calls `step` again, without a completion. So a program has up
//!   to [`PARALLEL_MAX`] requests in flight.
//! - [`Step::Wait`]: it calls `step` when the next request completes, with its [`Completed`].
//! - [`Step::Respond`]: it sends this outcome to the initiator now, and calls `step` again, without a completion. The
//!   outcome of the end is dropped then.
//! - [`Step::Finished`]: the command has ended. No request is in flight then.
//!
//! A program whose [`Program::survives_abort`] is true is stepped until its end even after its command was aborted, its
//! session ended, or the unit was reset; only its outcome is dropped.

use crate::{Nexus, Outcome};
use block::{Flags, Op, Status};
use std::ops::Range;
use std::sync::Arc;

/// Most requests that a program has in flight.
pub const PARALLEL_MAX: usize = 8;

/// What a program needs before its first step.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Needs {
    /// Bytes of data-out, all of which must have arrived; at most what the initiator announced.
    pub data_out: u32,
    /// Bytes of scratch memory. Its content does not matter.
    pub scratch: u32,
    /// Bytes of the device that the program must hold exclusively from its first step to its end: no other
    /// request writes them meanwhile, through whatever export (the device's range lock,
    /// [ADR 27](../../../docs/adr/0027-sub-block-writes.md)).
    pub exclusive: Option<Range<u64>>,
}

/// Which unit a request goes to.
#[derive(Clone, Debug, Default)]
pub enum Target {
    /// The unit of the command.
    #[default]
    Own,
    /// Another unit: EXTENDED COPY.
    Other(Arc<Nexus>),
}

/// Memory of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Buffer {
    /// No memory.
    None,
    /// Bytes of the data-out; only for writes.
    DataOut(Range<u32>),
    /// Bytes of the scratch memory.
    Scratch(Range<u32>),
}

/// A block request of a program.
#[derive(Clone, Debug)]
pub struct ProgramIo {
    /// Number that its completion is reported with; below [`PARALLEL_MAX`], and no other request in flight has it.
    pub slot: u8,
    /// The unit.
    pub unit: Target,
    /// Operation.
    pub op: Op,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes; that of the buffer for reads and writes. 0 only for flushes.
    pub len: u64,
    /// Modifiers.
    pub flags: Flags,
    /// Memory.
    pub buffer: Buffer,
}

/// A request that completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completed {
    /// Its number.
    pub slot: u8,
    /// Its status.
    pub status: Status,
}

/// Memory of a program.
#[derive(Debug)]
pub struct ProgramMemory<'a> {
    /// The data-out, as long as [`Needs::data_out`].
    pub data_out: &'a [u8],
    /// The scratch memory, at least as long as [`Needs::scratch`].
    pub scratch: &'a mut [u8],
}

/// What a program does next.
#[derive(Clone, Debug)]
pub enum Step {
    /// Start this request, and call again.
    Submit(ProgramIo),
    /// Call again when a request completes. At least one is in flight.
    Wait,
    /// Send this outcome now, and call again. The command has ended for the initiator; the operation continues.
    Respond(Outcome),
    /// The command ended.
    Finished(Outcome),
}

/// The steps of a kind of program.
pub trait Steps: Send {
    /// What the program needs before its first step.
    fn needs(&self) -> Needs;

    /// The operation continues without its command and its session: SANITIZE.
    fn survives_abort(&self) -> bool {
        false
    }

    /// The next step, after a completion if there is one.
    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step;
}

/// A command of several block requests.
pub struct Program {
    nexus: Arc<Nexus>,
    steps: Box<dyn Steps>,
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program").field("needs", &self.needs()).finish_non_exhaustive()
    }
}

impl Program {
    /// Creates a program of a command of this nexus.
    pub fn new(nexus: &Arc<Nexus>, steps: impl Steps + 'static) -> Box<Program> {
        Box::new(Program { nexus: nexus.clone(), steps: Box::new(steps) })
    }

    /// What the program needs before its first step.
    pub fn needs(&self) -> Needs {
        self.steps.needs()
    }

    /// The program is stepped until its end, whatever happens to its command and its session.
    pub fn survives_abort(&self) -> bool {
        self.steps.survives_abort()
    }

    /// The next step.
    pub fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        match self.steps.step(completed, memory) {
            Step::Finished(outcome) => Step::Finished(self.nexus.finish(outcome)),
            Step::Respond(outcome) => Step::Respond(self.nexus.finish(outcome)),
            step => step,
        }
    }
}
