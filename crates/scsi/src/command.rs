//! From a command to what the transport has to do for it.

use crate::opcodes::CDB_MAX;
use crate::program::Program;
use crate::reserve::StoreReservations;
use crate::{Lun, Nexus, Outcome, ScsiStatus, Sense, data, dispatch, sense};
use block::{Flags, Op, Status};
use std::sync::Arc;

/// Task attribute: SAM-6 section 8.9.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum TaskAttribute {
    /// Any order.
    #[default]
    Simple,
    /// After all earlier commands, and before all later ones.
    Ordered,
    /// Before all others.
    HeadOfQueue,
    /// Auto contingent allegiance; not supported.
    Aca,
}

/// A command as it arrives.
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    /// The command descriptor block. Bytes past the length that its operation code has are ignored.
    pub cdb: &'a [u8],
    /// Bytes of data-in that the initiator expects.
    pub data_in: u32,
    /// Bytes of data-out that the initiator is going to send.
    pub data_out: u32,
    /// Task attribute.
    pub attribute: TaskAttribute,
}

/// What a command may ask of its session.
pub trait Session {
    /// The LUNs of the session, sorted by number.
    fn luns(&self) -> &[Lun];

    /// The nexus of this session and a unit with this NAA designator: EXTENDED COPY.
    fn find_unit(&self, naa: &[u8]) -> Option<Arc<Nexus>>;
}

/// A single block request: reads, writes and flushes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockIo {
    /// Operation: read, write, flush, prefetch.
    pub op: Op,
    /// Offset in bytes.
    pub offset: u64,
    /// Bytes of the request: whole blocks. 0 only for flushes.
    pub len: u64,
    /// Bytes that move over the transport, at most what the initiator expects. A read may have more, and a write
    /// less, in `len` where that is not a whole number of blocks.
    pub transfer: u32,
    /// Modifiers.
    pub flags: Flags,
    /// Bytes that the CDB asks for: see [`Outcome::wanted`].
    pub wanted: u64,
    /// `log2` of the block size.
    pub block_shift: u8,
    /// Sense data goes out in the descriptor format.
    pub descriptor_sense: bool,
}

/// What the transport has to do for a command.
#[derive(Debug)]
pub enum Begin {
    /// Nothing: the command has ended.
    Finished(Outcome),
    /// One block request, then [`complete`].
    Io(BlockIo),
    /// Receive the parameter list, then [`Parameters::begin`].
    Parameters(Parameters),
    /// Carry out the steps of the program.
    Program(Box<Program>),
    /// Run [`StoreReservations::run`] on a thread that may block; its result is the command's.
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
    /// Bytes to receive: the parameter list length of the CDB. At most what the initiator announced.
    pub len: u32,
    pub(crate) nexus: Arc<Nexus>,
    pub(crate) cdb: [u8; CDB_MAX],
    pub(crate) data_in: u32,
    pub(crate) data_out: u32,
    pub(crate) attribute: TaskAttribute,
}

impl Parameters {
    /// Begins the command, with its parameter list.
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

/// Begins a command. Allocates nothing and takes no lock for reads and writes, unless a reservation, a unit attention,
/// or another restriction is in force.
#[inline]
pub fn begin(nexus: &Arc<Nexus>, command: &Command<'_>, session: &dyn Session) -> Begin {
    match data::fast(nexus, command) {
        Some(io) => Begin::Io(io),
        None => dispatch::begin(nexus, command, session),
    }
}

/// Ends a command of a single block request.
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
