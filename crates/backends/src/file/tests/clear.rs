//! Tests discard and write zeroes, with and without support of the file system.

use super::*;
use block::Request;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

fn allocated(path: &std::path::Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn discard_punches_a_hole_and_keeps_the_size() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    let before = allocated(&path);
    assert_eq!(disk.bare(Op::Discard, 65536, 524_288), Status::Ok);
    assert!(allocated(&path) + 400_000 < before, "{} of {before}", allocated(&path));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
    assert_eq!(disk.read(65536, 4096), (Status::Ok, vec![0; 4096]));
}

#[test]
fn write_zeroes_with_no_unmap_keeps_the_range_allocated() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    assert_eq!(disk.with(Op::WriteZeroes, 0, 8192, Flags::NO_UNMAP), Status::Ok);
    assert_eq!(disk.with(Op::WriteZeroes, 8192, 8192, Flags::empty()), Status::Ok);
    let mode_of = |op| if let FileOp::Allocate { mode, .. } = op { Some(mode) } else { None };
    let modes: Vec<i32> = disk.ring.files.asked.iter().filter_map(|asked| mode_of(asked.op)).collect();
    let keep = libc::FALLOC_FL_KEEP_SIZE;
    assert_eq!(modes[..1], [libc::FALLOC_FL_ZERO_RANGE | keep]);
    assert_eq!(modes[modes.len() - 1], libc::FALLOC_FL_PUNCH_HOLE | keep);
    assert_eq!(disk.read(0, 16384), (Status::Ok, vec![0; 16384]));
}

#[test]
fn a_durable_discard_is_followed_by_a_sync() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    assert_eq!(disk.with(Op::WriteZeroes, 0, 8192, Flags::FUA), Status::Ok);
    assert_eq!(disk.ring.files.asked.last().map(|asked| asked.op), Some(FileOp::Sync));
    disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::EIO)));
    assert_eq!(disk.with(Op::WriteZeroes, 0, 8192, Flags::FUA), Status::IoError);
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::IoError);
}

#[test]
fn zeroes_are_written_if_the_file_system_refuses_to_zero() {
    let (_dir, path) = image();
    for memory in [false, true] {
        let (_, mut disk) = with_facts(&path, Facts { memory, ..buffered_facts() });
        for _ in 0..2 {
            disk.ring.files.faults.push_back((is_allocate, Fault::Errno(libc::EOPNOTSUPP)));
        }
        assert_eq!(disk.write(0, &content(0, 1 << 20), Flags::empty()), Status::Ok);
        assert_eq!(disk.with(Op::WriteZeroes, 100, 1_000_000, Flags::FUA), Status::Ok);
        assert!(disk.ring.files.faults.is_empty(), "both ways were tried");
        let back = std::fs::read(&path).unwrap();
        assert!(back[100..1_000_100].iter().all(|&byte| byte == 0));
        assert_eq!(
            (&back[..100], &back[1_000_100..]),
            (&content(0, 100)[..], &content(1_000_100, 48_476)[..])
        );
        let last = disk.ring.files.asked.last().unwrap().op;
        assert_eq!(last == FileOp::Sync, !memory, "one sync at the end");
        // A refused operation is not tried again, for any request.
        let asked = disk.ring.files.asked.len();
        assert_eq!(disk.with(Op::WriteZeroes, 0, 4096, Flags::FAST_ZERO), Status::NotSupported);
        assert_eq!(disk.bare(Op::Discard, 0, 4096), Status::NotSupported);
        assert_eq!(disk.ring.files.asked.len(), asked);
        assert_eq!(disk.ring.memory.live, 0, "the zeroes were given back");
    }
}

#[test]
fn two_refusals_of_one_mode_do_not_disable_the_other() {
    let (_dir, path) = image();
    let (shared, mut disk) = with_facts(&path, buffered_facts());
    for at in [0, 65536] {
        disk.ring.files.faults.push_back((is_allocate, Fault::Errno(libc::EOPNOTSUPP)));
        disk.submit(Request::new(Op::WriteZeroes, Bytes(at), Bytes(4096)), &[]);
    }
    assert!(disk.drain().iter().all(|end| end.0 == Status::Ok));
    let refused = [&shared.no_punch, &shared.no_zero_range].map(|flag| flag.load(Ordering::Relaxed));
    assert_eq!(refused, [true, false]);
}

#[test]
fn long_inline_zeroing_yields_to_other_requests() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.img");
    std::fs::write(&path, vec![1; 16 << 20]).unwrap();
    let facts = Facts { memory: true, size: Bytes::mib(16), ..buffered_facts() };
    let (shared, mut disk) = with_facts(&path, facts);
    shared.no_zero_range.store(true, std::sync::atomic::Ordering::Relaxed);
    let zeroing = block::Request::new(Op::WriteZeroes, Bytes(0), Bytes::mib(16));
    disk.submit(block::Request { flags: Flags::NO_UNMAP, ..zeroing }, &[]);
    disk.submit(block::Request::flush(), &[]);
    let after_submit = disk.ring.files.asked.len();
    assert!(after_submit < 64, "{after_submit} pieces at once");
    assert_eq!(disk.drain().len(), 2);
    assert_eq!(std::fs::read(&path).unwrap(), vec![0; 16 << 20]);
}

#[test]
fn fast_zero_on_a_block_device_never_writes() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, Facts { block_device: true, ..buffered_facts() });
    let flags = Flags::FAST_ZERO.union(Flags::NO_UNMAP);
    assert_eq!(disk.with(Op::WriteZeroes, 0, 4096, flags), Status::NotSupported);
    assert!(disk.ring.files.asked.is_empty());
    assert_eq!(disk.bare(Op::Discard, 100, 200), Status::Ok, "less than a block need not be given back");
    assert!(disk.ring.files.asked.is_empty());
    assert_eq!(disk.bare(Op::WriteZeroes, 100, 200), Status::Ok);
    assert!(disk.ring.files.asked.iter().all(|asked| is_write(&asked.op)));
}

#[test]
fn loop_11_operations_on_zones_are_not_supported_and_touch_nothing() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    for op in [Op::ZoneReset, Op::ZoneOpen, Op::ZoneFinish, Op::ZoneAppend] {
        assert_eq!(disk.bare(op, 0, 4096), Status::NotSupported, "{op:?}");
    }
    assert!(disk.ring.files.asked.is_empty());
    assert_eq!(std::fs::read(&path).unwrap(), content(0, 1 << 20));
}
