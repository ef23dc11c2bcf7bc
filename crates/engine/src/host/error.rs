//! Errors of a host's devices: a kind for decisions, a message for people, and the cause.

use crate::device::DeviceError;
use std::error::Error;
use std::fmt;

/// Kinds of errors that callers distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostErrorKind {
    /// The name is in use in this process.
    NameTaken,
    /// No device has the name.
    NoDevice,
    /// A client has the device in use: the call succeeds once it has gone.
    InUse,
    /// Other devices use the device: they must be removed first.
    HasHolders,
    /// The final flush failed: writes since the last successful flush may be lost.
    Flush,
    /// The device does not allow this in its present state; nothing was changed.
    Refused,
    /// A system call, a driver or a file failed.
    Failed,
}

/// An error of a host's device. Displays what failed and what to do about it.
#[derive(Debug)]
pub struct HostError {
    kind: HostErrorKind,
    /// Empty if the source is the whole message.
    context: String,
    source: Option<Box<dyn Error + Send + Sync>>,
    /// The errno that the kernel's ioctl would return, positive.
    errno: i32,
}

impl HostError {
    /// Creates an error from a message.
    pub fn new(kind: HostErrorKind, context: impl Into<String>) -> HostError {
        HostError { kind, context: context.into(), source: None, errno: kind.errno() }
    }

    /// Creates an error from its cause.
    pub fn caused(kind: HostErrorKind, source: impl Error + Send + Sync + 'static) -> HostError {
        HostError { kind, context: String::new(), source: Some(Box::new(source)), errno: kind.errno() }
    }

    /// Creates an error from its cause, with the errno that the kernel's ioctl would return.
    pub(crate) fn with_errno(
        kind: HostErrorKind,
        errno: i32,
        source: impl Error + Send + Sync + 'static,
    ) -> HostError {
        HostError { errno, ..HostError::caused(kind, source) }
    }

    /// Creates an error of kind [`Failed`](HostErrorKind::Failed): what could not be done, and the cause.
    pub fn failed(context: impl Into<String>, source: impl Error + Send + Sync + 'static) -> HostError {
        HostError { context: context.into(), ..HostError::caused(HostErrorKind::Failed, source) }
    }

    pub(crate) fn name_taken() -> HostError {
        HostError::new(HostErrorKind::NameTaken, "a device of that name exists (choose another with --name)")
    }

    /// Creates the error that no device has the name.
    pub fn no_device() -> HostError {
        HostError::new(HostErrorKind::NoDevice, "there is no device of that name (see blockyard list)")
    }

    pub(crate) fn held_by(holder: &str) -> HostError {
        HostError::new(HostErrorKind::HasHolders, format!("{holder} uses it (remove that first)"))
    }

    pub(crate) fn flush() -> HostError {
        let text = "the final flush failed: writes that were not flushed before may be lost";
        HostError::new(HostErrorKind::Flush, text)
    }

    /// Kind of the error.
    pub fn kind(&self) -> HostErrorKind {
        self.kind
    }

    /// The errno that the kernel's ioctl would return, positive.
    pub fn errno(&self) -> i32 {
        self.errno
    }

    /// Whether the call would succeed once a client or a holder has let go of the device.
    pub(crate) fn is_in_use(&self) -> bool {
        matches!(self.kind, HostErrorKind::InUse | HostErrorKind::HasHolders)
    }
}

impl HostErrorKind {
    fn errno(self) -> i32 {
        match self {
            HostErrorKind::NoDevice => libc::ENXIO,
            HostErrorKind::NameTaken | HostErrorKind::InUse | HostErrorKind::HasHolders => libc::EBUSY,
            HostErrorKind::Flush | HostErrorKind::Refused | HostErrorKind::Failed => libc::EINVAL,
        }
    }
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            None => f.write_str(&self.context),
            Some(source) if self.context.is_empty() => write!(f, "{source}"),
            Some(source) => write!(f, "{}: {source}", self.context),
        }
    }
}

impl Error for HostError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.source {
            Some(source) => Some(&**source),
            None => None,
        }
    }
}

impl From<DeviceError> for HostError {
    fn from(error: DeviceError) -> HostError {
        let errno = match &error {
            DeviceError::Table(error) => error.why.errno(),
            _ => libc::EINVAL,
        };
        HostError { errno, ..HostError::caused(HostErrorKind::Failed, error) }
    }
}
