//! Properties of the disk under a file, from sysfs and ioctls.

use super::facts::Facts;
use super::open::device_number;
use super::sys;
use crate::{CLEAR_MAX, base_limits};
use block::{Bytes, Features, LimitsError, QueueLimits, Sectors};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The disk under a file: the block device itself, or the one that contains the file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Disk {
    /// Logical block size in bytes; 512 if unknown.
    pub(super) logical: u32,
    /// Physical block size in bytes.
    pub(super) physical: u32,
    /// Granularity of discards in bytes: the file system's block for a regular file.
    pub(super) discard_granularity: u32,
    /// Largest discard in bytes; 0 if discards are known to be unsupported.
    pub(super) discard_max: Sectors,
    /// Whether the disk is rotational.
    pub(super) rotational: bool,
}

impl Disk {
    pub(super) fn of(
        handle: &fs::File,
        meta: &fs::Metadata,
        block_device: bool,
        fs_block: u32,
    ) -> io::Result<Disk> {
        let queue = queue_directory(device_number(meta, block_device));
        let number = |name: &str| queue.as_deref().and_then(|queue| read_number(queue, name));
        let rotational = number("rotational") == Some(1);
        if block_device {
            let (logical, physical) = sys::block_sizes(handle)?;
            let granularity = number("discard_granularity").unwrap_or(0);
            return Ok(Disk {
                logical,
                physical,
                discard_granularity: granularity as u32,
                discard_max: Bytes(number("discard_max_bytes").unwrap_or(0)).sectors().min(CLEAR_MAX),
                rotational,
            });
        }
        let sane = |size: Option<u64>| size.filter(|size| (512..=65536).contains(size)).unwrap_or(512) as u32;
        Ok(Disk {
            logical: sane(number("logical_block_size")),
            physical: sane(number("physical_block_size")),
            discard_granularity: fs_block,
            discard_max: CLEAR_MAX,
            rotational,
        })
    }
}

/// Returns the limits of a file, by its type and the disk under it.
pub(super) fn limits(facts: &Facts, disk: &Disk) -> Result<QueueLimits, LimitsError> {
    let block = Bytes(facts.block.into());
    let mut features = Features::NOWAIT;
    if facts.memory {
        features = features.union(Features::SYNCHRONOUS);
    } else if !facts.read_only {
        features = features.union(Features::WRITE_CACHE).union(Features::FUA);
    }
    if disk.rotational {
        features = features.union(Features::ROTATIONAL);
    }
    let granularity = u64::from(disk.discard_granularity).max(1);
    let mut limits = QueueLimits {
        features,
        logical_block_size: block,
        // For a regular file the file system hides the disk's blocks, as for the kernel's loop driver.
        physical_block_size: if facts.block_device { block.max(Bytes(disk.physical.into())) } else { block },
        max_hw_discard_sectors: if facts.read_only { Sectors(0) } else { disk.discard_max },
        discard_granularity: Bytes(granularity),
        discard_alignment: Bytes((granularity - facts.start.0 % granularity) % granularity),
        dma_alignment: facts.direct.map_or(0, |direct| u64::from(direct.memory).clamp(512, 4096) - 1),
        ..base_limits()
    };
    limits.validate()?;
    Ok(limits)
}

/// Returns the queue attributes of a device, or of the disk of a partition.
fn queue_directory((major, minor): (u32, u32)) -> Option<PathBuf> {
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    [device.join("queue"), device.join("../queue")].into_iter().find(|path| path.is_dir())
}

fn read_number(directory: &Path, name: &str) -> Option<u64> {
    fs::read_to_string(directory.join(name)).ok()?.trim().parse().ok()
}
