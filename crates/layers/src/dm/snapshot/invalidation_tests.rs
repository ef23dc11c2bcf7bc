//! Tests of invalid snapshots: the origin does not change before the header says so.

use super::super::Status;
use super::super::harness::Harness;
use super::super::testing::names;
use block::{Flags, Op, Request, Sectors, Status as End};

/// A snapshot with chunks of 8 sectors and a copy of chunk 0, and its origin. Each chunk of the origin is
/// filled with its number plus 1. Each test uses names of its own, as the registry of origins is global.
fn pair(name: &str) -> (Harness, Harness) {
    let snapshot = Harness::new("snapshot", &line(name));
    for (chunk, bytes) in snapshot.disks[0].borrow_mut().content.chunks_mut(4096).enumerate() {
        bytes.fill((chunk as u8).wrapping_add(1));
    }
    let mut origin = snapshot.with_same_disks("snapshot-origin", &format!("{name}-origin"));
    origin.background.extend(snapshot.background.iter().cloned());
    assert_eq!(origin.write(0, &[9; 512]), End::Ok);
    (snapshot, origin)
}

fn line(name: &str) -> String {
    format!("{name}-origin {name}-cow P 8")
}

fn status(harness: &Harness) -> String {
    harness.target.status(Status::Info, &names(&["a", "b"]))
}

/// The `valid` field of the header.
fn header(harness: &Harness) -> u8 {
    harness.content(1, 0, 5)[4]
}

#[test]
fn writes_that_need_a_copy_fail_until_the_header_is_written() {
    let (mut snapshot, mut origin) = pair("stuck");
    assert!(snapshot.target.notices().is_empty());
    origin.break_disk(1, true);
    let before = origin.ring.now;
    assert_eq!(origin.write(16, &[9; 512]), End::IoError);
    let waited = origin.ring.now.since(before);
    assert!((5_000_000_000..7_000_000_000).contains(&waited), "{waited}: retried for 5 s");
    assert_eq!((status(&snapshot).as_str(), header(&snapshot)), ("Invalid", 1));
    assert_eq!(origin.content(0, 16, 512), [3; 512], "the origin is unchanged");
    let before = origin.ring.now;
    assert_eq!(origin.write(24, &[9; 512]), End::IoError);
    assert_eq!(origin.ring.now, before, "at once");
    assert_eq!(origin.read(16, 512), (End::Ok, vec![3; 512]));
    assert_eq!(origin.write(1, &[8; 512]), End::Ok, "the snapshot has a copy of this chunk");
    let notice = snapshot.target.notices().join("");
    assert!(notice.contains("stuck-cow is invalid, and its header cannot be written"), "{notice}");
    assert!(snapshot.target.notices().is_empty(), "once");
    assert_eq!((snapshot.target.describe().len(), origin.target.describe().len()), (1, 1));
    // The device accepts writes again.
    origin.break_disk(1, false);
    origin.ring.now = origin.ring.now.after(1_000_000_000);
    assert_eq!(origin.write(16, &[9; 512]), End::IoError, "the header is not written yet");
    assert_eq!(origin.write(16, &[9; 512]), End::Ok);
    assert_eq!((status(&snapshot).as_str(), header(&snapshot)), ("Invalid", 0));
    assert!(origin.target.describe().is_empty());
    assert_eq!(snapshot.target.notices().len(), 1, "invalid for good");
    assert_eq!(snapshot.read(0, 512).0, End::IoError);
    drop(origin);
    assert_eq!(status(&snapshot.restart("snapshot", &line("stuck"))), "Invalid");
}

#[test]
fn a_snapshot_whose_header_was_never_written_is_valid_and_correct_after_a_restart() {
    let (snapshot, mut origin) = pair("right");
    origin.break_disk(1, true);
    assert_eq!(origin.write(16, &[9; 512]), End::IoError);
    assert_eq!(origin.write(1, &[8; 512]), End::Ok);
    origin.break_disk(1, false);
    drop(origin);
    let mut snapshot = snapshot.restart("snapshot", &line("right"));
    assert_ne!(status(&snapshot), "Invalid");
    assert_eq!(snapshot.read(0, 1024), (End::Ok, vec![1; 1024]));
    assert_eq!(snapshot.read(16, 512), (End::Ok, vec![3; 512]));
}

#[test]
fn a_write_completes_once_the_header_is_written_after_retries() {
    let (snapshot, mut origin) = pair("patient");
    // The copy, then three attempts.
    (0..4).for_each(|_| origin.fail(1, End::IoError));
    assert_eq!(origin.write(16, &[9; 512]), End::Ok);
    assert_eq!((status(&snapshot).as_str(), header(&snapshot)), ("Invalid", 0));
}

#[test]
fn a_write_that_waits_for_the_header_is_woken_and_sets_no_timer() {
    let (_snapshot, mut origin) = pair("woken");
    let background = std::mem::take(&mut origin.background);
    origin.fail(1, End::IoError);
    origin.submit(Request::new(Op::WriteZeroes, Sectors(16).bytes(), Sectors(1).bytes()));
    (0..4).for_each(|_| origin.turn());
    assert_eq!((origin.in_flight(), origin.ring.timers()), (1, 0));
    let before = origin.ring.now;
    for (work, mut disks) in background {
        work.step(before, &mut disks);
    }
    origin.turn();
    assert_eq!(origin.drain(), [End::Ok]);
    assert_eq!((origin.ring.now, header(&origin)), (before, 0));
}

#[test]
fn a_write_to_the_origin_is_woken_by_the_end_of_a_read_of_the_snapshot() {
    let (snapshot, mut origin) = pair("reader");
    let lease = super::registry::find("reader-cow").expect("in use");
    let store = &lease.member.store;
    store.read_begins(2);
    origin.submit(Request::new(Op::WriteZeroes, Sectors(16).bytes(), Sectors(1).bytes()));
    (0..8).for_each(|_| origin.turn());
    assert_eq!((origin.in_flight(), origin.ring.timers()), (1, 0));
    assert_eq!(origin.content(0, 16, 512), [3; 512]);
    store.read_ends(2, None);
    origin.turn();
    assert_eq!(origin.drain(), [End::Ok]);
    drop(snapshot);
}

#[test]
fn writes_succeed_after_a_snapshot_with_a_failing_header_is_removed() {
    let (snapshot, mut origin) = pair("freed");
    origin.break_disk(1, true);
    assert_eq!(origin.write(16, &[9; 512]), End::IoError);
    drop(snapshot);
    origin.background.clear();
    assert_eq!(origin.write(16, &[9; 512]), End::Ok);
}

#[test]
fn a_write_fails_while_the_header_of_an_unknown_snapshot_cannot_be_written() {
    let (snapshot, mut origin) = pair("passed");
    let late =
        Harness::over("snapshot", "passed-origin passed-late P 8", snapshot.named_disks(), true).unwrap();
    origin.background.extend(late.background.iter().cloned());
    let mut disks =
        Harness::over("snapshot", "passed-origin passed-late P 8", late.named_disks(), true).unwrap();
    disks.break_disk(1, true);
    assert_eq!(origin.write(16, &[9; 512]), End::IoError);
    assert_eq!((status(&late).as_str(), header(&late)), ("Invalid", 1));
    assert_eq!(origin.content(0, 16, 512), [3; 512]);
}

#[test]
fn a_failed_flush_or_fua_write_makes_the_snapshot_invalid() {
    for (op, flags, end, expected) in [
        (Op::Flush, Flags::empty(), End::IoError, "Invalid"),
        (Op::Flush, Flags::empty(), End::NoSpace, "Invalid"),
        (Op::Flush, Flags::empty(), End::Timeout, "Invalid"),
        (Op::Write, Flags::FUA, End::IoError, "Invalid"),
        (Op::Write, Flags::FUA, End::NoSpace, "24/8192 16"),
        (Op::Write, Flags::empty(), End::IoError, "24/8192 16"),
        (Op::Flush, Flags::empty(), End::NotSupported, "24/8192 16"),
    ] {
        let (mut snapshot, _origin) = pair(&format!("sync-{op:?}-{flags:?}-{end:?}"));
        snapshot.fail(1, end);
        let ended = match op {
            Op::Flush => snapshot.run(Op::Flush, 0, 0).0,
            _ => snapshot.write_with(0, &[7; 512], flags),
        };
        assert_eq!((ended, status(&snapshot).as_str()), (end, expected), "{op:?} {flags:?}");
    }
}

#[test]
fn header_and_last_area_are_rewritten_when_a_store_is_opened() {
    // Pages whose writeback failed read back, but no later flush writes them.
    let (mut snapshot, origin) = pair("rewritten");
    drop(origin);
    snapshot.disks[1].borrow_mut().written.clear();
    let (content, line) = (snapshot.content(1, 0, 4096 * 8), line("rewritten"));
    snapshot = snapshot.restart("snapshot", &line);
    assert_eq!(snapshot.disks[1].borrow().written, [0, 8], "header and area");
    assert_eq!(snapshot.content(1, 0, 4096 * 8), content);
    snapshot.fail(1, End::IoError);
    assert_eq!(snapshot.write(16, &[1; 512]), End::IoError);
    assert_eq!(header(&snapshot), 0);
    snapshot.disks[1].borrow_mut().written.clear();
    snapshot = snapshot.restart("snapshot", &line);
    assert_eq!((status(&snapshot).as_str(), &snapshot.disks[1].borrow().written[..]), ("Invalid", &[0][..]));
}
