//! What a mirror believes after a restart, when a leg failed before.

use super::super::Status;
use super::super::chore::Chore;
use super::super::rig::Rig;
use super::super::testing::names;
use super::record::AT;
use block::{Bytes, Flags, Op, Request, Status as End};
use queue::Nanos;
use std::sync::Arc;

const TABLE: &str = "disk 2 log 64 2 a 0 b 8";
/// Where the legs' data lies, by the leg's name.
const STARTS: [(&str, u64); 3] = [("a", 0), ("b", 8), ("c", 0)];
/// Long after whatever was written.
const LATER: Nanos = Nanos(1 << 60);

fn status(rig: &Rig) -> String {
    rig.target.status(Status::Info, &names(&["log", "8:0", "8:16", "8:32"]))
}

fn facts(rig: &Rig) -> String {
    rig.target.describe().into_iter().map(|(_, fact)| fact).collect()
}

/// What lies at a sector of each leg, by the names of the legs.
fn on(rig: &Rig, legs: &[&str], sector: u64) -> Vec<u8> {
    let kept = rig.kept();
    let one = |leg: &&str| {
        let start = STARTS.iter().find(|known| known.0 == *leg).expect("a leg").1;
        let disk = &kept.iter().find(|kept| kept.0 == *leg).expect("a disk").1;
        disk.borrow().content[((start + sector) << 9) as usize]
    };
    legs.iter().map(one).collect()
}

fn is_recorded(rig: &Rig) -> bool {
    rig.content(0, 0, 512)[AT.start..AT.start + 8] == *b"BYLEGS01"
}

/// Does all that the target has to do by itself.
fn settle(rig: &mut Rig) {
    let chore: Arc<dyn Chore> = rig.target.chore().expect("a mirror has one");
    let mut below = rig.below();
    while chore.is_due(LATER) {
        chore.step(LATER, &mut below);
    }
}

/// A mirror whose regions are in sync and hold sevens.
fn synced(words: &str) -> Rig {
    let mut rig = Rig::new("mirror", words);
    settle(&mut rig);
    assert_eq!(rig.write(0, &[7; 512]), End::Ok);
    settle(&mut rig);
    rig
}

/// One of its disks, by number, does not take the next write: that succeeds elsewhere, and is of eights.
fn fail_one(rig: &mut Rig, disk: usize) {
    rig.fail(disk, End::IoError);
    rig.fail(disk, End::IoError);
    assert_eq!(rig.write_with(0, &[8; 512], Flags::FUA), End::Ok);
}

#[test]
fn a_leg_that_failed_is_not_right_after_a_restart() {
    for (disk, letters, kept) in [(1, "DA", [7, 8]), (2, "AD", [8, 7])] {
        for words in [TABLE, "disk 2 log 64 2 b 8 a 0", "disk 3 log 64 nosync 2 a 0 b 8"] {
            let mut rig = synced(TABLE);
            fail_one(&mut rig, disk);
            assert!(is_recorded(&rig), "before it is acknowledged");
            assert_eq!(on(&rig, &["a", "b"], 0), kept);
            // A clean stop, or a kill: nothing more is written.
            let mut rig = rig.again("mirror", words);
            settle(&mut rig);
            assert_eq!(rig.read(0, 512), (End::Ok, vec![8; 512]), "{words}");
            assert_eq!(on(&rig, &["a", "b"], 0), kept, "{words}: nothing is copied from or to it");
            let letters =
                if words.contains("b 8 a 0") { letters.chars().rev().collect() } else { letters.to_owned() };
            assert!(status(&rig).contains(&format!(" 1 {letters} 3 disk ")), "{words}: {}", status(&rig));
            let leg = ["a", "b"][disk - 1];
            assert_eq!(facts(&rig), format!("{leg} is left out: it missed writes; recorded in log"));
            assert_eq!(rig.target.notices(), [facts(&rig)]);
            assert!(rig.target.notices().is_empty(), "once");
            // And once more, with other data.
            assert_eq!(rig.write(64, &[9; 512]), End::Ok);
            let mut rig = rig.again("mirror", TABLE);
            settle(&mut rig);
            assert_eq!(rig.read(64, 512), (End::Ok, vec![9; 512]));
        }
    }
}

#[test]
fn a_leg_comes_back_by_sync_and_only_when_all_was_copied() {
    let mut rig = synced(TABLE);
    fail_one(&mut rig, 1);
    // The one that failed is the first still, and is copied to.
    let mut rig = rig.again("mirror", "disk 3 log 64 sync 2 a 0 b 8");
    assert_eq!(status(&rig).split(' ').nth(3), Some("0/16"));
    assert!(facts(&rig).starts_with("a is copied to, as it missed writes"), "{}", facts(&rig));
    assert_eq!(rig.read(0, 512), (End::Ok, vec![8; 512]));
    let (chore, mut below) = (rig.target.chore().unwrap(), rig.below());
    (0..8).for_each(|_| chore.step(LATER, &mut below));
    assert!(is_recorded(&rig), "half of it was copied");
    let mut rig = rig.again("mirror", TABLE);
    assert!(status(&rig).contains(" 1 DA "), "it lacks the other half: {}", status(&rig));
    assert_eq!(rig.read(0, 512), (End::Ok, vec![8; 512]));
    let mut rig = rig.again("mirror", "disk 3 log 64 sync 2 a 0 b 8");
    settle(&mut rig);
    assert!(!is_recorded(&rig) && facts(&rig).is_empty(), "{}", facts(&rig));
    assert_eq!(rig.content(0, 0, 512)[AT], [0; 496], "as the kernel writes it");
    assert_eq!(on(&rig, &["a", "b"], 0), [8, 8]);
    let rig = rig.again("mirror", TABLE);
    assert_eq!(status(&rig), "2 8:0 8:16 16/16 1 AA 3 disk log A");
}

#[test]
fn a_leg_that_fails_while_it_is_copied_to_stays_recorded() {
    let mut rig = synced(TABLE);
    fail_one(&mut rig, 1);
    let mut rig = rig.again("mirror", "disk 3 log 64 sync 2 a 0 b 8");
    rig.fail(1, End::IoError);
    settle(&mut rig);
    assert!(status(&rig).contains(" 0/16 1 SA "), "{}", status(&rig));
    assert_eq!(rig.write(0, &[9; 512]), End::Ok);
    let mut rig = rig.again("mirror", TABLE);
    assert!(status(&rig).contains(" 1 DA "), "{}", status(&rig));
    assert_eq!(rig.read(0, 512), (End::Ok, vec![9; 512]));
}

#[test]
fn a_leg_that_failed_a_read_or_a_flush_is_recorded_before_it_misses_a_write() {
    for op in [Op::Read, Op::Flush] {
        let mut rig = synced(TABLE);
        rig.fail(1, End::IoError);
        rig.fail(1, End::IoError);
        let ended = rig.run(op, 0, u64::from(op == Op::Read)).0;
        assert_eq!(ended, End::Ok);
        assert_eq!(rig.write(0, &[8; 512]), End::Ok);
        assert!(is_recorded(&rig), "{op:?}");
        let mut rig = rig.again("mirror", TABLE);
        assert_eq!(rig.read(0, 512), (End::Ok, vec![8; 512]), "{op:?}");
    }
}

#[test]
fn a_failure_that_cannot_be_recorded_reaches_the_client() {
    let mut rig = synced(TABLE);
    rig.fail(1, End::IoError);
    rig.fail(1, End::IoError);
    // The mark goes well, the record does not.
    rig.fail(0, End::Ok);
    rig.fail(0, End::IoError);
    assert_eq!(rig.write(0, &[8; 512]), End::IoError);
    assert_eq!(rig.write(64, &[8; 512]), End::IoError, "nor is anything later acknowledged");
    assert_eq!(rig.run(Op::Flush, 0, 0).0, End::IoError);
    assert!(!is_recorded(&rig) && status(&rig).ends_with(" 3 disk log D"), "{}", status(&rig));
}

#[test]
fn with_handle_errors_a_failure_that_cannot_be_recorded_waits_for_the_next_table() {
    let mut rig = synced("disk 2 log 64 2 a 0 b 8 1 handle_errors");
    rig.fail(1, End::IoError);
    rig.fail(1, End::IoError);
    rig.submit(Request::new(Op::WriteZeroes, Bytes(0), Bytes(512)));
    rig.target.presuspend(false);
    assert_eq!(rig.drain(), [End::IoError]);
    rig.target.resume();
    // What comes then is recorded first.
    assert_eq!(rig.write(64, &[8; 512]), End::Ok);
    assert!(is_recorded(&rig));
}

#[test]
fn a_log_in_memory_acknowledges_what_is_copied_from_the_first_leg_after_a_restart() {
    for (words, failed, acknowledged) in [
        ("core 1 64 2 a 0 b 8", 1, true),
        ("core 1 64 2 a 0 b 8", 0, false),
        ("core 2 64 sync 2 a 0 b 8", 1, true),
        ("core 2 64 nosync 2 a 0 b 8", 1, false),
        ("core 2 64 nosync 2 a 0 b 8", 0, false),
        ("core 1 64 2 a 0 b 8 2 handle_errors keep_log", 0, true),
    ] {
        let mut rig = synced(words);
        rig.fail(failed, End::IoError);
        rig.fail(failed, End::IoError);
        let expected = if acknowledged { End::Ok } else { End::IoError };
        assert_eq!(rig.write(0, &[8; 512]), expected, "{words}, leg {failed}");
        assert_eq!(rig.write(64, &[8; 512]), expected, "{words}: nor is anything later acknowledged");
        assert_eq!(rig.run(Op::Flush, 0, 0).0, expected);
        assert_eq!(rig.read(0, 512), (End::Ok, vec![8; 512]), "{words}");
    }
}

#[test]
fn of_two_legs_that_fail_the_last_one_is_kept() {
    let mut rig = synced("disk 2 log 64 3 a 0 b 8 c 0");
    fail_one(&mut rig, 3);
    fail_one(&mut rig, 2);
    for disk in [1, 1] {
        rig.fail(disk, End::IoError);
    }
    assert_eq!(rig.write(0, &[9; 512]), End::IoError, "there is no other");
    assert_eq!(rig.write(0, &[9; 512]), End::Ok, "and it is used on");
    for words in ["disk 2 log 64 3 c 0 b 8 a 0", "disk 2 log 64 2 a 0 c 0"] {
        let mut rig = rig.beside("mirror", words);
        assert_eq!(rig.read(0, 512), (End::Ok, vec![9; 512]), "{words}");
    }
    let why = Rig::over("mirror", "disk 2 log 64 2 b 8 c 0", rig.kept(), true)
        .err()
        .expect("both failed")
        .to_string();
    assert!(
        why.contains("log log: none of the legs of this table is recorded as the one that has all"),
        "{why}"
    );
}

#[test]
fn a_leg_in_the_place_of_one_that_failed_is_used_when_all_was_copied_to_it() {
    let mut rig = synced(TABLE);
    fail_one(&mut rig, 1);
    let mut rig = rig.again("mirror", "disk 2 log 64 2 c 0 b 8");
    settle(&mut rig);
    assert!(status(&rig).contains(" 1 DA "), "{}", status(&rig));
    assert_eq!(rig.read(0, 512), (End::Ok, vec![8; 512]));
    let mut rig = rig.again("mirror", "disk 3 log 64 sync 2 c 0 b 8");
    settle(&mut rig);
    assert_eq!(on(&rig, &["c", "b"], 0), [8, 8]);
    assert!(status(&rig).contains(" 16/16 1 AA "), "{}", status(&rig));
    // The one that was left out still lacks what it missed.
    let mut rig = rig.again("mirror", TABLE);
    assert!(status(&rig).contains(" 1 DA "), "{}", status(&rig));
    settle(&mut rig);
    assert_eq!(rig.read(0, 512), (End::Ok, vec![8; 512]));
}

#[test]
fn a_log_that_may_say_which_leg_failed_is_read_or_the_table_is_refused() {
    let refused = |rig: &Rig, words: &str| {
        Rig::over("mirror", words, rig.kept(), true).err().expect("a table that is refused").to_string()
    };
    let mut rig = synced(TABLE);
    fail_one(&mut rig, 1);
    rig.fail(0, End::IoError);
    let why = refused(&rig, TABLE);
    assert!(
        why.contains("log log: it cannot be read") && why.contains("legs a, b; give the mirror another log"),
        "{why}"
    );
    rig.disks[0].borrow_mut().content[40] ^= 1;
    let why = refused(&rig, "disk 3 log 64 sync 2 a 0 b 8");
    assert!(why.contains("log log: its record of failed legs is damaged"), "{why}");
    // Another log, and the administrator's word.
    let mut rig = rig.again("mirror", "disk 2 new 64 2 b 8 a 0");
    settle(&mut rig);
    assert_eq!(on(&rig, &["a", "b"], 0), [8, 8]);
}

/// A log that is made on a disk that was used for something else has whatever that left in its header.
#[test]
fn what_lies_in_a_log_that_is_no_record_is_none() {
    for header in [[0x5a_u8; 16], *b"rRiM\x02\0\0\0\x10\0\0\0\0\0\0\0"] {
        let rig = Rig::new("mirror", TABLE);
        rig.disks[0].borrow_mut().content[..512].fill(0x5a);
        rig.disks[0].borrow_mut().content[..16].copy_from_slice(&header);
        let rig = rig.again("mirror", TABLE);
        assert!(status(&rig).contains(" 1 AA 3 disk log A"), "{}", status(&rig));
        assert_eq!(rig.content(0, 0, 512)[AT], [0; 496]);
    }
}
