//! Commands that consist of several block requests: state machines that request memory and I/O, but never
//! perform I/O.
//!
//! The transport provides the data-out and the scratch memory that [`Program::needs`] specifies, then calls
//! [`Program::step`] without a completion. After that it acts on each returned step:
//! - [`Step::Submit`]: starts the request and calls `step` again, without a completion. So a program has up
//!   to [`PARALLEL_MAX`] requests in flight.
//! - [`Step::Wait`]: calls `step` when the next request completes, with its [`Completed`].
//! - [`Step::Respond`]: sends this outcome to the initiator now, and calls `step` again, without a
//!   completion. The final outcome is then dropped.
//! - [`Step::Finished`]: ends the command. No request is in flight then.
//!
//! A program whose [`Program::survives_abort`] returns `true` is stepped until its end even after its
//! command was aborted, its session ended, or the unit was reset; only its outcome is dropped.

use crate::{Nexus, Outcome};
use block::{Flags, Op, Status};
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of a program's requests in flight.
pub const PARALLEL_MAX: usize = 8;

/// Requirements of a program before its first step.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Needs {
    /// Bytes of data-out, all of which must have arrived; at most as many as the initiator announced.
    pub data_out: u32,
    /// Bytes of scratch memory, with arbitrary content.
    pub scratch: u32,
    /// Range of the device, in bytes, that the program must hold exclusively from its first step to its
    /// end: no other request writes there during that time, through any export (the device's range lock,
    /// [ADR 27](../../../docs/adr/0027-sub-block-writes.md)).
    pub exclusive: Option<Range<u64>>,
}

/// Unit that a request is sent to.
#[derive(Clone, Debug, Default)]
pub enum Target {
    /// The unit of the command.
    #[default]
    Own,
    /// Another unit, for EXTENDED COPY.
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
    /// Number that its completion is reported with; below [`PARALLEL_MAX`], and unique among the requests
    /// in flight.
    pub slot: u8,
    /// The unit to send the request to.
    pub unit: Target,
    /// Operation.
    pub op: Op,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes; for reads and writes the length of the buffer. 0 only for flushes, and
    /// for operations that change zones.
    pub len: u64,
    /// Modifiers.
    pub flags: Flags,
    /// Memory of the request.
    pub buffer: Buffer,
}

/// A completed request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completed {
    /// Number of the request.
    pub slot: u8,
    /// Status of the request.
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

/// Next action for the transport.
#[derive(Clone, Debug)]
pub enum Step {
    /// Start this request, and call `step` again.
    Submit(ProgramIo),
    /// Call `step` again when a request completes. At least one is in flight.
    Wait,
    /// Send this outcome now, and call `step` again. The command has ended for the initiator; the operation
    /// continues.
    Respond(Outcome),
    /// The command has ended.
    Finished(Outcome),
}

/// State machine of a kind of program.
pub trait Steps: Send {
    /// Returns the requirements of the program before its first step.
    fn needs(&self) -> Needs;

    /// Returns whether the operation continues without its command and its session, as SANITIZE does.
    fn survives_abort(&self) -> bool {
        false
    }

    /// Returns the next step, after a completion if one is given.
    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step;
}

/// A command that consists of several block requests.
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
    /// Creates a program for a command of this nexus.
    pub fn new(nexus: &Arc<Nexus>, steps: impl Steps + 'static) -> Box<Program> {
        Box::new(Program { nexus: nexus.clone(), steps: Box::new(steps) })
    }

    /// Returns the requirements of the program before its first step.
    pub fn needs(&self) -> Needs {
        self.steps.needs()
    }

    /// Returns whether the program must be stepped until its end, even after its command or session has
    /// ended.
    pub fn survives_abort(&self) -> bool {
        self.steps.survives_abort()
    }

    /// Returns the next step.
    pub fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        match self.steps.step(completed, memory) {
            Step::Finished(outcome) => Step::Finished(self.nexus.finish(outcome)),
            Step::Respond(outcome) => Step::Respond(self.nexus.finish(outcome)),
            step => step,
        }
    }
}
