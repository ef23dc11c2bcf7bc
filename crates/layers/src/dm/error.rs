//! What goes wrong with tables and messages, in the kernel's words and with its errnos.

use std::borrow::Cow;
use std::fmt;

/// What is wrong with the arguments of a target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetError {
    text: Cow<'static, str>,
    errno: i32,
    /// What the kernel does not say: why a device did not open. Empty where there is nothing to add.
    detail: String,
}

impl TargetError {
    /// The kernel's own words, with `EINVAL`.
    pub const fn new(text: &'static str) -> TargetError {
        TargetError { text: Cow::Borrowed(text), errno: libc::EINVAL, detail: String::new() }
    }

    /// With words that had to be put together.
    pub fn of(text: String) -> TargetError {
        TargetError { text: Cow::Owned(text), ..TargetError::new("") }
    }

    /// A device did not open; `text`: what the target says of that.
    pub fn lookup(text: &'static str, why: LookupError) -> TargetError {
        TargetError { errno: why.errno, detail: why.why, ..TargetError::new(text) }
    }

    /// The same with another errno.
    #[must_use]
    pub fn with_errno(self, errno: i32) -> TargetError {
        TargetError { errno, ..self }
    }

    /// The kernel's words alone.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What the kernel's ioctl would answer with, positive.
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

/// Why a device does not open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LookupError {
    /// In words, with the device's name.
    pub why: String,
    /// As an errno, positive.
    pub errno: i32,
}

/// Why a message was not heeded: the errno that the kernel answers with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MessageError {
    /// It is not one that the target knows, or names what it does not have.
    #[error("Invalid argument")]
    Invalid,
    /// The device is suspended, or what is asked for is under way.
    #[error("Device or resource busy")]
    Busy,
    /// Another errno, positive.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Errno(i32),
}

impl MessageError {
    /// As an errno, positive.
    pub fn errno(self) -> i32 {
        match self {
            MessageError::Invalid => libc::EINVAL,
            MessageError::Busy => libc::EBUSY,
            MessageError::Errno(errno) => errno,
        }
    }
}
