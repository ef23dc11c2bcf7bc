//! Memory of requests: regions, and the arena that allocates from some of them.
//!
//! The arena is a buddy allocator: blocks of 512 bytes to 32 MiB, powers of two, from chunks of address
//! space. A block is aligned to its size within its region, and a region to a page. Free blocks are in a list
//! per size, last in, first out, so that the next allocation is in the cache. Buddies are joined when a size
//! has run out, before a large block without pages is handed out, and in [`Memory::trim`].
//!
//! Owned by a ring, on its thread. *Invariant:* the memory of a region stays mapped while an operation in
//! flight may refer to it; only foreign memory is ever released, after the older operations have completed
//! (`grave`).
//!
//! The table of regions is not a [`slab::Slab`]: a removed region keeps its number until those operations
//! have completed.

use crate::sys::Mapping;
use block::{Region, Segment};
use std::any::Any;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// `log2` of the smallest block.
const BLOCK_SHIFT: u32 = 9;
/// Number of block sizes: 512 B … 32 MiB.
const CLASSES: usize = 17;
/// Largest block, and unit in which address space is reserved.
const CHUNK: usize = 1 << (BLOCK_SHIFT as usize + CLASSES - 1);
/// Smallest size class that `trim` returns to the system: 64 KiB.
const TRIM_CLASS: usize = 7;
/// Bytes registered with the kernel: a quarter of the usual RLIMIT_MEMLOCK of 8 MiB.
pub(crate) const REGISTERED: usize = 2 << 20;

/// `log2` of the size of a kernel buffer: 32 MiB, the largest request of ublk.
pub const KERNEL_BUFFER_SHIFT: u32 = 25;

/// Memory borrowed by a ring: operations may refer to it, but the ring does not access its bytes.
pub struct ForeignMemory {
    base: NonNull<u8>,
    len: usize,
    keep: Arc<dyn Any + Send + Sync>,
}

impl ForeignMemory {
    /// Wraps `len` bytes at `base`, which stay mapped while `keep` lives.
    ///
    /// # Safety
    /// The range is mapped readable and writable as long as any clone of `keep` exists, `base` is on a page
    /// boundary, and nobody holds a Rust reference to bytes that an operation may be writing.
    pub unsafe fn new(base: NonNull<u8>, len: usize, keep: Arc<dyn Any + Send + Sync>) -> ForeignMemory {
        assert!(base.as_ptr().addr().is_multiple_of(4096), "borrowed memory starts on a page boundary");
        ForeignMemory { base, len, keep }
    }
}

// SAFETY: it is an address and the owner that keeps it valid; the caller of `new` promised that any thread
// may use it.
unsafe impl Send for ForeignMemory {}

impl std::fmt::Debug for ForeignMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ForeignMemory").field("base", &self.base).field("len", &self.len).finish()
    }
}

enum Backing {
    Own(Mapping),
    Foreign(Arc<dyn Any + Send + Sync>),
    /// Memory of another owner that others write at any time: operations may refer to it, and it may be
    /// copied from and to, but its bytes are never accessed as such.
    Guest(Arc<dyn Any + Send + Sync>),
    /// Entries of the kernel's buffer table, first and count, which a driver fills. User space cannot access
    /// them, so both lengths are 0.
    Kernel(u16, u16),
    /// A shared mapping of a file, which others write at any time: the kernel may use its address, its bytes
    /// are never accessed here.
    Shared(#[expect(dead_code, reason = "it keeps what lies there mapped")] Mapping),
    /// Removed.
    None,
}

struct Slot {
    base: NonNull<u8>,
    len: u64,
    /// Bytes that `bytes` may access: 0 for foreign memory.
    own_len: u64,
    /// Index among the buffers registered with the kernel.
    fixed: Option<u16>,
    backing: Backing,
}

#[derive(Clone, Copy)]
struct Block {
    region: u16,
    offset: u32,
    /// The block was not written to since it was mapped or trimmed, so it has no pages.
    clean: bool,
}

/// Free blocks by size class.
#[derive(Default)]
struct Pool {
    lists: [Vec<Block>; CLASSES],
    /// Bit `k`: list `k` is not empty.
    filled: u32,
    /// A block was freed since blocks were last joined.
    loose: bool,
    /// A block large enough for `trim` was freed since [`Memory::freed_large`] was last called.
    loose_large: bool,
}

impl Pool {
    #[inline]
    fn push(&mut self, class: usize, block: Block) {
        self.lists[class].push(block);
        self.filled |= 1 << class;
    }

    #[inline]
    fn take(&mut self, class: usize) -> Option<Block> {
        let above = self.filled >> class;
        if above == 0 {
            return None;
        }
        let mut from = class + above.trailing_zeros() as usize;
        let block = self.lists[from].pop()?;
        if self.lists[from].is_empty() {
            self.filled &= !(1 << from);
        }
        while from > class {
            from -= 1;
            let upper = block.offset + (1 << (BLOCK_SHIFT as usize + from));
            self.push(from, Block { offset: upper, ..block });
        }
        Some(block)
    }

    /// Joins free buddies to larger blocks.
    fn join(&mut self) {
        self.loose = false;
        for class in 0..CLASSES - 1 {
            let mut list = std::mem::take(&mut self.lists[class]);
            list.sort_unstable_by_key(|block| std::cmp::Reverse((block.region, block.offset)));
            let bit = 1u32 << (BLOCK_SHIFT as usize + class);
            let mut kept = Vec::with_capacity(list.len());
            while let Some(low) = list.pop() {
                let buddy = list.last().filter(|b| b.region == low.region && b.offset == low.offset | bit);
                match buddy {
                    Some(&high) if low.offset & bit == 0 => {
                        list.pop();
                        self.push(class + 1, Block { clean: low.clean && high.clean, ..low });
                    }
                    _ => kept.push(low),
                }
            }
            // Blocks with pages are handed out first.
            kept.sort_by_key(|block| (!block.clean, std::cmp::Reverse((block.region, block.offset))));
            self.filled &= !(1 << class);
            self.filled |= u32::from(!kept.is_empty()) << class;
            self.lists[class] = kept;
        }
    }
}

/// All regions of a ring.
pub(crate) struct Memory {
    slots: Vec<Slot>,
    general: Pool,
    registered: Pool,
    /// The region that is or was registered with the kernel. Created once and kept.
    registered_region: Option<Region>,
    left: u64,
    /// Removed foreign memory, with the number of operations started before: those may still use it.
    grave: Vec<(u64, u16, Arc<dyn Any + Send + Sync>)>,
    spare: Vec<u16>,
}

/// Size class of a length in bytes.
#[inline]
fn class_of(len: u32) -> usize {
    let len = len.max(1 << BLOCK_SHIFT);
    (u32::BITS - (len - 1).leading_zeros() - BLOCK_SHIFT) as usize
}

#[cold]
#[track_caller]
fn outside(segment: Segment) -> ! {
    panic!("{segment:?} does not lie in the ring's own memory")
}

impl Memory {
    pub(crate) fn new(max: u64) -> Memory {
        Memory {
            slots: Vec::new(),
            general: Pool::default(),
            registered: Pool::default(),
            registered_region: None,
            left: max.next_multiple_of(CHUNK as u64),
            grave: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Adds a private mapping as a region.
    pub(crate) fn add_own(&mut self, mapping: Mapping, fixed: Option<u16>) -> io::Result<Region> {
        let (base, len) = (mapping.base(), mapping.len() as u64);
        self.add(Slot { base, len, own_len: len, fixed, backing: Backing::Own(mapping) })
    }

    pub(crate) fn add_foreign(&mut self, memory: ForeignMemory) -> io::Result<Region> {
        let ForeignMemory { base, len, keep } = memory;
        let backing = Backing::Foreign(keep);
        self.add(Slot { base, len: len as u64, own_len: 0, fixed: None, backing })
    }

    pub(crate) fn add_guest(&mut self, memory: ForeignMemory) -> io::Result<Region> {
        let ForeignMemory { base, len, keep } = memory;
        self.add(Slot { base, len: len as u64, own_len: 0, fixed: None, backing: Backing::Guest(keep) })
    }

    fn add(&mut self, slot: Slot) -> io::Result<Region> {
        if let Some(number) = self.spare.pop() {
            self.slots[usize::from(number)] = slot;
            return Ok(Region(number));
        }
        let number = u16::try_from(self.slots.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.slots.push(slot);
        Ok(Region(number))
    }

    /// Adds a mapping of a file as a region.
    pub(crate) fn add_shared(&mut self, mapping: Mapping) -> io::Result<Region> {
        let (base, len) = (mapping.base(), mapping.len() as u64);
        self.add(Slot { base, len, own_len: 0, fixed: None, backing: Backing::Shared(mapping) })
    }

    /// Whether the bytes of a region cannot be accessed from here.
    #[inline]
    pub(crate) fn is_opaque(&self, region: Region) -> bool {
        let slot = self.slots.get(usize::from(region.0));
        let backing = slot.map(|slot| &slot.backing);
        matches!(backing, Some(Backing::Kernel(..) | Backing::Shared(_) | Backing::Guest(_)))
    }

    /// Removes a foreign region. Its memory is kept until all operations up to number `started` have
    /// completed.
    pub(crate) fn remove_foreign(&mut self, region: Region, started: u64) {
        let is_borrowed = |slot: &&mut Slot| matches!(slot.backing, Backing::Foreign(_) | Backing::Guest(_));
        let slot = self.slots.get_mut(usize::from(region.0)).filter(is_borrowed);
        let slot = slot.unwrap_or_else(|| panic!("{region:?} is not borrowed memory"));
        slot.len = 0;
        if let Backing::Foreign(keep) | Backing::Guest(keep) =
            std::mem::replace(&mut slot.backing, Backing::None)
        {
            self.grave.push((started, region.0, keep));
        }
    }

    /// Adds a region of entries of the kernel's buffer table.
    pub(crate) fn add_kernel(&mut self, first: u16, count: u16) -> io::Result<Region> {
        let backing = Backing::Kernel(first, count);
        self.add(Slot { base: NonNull::dangling(), len: 0, own_len: 0, fixed: None, backing })
    }

    /// Removes a region of entries of the kernel's buffer table. Returns the first entry and the count.
    pub(crate) fn remove_kernel(&mut self, region: Region) -> (u16, u16) {
        match self.slots.get_mut(usize::from(region.0)).map(|slot| &mut slot.backing) {
            Some(backing @ &mut Backing::Kernel(first, count)) => {
                *backing = Backing::None;
                self.spare.push(region.0);
                (first, count)
            }
            _ => panic!("{region:?} is not a driver's memory"),
        }
    }

    /// Whether only the kernel can access a region.
    #[inline]
    pub(crate) fn is_kernel(&self, region: Region) -> bool {
        matches!(self.slots.get(usize::from(region.0)), Some(Slot { backing: Backing::Kernel(..), .. }))
    }

    /// Removes a private or shared region that the arena does not use. No operation may be in flight on it.
    pub(crate) fn remove_own(&mut self, region: Region) {
        let slot = self.slots.get_mut(usize::from(region.0));
        let slot = slot.filter(|slot| matches!(slot.backing, Backing::Own(_) | Backing::Shared(_)));
        let slot = slot.unwrap_or_else(|| panic!("{region:?} is not memory of the ring's own"));
        (slot.len, slot.own_len, slot.backing) = (0, 0, Backing::None);
        self.spare.push(region.0);
    }

    pub(crate) fn has_grave(&self) -> bool {
        !self.grave.is_empty()
    }

    /// Releases removed foreign memory that only operations older than number `oldest` could use.
    pub(crate) fn bury(&mut self, oldest: u64) {
        let spare = &mut self.spare;
        self.grave.retain(|(removed, number, _)| {
            let keep = *removed >= oldest;
            if !keep {
                spare.push(*number);
            }
            keep
        });
    }

    #[inline]
    pub(crate) fn allocate(&mut self, len: u32) -> Option<Segment> {
        self.reserve(len).map(|(segment, _)| segment)
    }

    /// Allocates like [`Memory::allocate`]; also returns whether the segment already has pages.
    #[inline]
    pub(crate) fn reserve(&mut self, len: u32) -> Option<(Segment, bool)> {
        if len as usize > CHUNK {
            return None;
        }
        let class = class_of(len);
        let block = match self.registered.take(class).or_else(|| self.general.take(class)) {
            Some(block) if block.clean && class >= TRIM_CLASS && self.general.loose => {
                self.take_without_growing(class, block)
            }
            Some(block) => block,
            None => self.take_slowly(class)?,
        };
        let segment = Segment { offset: block.offset.into(), len, region: Region(block.region) };
        Some((segment, !block.clean))
    }

    /// Returns the whole pages of a segment to the system, unless it is registered with the kernel.
    pub(crate) fn discard(&mut self, segment: Segment) {
        self.own_pointer(segment);
        if let Some(Slot { backing: Backing::Own(mapping), fixed: None, .. }) =
            self.slots.get(usize::from(segment.region.0))
        {
            mapping.discard(segment.offset as usize, segment.len as usize & !4095);
        }
    }

    /// A large block without pages was found. Before the process grows by its size, joins free blocks, some
    /// of which have pages: one of those may suffice.
    #[cold]
    fn take_without_growing(&mut self, class: usize, clean: Block) -> Block {
        let pool = match self.slots[usize::from(clean.region)].fixed {
            Some(_) => &mut self.registered,
            None => &mut self.general,
        };
        pool.push(class, clean);
        self.general.join();
        let again = self.registered.take(class).or_else(|| self.general.take(class));
        again.expect("a block of that size was just put back")
    }

    #[cold]
    fn take_slowly(&mut self, class: usize) -> Option<Block> {
        if self.general.loose {
            self.general.join();
            if let Some(block) = self.general.take(class) {
                return Some(block);
            }
        }
        self.left = self.left.checked_sub(CHUNK as u64)?;
        let region = Mapping::new(CHUNK).and_then(|mapping| self.add_own(mapping, None));
        let Ok(region) = region else {
            self.left += CHUNK as u64;
            return None;
        };
        self.general.push(CLASSES - 1, Block { region: region.0, offset: 0, clean: true });
        self.general.take(class)
    }

    #[inline]
    pub(crate) fn free(&mut self, segment: Segment) {
        let class = class_of(segment.len);
        let slot = self.slots.get(usize::from(segment.region.0)).unwrap_or_else(|| outside(segment));
        let size = 1u64 << (BLOCK_SHIFT as usize + class);
        if slot.own_len < size || segment.offset > slot.own_len - size || segment.offset & (size - 1) != 0 {
            outside(segment);
        }
        let pool = if slot.fixed.is_some() { &mut self.registered } else { &mut self.general };
        pool.loose = true;
        pool.loose_large |= class >= TRIM_CLASS;
        pool.push(class, Block { region: segment.region.0, offset: segment.offset as u32, clean: false });
    }

    /// Adds a mapping that is registered with the kernel as `number`; allocations prefer it.
    ///
    /// # Errors
    /// There are too many regions.
    pub(crate) fn serve_registered(&mut self, mapping: Mapping, number: u16) -> io::Result<()> {
        let region = self.add_own(mapping, Some(number))?;
        self.registered_region = Some(region);
        let class = class_of(REGISTERED as u32);
        self.registered.push(class, Block { region: region.0, offset: 0, clean: true });
        Ok(())
    }

    /// Address of the mapping that is or was registered; `None` if there never was one.
    pub(crate) fn registered_base(&self) -> Option<NonNull<u8>> {
        self.registered_region.map(|region| self.slots[usize::from(region.0)].base)
    }

    /// Records that the mapping is now registered as `number`, or unregistered. Segments in use remain valid;
    /// when freed they return to the pool that their region belongs to then.
    pub(crate) fn set_registered(&mut self, number: Option<u16>) {
        let Some(region) = self.registered_region else { return };
        self.slots[usize::from(region.0)].fixed = number;
        let (from, into) = match number {
            Some(_) => (&mut self.general, &mut self.registered),
            None => (&mut self.registered, &mut self.general),
        };
        for class in 0..CLASSES {
            let (moved, kept) = from.lists[class].drain(..).partition(|block| block.region == region.0);
            from.lists[class] = kept;
            if from.lists[class].is_empty() {
                from.filled &= !(1 << class);
            }
            let moved: Vec<Block> = moved;
            moved.into_iter().for_each(|block| into.push(class, block));
        }
        // Memory that was registered is returned to the system like other unused memory.
        (into.loose, into.loose_large) = (true, true);
    }

    /// Whether a large block was freed since the last call.
    #[inline]
    pub(crate) fn freed_large(&mut self) -> bool {
        std::mem::take(&mut self.general.loose_large)
    }

    /// Joins free blocks, and returns the pages of large ones to the system.
    pub(crate) fn trim(&mut self) {
        self.registered.join();
        self.general.join();
        for class in TRIM_CLASS..CLASSES {
            for block in self.general.lists[class].iter_mut().filter(|block| !block.clean) {
                if let Backing::Own(mapping) = &self.slots[usize::from(block.region)].backing {
                    block.clean = mapping.discard(block.offset as usize, 1 << (BLOCK_SHIFT as usize + class));
                }
            }
        }
    }

    /// Address of a segment, foreign memory included.
    ///
    /// # Panics
    /// If it is not within a region.
    #[inline]
    #[track_caller]
    pub(crate) fn pointer(&self, segment: Segment) -> *mut u8 {
        self.place(segment, |slot| slot.len).0
    }

    /// Address of a segment and the index of its registered buffer. For kernel memory: the offset in its
    /// entry, and the index of the entry.
    #[inline]
    #[track_caller]
    pub(crate) fn pointer_and_fixed(&self, segment: Segment) -> (*mut u8, Option<u16>) {
        if self.is_kernel(segment.region) {
            return self.entry(segment);
        }
        self.place(segment, |slot| slot.len)
    }

    #[track_caller]
    fn entry(&self, segment: Segment) -> (*mut u8, Option<u16>) {
        let Some(Slot { backing: Backing::Kernel(first, count), .. }) =
            self.slots.get(usize::from(segment.region.0))
        else {
            outside(segment)
        };
        let entry = segment.offset >> KERNEL_BUFFER_SHIFT;
        let within = segment.offset & ((1 << KERNEL_BUFFER_SHIFT) - 1);
        if entry >= u64::from(*count) || within + u64::from(segment.len) > 1 << KERNEL_BUFFER_SHIFT {
            outside(segment);
        }
        (std::ptr::without_provenance_mut(within as usize), Some(first + entry as u16))
    }

    /// Address of a segment of the ring's private memory.
    #[inline]
    #[track_caller]
    pub(crate) fn own_pointer(&self, segment: Segment) -> *mut u8 {
        self.place(segment, |slot| slot.own_len).0
    }

    #[inline]
    #[track_caller]
    fn place(&self, segment: Segment, len: impl Fn(&Slot) -> u64) -> (*mut u8, Option<u16>) {
        let Some(slot) = self.slots.get(usize::from(segment.region.0)) else { outside(segment) };
        let room = len(slot);
        if segment.offset > room || u64::from(segment.len) > room - segment.offset {
            outside(segment);
        }
        // SAFETY: offset lies within the region's mapping, as was just compared.
        (unsafe { slot.base.as_ptr().add(segment.offset as usize) }, slot.fixed)
    }

    #[inline]
    #[track_caller]
    pub(crate) fn bytes(&self, segment: Segment) -> &[u8] {
        // SAFETY: the range lies in our own mapping, which lives as long as `self` and started as zeroes. The
        // owner of an operation that writes to it waits for the completion before it reads.
        unsafe { std::slice::from_raw_parts(self.own_pointer(segment), segment.len as usize) }
    }

    #[inline]
    #[track_caller]
    pub(crate) fn bytes_mut(&mut self, segment: Segment) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes any other slice.
        unsafe { std::slice::from_raw_parts_mut(self.own_pointer(segment), segment.len as usize) }
    }

    /// The bytes of two segments, the second mutably.
    ///
    /// # Panics
    /// If they overlap, or as [`bytes`](Memory::bytes) does.
    #[track_caller]
    pub(crate) fn bytes_of_two(&mut self, first: Segment, second: Segment) -> (&[u8], &mut [u8]) {
        let apart = first.region != second.region
            || first.offset + u64::from(first.len) <= second.offset
            || second.offset + u64::from(second.len) <= first.offset;
        assert!(apart, "{first:?} and {second:?} overlap");
        let (first_at, second_at) = (self.own_pointer(first), self.own_pointer(second));
        // SAFETY: both lie in our own mappings as in `bytes`, they do not overlap, and `&mut self` excludes
        // any other slice.
        unsafe {
            (
                std::slice::from_raw_parts(first_at, first.len as usize),
                std::slice::from_raw_parts_mut(second_at, second.len as usize),
            )
        }
    }

    #[inline]
    #[track_caller]
    pub(crate) fn copy(&mut self, from: Segment, to: Segment) {
        assert_eq!(from.len, to.len, "a copy between segments of one length");
        let (source, target) = (self.own_pointer(from), self.own_pointer(to));
        // SAFETY: both lie in our own mappings, and this kind of copy allows overlap.
        unsafe { std::ptr::copy(source, target, from.len as usize) };
    }

    /// Copies between memory of any kind that has an address.
    #[inline]
    #[track_caller]
    pub(crate) fn copy_any(&mut self, from: Segment, to: Segment) {
        assert_eq!(from.len, to.len, "a copy between segments of one length");
        let (source, target) = (self.pointer(from), self.pointer(to));
        // SAFETY: both lie in regions that are mapped readable and writable, and this kind of copy allows
        // overlap. No reference to borrowed memory exists; bytes have no invalid values, so a guest that
        // writes meanwhile gets a mixture.
        unsafe { std::ptr::copy(source, target, from.len as usize) };
    }

    /// Fills memory of any kind that has an address with zeroes.
    #[inline]
    #[track_caller]
    pub(crate) fn clear_any(&mut self, segment: Segment) {
        let target = self.pointer(segment);
        // SAFETY: as in `copy_any`.
        unsafe { std::ptr::write_bytes(target, 0, segment.len as usize) };
    }

    /// Fills `iovecs` with the addresses of non-empty segments; returns the total bytes.
    #[inline]
    pub(crate) fn gather(&self, segments: &[Segment], iovecs: &mut Vec<libc::iovec>) -> u64 {
        iovecs.clear();
        self.append(segments.iter().copied(), iovecs)
    }

    /// Appends the addresses of non-empty segments to `iovecs`; returns the total bytes.
    #[inline]
    pub(crate) fn append(
        &self,
        segments: impl Iterator<Item = Segment>,
        iovecs: &mut Vec<libc::iovec>,
    ) -> u64 {
        let mut total = 0;
        for segment in segments.filter(|segment| segment.len > 0) {
            total += u64::from(segment.len);
            let base = self.pointer(segment).cast();
            iovecs.push(libc::iovec { iov_base: base, iov_len: segment.len as usize });
        }
        total
    }
}

#[cfg(test)]
mod tests;
