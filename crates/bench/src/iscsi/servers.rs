//! The compared targets: ours, and tgtd with two of its backing stores.
//!
//! Each has its own file, so that none warms the cache for another. Dropping the value ends the target.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::tools;

/// Time limit for a target to start.
const START: Duration = Duration::from_secs(10);
/// tgtd's target name.
const TGTD_NAME: &str = "iqn.2026-11.io.blockyard:tgtd";
/// Parameters of tgtd's target, the same as ours: its defaults are segments of 8 KiB and an initial R2T.
const TGTD_PARAMETERS: [(&str, &str); 5] = [
    ("MaxRecvDataSegmentLength", "262144"),
    ("FirstBurstLength", "262144"),
    ("MaxBurstLength", "1048576"),
    ("InitialR2T", "No"),
    ("ImmediateData", "Yes"),
];

/// A kind of target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Our own target, served by `blockyard`.
    Blockyard,
    /// tgtd with its pool of threads and buffered I/O.
    TgtdThreads,
    /// tgtd with libaio and direct I/O.
    TgtdAio,
}

/// Every target, in the order of the tables.
pub(super) const KINDS: [Kind; 3] = [Kind::Blockyard, Kind::TgtdThreads, Kind::TgtdAio];

impl Kind {
    /// Returns the name in tables and on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Blockyard => "blockyard",
            Kind::TgtdThreads => "tgtd-rdwr",
            Kind::TgtdAio => "tgtd-aio",
        }
    }
}

/// The storage of the blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Storage {
    /// Ours: the process's memory. tgtd: a file in memory.
    Ram,
    /// A file on a disk, through the page cache except for tgtd-aio.
    File,
}

/// Every storage, in the order of the tables.
pub(super) const STORAGES: [Storage; 2] = [Storage::Ram, Storage::File];

impl Storage {
    /// Returns the name in tables and on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Storage::Ram => "ram",
            Storage::File => "file",
        }
    }
}

/// Folders and the size of the unit.
pub(super) struct Site {
    /// For files in memory.
    pub(super) tmpfs: PathBuf,
    /// For files on a disk.
    pub(super) disk: PathBuf,
    /// Length of the unit in MiB.
    pub(super) mib: u32,
}

/// A target that is ready.
pub(super) struct Server {
    /// Kind of the target.
    pub(super) kind: Kind,
    /// `iscsi://HOST:PORT/NAME/LUN`.
    pub(super) url: String,
    child: Child,
    file: PathBuf,
}

impl Server {
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Starts the target and waits until initiators can log in.
    pub(super) fn start(kind: Kind, storage: Storage, site: &Site) -> Result<Server> {
        let folder = if storage == Storage::Ram { &site.tmpfs } else { &site.disk };
        let file = folder.join(format!("{}.img", kind.name()));
        let size = u64::from(site.mib) << 20;
        std::fs::File::create(&file).and_then(|file| file.set_len(size)).map_err(Error::at(&file))?;
        let listener = TcpListener::bind("127.0.0.1:0").map_err(Error::at(Path::new("127.0.0.1")))?;
        let port = listener.local_addr().map_err(Error::at(Path::new("127.0.0.1")))?.port();
        drop(listener);
        match kind {
            Kind::Blockyard => blockyard(storage, site, file, port),
            Kind::TgtdThreads => tgtd(kind, "rdwr", file, port),
            Kind::TgtdAio => tgtd(kind, "aio", file, port),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.file);
    }
}

/// Returns our program: the one named by the environment, else the one beside this program.
pub(super) fn program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("BLOCKYARD_BIN") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().map_err(Error::at(Path::new("the bench itself")))?;
    Ok(own.with_file_name("blockyard"))
}

fn blockyard(storage: Storage, site: &Site, file: PathBuf, port: u16) -> Result<Server> {
    let stack = match storage {
        Storage::Ram => format!("ram:{}M", site.mib),
        Storage::File => format!("file:{}", file.display()),
    };
    let program = program()?;
    let mut command = Command::new(&program);
    command.args(["serve", &stack, "--name", "bench", "--iscsi", &format!("tcp:127.0.0.1:{port}")]);
    command.env("BLOCKYARD_RUN", site.tmpfs.join("run")).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(Error::at(&program))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).map_err(Error::at(&program))?;
    }
    // The ready line is `NAME iscsi URL`.
    let url = line.split_whitespace().nth(2).unwrap_or_default().to_owned();
    let server = Server { kind: Kind::Blockyard, url, child, file };
    if server.url.starts_with("iscsi://") { Ok(server) } else { Err(Error(format!("blockyard: {line}"))) }
}

fn tgtd(kind: Kind, store: &str, file: PathBuf, port: u16) -> Result<Server> {
    // tgtd's management sockets have numbers below 32768, in this folder.
    std::fs::create_dir_all("/var/run/tgtd").map_err(Error::at(Path::new("/var/run/tgtd")))?;
    let control = (port % 30_000 + 1).to_string();
    let portal = format!("portal=127.0.0.1:{port}");
    let program = std::env::var("TGTD").unwrap_or_else(|_| "tgtd".into());
    let mut command = Command::new(&program);
    command.args(["--foreground", "--control-port", &control, "--iscsi", &portal]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().map_err(Error::at(Path::new(&program)))?;
    let url = format!("iscsi://127.0.0.1:{port}/{TGTD_NAME}/1");
    let server = Server { kind, url, child, file };
    let admin = |arguments: &[&str]| {
        tools::run(&[&["tgtadm", "--control-port", &control, "--lld", "iscsi"], arguments].concat())
    };
    let started = Instant::now();
    while admin(&["--op", "show", "--mode", "target"]).is_err() {
        if started.elapsed() > START {
            return Err(Error("tgtd does not get ready".into()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    admin(&["--op", "new", "--mode", "target", "--tid", "1", "-T", TGTD_NAME])?;
    for (name, value) in TGTD_PARAMETERS {
        let update = ["--op", "update", "--mode", "target", "--tid", "1", "--name", name, "--value", value];
        admin(&update)?;
    }
    let path = server.file.to_string_lossy().into_owned();
    let unit = ["--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", "1"];
    admin(&[&unit[..], &["--bstype", store, "--backing-store", &path]].concat())?;
    admin(&["--op", "bind", "--mode", "target", "--tid", "1", "--initiator-address", "ALL"])?;
    Ok(server)
}
