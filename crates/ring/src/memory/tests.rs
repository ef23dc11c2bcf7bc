//! Tests of the arena and its regions.

use super::*;

fn place(segment: Segment) -> (Region, u64) {
    (segment.region, segment.offset)
}

#[test]
fn sizes_are_rounded_up_to_powers_of_two() {
    for (len, class) in [(0, 0), (1, 0), (512, 0), (513, 1), (4096, 3), (4097, 4), (32 << 20, 16)] {
        assert_eq!(class_of(len), class, "{len}");
    }
}

#[test]
fn blocks_are_aligned_and_apart() {
    let mut memory = Memory::new(1 << 30);
    let mut taken = Vec::new();
    for round in 0..200u32 {
        let len = 1 << (round % 15 + 8);
        let segment = memory.allocate(len).unwrap();
        let size = u64::from(len.max(512));
        assert_eq!((segment.len, segment.offset % size.min(4096)), (len, 0));
        for &(region, start, end) in &taken {
            assert!(region != segment.region || end <= segment.offset || segment.offset + size <= start);
        }
        taken.push((segment.region, segment.offset, segment.offset + size));
        memory.bytes_mut(segment).fill(round as u8);
    }
}

#[test]
fn free_blocks_are_joined_before_more_is_mapped() {
    let mut memory = Memory::new(CHUNK as u64);
    let all: Vec<_> = std::iter::from_fn(|| memory.allocate(64 << 10)).collect();
    assert_eq!(all.len(), CHUNK >> 16);
    assert_eq!(memory.allocate(1), None);
    all.into_iter().for_each(|segment| memory.free(segment));
    let whole = memory.allocate(CHUNK as u32).unwrap();
    assert_eq!(place(whole), (whole.region, 0));
    assert_eq!(memory.allocate(CHUNK as u32 + 1), None);
}

#[test]
fn the_last_block_freed_is_allocated_first() {
    let mut memory = Memory::new(CHUNK as u64);
    let (first, second) = (memory.allocate(4096).unwrap(), memory.allocate(4096).unwrap());
    memory.free(first);
    memory.free(second);
    assert_eq!(place(memory.allocate(3000).unwrap()), place(second));
    assert_eq!(place(memory.allocate(4096).unwrap()), place(first));
}

#[test]
fn trimmed_blocks_read_as_zeroes() {
    let mut memory = Memory::new(CHUNK as u64);
    let segment = memory.allocate(1 << 20).unwrap();
    let kept = memory.allocate(512).unwrap();
    memory.bytes_mut(segment).fill(7);
    memory.bytes_mut(kept).fill(8);
    memory.free(segment);
    memory.trim();
    assert!(memory.bytes(segment).iter().all(|byte| *byte == 0));
    assert!(memory.bytes(kept).iter().all(|byte| *byte == 8));
}

#[test]
fn large_blocks_are_joined_from_used_ones_before_the_process_grows() {
    let mut memory = Memory::new(CHUNK as u64);
    let whole = memory.allocate(1 << 20).unwrap();
    memory.bytes_mut(whole).fill(1);
    memory.free(whole);
    let parts: Vec<_> = (0..16).map(|_| memory.allocate(64 << 10).unwrap()).collect();
    parts.into_iter().for_each(|part| memory.free(part));
    assert_eq!(place(memory.allocate(1 << 20).unwrap()), place(whole));
}

#[test]
fn registered_memory_becomes_ordinary_memory_when_released() {
    let mut memory = Memory::new(CHUNK as u64);
    memory.serve_registered(Mapping::new(REGISTERED).unwrap(), 5).unwrap();
    let (first, second) = (memory.allocate(4096).unwrap(), memory.allocate(4096).unwrap());
    assert_eq!(memory.pointer_and_fixed(first).1, Some(5));
    memory.free(first);
    memory.set_registered(None);
    assert_eq!(memory.pointer_and_fixed(second).1, None);
    // Segments in use are freed to the pool that their region belongs to now.
    memory.free(second);
    memory.trim();
    let whole = memory.allocate(REGISTERED as u32).unwrap();
    assert_eq!(place(whole), (second.region, 0));
    memory.set_registered(Some(7));
    memory.free(whole);
    let again = memory.allocate(4096).unwrap();
    assert_eq!((again.region, memory.pointer_and_fixed(again).1), (whole.region, Some(7)));
}

#[test]
#[should_panic(expected = "does not lie")]
fn a_segment_past_its_region_is_refused() {
    let mut memory = Memory::new(CHUNK as u64);
    let segment = memory.allocate(512).unwrap();
    memory.bytes(Segment { offset: CHUNK as u64 - 1, ..segment });
}

fn borrowed(len: usize) -> (ForeignMemory, std::sync::Weak<Vec<u8>>) {
    let keep = Arc::new(vec![0u8; len + 4096]);
    let weak = Arc::downgrade(&keep);
    let start = keep.as_ptr().addr().next_multiple_of(4096) - keep.as_ptr().addr();
    let base = NonNull::new(keep.as_ptr().wrapping_add(start).cast_mut()).unwrap();
    // SAFETY: the range lies in `keep`, and nobody accesses it.
    (unsafe { ForeignMemory::new(base, len, keep) }, weak)
}

#[test]
#[should_panic(expected = "does not lie")]
fn foreign_memory_cannot_be_read() {
    let mut memory = Memory::new(0);
    let region = memory.add_foreign(borrowed(8192).0).unwrap();
    let segment = Segment { offset: 4096, len: 4096, region };
    assert!(!memory.pointer(segment).is_null());
    memory.bytes(segment);
}

#[test]
fn removed_memory_lives_until_older_operations_have_completed() {
    let mut memory = Memory::new(0);
    let (first, weak) = borrowed(4096);
    let region = memory.add_foreign(first).unwrap();
    memory.remove_foreign(region, 10);
    memory.bury(10);
    assert!(weak.upgrade().is_some());
    assert_ne!(memory.add_foreign(borrowed(4096).0).unwrap(), region);
    memory.bury(11);
    assert!(weak.upgrade().is_none());
    assert_eq!(memory.add_foreign(borrowed(4096).0).unwrap(), region);
}

#[test]
fn a_drivers_memory_is_named_by_entry_and_offset() {
    let mut memory = Memory::new(0);
    let region = memory.add_kernel(7, 4).unwrap();
    let segment = Segment { offset: 2 << KERNEL_BUFFER_SHIFT | 4096, len: 512, region };
    let (pointer, entry) = memory.pointer_and_fixed(segment);
    assert_eq!((pointer.addr(), entry), (4096, Some(9)));
    assert!(memory.is_kernel(region));
    assert_eq!(memory.remove_kernel(region), (7, 4));
    assert!(!memory.is_kernel(region));
}

#[test]
#[should_panic(expected = "does not lie in")]
fn a_drivers_memory_cannot_be_read() {
    let mut memory = Memory::new(0);
    let region = memory.add_kernel(0, 4).unwrap();
    memory.bytes(Segment { offset: 0, len: 512, region });
}

#[test]
#[should_panic(expected = "does not lie in")]
fn an_entry_past_a_drivers_last_is_refused() {
    let mut memory = Memory::new(0);
    let region = memory.add_kernel(0, 4).unwrap();
    memory.pointer_and_fixed(Segment { offset: 4 << KERNEL_BUFFER_SHIFT, len: 512, region });
}

#[test]
#[should_panic(expected = "does not lie in")]
fn removed_memory_cannot_be_used() {
    let mut memory = Memory::new(0);
    let region = memory.add_own(Mapping::new(8192).unwrap(), None).unwrap();
    memory.bytes_mut(Segment { offset: 4096, len: 4096, region }).fill(1);
    memory.remove_own(region);
    memory.bytes(Segment { offset: 0, len: 1, region });
}

#[test]
fn two_segments_are_accessed_at_once_unless_they_overlap() {
    let mut memory = Memory::new(1 << 30);
    let block = memory.allocate(1024).unwrap();
    let (low, high) = block.split_at(512);
    memory.bytes_mut(low).fill(7);
    let (from, to) = memory.bytes_of_two(low, high);
    to.copy_from_slice(from);
    assert_eq!(memory.bytes(block), [7; 1024]);
    let overlapping = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        memory.bytes_of_two(low, block.slice(511, 2));
    }));
    assert!(overlapping.is_err());
}
