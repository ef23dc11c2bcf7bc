//! null_blk's options that inject faults or reduce abilities, and which of them fit together.
//!
//! Source: `null_validate_conf` and its neighbours in drivers/block/null_blk/main.c, lib/fault-inject.c.
//! Where the kernel silently ignores an option that needs another one, it is refused here.

use super::bad_blocks::BadRanges;
use super::fault::FaultSpec;
use super::throttle::MBPS_MAX;
use block::{Bytes, Sectors};

/// Default number of shared tags, as null_blk's `hw_queue_depth`.
const SHARED_DEPTH: u32 = 64;
/// Largest block in bytes: null_blk's limit is a page.
const BLOCK_MAX: u64 = 4096;

/// Scope of a set of tags.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// One set for each hardware queue.
    #[default]
    Queue,
    /// One set for the device: `shared_tag_bitmap`.
    Device,
    /// One set for all null devices of the process with `shared_tags`.
    Process,
}

/// The options, with null_blk's meanings and defaults.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Knobs {
    /// Logical block size in bytes: 512, 1024, 2048 or 4096.
    pub blocksize: Bytes,
    /// Largest request; `None` selects the default.
    pub max_sectors: Option<Sectors>,
    /// Whether segments have to meet at page boundaries (`virt_boundary`).
    pub virt_boundary: bool,
    /// Whether the device reports itself as rotational.
    pub rotational: bool,
    /// Whether discard is supported.
    pub discard: bool,
    /// Whether requests are executed in the next turn instead of within submission.
    pub blocking: bool,
    /// Size of a volatile cache in bytes; `None` for no cache.
    pub cache_size: Option<Bytes>,
    /// Whether FUA is supported.
    pub fua: bool,
    /// Maximum throughput in MiB per second; `None` for no limit.
    pub mbps: Option<u32>,
    /// Maximum number of requests in flight; `None` for the depth of the queues.
    pub hw_queue_depth: Option<u32>,
    /// Scope of that limit.
    pub sharing: Sharing,
    /// Sectors that cannot be read or written.
    pub badblocks: BadRanges,
    /// Whether a bad range becomes good once a request has reached it.
    pub badblocks_once: bool,
    /// Whether data before the first bad block is transferred.
    pub badblocks_partial_io: bool,
    /// Requests whose completion is dropped.
    pub timeout: Option<FaultSpec>,
    /// Requests that are requeued.
    pub requeue: Option<FaultSpec>,
    /// Hardware queues that fail to be created.
    pub init_hctx: Option<FaultSpec>,
}

impl Default for Knobs {
    fn default() -> Self {
        Knobs {
            blocksize: Bytes(512),
            max_sectors: None,
            virt_boundary: false,
            rotational: false,
            discard: false,
            blocking: false,
            cache_size: None,
            fua: true,
            mbps: None,
            hw_queue_depth: None,
            sharing: Sharing::Queue,
            badblocks: BadRanges::default(),
            badblocks_once: false,
            badblocks_partial_io: false,
            timeout: None,
            requeue: None,
            init_hctx: None,
        }
    }
}

/// Reasons why options do not fit together.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KnobError {
    /// The block size is invalid: the kernel supports at most a page.
    #[error("blocksize cannot be {0} (use 512, 1024, 2048 or 4096)")]
    BlockSize(Bytes),
    /// The device ends within a block.
    #[error("the size {size} is not a multiple of the block size {block} (choose another size or blocksize)")]
    HalfBlock {
        /// Size of the device.
        size: Bytes,
        /// Block size.
        block: Bytes,
    },
    /// The largest request is too small to transfer anything.
    #[error("max_sectors cannot be {0} (it is a page at least: 8)")]
    MaxSectors(u64),
    /// An option lacks another option that it needs.
    #[error("{0} does nothing without {1} (add {1}, or leave it out)")]
    Needs(&'static str, &'static str),
    /// Two options exclude each other.
    #[error("{0} does not go with {1} (leave one out)")]
    Excludes(&'static str, &'static str),
    /// The rate is outside null_blk's range.
    #[error("mbps cannot be {0} (use 1 to {MBPS_MAX}, or leave it out for no limit)")]
    Rate(u32),
    /// The depth is 0, so no request could be in flight.
    #[error("hw_queue_depth cannot be 0")]
    NoDepth,
    /// A bad range is not on the device.
    #[error("bad blocks end at sector {0}, which is beyond the device")]
    BadBeyond(u64),
    /// The cache size is invalid.
    #[error("cache_size cannot be {0} (it is a page at least: 4K)")]
    CacheSize(Bytes),
}

impl Knobs {
    /// Returns whether all options that affect the path of a request have their defaults.
    pub(super) fn are_idle(&self) -> bool {
        !self.blocking
            && self.cache_size.is_none()
            && self.mbps.is_none()
            && self.depth().is_none()
            && self.badblocks.is_empty()
            && !self.badblocks_once
            && !self.badblocks_partial_io
            && self.timeout.is_none()
            && self.requeue.is_none()
    }

    /// Returns the maximum number of requests in flight.
    pub(super) fn depth(&self) -> Option<u32> {
        match self.sharing {
            Sharing::Queue => self.hw_queue_depth,
            Sharing::Device | Sharing::Process => Some(self.hw_queue_depth.unwrap_or(SHARED_DEPTH)),
        }
    }

    /// Checks whether the options fit together, on a device of this size.
    ///
    /// # Errors
    /// See [`KnobError`].
    pub(super) fn check(&self, size: Bytes, memory_backed: bool, zoned: bool) -> Result<(), KnobError> {
        let block = self.blocksize;
        if !block.0.is_power_of_two() || !(512..=BLOCK_MAX).contains(&block.0) {
            return Err(KnobError::BlockSize(block));
        }
        if !size.is_aligned(block.0) {
            return Err(KnobError::HalfBlock { size, block });
        }
        if let Some(sectors) = self.max_sectors.filter(|sectors| sectors.0 < 8) {
            return Err(KnobError::MaxSectors(sectors.0));
        }
        if self.discard && !memory_backed {
            return Err(KnobError::Needs("discard", "memory_backed"));
        }
        if self.discard && zoned {
            return Err(KnobError::Excludes("discard", "zoned"));
        }
        if self.cache_size.is_some() && !memory_backed {
            return Err(KnobError::Needs("cache_size", "memory_backed"));
        }
        if let Some(size) = self.cache_size.filter(|size| size.0 < 4096) {
            return Err(KnobError::CacheSize(size));
        }
        if !self.fua && self.cache_size.is_none() {
            return Err(KnobError::Needs("fua=off", "cache_size"));
        }
        if let Some(rate) = self.mbps.filter(|rate| !(1..=MBPS_MAX).contains(rate)) {
            return Err(KnobError::Rate(rate));
        }
        if self.hw_queue_depth == Some(0) {
            return Err(KnobError::NoDepth);
        }
        match self.badblocks.end() {
            Some(end) if end > size.sectors() => Err(KnobError::BadBeyond(end.0 - 1)),
            _ => Ok(()),
        }
    }
}
