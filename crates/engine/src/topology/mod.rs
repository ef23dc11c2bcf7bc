//! What one process shall serve: devices, and where they are exported.
//!
//! A topology comes from a TOML file (`up`, `check`) or from one command line (`serve`, `add`); both
//! make the same value. Reading reports every problem at once, each with its line and key.
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
//! address have different names and the same TLS. Nothing here opens a file for writing.

mod check;
mod order;
mod part;
mod read;

use crate::spec::{
    DeviceName, FuseSpec, LayerSpec, LoopSpec, NbdAddress, NbdDeviceSpec, NbdLimits, SpecError, StackSpec,
    TlsSpec, UblkSpec,
};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Front-end requests in flight on one hardware queue, at most, as the queue's tags allow.
pub const DEPTH_MAX: u16 = 4096;
pub use spec::QUEUES_MAX;

/// How threads talk to the kernel.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum RingChoice {
    /// io_uring where it is allowed, else epoll.
    #[default]
    Auto,
    /// io_uring, or refuse.
    IoUring,
    /// epoll and a few I/O threads.
    Epoll,
}

impl FromStr for RingChoice {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<RingChoice, SpecError> {
        match text {
            "auto" => Ok(RingChoice::Auto),
            "io_uring" => Ok(RingChoice::IoUring),
            "epoll" => Ok(RingChoice::Epoll),
            _ => Err(SpecError::new(format!("there is no ring \"{text}\""), "use auto, io_uring or epoll")),
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

/// One device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSpec {
    /// Its name.
    pub name: DeviceName,
    /// What holds its blocks.
    pub stack: StackSpec,
    /// What lies above, upwards in the order given.
    pub layers: Vec<LayerSpec>,
    /// Queue limits as `key=value,…`; none: the stack's own.
    pub limits: Option<String>,
    /// Requests in flight on each hardware queue; none: the host's default.
    pub depth: Option<u16>,
    /// Requests that take so long are told of in the log.
    pub slow: Option<std::time::Duration>,
    /// Requests that take longer are cancelled; none: none are.
    pub io_timeout: Option<std::time::Duration>,
    /// Where it was described; 0 on a command line.
    pub line: u32,
}

/// One way to reach a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportSpec {
    /// Which device.
    pub device: DeviceName,
    /// How.
    pub kind: ExportKind,
    /// Where it was described; 0 on a command line.
    pub line: u32,
}

/// How a device is shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExportKind {
    /// Nothing was asked for: the best that this host has. What is said applies if that is NBD.
    Default(NbdOptions),
    /// To NBD clients.
    Nbd {
        /// Where they connect.
        address: NbdAddress,
        /// The rest.
        options: NbdOptions,
    },
    /// As a file.
    Fuse(FuseSpec),
    /// As a device of the kernel's nbd driver.
    NbdDevice(NbdDeviceSpec),
    /// As a loop device.
    Loop(LoopSpec),
    /// As a kernel block device, by ublk.
    Ublk(UblkSpec),
}

/// How NBD clients see a device, wherever that is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdOptions {
    /// The name clients ask for.
    pub name: String,
    /// Whether they use TLS.
    pub tls: TlsSpec,
}

impl ExportSpec {
    /// What applies if it is shown to NBD clients.
    pub fn nbd_options(&self) -> Option<&NbdOptions> {
        match &self.kind {
            ExportKind::Default(options) | ExportKind::Nbd { options, .. } => Some(options),
            _ => None,
        }
    }

    fn nbd_options_mut(&mut self) -> Option<&mut NbdOptions> {
        match &mut self.kind {
            ExportKind::Default(options) | ExportKind::Nbd { options, .. } => Some(options),
            _ => None,
        }
    }

    /// Where NBD clients connect, if that was said.
    pub fn nbd_address(&self) -> Option<&NbdAddress> {
        match &self.kind {
            ExportKind::Nbd { address, .. } => Some(address),
            _ => None,
        }
    }
}

/// What one process shall serve.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Topology {
    /// How its threads talk to the kernel.
    pub ring: RingChoice,
    /// Whether they spin before they sleep.
    pub poll: bool,
    /// How many there are, and so how many hardware queues a device can have; none: the host's default.
    pub queues: Option<u16>,
    /// What its NBD clients may take.
    pub nbd_limits: NbdLimits,
    /// The devices, in the order they were described.
    pub devices: Vec<DeviceSpec>,
    /// The exports. Every device has at least one.
    pub exports: Vec<ExportSpec>,
}

/// Something wrong with a topology.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The line, from 1; 0 when there is none.
    pub line: u32,
    /// The key, as `device.disk.stack`. Empty when the file as a whole is meant.
    pub key: String,
    /// What is wrong and what to do.
    pub why: String,
}

impl Problem {
    pub(crate) fn new(line: u32, key: impl Into<String>, why: impl fmt::Display) -> Problem {
        Problem { line, key: key.into(), why: why.to_string() }
    }
}

/// Everything that is wrong with a topology: at least one problem, by line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TopologyError {
    /// The file.
    pub file: PathBuf,
    /// What is wrong.
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
    /// Reads a topology file. Relative paths in it are taken from the file's directory on.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, or describes something that cannot be.
    pub fn load(file: &Path) -> Result<Topology, TopologyError> {
        let text = std::fs::read_to_string(file).map_err(|why| TopologyError {
            file: file.to_owned(),
            problems: vec![Problem::new(0, "", format_args!("{why} (is the path right?)"))],
        })?;
        Topology::parse(&text, file)
    }

    /// Gives the device at `index` another name, also as the name of exports that had its old one.
    pub fn rename(&mut self, index: usize, name: &DeviceName) {
        let Some(device) = self.devices.get_mut(index) else { return };
        let before = std::mem::replace(&mut device.name, name.clone());
        for export in self.exports.iter_mut().filter(|export| export.device == before) {
            export.device = name.clone();
            if let Some(options) = export.nbd_options_mut()
                && options.name == before.as_str()
            {
                options.name = name.to_string();
            }
        }
    }

    /// Reads the text of a topology file.
    ///
    /// # Errors
    /// It is not TOML, or describes something that cannot be.
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
