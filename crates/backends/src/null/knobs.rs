//! null_blk's knobs that make a device misbehave, or be less than it could: what they are, and which go together.
//!
//! Source: `null_validate_conf` and its neighbours in drivers/block/null_blk/main.c, lib/fault-inject.c. Where the kernel
//! silently ignores a knob that needs another one, this says so.

use super::bad_blocks::BadRanges;
use super::fault::FaultSpec;
use super::throttle::MBPS_MAX;
use block::{Bytes, Sectors};

/// How many tags null_blk shares when nothing is said: its `hw_queue_depth`.
const SHARED_DEPTH: u32 = 64;
/// null_blk's largest block is a page.
const BLOCK_MAX: u64 = 4096;

/// Whose requests one set of tags bounds.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// Those of one hardware queue.
    #[default]
    Queue,
    /// Those of the device: `shared_tag_bitmap`.
    Device,
    /// Those of all null devices of the process that say so: `shared_tags`.
    Process,
}

/// The knobs, with null_blk's meanings and defaults.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Knobs {
    /// The logical block: 512, 1024, 2048 or 4096.
    pub blocksize: Bytes,
    /// The largest request; none: what there is otherwise.
    pub max_sectors: Option<Sectors>,
    /// Pieces of memory meet at page boundaries only.
    pub virt_boundary: bool,
    /// It claims to seek.
    pub rotational: bool,
    /// It can discard.
    pub discard: bool,
    /// Requests are carried out at the next turn rather than within their submission.
    pub blocking: bool,
    /// How much a volatile cache holds; none: there is no cache.
    pub cache_size: Option<Bytes>,
    /// It takes writes past its cache.
    pub fua: bool,
    /// MiB that it moves in a second, at most; none: no limit.
    pub mbps: Option<u32>,
    /// Requests under way at once; none: what the queues allow.
    pub hw_queue_depth: Option<u32>,
    /// Whose requests those are.
    pub sharing: Sharing,
    /// Sectors that cannot be read or written.
    pub badblocks: BadRanges,
    /// A bad range is good once it was met.
    pub badblocks_once: bool,
    /// What lies before the first bad block is transferred.
    pub badblocks_partial_io: bool,
    /// Requests whose end is forgotten.
    pub timeout: Option<FaultSpec>,
    /// Requests that are sent back.
    pub requeue: Option<FaultSpec>,
    /// Hardware queues that cannot be made.
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

/// Why knobs do not go together.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KnobError {
    /// The kernel takes pages at most.
    #[error("blocksize cannot be {0} (use 512, 1024, 2048 or 4096)")]
    BlockSize(Bytes),
    /// The device ends within a block.
    #[error("{size} are no whole blocks of {block} (choose another size or blocksize)")]
    HalfBlock {
        /// The device.
        size: Bytes,
        /// Its block.
        block: Bytes,
    },
    /// Nothing could be transferred.
    #[error("max_sectors cannot be {0} (it is a page at least: 8)")]
    MaxSectors(u64),
    /// A knob without what it acts on.
    #[error("{0} does nothing without {1} (add {1}, or leave it out)")]
    Needs(&'static str, &'static str),
    /// Two that exclude each other.
    #[error("{0} does not go with {1} (leave one out)")]
    Excludes(&'static str, &'static str),
    /// Not a number of MiB that null_blk would keep to.
    #[error("mbps cannot be {0} (use 1 to {MBPS_MAX}, or leave it out for no limit)")]
    Rate(u32),
    /// Nothing could be under way.
    #[error("hw_queue_depth cannot be 0")]
    NoDepth,
    /// A range that is not on the device.
    #[error("bad blocks end at sector {0}, which is beyond the device")]
    BadBeyond(u64),
    /// A cache that holds nothing.
    #[error("cache_size cannot be {0} (it is a page at least: 4K)")]
    CacheSize(Bytes),
}

impl Knobs {
    /// Whether nothing but the defaults was asked for on the path of a request.
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

    /// Requests under way at once.
    pub(super) fn depth(&self) -> Option<u32> {
        match self.sharing {
            Sharing::Queue => self.hw_queue_depth,
            Sharing::Device | Sharing::Process => Some(self.hw_queue_depth.unwrap_or(SHARED_DEPTH)),
        }
    }

    /// Whether they go together, on a device of that size.
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
