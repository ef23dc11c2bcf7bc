//! Tests of mirrors that restart after a leg failed.

use super::super::Status;
use super::super::background::BackgroundWork;
use super::super::harness::Harness;
use super::super::testing::names;
use super::record::AT;
use block::{Bytes, Flags, Op, Request, Status as End};
use queue::Nanos;
use std::sync::Arc;

const TABLE: &str = "disk 2 log 64 2 a 0 b 8";
/// The offset of each leg in sectors, by name.
const STARTS: [(&str, u64); 3] = [("a", 0), ("b", 8), ("c", 0)];
/// A time long after all writes.
const LATER: Nanos = Nanos(1 << 60);

fn status(harness: &Harness) -> String {
    harness.target.status(Status::Info, &names(&["log", "8:0", "8:16", "8:32"]))
}

fn facts(harness: &Harness) -> String {
    harness.target.describe().into_iter().map(|(_, fact)| fact).collect()
}

/// The first byte of a sector on each of these legs.
fn on(harness: &Harness, legs: &[&str], sector: u64) -> Vec<u8> {
    let content = harness.named_disks();
    let one = |leg: &&str| {
        let start = STARTS.iter().find(|known| known.0 == *leg).expect("a leg").1;
        let disk = &content.iter().find(|content| content.0 == *leg).expect("a disk").1;
        disk.borrow().content[((start + sector) << 9) as usize]
    };
    legs.iter().map(one).collect()
}

fn is_recorded(harness: &Harness) -> bool {
    harness.content(0, 0, 512)[AT.start..AT.start + 8] == *b"BYLEGS01"
}

/// Runs all background work.
fn settle(harness: &mut Harness) {
    let work: Arc<dyn BackgroundWork> = harness.target.background_work().expect("a mirror has one");
    let mut below = harness.test_disks();
    while work.is_due(LATER) {
        work.step(LATER, &mut below);
    }
}

/// A mirror with all regions in sync and sevens in sector 0.
fn synced(args: &str) -> Harness {
    let mut harness = Harness::new("mirror", args);
    settle(&mut harness);
    assert_eq!(harness.write(0, &[7; 512]), End::Ok);
    settle(&mut harness);
    harness
}

/// Writes eights to sector 0: this disk fails the write, and the others store it.
fn fail_one(harness: &mut Harness, disk: usize) {
    harness.fail(disk, End::IoError);
    harness.fail(disk, End::IoError);
    assert_eq!(harness.write_with(0, &[8; 512], Flags::FUA), End::Ok);
}

#[test]
fn a_failed_leg_is_not_used_after_a_restart() {
    for (disk, letters, content) in [(1, "DA", [7, 8]), (2, "AD", [8, 7])] {
        for args in [TABLE, "disk 2 log 64 2 b 8 a 0", "disk 3 log 64 nosync 2 a 0 b 8"] {
            let mut harness = synced(TABLE);
            fail_one(&mut harness, disk);
            assert!(is_recorded(&harness), "before the acknowledgement");
            assert_eq!(on(&harness, &["a", "b"], 0), content);
            // A clean stop and a kill have the same effect: nothing more is written.
            let mut harness = harness.restart("mirror", args);
            settle(&mut harness);
            assert_eq!(harness.read(0, 512), (End::Ok, vec![8; 512]), "{args}");
            assert_eq!(on(&harness, &["a", "b"], 0), content, "{args}: the failed leg is not copied");
            let letters =
                if args.contains("b 8 a 0") { letters.chars().rev().collect() } else { letters.to_owned() };
            assert!(
                status(&harness).contains(&format!(" 1 {letters} 3 disk ")),
                "{args}: {}",
                status(&harness)
            );
            let leg = ["a", "b"][disk - 1];
            assert_eq!(facts(&harness), format!("{leg} is not used: it missed writes; recorded in log"));
            assert_eq!(harness.target.notices(), [facts(&harness)]);
            assert!(harness.target.notices().is_empty(), "once");
            // Another restart, after another write.
            assert_eq!(harness.write(64, &[9; 512]), End::Ok);
            let mut harness = harness.restart("mirror", TABLE);
            settle(&mut harness);
            assert_eq!(harness.read(64, 512), (End::Ok, vec![9; 512]));
        }
    }
}

#[test]
fn a_failed_leg_is_used_again_after_a_complete_resync() {
    let mut harness = synced(TABLE);
    fail_one(&mut harness, 1);
    // The failed leg is first in the table, and is the destination of the resynchronisation.
    let mut harness = harness.restart("mirror", "disk 3 log 64 sync 2 a 0 b 8");
    assert_eq!(status(&harness).split(' ').nth(3), Some("0/16"));
    assert!(
        facts(&harness).starts_with("a is being resynchronised, as it missed writes"),
        "{}",
        facts(&harness)
    );
    assert_eq!(harness.read(0, 512), (End::Ok, vec![8; 512]));
    let (work, mut below) = (harness.target.background_work().unwrap(), harness.test_disks());
    (0..8).for_each(|_| work.step(LATER, &mut below));
    assert!(is_recorded(&harness), "only half of it is copied");
    let mut harness = harness.restart("mirror", TABLE);
    assert!(status(&harness).contains(" 1 DA "), "the other half is missing: {}", status(&harness));
    assert_eq!(harness.read(0, 512), (End::Ok, vec![8; 512]));
    let mut harness = harness.restart("mirror", "disk 3 log 64 sync 2 a 0 b 8");
    settle(&mut harness);
    assert!(!is_recorded(&harness) && facts(&harness).is_empty(), "{}", facts(&harness));
    assert_eq!(harness.content(0, 0, 512)[AT], [0; 496], "as the kernel writes it");
    assert_eq!(on(&harness, &["a", "b"], 0), [8, 8]);
    let harness = harness.restart("mirror", TABLE);
    assert_eq!(status(&harness), "2 8:0 8:16 16/16 1 AA 3 disk log A");
}

#[test]
fn a_leg_that_fails_while_it_is_copied_to_stays_recorded() {
    let mut harness = synced(TABLE);
    fail_one(&mut harness, 1);
    let mut harness = harness.restart("mirror", "disk 3 log 64 sync 2 a 0 b 8");
    harness.fail(1, End::IoError);
    settle(&mut harness);
    assert!(status(&harness).contains(" 0/16 1 SA "), "{}", status(&harness));
    assert_eq!(harness.write(0, &[9; 512]), End::Ok);
    let mut harness = harness.restart("mirror", TABLE);
    assert!(status(&harness).contains(" 1 DA "), "{}", status(&harness));
    assert_eq!(harness.read(0, 512), (End::Ok, vec![9; 512]));
}

#[test]
fn a_leg_that_failed_a_read_or_a_flush_is_recorded_before_it_misses_a_write() {
    for op in [Op::Read, Op::Flush] {
        let mut harness = synced(TABLE);
        harness.fail(1, End::IoError);
        harness.fail(1, End::IoError);
        let ended = harness.run(op, 0, u64::from(op == Op::Read)).0;
        assert_eq!(ended, End::Ok);
        assert_eq!(harness.write(0, &[8; 512]), End::Ok);
        assert!(is_recorded(&harness), "{op:?}");
        let mut harness = harness.restart("mirror", TABLE);
        assert_eq!(harness.read(0, 512), (End::Ok, vec![8; 512]), "{op:?}");
    }
}

#[test]
fn a_failure_that_cannot_be_recorded_reaches_the_client() {
    let mut harness = synced(TABLE);
    harness.fail(1, End::IoError);
    harness.fail(1, End::IoError);
    // The write of the mark succeeds, that of the record fails.
    harness.fail(0, End::Ok);
    harness.fail(0, End::IoError);
    assert_eq!(harness.write(0, &[8; 512]), End::IoError);
    assert_eq!(harness.write(64, &[8; 512]), End::IoError, "later writes are not acknowledged either");
    assert_eq!(harness.run(Op::Flush, 0, 0).0, End::IoError);
    assert!(!is_recorded(&harness) && status(&harness).ends_with(" 3 disk log D"), "{}", status(&harness));
}

#[test]
fn with_handle_errors_a_failure_that_cannot_be_recorded_waits_for_the_next_table() {
    let mut harness = synced("disk 2 log 64 2 a 0 b 8 1 handle_errors");
    harness.fail(1, End::IoError);
    harness.fail(1, End::IoError);
    harness.submit(Request::new(Op::WriteZeroes, Bytes(0), Bytes(512)));
    harness.target.presuspend(false);
    assert_eq!(harness.drain(), [End::IoError]);
    harness.target.resume();
    // The failure is recorded before later writes are acknowledged.
    assert_eq!(harness.write(64, &[8; 512]), End::Ok);
    assert!(is_recorded(&harness));
}

#[test]
fn with_a_core_log_writes_are_acknowledged_if_a_restart_copies_them() {
    for (args, failed, acknowledged) in [
        ("core 1 64 2 a 0 b 8", 1, true),
        ("core 1 64 2 a 0 b 8", 0, false),
        ("core 2 64 sync 2 a 0 b 8", 1, true),
        ("core 2 64 nosync 2 a 0 b 8", 1, false),
        ("core 2 64 nosync 2 a 0 b 8", 0, false),
        ("core 1 64 2 a 0 b 8 2 handle_errors keep_log", 0, true),
    ] {
        let mut harness = synced(args);
        harness.fail(failed, End::IoError);
        harness.fail(failed, End::IoError);
        let expected = if acknowledged { End::Ok } else { End::IoError };
        assert_eq!(harness.write(0, &[8; 512]), expected, "{args}, leg {failed}");
        assert_eq!(harness.write(64, &[8; 512]), expected, "{args}: later writes end the same way");
        assert_eq!(harness.run(Op::Flush, 0, 0).0, expected);
        assert_eq!(harness.read(0, 512), (End::Ok, vec![8; 512]), "{args}");
    }
}

#[test]
fn the_last_leg_is_used_although_it_fails() {
    let mut harness = synced("disk 2 log 64 3 a 0 b 8 c 0");
    fail_one(&mut harness, 3);
    fail_one(&mut harness, 2);
    for disk in [1, 1] {
        harness.fail(disk, End::IoError);
    }
    assert_eq!(harness.write(0, &[9; 512]), End::IoError, "no other leg is alive");
    assert_eq!(harness.write(0, &[9; 512]), End::Ok, "the leg stays in use");
    for args in ["disk 2 log 64 3 c 0 b 8 a 0", "disk 2 log 64 2 a 0 c 0"] {
        let mut harness = harness.with_same_disks("mirror", args);
        assert_eq!(harness.read(0, 512), (End::Ok, vec![9; 512]), "{args}");
    }
    let why = Harness::over("mirror", "disk 2 log 64 2 b 8 c 0", harness.named_disks(), true)
        .err()
        .expect("both failed")
        .to_string();
    assert!(why.contains("log log: no leg of this table is recorded as having all"), "{why}");
}

#[test]
fn a_replacement_leg_is_used_after_a_complete_resync() {
    let mut harness = synced(TABLE);
    fail_one(&mut harness, 1);
    let mut harness = harness.restart("mirror", "disk 2 log 64 2 c 0 b 8");
    settle(&mut harness);
    assert!(status(&harness).contains(" 1 DA "), "{}", status(&harness));
    assert_eq!(harness.read(0, 512), (End::Ok, vec![8; 512]));
    let mut harness = harness.restart("mirror", "disk 3 log 64 sync 2 c 0 b 8");
    settle(&mut harness);
    assert_eq!(on(&harness, &["c", "b"], 0), [8, 8]);
    assert!(status(&harness).contains(" 16/16 1 AA "), "{}", status(&harness));
    // The replaced leg still misses writes.
    let mut harness = harness.restart("mirror", TABLE);
    assert!(status(&harness).contains(" 1 DA "), "{}", status(&harness));
    settle(&mut harness);
    assert_eq!(harness.read(0, 512), (End::Ok, vec![8; 512]));
}

#[test]
fn a_table_whose_log_is_unreadable_or_damaged_is_refused() {
    let refused = |harness: &Harness, args: &str| {
        Harness::over("mirror", args, harness.named_disks(), true).err().expect("a refused table").to_string()
    };
    let mut harness = synced(TABLE);
    fail_one(&mut harness, 1);
    harness.fail(0, End::IoError);
    let why = refused(&harness, TABLE);
    assert!(
        why.contains("log log: it cannot be read")
            && why.contains("legs a, b; to go on, use a new log device"),
        "{why}"
    );
    harness.disks[0].borrow_mut().content[40] ^= 1;
    let why = refused(&harness, "disk 3 log 64 sync 2 a 0 b 8");
    assert!(why.contains("log log: its record of failed legs is damaged"), "{why}");
    // A new log device, with the leg chosen by the administrator first.
    let mut harness = harness.restart("mirror", "disk 2 new 64 2 b 8 a 0");
    settle(&mut harness);
    assert_eq!(on(&harness, &["a", "b"], 0), [8, 8]);
}

/// A log that is created on a disk with other data has remnants of that data in its header.
#[test]
fn other_data_in_a_header_is_not_a_record() {
    for header in [[0x5a_u8; 16], *b"rRiM\x02\0\0\0\x10\0\0\0\0\0\0\0"] {
        let harness = Harness::new("mirror", TABLE);
        harness.disks[0].borrow_mut().content[..512].fill(0x5a);
        harness.disks[0].borrow_mut().content[..16].copy_from_slice(&header);
        let harness = harness.restart("mirror", TABLE);
        assert!(status(&harness).contains(" 1 AA 3 disk log A"), "{}", status(&harness));
        assert_eq!(harness.content(0, 0, 512)[AT], [0; 496]);
    }
}
