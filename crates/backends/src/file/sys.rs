//! System calls that open a file and query its properties: thin wrappers, and the only `unsafe` code of
//! `file`.
#![allow(unsafe_code)]

use ring::ForeignMemory;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

fn answer(result: i64) -> io::Result<i64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Calls `fallocate`.
#[cfg(test)]
pub(crate) fn allocate(file: &File, mode: i32, offset: u64, len: u64) -> io::Result<()> {
    // SAFETY: plain numbers and an open descriptor.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, len as i64) };
    answer(result.into()).map(drop)
}

/// Calls `lseek` for a hole or for data.
#[cfg(test)]
pub(crate) fn seek(file: &File, offset: u64, hole: bool) -> io::Result<u64> {
    let whence = if hole { libc::SEEK_HOLE } else { libc::SEEK_DATA };
    // SAFETY: as above.
    answer(unsafe { libc::lseek(file.as_raw_fd(), offset as i64, whence) }).map(|at| at as u64)
}

/// Returns the alignment that `statx` reports for direct I/O: of memory, and of offset and length. Returns
/// `None` if it is not reported. Two zeroes mean that direct I/O is not supported.
pub(super) fn direct_alignment(file: &File) -> Option<(u32, u32)> {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor; `stat` is as large as the kernel fills.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            stat.as_mut_ptr(),
        )
    };
    // SAFETY: it was zeroed, and zero is a valid value of every field.
    let stat = unsafe { stat.assume_init() };
    (result == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0)
        .then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
}

/// A mapping of the first `len` bytes of a file in memory.
#[derive(Debug)]
pub(super) struct View {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is unmapped only on drop.
unsafe impl Send for View {}
// SAFETY: nothing here accesses it; it is passed to the kernel only.
unsafe impl Sync for View {}

impl View {
    pub(super) fn new(file: &File, len: u64) -> io::Result<View> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(View { base, len })
    }

    /// Describes the mapping for a ring.
    pub(super) fn lend(self: &Arc<Self>) -> ForeignMemory {
        // SAFETY: the mapping is page-aligned, `len` bytes long, readable and writable, and stays while any
        // clone of the keeper does. Bytes behind the end of a file that was truncated are an error for the
        // kernel, which alone accesses them.
        unsafe { ForeignMemory::new(self.base, self.len, Arc::clone(self) as _) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: our own whole mapping; no ring holds it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Returns the file system's magic number and block size.
pub(super) fn file_system(file: &File) -> io::Result<(u32, u32)> {
    let mut stat = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `stat` is as large as the kernel fills.
    answer(unsafe { libc::fstatfs(file.as_raw_fd(), stat.as_mut_ptr()) }.into())?;
    // SAFETY: it was zeroed, and zero is a valid value of every field.
    let stat = unsafe { stat.assume_init() };
    Ok((stat.f_type as u32, stat.f_bsize as u32))
}

/// Switches the open file to direct or buffered I/O. The error `EINVAL` means that the file system has no
/// direct I/O.
pub(super) fn set_direct(file: &File, on: bool) -> io::Result<()> {
    let fd = file.as_raw_fd();
    // SAFETY: plain numbers and an open descriptor.
    let flags = answer(unsafe { libc::fcntl(fd, libc::F_GETFL) }.into())? as i32;
    let flags = if on { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
    // SAFETY: as above.
    answer(unsafe { libc::fcntl(fd, libc::F_SETFL, flags) }.into()).map(drop)
}

/// Returns whether the file system supports `RWF_NOWAIT` for reads.
pub(super) fn reads_without_waiting(file: &File) -> bool {
    let mut byte = 0u8;
    let piece = libc::iovec { iov_base: std::ptr::from_mut(&mut byte).cast(), iov_len: 1 };
    // SAFETY: one segment of one byte, which lives until the call returns.
    let result = unsafe { libc::preadv2(file.as_raw_fd(), &piece, 1, 0, libc::RWF_NOWAIT) };
    result >= 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN)
}

fn byte_lock(kind: i32, at: i64) -> libc::flock {
    // SAFETY: a struct of numbers, for all of which zero is a valid value; OFD locks require `l_pid` 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = at;
    lock.l_len = 1;
    lock
}

/// Locks one byte of the file shared, until the file is closed.
pub(super) fn hold_byte(file: &File, at: i64) -> io::Result<()> {
    let lock = byte_lock(libc::F_RDLCK, at);
    // SAFETY: `lock` lives until the call returns.
    answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) }.into()).map(drop)
}

/// Locks one byte exclusively, which conflicts with all other locks.
#[cfg(test)]
pub(super) fn take_byte(file: &File, at: i64) -> io::Result<()> {
    let lock = byte_lock(libc::F_WRLCK, at);
    // SAFETY: as above.
    answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) }.into()).map(drop)
}

/// Unlocks one byte.
pub(super) fn let_go_of_byte(file: &File, at: i64) -> io::Result<()> {
    let lock = byte_lock(libc::F_UNLCK, at);
    // SAFETY: as above.
    answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) }.into()).map(drop)
}

/// Returns whether another program locks this byte.
pub(super) fn byte_is_held(file: &File, at: i64) -> io::Result<bool> {
    let mut lock = byte_lock(libc::F_WRLCK, at);
    // SAFETY: as above; the kernel fills it.
    answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) }.into())?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

const BLKSSZGET: u64 = 0x1268;
const BLKPBSZGET: u64 = 0x127b;
const BLKROGET: u64 = 0x125e;

fn block_ioctl(file: &File, request: u64) -> io::Result<u32> {
    let mut value: libc::c_int = 0;
    // SAFETY: these requests fill one int (include/uapi/linux/fs.h).
    answer(unsafe { libc::ioctl(file.as_raw_fd(), request as _, &mut value) }.into())?;
    Ok(value as u32)
}

/// Returns the logical and physical block size of a block device.
pub(super) fn block_sizes(file: &File) -> io::Result<(u32, u32)> {
    Ok((block_ioctl(file, BLKSSZGET)?, block_ioctl(file, BLKPBSZGET)?))
}

/// Returns whether a block device is read-only.
pub(super) fn is_read_only_device(file: &File) -> io::Result<bool> {
    Ok(block_ioctl(file, BLKROGET)? != 0)
}
