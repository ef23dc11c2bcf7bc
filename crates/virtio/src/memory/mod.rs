//! Guest memory: the table of regions that a front-end shares, and spans of it.
//!
//! A [`GuestMemory`] never changes. A new table replaces it as a whole; rings and requests that still refer
//! to the old table keep it mapped. A [`Span`] is plain data that refers to bytes of one region by number,
//! so requests in flight hold spans and no pointers. Every access checks the span against the table again.
//!
//! Each hardware queue has its own table, because rings register the regions under different numbers; the
//! mappings are shared.

mod access;
mod dirty;
mod mapping;
#[cfg(all(test, not(loom)))]
mod tests;
mod words;

pub(crate) use access::load_pair;
pub use dirty::DirtyLog;
pub use mapping::Mapping;
pub(crate) use words::Words;

use block::{Region, Segment};
use mapping::Base;
use std::fmt;
use std::sync::Arc;

/// Maximum number of regions of a table: the number of a region must fit into a [`Span`], and QEMU has no
/// more slots than this.
pub const REGIONS_MAX: usize = 512;

/// A region of guest memory, as the front-end describes it.
#[derive(Clone, Debug)]
pub struct GuestRegion {
    /// First guest-physical address.
    pub guest: u64,
    /// First address in the front-end's process, by which messages refer to the parts of rings.
    pub user: u64,
    /// Length in bytes.
    pub len: u64,
    /// The mapped bytes, at least `len` of them.
    pub mapping: Arc<Mapping>,
    /// Number under which the queue's ring has registered the mapping ([`Mapping::lend`]).
    pub region: Region,
}

/// A region in the form that lookups use.
struct Slot {
    guest: u64,
    len: u64,
    /// Address of the first byte of the region.
    base: Base,
    /// Offset of the first byte in the registered memory.
    skip: u64,
    region: Region,
}

/// Bytes of one region: 16 bytes of plain data, valid for the table that created it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Offset in the region as the ring registered it, in bytes.
    pub(crate) offset: u64,
    /// Length in bytes.
    pub(crate) len: u32,
    region: Region,
    /// Index in the table.
    pub(crate) slot: u16,
}

impl Span {
    /// A span without memory.
    pub const EMPTY: Span = Span { offset: 0, len: 0, region: Region(0), slot: 0 };

    /// Returns the length in bytes.
    #[inline]
    pub const fn len(self) -> u32 {
        self.len
    }

    /// Returns whether the span is empty.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the memory as a segment of a request.
    #[inline]
    pub const fn segment(self) -> Segment {
        Segment { offset: self.offset, len: self.len, region: self.region }
    }

    /// Splits the span into its first `at` bytes, or all if it is shorter, and the rest.
    #[inline]
    #[must_use]
    pub fn split_at(self, at: u32) -> (Span, Span) {
        let at = at.min(self.len);
        let rest = Span { offset: self.offset + u64::from(at), len: self.len - at, ..self };
        (Span { len: at, ..self }, rest)
    }
}

/// Reason why a table of regions is not acceptable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MemoryError {
    /// There are more regions than [`REGIONS_MAX`].
    #[error("more than {REGIONS_MAX} regions")]
    TooMany,
    /// A region is empty, or its addresses overflow.
    #[error("region {0} is empty, or its addresses overflow")]
    Range(usize),
    /// Fewer bytes are mapped than the region has.
    #[error("region {0} is longer than its mapping")]
    Short(usize),
    /// Two regions overlap.
    #[error("region {0} overlaps another one")]
    Overlap(usize),
}

/// The memory of a guest.
pub struct GuestMemory {
    regions: Box<[Slot]>,
    /// Indexes of `regions` by guest address.
    sorted: Box<[u16]>,
    described: Box<[GuestRegion]>,
    log: Option<Arc<DirtyLog>>,
}

impl GuestMemory {
    /// Creates a table. Spans refer to a region by its index in `regions`, so a table that only appends
    /// regions to an older one also accepts the older table's spans.
    ///
    /// # Errors
    /// The regions overlap, overflow or are longer than their mappings, or there are too many.
    pub fn new(regions: Vec<GuestRegion>, log: Option<Arc<DirtyLog>>) -> Result<GuestMemory, MemoryError> {
        if regions.len() > REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let mut slots = Vec::with_capacity(regions.len());
        for (index, region) in regions.iter().enumerate() {
            let ends = (region.guest.checked_add(region.len), region.user.checked_add(region.len));
            let ((Some(_), Some(_)), 1..) = (ends, region.len) else {
                return Err(MemoryError::Range(index));
            };
            if region.mapping.len() < region.len {
                return Err(MemoryError::Short(index));
            }
            slots.push(Slot {
                guest: region.guest,
                len: region.len,
                base: region.mapping.base(),
                skip: region.mapping.skip(),
                region: region.region,
            });
        }
        for address in [|region: &GuestRegion| region.guest, |region: &GuestRegion| region.user] {
            let mut order: Vec<usize> = (0..regions.len()).collect();
            order.sort_by_key(|&index| address(&regions[index]));
            let overlaps = |pair: &&[usize]| {
                let (one, next) = (&regions[pair[0]], &regions[pair[1]]);
                address(next) - address(one) < one.len
            };
            if let Some(pair) = order.windows(2).find(overlaps) {
                return Err(MemoryError::Overlap(pair[1]));
            }
        }
        let mut sorted: Vec<u16> = (0..slots.len() as u16).collect();
        sorted.sort_by_key(|&index| slots[usize::from(index)].guest);
        Ok(GuestMemory { regions: slots.into(), sorted: sorted.into(), described: regions.into(), log })
    }

    /// Returns the regions, in the order in which they were given.
    pub fn regions(&self) -> &[GuestRegion] {
        &self.described
    }

    /// Returns the dirty log, while the guest is being migrated.
    pub fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref()
    }

    /// Finds the region of a guest address. Tries `hint`, the index of the last region found, first.
    #[inline]
    fn find(&self, guest: u64, hint: &mut u16) -> Option<(u16, &Slot)> {
        if let Some(slot) = self.regions.get(usize::from(*hint))
            && guest.wrapping_sub(slot.guest) < slot.len
        {
            return Some((*hint, slot));
        }
        let after = self.sorted.partition_point(|&index| self.regions[usize::from(index)].guest <= guest);
        let index = self.sorted[after.checked_sub(1)?];
        let slot = &self.regions[usize::from(index)];
        if guest - slot.guest >= slot.len {
            return None;
        }
        *hint = index;
        Some((index, slot))
    }

    /// Translates the start of a range: the whole range, or the part up to the end of its region.
    #[inline]
    pub(crate) fn translate_some(&self, guest: u64, len: u32, hint: &mut u16) -> Option<Span> {
        let (slot, region) = self.find(guest, hint)?;
        let inside = guest - region.guest;
        let len = u64::from(len).min(region.len - inside) as u32;
        Some(Span { offset: region.skip + inside, len, region: region.region, slot })
    }

    /// Translates a range of guest addresses that is within one region.
    pub fn translate(&self, guest: u64, len: u32) -> Option<Span> {
        self.translate_some(guest, len, &mut 0).filter(|span| span.len == len)
    }

    /// Translates a range of the front-end's addresses that is within one region.
    pub fn translate_user(&self, user: u64, len: u32) -> Option<Span> {
        let guest = self.user_to_guest(user)?;
        self.translate(guest, len)
    }

    /// Converts an address of the front-end to one of the guest.
    pub fn user_to_guest(&self, user: u64) -> Option<u64> {
        let region = self.described.iter().find(|region| user.wrapping_sub(region.user) < region.len)?;
        Some(region.guest + (user - region.user))
    }

    /// Records in the dirty log that the device wrote to a request's segment. Does nothing without a log.
    pub fn mark_segment(&self, segment: Segment) {
        if let Some(log) = &self.log
            && let Some(slot) = self.regions.iter().find(|slot| slot.region == segment.region)
        {
            log.mark(slot.guest + segment.offset.saturating_sub(slot.skip), segment.len.into());
        }
    }

    /// Records in the dirty log that the device wrote a span. Does nothing without a log.
    #[inline]
    pub fn mark_written(&self, span: Span) {
        if let Some(log) = &self.log
            && let Some(slot) = self.regions.get(usize::from(span.slot))
        {
            log.mark(slot.guest + span.offset.saturating_sub(slot.skip), span.len.into());
        }
    }
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let regions = self.described.iter().map(|region| (region.guest, region.len, region.region));
        f.debug_list().entries(regions).finish()
    }
}
