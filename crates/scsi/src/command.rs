//! Translates a command into the work that the transport has to do for it.

use crate::opcodes::CDB_MAX;
use crate::program::Program;
use crate::reserve::StoreReservations;
use crate::{Lun, Nexus, Outcome, ScsiStatus, Sense, data, dispatch, sense};
use block::{Flags, Op, Status};
use std::sync::Arc;

/// Task attribute: SAM-6 section 8.9.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum TaskAttribute {
    /// The task may be executed in any order.
    #[default]
    Simple,
    /// The task is executed after all earlier commands, and before all later ones.
    Ordered,
    /// The task is executed before all others.
    HeadOfQueue,
    /// Auto contingent allegiance; not supported.
    Aca,
}

/// A command as it arrives from the transport.
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    /// The command descriptor block. Bytes past the length of its operation code are ignored.
    pub cdb: &'a [u8],
    /// Bytes of data-in that the initiator expects.
    pub data_in: u32,
    /// Bytes of data-out that the initiator will send.
    pub data_out: u32,
    /// Task attribute.
    pub attribute: TaskAttribute,
}

/// Information that a command may request about its session.
pub trait Session {
    /// Returns the LUNs of the session, sorted by number.
    fn luns(&self) -> &[Lun];

    /// Returns the nexus of this session and the unit with this NAA designator, for EXTENDED COPY.
    fn find_unit(&self, naa: &[u8]) -> Option<Arc<Nexus>>;
}

/// A single block request of a read, write or flush command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockIo {
    /// Operation: read, write, flush, prefetch.
    pub op: Op,
    /// Offset in bytes.
    pub offset: u64,
    /// Length of the request in bytes, which is whole blocks; 0 only for flushes.
    pub len: u64,
    /// Bytes that move over the transport, at most as many as the initiator expects. If that is not a whole
    /// number of blocks, `len` is larger for a read and smaller for a write.
    pub transfer: u32,
    /// Modifiers.
    pub flags: Flags,
    /// Bytes that the CDB requests: see [`Outcome::wanted`].
    pub wanted: u64,
    /// `log2` of the block size.
    pub block_shift: u8,
    /// Whether sense data is sent in the descriptor format.
    pub descriptor_sense: bool,
}

/// Work that the transport has to do for a command.
#[derive(Debug)]
pub enum Begin {
    /// The command has ended with this outcome.
    Finished(Outcome),
    /// Submit this block request, then call [`complete`].
    Io(BlockIo),
    /// Receive the parameter list, then call [`Parameters::begin`].
    Parameters(Parameters),
    /// Execute the steps of this program.
    Program(Box<Program>),
    /// Run [`StoreReservations::run`] on a thread that may block; its result is the command's outcome.
    Store(Box<StoreReservations>),
}

impl From<Outcome> for Begin {
    fn from(outcome: Outcome) -> Begin {
        Begin::Finished(outcome)
    }
}

impl From<Sense> for Begin {
    fn from(sense: Sense) -> Begin {
        Begin::Finished(sense.into())
    }
}

/// A command that needs its parameter list.
#[derive(Debug)]
pub struct Parameters {
    /// Bytes to receive: the parameter list length of the CDB, but at most as many as the initiator
    /// announced.
    pub len: u32,
    pub(crate) nexus: Arc<Nexus>,
    pub(crate) cdb: [u8; CDB_MAX],
    pub(crate) data_in: u32,
    pub(crate) data_out: u32,
    pub(crate) attribute: TaskAttribute,
}

impl Parameters {
    /// Begins the command with its parameter list.
    pub fn begin(&self, list: &[u8], session: &dyn Session) -> Begin {
        let command = Command {
            cdb: &self.cdb,
            data_in: self.data_in,
            data_out: self.data_out,
            attribute: self.attribute,
        };
        dispatch::continue_with(&self.nexus, &command, session, list)
    }
}

/// Begins a command. For reads and writes it allocates nothing and takes no lock, unless a reservation, a
/// unit attention, or another restriction is in force.
#[inline]
pub fn begin(nexus: &Arc<Nexus>, command: &Command<'_>, session: &dyn Session) -> Begin {
    match data::fast(nexus, command) {
        Some(io) => Begin::Io(io),
        None => dispatch::begin(nexus, command, session),
    }
}

/// Ends a command that consists of a single block request.
pub fn complete(io: &BlockIo, status: Status) -> Outcome {
    match status {
        Status::Ok => Outcome::good(io.wanted),
        Status::ReservationConflict => Outcome::status(ScsiStatus::ReservationConflict),
        _ => {
            let lba = io.offset >> io.block_shift;
            let sense = sense::of_block_status(status, lba, io.op.is_write());
            Outcome { descriptor_sense: io.descriptor_sense, ..Outcome::check(sense) }
        }
    }
}
