//! Why a path was taken out of use, for logs.

use super::state::Multipath;
use block::Status;
use std::fmt;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

/// Why a path was taken out of use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathFailure {
    /// It was unreachable when the table was loaded.
    Unreachable,
    /// The message `fail_path` asked for it.
    Message,
    /// It could not be activated (MP-6).
    Activation,
    /// A request failed on it.
    Request(Status),
}

/// Packed requests are their errno above this; the other failures are their number below it, and 0 is none.
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
            PathFailure::Unreachable => f.write_str("it was unreachable when the table was loaded"),
            PathFailure::Message => f.write_str("the message fail_path asked for it"),
            PathFailure::Activation => f.write_str("it could not be activated"),
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
    /// Takes a path out of use (MP-1), and records why unless it was out of use already. Returns whether it was in use.
    pub fn fail_path_for(&self, path: usize, failure: PathFailure) -> bool {
        if self.is_active(path) {
            // Two queues may see the path fail at once: either reason is true.
            self.failure(path).store(failure.pack(), Relaxed);
        }
        self.fail_path(path)
    }

    /// Why a path was taken out of use the last time.
    pub fn path_failure(&self, path: usize) -> Option<PathFailure> {
        PathFailure::unpack(self.failure(path).load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_packed_and_says_what_happened() {
        for (failure, expected) in [
            (PathFailure::Unreachable, "it was unreachable when the table was loaded"),
            (PathFailure::Message, "the message fail_path asked for it"),
            (PathFailure::Activation, "it could not be activated"),
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
