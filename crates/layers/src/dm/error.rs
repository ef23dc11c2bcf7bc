//! Errors of tables and messages, with the kernel's texts and errnos.

use std::borrow::Cow;
use std::fmt;

/// The reason why a target cannot be constructed or activated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetError {
    text: Cow<'static, str>,
    errno: i32,
    /// A detail that the kernel does not report, such as the reason why a device could not be opened. May be
    /// empty.
    detail: String,
}

impl TargetError {
    /// Creates an error with the kernel's text and `EINVAL`.
    pub const fn new(text: &'static str) -> TargetError {
        TargetError { text: Cow::Borrowed(text), errno: libc::EINVAL, detail: String::new() }
    }

    /// Creates an error with a formatted text and `EINVAL`.
    pub fn of(text: String) -> TargetError {
        TargetError { text: Cow::Owned(text), ..TargetError::new("") }
    }

    /// Creates the error for a device that could not be opened; `text` is the target's text for that.
    pub fn lookup(text: &'static str, why: LookupError) -> TargetError {
        TargetError { errno: why.errno, detail: why.why, ..TargetError::new(text) }
    }

    /// Returns the error with the positive errno `errno`.
    #[must_use]
    pub fn with_errno(self, errno: i32) -> TargetError {
        TargetError { errno, ..self }
    }

    /// Returns the kernel's text, without the detail.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the errno of the kernel's ioctl, positive.
    pub fn errno(&self) -> i32 {
        self.errno
    }
}

impl fmt::Display for TargetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, ": {}", self.detail) }
    }
}

impl std::error::Error for TargetError {}

/// The reason why a device could not be opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LookupError {
    /// The reason, with the device's name.
    pub why: String,
    /// The errno, positive.
    pub errno: i32,
}

/// The reason why a message was rejected, as the kernel's errno.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MessageError {
    /// The target does not know the message, or its arguments are wrong.
    #[error("Invalid argument")]
    Invalid,
    /// The device is suspended, or the same operation is in progress.
    #[error("Device or resource busy")]
    Busy,
    /// Another errno, positive.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Errno(i32),
}

impl MessageError {
    /// Returns the errno, positive.
    pub fn errno(self) -> i32 {
        match self {
            MessageError::Invalid => libc::EINVAL,
            MessageError::Busy => libc::EBUSY,
            MessageError::Errno(errno) => errno,
        }
    }
}
