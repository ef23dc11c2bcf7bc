//! The files of a ring, and inline operations on them.

use crate::memory::Memory;
use crate::sys;
use block::Segment;
use queue::{Blocking, FileId, FileOp};
use slab::Slab;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// A registered file.
pub(crate) struct File {
    fd: Arc<OwnedFd>,
    raw: RawFd,
    /// Index in the ring's table of registered files; `None`: it is not registered.
    pub(crate) fixed: Option<u32>,
    in_flight: u32,
    /// Removed by the user; closed when its last operation completes.
    removed: bool,
    /// The file system does not support RWF_NOWAIT for a read, or a write.
    unsure: [bool; 2],
    /// It is an eventfd that is signalled.
    is_event: bool,
    /// A write to it may wait: `O_NONBLOCK` is not set.
    may_wait: bool,
}

/// All files of a ring, by number.
#[derive(Default)]
pub(crate) struct Files {
    slots: Slab<File>,
    iovecs: Vec<libc::iovec>,
}

impl Files {
    pub(crate) fn add(&mut self, fd: Arc<OwnedFd>, fixed: Option<u32>) -> FileId {
        let raw = fd.as_raw_fd();
        let file = File {
            fd,
            raw,
            fixed,
            in_flight: 0,
            removed: false,
            unsure: [false; 2],
            is_event: false,
            may_wait: true,
        };
        FileId(self.slots.insert(file) as u32)
    }

    /// Records that a file is an eventfd, and whether a write to it may wait.
    pub(crate) fn set_event(&mut self, id: FileId, may_wait: bool) {
        let file = self.slot(id);
        (file.is_event, file.may_wait) = (true, may_wait);
    }

    /// Whether a write to a file may wait.
    #[inline]
    pub(crate) fn may_wait(&self, id: FileId) -> bool {
        self.slots.get(id.0 as usize).is_none_or(|file| file.may_wait)
    }

    /// Removes a file; returns it if no operation is in flight.
    #[must_use]
    pub(crate) fn remove(&mut self, id: FileId) -> Option<File> {
        self.slot(id).removed = true;
        self.take_if_over(id)
    }

    fn take_if_over(&mut self, id: FileId) -> Option<File> {
        let file = self.slots.get(id.0 as usize)?;
        if file.removed && file.in_flight == 0 { self.slots.try_remove(id.0 as usize) } else { None }
    }

    #[track_caller]
    fn slot(&mut self, id: FileId) -> &mut File {
        match self.slots.get_mut(id.0 as usize) {
            Some(file) if !file.removed => file,
            _ => panic!("{id:?} is not a file of this ring"),
        }
    }

    /// Counts a new operation; returns the descriptor and its index in the table of registered files.
    #[inline]
    #[track_caller]
    pub(crate) fn begin(&mut self, id: FileId) -> (RawFd, Option<u32>) {
        let file = self.slot(id);
        file.in_flight += 1;
        (file.raw, file.fixed)
    }

    /// Returns the descriptor and its index in the table of registered files, for uses that do not count as
    /// operations.
    #[inline]
    #[track_caller]
    pub(crate) fn target(&self, id: FileId) -> (RawFd, Option<u32>) {
        match self.slots.get(id.0 as usize) {
            Some(file) if !file.removed => (file.raw, file.fixed),
            _ => panic!("{id:?} is not a file of this ring"),
        }
    }

    /// Completes an operation; returns the file if it was removed and this was the last one.
    #[inline]
    #[must_use]
    pub(crate) fn end(&mut self, id: FileId) -> Option<File> {
        let file = self.slots.get_mut(id.0 as usize)?;
        file.in_flight -= 1;
        if file.removed { self.take_if_over(id) } else { None }
    }

    /// See [`queue::Ring::try_now`].
    pub(crate) fn try_now(
        &mut self,
        memory: &Memory,
        id: FileId,
        op: FileOp,
        data: &[Segment],
        blocking: Blocking,
    ) -> Option<i64> {
        let file = self.slot(id);
        let moves = match op {
            FileOp::Read { .. } => Some(0),
            FileOp::Write { .. } => Some(1),
            _ => None,
        };
        if blocking == Blocking::Never && (moves.is_none_or(|way| file.unsure[way])) && !is_seek(op) {
            return None;
        }
        // Memory that only the kernel can access needs an io_uring operation.
        if data.first().is_some_and(|segment| memory.is_kernel(segment.region)) {
            return None;
        }
        let fd = file.raw;
        let Some(way) = moves else { return Some(run(fd, op, &[])) };
        let one;
        let iovecs = match data {
            [segment] => {
                one = [libc::iovec {
                    iov_base: memory.pointer(*segment).cast(),
                    iov_len: segment.len as usize,
                }];
                &one[..]
            }
            _ => {
                memory.gather(data, &mut self.iovecs);
                &self.iovecs[..]
            }
        };
        if blocking == Blocking::Allowed {
            return Some(run(fd, op, iovecs));
        }
        let result = move_data(fd, op, iovecs, libc::RWF_NOWAIT);
        match i32::try_from(-result) {
            Ok(libc::EAGAIN) => None,
            Ok(libc::EOPNOTSUPP | libc::ENOSYS) => {
                self.slot(id).unsure[way] = true;
                None
            }
            _ => Some(result),
        }
    }
}

impl File {
    /// Whether operations may refer to it that are not counted.
    pub(crate) fn is_signalled(&self) -> bool {
        self.is_event
    }

    /// The file's descriptor.
    pub(crate) fn into_fd(self) -> Arc<OwnedFd> {
        self.fd
    }
}

fn is_seek(op: FileOp) -> bool {
    matches!(op, FileOp::Seek { .. })
}

/// Calls `preadv2` or `pwritev2`, or a simpler equivalent; repeats the call after a signal.
fn move_data(fd: RawFd, op: FileOp, iovecs: &[libc::iovec], flags: i32) -> i64 {
    let count = iovecs.len() as i32;
    loop {
        // SAFETY: every entry refers to memory of a region that stays mapped, checked when it was gathered;
        // the owner of the request keeps it until completion.
        let result = sys::signed(unsafe {
            match (op, iovecs) {
                (FileOp::Read { offset }, [one]) if flags == 0 => {
                    libc::pread64(fd, one.iov_base, one.iov_len, offset as i64)
                }
                (FileOp::Read { offset }, _) => {
                    libc::preadv2(fd, iovecs.as_ptr(), count, offset as i64, flags)
                }
                (FileOp::Write { offset, durable: false }, [one]) if flags == 0 => {
                    libc::pwrite64(fd, one.iov_base, one.iov_len, offset as i64)
                }
                (FileOp::Write { offset, durable }, _) => {
                    let flags = flags | if durable { libc::RWF_DSYNC } else { 0 };
                    libc::pwritev2(fd, iovecs.as_ptr(), count, offset as i64, flags)
                }
                _ => return -i64::from(libc::EINVAL),
            }
        });
        if result != -i64::from(libc::EINTR) {
            return result;
        }
    }
}

/// Runs an operation, blocking until it completes. Any thread.
pub(crate) fn run(fd: RawFd, op: FileOp, iovecs: &[libc::iovec]) -> i64 {
    loop {
        // SAFETY: none of these takes a pointer.
        let result = sys::signed(unsafe {
            match op {
                FileOp::Read { .. } | FileOp::Write { .. } => return move_data(fd, op, iovecs, 0),
                FileOp::Sync => libc::fdatasync(fd) as isize,
                FileOp::Allocate { mode, offset, len } => {
                    libc::fallocate64(fd, mode, offset as i64, len as i64) as isize
                }
                FileOp::Seek { offset, hole } => {
                    let whence = if hole { libc::SEEK_HOLE } else { libc::SEEK_DATA };
                    libc::lseek64(fd, offset as i64, whence) as isize
                }
                FileOp::Prefetch { offset, len } => {
                    // `posix_fadvise` returns the errno itself.
                    let advice = libc::POSIX_FADV_WILLNEED;
                    return -i64::from(libc::posix_fadvise64(fd, offset as i64, len as i64, advice));
                }
            }
        });
        if result != -i64::from(libc::EINTR) {
            return result;
        }
    }
}
