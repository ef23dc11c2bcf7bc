//! Results of commands: SAM-6 section 5.3.

use crate::Sense;

/// Status of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum ScsiStatus {
    /// The command succeeded.
    Good = 0x00,
    /// The sense data describes an error or event.
    CheckCondition = 0x02,
    /// PRE-FETCH: all blocks fit into the cache.
    ConditionMet = 0x04,
    /// The logical unit is busy; the initiator should retry.
    Busy = 0x08,
    /// Another nexus holds a reservation.
    ReservationConflict = 0x18,
    /// The task set is full; the initiator should retry.
    TaskSetFull = 0x28,
    /// Another nexus aborted the command, and the control mode page has TAS set.
    TaskAborted = 0x40,
}

/// Difference between the bytes that a command would move and those that the initiator expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residual {
    /// The lengths agree.
    None,
    /// The initiator expected this many bytes more than the command would move.
    Underflow(u32),
    /// The command would move this many bytes more than the initiator expected.
    Overflow(u32),
}

/// The result of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Status.
    pub status: ScsiStatus,
    /// Sense data; [`Sense::NONE`] unless the status is CHECK CONDITION.
    pub sense: Sense,
    /// Whether sense data is sent in the descriptor format (D_SENSE in the control mode page).
    pub descriptor_sense: bool,
    /// Data-in of a command without block reads, truncated to its allocation length. Empty (and not
    /// allocated) for all other commands. The transport also truncates it to the length that the initiator
    /// expects.
    pub data: Vec<u8>,
    /// Bytes that the command moved or would move, in its data direction, according to its CDB.
    pub wanted: u64,
}

impl Outcome {
    /// Creates a success without data-in. `wanted`: bytes of data-out that the CDB requests.
    pub fn good(wanted: u64) -> Outcome {
        Outcome {
            status: ScsiStatus::Good,
            sense: Sense::NONE,
            descriptor_sense: false,
            data: Vec::new(),
            wanted,
        }
    }

    /// Creates a success with data-in, which is truncated to the allocation length.
    pub fn with_data(mut data: Vec<u8>, allocation: u32) -> Outcome {
        data.truncate(allocation as usize);
        let wanted = data.len() as u64;
        Outcome { data, ..Outcome::good(wanted) }
    }

    /// Creates a CHECK CONDITION. The format of the sense data is set when the outcome leaves the crate.
    pub fn check(sense: Sense) -> Outcome {
        Outcome { status: ScsiStatus::CheckCondition, sense, ..Outcome::good(0) }
    }

    /// Creates an outcome with a status and without sense data.
    pub fn status(status: ScsiStatus) -> Outcome {
        Outcome { status, ..Outcome::good(0) }
    }

    /// Returns the residual of a command, if the initiator expects `expected` bytes: RFC 7143 section
    /// 11.4.5.
    pub fn residual(&self, expected: u32) -> Residual {
        let cut = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        match u64::from(expected) {
            expected if self.wanted > expected => Residual::Overflow(cut(self.wanted - expected)),
            expected if self.wanted < expected => Residual::Underflow(cut(expected - self.wanted)),
            _ => Residual::None,
        }
    }

    /// Writes the sense data in its format. Returns its length; 0 unless the status is CHECK CONDITION.
    pub fn sense_bytes(&self, into: &mut [u8; Sense::LEN_MAX]) -> usize {
        if self.status != ScsiStatus::CheckCondition {
            return 0;
        }
        self.sense.encode(self.descriptor_sense, into)
    }
}

impl From<Sense> for Outcome {
    fn from(sense: Sense) -> Outcome {
        Outcome::check(sense)
    }
}
