//! Tests full disks: ENOSPC fails one request, but not the next ones.

use super::*;
use block::Request;

fn asked(disk: &Harness, applies: fn(&FileOp) -> bool) -> usize {
    disk.ring.files.asked.iter().filter(|asked| applies(&asked.op)).count()
}

/// Checks that a file still works after a request that found no space.
fn assert_healthy(shared: &FileState, disk: &mut Harness, what: &str) {
    assert!(!shared.flush_failed(), "{what}: no sync failed");
    assert_eq!(disk.write(8192, &[3; 512], Flags::empty()), Status::Ok, "{what}");
    assert_eq!(disk.write(8192, &[4; 512], Flags::FUA), Status::Ok, "{what}");
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok, "{what}");
    assert_eq!(disk.bare(Op::Discard, 4096, 4096), Status::Ok, "{what}");
}

#[test]
fn a_durable_write_without_space_fails_alone_if_space_is_freed_at_once() {
    let (_dir, path) = image();
    for errno in [libc::ENOSPC, libc::EDQUOT] {
        for cold in [false, true] {
            let (shared, mut disk) = with_facts(&path, buffered_facts());
            disk.ring.files.cold = cold;
            disk.ring.files.faults.push_back((is_write, Fault::Errno(errno)));
            assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::NoSpace);
            assert_eq!(asked(&disk, is_sync), 1, "the kernel was asked whether it lost data");
            assert_healthy(&shared, &mut disk, &format!("{errno}, cold: {cold}"));
        }
    }
}

#[test]
fn a_short_durable_write_without_space_fails_alone() {
    let (_dir, path) = image();
    let (shared, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.faults.extend([
        (is_write as fn(&FileOp) -> bool, Fault::Short(512)),
        (is_write, Fault::Errno(libc::ENOSPC)),
    ]);
    assert_eq!(disk.write(0, &[1; 4096], Flags::FUA), Status::NoSpace);
    assert_healthy(&shared, &mut disk, "short");
}

#[test]
fn discards_and_zeroes_without_space_fail_alone() {
    let (_dir, path) = image();
    let direct = Some(Alignment { memory: 512, offset: 512 });
    for facts in [buffered_facts(), Facts { direct, ..buffered_facts() }] {
        for (op, flags) in [
            (Op::Discard, Flags::empty()),
            (Op::WriteZeroes, Flags::empty()),
            (Op::WriteZeroes, Flags::FUA),
            (Op::WriteZeroes, Flags::NO_UNMAP.union(Flags::FUA)),
        ] {
            let (shared, mut disk) = with_facts(&path, facts);
            disk.ring.files.faults.push_back((is_allocate, Fault::Errno(libc::ENOSPC)));
            assert_eq!(disk.with(op, 0, 4096, flags), Status::NoSpace, "{op:?}");
            assert_healthy(&shared, &mut disk, &format!("{op:?}"));
        }
        // Zeroes are written, because the file system supports neither operation.
        let (shared, mut disk) = with_facts(&path, facts);
        disk.ring.files.faults.extend([
            (is_allocate as fn(&FileOp) -> bool, Fault::Errno(libc::EOPNOTSUPP)),
            (is_allocate, Fault::Errno(libc::EOPNOTSUPP)),
            (is_write, Fault::Errno(libc::ENOSPC)),
        ]);
        assert_eq!(disk.with(Op::WriteZeroes, 0, 4096, Flags::FUA), Status::NoSpace);
        assert!(disk.ring.files.faults.is_empty() && !shared.flush_failed());
    }
}

#[test]
fn a_direct_write_without_space_fails_alone() {
    let (_dir, path) = image();
    let direct = Some(Alignment { memory: 512, offset: 512 });
    let (shared, mut disk) = with_facts(&path, Facts { direct, ..buffered_facts() });
    for (offset, len) in [(0, 4096), (100, 1000)] {
        disk.ring.files.faults.push_back((is_write, Fault::Errno(libc::ENOSPC)));
        assert_eq!(disk.write(offset, &vec![1; len], Flags::FUA), Status::NoSpace);
        assert_healthy(&shared, &mut disk, "direct");
    }
}

#[test]
fn a_direct_write_whose_sync_reports_a_loss_fails_the_file() {
    let direct = Some(Alignment { memory: 512, offset: 512 });
    for (offset, len) in [(0, 4096), (100, 1000)] {
        let (_dir, path) = image();
        let (shared, mut disk) = with_facts(&path, Facts { direct, ..buffered_facts() });
        disk.ring.files.faults.push_back((is_write, Fault::Errno(libc::ENOSPC)));
        disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::ENOSPC)));
        assert_eq!(disk.write(offset, &vec![1; len], Flags::FUA), Status::IoError);
        assert!(shared.flush_failed(), "the second descriptor received the report, too");
        assert_eq!(disk.bare(Op::Flush, 0, 0), Status::IoError);
    }
}

/// Starts a durable write that will fail with ENOSPC.
fn doubtful() -> (tempfile::TempDir, Arc<FileState>, Harness) {
    let (dir, path) = image();
    let (shared, mut disk) = with_facts(&path, buffered_facts());
    disk.ring.files.faults.push_back((is_write, Fault::Errno(libc::ENOSPC)));
    let memory = disk.memory(512, 0);
    let req = Request::new(Op::Write, Bytes(0), Bytes(512));
    disk.submit(Request { flags: Flags::FUA, ..req }, &[memory]);
    (dir, shared, disk)
}

#[test]
fn the_check_for_lost_data_is_done_even_if_the_ring_is_full() {
    for (lost, status) in [(true, Status::IoError), (false, Status::NoSpace)] {
        let (_dir, shared, mut disk) = doubtful();
        disk.ring.files.full = 3;
        disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::EINTR)));
        if lost {
            disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::ENOSPC)));
        }
        let ended: Vec<Status> = disk.drain().into_iter().map(|end| end.0).collect();
        assert_eq!(ended, [status]);
        assert_eq!((shared.flush_failed(), disk.ring.files.full), (lost, 0));
        assert_eq!(asked(&disk, is_write), 1, "the write is not tried again instead");
    }
}

#[test]
fn a_flush_shares_the_check_for_lost_data_and_its_failure() {
    let (_dir, shared, mut disk) = doubtful();
    disk.submit(Request::flush(), &[]);
    disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::EIO)));
    let ended: Vec<Status> = disk.drain().into_iter().map(|end| end.0).collect();
    assert_eq!(ended, [Status::IoError; 2]);
    assert!(shared.flush_failed());
}

#[test]
fn a_file_that_cannot_be_opened_twice_is_written_and_then_synced() {
    let (_dir, path) = image();
    let shared = FileState::new(buffered_facts());
    let node = FileNode::new(Arc::clone(&shared), FileId(0));
    let handle = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut disk = Harness::with_files(Box::new(node), vec![handle]);
    assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::Ok);
    assert_eq!(asked(&disk, |op| matches!(op, FileOp::Write { durable: true, .. })), 0);
    assert_eq!(disk.ring.files.asked.last().map(|asked| asked.op), Some(FileOp::Sync));
    disk.ring.files.faults.push_back((is_write, Fault::Errno(libc::ENOSPC)));
    assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::NoSpace);
    assert_healthy(&shared, &mut disk, "written, then synced");
    disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::ENOSPC)));
    assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::IoError);
    assert!(shared.flush_failed());
}

#[test]
fn after_a_failed_sync_only_independent_requests_are_accepted() {
    let (_dir, path) = image();
    let direct = Some(Alignment { memory: 512, offset: 512 });
    for facts in [buffered_facts(), Facts { direct, ..buffered_facts() }] {
        let (shared, mut disk) = with_facts(&path, facts);
        disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::EIO)));
        assert_eq!(disk.bare(Op::Flush, 0, 0), Status::IoError);
        assert_eq!(disk.write(0, &[1; 512], Flags::empty()), Status::IoError);
        assert_eq!(disk.write(0, &[1; 512], Flags::FUA), Status::IoError);
        disk.ring.files.asked.clear();
        assert_eq!(disk.write(512, &[2; 512], Flags::AFTER_LOSS), Status::Ok);
        disk.ring.files.faults.push_back((is_sync, Fault::Errno(libc::EIO)));
        assert_eq!(
            disk.with(Op::Flush, 0, 0, Flags::AFTER_LOSS),
            Status::IoError,
            "the loss is reported again"
        );
        assert_eq!(disk.with(Op::Flush, 0, 0, Flags::AFTER_LOSS), Status::Ok);
        assert_eq!((asked(&disk, is_write), asked(&disk, is_sync)), (1, 2));
        assert_eq!(disk.bare(Op::Flush, 0, 0), Status::IoError, "what was lost is not back");
        assert!(shared.flush_failed());
    }
}
