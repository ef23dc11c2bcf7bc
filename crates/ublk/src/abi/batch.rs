//! Commands for many tags at once: [`Features::BATCH_IO`](super::Features::BATCH_IO).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `struct ublk_batch_io`: the payload of a batch command. Its buffer holds `nr_elem` elements of
/// `elem_bytes`, each an [`ElementHeader`] followed by the fields of [`BatchFlags`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BatchIo {
    /// The queue.
    pub q_id: u16,
    /// [`BatchFlags`].
    pub flags: u16,
    /// Number of elements.
    pub nr_elem: u16,
    /// Bytes of an element.
    pub elem_bytes: u8,
    /// Must be zero.
    pub reserved: u8,
    /// Must be zero.
    pub reserved2: u64,
}

/// Fields of a batch element after its header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BatchFlags(pub u16);

impl BatchFlags {
    /// Elements have the sector of a zone append.
    pub const HAS_ZONE_LBA: BatchFlags = BatchFlags(1);
    /// Elements have the address of the tag's buffer.
    pub const HAS_BUF_ADDR: BatchFlags = BatchFlags(2);
    /// Requests are delivered even if automatic registration fails.
    pub const AUTO_BUF_REG_FALLBACK: BatchFlags = BatchFlags(4);

    /// Returns the bytes of an element.
    pub const fn element_len(self) -> u8 {
        let extra = (self.0 & Self::HAS_ZONE_LBA.0 != 0) as u8 + (self.0 & Self::HAS_BUF_ADDR.0 != 0) as u8;
        size_of::<ElementHeader>() as u8 + 8 * extra
    }
}

/// `struct ublk_elem_header`: one tag of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ElementHeader {
    /// The tag.
    pub tag: u16,
    /// For automatic registration: index in the buffer table.
    pub buf_index: u16,
    /// For a commit: bytes done, or a negative errno.
    pub result: i32,
}
