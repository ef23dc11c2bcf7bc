//! Interface to the driver's control side: executes a command with its buffer.
//!
//! [`KernelControl`](crate::KernelControl) sends commands to `/dev/ublk-control`. [`Driver`](crate::Driver)
//! defines their meaning.

use crate::abi::{ControlCommand, ControlOp};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// A control command. The address and length of its buffer are set on execution.
#[derive(Clone, Debug)]
pub struct Command {
    /// The command.
    pub op: ControlOp,
    /// The device; `u32::MAX` in ADD_DEV selects any free number.
    pub device: u32,
    /// Inline argument.
    pub data: u64,
    /// Input and output buffer; empty if the command has none.
    pub buffer: Vec<u8>,
    /// Path of the character device, for devices that may be unprivileged.
    pub path: Option<String>,
    /// Time limit.
    pub limit: Duration,
}

impl Command {
    /// Returns the payload of the command's SQE without address, and its buffer, which starts with the
    /// path.
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
            // The longest buffer is a path and a structure, so the length fits.
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

/// Reasons why a command failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The driver returned a positive errno.
    Errno(i32),
    /// The driver did not answer within this time; the command may still be in flight.
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
    /// Executes a command; returns its result and its output buffer. Blocks the calling thread for at most
    /// the command's time limit.
    ///
    /// # Errors
    /// See [`Refusal`].
    fn execute(&self, command: Command) -> Result<(u32, Vec<u8>), Refusal>;

    /// Opens a device's character device, once its node exists.
    ///
    /// # Errors
    /// An error of the operating system, or the time limit was exceeded.
    fn open(&self, device: u32, limit: Duration) -> io::Result<OwnedFd>;

    /// Waits until the character device may be opened, because udev changes the owner of a node after
    /// creating it.
    ///
    /// # Errors
    /// The time limit was exceeded.
    fn await_owned(&self, device: u32, limit: Duration) -> io::Result<()>;

    /// Waits until the block device's node exists.
    ///
    /// # Errors
    /// The time limit was exceeded.
    fn await_node(&self, device: u32, limit: Duration) -> io::Result<()>;

    /// Returns the numbers of all devices, including those of other processes.
    fn devices(&self) -> Vec<u32>;
}
