//! One request on an image: done on a thread of the image, however long it takes.

use crate::pool::Job;
use crate::{Access, Content};
use block::{Bytes, Extent, Flags, Op};
use imago::{FormatAccess, Mapping};
use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

type Image = FormatAccess<imago::file::File>;

impl Content {
    /// Bytes of the disk.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Content::Imago(image) => image.size(),
            Content::Sparse(image) => image.size(),
        }
    }

    /// Whether zeroes are read there because nothing is stored, and for how long it is so.
    fn mapping(&self, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        match self {
            Content::Imago(image) => {
                let (mapping, len) = image.get_mapping(offset, len)?;
                Ok((matches!(mapping, Mapping::Zero { .. }), len))
            }
            Content::Sparse(image) => image.mapping(offset, len),
        }
    }
}

/// Do it: 0, or a negative errno.
pub(crate) fn run(access: &Access, job: &mut Job) -> i64 {
    let writes = job.op.is_write();
    if (writes && access.read_only)
        || ((writes || job.op == Op::Flush) && access.failed.load(Ordering::Acquire))
    {
        return -i64::from(libc::EIO);
    }
    // Before, so that nothing is written by tables that are gone; after, so that nothing is read out of what is.
    let check = || access.lengths.check();
    match check().and_then(|()| perform(access, job)).and_then(|()| check()) {
        Ok(()) => 0,
        Err(error) => -i64::from(errno(&error)),
    }
}

fn perform(access: &Access, job: &mut Job) -> io::Result<()> {
    let (offset, len) = (job.offset.0, job.len.0);
    if job.op == Op::Discard {
        let mut image = access.image.write().unwrap_or_else(PoisonError::into_inner);
        let Content::Imago(image) = &mut *image else { return Err(io::ErrorKind::Unsupported.into()) };
        match image.discard_to_zero(offset, len) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            other => other?,
        }
        return if job.flags.has(Flags::FUA) { flush(access, image) } else { Ok(()) };
    }
    let image = access.image.read().unwrap_or_else(PoisonError::into_inner);
    if job.op == Op::Extents {
        return extents(&image, job);
    }
    match (&*image, job.op) {
        (Content::Sparse(image), Op::Read) => image.read(&mut job.memory[..], offset),
        // It is only read: there is nothing to flush, and what writes was refused before.
        (Content::Sparse(_), _) => Ok(()),
        (Content::Imago(image), op) => {
            match op {
                Op::Read => image.read(&mut job.memory[..], offset)?,
                Op::Write => image.write(&job.memory[..], offset)?,
                Op::WriteZeroes => image.write_zeroes(offset, len)?,
                Op::Flush => return flush(access, image),
                _ => return Ok(()),
            }
            if op.is_write() && job.flags.has(Flags::FUA) { flush(access, image) } else { Ok(()) }
        }
    }
}

/// Its tables, then all of it, onto stable storage. What failed once is not tried again: the kernel would forget it.
fn flush(access: &Access, image: &Image) -> io::Result<()> {
    sync_alone(access, || image.flush().and_then(|()| image.sync()))
}

/// Sync, alone. Of two that run together one may be told of the other's loss.
pub(crate) fn sync_alone(access: &Access, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let _alone = access.flushing.lock().unwrap_or_else(PoisonError::into_inner);
    if access.failed.load(Ordering::Acquire) {
        return Err(io::ErrorKind::Other.into());
    }
    sync().inspect_err(|_| access.failed.store(true, Ordering::Release))
}

/// Records of how the range is backed, as many as there is room for.
fn extents(image: &Content, job: &mut Job) -> io::Result<()> {
    let (mut at, end) = (job.offset.0, job.offset.0 + job.len.0);
    let mut records: Vec<Extent> = Vec::new();
    let room = job.memory.len() / Extent::RECORD_LEN;
    while at < end {
        let (zero, len) = image.mapping(at, end - at)?;
        if len == 0 {
            break;
        }
        let extent = Extent { len: Bytes(len.min(end - at)), hole: zero, zero };
        let count = records.len();
        match records.last_mut() {
            Some(last) if last.zero == zero => last.len = last.len + extent.len,
            _ if count == room => break,
            _ => records.push(extent),
        }
        at += extent.len.0;
    }
    job.memory.fill(0);
    for (extent, record) in records.iter().zip(job.memory.chunks_exact_mut(Extent::RECORD_LEN)) {
        record.copy_from_slice(&extent.to_record());
    }
    Ok(())
}

fn errno(error: &io::Error) -> i32 {
    match (error.raw_os_error(), error.kind()) {
        (Some(errno), _) if errno > 0 => errno,
        (_, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge) => {
            libc::ENOSPC
        }
        (_, io::ErrorKind::Unsupported) => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}
