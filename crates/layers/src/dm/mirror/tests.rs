//! Tests of mirrors: data on the legs, failures, resynchronisation, the log.

use super::super::background::{BackgroundWork, Disks};
use super::super::harness::Harness;
use super::super::testing::{error, names};
use super::super::{Status, Target};
use block::{Bytes, Op, Status as End};
use queue::Nanos;
use std::io;
use std::sync::Arc;

fn status(harness: &Harness) -> String {
    harness.target.status(Status::Info, &names(&["8:0", "8:16", "8:32"]))
}

fn background(harness: &Harness) -> Arc<dyn BackgroundWork> {
    Target::background_work(&*harness.target).expect("a mirror has one")
}

/// The disks of a harness for background work, of which one may fail all writes.
struct LegDisks<'a>(&'a Harness, Option<usize>);

/// The disks of a harness, of which one may fail all flushes. Records writes and flushes, in order.
struct RecordingDisks<'a>(&'a Harness, Option<usize>, Vec<(usize, char)>);

impl Disks for RecordingDisks<'_> {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        LegDisks(self.0, None).read(device, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.2.push((device, 'w'));
        LegDisks(self.0, None).write(device, at, from)
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.2.push((device, 'f'));
        if self.1 == Some(device) { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
    }
}

/// The number of regions without a mark in the log.
fn unmarked(harness: &Harness) -> u32 {
    harness.content(0, 2, 2).iter().map(|byte| byte.count_ones()).sum()
}

/// A time long after all writes.
const LATER: Nanos = Nanos(1 << 60);

impl Disks for LegDisks<'_> {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self.0.content(device, at.sectors().0, into.len()));
        Ok(())
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        if self.1 == Some(device) {
            return Err(io::ErrorKind::Other.into());
        }
        let at = at.0 as usize;
        self.0.disks[device].borrow_mut().content[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn flush(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn table_status_repeats_the_line() {
    for (args, table) in [
        ("core 1 64 2 a 0 b 8", "core 1 64 2 8:0 0 8:16 8"),
        ("core 2 64 nosync 2 a 0 b 8 1 handle_errors", "core 2 64 nosync 2 8:0 0 8:16 8 1 handle_errors"),
        ("disk 2 a 64 2 b 0 c 8", "disk 2 8:0 64 2 8:16 0 8:32 8"),
        (
            "disk 3 a 64 sync 2 b 0 c 8 2 handle_errors keep_log",
            "disk 3 8:0 64 sync 2 8:16 0 8:32 8 2 handle_errors keep_log",
        ),
    ] {
        let harness = Harness::new("mirror", args);
        assert_eq!(harness.target.status(Status::Table, &names(&["8:0", "8:16", "8:32"])), table);
    }
    assert_eq!(status(&Harness::new("mirror", "core 1 64 2 a 0 b 0")), "2 8:0 8:16 0/16 1 AA 1 core");
    let disk = Harness::new("mirror", "disk 3 a 64 nosync 2 b 0 c 0");
    assert_eq!(status(&disk), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 A");
}

#[test]
fn a_line_longer_than_its_legs_is_refused_before_memory_is_allocated() {
    use super::super::{TargetRange, target_types, testing::FakeDevices};
    use block::Sectors;
    let place = TargetRange { start: Sectors(0), len: Sectors(1 << 53) };
    let kinds = target_types::<crate::testing::Clock>();
    let kind = kinds.iter().find(|kind| kind.row.name == "mirror").unwrap();
    let args: Vec<&str> = "core 1 64 2 a 0 b 0".split(' ').collect();
    let error = (kind.construct)(place, &args, &mut FakeDevices::default()).err().unwrap();
    assert!(error.to_string().starts_with("a too small for target: start=0"), "{error}");
}

#[test]
fn bad_arguments_are_refused_with_the_kernels_text() {
    for (args, text) in [
        ("core", "Insufficient mirror log arguments"),
        ("core x", "Invalid mirror log argument count"),
        ("core 3 64", "Insufficient mirror log arguments"),
        ("tape 1 64 2 a 0 b 0", "Error creating mirror dirty log"),
        ("core 1 63 2 a 0 b 0", "Error creating mirror dirty log"),
        ("core 2 64 maybe 2 a 0 b 0", "Error creating mirror dirty log"),
        ("core 1 64 1 a 0", "Invalid number of mirrors"),
        ("core 1 64 2 a 0 b", "Too few mirror arguments"),
        ("core 1 64 2 a 0 b x", "Invalid offset"),
        ("core 1 64 2 a 0 missing 0", "Device lookup failure: missing: no such device"),
        ("core 1 64 2 a 0 b 0 x", "Invalid number of features"),
        ("core 1 64 2 a 0 b 0 2 handle_errors", "Not enough arguments to support feature count"),
        ("core 1 64 2 a 0 b 0 1 sleep", "Unrecognised feature requested"),
        ("core 1 64 2 a 0 b 0 1 keep_log", "keep_log feature requires the handle_errors feature"),
        ("core 1 64 2 a 0 b 0 1 handle_errors x", "Too many mirror arguments"),
    ] {
        assert_eq!(error("mirror", args), text, "{args}");
    }
}

#[test]
fn regions_are_copied_one_at_a_time() {
    let mut harness = Harness::new("mirror", "core 1 64 2 a 0 b 8");
    harness.disks[0].borrow_mut().content.fill(7);
    assert_eq!(harness.write(100, &[9; 512]), End::Ok);
    assert_eq!(harness.content(1, 108, 1), [0], "a region out of sync is written to the primary only");
    let work = background(&harness);
    let mut steps = 0;
    while work.is_due(LATER) {
        work.step(LATER, &mut LegDisks(&harness, None));
        steps += 1;
    }
    assert_eq!((steps, status(&harness).as_str()), (16, "2 8:0 8:16 16/16 1 AA 1 core"));
    assert_eq!(harness.content(1, 8, 512 << 10), harness.content(0, 0, 512 << 10));
    assert_eq!(harness.content(1, 108, 512), [9; 512]);
    assert_eq!(harness.target.events(), 1);
    assert_eq!(harness.write(100, &[5; 512]), End::Ok);
    assert_eq!((harness.content(0, 100, 1), harness.content(1, 108, 1)), (vec![5], vec![5]));
}

#[test]
fn a_suspended_mirror_copies_nothing() {
    let harness = Harness::new("mirror", "core 1 64 2 a 0 b 0");
    harness.target.presuspend(false);
    assert!(!background(&harness).is_due(LATER));
    harness.target.resume();
    assert!(background(&harness).is_due(LATER));
}

#[test]
fn reads_succeed_after_a_leg_fails() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 8 1 handle_errors");
    assert_eq!(harness.write(0, &[3; 4096]), End::Ok);
    harness.fail(0, End::IoError);
    assert_eq!(harness.read(0, 4096), (End::Ok, vec![3; 4096]));
    assert_eq!(status(&harness), "2 8:0 8:16 16/16 1 RA 1 core");
    assert_eq!(harness.run(Op::Read, 0, 8).1, [(1, Op::Read, 8, 8)], "the other leg is the primary now");
    harness.fail(1, End::IoError);
    assert_eq!(harness.read(0, 4096).0, End::IoError);
}

#[test]
fn writes_succeed_after_a_leg_fails() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 0 2 handle_errors keep_log");
    harness.fail(1, End::IoError);
    harness.fail(1, End::IoError);
    assert_eq!(harness.write(0, &[3; 512]), End::Ok);
    assert_eq!(status(&harness), "2 8:0 8:16 15/16 1 AD 1 core");
    assert_eq!((harness.content(0, 0, 1), harness.content(1, 0, 1)), (vec![3], vec![0]));
    assert_eq!(harness.run(Op::Write, 512, 1).1, [(0, Op::Write, 512, 1)], "the failed leg gets no writes");
    assert!(!background(&harness).is_due(LATER), "no leg to copy to");
}

#[test]
fn without_keep_log_a_failed_write_waits_for_the_next_table() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 0 1 handle_errors");
    harness.fail(1, End::IoError);
    harness.fail(1, End::IoError);
    harness.submit(block::Request::new(Op::WriteZeroes, Bytes(0), Bytes(512)));
    harness.turn();
    let before = harness.ring.now;
    harness.target.presuspend(false);
    harness.turn();
    assert_eq!(harness.drain(), [End::IoError]);
    assert_eq!(harness.ring.now, before, "the suspension ends the wait");
}

#[test]
fn a_write_that_waits_for_the_next_table_fails_after_a_minute() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 0 1 handle_errors");
    harness.fail(1, End::IoError);
    harness.fail(1, End::IoError);
    let before = harness.ring.now;
    assert_eq!(harness.run(Op::WriteZeroes, 0, 1).0, End::IoError);
    assert_eq!(harness.ring.now.since(before), 60_000_000_000);
}

#[test]
fn a_write_that_cannot_be_marked_waits_for_the_next_table() {
    let mut harness = Harness::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0 1 handle_errors");
    harness.fail(0, End::IoError);
    for disk in [1, 2] {
        harness.disks[disk].borrow_mut().content.fill(7);
    }
    harness.submit(block::Request::new(Op::WriteZeroes, Bytes(0), Bytes(512)));
    harness.submit(block::Request::new(Op::WriteZeroes, Bytes(65536), Bytes(512)));
    harness.target.presuspend(false);
    assert_eq!(harness.drain(), [End::IoError, End::IoError]);
    assert_eq!(status(&harness), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 D");
    assert_eq!([1, 2].map(|disk| harness.content(disk, 0, 1)[0]), [7, 7], "nothing was written");
}

#[test]
fn with_keep_log_a_write_that_cannot_be_marked_fails_and_is_not_written() {
    let mut harness = Harness::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0 2 handle_errors keep_log");
    harness.fail(0, End::IoError);
    assert_eq!(harness.write(0, &[3; 512]), End::IoError);
    assert_eq!((harness.content(1, 0, 1), harness.content(2, 0, 1)), (vec![0], vec![0]));
}

#[test]
fn without_handle_errors_writes_continue_without_marks() {
    let mut harness = Harness::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
    harness.fail(0, End::IoError);
    assert_eq!(harness.write(0, &[3; 512]), End::Ok);
    assert_eq!(status(&harness), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 D");
}

#[test]
fn a_write_that_fails_on_all_legs_fails() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    for disk in [0, 0, 1, 1] {
        harness.fail(disk, End::IoError);
    }
    assert_eq!(harness.write(0, &[3; 512]), End::IoError);
    assert_eq!(status(&harness), "2 8:0 8:16 16/16 1 AA 1 core");
    assert!(background(&harness).is_due(LATER), "a leg may have part of the write");
}

/// The disks of a harness, one of which fails all reads and writes. All flushes fail.
struct UnreachableLeg<'a>(&'a Harness, usize);

impl Disks for UnreachableLeg<'_> {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        if self.1 == device {
            return Err(io::ErrorKind::Other.into());
        }
        LegDisks(self.0, None).read(device, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        LegDisks(self.0, Some(self.1)).write(device, at, from)
    }

    fn flush(&mut self, _: usize) -> io::Result<()> {
        Err(io::ErrorKind::Other.into())
    }
}

#[test]
fn legs_that_are_all_unreachable_for_a_moment_are_not_marked_as_failed() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    for disk in [0, 0, 1, 1] {
        harness.fail(disk, End::IoError);
    }
    assert_eq!(harness.write(0, &[3; 512]), End::IoError);
    harness.disks[0].borrow_mut().content[..512].fill(5);
    let (work, mut now) = (background(&harness), LATER);
    for leg in [0, 1] {
        for _ in 0..2 {
            work.step(now, &mut UnreachableLeg(&harness, leg));
        }
        assert_eq!(status(&harness), "2 8:0 8:16 16/16 1 AA 1 core");
        assert!(!work.is_due(now), "retried later");
        now = now.after(1_000_000_000);
        assert!(work.is_due(now));
    }
    work.step(now, &mut LegDisks(&harness, None));
    assert_eq!(harness.content(1, 0, 512), [5; 512]);
    work.step(now, &mut LegDisks(&harness, None));
    assert!(!work.is_due(now.after(1 << 40)), "the legs are equal");
    assert_eq!((status(&harness).as_str(), harness.target.events()), ("2 8:0 8:16 16/16 1 AA 1 core", 0));
}

#[test]
fn a_leg_that_stays_unreachable_for_a_minute_is_marked_as_failed() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    for disk in [0, 0, 1, 1] {
        harness.fail(disk, End::IoError);
    }
    assert_eq!(harness.write(0, &[3; 512]), End::IoError);
    let work = background(&harness);
    let seconds = (0..100u64).map(|seconds| LATER.after(seconds * 1_000_000_000));
    let tries = seconds.filter(|now| {
        let is_due = work.is_due(*now);
        work.step(*now, &mut UnreachableLeg(&harness, 1));
        is_due
    });
    assert_eq!(tries.count(), 61);
    assert_eq!(status(&harness), "2 8:0 8:16 16/16 1 AS 1 core");
}

#[test]
fn no_leg_is_marked_as_failed_if_all_flushes_fail() {
    let harness = Harness::new("mirror", "core 1 64 2 a 0 b 0");
    background(&harness).step(LATER, &mut UnreachableLeg(&harness, 2));
    assert_eq!(status(&harness), "2 8:0 8:16 0/16 1 AA 1 core", "not in sync either");
}

#[test]
fn a_region_that_becomes_torn_during_a_search_is_copied_too() {
    let leg = |device| super::legs::Leg::new(device, block::Sectors(0), "leg", "leg");
    for torn in [3, 6] {
        let log = super::args::LogArgs::read(&["core", "2", "64", "nosync"], block::Sectors(1024)).unwrap().0;
        let legs = vec![leg(0), leg(1)];
        let shared = super::shared::Shared::new(legs, block::Sectors(1024), log, None, [false; 2]);
        shared.mark_torn(5);
        let from = shared.take_cursor();
        // The search has passed these regions already.
        shared.mark_torn(torn);
        shared.mark_torn(7);
        assert_eq!((from, shared.next_region(7)), (0, Some(7)));
        assert!(shared.take_cursor() <= torn, "region {torn}");
    }
}

#[test]
fn a_flush_goes_to_all_legs() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 3 a 0 b 0 c 0");
    assert_eq!(harness.run(Op::Flush, 0, 0).1.len(), 3);
}

#[test]
fn a_region_is_marked_on_disk_before_it_is_written() {
    let mut harness = Harness::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
    let mut header = b"iRiM\x02\0\0\0".to_vec();
    header[..4].copy_from_slice(&0x4D69_5272u32.to_le_bytes());
    header.extend([16, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(harness.content(0, 0, 16), header);
    assert_eq!(harness.content(0, 2, 8), [0xff, 0xff, 0, 0, 0, 0, 0, 0], "all regions are clean");
    let (_, seen) = harness.run(Op::Write, 64, 1);
    assert_eq!((seen[0], seen.len()), ((0, Op::Write, 0, 8), 3), "the log first");
    assert_eq!(harness.content(0, 2, 2), [0xfd, 0xff]);
    assert_eq!(harness.run(Op::Write, 65, 1).1.len(), 2, "already marked");
    // After a crash only that region is copied.
    let again = Harness::over("mirror", "disk 2 log 64 2 a 0 b 0", harness.named_disks(), true).unwrap();
    assert_eq!(status(&again), "2 8:16 8:32 15/16 1 AA 3 disk 8:0 A");
    let work = self::background(&again);
    work.step(LATER, &mut LegDisks(&again, None));
    assert_eq!(status(&again), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 A");
    // The mark is removed when nothing is written for a while.
    while work.is_due(LATER) {
        work.step(LATER, &mut LegDisks(&again, None));
    }
    assert_eq!(again.content(0, 2, 2), [0xff, 0xff]);
}

#[test]
fn a_leg_that_cannot_be_copied_to_fails() {
    let harness = Harness::new("mirror", "core 1 64 2 a 0 b 0");
    let work = background(&harness);
    work.step(LATER, &mut LegDisks(&harness, Some(1)));
    assert_eq!(status(&harness), "2 8:0 8:16 0/16 1 AS 1 core");
    assert!(!work.is_due(LATER));
}

#[test]
fn the_data_of_a_failed_leg_is_not_copied() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 3 a 0 b 0 c 0 2 handle_errors keep_log");
    harness.fail(0, End::IoError);
    harness.fail(0, End::IoError);
    assert_eq!(harness.write(0, &[7; 512]), End::Ok);
    assert_eq!(status(&harness), "3 8:0 8:16 8:32 15/16 1 DAA 1 core");
    let work = background(&harness);
    while work.is_due(LATER) {
        work.step(LATER, &mut LegDisks(&harness, None));
    }
    assert_eq!([0, 1, 2].map(|disk| harness.content(disk, 0, 1)[0]), [0, 7, 7]);
    assert_eq!(status(&harness), "3 8:0 8:16 8:32 15/16 1 DAA 1 core");
}

#[test]
fn nothing_is_copied_after_the_primary_failed_before_all_was_in_sync() {
    let mut harness = Harness::new("mirror", "core 1 64 3 a 0 b 0 c 0");
    let work = background(&harness);
    work.step(LATER, &mut LegDisks(&harness, None));
    harness.fail(0, End::IoError);
    harness.fail(0, End::IoError);
    assert_eq!(harness.write(0, &[7; 512]), End::IoError, "a restart would copy from the failed leg");
    assert!(!work.is_due(LATER), "no other leg has all data");
    assert_eq!(harness.read(0, 512).0, End::IoError, "no leg has current data");
    assert_eq!(harness.content(1, 0, 1), [7]);
}

#[test]
fn reads_return_a_write_that_the_primary_missed() {
    for (args, first) in
        [("disk 3 log 64 nosync 2 a 0 b 0", 1), ("core 2 64 nosync 2 a 0 b 0 2 handle_errors keep_log", 0)]
    {
        let mut harness = Harness::new("mirror", args);
        harness.fail(first, End::IoError);
        harness.fail(first, End::IoError);
        assert_eq!(harness.write(0, &[7; 512]), End::Ok);
        assert!(status(&harness).contains(" 15/16 1 DA "), "{}", status(&harness));
        assert_eq!(harness.read(0, 512), (End::Ok, vec![7; 512]), "{args}");
        assert_eq!(harness.write(0, &[8; 512]), End::Ok);
        assert_eq!(harness.read(0, 512), (End::Ok, vec![8; 512]));
    }
}

#[test]
fn requests_complete_at_depth_1_with_a_log_on_disk() {
    let args = "disk 3 log 64 nosync 2 a 0 b 0";
    let mut harness = Harness::with_depth(1, "mirror", args, Vec::new(), false).unwrap();
    assert_eq!(harness.write(0, &[7; 512]), End::Ok);
    assert_eq!(harness.run(Op::Flush, 0, 0).0, End::Ok);
}

#[test]
fn all_legs_are_flushed_before_a_mark_is_removed() {
    let mut harness = Harness::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
    assert_eq!(harness.write(0, &[7; 512]), End::Ok);
    assert_eq!(unmarked(&harness), 15);
    let work = background(&harness);
    let mut disks = RecordingDisks(&harness, None, Vec::new());
    while work.is_due(LATER) {
        work.step(LATER, &mut disks);
    }
    assert_eq!(disks.2, [(1, 'f'), (2, 'f'), (0, 'w'), (0, 'f')]);
    assert_eq!(unmarked(&harness), 16);
    // If a flush fails the mark stays, even if the next flush succeeds.
    assert_eq!(harness.write(0, &[7; 512]), End::Ok);
    work.step(LATER, &mut RecordingDisks(&harness, Some(2), Vec::new()));
    assert_eq!(unmarked(&harness), 15);
    assert_eq!(status(&harness), "2 8:16 8:32 16/16 1 AF 3 disk 8:0 A");
    assert!(!work.is_due(LATER));
}

#[test]
fn marks_stay_while_a_leg_has_missed_writes() {
    let mut harness = Harness::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0 2 handle_errors keep_log");
    harness.fail(2, End::IoError);
    harness.fail(2, End::IoError);
    assert_eq!(harness.write(0, &[7; 512]), End::Ok);
    assert_eq!(harness.write(512, &[7; 512]), End::Ok, "on the other leg only");
    let work = background(&harness);
    while work.is_due(LATER) {
        work.step(LATER, &mut LegDisks(&harness, None));
    }
    assert_eq!(unmarked(&harness), 14);
}

/// Two concurrent writes to one region: the second one must wait while the mark is being written.
#[test]
fn no_write_is_sent_before_the_mark_of_its_region_is_on_disk() {
    let leg = || super::legs::Leg::new(1, block::Sectors(0), "leg", "leg");
    let args = ["disk", "3", "log", "64", "nosync"];
    let log = super::args::LogArgs::read(&args, block::Sectors(1024)).unwrap().0;
    let shared = super::shared::Shared::new(
        vec![leg(), leg()],
        block::Sectors(1024),
        log,
        Some((0, "log")),
        [false; 2],
    );
    let mut bytes = vec![0; 4096];
    let write = |bytes: &mut [u8]| {
        assert!(shared.claim_log());
        shared.encode_log(bytes);
    };
    write(&mut bytes);
    shared.log_written(true, None);
    assert!(!shared.is_logged(3));
    shared.mark(3, Nanos(1));
    assert!(!shared.is_logged(3), "only in memory");
    write(&mut bytes);
    assert!(!shared.is_logged(3), "being written");
    shared.mark(4, Nanos(1));
    shared.log_written(true, None);
    assert!(shared.is_logged(3) && !shared.is_logged(4), "region 4 was marked after the log was encoded");
    // Another mark is being written: a region whose mark is on disk does not wait for that write.
    write(&mut bytes);
    assert!(shared.is_logged(3));
    shared.log_written(true, None);
    assert!(shared.is_logged(4));
}

#[test]
fn a_failed_discard_does_not_fail_a_leg() {
    for (op, status) in
        [(Op::Discard, End::NotSupported), (Op::Discard, End::IoError), (Op::WriteZeroes, End::NotSupported)]
    {
        let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 0");
        assert_eq!(harness.write(0, &[1; 4096]), End::Ok);
        harness.fail(1, status);
        harness.fail(1, status);
        assert_eq!(harness.run(op, 0, 8).0, End::NotSupported, "{op:?} {status:?}");
        assert_eq!(self::status(&harness), "2 8:0 8:16 16/16 1 AA 1 core");
        assert_ne!(harness.content(0, 0, 4096), harness.content(1, 0, 4096), "the legs differ");
        assert_eq!(harness.write(0, &[1; 512]), End::Ok, "its region is not locked");
        background(&harness).step(LATER, &mut LegDisks(&harness, None));
        assert_eq!(harness.content(0, 0, 4096), harness.content(1, 0, 4096));
        assert!(!background(&harness).is_due(LATER));
    }
}

#[test]
fn temporary_errors_are_retried() {
    for temporary in [End::Again, End::Resource, End::DeviceResource] {
        let mut harness = Harness::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
        for disk in [0, 1, 1, 1, 2] {
            harness.fail(disk, temporary);
        }
        assert_eq!(harness.write(0, &[7; 512]), End::Ok);
        harness.fail(1, temporary);
        harness.fail(1, temporary);
        assert_eq!(harness.read(0, 512), (End::Ok, vec![7; 512]));
        assert_eq!(harness.content(2, 0, 512), [7; 512]);
        assert_eq!(status(&harness), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 A", "{temporary:?}");
    }
}

/// A request that a disk ends with `Requeue` is repeated as a whole, and no leg is marked as failed.
#[test]
fn requeued_requests_are_repeated() {
    for disk in [0, 1, 2] {
        let mut harness = Harness::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
        harness.fail(disk, End::Requeue);
        assert_eq!(harness.write(0, &[7; 512]), End::Ok);
        assert!(status(&harness).ends_with("1 AA 3 disk 8:0 A"), "{}", status(&harness));
        let work = background(&harness);
        while work.is_due(LATER) {
            work.step(LATER, &mut LegDisks(&harness, None));
        }
        assert_eq!([1, 2].map(|disk| harness.content(disk, 0, 1)[0]), [7, 7]);
        assert_eq!(status(&harness), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 A");
    }
    let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    harness.fail(0, End::Requeue);
    assert_eq!(harness.read(0, 512).0, End::Ok);
    assert_eq!(status(&harness), "2 8:0 8:16 16/16 1 AA 1 core");
}

#[test]
fn a_medium_error_is_read_from_another_leg() {
    let mut harness = Harness::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    assert_eq!(harness.write(0, &[7; 512]), End::Ok);
    harness.fail(0, End::Medium);
    assert_eq!(harness.read(0, 512), (End::Ok, vec![7; 512]));
    assert_eq!(status(&harness), "2 8:0 8:16 16/16 1 RA 1 core");
}

#[test]
fn the_log_is_read_when_its_table_becomes_active() {
    let mut old = Harness::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
    let loaded = super::super::testing::build("mirror", "disk 2 log 64 2 a 0 b 0");
    assert_eq!(old.write(0, &[7; 512]), End::Ok);
    assert_eq!(unmarked(&old), 15);
    old.target.presuspend(true);
    assert!(!background(&old).is_due(LATER), "the next table owns the log");
    loaded.prepare(&mut LegDisks(&old, None)).unwrap();
    let status = loaded.status(Status::Info, &names(&["8:0", "8:16", "8:32"]));
    assert_eq!(status, "2 8:16 8:32 15/16 1 AA 3 disk 8:0 A", "marks set after the table was loaded");
}
