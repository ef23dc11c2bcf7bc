//! A device of the laboratory as programs see it: a file by FUSE, or a block device if it is mounted. That is a
//! ublk device where the kernel has ublk, and else a loop device over the file.

use super::export::Exported;
use super::served::{Disk, Served};
use clap::ValueEnum;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longest time that the server of a ublk device may take to end, in milliseconds.
const END_MAX_MS: u64 = 5000;

/// A kind of block device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum BlockKind {
    /// A ublk device.
    Ublk,
    /// A loop device.
    Loop,
}

impl BlockKind {
    /// Chooses the kind of export that `serve` would choose here, among those that are block devices.
    pub(super) fn choose() -> BlockKind {
        let wanted = std::env::var("BLOCKYARD_EXPORT").ok();
        match attach::block_export(wanted.as_deref()) {
            Some("ublk") => BlockKind::Ublk,
            _ => BlockKind::Loop,
        }
    }
}

/// The device that programs use.
pub(super) struct Device {
    // Dropped first: the node, then what it needs.
    node: Option<PathBuf>,
    server: Option<Child>,
    served: Option<Served>,
    _exported: Option<Exported>,
}

/// Runs a program; returns its standard output, or why it failed.
pub(super) fn tool(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|why| match why.kind() {
        std::io::ErrorKind::NotFound => format!("{name} is not installed"),
        _ => format!("{name}: {why}"),
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let why = String::from_utf8_lossy(&output.stderr);
    let why = why.lines().find(|line| !line.trim().is_empty()).unwrap_or("no message").trim();
    Err(format!("{name} ended with {}: {why}", output.status))
}

/// The helper process does what may wait for our own file.
fn helper(arguments: &[&std::ffi::OsStr]) -> Result<String, String> {
    let mut command = Command::new("/proc/self/exe");
    tool(command.arg("loop-device").args(arguments))
}

impl Device {
    /// Serves a device as `path`: as a file, or as a block device of this kind.
    pub(super) fn start(
        path: &Path,
        size: u64,
        block: Option<BlockKind>,
        disk: impl Disk + Clone,
    ) -> Result<Device, String> {
        if block == Some(BlockKind::Ublk) {
            return Device::start_ublk(path, size, disk);
        }
        let served = Served::start(path, size, disk)?;
        let file = served.path().to_owned();
        let mut device = Device { node: None, server: None, served: Some(served), _exported: None };
        if block.is_some() {
            let words = ["attach".as_ref(), file.as_os_str(), "any".as_ref(), "512".as_ref()];
            let answer = helper(&[&words[..], &["false".as_ref(), "false".as_ref()]].concat())?;
            device.node = Some(format!("/dev/loop{}", answer.trim()).into());
        }
        Ok(device)
    }

    /// Serves the device over NBD to a server of its own, which creates the ublk device.
    fn start_ublk(path: &Path, size: u64, disk: impl Disk + Clone) -> Result<Device, String> {
        let exported = Exported::start(&path.with_extension("nbd"), size, disk)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let parent = path.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        let mut command = Command::new("/proc/self/exe");
        command.arg("serve").arg(format!("nbd:nbd+unix:///?socket={}", exported.socket().display()));
        command.arg("--name").arg(format!("crash-{}-{parent}-{name}", std::process::id())).arg("--ublk");
        let mut server =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(|why| why.to_string())?;
        let mut line = String::new();
        if let Some(stdout) = server.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(|why| why.to_string())?;
        }
        let node = line.split_whitespace().last().filter(|node| node.starts_with("/dev/")).map(PathBuf::from);
        // Created before an error is returned, so that the server ends.
        let device = Device { node, server: Some(server), served: None, _exported: Some(exported) };
        if device.node.is_none() {
            return Err("the ublk device could not be created (the error is above; --device loop)".to_owned());
        }
        Ok(device)
    }

    /// Returns what programs open.
    pub(super) fn path(&self) -> &Path {
        let file = self.served.as_ref().map(Served::path);
        self.node.as_deref().or(file).unwrap_or(Path::new("/dev/null"))
    }

    /// Drops what the kernel has cached of the block device.
    pub(super) fn forget(&self) -> Result<(), String> {
        let Some(node) = &self.node else { return Ok(()) };
        helper(&["flush-cache".as_ref(), node.as_os_str()]).map(drop)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let pid = rustix::process::Pid::from_child(&server);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            // A process that survived its checker may keep the device open.
            for _ in 0..END_MAX_MS / 10 {
                if !matches!(server.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = server.kill();
            let _ = server.wait();
        }
        let (Some(node), Some(served)) = (self.node.take(), &self.served) else { return };
        let number = node.to_string_lossy().trim_start_matches("/dev/loop").to_owned();
        let file = served.path().as_os_str().to_owned();
        let detach = |force: &str| helper(&["detach".as_ref(), number.as_ref(), &file, force.as_ref()]);
        if detach("false").is_err() {
            let _ = detach("true");
        }
    }
}

/// A mounted file system, unmounted when dropped.
pub(super) struct Mounted {
    at: PathBuf,
}

impl Mounted {
    /// Mounts a device.
    pub(super) fn new(device: &Path, at: &Path, fs: Option<&str>) -> Result<Mounted, String> {
        let mut command = Command::new("mount");
        if let Some(fs) = fs {
            command.args(["-t", fs]);
        }
        if fs == Some("xfs") {
            // Devices of several states have one UUID.
            command.args(["-o", "nouuid"]);
        }
        tool(command.arg(device).arg(at))?;
        Ok(Mounted { at: at.to_owned() })
    }

    /// Unmounts; lazily if a process still uses it.
    pub(super) fn unmount(self) -> Result<(), String> {
        let outcome = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::empty());
        match outcome {
            Ok(()) => {
                std::mem::forget(self);
                Ok(())
            }
            Err(why) => Err(format!("{}: it cannot be unmounted: {why}", self.at.display())),
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
    }
}
