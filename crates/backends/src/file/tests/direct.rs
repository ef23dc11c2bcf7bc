//! Tests direct I/O: aligned requests, and those that need a window.

use super::*;
use block::Request;
use queue::Ring;

fn direct_facts() -> Facts {
    let alignment = Alignment { memory: 512, offset: 4096 };
    Facts { direct: Some(alignment), block: 4096, ..buffered_facts() }
}

/// Checks that every read and write of the ring was aligned.
fn assert_aligned(disk: &Harness) {
    for asked in &disk.ring.files.asked {
        if let FileOp::Read { offset } | FileOp::Write { offset, .. } = asked.op {
            assert!(offset.is_multiple_of(4096), "{:?}", asked.op);
        }
    }
    assert_eq!(disk.ring.memory.live, 0, "all windows were given back");
}

#[test]
fn aligned_requests_go_straight_to_the_ring() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, direct_facts());
    assert_eq!(disk.read(8192, 8192), (Status::Ok, content(8192, 8192)));
    assert_eq!(disk.write(8192, &[4; 4096], Flags::empty()), Status::Ok);
    let asked: Vec<_> = disk.ring.files.asked.iter().map(|asked| (asked.op, asked.now)).collect();
    let write = FileOp::Write { offset: 8192, durable: false };
    assert_eq!(asked, [(FileOp::Read { offset: 8192 }, false), (write, false)]);
}

#[test]
fn unaligned_edges_are_bounced() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, direct_facts());
    for (offset, len) in [(1, 1), (100, 5000), (4095, 2), (4096, 100), (5000, 3192), (512, 300_000)] {
        assert_eq!(disk.read(offset, len), (Status::Ok, content(offset, len.into())), "{offset} {len}");
    }
    let mut expected = content(0, 1 << 20);
    for (offset, len) in [(1usize, 1usize), (100, 5000), (4095, 2), (40960, 100), (50_001, 300_000)] {
        let data = vec![(len % 200) as u8; len];
        assert_eq!(disk.write(offset as u64, &data, Flags::empty()), Status::Ok);
        expected[offset..offset + len].copy_from_slice(&data);
    }
    assert!(std::fs::read(&path).unwrap() == expected);
    assert_aligned(&disk);
}

#[test]
fn unaligned_memory_is_bounced() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, direct_facts());
    assert_eq!(disk.read_skewed(4096, 8192, 3), (Status::Ok, content(4096, 8192)));
    assert_eq!(disk.write_skewed(4096, &[6; 8192], Flags::empty(), 100), Status::Ok);
    let reads = disk.ring.files.asked.iter().filter(|asked| is_read(&asked.op)).count();
    assert_eq!(reads, 1, "a write of whole blocks need not read first");
    assert_eq!(disk.write_segments(16384, &[8; 4096], &[1000, 3096]), Status::Ok);
    let back = std::fs::read(&path).unwrap();
    assert!(back[4096..12288] == [6; 8192] && back[16384..20480] == [8; 4096]);
    assert_aligned(&disk);
}

#[test]
fn requests_longer_than_a_window_are_bounced_in_turns() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.img");
    std::fs::write(&path, content(0, 4 << 20)).unwrap();
    let (_, mut disk) = with_facts(&path, Facts { size: Bytes::mib(4), ..direct_facts() });
    assert_eq!(disk.read(10, 3 << 20), (Status::Ok, content(10, 3 << 20)));
    assert_eq!(disk.write(10, &vec![5; 3 << 20], Flags::FUA), Status::Ok);
    let back = std::fs::read(&path).unwrap();
    assert!(back[10..10 + (3 << 20)].iter().all(|&byte| byte == 5));
    assert!(
        back[..10] == content(0, 10) && back[10 + (3 << 20)..] == content(10 + (3 << 20), (1 << 20) - 10)
    );
    assert_aligned(&disk);
}

#[test]
fn writes_to_parts_of_one_block_do_not_undo_each_other() {
    let (_dir, path) = image();
    let (shared, mut disk) = with_facts(&path, direct_facts());
    for part in 0..8u8 {
        let memory = disk.memory(512, 0);
        disk.ring.bytes_mut(memory).fill(100 + part);
        disk.submit(Request::new(Op::Write, Bytes(u64::from(part) * 512), Bytes(512)), &[memory]);
    }
    let ends = disk.drain();
    assert!(ends.len() == 8 && ends.iter().all(|end| end.0 == Status::Ok), "{ends:?}");
    let back = std::fs::read(&path).unwrap();
    for part in 0..8 {
        assert_eq!(back[part * 512..(part + 1) * 512], [100 + part as u8; 512]);
    }
    assert_aligned(&disk);
    let node = FileNode::new(Arc::clone(&shared), FileId(0));
    let handle = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut other = Harness::with_files(Box::new(node), vec![handle]);
    assert_eq!(other.write(0, &[1; 4096], Flags::empty()), Status::Ok, "the claim was given up");
}

#[test]
fn a_direct_read_past_a_shrunken_end_is_zeroes_and_an_error() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, direct_facts());
    std::fs::File::options().write(true).open(&path).unwrap().set_len(10_000).unwrap();
    for skew in [0, 1] {
        let (status, data) = disk.read_skewed(8192, 8192, skew);
        assert_eq!(status, Status::IoError);
        assert!(data[..1808] == content(8192, 1808) && data[1808..].iter().all(|&byte| byte == 0));
    }
    assert_eq!(disk.read(8200, 512), (Status::Ok, content(8200, 512)));
    assert_eq!(disk.write(9000, &[3; 100], Flags::empty()), Status::Ok);
    assert_eq!(std::fs::read(&path).unwrap()[8192..9000], content(8192, 808));
    assert_aligned(&disk);
}

#[test]
fn a_nowait_request_that_needs_a_window_fails_with_again() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, direct_facts());
    assert_eq!(disk.write(1, &[1; 10], Flags::NOWAIT), Status::Again);
    assert!(disk.ring.files.asked.is_empty());
}

#[test]
fn zeroing_partial_blocks_by_writing_preserves_adjacent_bytes() {
    let (_dir, path) = image();
    let (shared, mut disk) = with_facts(&path, direct_facts());
    shared.no_zero_range.store(true, std::sync::atomic::Ordering::Relaxed);
    shared.no_punch.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(disk.bare(Op::WriteZeroes, 100, 600_000), Status::Ok);
    let back = std::fs::read(&path).unwrap();
    assert!(back[..100] == content(0, 100) && back[600_100..] == content(600_100, (1 << 20) - 600_100));
    assert!(back[100..600_100].iter().all(|&byte| byte == 0));
    assert_aligned(&disk);
}

#[test]
fn a_failed_window_fails_its_request_only() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, direct_facts());
    disk.ring.files.faults.push_back((is_write, Fault::Errno(libc::ENOSPC)));
    assert_eq!(disk.write(10, &[1; 100], Flags::empty()), Status::NoSpace);
    disk.ring.files.faults.push_back((is_read, Fault::Errno(libc::EIO)));
    assert_eq!(disk.write(10, &[1; 100], Flags::empty()), Status::IoError);
    disk.ring.files.full = 2;
    assert_eq!(disk.write(10, &[1; 100], Flags::empty()), Status::Ok);
    assert_aligned(&disk);
}
