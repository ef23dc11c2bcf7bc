//! Mirrors: where data goes, what a failure does, what is copied, what the log says.

use super::super::chore::{Chore, Disks};
use super::super::rig::Rig;
use super::super::testing::{error, names};
use super::super::{Status, Target};
use block::{Bytes, Op, Status as End};
use queue::Nanos;
use std::io;
use std::sync::Arc;

fn status(rig: &Rig) -> String {
    rig.target.status(Status::Info, &names(&["8:0", "8:16", "8:32"]))
}

fn chore(rig: &Rig) -> Arc<dyn Chore> {
    Target::chore(&*rig.target).expect("a mirror has one")
}

/// The disks of a rig, as whoever looks after it has them, one of which cannot be written.
struct Below<'a>(&'a Rig, Option<usize>);

/// The same, one of which cannot be flushed. What was written and flushed, in order.
struct Flushed<'a>(&'a Rig, Option<usize>, Vec<(usize, char)>);

impl Disks for Flushed<'_> {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        Below(self.0, None).read(device, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.2.push((device, 'w'));
        Below(self.0, None).write(device, at, from)
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.2.push((device, 'f'));
        if self.1 == Some(device) { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
    }
}

/// Regions without a mark in the log.
fn unmarked(rig: &Rig) -> u32 {
    rig.content(0, 2, 2).iter().map(|byte| byte.count_ones()).sum()
}

/// Long after whatever was written.
const LATER: Nanos = Nanos(1 << 60);

impl Disks for Below<'_> {
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
fn a_line_is_read_and_shown_again() {
    for (words, table) in [
        ("core 1 64 2 a 0 b 8", "core 1 64 2 8:0 0 8:16 8"),
        ("core 2 64 nosync 2 a 0 b 8 1 handle_errors", "core 2 64 nosync 2 8:0 0 8:16 8 1 handle_errors"),
        ("disk 2 a 64 2 b 0 c 8", "disk 2 8:0 64 2 8:16 0 8:32 8"),
        (
            "disk 3 a 64 sync 2 b 0 c 8 2 handle_errors keep_log",
            "disk 3 8:0 64 sync 2 8:16 0 8:32 8 2 handle_errors keep_log",
        ),
    ] {
        let rig = Rig::new("mirror", words);
        assert_eq!(rig.target.status(Status::Table, &names(&["8:0", "8:16", "8:32"])), table);
    }
    assert_eq!(status(&Rig::new("mirror", "core 1 64 2 a 0 b 0")), "2 8:0 8:16 0/16 1 AA 1 core");
    let disk = Rig::new("mirror", "disk 3 a 64 nosync 2 b 0 c 0");
    assert_eq!(status(&disk), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 A");
}

#[test]
fn a_line_longer_than_its_legs_is_refused_before_there_is_memory_for_it() {
    use super::super::{Place, kinds, testing::Shelf};
    use block::Sectors;
    let place = Place { start: Sectors(0), len: Sectors(1 << 53) };
    let kinds = kinds::<crate::testing::Clock>();
    let kind = kinds.iter().find(|kind| kind.name == "mirror").unwrap();
    let words: Vec<&str> = "core 1 64 2 a 0 b 0".split(' ').collect();
    let error = (kind.make)(place, &words, &mut Shelf::default()).err().unwrap();
    assert!(error.to_string().starts_with("a too small for target: start=0"), "{error}");
}

#[test]
fn what_is_wrong_is_said_in_the_kernels_words() {
    for (words, text) in [
        ("core", "Insufficient mirror log arguments"),
        ("core x", "Invalid mirror log argument count"),
        ("core 3 64", "Insufficient mirror log arguments"),
        ("tape 1 64 2 a 0 b 0", "Error creating mirror dirty log"),
        ("core 1 63 2 a 0 b 0", "Error creating mirror dirty log"),
        ("core 2 64 maybe 2 a 0 b 0", "Error creating mirror dirty log"),
        ("core 1 64 1 a 0", "Invalid number of mirrors"),
        ("core 1 64 2 a 0 b", "Too few mirror arguments"),
        ("core 1 64 2 a 0 b x", "Invalid offset"),
        ("core 1 64 2 a 0 missing 0", "Device lookup failure: missing: it is not there"),
        ("core 1 64 2 a 0 b 0 x", "Invalid number of features"),
        ("core 1 64 2 a 0 b 0 2 handle_errors", "Not enough arguments to support feature count"),
        ("core 1 64 2 a 0 b 0 1 sleep", "Unrecognised feature requested"),
        ("core 1 64 2 a 0 b 0 1 keep_log", "keep_log feature requires the handle_errors feature"),
        ("core 1 64 2 a 0 b 0 1 handle_errors x", "Too many mirror arguments"),
    ] {
        assert_eq!(error("mirror", words), text, "{words}");
    }
}

#[test]
fn regions_are_copied_one_after_the_other() {
    let mut rig = Rig::new("mirror", "core 1 64 2 a 0 b 8");
    rig.disks[0].borrow_mut().content.fill(7);
    assert_eq!(rig.write(100, &[9; 512]), End::Ok);
    assert_eq!(rig.content(1, 108, 1), [0], "a region that is not in sync is written to the first only");
    let chore = chore(&rig);
    let mut steps = 0;
    while chore.is_due(LATER) {
        chore.step(LATER, &mut Below(&rig, None));
        steps += 1;
    }
    assert_eq!((steps, status(&rig).as_str()), (16, "2 8:0 8:16 16/16 1 AA 1 core"));
    assert_eq!(rig.content(1, 8, 512 << 10), rig.content(0, 0, 512 << 10));
    assert_eq!(rig.content(1, 108, 512), [9; 512]);
    assert_eq!(rig.target.events(), 1);
    assert_eq!(rig.write(100, &[5; 512]), End::Ok);
    assert_eq!((rig.content(0, 100, 1), rig.content(1, 108, 1)), (vec![5], vec![5]));
}

#[test]
fn a_suspended_mirror_copies_nothing() {
    let rig = Rig::new("mirror", "core 1 64 2 a 0 b 0");
    rig.target.presuspend(false);
    assert!(!chore(&rig).is_due(LATER));
    rig.target.resume();
    assert!(chore(&rig).is_due(LATER));
}

#[test]
fn reads_go_on_without_a_device_that_fails() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 8 1 handle_errors");
    assert_eq!(rig.write(0, &[3; 4096]), End::Ok);
    rig.fail(0, End::IoError);
    assert_eq!(rig.read(0, 4096), (End::Ok, vec![3; 4096]));
    assert_eq!(status(&rig), "2 8:0 8:16 16/16 1 RA 1 core");
    assert_eq!(rig.run(Op::Read, 0, 8).1, [(1, Op::Read, 8, 8)], "the other is the first now");
    rig.fail(1, End::IoError);
    assert_eq!(rig.read(0, 4096).0, End::IoError);
}

#[test]
fn writes_go_on_without_a_device_that_fails() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0 2 handle_errors keep_log");
    rig.fail(1, End::IoError);
    rig.fail(1, End::IoError);
    assert_eq!(rig.write(0, &[3; 512]), End::Ok);
    assert_eq!(status(&rig), "2 8:0 8:16 15/16 1 AD 1 core");
    assert_eq!((rig.content(0, 0, 1), rig.content(1, 0, 1)), (vec![3], vec![0]));
    assert_eq!(rig.run(Op::Write, 512, 1).1, [(0, Op::Write, 512, 1)], "nothing goes there any more");
    assert!(!chore(&rig).is_due(LATER), "there is nowhere to copy to");
}

#[test]
fn without_keep_log_a_failed_write_waits_for_the_next_table() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0 1 handle_errors");
    rig.fail(1, End::IoError);
    rig.fail(1, End::IoError);
    rig.submit(block::Request::new(Op::WriteZeroes, Bytes(0), Bytes(512)));
    rig.target.presuspend(false);
    assert_eq!(rig.drain(), [End::IoError]);
}

#[test]
fn a_write_that_cannot_be_marked_waits_for_the_next_table() {
    let mut rig = Rig::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0 1 handle_errors");
    rig.fail(0, End::IoError);
    for disk in [1, 2] {
        rig.disks[disk].borrow_mut().content.fill(7);
    }
    rig.submit(block::Request::new(Op::WriteZeroes, Bytes(0), Bytes(512)));
    rig.submit(block::Request::new(Op::WriteZeroes, Bytes(65536), Bytes(512)));
    rig.target.presuspend(false);
    assert_eq!(rig.drain(), [End::IoError, End::IoError]);
    assert_eq!(status(&rig), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 D");
    assert_eq!([1, 2].map(|disk| rig.content(disk, 0, 1)[0]), [7, 7], "nothing was written");
}

#[test]
fn with_keep_log_a_write_that_cannot_be_marked_fails_and_is_not_written() {
    let mut rig = Rig::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0 2 handle_errors keep_log");
    rig.fail(0, End::IoError);
    assert_eq!(rig.write(0, &[3; 512]), End::IoError);
    assert_eq!((rig.content(1, 0, 1), rig.content(2, 0, 1)), (vec![0], vec![0]));
}

#[test]
fn without_handle_errors_writes_go_on_without_marks() {
    let mut rig = Rig::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
    rig.fail(0, End::IoError);
    assert_eq!(rig.write(0, &[3; 512]), End::Ok);
    assert_eq!(status(&rig), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 D");
}

#[test]
fn when_all_fail_so_does_the_write() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    for disk in [0, 0, 1, 1] {
        rig.fail(disk, End::IoError);
    }
    assert_eq!(rig.write(0, &[3; 512]), End::IoError);
    assert_eq!(status(&rig), "2 8:0 8:16 16/16 1 AA 1 core");
    assert!(chore(&rig).is_due(LATER), "part of it may be on one of them");
}

/// The disks of a rig, one of which neither reads nor writes. None of them can be flushed.
struct Away<'a>(&'a Rig, usize);

impl Disks for Away<'_> {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        if self.1 == device {
            return Err(io::ErrorKind::Other.into());
        }
        Below(self.0, None).read(device, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        Below(self.0, Some(self.1)).write(device, at, from)
    }

    fn flush(&mut self, _: usize) -> io::Result<()> {
        Err(io::ErrorKind::Other.into())
    }
}

#[test]
fn devices_that_are_all_away_for_a_moment_are_not_taken_for_bad_ones() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    for disk in [0, 0, 1, 1] {
        rig.fail(disk, End::IoError);
    }
    assert_eq!(rig.write(0, &[3; 512]), End::IoError);
    rig.disks[0].borrow_mut().content[..512].fill(5);
    let (chore, mut now) = (chore(&rig), LATER);
    for away in [0, 1] {
        for _ in 0..2 {
            chore.step(now, &mut Away(&rig, away));
        }
        assert_eq!(status(&rig), "2 8:0 8:16 16/16 1 AA 1 core");
        assert!(!chore.is_due(now), "not at once again");
        now = now.after(1_000_000_000);
        assert!(chore.is_due(now));
    }
    chore.step(now, &mut Below(&rig, None));
    assert_eq!(rig.content(1, 0, 512), [5; 512]);
    chore.step(now, &mut Below(&rig, None));
    assert!(!chore.is_due(now.after(1 << 40)), "they are alike");
    assert_eq!((status(&rig).as_str(), rig.target.events()), ("2 8:0 8:16 16/16 1 AA 1 core", 0));
}

#[test]
fn a_device_that_stays_away_for_longer_than_the_others_is_a_bad_one() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    for disk in [0, 0, 1, 1] {
        rig.fail(disk, End::IoError);
    }
    assert_eq!(rig.write(0, &[3; 512]), End::IoError);
    let chore = chore(&rig);
    let seconds = (0..100u64).map(|seconds| LATER.after(seconds * 1_000_000_000));
    let tries = seconds.filter(|now| {
        let is_due = chore.is_due(*now);
        chore.step(*now, &mut Away(&rig, 1));
        is_due
    });
    assert_eq!(tries.count(), 61);
    assert_eq!(status(&rig), "2 8:0 8:16 16/16 1 AS 1 core");
}

#[test]
fn where_no_device_can_be_flushed_none_is_to_blame() {
    let rig = Rig::new("mirror", "core 1 64 2 a 0 b 0");
    chore(&rig).step(LATER, &mut Away(&rig, 2));
    assert_eq!(status(&rig), "2 8:0 8:16 0/16 1 AA 1 core", "nor is it in sync");
}

#[test]
fn a_region_that_is_torn_while_another_is_looked_for_is_copied_too() {
    let leg = |device| super::standing::Leg::new(device, block::Sectors(0), "leg", "leg");
    for torn in [3, 6] {
        let log =
            super::words::LogWords::read(&["core", "2", "64", "nosync"], block::Sectors(1024)).unwrap().0;
        let legs = vec![leg(0), leg(1)];
        let shared = super::shared::Shared::new(legs, block::Sectors(1024), log, None, [false; 2]);
        shared.copy_again(5);
        let from = shared.take_cursor();
        // What the search saw before this is of no use.
        shared.copy_again(torn);
        shared.copy_again(7);
        assert_eq!((from, shared.next_region(7)), (0, Some(7)));
        assert!(shared.take_cursor() <= torn, "region {torn}");
    }
}

#[test]
fn a_flush_goes_to_all() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 3 a 0 b 0 c 0");
    assert_eq!(rig.run(Op::Flush, 0, 0).1.len(), 3);
}

#[test]
fn a_region_is_marked_on_disk_before_it_is_written() {
    let mut rig = Rig::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
    let mut header = b"iRiM\x02\0\0\0".to_vec();
    header[..4].copy_from_slice(&0x4D69_5272u32.to_le_bytes());
    header.extend([16, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.content(0, 0, 16), header);
    assert_eq!(rig.content(0, 2, 8), [0xff, 0xff, 0, 0, 0, 0, 0, 0], "all clean");
    let (_, seen) = rig.run(Op::Write, 64, 1);
    assert_eq!((seen[0], seen.len()), ((0, Op::Write, 0, 8), 3), "the log first");
    assert_eq!(rig.content(0, 2, 2), [0xfd, 0xff]);
    assert_eq!(rig.run(Op::Write, 65, 1).1.len(), 2, "it is marked");
    // After a crash only that region is copied.
    let again = Rig::over("mirror", "disk 2 log 64 2 a 0 b 0", rig.kept(), true).unwrap();
    assert_eq!(status(&again), "2 8:16 8:32 15/16 1 AA 3 disk 8:0 A");
    let chore = self::chore(&again);
    chore.step(LATER, &mut Below(&again, None));
    assert_eq!(status(&again), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 A");
    // And the mark goes when nothing is written for a while.
    while chore.is_due(LATER) {
        chore.step(LATER, &mut Below(&again, None));
    }
    assert_eq!(again.content(0, 2, 2), [0xff, 0xff]);
}

#[test]
fn a_device_that_cannot_be_copied_to_is_out_of_sync() {
    let rig = Rig::new("mirror", "core 1 64 2 a 0 b 0");
    let chore = chore(&rig);
    chore.step(LATER, &mut Below(&rig, Some(1)));
    assert_eq!(status(&rig), "2 8:0 8:16 0/16 1 AS 1 core");
    assert!(!chore.is_due(LATER));
}

#[test]
fn what_a_device_that_failed_has_is_copied_nowhere() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 3 a 0 b 0 c 0 2 handle_errors keep_log");
    rig.fail(0, End::IoError);
    rig.fail(0, End::IoError);
    assert_eq!(rig.write(0, &[7; 512]), End::Ok);
    assert_eq!(status(&rig), "3 8:0 8:16 8:32 15/16 1 DAA 1 core");
    let chore = chore(&rig);
    while chore.is_due(LATER) {
        chore.step(LATER, &mut Below(&rig, None));
    }
    assert_eq!([0, 1, 2].map(|disk| rig.content(disk, 0, 1)[0]), [0, 7, 7]);
    assert_eq!(status(&rig), "3 8:0 8:16 8:32 15/16 1 DAA 1 core");
}

#[test]
fn nothing_is_copied_from_a_first_device_that_failed_before_all_was_in_sync() {
    let mut rig = Rig::new("mirror", "core 1 64 3 a 0 b 0 c 0");
    let chore = chore(&rig);
    chore.step(LATER, &mut Below(&rig, None));
    rig.fail(0, End::IoError);
    rig.fail(0, End::IoError);
    assert_eq!(rig.write(0, &[7; 512]), End::IoError, "after a restart the first is copied from again");
    assert!(!chore.is_due(LATER), "no other has all");
    assert_eq!(rig.read(0, 512).0, End::IoError, "rather than what was there before");
    assert_eq!(rig.content(1, 0, 1), [7]);
}

#[test]
fn what_was_written_is_read_when_the_first_device_did_not_take_it() {
    for (words, first) in
        [("disk 3 log 64 nosync 2 a 0 b 0", 1), ("core 2 64 nosync 2 a 0 b 0 2 handle_errors keep_log", 0)]
    {
        let mut rig = Rig::new("mirror", words);
        rig.fail(first, End::IoError);
        rig.fail(first, End::IoError);
        assert_eq!(rig.write(0, &[7; 512]), End::Ok);
        assert!(status(&rig).contains(" 15/16 1 DA "), "{}", status(&rig));
        assert_eq!(rig.read(0, 512), (End::Ok, vec![7; 512]), "{words}");
        assert_eq!(rig.write(0, &[8; 512]), End::Ok);
        assert_eq!(rig.read(0, 512), (End::Ok, vec![8; 512]));
    }
}

#[test]
fn one_request_at_a_time_ends_with_a_log_on_disk() {
    let words = "disk 3 log 64 nosync 2 a 0 b 0";
    let mut rig = Rig::with_depth(1, "mirror", words, Vec::new(), false).unwrap();
    assert_eq!(rig.write(0, &[7; 512]), End::Ok);
    assert_eq!(rig.run(Op::Flush, 0, 0).0, End::Ok);
}

#[test]
fn all_devices_are_flushed_before_a_mark_goes() {
    let mut rig = Rig::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
    assert_eq!(rig.write(0, &[7; 512]), End::Ok);
    assert_eq!(unmarked(&rig), 15);
    let chore = chore(&rig);
    let mut disks = Flushed(&rig, None, Vec::new());
    while chore.is_due(LATER) {
        chore.step(LATER, &mut disks);
    }
    assert_eq!(disks.2, [(1, 'f'), (2, 'f'), (0, 'w'), (0, 'f')]);
    assert_eq!(unmarked(&rig), 16);
    // Where that fails it stays, also when the next flush does not.
    assert_eq!(rig.write(0, &[7; 512]), End::Ok);
    chore.step(LATER, &mut Flushed(&rig, Some(2), Vec::new()));
    assert_eq!(unmarked(&rig), 15);
    assert_eq!(status(&rig), "2 8:16 8:32 16/16 1 AF 3 disk 8:0 A");
    assert!(!chore.is_due(LATER));
}

#[test]
fn marks_stay_while_a_device_lacks_what_was_written() {
    let mut rig = Rig::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0 2 handle_errors keep_log");
    rig.fail(2, End::IoError);
    rig.fail(2, End::IoError);
    assert_eq!(rig.write(0, &[7; 512]), End::Ok);
    assert_eq!(rig.write(512, &[7; 512]), End::Ok, "the other device alone");
    let chore = chore(&rig);
    while chore.is_due(LATER) {
        chore.step(LATER, &mut Below(&rig, None));
    }
    assert_eq!(unmarked(&rig), 14);
}

/// Two writes to one region at once: the second one may not go while the mark is still on its way.
#[test]
fn no_write_goes_before_the_mark_of_its_region() {
    let leg = || super::standing::Leg::new(1, block::Sectors(0), "leg", "leg");
    let words = ["disk", "3", "log", "64", "nosync"];
    let log = super::words::LogWords::read(&words, block::Sectors(1024)).unwrap().0;
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
    shared.log_ends(true);
    assert!(!shared.is_logged(3));
    shared.mark(3, Nanos(1));
    assert!(!shared.is_logged(3), "only in memory");
    write(&mut bytes);
    assert!(!shared.is_logged(3), "on its way");
    shared.mark(4, Nanos(1));
    shared.log_ends(true);
    assert!(shared.is_logged(3) && !shared.is_logged(4), "the log says nothing of what came after");
    // Another mark is written meanwhile: the region that has its own does not wait for that.
    write(&mut bytes);
    assert!(shared.is_logged(3));
    shared.log_ends(true);
    assert!(shared.is_logged(4));
}

#[test]
fn a_discard_that_fails_is_no_fault_of_a_device() {
    for (op, status) in
        [(Op::Discard, End::NotSupported), (Op::Discard, End::IoError), (Op::WriteZeroes, End::NotSupported)]
    {
        let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0");
        assert_eq!(rig.write(0, &[1; 4096]), End::Ok);
        rig.fail(1, status);
        rig.fail(1, status);
        assert_eq!(rig.run(op, 0, 8).0, End::NotSupported, "{op:?} {status:?}");
        assert_eq!(self::status(&rig), "2 8:0 8:16 16/16 1 AA 1 core");
        assert_ne!(rig.content(0, 0, 4096), rig.content(1, 0, 4096), "one of them has it");
        assert_eq!(rig.write(0, &[1; 512]), End::Ok, "its region was left");
        chore(&rig).step(LATER, &mut Below(&rig, None));
        assert_eq!(rig.content(0, 0, 4096), rig.content(1, 0, 4096));
        assert!(!chore(&rig).is_due(LATER));
    }
}

#[test]
fn what_passes_is_waited_for() {
    for passing in [End::Again, End::Resource, End::DeviceResource] {
        let mut rig = Rig::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
        for disk in [0, 1, 1, 1, 2] {
            rig.fail(disk, passing);
        }
        assert_eq!(rig.write(0, &[7; 512]), End::Ok);
        rig.fail(1, passing);
        rig.fail(1, passing);
        assert_eq!(rig.read(0, 512), (End::Ok, vec![7; 512]));
        assert_eq!(rig.content(2, 0, 512), [7; 512]);
        assert_eq!(status(&rig), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 A", "{passing:?}");
    }
}

/// Disks that ask for a request again get it, whole, and no device is taken for a bad one.
#[test]
fn what_is_for_the_next_table_is_asked_for_again() {
    for disk in [0, 1, 2] {
        let mut rig = Rig::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
        rig.fail(disk, End::Requeue);
        assert_eq!(rig.write(0, &[7; 512]), End::Ok);
        assert!(status(&rig).ends_with("1 AA 3 disk 8:0 A"), "{}", status(&rig));
        let chore = chore(&rig);
        while chore.is_due(LATER) {
            chore.step(LATER, &mut Below(&rig, None));
        }
        assert_eq!([1, 2].map(|disk| rig.content(disk, 0, 1)[0]), [7, 7]);
        assert_eq!(status(&rig), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 A");
    }
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    rig.fail(0, End::Requeue);
    assert_eq!(rig.read(0, 512).0, End::Ok);
    assert_eq!(status(&rig), "2 8:0 8:16 16/16 1 AA 1 core");
}

#[test]
fn what_a_medium_lost_is_read_elsewhere() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    assert_eq!(rig.write(0, &[7; 512]), End::Ok);
    rig.fail(0, End::Medium);
    assert_eq!(rig.read(0, 512), (End::Ok, vec![7; 512]));
    assert_eq!(status(&rig), "2 8:0 8:16 16/16 1 RA 1 core");
}

#[test]
fn a_log_is_read_when_its_table_is_put_to_use() {
    let mut old = Rig::new("mirror", "disk 3 log 64 nosync 2 a 0 b 0");
    let loaded = super::super::testing::made("mirror", "disk 2 log 64 2 a 0 b 0");
    assert_eq!(old.write(0, &[7; 512]), End::Ok);
    assert_eq!(unmarked(&old), 15);
    old.target.presuspend(true);
    assert!(!chore(&old).is_due(LATER), "the log is the next table's");
    loaded.prepare(&mut Below(&old, None)).unwrap();
    let status = loaded.status(Status::Info, &names(&["8:0", "8:16", "8:32"]));
    assert_eq!(status, "2 8:16 8:32 15/16 1 AA 3 disk 8:0 A", "what was written after it was made is marked");
}
