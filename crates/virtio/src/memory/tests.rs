use super::*;

const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7f00_0000_0000;

fn region(guest: u64, user: u64, len: u64, number: u16) -> GuestRegion {
    let mapping = Mapping::zeroed(len as usize);
    GuestRegion { guest, user, len, mapping, region: Region(number) }
}

/// Returns two adjacent regions, and a third one after a hole.
fn three() -> GuestMemory {
    let regions = vec![
        region(GUEST + 0x4000, USER, 0x2000, 7),
        region(GUEST, USER + 0x10_0000, 0x4000, 8),
        region(GUEST + 0x8000, USER + 0x20_0000, 0x1000, 9),
    ];
    GuestMemory::new(regions, None).expect("regions without overlap")
}

#[test]
fn an_address_is_found_in_its_region_whatever_the_order() {
    let memory = three();
    for (guest, number, offset) in
        [(GUEST, 8, 0), (GUEST + 0x3fff, 8, 0x3fff), (GUEST + 0x4000, 7, 0), (GUEST + 0x8ffc, 9, 0xffc)]
    {
        let segment = memory.translate(guest, 1).expect("inside").segment();
        assert_eq!((segment.region, segment.offset, segment.len), (Region(number), offset, 1));
    }
}

#[test]
fn addresses_outside_of_all_regions_are_refused() {
    let memory = three();
    for guest in [0, GUEST - 1, GUEST + 0x6000, GUEST + 0x7fff, GUEST + 0x9000, u64::MAX] {
        assert_eq!(memory.translate(guest, 1), None, "{guest:#x}");
    }
    for (guest, len) in [(GUEST + 0x8fff, 2), (GUEST, u32::MAX), (u64::MAX, u32::MAX), (GUEST + 0x3fff, 2)] {
        assert_eq!(memory.translate(guest, len), None, "{guest:#x} {len}");
    }
}

#[test]
fn any_hint_gives_the_same_span() {
    let memory = three();
    for guest in (GUEST - 0x1000..GUEST + 0xa000).step_by(0x800) {
        let expected = memory.translate_some(guest, 8, &mut 0);
        for hint in 0..=4 {
            assert_eq!(memory.translate_some(guest, 8, &mut hint.clone()), expected);
        }
    }
}

#[test]
fn addresses_of_the_front_end_become_those_of_the_guest() {
    let memory = three();
    assert_eq!(memory.user_to_guest(USER + 0x1234), Some(GUEST + 0x5234));
    assert_eq!(memory.user_to_guest(USER + 0x10_0000), Some(GUEST));
    assert_eq!(memory.user_to_guest(USER + 0x2000), None);
    assert_eq!(memory.translate_user(USER + 0x1fff, 1), memory.translate(GUEST + 0x5fff, 1));
    assert_eq!(memory.translate_user(USER + 0x1fff, 2), None);
}

#[test]
fn tables_with_impossible_regions_are_refused() {
    let of = |regions| GuestMemory::new(regions, None).map(|_| ()).unwrap_err();
    let whole = |guest, user, len| region(guest, user, len, 0);
    assert_eq!(of(vec![whole(0, 0, 0)]), MemoryError::Range(0));
    assert_eq!(of(vec![whole(u64::MAX - 10, 0, 0x1000)]), MemoryError::Range(0));
    assert_eq!(of(vec![whole(0, u64::MAX - 10, 0x1000)]), MemoryError::Range(0));
    assert_eq!(of(vec![whole(0, 0, 0x1000), whole(0xfff, 0x1_0000, 1)]), MemoryError::Overlap(1));
    assert_eq!(of(vec![whole(0, 0, 0x1000), whole(0x1000, 0xfff, 1)]), MemoryError::Overlap(1));
    let short = GuestRegion { len: 2, ..whole(0, 0, 1) };
    assert_eq!(of(vec![short]), MemoryError::Short(0));
    let many = (0..=REGIONS_MAX as u64).map(|at| whole(at, at, 1)).collect();
    assert_eq!(of(many), MemoryError::TooMany);
}

#[test]
fn bytes_are_read_where_they_were_written() {
    let memory = three();
    let span = memory.translate(GUEST + 0x4ff8, 16).unwrap();
    assert!(memory.write(span, &[1, 2, 3, 4, 5, 6, 7, 8, 9]));
    let mut bytes = [0xff; 4];
    assert!(memory.read(span.split_at(5).1, &mut bytes));
    assert_eq!(bytes, [6, 7, 8, 9]);
    assert!(memory.store_byte(span.split_at(7).1, 0x55));
    assert!(memory.fill(span.split_at(9).1, 0xaa));
    assert_eq!(memory.load_pair(span), Some([0x5507_0605_0403_0201, 0xaaaa_aaaa_aaaa_aa09]));
}

#[test]
fn words_at_odd_addresses_are_loaded_whole() {
    let memory = three();
    let bytes: Vec<u8> = (0..32).collect();
    let span = memory.translate(GUEST, 32).unwrap();
    assert!(memory.write(span, &bytes));
    for skip in 0..16 {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let expected = [word(skip), word(skip + 8)];
        assert_eq!(memory.load_pair(span.split_at(skip as u32).1), Some(expected));
    }
    assert_eq!(memory.load_pair(span.split_at(17).1), None);
}

#[test]
fn accesses_beyond_a_span_or_with_a_span_of_another_table_are_refused() {
    let memory = three();
    let small = GuestMemory::new(vec![region(0, 0, 0x1000, 1)], None).unwrap();
    let high = memory.translate(GUEST + 0x2000, 8).unwrap();
    let mut bytes = [0; 9];
    assert!(!memory.read(high, &mut bytes) && !memory.write(high, &bytes));
    assert!(!memory.store_byte(Span::EMPTY, 1));
    for span in [high, memory.translate(GUEST + 0x4000, 0x1001).unwrap()] {
        assert!(!small.read(span, &mut bytes[..1]) && !small.write(span, &[1]));
        assert!(!small.fill(span, 1) && !small.store_byte(span, 1));
    }
}

#[test]
fn a_file_is_mapped_from_any_offset() {
    let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 0x4000).unwrap();
    let whole = Mapping::of_file(&file, 0, 0x4000).unwrap();
    let part = Mapping::of_file(&file, 0x1234, 0x1000).unwrap();
    assert_eq!((part.skip(), whole.skip()), (0x234, 0));
    let one = GuestRegion { guest: 0, user: 0, len: 0x4000, mapping: whole, region: Region(3) };
    let other = GuestRegion { len: 0x1000, mapping: part, ..one.clone() };
    let (one, other) = (GuestMemory::new(vec![one], None), GuestMemory::new(vec![other], None));
    let (one, other) = (one.unwrap(), other.unwrap());
    assert!(one.write(one.translate(0x1234 + 5, 1).unwrap(), b"x"));
    let span = other.translate(5, 1).unwrap();
    let mut byte = [0];
    assert!(other.read(span, &mut byte));
    assert_eq!((byte, span.segment().offset), (*b"x", 0x239), "the ring's region starts at a page");
    for (offset, len) in [(0, 0), (0, 0x4001), (0x4000, 1), (u64::MAX, 2)] {
        assert!(Mapping::of_file(&file, offset, len).is_err(), "{offset:#x} {len:#x}");
    }
}

#[test]
fn writes_mark_their_pages_in_the_dirty_log_and_reads_do_not() {
    let bitmap = Mapping::zeroed(4);
    let log = DirtyLog::new(bitmap.clone(), 4).unwrap();
    assert!(DirtyLog::new(bitmap.clone(), 5).is_none());
    let regions = vec![region(0x3000, 0, 0x4000, 0), region(0x1_f000, 0x10_0000, 0x2000, 1)];
    let memory = GuestMemory::new(regions, Some(log)).unwrap();
    let view = GuestRegion { guest: 0, user: 0, len: 4, mapping: bitmap, region: Region(0) };
    let view = GuestMemory::new(vec![view], None).unwrap();
    let bits = || {
        let mut bytes = [0; 4];
        assert!(view.read(view.translate(0, 4).unwrap(), &mut bytes));
        u32::from_le_bytes(bytes)
    };
    assert!(memory.read(memory.translate(0x3000, 1).unwrap(), &mut [0]));
    assert_eq!(bits(), 0);
    assert!(memory.write(memory.translate(0x4ffe, 4).unwrap(), &[1, 2]));
    assert_eq!(bits(), 1 << 4, "only the bytes that were written");
    memory.mark_written(memory.translate(0x4fff, 2).unwrap());
    assert_eq!(bits(), 1 << 4 | 1 << 5);
    memory.mark_written(memory.translate(0x6000, 0).unwrap());
    assert_eq!(bits(), 1 << 4 | 1 << 5, "nothing was written");
    // The last page has no bit, because it is past the end of the bitmap.
    memory.mark_written(memory.translate(0x1_f000, 0x2000).unwrap());
    assert_eq!(bits(), 1 << 4 | 1 << 5 | 1 << 31);
}
