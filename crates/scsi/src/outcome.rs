//! How a command ends: SAM-6 section 5.3.

use crate::Sense;

/// Status of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum ScsiStatus {
    /// Success.
    Good = 0x00,
    /// The sense data describes what happened.
    CheckCondition = 0x02,
    /// PRE-FETCH: everything fits into the cache.
    ConditionMet = 0x04,
    /// The logical unit is busy; the initiator retries.
    Busy = 0x08,
    /// Another nexus holds a reservation.
    ReservationConflict = 0x18,
    /// No space in the task set; the initiator retries.
    TaskSetFull = 0x28,
    /// Another nexus aborted the command, and the control mode page has TAS set.
    TaskAborted = 0x40,
}

/// Difference between the bytes that a command wanted to move and those that the initiator expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residual {
    /// Both agree.
    None,
    /// The initiator expected this many bytes more.
    Underflow(u32),
    /// The command wanted to move this many bytes more.
    Overflow(u32),
}

/// The end of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Status.
    pub status: ScsiStatus,
    /// Sense data; [`Sense::NONE`] unless the status is CHECK CONDITION.
    pub sense: Sense,
    /// Sense data goes out in the descriptor format (the control mode page has D_SENSE set).
    pub descriptor_sense: bool,
    /// Data-in of a command without block reads, cut to its allocation length. Empty (and not allocated) for
    /// all others. The transport also cuts it to the length that the initiator expects.
    pub data: Vec<u8>,
    /// Bytes that the command moved or wanted to move, in the direction of its data, by its CDB.
    pub wanted: u64,
}

impl Outcome {
    /// Success without data-in. `wanted`: bytes of data-out that the CDB asks for.
    pub fn good(wanted: u64) -> Outcome {
        Outcome {
            status: ScsiStatus::Good,
            sense: Sense::NONE,
            descriptor_sense: false,
            data: Vec::new(),
            wanted,
        }
    }

    /// Success with data-in, which is cut to the allocation length.
    pub fn with_data(mut data: Vec<u8>, allocation: u32) -> Outcome {
        data.truncate(allocation as usize);
        let wanted = data.len() as u64;
        Outcome { data, ..Outcome::good(wanted) }
    }

    /// CHECK CONDITION. The format of the sense data is set when the outcome leaves the crate.
    pub fn check(sense: Sense) -> Outcome {
        Outcome { status: ScsiStatus::CheckCondition, sense, ..Outcome::good(0) }
    }

    /// A status without sense data.
    pub fn status(status: ScsiStatus) -> Outcome {
        Outcome { status, ..Outcome::good(0) }
    }

    /// The residual of a command of which the initiator expects `expected` bytes: RFC 7143 section 11.4.5.
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
