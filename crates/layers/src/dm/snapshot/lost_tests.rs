//! Snapshots that are lost: nothing makes them wrong before their headers say so.

use super::super::Status;
use super::super::rig::Rig;
use super::super::testing::names;
use block::{Flags, Op, Status as End};

/// A snapshot with chunks of 8 sectors that has a copy of chunk 0, and its origin. The origin holds its chunks' numbers plus
/// 1. Names are a test's own: origins are known by them.
fn pair(name: &str) -> (Rig, Rig) {
    let snapshot = Rig::new("snapshot", &line(name));
    for (chunk, bytes) in snapshot.disks[0].borrow_mut().content.chunks_mut(4096).enumerate() {
        bytes.fill((chunk as u8).wrapping_add(1));
    }
    let mut origin = snapshot.beside("snapshot-origin", &format!("{name}-origin"));
    origin.chores.extend(snapshot.chores.iter().cloned());
    assert_eq!(origin.write(0, &[9; 512]), End::Ok);
    (snapshot, origin)
}

fn line(name: &str) -> String {
    format!("{name}-origin {name}-cow P 8")
}

fn status(rig: &Rig) -> String {
    rig.target.status(Status::Info, &names(&["a", "b"]))
}

/// What the header says: 1 valid.
fn header(rig: &Rig) -> u8 {
    rig.content(1, 0, 5)[4]
}

#[test]
fn an_origin_fails_what_would_make_a_snapshot_wrong_until_the_header_is_written() {
    let (mut snapshot, mut origin) = pair("stuck");
    assert!(snapshot.target.notices().is_empty());
    origin.break_disk(1, true);
    let before = origin.ring.time;
    assert_eq!(origin.write(16, &[9; 512]), End::IoError);
    let waited = origin.ring.time.since(before);
    assert!((5_000_000_000..7_000_000_000).contains(&waited), "{waited}: it is tried for a while");
    assert_eq!((status(&snapshot).as_str(), header(&snapshot)), ("Invalid", 1));
    assert_eq!(origin.content(0, 16, 512), [3; 512], "the origin is as it was");
    let before = origin.ring.time;
    assert_eq!(origin.write(24, &[9; 512]), End::IoError);
    assert_eq!(origin.ring.time, before, "at once");
    assert_eq!(origin.read(16, 512), (End::Ok, vec![3; 512]));
    assert_eq!(origin.write(1, &[8; 512]), End::Ok, "the snapshot has a copy of that");
    let notice = snapshot.target.notices().join("");
    assert!(notice.contains("stuck-cow is lost, and its header cannot be written"), "{notice}");
    assert!(snapshot.target.notices().is_empty(), "once");
    assert_eq!((snapshot.target.describe().len(), origin.target.describe().len()), (1, 1));
    // The device takes writes again.
    origin.break_disk(1, false);
    origin.ring.time = origin.ring.time.after(1_000_000_000);
    assert_eq!(origin.write(16, &[9; 512]), End::IoError, "the header is not written yet");
    assert_eq!(origin.write(16, &[9; 512]), End::Ok);
    assert_eq!((status(&snapshot).as_str(), header(&snapshot)), ("Invalid", 0));
    assert!(origin.target.describe().is_empty());
    assert_eq!(snapshot.target.notices().len(), 1, "lost for good");
    assert_eq!(snapshot.read(0, 512).0, End::IoError);
    drop(origin);
    assert_eq!(status(&snapshot.again("snapshot", &line("stuck"))), "Invalid");
}

#[test]
fn a_snapshot_whose_header_was_never_written_is_right_after_a_restart() {
    let (snapshot, mut origin) = pair("right");
    origin.break_disk(1, true);
    assert_eq!(origin.write(16, &[9; 512]), End::IoError);
    assert_eq!(origin.write(1, &[8; 512]), End::Ok);
    origin.break_disk(1, false);
    drop(origin);
    let mut snapshot = snapshot.again("snapshot", &line("right"));
    assert_ne!(status(&snapshot), "Invalid");
    assert_eq!(snapshot.read(0, 1024), (End::Ok, vec![1; 1024]));
    assert_eq!(snapshot.read(16, 512), (End::Ok, vec![3; 512]));
}

#[test]
fn a_header_that_is_written_at_last_lets_a_write_go_on() {
    let (snapshot, mut origin) = pair("patient");
    // The copy, then three attempts.
    (0..4).for_each(|_| origin.fail(1, End::IoError));
    assert_eq!(origin.write(16, &[9; 512]), End::Ok);
    assert_eq!((status(&snapshot).as_str(), header(&snapshot)), ("Invalid", 0));
}

#[test]
fn an_origin_goes_on_when_a_stuck_snapshot_is_removed() {
    let (snapshot, mut origin) = pair("freed");
    origin.break_disk(1, true);
    assert_eq!(origin.write(16, &[9; 512]), End::IoError);
    drop(snapshot);
    origin.chores.clear();
    assert_eq!(origin.write(16, &[9; 512]), End::Ok);
}

#[test]
fn a_snapshot_that_is_passed_by_is_not_wrong_either() {
    let (snapshot, mut origin) = pair("passed");
    let late = Rig::over("snapshot", "passed-origin passed-late P 8", snapshot.kept(), true).unwrap();
    origin.chores.extend(late.chores.iter().cloned());
    let mut disks = Rig::over("snapshot", "passed-origin passed-late P 8", late.kept(), true).unwrap();
    disks.break_disk(1, true);
    assert_eq!(origin.write(16, &[9; 512]), End::IoError);
    assert_eq!((status(&late).as_str(), header(&late)), ("Invalid", 1));
    assert_eq!(origin.content(0, 16, 512), [3; 512]);
}

#[test]
fn a_sync_that_fails_loses_the_snapshot_as_a_later_one_cannot_be_trusted() {
    for (op, flags, end, said) in [
        (Op::Flush, Flags::NONE, End::IoError, "Invalid"),
        (Op::Flush, Flags::NONE, End::NoSpace, "Invalid"),
        (Op::Flush, Flags::NONE, End::Timeout, "Invalid"),
        (Op::Write, Flags::FUA, End::IoError, "Invalid"),
        (Op::Write, Flags::FUA, End::NoSpace, "24/8192 16"),
        (Op::Write, Flags::NONE, End::IoError, "24/8192 16"),
        (Op::Flush, Flags::NONE, End::NotSupported, "24/8192 16"),
    ] {
        let (mut snapshot, _origin) = pair(&format!("sync-{op:?}-{flags:?}-{end:?}"));
        snapshot.fail(1, end);
        let ended = match op {
            Op::Flush => snapshot.run(Op::Flush, 0, 0).0,
            _ => snapshot.write_with(0, &[7; 512], flags),
        };
        assert_eq!((ended, status(&snapshot).as_str()), (end, said), "{op:?} {flags:?}");
    }
}

#[test]
fn what_a_store_is_known_by_is_written_again_before_it_is_relied_on() {
    // A sync that failed leaves pages that read back, and that no later sync writes.
    let (mut snapshot, origin) = pair("rewritten");
    drop(origin);
    snapshot.disks[1].borrow_mut().written.clear();
    let (content, line) = (snapshot.content(1, 0, 4096 * 8), line("rewritten"));
    snapshot = snapshot.again("snapshot", &line);
    assert_eq!(snapshot.disks[1].borrow().written, [0, 8], "header and area");
    assert_eq!(snapshot.content(1, 0, 4096 * 8), content);
    snapshot.fail(1, End::IoError);
    assert_eq!(snapshot.write(16, &[1; 512]), End::IoError);
    assert_eq!(header(&snapshot), 0);
    snapshot.disks[1].borrow_mut().written.clear();
    snapshot = snapshot.again("snapshot", &line);
    assert_eq!((status(&snapshot).as_str(), &snapshot.disks[1].borrow().written[..]), ("Invalid", &[0][..]));
}
