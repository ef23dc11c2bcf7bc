//! Binding and unbinding loop devices.

use crate::sys::{self, Info};
use crate::users::{self, User};
use rustix::fs::{FileType, Mode, OFlags, makedev, mknodat, open};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The node through which devices are created and found.
pub const CONTROL: &str = "/dev/loop-control";
/// Attempts to bind a free device, which another process may take first: as many as losetup makes.
const ATTEMPTS: u32 = 16;
/// How long a device may take to release its file after its last user has closed it.
const RELEASE_MAX: Duration = Duration::from_secs(15);
const POLL_INTERVAL: Duration = Duration::from_micros(500);
/// How long a process may have a device open before it counts as in use, and the interval of retries
/// meanwhile.
const IN_USE_AFTER: Duration = Duration::from_secs(2);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Why a loop device cannot be bound or unbound.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// The loop driver is not available to this process.
    #[error("{CONTROL}: {0} (load the loop module, and be root)")]
    Control(#[source] io::Error),
    /// The backing file cannot be opened.
    #[error("{}: {source} (is its server alive?)", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// An operation on a device failed.
    #[error("/dev/loop{number}: {source} ({fix})")]
    Device {
        /// Number of the device.
        number: u32,
        /// The error.
        source: io::Error,
        /// Advice.
        fix: &'static str,
    },
    /// The kernel cannot use direct I/O, so it would cache the data a second time.
    #[error("/dev/loop{number}: the kernel refuses direct I/O (choose a logical block of 4096 bytes)")]
    NotDirect {
        /// Number of the device.
        number: u32,
    },
    /// The device is in use.
    #[error(
        "/dev/loop{number} is in use{} (end that, or delete it with --force: unwritten data is lost)",
        users::listed(users)
    )]
    InUse {
        /// Number of the device.
        number: u32,
        /// Users that are visible to this process.
        users: Vec<User>,
    },
}

/// A file to bind.
#[derive(Clone, Debug)]
pub struct Request {
    /// The file.
    pub file: PathBuf,
    /// Number of the device; `None`: any free one.
    pub number: Option<u32>,
    /// Logical block size in bytes.
    pub block_len: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The kernel scans for partitions.
    pub partscan: bool,
}

/// A bound loop device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bound {
    /// Number of the device.
    pub number: u32,
    /// The file, under its current name in the kernel.
    pub file: PathBuf,
}

/// Binds a file with direct I/O; returns the number of the device.
///
/// # Errors
/// [`LoopError`]; no device is left bound.
pub fn attach(request: &Request) -> Result<u32, LoopError> {
    let control = open(CONTROL, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| LoopError::Control(errno.into()))?;
    let access = if request.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let file = open(&request.file, access | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| LoopError::File { path: request.file.clone(), source: errno.into() })?;
    for attempt in 1.. {
        let number = match request.number {
            Some(number) => match sys::call(control.as_fd(), sys::LOOP_CTL_ADD, number.into()) {
                Err(why) if why.raw_os_error() != Some(libc::EEXIST) => return Err(LoopError::Control(why)),
                _ => number,
            },
            None => sys::call(control.as_fd(), sys::LOOP_CTL_GET_FREE, 0).map_err(LoopError::Control)?,
        };
        match bind(number, &file, request) {
            Ok(()) => return Ok(number),
            Err(LoopError::Device { source, .. })
                if source.raw_os_error() == Some(libc::EBUSY)
                    && request.number.is_none()
                    && attempt < ATTEMPTS => {}
            Err(why) => return Err(why),
        }
    }
    unreachable!("the last attempt returns")
}

fn bind(number: u32, file: &OwnedFd, request: &Request) -> Result<(), LoopError> {
    let failed = |source: io::Error| LoopError::Device {
        number,
        fix: match source.raw_os_error() {
            Some(libc::EBUSY) => "another file is bound to it: choose another number, or none",
            Some(libc::EINVAL) => "does the kernel support this block size?",
            _ => "be root, and have a /dev with loop devices",
        },
        source,
    };
    let device = open_device(number, request.read_only).map_err(failed)?;
    let device = device.as_fd();
    let mut info = Info { flags: sys::LO_FLAGS_DIRECT_IO, ..Info::ZERO };
    if request.read_only {
        info.flags |= sys::LO_FLAGS_READ_ONLY;
    }
    if request.partscan {
        info.flags |= sys::LO_FLAGS_PARTSCAN;
    }
    // As losetup does: a name that is too long is truncated, and a zero follows.
    let name = request.file.as_os_str().as_encoded_bytes();
    let len = name.len().min(info.file_name.len() - 1);
    info.file_name[..len].copy_from_slice(&name[..len]);
    match sys::configure(device, file.as_fd(), request.block_len, info) {
        // Before 5.8 there is no LOOP_CONFIGURE.
        Err(why) if matches!(why.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {
            bind_in_steps(device, file, request.block_len, info).map_err(failed)?;
        }
        other => other.map_err(failed)?,
    }
    // A kernel that cannot use direct I/O clears the flag without an error.
    let is_direct = sys::status(device).is_ok_and(|now| now.flags & sys::LO_FLAGS_DIRECT_IO != 0);
    if !is_direct && sys::call(device, sys::LOOP_SET_DIRECT_IO, 1).is_err() {
        let _ = sys::call(device, sys::LOOP_CLR_FD, 0);
        return Err(LoopError::NotDirect { number });
    }
    Ok(())
}

fn bind_in_steps(
    device: std::os::fd::BorrowedFd<'_>,
    file: &OwnedFd,
    block_len: u32,
    info: Info,
) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    sys::call(device, sys::LOOP_SET_FD, file.as_raw_fd() as libc::c_ulong)?;
    let rest = || {
        if block_len != 512 {
            sys::call(device, sys::LOOP_SET_BLOCK_SIZE, block_len.into())?;
        }
        sys::set_status(device, info)
    };
    rest().inspect_err(|_| drop(sys::call(device, sys::LOOP_CLR_FD, 0)))
}

/// Opens a device. Its node in `/dev` may not exist yet, or, in a container, is never created.
fn open_device(number: u32, read_only: bool) -> io::Result<OwnedFd> {
    let path = crate::path(number);
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let try_open = || open(&path, access | OFlags::CLOEXEC, Mode::empty());
    match try_open() {
        Err(rustix::io::Errno::NOENT) => {
            let numbers = std::fs::read_to_string(format!("/sys/block/loop{number}/dev"))?;
            let minor =
                numbers.trim().split_once(':').and_then(|(_, minor)| minor.parse().ok()).unwrap_or(number);
            let mode = Mode::RUSR | Mode::WUSR;
            match mknodat(rustix::fs::CWD, &path, FileType::BlockDevice, mode, makedev(7, minor)) {
                Err(errno) if errno != rustix::io::Errno::EXIST => Err(errno.into()),
                _ => Ok(try_open()?),
            }
        }
        other => Ok(other?),
    }
}

/// Unbinds a device, after writing data that the kernel has cached. `force`: even while it is in use; its
/// users then get errors, and it is unbound when the last of them has closed it.
///
/// # Errors
/// [`LoopError::InUse`], or the kernel refuses; the device stays bound.
pub fn detach(number: u32, force: bool) -> Result<(), LoopError> {
    let start = Instant::now();
    // The number may be reused as soon as it is free.
    let Some(file) = backing_file(number) else { return Ok(()) };
    loop {
        match detach_once(number, &file, force) {
            // Processes that only probe it, as udev does after every writer, close it soon.
            Err(LoopError::InUse { users, .. })
                if users.iter().all(|user| matches!(user, User::Process { .. }))
                    && start.elapsed() < IN_USE_AFTER =>
            {
                std::thread::sleep(RETRY_INTERVAL);
            }
            outcome => return outcome,
        }
    }
}

/// Checks whether a device is in use, so that [`detach`] would refuse. Changes nothing, and does not open the
/// device.
///
/// # Errors
/// [`LoopError::InUse`].
pub fn check_unused(number: u32) -> Result<(), LoopError> {
    let start = Instant::now();
    loop {
        let users = users::users(number);
        let is_process = |user: &User| matches!(user, User::Process { .. });
        match users.is_empty() {
            true => return Ok(()),
            false if users.iter().all(is_process) && start.elapsed() < IN_USE_AFTER => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            false => return Err(LoopError::InUse { number, users }),
        }
    }
}

fn detach_once(number: u32, file: &Path, force: bool) -> Result<(), LoopError> {
    let failed = |source: io::Error| LoopError::Device { number, source, fix: "try losetup -d" };
    let users_of = || LoopError::InUse { number, users: users::users(number) };
    // Mounts, swap and stacked devices hold it exclusively.
    let exclusive = open(crate::path(number), OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
    let device = match exclusive {
        Ok(device) => device,
        Err(rustix::io::Errno::BUSY) if force => {
            open(crate::path(number), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|errno| failed(errno.into()))?
        }
        Err(rustix::io::Errno::BUSY) => return Err(users_of()),
        // It is unbound or removed already.
        Err(rustix::io::Errno::NXIO | rustix::io::Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(errno.into())),
    };
    // From now on it cannot be bound to another file.
    if backing_file(number).is_none_or(|bound| bound != file) {
        return Ok(());
    }
    if !force {
        let me = std::process::id();
        if users::users(number).iter().any(|user| !matches!(user, User::Process { pid, .. } if *pid == me)) {
            return Err(users_of());
        }
        sys::call(device.as_fd(), sys::BLKFLSBUF, 0).map_err(failed)?;
    }
    match sys::call(device.as_fd(), sys::LOOP_CLR_FD, 0) {
        Err(why) if why.raw_os_error() == Some(libc::ENXIO) => return Ok(()),
        other => other.map_err(failed)?,
    };
    drop(device);
    let is_done = force || is_released(file, RELEASE_MAX, || backing_file(number));
    if is_done { Ok(()) } else { Err(users_of()) }
}

/// Waits until a device is not bound to a file any more, at most for that time; it may be bound to another
/// file by then.
fn is_released(file: &Path, limit: Duration, bound: impl Fn() -> Option<PathBuf>) -> bool {
    let start = Instant::now();
    while bound().is_some_and(|bound| bound == file) {
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    true
}

/// Updates the size of a device to that of its file.
///
/// # Errors
/// The kernel refuses.
pub fn set_capacity(number: u32) -> Result<(), LoopError> {
    let failed = |source: io::Error| LoopError::Device { number, source, fix: "is it bound?" };
    let device = open_device(number, false).or_else(|_| open_device(number, true)).map_err(failed)?;
    sys::call(device.as_fd(), sys::LOOP_SET_CAPACITY, 0).map(drop).map_err(failed)
}

/// Writes and drops the kernel's cache of a block device of any driver and of its partitions, each of which
/// has its own cache.
///
/// # Errors
/// The first error, after all were tried.
pub fn flush_cache(node: &Path) -> io::Result<()> {
    let drop_of = |node: &Path| -> io::Result<()> {
        let device = open(node, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        sys::call(device.as_fd(), sys::BLKFLSBUF, 0).map(drop)
    };
    let mut result = drop_of(node);
    for part in partitions(node) {
        match drop_of(&part) {
            // It has been removed meanwhile, or has no node in this /dev.
            Err(why) if matches!(why.raw_os_error(), Some(libc::ENOENT | libc::ENXIO)) => {}
            other => result = result.and(other),
        }
    }
    result
}

/// Makes the kernel read the partition table of a block device of any driver again. No effect on a device
/// without partition scanning.
///
/// # Errors
/// The kernel refuses: `EBUSY` while a partition is in use.
pub fn reread_partitions(node: &Path) -> io::Result<()> {
    let device = open(node, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    match sys::call(device.as_fd(), sys::BLKRRPART, 0) {
        Err(why) if why.raw_os_error() != Some(libc::EINVAL) => Err(why),
        _ => Ok(()),
    }
}

/// Nodes of a block device's partitions.
fn partitions(node: &Path) -> Vec<PathBuf> {
    let Some(name) = node.file_name() else { return Vec::new() };
    let entries = std::fs::read_dir(Path::new("/sys/class/block").join(name)).into_iter().flatten().flatten();
    let parts = entries.filter(|entry| entry.path().join("partition").exists());
    parts.map(|entry| node.with_file_name(entry.file_name())).collect()
}

/// Removes a free device and its node.
///
/// # Errors
/// The kernel refuses: `EBUSY` if it is bound or open, `ENODEV` if it does not exist.
pub fn remove(number: u32) -> io::Result<()> {
    let control = open(CONTROL, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    sys::call(control.as_fd(), sys::LOOP_CTL_REMOVE, number.into()).map(drop)
}

/// The file that a device is bound to, under its current name in the kernel. `None`: it is free.
pub fn backing_file(number: u32) -> Option<PathBuf> {
    let text = std::fs::read_to_string(format!("/sys/block/loop{number}/loop/backing_file")).ok()?;
    Some(PathBuf::from(text.strip_suffix('\n').unwrap_or(&text)))
}

/// The devices that are bound to a file of this name.
pub fn bound_to(file: &Path) -> Vec<Bound> {
    let entries = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("loop")?.parse().ok());
    let bound = numbers.filter_map(|number| Some(Bound { number, file: backing_file(number)? }));
    let mut found: Vec<Bound> = bound.filter(|bound| bound.file == file).collect();
    found.sort_by_key(|bound| bound.number);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_bound_to_another_file_counts_as_released() {
        let (ours, other) = (Path::new("/run/ours"), Path::new("/run/other"));
        assert!(is_released(ours, Duration::ZERO, || None));
        assert!(is_released(ours, Duration::ZERO, || Some(other.to_owned())));
        assert!(!is_released(ours, Duration::ZERO, || Some(ours.to_owned())));
        let looks = std::cell::Cell::new(0);
        let bound = || {
            looks.set(looks.get() + 1);
            (looks.get() < 3).then(|| ours.to_owned())
        };
        assert!(is_released(ours, Duration::from_secs(60), bound));
    }
}
