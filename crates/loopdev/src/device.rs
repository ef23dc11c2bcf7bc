//! Binding and letting go.

use crate::sys::{self, Info};
use crate::users::{self, User};
use rustix::fs::{FileType, Mode, OFlags, makedev, mknodat, open};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CONTROL: &str = "/dev/loop-control";
/// A free device may be taken before we are: losetup tries as often.
const ATTEMPTS: u32 = 16;
/// How long a device may take to let go of its file after its last user has closed it.
const LET_GO_MAX: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_micros(500);
/// How long somebody may look at a device that is to go, and how often it is tried meanwhile.
const LOOKED_MAX: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Why a loop device cannot be had, or not be let go of.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// There is no loop driver for us.
    #[error("{CONTROL}: {0} (load the loop module, and be root)")]
    Control(#[source] io::Error),
    /// The file.
    #[error("{}: {source} (is its server alive?)", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A device.
    #[error("/dev/loop{number}: {source} ({fix})")]
    Device {
        /// Which.
        number: u32,
        /// Why.
        source: io::Error,
        /// What to do.
        fix: &'static str,
    },
    /// The kernel would cache what is cached below already, or what is nobody's to cache.
    #[error("/dev/loop{number}: the kernel refuses direct I/O (choose a logical block of 4096 bytes)")]
    NotDirect {
        /// Which.
        number: u32,
    },
    /// Somebody uses it.
    #[error(
        "/dev/loop{number} is in use{} (end that, or delete it with --force: what is not written is lost)",
        users::listed(users)
    )]
    InUse {
        /// Which.
        number: u32,
        /// By whom, as far as it shows.
        users: Vec<User>,
    },
}

/// What is to be bound.
#[derive(Clone, Debug)]
pub struct Request {
    /// The file.
    pub file: PathBuf,
    /// Which device; none: any that is free.
    pub number: Option<u32>,
    /// Its logical block in bytes.
    pub block_len: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The kernel looks for partitions.
    pub partscan: bool,
}

/// A loop device that is bound.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bound {
    /// Its number.
    pub number: u32,
    /// The file, as the kernel names it now.
    pub file: PathBuf,
}

/// Whether the kernel has a loop driver that we may use.
pub fn is_available() -> bool {
    open(CONTROL, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).is_ok()
}

/// Bind a file with direct I/O; the device's number.
///
/// # Errors
/// [`LoopError`]; nothing is left bound.
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
            Some(libc::EINVAL) => "does the kernel take this block size?",
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
    // As losetup has it: the end of what does not fit is cut off, and a zero follows.
    let name = request.file.as_os_str().as_encoded_bytes();
    let len = name.len().min(info.file_name.len() - 1);
    info.file_name[..len].copy_from_slice(&name[..len]);
    match sys::configure(device, file.as_fd(), request.block_len, info) {
        // Before 5.8 there is no such call.
        Err(why) if matches!(why.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {
            bind_in_steps(device, file, request.block_len, info).map_err(failed)?;
        }
        other => other.map_err(failed)?,
    }
    // A kernel that cannot do direct I/O drops the wish without a word.
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

/// Open a device, whose file in `/dev` may not have come yet, or never comes by itself in a container.
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

/// Let go of a device's file, writing first what the kernel still has of it. `force`: also while somebody uses the
/// device, who gets errors from then on; it is gone when the last of them has closed it.
///
/// # Errors
/// [`LoopError::InUse`] and what the kernel refuses; the device stays as it was.
pub fn detach(number: u32, force: bool) -> Result<(), LoopError> {
    let start = Instant::now();
    // The number may be another's as soon as it is free.
    let Some(file) = backing_file(number) else { return Ok(()) };
    loop {
        match detach_once(number, &file, force) {
            // Who only looks, as udev does after every writer, has soon seen enough.
            Err(LoopError::InUse { users, .. })
                if users.iter().all(|user| matches!(user, User::Process { .. }))
                    && start.elapsed() < LOOKED_MAX =>
            {
                std::thread::sleep(LOOK_AGAIN);
            }
            outcome => return outcome,
        }
    }
}

/// Whether somebody uses a device, so that [`detach`] would refuse. Changes nothing, and does not open the device.
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
            false if users.iter().all(is_process) && start.elapsed() < LOOKED_MAX => {
                std::thread::sleep(LOOK_AGAIN);
            }
            false => return Err(LoopError::InUse { number, users }),
        }
    }
}

fn detach_once(number: u32, file: &Path, force: bool) -> Result<(), LoopError> {
    let failed = |source: io::Error| LoopError::Device { number, source, fix: "try losetup -d" };
    let users_of = || LoopError::InUse { number, users: users::users(number) };
    // Who mounts it, swaps on it or stacks on it holds it exclusively.
    let exclusive = open(crate::path(number), OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
    let device = match exclusive {
        Ok(device) => device,
        Err(rustix::io::Errno::BUSY) if force => {
            open(crate::path(number), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|errno| failed(errno.into()))?
        }
        Err(rustix::io::Errno::BUSY) => return Err(users_of()),
        // It is gone, and that was the aim.
        Err(rustix::io::Errno::NXIO | rustix::io::Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(errno.into())),
    };
    // From now on nobody else can be bound to it.
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
    let is_done = force || is_let_go_of(file, LET_GO_MAX, || backing_file(number));
    if is_done { Ok(()) } else { Err(users_of()) }
}

/// Whether a device is bound to a file no more, within that time; to none, or already to another.
fn is_let_go_of(file: &Path, limit: Duration, bound: impl Fn() -> Option<PathBuf>) -> bool {
    let start = Instant::now();
    while bound().is_some_and(|bound| bound == file) {
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

/// Have a device take its file's size anew.
///
/// # Errors
/// What the kernel refuses.
pub fn set_capacity(number: u32) -> Result<(), LoopError> {
    let failed = |source: io::Error| LoopError::Device { number, source, fix: "is it bound?" };
    let device = open_device(number, false).or_else(|_| open_device(number, true)).map_err(failed)?;
    sys::call(device.as_fd(), sys::LOOP_SET_CAPACITY, 0).map(drop).map_err(failed)
}

/// Drop what the kernel has cached of a block device of any driver and of its partitions, each of which has a cache of its
/// own, writing first what is not written.
///
/// # Errors
/// The first that the kernel refuses, when all were tried.
pub fn flush_cache(node: &Path) -> io::Result<()> {
    let drop_of = |node: &Path| -> io::Result<()> {
        let device = open(node, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        sys::call(device.as_fd(), sys::BLKFLSBUF, 0).map(drop)
    };
    let mut result = drop_of(node);
    for part in partitions(node) {
        match drop_of(&part) {
            // It went meanwhile, or this /dev does not have it.
            Err(why) if matches!(why.raw_os_error(), Some(libc::ENOENT | libc::ENXIO)) => {}
            other => result = result.and(other),
        }
    }
    result
}

/// Have the kernel read the partition table of a block device of any driver again. One that it looks for no partitions on
/// needs nothing.
///
/// # Errors
/// What the kernel refuses: `EBUSY` while a partition is in use.
pub fn reread_partitions(node: &Path) -> io::Result<()> {
    let device = open(node, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    match sys::call(device.as_fd(), sys::BLKRRPART, 0) {
        Err(why) if why.raw_os_error() != Some(libc::EINVAL) => Err(why),
        _ => Ok(()),
    }
}

/// The nodes of a block device's partitions.
fn partitions(node: &Path) -> Vec<PathBuf> {
    let Some(name) = node.file_name() else { return Vec::new() };
    let entries = std::fs::read_dir(Path::new("/sys/class/block").join(name)).into_iter().flatten().flatten();
    let parts = entries.filter(|entry| entry.path().join("partition").exists());
    parts.map(|entry| node.with_file_name(entry.file_name())).collect()
}

/// Have the driver forget a device that is free, and its node with it.
///
/// # Errors
/// What the kernel refuses: `EBUSY` for one that is bound or open, `ENODEV` where there is none.
pub fn remove(number: u32) -> io::Result<()> {
    let control = open(CONTROL, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    sys::call(control.as_fd(), sys::LOOP_CTL_REMOVE, number.into()).map(drop)
}

/// The file that a device is bound to, as the kernel names it now. `None`: it is free.
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
    fn a_number_that_is_bound_to_another_file_by_now_is_let_go_of() {
        let (ours, other) = (Path::new("/run/ours"), Path::new("/run/other"));
        assert!(is_let_go_of(ours, Duration::ZERO, || None));
        assert!(is_let_go_of(ours, Duration::ZERO, || Some(other.to_owned())));
        assert!(!is_let_go_of(ours, Duration::ZERO, || Some(ours.to_owned())));
        let looks = std::cell::Cell::new(0);
        let bound = || {
            looks.set(looks.get() + 1);
            (looks.get() < 3).then(|| ours.to_owned())
        };
        assert!(is_let_go_of(ours, Duration::from_secs(60), bound));
    }
}
