//! Errors of the protocol: errors in replies, and errors that end a connection.

use block::Status;

use super::wire::CommandFlags;

/// An error in a reply, with the protocol's numbers ("Error values").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[repr(u32)]
pub enum NbdError {
    /// Operation not permitted: a write to a read-only export.
    #[error("operation not permitted")]
    Perm = 1,
    /// I/O error.
    #[error("input/output error")]
    Io = 5,
    /// Out of memory.
    #[error("out of memory")]
    NoMem = 12,
    /// Invalid request.
    #[error("invalid argument")]
    Invalid = 22,
    /// No space left, or a write past the end.
    #[error("no space left on device")]
    NoSpace = 28,
    /// The data is too long for an unfragmented reply (DF).
    #[error("value too large")]
    Overflow = 75,
    /// A write-zeroes request with FAST_ZERO would be slow.
    #[error("operation not supported")]
    NotSupported = 95,
    /// The server is shutting down.
    #[error("server is shutting down")]
    Shutdown = 108,
}

impl NbdError {
    /// All errors.
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

    /// Returns the number on the wire.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Converts a number from the wire; 0 is success (`None`). "Error values": a client SHOULD treat an
    /// unexpected number as `EINVAL`.
    pub fn from_code(code: u32) -> Option<NbdError> {
        (code != 0).then(|| {
            NbdError::ALL.into_iter().find(|error| error.code() == code).unwrap_or(NbdError::Invalid)
        })
    }
}

/// Converts the status of a request to the error in its reply; `None` is success.
///
/// "Error values": `ENOTSUP` is reserved for a `WRITE_ZEROES` with `FAST_ZERO`, so `flags` must be those of
/// the request. `ENOMEM` SHOULD be avoided, so only a lack of memory maps to it.
pub const fn error_of(status: Status, flags: CommandFlags) -> Option<NbdError> {
    Some(match status {
        Status::Ok => return None,
        Status::NotSupported if flags.contains(CommandFlags::FAST_ZERO) => NbdError::NotSupported,
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

/// Converts the error of a reply to a client's status; `None` is success.
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

/// A protocol violation that leaves the stream unparseable, so the connection must be dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fatal {
    /// A message does not start with the negotiated magic.
    #[error("a message starts with {found:#x} where {expected:#x} is expected")]
    BadMagic {
        /// The magic found.
        found: u64,
        /// The magic expected.
        expected: u64,
    },
    /// A payload is longer than the limit up to which it is read and discarded.
    #[error("the payload of {len} bytes exceeds the limit of {limit}")]
    PayloadTooLong {
        /// Its length in bytes.
        len: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The length of a chunk does not fit its type.
    #[error("a chunk of type {kind:#x} cannot be {len} bytes long")]
    ChunkLength {
        /// Type of the chunk.
        kind: u16,
        /// Its length in bytes.
        len: u64,
    },
    /// A chunk that is no error has a type that is unknown, or invalid for this reply.
    #[error("an unexpected chunk of type {kind:#x}")]
    UnexpectedChunk {
        /// Type of the chunk.
        kind: u16,
    },
    /// A chunk lies outside the request that it answers, is repeated, or leaves part of it unanswered.
    #[error("a reply does not fit its request: {why}")]
    ReplyMismatch {
        /// The mismatch.
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
    fn enotsup_only_answers_fast_zero() {
        let fast = CommandFlags::FAST_ZERO;
        assert_eq!(error_of(Status::NotSupported, fast), Some(NbdError::NotSupported));
        assert_eq!(error_of(Status::NotSupported, CommandFlags::FUA), Some(NbdError::Invalid));
    }

    #[test]
    fn statuses_with_an_nbd_error_convert_back() {
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
