//! Backends: nodes that store blocks.
//!
//! Each backend has two parts. The **shared** part is created once, on a control thread, and describes the
//! device: its size, limits and abilities. Only this part opens or maps anything. A **node** is created for
//! each hardware queue, belongs to that queue's thread, and accesses memory and files only through the
//! ring, so the same node runs on a simulated ring.
//!
//! | backend | holds | answers |
//! |---|---|---|
//! | [`File`] | a regular file or a block device | in place where that cannot wait, else through the ring |
//! | [`Ram`] | memory, filled as it is written | at the end of the turn, or zero-copy from its pages |
//! | [`Null`] | nothing, or memory | at once, or after a set time |
//! | [`Zero`] | nothing: reads as zeroes | at once |
//! | [`Failing`] | nothing: every request fails | at once |
//!
//! *Invariant:* only `ram/memory.rs` (memory that threads share) and `file/sys.rs` (system calls that open a
//! file) contain `unsafe` code.

#![deny(unsafe_code)]

mod custom;
pub mod exec;
mod failing;
mod file;
pub mod nbd;
mod null;
mod ram;
mod segments;
#[cfg(test)]
mod testing;
mod zero;

pub use custom::{Custom, CustomError, CustomNode, CustomSpec, Driver};
pub use failing::{Failing, FailingNode};
pub use file::{
    Alignment, Content, Direct, Facts, File, FileNode, FileSpec, FileState, HEAD_LEN, OpenError, container,
    content, instead_of_image,
};
pub use null::{
    BadRanges, FaultSpec, IrqMode, KnobError, Knobs, Null, NullError, NullNode, NullSpec, ParseBadError,
    ParseFaultError, Sharing, ZonedError, ZonedSpec,
};
pub use ram::{Ram, RamError, RamNode, RamSpec};
pub use zero::{Zero, ZeroNode, ZeroPages, zero_file};

pub use block::{Abilities as Features, Fact};

use block::{Bytes, QueueLimits, Sectors, UNLIMITED_BYTES};

/// The part of a backend that all queues share, as the control plane uses it.
pub trait Backend: Send + Sync {
    /// Returns the size in bytes: a whole number of logical blocks.
    fn size(&self) -> Bytes;

    /// Returns whether writes, discards and write zeroes fail.
    fn read_only(&self) -> bool {
        false
    }

    /// Returns the supported operations.
    fn features(&self) -> Features;

    /// Returns the validated queue limits.
    fn limits(&self) -> QueueLimits;

    /// Returns properties for `show`, in order of display.
    fn describe(&self) -> Vec<Fact>;

    /// Returns the files that were deleted while the backend has them open: their data is lost when it
    /// closes them.
    fn deleted(&self) -> Vec<std::path::PathBuf> {
        Vec::new()
    }
}

/// Largest request in bytes: the size of a ring's largest buffer.
const REQUEST_MAX: Bytes = Bytes::mib(32);
/// Largest discard or write zeroes: the kernel's limit for files, `UINT_MAX >> 9` sectors.
const CLEAR_MAX: Sectors = Sectors(u32::MAX as u64 >> 9);

/// Returns the limits that all backends have in common: requests of any number of segments of any length.
fn base_limits() -> QueueLimits {
    QueueLimits {
        max_hw_sectors: REQUEST_MAX.sectors(),
        // The kernel's default of 4 MiB is for drivers that start requests slowly, which no backend does.
        max_user_sectors: REQUEST_MAX.sectors(),
        max_segments: u16::MAX,
        max_segment_size: UNLIMITED_BYTES,
        // The kernel's default for memory that any processor can access.
        dma_alignment: 3,
        max_write_zeroes_sectors: CLEAR_MAX,
        max_hw_wzeroes_unmap_sectors: CLEAR_MAX,
        ..QueueLimits::default()
    }
}

/// Returns the limits of memory, as brd has them: blocks of a sector, physical blocks of a page, and
/// nothing to flush.
fn memory_limits() -> QueueLimits {
    let mut limits = QueueLimits {
        features: block::Features::SYNCHRONOUS.union(block::Features::NOWAIT),
        physical_block_size: Bytes(4096),
        max_hw_discard_sectors: CLEAR_MAX,
        discard_granularity: Bytes(4096),
        ..base_limits()
    };
    let checked = limits.validate();
    debug_assert_eq!(checked, Ok(()));
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_are_for_zoned_devices() {
        let ram = Ram::new(&RamSpec { size: Bytes::mib(1), hugepages: false, integrity: None }).unwrap();
        let null = Null::new(&NullSpec { size: Bytes::mib(1), ..NullSpec::default() }).unwrap();
        let nodes: [Box<dyn queue::Node<testing::TestRing>>; 3] = [
            Box::new(ram.node(None)),
            Box::new(null.node(None)),
            Box::new(Zero::new(Bytes::mib(1)).node(None)),
        ];
        for node in nodes {
            let mut disk = testing::Harness::new(node);
            for op in block::Op::ALL.into_iter().filter(|op| op.is_special()) {
                assert_eq!(disk.bare(op, 0, 0), block::Status::NotSupported, "{op:?}");
            }
        }
    }

    #[test]
    fn memory_takes_large_requests_and_whole_discards() {
        let limits = memory_limits();
        assert_eq!(limits.max_sectors, Sectors(65536));
        assert_eq!(limits.max_discard_sectors, CLEAR_MAX);
        assert_eq!(limits.max_wzeroes_unmap_sectors, CLEAR_MAX);
        assert_eq!((limits.logical_block_size, limits.physical_block_size), (Bytes(512), Bytes(4096)));
    }
}
