//! The ioctls of `/dev/fuse`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// `_IOR(229, 0, uint32_t)`: attach this descriptor to the connection of another.
const CLONE: libc::c_ulong = 0x8004_e500;
/// `_IOW(229, 1, struct fuse_backing_map)`: register a backing file for passthrough.
const BACKING_OPEN: libc::c_ulong = 0x4010_e501;
/// `_IOW(229, 2, uint32_t)`: unregister it.
const BACKING_CLOSE: libc::c_ulong = 0x4004_e502;

/// `struct fuse_backing_map`.
#[repr(C)]
struct BackingMap {
    fd: i32,
    flags: u32,
    padding: u64,
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Opens another, non-blocking descriptor of a connection, with its own list of requests being processed, so
/// that threads with one each do not contend for it.
/// # Errors
/// Errors of opening the device; `EINVAL`: the kernel is older than 4.2.
/// Those of opening the device; `EINVAL`: a kernel before 4.2.
pub fn clone_descriptor(of: &OwnedFd) -> io::Result<OwnedFd> {
    let clone = super::mount::open_device()?;
    let number = of.as_raw_fd() as u32;
    // SAFETY: four readable bytes until the call returns.
    check(unsafe { libc::ioctl(clone.as_raw_fd(), CLONE as _, &raw const number) })?;
    Ok(clone)
}

/// Registers `file` as a backing file for passthrough; returns its id for [`backing_close`] and for replies
/// to OPEN.
///
/// # Errors
/// `EPERM`: only root may; `EOPNOTSUPP`: the kernel lacks passthrough; `ELOOP`: `file` is itself on a stacked
/// file system.
pub fn backing_open(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<i32> {
    let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: a readable structure in the kernel's layout, until the call returns.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BACKING_OPEN as _, &raw const map) })
}

/// Unregisters a backing file; open files keep it until they are closed.
///
/// # Errors
/// `ENOENT`: there is no such id.
pub fn backing_close(device: BorrowedFd<'_>, number: i32) -> io::Result<()> {
    // SAFETY: four readable bytes until the call returns.
    check(unsafe { libc::ioctl(device.as_raw_fd(), BACKING_CLOSE as _, &raw const number) }).map(drop)
}
