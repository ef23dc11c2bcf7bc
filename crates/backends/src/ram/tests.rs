use super::*;
use crate::testing::Harness;

fn disk(size: Bytes) -> (Arc<Ram>, Harness) {
    let ram = Ram::new(&RamSpec { size, hugepages: false, integrity: None }).unwrap();
    let harness = Harness::new(Box::new(ram.node(None)));
    (ram, harness)
}

#[test]
fn written_data_reads_back() {
    let (_, mut disk) = disk(Bytes::mib(1));
    let data: Vec<u8> = (0..10_000u32).map(|i| (i % 251) as u8).collect();
    assert_eq!(disk.write(4000, &data, Flags::empty()), Status::Ok);
    let (status, back) = disk.read(0, 16384);
    assert_eq!(status, Status::Ok);
    assert!(back[..4000].iter().all(|&b| b == 0) && back[14000..].iter().all(|&b| b == 0));
    assert_eq!(&back[4000..14000], &data[..]);
}

#[test]
fn data_in_several_segments_is_joined() {
    let (_, mut disk) = disk(Bytes::mib(1));
    let data: Vec<u8> = (0..9000u32).map(|i| (i % 241) as u8).collect();
    assert_eq!(disk.write_segments(512, &data, &[1, 4095, 100, 4804]), Status::Ok);
    assert_eq!(disk.read_segments(512, &[3000, 1, 5999]), (Status::Ok, data));
}

#[test]
fn all_queues_share_one_content() {
    let (ram, mut one) = disk(Bytes::mib(1));
    let mut two = Harness::new(Box::new(ram.node(None)));
    assert_eq!(one.write(8192, &[5; 512], Flags::empty()), Status::Ok);
    assert_eq!(two.read(8192, 512), (Status::Ok, vec![5; 512]));
}

#[test]
fn reading_takes_no_memory() {
    let (ram, mut disk) = disk(Bytes::gib(64));
    assert_eq!(disk.read(5 << 30, 1 << 20), (Status::Ok, vec![0; 1 << 20]));
    assert_eq!(ram.allocated(), Bytes::ZERO);
    assert_eq!(disk.write(5 << 30, &[1; 512], Flags::empty()), Status::Ok);
    assert_eq!(ram.allocated(), Bytes::kib(4));
}

#[test]
fn discard_frees_memory() {
    let (ram, mut disk) = disk(Bytes::mib(64));
    assert_eq!(disk.write(0, &vec![3; 1 << 20], Flags::empty()), Status::Ok);
    assert_eq!(ram.allocated(), Bytes::mib(1));
    assert_eq!(disk.bare(Op::Discard, 100, (1 << 20) - 200), Status::Ok);
    assert_eq!(ram.allocated(), Bytes(8192), "the two edge pages stay");
    let (_, back) = disk.read(0, 1 << 20);
    assert_eq!(&back[..100], &[3; 100]);
    assert!(back[100..(1 << 20) - 100].iter().all(|&b| b == 0));
    assert_eq!(&back[(1 << 20) - 100..], &[3; 100]);
    assert_eq!(disk.bare(Op::Discard, 0, 64 << 20), Status::Ok);
    assert_eq!(ram.allocated(), Bytes::ZERO);
}

#[test]
fn write_zeroes_unmaps_without_no_unmap() {
    let (ram, mut disk) = disk(Bytes::mib(1));
    let keep = Flags::NO_UNMAP;
    assert_eq!(disk.write(0, &[3; 8192], Flags::empty()), Status::Ok);
    assert_eq!(disk.with(Op::WriteZeroes, 0, 4096, Flags::FAST_ZERO), Status::Ok);
    assert_eq!(ram.allocated(), Bytes::kib(4));
    assert_eq!(disk.with(Op::WriteZeroes, 4096, 4096, keep), Status::Ok);
    assert_eq!(ram.allocated(), Bytes::kib(4));
    assert_eq!(disk.with(Op::WriteZeroes, 65536, 8192, keep), Status::Ok);
    assert_eq!(ram.allocated(), Bytes::kib(12));
    assert_eq!(disk.read(0, 8192), (Status::Ok, vec![0; 8192]));
}

#[test]
fn zeroing_within_a_page_preserves_adjacent_bytes() {
    let (_, mut disk) = disk(Bytes::mib(1));
    assert_eq!(disk.write(0, &[7; 12288], Flags::empty()), Status::Ok);
    assert_eq!(disk.bare(Op::WriteZeroes, 4100, 1000), Status::Ok);
    assert_eq!(disk.bare(Op::WriteZeroes, 8000, 400), Status::Ok);
    let (_, back) = disk.read(0, 12288);
    let zeroes: Vec<usize> = (0..12288).filter(|&i| back[i] == 0).collect();
    assert_eq!(zeroes, (4100..5100).chain(8000..8400).collect::<Vec<_>>());
}

#[test]
fn extents_follow_populated_pages() {
    let (_, mut disk) = disk(Bytes::mib(1));
    assert_eq!(disk.write(8192, &[1; 4096], Flags::empty()), Status::Ok);
    assert_eq!(disk.write(20480, &[1; 8192], Flags::empty()), Status::Ok);
    let data = |len| Extent { len: Bytes(len), hole: false, zero: false };
    let hole = |len| Extent { len: Bytes(len), hole: true, zero: true };
    assert_eq!(
        disk.extents(512, (1 << 20) - 512, 16),
        [hole(7680), data(4096), hole(8192), data(8192), hole((1 << 20) - 28672)]
    );
    assert_eq!(disk.extents(512, (1 << 20) - 512, 2), [hole(7680), data(4096)], "as many as fit");
    assert_eq!(disk.extents(9000, 100, 16), [data(100)]);
}

#[test]
fn a_zero_copy_read_returns_the_disks_own_pages() {
    let ram = Ram::new(&RamSpec { size: Bytes::mib(1), hugepages: true, integrity: None }).unwrap();
    let mut disk = Harness::new(Box::new(ram.node(Some(Region(9)))));
    let own = Data::One(Segment { offset: 12288, len: 4096, region: Region(9) });
    assert_eq!(disk.read_zero_copy(12288, 4096), (Status::Ok, own));
    assert_eq!(disk.write(12288, &[4; 512], Flags::empty()), Status::Ok);
    assert_eq!(disk.read(12288, 512), (Status::Ok, vec![4; 512]), "not without leave");
}

#[test]
fn writers_and_discarders_race_without_losing_content() {
    let ram = Ram::new(&RamSpec { size: Bytes::mib(1), hugepages: false, integrity: None }).unwrap();
    std::thread::scope(|scope| {
        for byte in 1..=2u8 {
            let ram = &ram;
            scope.spawn(move || {
                for i in 0..2000u64 {
                    ram.write(i % 256 * 4096, &[byte; 4096]);
                    ram.clear((i + 128) % 256 * 4096, 4096, false);
                }
            });
        }
    });
    let mut plain = [0; 4096];
    for page in 0..256 {
        ram.memory.read(page * 4096, &mut plain);
        let set = ram.pages.all_set(page..page + 1);
        assert!(set || plain.iter().all(|&b| b == 0), "page {page} has content and no bit");
    }
}

#[test]
fn an_invalid_size_is_refused() {
    for size in [0, 100, 513] {
        let refused = Ram::new(&RamSpec { size: Bytes(size), hugepages: false, integrity: None });
        assert!(matches!(refused, Err(RamError::Size(_))), "{size}");
    }
    let refused = Ram::new(&RamSpec { size: Bytes(1 << 60), hugepages: false, integrity: None });
    assert!(matches!(refused, Err(RamError::Map { .. })));
}

fn guarded(word: &str) -> (Arc<Ram>, Harness) {
    let integrity = Some(word.parse().unwrap());
    let ram = Ram::new(&RamSpec { size: Bytes::mib(1), hugepages: false, integrity }).unwrap();
    let harness = Harness::new(Box::new(ram.node(None)));
    (ram, harness)
}

fn tuples(disk: &mut Harness, op: Op, offset: u64, len: u64, data: &mut [u8]) -> Status {
    let memory = disk.memory(data.len() as u32, 0);
    disk.ring.bytes_mut(memory).copy_from_slice(data);
    let (status, _) = disk.one(Request::new(op, Bytes(offset), Bytes(len)), &[memory]);
    data.copy_from_slice(disk.ring.bytes(memory));
    status
}

#[test]
fn only_data_written_with_tuples_has_them() {
    for (word, unwritten) in [("t10", 0xff), ("nvme", 0xff), ("3", 0)] {
        let (ram, mut disk) = guarded(word);
        let each = usize::from(ram.integrity().unwrap().tuple);
        let read = |disk: &mut Harness, offset, count: usize| {
            let mut back = vec![7; count * each];
            let status = tuples(disk, Op::ReadTuples, offset, count as u64 * 512, &mut back);
            (status, back)
        };
        assert_eq!(read(&mut disk, 0, 4), (Status::Ok, vec![unwritten; 4 * each]), "{word}");
        let mut marks: Vec<u8> = (1..=200 * each).map(|at| (at % 250) as u8).collect();
        assert_eq!(disk.write(512, &[1; 200 * 512], Flags::empty()), Status::Ok);
        assert_eq!(tuples(&mut disk, Op::WriteTuples, 512, 200 * 512, &mut marks), Status::Ok);
        assert_eq!(read(&mut disk, 512, 200), (Status::Ok, marks.clone()), "{word}");
        // Data written without tuples, or in partial intervals, and cleared data have no tuples.
        assert_eq!(disk.write(1024 + 100, &[2; 512], Flags::empty()), Status::Ok);
        assert_eq!(disk.bare(Op::Discard, 2048, 512), Status::Ok);
        let back = read(&mut disk, 512, 4).1;
        assert_eq!(back[..each], marks[..each]);
        assert_eq!(back[each..], vec![unwritten; 3 * each], "{word}");
    }
}

#[test]
fn unaligned_or_unsupported_tuples_are_refused() {
    let (_, mut disk) = guarded("t10");
    assert_eq!(tuples(&mut disk, Op::ReadTuples, 100, 512, &mut [0; 8]), Status::Invalid);
    assert_eq!(tuples(&mut disk, Op::WriteTuples, 0, 100, &mut [0; 8]), Status::Invalid);
    assert_eq!(tuples(&mut disk, Op::ReadTuples, 0, 1024, &mut [0; 8]), Status::Invalid, "no room");
    let (_, mut disk) = self::disk(Bytes::mib(1));
    assert_eq!(tuples(&mut disk, Op::ReadTuples, 0, 512, &mut [0; 8]), Status::NotSupported);
}
