//! The reasons why paths fail, for logs.

use super::state::Multipath;
use block::Status;
use std::fmt;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

/// The reason why a path failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathFailure {
    /// The path was unreachable when the table was loaded.
    Unreachable,
    /// The message `fail_path` failed the path.
    Message,
    /// The activation of the path failed (MP-6).
    Activation,
    /// A request on the path failed with this status.
    Request(Status),
}

/// Offset of packed request failures, which are this plus the errno. Other failures are smaller numbers; 0
/// means none.
const REQUEST: u32 = 1 << 16;

impl PathFailure {
    fn pack(self) -> u32 {
        match self {
            PathFailure::Unreachable => 1,
            PathFailure::Message => 2,
            PathFailure::Activation => 3,
            PathFailure::Request(status) => REQUEST + status.errno().unsigned_abs(),
        }
    }

    fn unpack(packed: u32) -> Option<PathFailure> {
        Some(match packed {
            0 => return None,
            1 => PathFailure::Unreachable,
            2 => PathFailure::Message,
            3 => PathFailure::Activation,
            _ => PathFailure::Request(Status::from_errno(packed.saturating_sub(REQUEST) as i32)),
        })
    }
}

impl fmt::Display for PathFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathFailure::Unreachable => f.write_str("unreachable when the table was loaded"),
            PathFailure::Message => f.write_str("failed by a fail_path message"),
            PathFailure::Activation => f.write_str("activation failed"),
            PathFailure::Request(Status::Timeout) => f.write_str("a request timed out"),
            PathFailure::Request(Status::Transport) => {
                f.write_str("a request failed: its connection was lost")
            }
            PathFailure::Request(Status::Offline) => f.write_str("a request failed: the device is gone"),
            PathFailure::Request(status) => {
                write!(f, "a request failed: {}", io::Error::from_raw_os_error(status.errno()))
            }
        }
    }
}

impl Multipath {
    /// Fails a path (MP-1). Records the reason if the path was active. Returns whether it was.
    pub fn fail_path_for(&self, path: usize, failure: PathFailure) -> bool {
        if self.is_active(path) {
            // Two queues may see the path fail at once; either reason is true.
            self.failure(path).store(failure.pack(), Relaxed);
        }
        self.fail_path(path)
    }

    /// Returns the reason of a path's last failure; `None`: it never failed.
    pub fn path_failure(&self, path: usize) -> Option<PathFailure> {
        PathFailure::unpack(self.failure(path).load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_packed_and_described() {
        for (failure, expected) in [
            (PathFailure::Unreachable, "unreachable when the table was loaded"),
            (PathFailure::Message, "failed by a fail_path message"),
            (PathFailure::Activation, "activation failed"),
            (PathFailure::Request(Status::Transport), "a request failed: its connection was lost"),
            (PathFailure::Request(Status::Timeout), "a request timed out"),
            (PathFailure::Request(Status::IoError), "a request failed: Input/output error (os error 5)"),
        ] {
            assert_eq!(PathFailure::unpack(failure.pack()), Some(failure));
            assert_eq!(failure.to_string(), expected);
        }
        assert_eq!(PathFailure::unpack(0), None);
    }
}
