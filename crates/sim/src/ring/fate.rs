//! The fate of an operation: decided when it starts, by the fault plan and the capabilities of the file.

use super::SimRing;
use block::Segment;
use queue::{FileId, FileOp};

/// Fate of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// Transfers as much as possible, up to this many bytes.
    Moves(u64),
    /// Fails with `errno` after `reached` bytes have taken effect.
    Fails { errno: i32, reached: u64 },
}

impl SimRing {
    /// Decides the fate of an operation.
    pub(super) fn fate(&mut self, file: FileId, op: FileOp, data: &[Segment]) -> Fate {
        let faults = self.faults_of(file);
        let disk = &self.disks[file.0 as usize];
        let len = total(data);
        let fails = |errno| Fate::Fails { errno, reached: 0 };
        if let FileOp::Read { offset } | FileOp::Write { offset, .. } = op {
            let (file, memory) = (disk.config().align - 1, disk.config().align_memory - 1);
            let aligned = (offset | len) & file == 0
                && data.iter().all(|segment| (segment.offset | u64::from(segment.len)) & memory == 0);
            if !aligned {
                return fails(libc::EINVAL);
            }
        }
        if let FileOp::Allocate { mode, .. } = op {
            let possible = match mode & !libc::FALLOC_FL_KEEP_SIZE {
                0 => true,
                libc::FALLOC_FL_PUNCH_HOLE => disk.config().punch && mode & libc::FALLOC_FL_KEEP_SIZE != 0,
                libc::FALLOC_FL_ZERO_RANGE => disk.config().zero_range,
                _ => false,
            };
            if !possible {
                return fails(libc::EOPNOTSUPP);
            }
        }
        if let FileOp::Write { offset, .. } = op
            && !disk.is_allocated(offset, len)
            && self.rng.chance(faults.no_space)
        {
            return fails(libc::ENOSPC);
        }
        if op == FileOp::Sync {
            let failed = self.rng.chance(faults.sync_error);
            return if failed { fails(libc::EIO) } else { Fate::Moves(0) };
        }
        if self.rng.chance(faults.io_error) {
            let reached = whole_sectors(op, self.rng.below(len + 1));
            return Fate::Fails { errno: libc::EIO, reached };
        }
        if len > 1 && self.rng.chance(faults.short) {
            let align = disk.config().align;
            let short = whole_sectors(op, self.rng.between(1, len - 1)) & !(align - 1);
            return Fate::Moves(if short > 0 { short } else { len });
        }
        Fate::Moves(len)
    }
}

/// Reduces `len` so that a write ends at a sector boundary: disks write sectors atomically, and a torn sector
/// could not be distinguished from garbage. Returns `len` for other operations, which may end anywhere.
pub(super) fn whole_sectors(op: FileOp, len: u64) -> u64 {
    match op {
        FileOp::Write { offset, .. } => ((offset + len) & !511).saturating_sub(offset),
        _ => len,
    }
}

pub(super) fn total(data: &[Segment]) -> u64 {
    data.iter().map(|segment| u64::from(segment.len)).sum()
}
