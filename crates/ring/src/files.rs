//! The files of a ring, and operations done on them in place.

use crate::memory::Memory;
use crate::sys;
use block::Segment;
use queue::{FileId, FileOp, Patience};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// One registered file.
pub(crate) struct File {
    fd: Arc<OwnedFd>,
    raw: RawFd,
    /// Its number in the kernel's table of this ring, if it is there.
    pub(crate) fixed: Option<u32>,
    in_flight: u32,
    /// It goes when the last operation on it is over.
    removed: bool,
    /// The file system answered that it cannot tell whether a read, or a write, would wait.
    unsure: [bool; 2],
}

/// All of them.
#[derive(Default)]
pub(crate) struct Files {
    slots: Vec<Option<File>>,
    free: Vec<u32>,
    iovecs: Vec<libc::iovec>,
}

impl Files {
    pub(crate) fn add(&mut self, fd: Arc<OwnedFd>, fixed: Option<u32>) -> FileId {
        let raw = fd.as_raw_fd();
        let file = File { fd, raw, fixed, in_flight: 0, removed: false, unsure: [false; 2] };
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[number as usize] = Some(file);
        FileId(number)
    }

    /// Take one out; gives it back when nothing is under way on it any more.
    #[must_use]
    pub(crate) fn remove(&mut self, id: FileId) -> Option<File> {
        self.slot(id).removed = true;
        self.take_if_over(id)
    }

    fn take_if_over(&mut self, id: FileId) -> Option<File> {
        let slot = self.slots.get_mut(id.0 as usize)?;
        let file = slot.take_if(|file| file.removed && file.in_flight == 0);
        if file.is_some() {
            self.free.push(id.0);
        }
        file
    }

    #[track_caller]
    fn slot(&mut self, id: FileId) -> &mut File {
        match self.slots.get_mut(id.0 as usize) {
            Some(Some(file)) if !file.removed => file,
            _ => panic!("{id:?} is not a file of this ring"),
        }
    }

    /// An operation starts: the descriptor and its number in the kernel's table.
    #[inline]
    #[track_caller]
    pub(crate) fn begin(&mut self, id: FileId) -> (RawFd, Option<u32>) {
        let file = self.slot(id);
        file.in_flight += 1;
        (file.raw, file.fixed)
    }

    /// The descriptor and its number in the kernel's table, for what is not counted as an operation on it.
    #[inline]
    #[track_caller]
    pub(crate) fn target(&self, id: FileId) -> (RawFd, Option<u32>) {
        match self.slots.get(id.0 as usize) {
            Some(Some(file)) if !file.removed => (file.raw, file.fixed),
            _ => panic!("{id:?} is not a file of this ring"),
        }
    }

    /// One is over; gives the file back when it was removed and this was the last.
    #[inline]
    #[must_use]
    pub(crate) fn end(&mut self, id: FileId) -> Option<File> {
        let Some(Some(file)) = self.slots.get_mut(id.0 as usize) else { return None };
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
        patience: Patience,
    ) -> Option<i64> {
        let file = self.slot(id);
        let moves = match op {
            FileOp::Read { .. } => Some(0),
            FileOp::Write { .. } => Some(1),
            _ => None,
        };
        if patience == Patience::None && (moves.is_none_or(|way| file.unsure[way])) && !is_seek(op) {
            return None;
        }
        // What only the kernel can reach, it has to be asked for.
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
        if patience == Patience::Unbounded {
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
    /// The descriptor that was handed in.
    pub(crate) fn into_fd(self) -> Arc<OwnedFd> {
        self.fd
    }
}

fn is_seek(op: FileOp) -> bool {
    matches!(op, FileOp::Seek { .. })
}

/// `preadv2` or `pwritev2`, or the plainer call where that does the same; once more after a signal.
fn move_data(fd: RawFd, op: FileOp, iovecs: &[libc::iovec], flags: i32) -> i64 {
    let count = iovecs.len() as i32;
    loop {
        // SAFETY: every entry names memory of a region that stays mapped, checked when it was gathered;
        // whoever owns the request keeps it until the end.
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

/// Do an operation, however long it takes. Any thread.
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
                    // This one answers with the errno itself.
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
