//! Topologies: the devices that a process serves, and their exports.
//!
//! A topology comes from a TOML file (`up`, `check`) or from a command line (`serve`, `add`). Parsing reports all problems,
//! each with its line and key.
//!
//! ```toml
//! queues = 2                           # I/O threads; also poll and ring
//!
//! [device.disk]
//! stack = "file:disk.img,ro"          # relative to this file; or table = """0 2048 linear file:disk.img 0"""
//! layers = ["split,max_sectors=255"]  # also limits = { max_segments = 64 }
//! scheduler = "mq-deadline"           # or kyber, with parameters behind commas
//! depth = 64
//!
//! [[export]]
//! device = "disk"
//! nbd = "unix:/run/disk.sock"
//! name = "backup"                      # else the device's; instead of nbd: fuse = "FILE", loop = true, nbd-device = 3
//!                                      # or ublk = true or "0,recovery=requeue"
//! ```
//!
//! *Invariant:* names are unique, exports name devices that exist, and two exports that share an
//! address have different names and the same TLS. Nothing here opens a file.

mod conflicts;
mod order;
mod part;
mod read;
mod write;

pub use crate::export::{ExportKind, NbdOptions};
use crate::{DeviceName, LayerSpec, NbdAddress, NbdLimits, SpecError, StackSpec};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The largest number of requests in flight on one hardware queue, which the queue's tags allow.
pub const DEPTH_MAX: u16 = 4096;
pub use crate::QUEUES_MAX;

/// The interface that I/O threads use.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum RingChoice {
    /// io_uring where the kernel allows it, else epoll.
    #[default]
    Auto,
    /// io_uring; the start fails where the kernel does not allow it.
    IoUring,
    /// epoll and a pool of I/O threads.
    Epoll,
}

impl FromStr for RingChoice {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<RingChoice, SpecError> {
        match text {
            "auto" => Ok(RingChoice::Auto),
            "io_uring" => Ok(RingChoice::IoUring),
            "epoll" => Ok(RingChoice::Epoll),
            _ => {
                let near = options::did_you_mean(text, ["auto", "io_uring", "epoll"]);
                Err(SpecError::new(
                    format!("there is no ring \"{text}\""),
                    format!("{near}use auto, io_uring or epoll"),
                ))
            }
        }
    }
}

impl fmt::Display for RingChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            RingChoice::Auto => "auto",
            RingChoice::IoUring => "io_uring",
            RingChoice::Epoll => "epoll",
        })
    }
}

/// A device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSpec {
    /// The name.
    pub name: DeviceName,
    /// The backend, or the table.
    pub stack: StackSpec,
    /// The layers, the lowest first.
    pub layers: Vec<LayerSpec>,
    /// Queue limits as `key=value,…`; `None`: those of the stack.
    pub limits: Option<String>,
    /// Requests in flight on each hardware queue; `None`: the host's default.
    pub depth: Option<u16>,
    /// Requests that take longer are logged; `None`: none are.
    pub slow: Option<std::time::Duration>,
    /// Requests that take longer are cancelled; `None`: none are.
    pub io_timeout: Option<std::time::Duration>,
    /// The line of the description in the file; 0 on a command line.
    pub line: u32,
}

/// An export of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportSpec {
    /// The name of the device.
    pub device: DeviceName,
    /// The kind of export, with its options.
    pub kind: ExportKind,
    /// The line of the description in the file; 0 on a command line.
    pub line: u32,
}

impl ExportSpec {
    /// The options that apply to NBD clients; `None` for an export of another kind.
    pub fn nbd_options(&self) -> Option<&NbdOptions> {
        self.kind.nbd_options()
    }

    /// The address that NBD clients connect to; `None` if none was given, or for an export of another kind.
    pub fn nbd_address(&self) -> Option<&NbdAddress> {
        match &self.kind {
            ExportKind::Nbd(nbd) => Some(&nbd.address),
            _ => None,
        }
    }
}

/// The devices that a process serves, and their exports.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Topology {
    /// The interface that the I/O threads use.
    pub ring: RingChoice,
    /// Whether the I/O threads poll before they sleep.
    pub poll: bool,
    /// The number of I/O threads, each with a hardware queue of every device; `None`: the host's default.
    pub queues: Option<u16>,
    /// Limits of NBD clients.
    pub nbd_limits: NbdLimits,
    /// The devices, in the order of the description.
    pub devices: Vec<DeviceSpec>,
    /// The exports. Every device has at least one.
    pub exports: Vec<ExportSpec>,
}

/// A problem of a topology.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The line, from 1; 0: none.
    pub line: u32,
    /// The key, such as `device.disk.stack`. Empty for the file as a whole.
    pub key: String,
    /// The problem and a correction.
    pub why: String,
}

impl Problem {
    /// Creates a problem at a line (0: none) and a key (empty: the file as a whole).
    pub fn new(line: u32, key: impl Into<String>, why: impl fmt::Display) -> Problem {
        Problem { line, key: key.into(), why: why.to_string() }
    }
}

/// All problems of a topology, at least one, by line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TopologyError {
    /// The topology file.
    pub file: PathBuf,
    /// The problems.
    pub problems: Vec<Problem>,
}

impl fmt::Display for TopologyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "\n" })?;
            write!(f, "{}:", self.file.display())?;
            if problem.line > 0 {
                write!(f, "{}:", problem.line)?;
            }
            if !problem.key.is_empty() {
                write!(f, "{}:", problem.key)?;
            }
            write!(f, " {}", problem.why)?;
        }
        Ok(())
    }
}

impl std::error::Error for TopologyError {}

impl Topology {
    /// Renames the device at `index`, and the exports that were named like it.
    pub fn rename(&mut self, index: usize, name: &DeviceName) {
        let Some(device) = self.devices.get_mut(index) else { return };
        let before = std::mem::replace(&mut device.name, name.clone());
        for export in self.exports.iter_mut().filter(|export| export.device == before) {
            export.device = name.clone();
            export.kind.device_renamed(&before, name);
        }
    }

    /// Parses the text of a topology file. Relative paths are resolved against the file's directory.
    ///
    /// # Errors
    /// The text is not TOML, or a description is invalid or contradicts another one.
    pub fn parse(text: &str, file: &Path) -> Result<Topology, TopologyError> {
        let base = file.parent().filter(|parent| !parent.as_os_str().is_empty());
        let (topology, mut problems) = read::topology(text, base.unwrap_or(Path::new(".")));
        problems.extend(topology.conflicts());
        problems.sort_by_key(|problem| problem.line);
        if problems.is_empty() {
            Ok(topology)
        } else {
            Err(TopologyError { file: file.to_owned(), problems })
        }
    }
}

#[cfg(test)]
mod tests;
