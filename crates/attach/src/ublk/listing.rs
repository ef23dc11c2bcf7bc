//! Lists the ublk devices of this machine that other programs created, and the users of a device.

use crate::fuse::users_of as open_by;
use ::ublk::kernel::block_path;
use ::ublk::{Driver, State};
use block::{Bytes, Sectors};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A ublk device without a record in this run directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForeignDevice {
    /// The N of `/dev/ublkbN`.
    pub number: u32,
    /// Path of the block device.
    pub path: String,
    /// Size; 0 while it is not started.
    pub size: Bytes,
    /// Logical block size in bytes.
    pub logical_block_size: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// State in the driver; `unknown` without permission to query it.
    pub state: String,
    /// Process ID of its server; 0 if there is none or it is not known.
    pub pid: u32,
    /// Number of hardware queues and depth of each; 0 if not known.
    pub queues: (u16, u16),
    /// Features that it uses.
    pub features: String,
}

/// Lists all ublk devices except those with these numbers. Without a driver, or permission to query it, the
/// list comes from sysfs.
pub fn foreign_devices(except: &[u32]) -> Vec<ForeignDevice> {
    let driver = super::driver().ok();
    let numbers = match &driver {
        Some(driver) => driver.devices(),
        None => sysfs_numbers(),
    };
    numbers
        .into_iter()
        .filter(|number| !except.contains(number))
        .map(|number| of(driver.as_ref(), number))
        .collect()
}

fn of(driver: Option<&Driver>, number: u32) -> ForeignDevice {
    let queue = |name: &str| sysfs(number, name).and_then(|text| text.parse::<u64>().ok());
    let info = driver.and_then(|driver| driver.info(number).ok());
    ForeignDevice {
        number,
        path: block_path(number),
        size: Sectors(queue("size").unwrap_or(0)).bytes(),
        logical_block_size: queue("queue/logical_block_size").unwrap_or(512) as u32,
        read_only: queue("ro") == Some(1),
        state: info.and_then(|info| info.state()).map_or("unknown", State::name).to_owned(),
        pid: info.map_or(0, |info| u32::try_from(info.ublksrv_pid).unwrap_or(0)),
        queues: info.map_or((0, 0), |info| (info.nr_hw_queues, info.queue_depth)),
        features: info.map(|info| info.features().to_string()).unwrap_or_default(),
    }
}

fn sysfs_numbers() -> Vec<u32> {
    let entries = fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok();
    entries.filter_map(number).collect()
}

fn sysfs(number: u32, name: &str) -> Option<String> {
    fs::read_to_string(format!("/sys/block/ublkb{number}/{name}")).ok().map(|text| text.trim().to_owned())
}

/// Longest wait for a block device to be opened.
const OPEN_TIMEOUT: Duration = Duration::from_secs(1);

/// Paths in sysfs, and names, of a block device and its partitions.
fn parts_of(number: u32) -> Vec<(PathBuf, String)> {
    let root = format!("/sys/block/ublkb{number}");
    let name = format!("ublkb{number}");
    let mut parts = vec![(PathBuf::from(&root), name.clone())];
    for entry in fs::read_dir(&root).into_iter().flatten().flatten() {
        if let Some(part) = entry.file_name().to_str().filter(|part| part.starts_with(&name)) {
            parts.push((entry.path(), part.to_owned()));
        }
    }
    parts
}

/// Counts mounts, swap areas and holders of a block device and its partitions. Programs that only have it
/// open are not counted.
pub fn users_of(number: u32) -> u64 {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut users = 0;
    for (path, part) in parts_of(number) {
        users += fs::read_dir(path.join("holders")).into_iter().flatten().count();
        if let Ok(device) = fs::read_to_string(path.join("dev")) {
            let device = device.trim();
            users += mounts.lines().filter(|line| line.split(' ').nth(2) == Some(device)).count();
        }
        let node = format!("/dev/{part}");
        users += swaps.lines().filter(|line| line.split_whitespace().next() == Some(&node)).count();
    }
    users as u64
}

/// Whether the block device is opened exclusively, as by a mount, or open in a process that may be
/// inspected. For drivers without `SAFE_STOP_DEV`; in case of doubt the device counts as used and is kept.
pub(super) fn is_claimed(number: u32) -> bool {
    refuses_others(number)
        || users_of(number) > 0
        || parts_of(number).iter().any(|(_, part)| !open_by(&Path::new("/dev").join(part)).is_empty())
}

/// Whether the block device cannot be opened exclusively. If the kernel is reading the partition table from a
/// dead server, opening waits for that read until the device is removed, so a thread opens it and is given up
/// after [`OPEN_TIMEOUT`].
fn refuses_others(number: u32) -> bool {
    let (sender, answer) = std::sync::mpsc::channel();
    let ask = move || {
        let opened = open(block_path(number), OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
        let _ = sender.send(opened.is_err_and(|errno| errno == Errno::BUSY));
    };
    let asked = std::thread::Builder::new().name("open".to_owned()).spawn(ask);
    asked.is_ok() && answer.recv_timeout(OPEN_TIMEOUT).unwrap_or(false)
}
