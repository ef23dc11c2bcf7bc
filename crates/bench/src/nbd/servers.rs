//! The compared servers, each started as its manual recommends for speed.
//!
//! `blockyard` is the release binary beside this one (or `BLOCKYARD_BIN`), `nbdkit` and `qemu-nbd` come
//! from the path (or `NBDKIT`, `QEMU_NBD`), `baseline` is `baseline.c`, compiled here. Each has its own
//! file, so that none warms the cache for another. Dropping the value ends the server.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Error, Result};

/// The C source of the baseline server.
const BASELINE_SOURCE: &str = include_str!("../../baseline.c");
/// Time limit for a server to start.
const START_LIMIT: Duration = Duration::from_secs(10);

/// A kind of server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Our own server, `blockyard`.
    Blockyard,
    /// nbdkit with its memory or file plugin.
    Nbdkit,
    /// qemu-nbd with a pool of threads.
    QemuThreads,
    /// qemu-nbd on io_uring.
    QemuUring,
    /// The minimal C program.
    Baseline,
}

/// Every server, in the order of the tables.
pub(super) const KINDS: &[Kind] =
    &[Kind::Blockyard, Kind::Nbdkit, Kind::QemuThreads, Kind::QemuUring, Kind::Baseline];

/// The storage of the blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Storage {
    /// The server's own memory.
    Ram,
    /// A file in memory.
    Tmpfs,
    /// A file on a disk, through the page cache.
    Disk,
    /// A file on a disk with direct I/O.
    DiskDirect,
    /// A qcow2 image in memory.
    Qcow2,
    /// An overlay in memory over a sparse file: in our format, and as qcow2 with a backing file.
    Overlay,
}

/// Every storage, in the order of the tables.
pub(super) const STORAGES: &[Storage] =
    &[Storage::Ram, Storage::Tmpfs, Storage::Disk, Storage::DiskDirect, Storage::Qcow2, Storage::Overlay];

impl Kind {
    /// Returns the name in tables and on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Blockyard => "blockyard",
            Self::Nbdkit => "nbdkit",
            Self::QemuThreads => "qemu-nbd-threads",
            Self::QemuUring => "qemu-nbd-io_uring",
            Self::Baseline => "baseline",
        }
    }

    /// Returns whether the server supports `storage`.
    pub(super) fn serves(self, storage: Storage) -> bool {
        match (self, storage) {
            (Self::Blockyard, _) => true,
            (Self::Nbdkit, storage) => storage != Storage::DiskDirect && !storage.is_image(),
            (Self::QemuThreads | Self::QemuUring, storage) => storage != Storage::Ram,
            // The baseline always answers from memory, so it is also the reference for a file in memory.
            (Self::Baseline, storage) => matches!(storage, Storage::Ram | Storage::Tmpfs),
        }
    }
}

impl Storage {
    /// Returns the name in tables and on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Tmpfs => "tmpfs",
            Self::Disk => "disk",
            Self::DiskDirect => "disk-direct",
            Self::Qcow2 => "qcow2",
            Self::Overlay => "overlay",
        }
    }

    /// Returns whether the served file is in an image format.
    pub(super) fn is_image(self) -> bool {
        matches!(self, Self::Qcow2 | Self::Overlay)
    }

    /// Returns the server with which the others are compared.
    pub(super) fn peer(self) -> Kind {
        if self.is_image() { Kind::QemuThreads } else { Kind::Nbdkit }
    }
}

/// Folders and sizes.
pub(super) struct Site {
    /// For sockets and files in memory; emptied at the end.
    pub(super) tmpfs: PathBuf,
    /// For files on a disk.
    pub(super) disk: PathBuf,
    /// The export's length in bytes.
    pub(super) size: u64,
}

/// A server that is ready.
pub(super) struct Server {
    /// Kind of the server.
    pub(super) kind: Kind,
    /// Time from the start of the program to its greeting on the socket.
    pub(super) ready: Duration,
    /// Path of its Unix socket.
    pub(super) socket: PathBuf,
    /// Name of its export.
    pub(super) export: String,
    child: Child,
    files: Vec<PathBuf>,
}

impl Server {
    /// Starts it over `storage` and waits for its greeting.
    pub(super) fn start(kind: Kind, storage: Storage, site: &Site) -> Result<Self> {
        let socket = site.tmpfs.join(format!("{}.sock", kind.name()));
        // A socket's path has at most 107 bytes: unix(7).
        if socket.as_os_str().len() > 107 {
            return Err(Error(format!("{}: too long for a socket (--dir a shorter one)", socket.display())));
        }
        let _ = std::fs::remove_file(&socket);
        let mut files = vec![socket.clone()];
        let mut image = PathBuf::new();
        if storage != Storage::Ram && kind != Kind::Baseline {
            let on_disk = matches!(storage, Storage::Disk | Storage::DiskDirect);
            let folder = if on_disk { &site.disk } else { &site.tmpfs };
            image = folder.join(format!("{}.img", kind.name()));
            File::create(&image).and_then(|file| file.set_len(site.size)).map_err(Error::at(&image))?;
            files.push(image.clone());
            if storage.is_image() && !(kind == Kind::Blockyard && storage == Storage::Overlay) {
                let base = (storage == Storage::Overlay).then_some(&*image);
                let made = make_qcow2(&overlay_of(&image), base, site.size)?;
                files.push(made);
            } else if storage == Storage::Overlay {
                files.push(overlay_of(&image));
            }
        }
        let mut command = command(kind, storage, site, &socket, &image)?;
        let log = site.tmpfs.join(format!("{}.log", kind.name()));
        let stderr = File::create(&log).map_err(Error::at(&log))?;
        files.push(log.clone());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
        let started = Instant::now();
        let child = command.spawn().map_err(Error::at(Path::new(command.get_program())))?;
        let mut server = Self { kind, ready: Duration::ZERO, socket, export: String::new(), child, files };
        server.await_greeting(started).map_err(|error| {
            Error(format!(
                "{}: {} {}",
                kind.name(),
                error.0,
                std::fs::read_to_string(&log).unwrap_or_default()
            ))
        })?;
        if kind == Kind::Blockyard {
            server.export = server.announced_export()?;
        }
        Ok(server)
    }

    fn await_greeting(&mut self, started: Instant) -> Result<()> {
        loop {
            if let Ok(mut stream) = UnixStream::connect(&self.socket)
                && stream.set_read_timeout(Some(START_LIMIT)).is_ok()
                && stream.read_exact(&mut [0; 18]).is_ok()
            {
                self.ready = started.elapsed();
                return Ok(());
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(Error(format!("ended at once with {status}")));
            }
            if started.elapsed() > START_LIMIT {
                return Err(Error("does not get ready".into()));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Returns the export's name from the address in the line `NAME nbd nbd+unix:///EXPORT?socket=PATH`.
    fn announced_export(&mut self) -> Result<String> {
        let stdout = self.child.stdout.as_mut().ok_or_else(|| Error("no output".into()))?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).map_err(Error::at(Path::new("blockyard")))?;
        let address = line.split_whitespace().nth(2).unwrap_or_default();
        let export = address.strip_prefix("nbd+unix:///").and_then(|rest| rest.split_once("?socket="));
        export
            .map(|(name, _)| name.to_owned())
            .ok_or_else(|| Error(format!("blockyard: unexpected line: {line}")))
    }

    /// Returns its process ID.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns its address for NBD clients.
    pub(super) fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.export, self.socket.display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Returns the path of the overlay for a file.
fn overlay_of(image: &Path) -> PathBuf {
    image.with_extension("over")
}

fn make_qcow2(path: &Path, base: Option<&Path>, size: u64) -> Result<PathBuf> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]);
    if let Some(base) = base {
        command.args(["-F", "raw", "-b"]).arg(base);
    }
    let status =
        command.arg(path).arg(size.to_string()).status().map_err(Error::at(Path::new("qemu-img")))?;
    if status.success() { Ok(path.to_owned()) } else { Err(Error("qemu-img create failed".into())) }
}

fn program(variable: &str, default: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| default.to_owned())
}

fn command(kind: Kind, storage: Storage, site: &Site, socket: &Path, image: &Path) -> Result<Command> {
    let size = site.size.to_string();
    let command = match kind {
        Kind::Blockyard => {
            let direct = if storage == Storage::DiskDirect { "on" } else { "off" };
            let stack = match storage {
                Storage::Ram => format!("ram:{size}"),
                Storage::Qcow2 => format!("file:{},format=qcow2", overlay_of(image).display()),
                _ => format!("file:{},direct={direct}", image.display()),
            };
            let mut command = Command::new(blockyard()?);
            command.arg("serve").arg(stack).arg("--nbd").arg(format!("unix:{}", socket.display()));
            command.args(["--name", "bench"]);
            if storage == Storage::Overlay {
                command.arg("--layer").arg(format!("cow,file={},create", overlay_of(image).display()));
            }
            // Its run directory is removed with the others.
            command.env("BLOCKYARD_RUN", site.tmpfs.join("run"));
            command
        }
        Kind::Nbdkit => {
            let mut command = Command::new(program("NBDKIT", "nbdkit"));
            command.arg("--foreground").arg("--unix").arg(socket);
            if storage == Storage::Ram {
                command.args(["memory", &size]);
            } else {
                command.arg("file").arg(image);
            }
            command
        }
        Kind::QemuThreads | Kind::QemuUring => {
            let aio = if kind == Kind::QemuUring { "io_uring" } else { "threads" };
            let cache = if storage == Storage::DiskDirect { "none" } else { "writeback" };
            let mut command = Command::new(program("QEMU_NBD", "qemu-nbd"));
            let format = if storage.is_image() { "qcow2" } else { "raw" };
            command.args(["--persistent", "--shared=0"]).arg(format!("--format={format}"));
            command.arg(format!("--aio={aio}")).arg(format!("--cache={cache}"));
            let shown = if storage.is_image() { overlay_of(image) } else { image.to_owned() };
            command.arg("--socket").arg(socket).arg(shown);
            command
        }
        Kind::Baseline => {
            let mut command = Command::new(baseline(&site.tmpfs)?);
            command.arg(socket).arg(size);
            command
        }
    };
    Ok(command)
}

fn blockyard() -> Result<PathBuf> {
    if let Ok(path) = std::env::var("BLOCKYARD_BIN") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().map_err(Error::at(Path::new("the bench itself")))?;
    Ok(own.with_file_name("blockyard"))
}

/// Compiles the baseline server, once.
fn baseline(folder: &Path) -> Result<PathBuf> {
    let (source, binary) = (folder.join("baseline.c"), folder.join("baseline"));
    if !binary.exists() {
        std::fs::write(&source, BASELINE_SOURCE).map_err(Error::at(&source))?;
        let output = Command::new("cc").args(["-O2", "-pthread", "-o"]).arg(&binary).arg(&source).output();
        let output = output.map_err(Error::at(Path::new("cc")))?;
        if !output.status.success() {
            return Err(Error(format!(
                "compiling baseline.c failed: {}",
                String::from_utf8_lossy(&output.stderr)
            )));
        }
    }
    Ok(binary)
}

/// Returns whether the server can run here: its program is installed, and starts.
pub(super) fn present(kind: Kind) -> bool {
    let (program, argument) = match kind {
        Kind::Blockyard => return blockyard().is_ok_and(|path| path.exists()),
        Kind::Nbdkit => (program("NBDKIT", "nbdkit"), "--version"),
        Kind::QemuThreads | Kind::QemuUring => (program("QEMU_NBD", "qemu-nbd"), "--version"),
        Kind::Baseline => ("cc".into(), "--version"),
    };
    let ran = Command::new(program).arg(argument).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ran.is_ok_and(|status| status.success())
}

/// Returns the program's version, for the report.
pub(super) fn version(kind: Kind) -> String {
    let program = match kind {
        Kind::Blockyard => blockyard().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
        Kind::Nbdkit => program("NBDKIT", "nbdkit"),
        Kind::QemuThreads | Kind::QemuUring => program("QEMU_NBD", "qemu-nbd"),
        Kind::Baseline => "cc".into(),
    };
    let output = Command::new(program).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or_default().to_owned()
}
