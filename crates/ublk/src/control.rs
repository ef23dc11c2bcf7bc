//! Interface to the driver's control side: executes a command with its buffer.
//!
//! [`KernelControl`](crate::KernelControl) sends commands to `/dev/ublk-control`. Their meaning is defined in
//! [`Driver`](crate::Driver).

use crate::abi::{ControlCommand, ControlOp};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// A control command. Address and length of its buffer are set on execution.
#[derive(Clone, Debug)]
pub struct Command {
    /// The command.
    pub op: ControlOp,
    /// The device; `u32::MAX` in ADD_DEV: any free number.
    pub device: u32,
    /// Inline argument.
    pub data: u64,
    /// Input and output buffer. Empty if the command has none.
    pub buffer: Vec<u8>,
    /// Path of the character device, for devices that may be unprivileged.
    pub path: Option<String>,
    /// Time limit.
    pub limit: Duration,
}

impl Command {
    /// The payload of its SQE without address, and its buffer, which starts with the path.
    pub(crate) fn encoded(&self) -> (ControlCommand, Vec<u8>) {
        let mut buffer = Vec::new();
        if let Some(path) = &self.path {
            buffer.extend_from_slice(path.as_bytes());
            buffer.push(0);
        }
        let path_len = buffer.len();
        buffer.extend_from_slice(&self.buffer);
        let command = ControlCommand {
            dev_id: self.device,
            queue_id: u16::MAX,
            // The longest buffer is a path and a structure, so this fits.
            len: buffer.len() as u16,
            addr: 0,
            data: [self.data],
            dev_path_len: path_len as u16,
            pad: 0,
            reserved: 0,
        };
        (command, buffer)
    }
}

/// Why a command failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The driver returned a positive errno.
    Errno(i32),
    /// The driver did not answer in time: the command may still be in flight.
    NoAnswer(Duration),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Errno(errno) => io::Error::from_raw_os_error(*errno).fmt(f),
            Refusal::NoAnswer(limit) => write!(f, "no answer within {} s", limit.as_secs()),
        }
    }
}

/// Executes commands of a driver.
pub trait Control: Send + Sync {
    /// Executes a command; returns its result and its output buffer. Blocks the calling thread at most for
    /// the command's limit.
    ///
    /// # Errors
    /// [`Refusal`].
    fn execute(&self, command: Command) -> Result<(u32, Vec<u8>), Refusal>;

    /// Opens a device's character device, once its node exists.
    ///
    /// # Errors
    /// Errors of the operating system, or the time limit.
    fn open(&self, device: u32, limit: Duration) -> io::Result<OwnedFd>;

    /// Waits until the character device may be opened: udev changes the owner of a node after creating it.
    ///
    /// # Errors
    /// The time limit.
    fn await_owned(&self, device: u32, limit: Duration) -> io::Result<()>;

    /// Waits until the block device's node exists.
    ///
    /// # Errors
    /// The time limit.
    fn await_node(&self, device: u32, limit: Duration) -> io::Result<()>;

    /// Numbers of all devices, including those of other processes.
    fn devices(&self) -> Vec<u32>;
}
