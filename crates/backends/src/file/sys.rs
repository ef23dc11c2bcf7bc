//! The system calls of opening a file and asking what it is: thin, and the only `unsafe` of `file`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

fn answer(result: i64) -> io::Result<i64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// `fallocate`.
pub(crate) fn allocate(file: &File, mode: i32, offset: u64, len: u64) -> io::Result<()> {
    // SAFETY: plain numbers and a descriptor that is open.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, len as i64) };
    answer(result.into()).map(drop)
}

/// `lseek` for a hole or for data.
#[cfg(test)]
pub(crate) fn seek(file: &File, offset: u64, hole: bool) -> io::Result<u64> {
    let whence = if hole { libc::SEEK_HOLE } else { libc::SEEK_DATA };
    // SAFETY: as above.
    answer(unsafe { libc::lseek(file.as_raw_fd(), offset as i64, whence) }).map(|at| at as u64)
}
