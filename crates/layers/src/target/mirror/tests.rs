//! Mirrors: where data goes, what a failure does, what is copied, what the log says.

use super::super::chore::{Chore, Disks};
use super::super::rig::Rig;
use super::super::testing::{error, names};
use super::super::{Status, Target};
use block::{Bytes, Op, Status as End};
use std::io;
use std::sync::Arc;

fn status(rig: &Rig) -> String {
    rig.target.status(Status::Info, &names(&["8:0", "8:16", "8:32"]))
}

fn chore(rig: &Rig) -> Arc<dyn Chore> {
    Target::chore(&*rig.target).expect("a mirror has one")
}

/// The disks of a rig, as whoever looks after it has them.
struct Below<'a>(&'a Rig, Option<usize>);

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
    while chore.is_due() {
        chore.step(&mut Below(&rig, None));
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
    assert!(!chore(&rig).is_due());
    rig.target.resume();
    assert!(chore(&rig).is_due());
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
    assert!(!chore(&rig).is_due(), "there is nowhere to copy to");
}

#[test]
fn without_keep_log_a_failed_write_waits_for_the_next_table() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0 1 handle_errors");
    rig.fail(1, End::IoError);
    rig.fail(1, End::IoError);
    rig.submit(block::Request::new(Op::Discard, Bytes(0), Bytes(512)));
    rig.target.presuspend(false);
    assert_eq!(rig.drain(), [End::IoError]);
}

#[test]
fn when_all_fail_so_does_the_write() {
    let mut rig = Rig::new("mirror", "core 2 64 nosync 2 a 0 b 0");
    for disk in [0, 0, 1, 1] {
        rig.fail(disk, End::IoError);
    }
    assert_eq!(rig.write(0, &[3; 512]), End::IoError);
    assert_eq!(status(&rig), "2 8:0 8:16 16/16 1 AA 1 core");
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
    chore.step(&mut Below(&again, None));
    assert_eq!(status(&again), "2 8:16 8:32 16/16 1 AA 3 disk 8:0 A");
    // And the mark goes when nothing is written for a while.
    std::thread::sleep(std::time::Duration::from_millis(250));
    while chore.is_due() {
        chore.step(&mut Below(&again, None));
    }
    assert_eq!(again.content(0, 2, 2), [0xff, 0xff]);
}

#[test]
fn a_device_that_cannot_be_copied_to_is_out_of_sync() {
    let rig = Rig::new("mirror", "core 1 64 2 a 0 b 0");
    let chore = chore(&rig);
    chore.step(&mut Below(&rig, Some(1)));
    assert_eq!(status(&rig), "2 8:0 8:16 0/16 1 AS 1 core");
    assert!(!chore.is_due());
}
