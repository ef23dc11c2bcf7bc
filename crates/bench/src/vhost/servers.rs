//! The compared servers: ours, sleeping and polling, and qemu-storage-daemon. A server ends when its value is
//! dropped.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Longest start of a server.
const START: Duration = Duration::from_secs(10);
const QEMU: &str = "qemu-storage-daemon";

/// A kind of server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Ours with `--poll`, and a driver that polls.
    Polling,
    /// Ours with `--poll`, and a driver that waits for interrupts.
    Adaptive,
    /// Ours, and a driver that waits for interrupts.
    Sleeping,
    /// qemu-storage-daemon whose null device fills the guest's memory with zeroes, as ours does.
    QemuZeroes,
    /// qemu-storage-daemon with an I/O thread, and a driver that waits for interrupts.
    Qemu,
}

/// Every server, in the order of the tables.
pub(super) const KINDS: [Kind; 5] =
    [Kind::Polling, Kind::Adaptive, Kind::Sleeping, Kind::QemuZeroes, Kind::Qemu];

impl Kind {
    /// Its name in tables and on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Polling => "blockyard-poll",
            Kind::Adaptive => "blockyard-adaptive",
            Kind::Sleeping => "blockyard",
            Kind::QemuZeroes => "qsd-zeroes",
            Kind::Qemu => "qsd",
        }
    }

    /// Whether the driver polls.
    pub(super) fn polls(self) -> bool {
        self == Kind::Polling
    }

    /// Whether it can serve a storage.
    pub(super) fn has(self, storage: Storage) -> bool {
        match self {
            Kind::QemuZeroes => storage == Storage::Null,
            Kind::Qemu => storage != Storage::Ram,
            _ => true,
        }
    }

    /// Whether it is qemu-storage-daemon.
    pub(super) fn is_qemu(self) -> bool {
        matches!(self, Kind::Qemu | Kind::QemuZeroes)
    }
}

/// The storage of the blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Storage {
    /// None.
    Null,
    /// The server's own memory.
    Ram,
    /// A file in memory.
    File,
}

/// Every storage, in the order of the tables.
pub(super) const STORAGES: [Storage; 3] = [Storage::Null, Storage::Ram, Storage::File];

impl Storage {
    /// Its name in tables and on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Storage::Null => "null",
            Storage::Ram => "ram",
            Storage::File => "file",
        }
    }
}

/// Folder and size of the devices.
pub(super) struct Site {
    /// For files in memory, and sockets.
    pub(super) folder: PathBuf,
    /// Length of a device in MiB.
    pub(super) mib: u32,
    /// Number of virtqueues.
    pub(super) queues: u16,
}

/// A server that is ready.
pub(super) struct Server {
    /// Its kind.
    pub(super) kind: Kind,
    /// Its socket.
    pub(super) socket: PathBuf,
    child: Child,
}

impl Server {
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Starts it and waits until it can be connected to.
    pub(super) fn start(kind: Kind, storage: Storage, site: &Site) -> Result<Server> {
        let name = format!("{}-{}", kind.name(), storage.name());
        let (file, socket) =
            (site.folder.join(format!("{name}.img")), site.folder.join(format!("{name}.sock")));
        if storage == Storage::File {
            let size = u64::from(site.mib) << 20;
            std::fs::File::create(&file).and_then(|file| file.set_len(size)).map_err(Error::at(&file))?;
        }
        let mut command = match kind {
            Kind::Qemu | Kind::QemuZeroes => qemu(kind, storage, site, &file, &socket),
            _ => blockyard(kind, storage, site, &file, &socket)?,
        };
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let program = Path::new(command.get_program()).to_owned();
        let child = command.spawn().map_err(Error::at(&program))?;
        let server = Server { kind, socket, child };
        let started = Instant::now();
        while UnixStream::connect(&server.socket).is_err() {
            if started.elapsed() > START {
                return Err(Error(format!("{name} does not get ready")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // The next connection is served when that one has ended.
        std::thread::sleep(Duration::from_millis(100));
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether qemu-storage-daemon is installed.
pub(super) fn has_qemu() -> bool {
    let version = Command::new(QEMU).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

fn blockyard(kind: Kind, storage: Storage, site: &Site, file: &Path, socket: &Path) -> Result<Command> {
    let program = match std::env::var_os("BLOCKYARD_BIN") {
        Some(path) => path.into(),
        None => {
            let own = std::env::current_exe().map_err(Error::at(Path::new("the bench itself")))?;
            own.with_file_name("blockyard")
        }
    };
    let stack = match storage {
        Storage::Null => format!("null:{}M", site.mib),
        Storage::Ram => format!("ram:{}M", site.mib),
        Storage::File => format!("file:{},format=raw", file.display()),
    };
    let mut command = Command::new(program);
    command.args(["serve", &stack, "--name", kind.name(), "--queues", &site.queues.to_string()]);
    command.args(["--vhost-user", &format!("unix:{}", socket.display())]);
    if matches!(kind, Kind::Polling | Kind::Adaptive) {
        command.arg("--poll");
    }
    command.env("BLOCKYARD_RUN", site.folder.join("run"));
    Ok(command)
}

fn qemu(kind: Kind, storage: Storage, site: &Site, file: &Path, socket: &Path) -> Command {
    let node = match storage {
        // Without read-zeroes it does not touch the guest's memory, which favours it.
        Storage::Null => format!(
            "driver=null-co,node-name=disk,size={},read-zeroes={}",
            u64::from(site.mib) << 20,
            if kind == Kind::QemuZeroes { "on" } else { "off" }
        ),
        _ => format!("driver=file,node-name=disk,aio=io_uring,filename={}", file.display()),
    };
    let export = format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={},iothread=thread,\
         addr.type=unix,addr.path={}",
        site.queues,
        socket.display()
    );
    let mut command = Command::new(QEMU);
    command.args(["--object", "iothread,id=thread", "--blockdev", &node, "--export", &export]);
    command
}
