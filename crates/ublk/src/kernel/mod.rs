//! Access to the kernel's driver: control commands through io_uring, device nodes, descriptors in shared
//! memory.
//!
//! Each command uses its own ring while it runs, taken from a small pool. The kernel executes most commands
//! on a worker thread, so the caller waits with a time limit. A command that never completes leaks its ring
//! and its buffer, because the kernel may still write to the buffer.
//!
//! *Invariant:* the memory that a command refers to outlives the command.

mod descriptors;
mod nodes;
mod ring;
mod shared;

pub use descriptors::{Descriptors, SharedDescriptors};
pub use nodes::{block_path, char_path};
pub use shared::SharedFile;

use crate::abi::{ControlOp, DeviceInfo};
use crate::control::{Command, Control, Refusal};
use ring::CommandRing;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The driver's control device.
pub const CONTROL_PATH: &str = "/dev/ublk-control";
/// Name of the misc device in `/proc/misc`, from which a missing node can be created.
const MISC_NAME: &str = "ublk-control";

/// A number that no device has: the driver's numbers are far below it.
const NO_DEVICE: u32 = i32::MAX as u32;
/// Whether a command of this process never completed. The kernel waits for it when the process exits.
static STUCK: AtomicBool = AtomicBool::new(false);
/// Maximum number of rings kept for later commands.
const IDLE_MAX: usize = 4;
/// Time limit of the first queries of the driver.
const PROBE: Duration = Duration::from_secs(5);

/// Reasons why the kernel's driver cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// The driver is not loaded.
    #[error("this kernel has no ublk driver (run modprobe ublk_drv; it needs Linux 6.0 or later)")]
    NoDriver,
    /// The driver exists, but its device node is missing.
    #[error(
        "the ublk driver is loaded, but {CONTROL_PATH} is missing (mount devtmpfs on /dev, or pass the node through)"
    )]
    NoNode,
    /// The node cannot be opened.
    #[error("{CONTROL_PATH}: {0} (run as root, or let your user open it)")]
    Denied(#[source] io::Error),
    /// io_uring is missing, forbidden, or lacks 128-byte submissions.
    #[error(
        "ublk needs io_uring: {0} (allow it: sysctl kernel.io_uring_disabled=0, seccomp; Linux 5.19 or later)"
    )]
    NoUring(#[source] io::Error),
}

/// Control access to the kernel's driver.
#[derive(Debug)]
pub struct KernelControl {
    device: File,
    /// Unused rings.
    idle: Mutex<Vec<CommandRing>>,
    /// Whether the driver is older than Linux 6.4 and accepts only bare command numbers.
    legacy: bool,
    /// The driver's features, which cannot change while its control device is open; `None` if it cannot
    /// report them.
    offered: Option<Vec<u8>>,
}

impl KernelControl {
    /// Opens the control device.
    ///
    /// # Errors
    /// See [`Unusable`].
    pub fn open() -> Result<KernelControl, Unusable> {
        let device = OpenOptions::new().read(true).write(true).open(CONTROL_PATH).map_err(|why| {
            match why.kind() {
                io::ErrorKind::NotFound if has_driver() => Unusable::NoNode,
                io::ErrorKind::NotFound => Unusable::NoDriver,
                // The node exists, but the driver does not.
                _ if matches!(why.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => Unusable::NoDriver,
                _ => Unusable::Denied(why),
            }
        })?;
        let ring = CommandRing::new().map_err(Unusable::NoUring)?;
        let mut control =
            KernelControl { device, idle: Mutex::new(vec![ring]), legacy: false, offered: None };
        let command =
            |op, device, len| Command { op, device, data: 0, buffer: vec![0; len], path: None, limit: PROBE };
        if let Ok((_, offered)) = control.execute(command(ControlOp::GetFeatures, 0, size_of::<u64>())) {
            control.offered = Some(offered);
            return Ok(control);
        }
        // An old driver answers an unknown encoded number differently from an unknown device.
        let probe = control.execute(command(ControlOp::GetDevInfo, NO_DEVICE, size_of::<DeviceInfo>()));
        control.legacy = matches!(probe, Err(Refusal::Errno(libc::EINVAL | libc::EOPNOTSUPP)));
        Ok(control)
    }
}

/// Returns whether a command of this process never completed.
pub fn is_stuck() -> bool {
    STUCK.load(Relaxed)
}

fn has_driver() -> bool {
    std::fs::read_to_string("/proc/misc")
        .is_ok_and(|list| list.lines().any(|line| line.split_whitespace().nth(1) == Some(MISC_NAME)))
}

impl Control for KernelControl {
    fn execute(&self, command: Command) -> Result<(u32, Vec<u8>), Refusal> {
        if let (ControlOp::GetFeatures, Some(offered)) = (command.op, &self.offered) {
            return Ok((0, offered.clone()));
        }
        let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let ring = match kept {
            Some(ring) => ring,
            None => CommandRing::new()
                .map_err(|why| Refusal::Errno(why.raw_os_error().unwrap_or(libc::ENOMEM)))?,
        };
        let code = match command.op.legacy_code() {
            Some(code) if self.legacy => code,
            _ => command.op.code(),
        };
        let (ring, answer) = ring.execute(&self.device, code, &command);
        if matches!(answer, Err(Refusal::NoAnswer(_))) {
            STUCK.store(true, Relaxed);
        }
        if let Some(ring) = ring {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if idle.len() < IDLE_MAX {
                idle.push(ring);
            }
        }
        answer
    }

    fn open(&self, device: u32, limit: Duration) -> io::Result<OwnedFd> {
        nodes::open_char(device, limit)
    }

    fn await_owned(&self, device: u32, limit: Duration) -> io::Result<()> {
        nodes::await_owned(device, limit)
    }

    fn await_node(&self, device: u32, limit: Duration) -> io::Result<()> {
        nodes::await_node(Path::new(&block_path(device)), limit)
    }

    fn devices(&self) -> Vec<u32> {
        nodes::devices()
    }
}
