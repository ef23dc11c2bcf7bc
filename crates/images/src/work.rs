//! Processes one request on a thread of the image. May block.

use crate::pool::Job;
use crate::{Access, Content};
use block::{Bytes, Extent, Flags, Op};
use imago::Mapping;
use std::io;

impl Content {
    /// Size of the disk in bytes.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Content::Qcow2(disk) => disk.size(),
            Content::Imago(image) => image.size(),
            Content::Sparse(image) => image.size(),
        }
    }

    /// Returns whether the range is unallocated and zero at `offset`, and for how many bytes.
    fn mapping(&self, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        match self {
            Content::Qcow2(disk) => disk.mapping(offset, len),
            Content::Imago(image) => {
                let (mapping, len) = image.get_mapping(offset, len)?;
                Ok((matches!(mapping, Mapping::Zero { .. }), len))
            }
            Content::Sparse(image) => image.mapping(offset, len),
        }
    }

    fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Content::Qcow2(disk) => disk.read(into, offset),
            Content::Imago(image) => image.read(into, offset),
            Content::Sparse(image) => image.read(into, offset),
        }
    }
}

impl Access {
    fn qcow2(&self) -> Option<&qcow2::Disk> {
        if let Content::Qcow2(disk) = &self.content { Some(disk) } else { None }
    }

    /// Returns whether a flush has failed; all later flushes and writes fail, too.
    pub(crate) fn has_failed(&self) -> bool {
        self.qcow2().is_some_and(qcow2::Disk::has_failed)
    }

    /// Returns whether tables are cached that would be lost if the process were killed.
    pub(crate) fn has_changes(&self) -> bool {
        self.qcow2().is_some_and(qcow2::Disk::has_changes)
    }

    /// Discard granularity.
    pub(crate) fn cluster_size(&self) -> Bytes {
        Bytes(self.qcow2().map_or(65536, qcow2::Disk::cluster_size))
    }

    /// Writes cached changes that no client's flush has written yet.
    pub(crate) fn write_back(&self) {
        let Some(disk) = self.qcow2().filter(|disk| disk.has_changes() && !disk.has_failed()) else { return };
        if let Err(error) = self.check_lengths().and_then(|()| disk.flush()) {
            tracing::warn!("writing back the tables of an image failed: {error}");
        }
    }

    /// Checks that no file was truncated. After a truncation nothing is written any more, not even on
    /// close.
    fn check_lengths(&self) -> io::Result<()> {
        self.lengths.check().inspect_err(|_| {
            if let Some(disk) = self.qcow2() {
                disk.give_up();
            }
        })
    }
}

/// Executes the request. Returns 0, or a negative errno.
pub(crate) fn run(access: &Access, job: &mut Job) -> i64 {
    if job.op.is_write() && access.read_only {
        return -i64::from(libc::EIO);
    }
    // Checked before, so that writes use no stale tables, and after, so that reads return no zeroes from
    // past the end.
    let check = || access.check_lengths();
    match check().and_then(|()| perform(access, job)).and_then(|()| check()) {
        Ok(()) => 0,
        Err(error) => -i64::from(errno(&error)),
    }
}

fn perform(access: &Access, job: &mut Job) -> io::Result<()> {
    let (offset, len) = (job.offset.0, job.len.0);
    match job.op {
        Op::Read => return access.content.read(&mut job.memory[..], offset),
        Op::Extents => return extents(&access.content, job),
        _ => {}
    }
    // All other formats are read-only: nothing has to be flushed, and writes were refused before.
    let Some(disk) = access.qcow2() else { return Ok(()) };
    match job.op {
        Op::Write => disk.write(&job.memory[..], offset)?,
        Op::WriteZeroes => disk.write_zeroes(offset, len, job.flags.contains(Flags::NO_UNMAP))?,
        Op::Discard => disk.discard(offset, len)?,
        Op::Flush => return disk.flush(),
        _ => return Ok(()),
    }
    if job.flags.contains(Flags::FUA) { disk.flush() } else { Ok(()) }
}

/// Stores extent records for the range in the request's memory, as many as fit.
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
