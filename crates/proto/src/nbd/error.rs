//! Errors of the protocol: those that a reply carries, and those that end a connection.

use block::Status;

use super::wire::CommandFlags;

/// An error as it travels in a reply. The numbers are the protocol's ("Error values").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[repr(u32)]
pub enum NbdError {
    /// Not permitted: a write to a read-only export.
    #[error("operation not permitted")]
    Perm = 1,
    /// Input or output failed.
    #[error("input/output error")]
    Io = 5,
    /// Out of memory.
    #[error("out of memory")]
    NoMem = 12,
    /// The request makes no sense.
    #[error("invalid argument")]
    Invalid = 22,
    /// No space left, or a write past the end.
    #[error("no space left on device")]
    NoSpace = 28,
    /// Too long to be sent unfragmented.
    #[error("value too large")]
    Overflow = 75,
    /// A fast zero that would not be fast.
    #[error("operation not supported")]
    NotSupported = 95,
    /// The server is shutting down.
    #[error("server is shutting down")]
    Shutdown = 108,
}

impl NbdError {
    /// Every one of them.
    pub const ALL: [NbdError; 8] = [
        NbdError::Perm,
        NbdError::Io,
        NbdError::NoMem,
        NbdError::Invalid,
        NbdError::NoSpace,
        NbdError::Overflow,
        NbdError::NotSupported,
        NbdError::Shutdown,
    ];

    /// The number on the wire.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// From the wire; 0 is success. "Error values": a client SHOULD take a number that it does not
    /// expect for `EINVAL`.
    pub fn from_code(code: u32) -> Option<NbdError> {
        (code != 0).then(|| {
            NbdError::ALL.into_iter().find(|error| error.code() == code).unwrap_or(NbdError::Invalid)
        })
    }
}

/// What a reply says of how a request ended; `None` is success.
///
/// "Error values": `ENOTSUP` is for a `WRITE_ZEROES` with `FAST_ZERO` only, so `flags` are those of
/// the request. `ENOMEM` SHOULD NOT be sent if it can be avoided: only for memory itself.
pub const fn error_of(status: Status, flags: CommandFlags) -> Option<NbdError> {
    Some(match status {
        Status::Ok => return None,
        Status::NotSupported if flags.has(CommandFlags::FAST_ZERO) => NbdError::NotSupported,
        Status::NotSupported | Status::Invalid => NbdError::Invalid,
        Status::NoSpace => NbdError::NoSpace,
        Status::ReservationConflict | Status::NotPermitted => NbdError::Perm,
        Status::Resource => NbdError::NoMem,
        Status::Offline => NbdError::Shutdown,
        Status::Timeout
        | Status::Transport
        | Status::Target
        | Status::Medium
        | Status::Protection
        | Status::DeviceResource
        | Status::Again
        | Status::Requeue
        | Status::ZoneOpenResource
        | Status::ZoneActiveResource
        | Status::DurationLimit
        | Status::IoError => NbdError::Io,
    })
}

/// What a client makes of an error in a reply; `None` is success.
pub const fn status_of(error: Option<NbdError>) -> Status {
    match error {
        None => Status::Ok,
        Some(NbdError::Perm | NbdError::Io) => Status::IoError,
        Some(NbdError::NoMem) => Status::Resource,
        Some(NbdError::Invalid | NbdError::Overflow) => Status::Invalid,
        Some(NbdError::NoSpace) => Status::NoSpace,
        Some(NbdError::NotSupported) => Status::NotSupported,
        Some(NbdError::Shutdown) => Status::Offline,
    }
}

/// Why a connection can only be dropped: the peer broke a rule past which the stream has no meaning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fatal {
    /// A message does not start with the magic that was agreed on.
    #[error("a message starts with {found:#x} where {expected:#x} was agreed on")]
    BadMagic {
        /// What is there.
        found: u64,
        /// What should be.
        expected: u64,
    },
    /// A payload is so long that reading past it would be an attack on us.
    #[error("a payload of {len} bytes where at most {limit} are taken")]
    PayloadTooLong {
        /// Its length.
        len: u64,
        /// The limit.
        limit: u64,
    },
    /// A chunk's length does not fit its type.
    #[error("a chunk of type {kind:#x} cannot be {len} bytes long")]
    ChunkLength {
        /// Its type.
        kind: u16,
        /// Its length.
        len: u64,
    },
    /// A chunk that is not an error has a type that is not known, or not one for this reply.
    #[error("an unexpected chunk of type {kind:#x}")]
    UnexpectedChunk {
        /// Its type.
        kind: u16,
    },
    /// A chunk lies outside the request that it answers, comes twice, or leaves part unanswered.
    #[error("a reply does not fit its request: {why}")]
    ReplyMismatch {
        /// What does not fit.
        why: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_comes_back_from_its_number() {
        for error in NbdError::ALL {
            assert_eq!(NbdError::from_code(error.code()), Some(error));
        }
        assert_eq!(NbdError::from_code(0), None);
    }

    #[test]
    fn an_unexpected_number_is_taken_for_einval() {
        for code in [2, 6, 107, u32::MAX] {
            assert_eq!(NbdError::from_code(code), Some(NbdError::Invalid), "{code}");
        }
    }

    #[test]
    fn enotsup_is_only_said_to_a_fast_zero() {
        let fast = CommandFlags::FAST_ZERO;
        assert_eq!(error_of(Status::NotSupported, fast), Some(NbdError::NotSupported));
        assert_eq!(error_of(Status::NotSupported, CommandFlags::FUA), Some(NbdError::Invalid));
    }

    #[test]
    fn statuses_that_both_sides_know_come_back() {
        let fast = CommandFlags::FAST_ZERO;
        for status in [
            Status::Ok,
            Status::NoSpace,
            Status::Invalid,
            Status::Resource,
            Status::Offline,
            Status::IoError,
            Status::NotSupported,
        ] {
            assert_eq!(status_of(error_of(status, fast)), status);
        }
    }
}
