//! The driver's ioctls.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

pub(crate) const LOOP_SET_FD: libc::c_ulong = 0x4C00;
pub(crate) const LOOP_CLR_FD: libc::c_ulong = 0x4C01;
const LOOP_SET_STATUS64: libc::c_ulong = 0x4C04;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
pub(crate) const LOOP_SET_CAPACITY: libc::c_ulong = 0x4C07;
pub(crate) const LOOP_SET_DIRECT_IO: libc::c_ulong = 0x4C08;
pub(crate) const LOOP_SET_BLOCK_SIZE: libc::c_ulong = 0x4C09;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
pub(crate) const LOOP_CTL_ADD: libc::c_ulong = 0x4C80;
pub(crate) const LOOP_CTL_REMOVE: libc::c_ulong = 0x4C81;
pub(crate) const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
/// `_IO(0x12, 97)`: write and drop the kernel's cache of a block device.
pub(crate) const BLKFLSBUF: libc::c_ulong = 0x1261;

/// `_IO(0x12, 95)`: read the partition table of a block device again.
pub(crate) const BLKRRPART: libc::c_ulong = 0x125F;

pub(crate) const LO_FLAGS_READ_ONLY: u32 = 1;
pub(crate) const LO_FLAGS_PARTSCAN: u32 = 8;
pub(crate) const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Info {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) rdevice: u64,
    pub(crate) offset: u64,
    pub(crate) sizelimit: u64,
    pub(crate) number: u32,
    pub(crate) encrypt_type: u32,
    pub(crate) encrypt_key_size: u32,
    pub(crate) flags: u32,
    pub(crate) file_name: [u8; 64],
    pub(crate) crypt_name: [u8; 64],
    pub(crate) encrypt_key: [u8; 32],
    pub(crate) init: [u64; 2],
}

impl Info {
    pub(crate) const ZERO: Info = Info {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        sizelimit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: 0,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<Info>() == 232 && size_of::<Config>() == 304);

fn check(result: libc::c_int) -> io::Result<u32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as u32) }
}

/// An ioctl with a number as argument; returns its result.
pub(crate) fn call(device: BorrowedFd<'_>, what: libc::c_ulong, argument: libc::c_ulong) -> io::Result<u32> {
    // SAFETY: these take a number, no pointer.
    check(unsafe { libc::ioctl(device.as_raw_fd(), what as _, argument) })
}

/// Binds a file in a single step (5.8).
pub(crate) fn configure(
    device: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    block_size: u32,
    info: Info,
) -> io::Result<()> {
    let config = Config { fd: file.as_raw_fd() as u32, block_size, info, reserved: [0; 8] };
    // SAFETY: a readable structure in the kernel's layout, until the call returns.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) }).map(drop)
}

pub(crate) fn status(device: BorrowedFd<'_>) -> io::Result<Info> {
    let mut info = Info::ZERO;
    // SAFETY: a writable structure in the kernel's layout, until the call returns.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64 as _, &raw mut info) })?;
    Ok(info)
}

pub(crate) fn set_status(device: BorrowedFd<'_>, info: Info) -> io::Result<()> {
    // SAFETY: a readable structure in the kernel's layout, until the call returns.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_STATUS64 as _, &raw const info) }).map(drop)
}
