//! Tests reading, writing and flushing, inline or by the ring, and the handling of errors.

use super::*;
use crate::testing::Asked;
use block::Request;

fn places(disk: &Harness) -> Vec<bool> {
    disk.ring.files.asked.iter().map(|asked: &Asked| asked.now).collect()
}

#[test]
fn written_data_reads_back_through_the_file() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    assert_eq!(disk.read(1000, 3000), (Status::Ok, content(1000, 3000)));
    assert_eq!(disk.write(4096, &[7; 8192], Flags::empty()), Status::Ok);
    assert_eq!(disk.read(4096, 8192), (Status::Ok, vec![7; 8192]));
    assert_eq!(std::fs::read(&path).unwrap()[4096..12288], [7; 8192]);
}

#[test]
fn the_offset_is_added() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, Facts { start: Bytes(1024), ..buffered_facts() });
    assert_eq!(disk.read(0, 512), (Status::Ok, content(1024, 512)));
    assert_eq!(disk.write(512, &[9; 512], Flags::empty()), Status::Ok);
    assert_eq!(std::fs::read(&path).unwrap()[1536..2048], [9; 512]);
}

#[test]
fn a_file_has_no_zones() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    for op in Op::ALL.into_iter().filter(|op| op.is_special()) {
        assert_eq!(disk.bare(op, 0, 0), Status::NotSupported, "{op:?}");
    }
    assert_eq!(disk.write(0, &[1; 512], Flags::empty()), Status::Ok, "nothing is held back after them");
}

#[test]
fn a_file_in_memory_is_served_inline() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, Facts { memory: true, ..buffered_facts() });
    disk.ring.files.cold = true;
    assert_eq!(disk.read(0, 512).0, Status::Ok);
    assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::Ok);
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
    assert_eq!(places(&disk), [true, true], "and nothing is flushed");
}

#[test]
fn a_cached_read_is_done_inline_and_a_cold_one_by_the_ring() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    assert_eq!(disk.read(0, 4096).0, Status::Ok);
    disk.ring.files.cold = true;
    assert_eq!(disk.read(0, 4096), (Status::Ok, content(0, 4096)));
    assert_eq!(places(&disk), [true, false]);
}

#[test]
fn a_batched_operation_that_would_wait_is_started_on_the_ring() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.batches = true;
    assert_eq!(disk.read(0, 4096), (Status::Ok, content(0, 4096)));
    disk.ring.files.faults.push_back((|_| true, Fault::Errno(libc::EAGAIN)));
    assert_eq!(disk.read(4096, 4096), (Status::Ok, content(4096, 4096)));
    assert_eq!(places(&disk), [true, true, false]);
}

#[test]
fn the_rest_of_a_short_batched_read_is_read_inline() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.batches = true;
    disk.ring.files.faults.push_back((|_| true, Fault::Short(1000)));
    assert_eq!(disk.read(0, 4096), (Status::Ok, content(0, 4096)));
    let ops: Vec<_> = disk.ring.files.asked.iter().map(|asked| (asked.op, asked.now)).collect();
    assert_eq!(ops, [(FileOp::Read { offset: 0 }, true), (FileOp::Read { offset: 1000 }, true)]);
}

#[test]
fn durable_and_nowait_requests_are_not_batched() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.batches = true;
    assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::Ok);
    assert_eq!(places(&disk), [false]);
    disk.ring.files.cold = true;
    assert_eq!(disk.write(0, &[1; 512], Flags::NOWAIT), Status::Again);
}

#[test]
fn a_slow_batch_sends_later_writes_through_the_ring() {
    let (_dir, path) = image();
    let facts = Facts { nowait_writes: false, timed_writes: true, ..buffered_facts() };
    let (_, mut disk) = with_facts(&path, facts);
    (disk.ring.files.batches, disk.ring.files.slow) = (true, true);
    assert_eq!(disk.write(0, &[1; 512], Flags::empty()), Status::Ok);
    assert_eq!(disk.write(0, &[2; 512], Flags::empty()), Status::Ok);
    assert_eq!(places(&disk), [true, false]);
}

#[test]
fn a_durable_write_goes_through_the_ring() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::Ok);
    let op = FileOp::Write { offset: 0, durable: true };
    assert_eq!(disk.ring.files.asked, [Asked { op, now: false }]);
}

#[test]
fn loop_9_a_nowait_write_that_would_wait_fails_with_again() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.cold = true;
    assert_eq!(disk.write(0, &[1; 512], Flags::NOWAIT), Status::Again);
    assert_eq!(disk.with(Op::WriteZeroes, 0, 512, Flags::NOWAIT), Status::Again);
    assert!(disk.ring.files.asked.is_empty());
    disk.ring.files.cold = false;
    assert_eq!(disk.write(0, &[1; 512], Flags::NOWAIT), Status::Ok);
}

#[test]
fn short_transfers_are_continued() {
    let (_dir, path) = image();
    for cold in [false, true] {
        // A file in memory is written inline however long a write takes, as on a busy machine.
        let facts = Facts { memory: !cold, timed_writes: false, ..buffered_facts() };
        let (_, mut disk) = with_facts(&path, facts);
        disk.ring.files.cold = cold;
        disk.ring
            .files
            .faults
            .extend([(is_read as fn(&FileOp) -> bool, Fault::Short(100)), (is_read, Fault::Short(1))]);
        assert_eq!(disk.read(0, 4096), (Status::Ok, content(0, 4096)), "cold: {cold}");
        disk.ring
            .files
            .faults
            .extend([(is_write as fn(&FileOp) -> bool, Fault::Short(512)), (is_write, Fault::Short(3))]);
        assert_eq!(disk.write(0, &content(0, 4096), Flags::empty()), Status::Ok);
        assert!(disk.ring.files.faults.is_empty());
        assert!(disk.ring.files.asked.iter().all(|asked| asked.now != cold));
    }
    assert_eq!(std::fs::read(&path).unwrap(), content(0, 1 << 20));
}

#[test]
fn more_segments_than_one_operation_takes_are_moved_in_turns() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    let lens = [512; 100];
    assert_eq!(disk.read_segments(0, &lens), (Status::Ok, content(0, 51200)));
    assert_eq!(disk.write_segments(51200, &content(51200, 51200), &lens), Status::Ok);
    assert_eq!(std::fs::read(&path).unwrap(), content(0, 1 << 20));
}

#[test]
fn requests_are_retried_after_a_full_ring() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.cold = true;
    disk.ring.files.full = 3;
    assert_eq!(disk.read(0, 4096), (Status::Ok, content(0, 4096)));
    disk.ring.files.full = 2;
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
    disk.ring.files.full = 1;
    assert_eq!(disk.bare(Op::Prefetch, 0, 4096), Status::Ok, "a hint is dropped instead");
}

#[test]
fn a_file_truncated_under_us_reads_zeroes_and_an_error() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    std::fs::File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
    let (status, data) = disk.read(4096, 4096);
    assert_eq!(status, Status::IoError);
    assert_eq!(data[..904], content(4096, 904)[..]);
    assert!(data[904..].iter().all(|&byte| byte == 0));
    let (status, data) = disk.read(65536, 512);
    assert_eq!((status, data), (Status::IoError, vec![0; 512]));
    assert_eq!(disk.read(0, 4096), (Status::Ok, content(0, 4096)), "nothing else is lost");
    assert_eq!(disk.write(65536, &[1; 512], Flags::empty()), Status::Ok, "writing makes it longer again");
}

#[test]
fn a_flush_that_fails_keeps_failing_until_the_file_is_opened_anew() {
    let (_dir, path) = image();
    let (shared, mut disk) = with_facts(&path, buffered_facts());
    let mut other = {
        let node = FileNode::new(Arc::clone(&shared), FileId(0));
        Harness::with_files(Box::new(node), vec![std::fs::File::open(&path).unwrap()])
    };
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
    disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::EIO)));
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::IoError);
    for queue in [&mut disk, &mut other] {
        assert_eq!(queue.bare(Op::Flush, 0, 0), Status::IoError);
        assert_eq!(queue.write(0, &[1; 512], Flags::empty()), Status::IoError);
        assert_eq!(queue.write(0, &[1; 512], Flags::FUA), Status::IoError);
        assert_eq!(queue.bare(Op::Discard, 0, 512), Status::IoError);
        assert_eq!(queue.read(0, 512), (Status::Ok, content(0, 512)), "reads go on");
    }
    let (_, mut anew) = with_facts(&path, buffered_facts());
    assert_eq!(anew.bare(Op::Flush, 0, 0), Status::Ok);
}

#[test]
fn a_flush_concurrent_with_a_failed_one_fails() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::EIO)));
    disk.submit(Request::flush(), &[]);
    disk.submit(Request::flush(), &[]);
    let ended: Vec<Status> = disk.drain().into_iter().map(|end| end.0).collect();
    assert_eq!(ended, [Status::IoError; 2], "the first may have dropped what the second was for");
}

#[test]
fn a_durable_write_that_fails_is_a_failed_flush() {
    let (_dir, path) = image();
    let (shared, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.faults.push_back((is_write, Fault::Errno(libc::ENOMEM)));
    assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::Resource);
    assert!(!shared.flush_failed(), "what was never begun is no loss");
    disk.ring.files.faults.push_back((is_write, Fault::Errno(libc::EIO)));
    assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::IoError);
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::IoError);
}

#[test]
fn a_durable_write_that_takes_the_report_of_another_writes_loss_is_a_failed_flush() {
    let (_dir, path) = image();
    // The kernel reported the loss with the errno of the disk; no flush would receive the report again.
    for errno in [libc::ENOSPC, libc::EDQUOT, libc::ENODATA, libc::ETIMEDOUT, libc::ENOLINK, libc::EREMOTEIO]
    {
        let (shared, mut disk) = with_facts(&path, buffered_facts());
        assert_eq!(disk.write(4096, &[2; 512], Flags::empty()), Status::Ok);
        disk.ring.files.faults.push_back((is_write, Fault::Errno(errno)));
        if [libc::ENOSPC, libc::EDQUOT].contains(&errno) {
            // The other open file description still gets the report that the write has received.
            disk.ring.files.faults.push_back((is_sync, Fault::Errno(errno)));
        }
        assert_ne!(disk.write(0, &[1; 512], Flags::FUA), Status::Ok, "{errno}");
        assert!(shared.flush_failed(), "{errno}: the write before may be lost");
        assert_eq!(disk.bare(Op::Flush, 0, 0), Status::IoError, "{errno}");
    }
}

#[test]
fn errnos_become_statuses() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    for (errno, status) in [
        (libc::ENOSPC, Status::NoSpace),
        (libc::EDQUOT, Status::NoSpace),
        (libc::EIO, Status::IoError),
        (libc::ENOMEM, Status::Resource),
        (libc::ENODEV, Status::Offline),
    ] {
        disk.ring.files.faults.push_back((is_write, Fault::Errno(errno)));
        assert_eq!(disk.write(0, &[1; 512], Flags::empty()), status);
    }
    disk.ring.files.faults.push_back((is_write, Fault::Errno(libc::EINTR)));
    assert_eq!(disk.write(0, &content(0, 512), Flags::empty()), Status::Ok, "an interruption is no error");
}

#[test]
fn a_read_only_file_refuses_writes_and_has_nothing_to_flush() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, Facts { read_only: true, ..buffered_facts() });
    for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
        assert_eq!(disk.bare(op, 0, 512), Status::IoError, "{op:?}");
    }
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
    assert!(disk.ring.files.asked.is_empty());
}

#[test]
fn a_slow_write_sends_later_ones_through_the_ring() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.slow = true;
    assert_eq!(disk.write(0, &[1; 512], Flags::empty()), Status::Ok);
    disk.ring.files.slow = false;
    assert_eq!(disk.write(0, &[1; 512], Flags::empty()), Status::Ok);
    // Advance the clock past any pause, however long the first write took.
    disk.ring.now.0 += 1_000_000_000_000;
    assert_eq!(disk.write(0, &[1; 512], Flags::empty()), Status::Ok);
    assert_eq!(places(&disk), [true, false, true]);
}

#[test]
fn sparse_ranges_are_reported_as_holes() {
    use block::Extent;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse.img");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 65536], 131_072).unwrap();
    let (_, mut disk) = with_facts(&path, Facts { start: Bytes(65536), ..buffered_facts() });
    let hole = |len| Extent { len: Bytes(len), hole: true, zero: true };
    let data = |len| Extent { len: Bytes(len), hole: false, zero: false };
    let all = [hole(65536), data(65536), hole(786_432)];
    assert_eq!(disk.extents(0, 917_504, 16), all);
    assert_eq!(disk.extents(0, 917_504, 2), all[..2], "as many as fit");
    assert_eq!(disk.extents(66048, 512, 16), [data(512)]);
    let (_, mut device) = with_facts(&path, Facts { block_device: true, ..buffered_facts() });
    assert_eq!(device.extents(0, 1 << 20, 16), [data(1 << 20)], "a block device cannot tell");
}

#[test]
fn ranges_behind_the_end_of_a_truncated_file_are_no_hole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse.img");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 65536], 65536).unwrap();
    let stretch = |len, hole| block::Extent { len: Bytes(len), hole, zero: hole };
    for (len, extents) in [
        // A hole within the file.
        (1 << 20, vec![stretch(65536, true), stretch(65536, false), stretch(917_504, true)]),
        // A hole beyond the end of the truncated file: reads must fail.
        (262_144, vec![stretch(65536, true), stretch((1 << 20) - 65536, false)]),
        // Data beyond the end of the truncated file.
        (66000, vec![stretch(65536, true), stretch((1 << 20) - 65536, false)]),
        // Both lie beyond the end of the truncated file.
        (5000, vec![stretch(1 << 20, false)]),
        (0, vec![stretch(1 << 20, false)]),
    ] {
        file.set_len(len).unwrap();
        let (_, mut disk) = with_facts(&path, buffered_facts());
        assert_eq!(disk.extents(0, 1 << 20, 16), extents, "{len}");
        assert_eq!(disk.extents(524_288, 4096, 16), [stretch(4096, len == 1 << 20)], "{len}");
    }
    // The file has its previous length again, so the missing range is a hole now.
    let (_, mut disk) = with_facts(&path, buffered_facts());
    assert_eq!(disk.extents(524_288, 4096, 16), [stretch(4096, false)]);
    file.set_len(1 << 20).unwrap();
    assert_eq!(disk.extents(524_288, 4096, 16), [stretch(4096, true)]);
}

fn looks(disk: &Harness) -> usize {
    disk.ring.files.asked.iter().filter(|asked| matches!(asked.op, FileOp::Seek { .. })).count()
}

#[test]
fn known_data_is_not_searched_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full.img");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    let data = |len| block::Extent { len: Bytes(len), hole: false, zero: false };
    assert_eq!(disk.extents(0, 4096, 16), [data(4096)]);
    let first = looks(&disk);
    for offset in [4096, 65536, (1 << 20) - 4096] {
        assert_eq!(disk.extents(offset, 4096, 16), [data(4096)]);
    }
    assert_eq!(looks(&disk), first);
}

#[test]
fn a_discard_by_another_queue_invalidates_known_data() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full.img");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let (shared, mut disk) = with_facts(&path, buffered_facts());
    let mut other = Harness::with_files(
        Box::new(FileNode::new(shared, FileId(0))),
        vec![std::fs::File::options().read(true).write(true).open(&path).unwrap()],
    );
    let data = |len| block::Extent { len: Bytes(len), hole: false, zero: false };
    assert_eq!(disk.extents(0, 1 << 20, 16), [data(1 << 20)]);
    assert_eq!(other.bare(Op::Discard, 65536, 65536), Status::Ok);
    let hole = block::Extent { len: Bytes(65536), hole: true, zero: true };
    assert_eq!(disk.extents(0, 262_144, 16), [data(65536), hole, data(131_072)]);
    assert!(disk.extents(65536, 4096, 16)[0].hole);
}

#[test]
fn a_durable_write_concurrent_with_a_failed_flush_fails() {
    let (_dir, path) = image();
    let (_, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::EIO)));
    let memory = disk.memory(512, 0);
    disk.submit(Request::flush(), &[]);
    let write = Request::new(Op::Write, Bytes(0), Bytes(512));
    disk.submit(Request { flags: Flags::FUA, ..write }, &[memory]);
    let ended: Vec<Status> = disk.drain().into_iter().map(|end| end.0).collect();
    assert_eq!(ended, [Status::IoError; 2]);
}
