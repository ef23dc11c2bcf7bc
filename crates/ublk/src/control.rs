//! The seam to the driver's control side: one command with its buffer goes in, and comes back.
//!
//! [`KernelControl`](crate::KernelControl) carries commands to `/dev/ublk-control`. What they mean is
//! [`Driver`](crate::Driver)'s business.

use crate::abi::{ControlCommand, ControlOp};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// A control command. Address and length of its buffer are filled in by whoever carries it out.
#[derive(Clone, Debug)]
pub struct Command {
    /// Which.
    pub op: ControlOp,
    /// The device; `u32::MAX` in ADD_DEV: any that is free.
    pub device: u32,
    /// What it wants inline.
    pub data: u64,
    /// What it wants by address, and where the answer lies. Empty when the command has none.
    pub buffer: Vec<u8>,
    /// The path of the character device, for devices that may be unprivileged.
    pub path: Option<String>,
    /// How long it may take.
    pub limit: Duration,
}

impl Command {
    /// The payload of its SQE, without an address, and the whole of its buffer: the path comes first.
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
            // No command's buffer is longer than a path and a structure.
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

/// Why a command was not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The driver's answer: a positive errno.
    Errno(i32),
    /// There is none: the command may still be under way.
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

/// What carries commands to a driver.
pub trait Control: Send + Sync {
    /// Carry a command out: its result, and its buffer as the driver left it. It blocks the calling thread, for
    /// no longer than the command's limit.
    ///
    /// # Errors
    /// See [`Refusal`].
    fn execute(&self, command: Command) -> Result<(u32, Vec<u8>), Refusal>;

    /// Open a device's character device, once its node is there.
    ///
    /// # Errors
    /// The operating system's, or that it did not come in time.
    fn open(&self, device: u32, limit: Duration) -> io::Result<OwnedFd>;

    /// Wait until the character device may be opened: whoever makes its node gives it to its owner after that.
    ///
    /// # Errors
    /// It did not come to that in time.
    fn await_owned(&self, device: u32, limit: Duration) -> io::Result<()>;

    /// Wait until the block device's node is there.
    ///
    /// # Errors
    /// It did not come in time.
    fn await_node(&self, device: u32, limit: Duration) -> io::Result<()>;

    /// The numbers of all devices, made by whomever.
    fn devices(&self) -> Vec<u32>;
}
