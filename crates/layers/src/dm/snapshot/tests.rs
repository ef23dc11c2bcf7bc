//! Tests of snapshots and their origins: data after writes, and the content of the COW device.

use super::super::Status;
use super::super::harness::Harness;
use super::super::testing::{error, names};
use block::{Op, Sectors, Status as End};

/// A snapshot; each chunk of 8 sectors of the origin is filled with its number plus 1. Each test uses names
/// of its own, as the registry of origins is global.
fn harness(name: &str, rest: &str) -> Harness {
    let harness = Harness::new("snapshot", &format!("{name}-origin {name}-cow {rest}"));
    for (chunk, bytes) in harness.disks[0].borrow_mut().content.chunks_mut(4096).enumerate() {
        bytes.fill((chunk as u8).wrapping_add(1));
    }
    harness
}

fn status(harness: &Harness) -> String {
    harness.target.status(Status::Info, &names(&["a", "b"]))
}

#[test]
fn table_status_repeats_the_line() {
    let shown = names(&["8:0", "8:16"]);
    for (rest, table) in [
        ("P 8", "P 8"),
        ("p 8 0", "P 8"),
        ("PO 16", "PO 16"),
        ("N 8 1 discard_zeroes_cow", "N 8 1 discard_zeroes_cow"),
        (
            "N 8 2 discard_passdown_origin DISCARD_zeroes_cow",
            "N 8 2 discard_zeroes_cow discard_passdown_origin",
        ),
    ] {
        let harness = Harness::new("snapshot", &format!("line-origin line-cow {rest}"));
        assert_eq!(harness.target.status(Status::Table, &shown), format!("8:0 8:16 {table}"));
    }
    assert_eq!(status(&Harness::new("snapshot", "line-origin line-cow P 8")), "16/8192 16");
    assert_eq!(status(&Harness::new("snapshot", "line-origin line-cow N 8")), "0/8192 0");
}

#[test]
fn bad_arguments_are_refused_with_the_kernels_text() {
    for (args, text) in [
        ("a b P", "requires 4 or more arguments"),
        ("missing b P 8", "Cannot get origin device: missing: no such device"),
        ("a missing P 8", "Cannot get COW device: missing: no such device"),
        ("a a P 8", "COW device cannot be the same as origin device"),
        ("a b X 8", "Couldn't create exception store"),
        ("a b P 7", "Couldn't create exception store"),
        ("a b P x", "Couldn't create exception store"),
        ("a b N 0", "Chunk size not set"),
        ("a b P 8 3 a b c", "Invalid number of feature arguments"),
        ("a b P 8 1 sleep", "Unrecognised feature requested"),
        (
            "a b P 8 1 discard_passdown_origin",
            "discard_passdown_origin feature depends on discard_zeroes_cow",
        ),
    ] {
        assert_eq!(error("snapshot", args), text, "{args}");
    }
    assert_eq!(error("snapshot-origin", "a b"), "incorrect number of arguments");
    assert_eq!(error("snapshot-origin", "missing"), "Cannot get target device: missing: no such device");
}

#[test]
fn a_line_longer_than_its_origin_is_refused_before_memory_is_allocated() {
    use super::super::{TargetRange, target_types, testing::FakeDevices};
    let place = TargetRange { start: Sectors(0), len: Sectors(1 << 53) };
    let kinds = target_types::<crate::testing::Clock>();
    let kind = kinds.iter().find(|kind| kind.row.name == "snapshot").unwrap();
    let error = (kind.construct)(place, &["a", "b", "P", "8"], &mut FakeDevices::default()).err().unwrap();
    assert!(error.to_string().starts_with("a too small for target: start=0"), "{error}");
}

#[test]
fn an_empty_store_without_a_chunk_size_gets_the_kernels_default() {
    let harness = Harness::new("snapshot", "sizeless-origin sizeless-cow P 0");
    assert_eq!(harness.target.status(Status::Table, &names(&["a", "b"])), "a b P 32");
}

#[test]
fn writes_go_to_the_cow_device_and_other_data_comes_from_the_origin() {
    for kind in ["P", "N"] {
        let mut harness = harness(&format!("writes{kind}"), &format!("{kind} 8"));
        assert_eq!(harness.read(16, 512), (End::Ok, vec![3; 512]));
        assert_eq!(harness.write(17, &[9; 512]), End::Ok);
        assert_eq!(harness.read(16, 1536), (End::Ok, [[3; 512], [9; 512], [3; 512]].concat()));
        assert_eq!(harness.write(18, &[8; 512]), End::Ok, "into the copy");
        assert_eq!(harness.write(4, &[7; 4096]), End::Ok, "over two chunks");
        let mut wanted = vec![1; 2048];
        wanted.extend([7; 4096]);
        wanted.extend([2; 2048]);
        wanted.extend([[3; 512], [9; 512], [8; 512], [3; 512]].concat());
        assert_eq!(harness.read(0, 10240), (End::Ok, wanted));
        assert_eq!(harness.content(0, 17, 512), [3; 512], "the origin is unchanged");
        assert_eq!(harness.ring.memory.live, 0);
    }
}

#[test]
fn a_write_of_a_whole_chunk_does_not_read_the_origin() {
    let mut harness = harness("whole", "P 8");
    assert_eq!(harness.write(8, &[9; 4096]), End::Ok);
    harness.disks[0].borrow_mut().content.fill(0);
    assert_eq!(harness.read(8, 4096), (End::Ok, vec![9; 4096]));
}

#[test]
fn the_store_has_the_kernels_format_and_is_read_after_a_restart() {
    let mut harness = harness("disk", "P 8");
    assert_eq!(status(&harness), "16/8192 16");
    for (sector, value) in [(40, 5), (8, 6)] {
        assert_eq!(harness.write(sector, &[value; 512]), End::Ok);
    }
    assert_eq!(status(&harness), "32/8192 16");
    assert_eq!(harness.content(1, 0, 16), [b'S', b'n', b'A', b'p', 1, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0]);
    let mut area = [0u8; 48];
    (area[0], area[8], area[16], area[24]) = (5, 2, 1, 3);
    assert_eq!(harness.content(1, 8, 48), area);
    assert_eq!(harness.content(1, 16, 512), [5; 512]);
    assert_eq!(harness.content(1, 17, 512), [6; 512], "the rest of chunk 5 of the origin");
    let mut harness = harness.restart("snapshot", "disk-origin disk-cow P 64");
    assert_eq!(harness.target.status(Status::Table, &names(&["a", "b"])), "a b P 8", "the device says 8");
    assert_eq!(status(&harness), "32/8192 16");
    assert_eq!(harness.read(40, 1024), (End::Ok, [[5; 512], [6; 512]].concat()));
    assert_eq!(harness.read(8, 512), (End::Ok, vec![6; 512]));
    assert_eq!(harness.write(16, &[7; 512]), End::Ok);
    assert_eq!(status(&harness), "40/8192 16");
}

#[test]
fn many_exceptions_fill_areas() {
    let mut harness = harness("areas", "P 1");
    for sector in 0..100 {
        assert_eq!(harness.write(sector * 3, &[sector as u8 + 100; 512]), End::Ok, "{sector}");
    }
    let before = status(&harness);
    // 100 copies of a sector, areas of 32 pairs: header, four areas.
    assert_eq!(before, "105/8192 5");
    let mut harness = harness.restart("snapshot", "areas-origin areas-cow P 1");
    assert_eq!(status(&harness), before);
    for sector in 0..100 {
        assert_eq!(harness.read(sector * 3, 512), (End::Ok, vec![sector as u8 + 100; 512]), "{sector}");
    }
}

#[test]
fn a_write_completes_after_its_data_and_exception_are_on_disk() {
    let mut harness = harness("order", "P 8");
    let (_, seen) = harness.run(Op::Write, 0, 1);
    let sent: Vec<_> = seen.iter().map(|&(disk, op, sector, _)| (disk, op, sector)).collect();
    let wanted = [(0, Op::Read, 0), (1, Op::Write, 16), (1, Op::Flush, 0), (1, Op::Write, 8)];
    assert_eq!(sent, wanted);
}

#[test]
fn the_next_area_is_zeroed_before_a_full_area_is_written() {
    let mut harness = harness("next", "P 1");
    for sector in 0..31 {
        assert_eq!(harness.write(sector, &[9; 512]), End::Ok, "{sector}");
    }
    let (_, seen) = harness.run(Op::Write, 31, 1);
    let sent: Vec<_> = seen.iter().map(|&(_, op, sector, _)| (op, sector)).collect();
    assert_eq!(sent, [(Op::Write, 33), (Op::Write, 34), (Op::Flush, 0), (Op::Write, 1)]);
}

#[test]
fn a_failed_cow_device_makes_the_snapshot_invalid() {
    let mut harness = harness("lost", "N 32");
    harness.fail(1, End::IoError);
    assert_eq!(harness.write(0, &[1; 512]), End::IoError);
    assert_eq!(status(&harness), "Invalid");
    assert_eq!(harness.read(0, 512).0, End::IoError);
    assert_eq!(harness.target.events(), 1);
    let mut harness = self::harness("failed", "P 8");
    assert_eq!(harness.write(0, &[1; 512]), End::Ok);
    harness.fail(1, End::IoError);
    assert_eq!(harness.write(8, &[1; 512]), End::IoError);
    assert_eq!(harness.content(1, 0, 8), [b'S', b'n', b'A', b'p', 0, 0, 0, 0], "and its header says so");
    let harness = harness.restart("snapshot", "failed-origin failed-cow P 8");
    assert_eq!(status(&harness), "Invalid");
}

#[test]
fn a_full_store_is_invalid_or_overflows() {
    for (kind, expected, reads) in [("P", "Invalid", End::IoError), ("PO", "Overflow", End::Ok)] {
        let name = format!("full{kind}");
        let harness = harness(&name, &format!("{kind} 8"));
        harness.disks[1].borrow_mut().content.truncate(4096 * 5);
        let mut harness = harness.restart("snapshot", &format!("{name}-origin {name}-cow {kind} 8"));
        for chunk in 0..3 {
            assert_eq!(harness.write(chunk * 8, &[9; 512]), End::Ok, "{chunk}");
        }
        assert_eq!(harness.write(64, &[9; 512]), End::IoError);
        assert_eq!(status(&harness), expected);
        assert_eq!(harness.read(0, 512).0, reads);
    }
}

#[test]
fn a_discard_zeroes_the_copy() {
    let mut harness = harness("discard", "P 8 2 discard_zeroes_cow discard_passdown_origin");
    assert_eq!(harness.write(0, &[9; 4096]), End::Ok);
    assert_eq!(harness.run(Op::Discard, 0, 8).0, End::Ok);
    assert_eq!(harness.read(0, 512), (End::Ok, vec![0; 512]));
    assert_eq!(harness.run(Op::Discard, 8, 8).1[0], (0, Op::Discard, 8, 8));
    let mut harness = self::harness("nodiscard", "P 8");
    assert_eq!(harness.run(Op::Discard, 0, 8).0, End::NotSupported);
    assert!(!harness.profile.abilities.discard && !harness.profile.abilities.write_zeroes);
}

#[test]
fn a_write_to_the_origin_copies_the_old_chunk_first() {
    let mut snapshot = harness("copied", "P 8");
    let mut origin = snapshot.with_same_disks("snapshot-origin", "copied-origin");
    assert_eq!(origin.target.status(Status::Table, &names(&["8:0", "8:16"])), "8:0");
    assert_eq!(origin.write(17, &[9; 512]), End::Ok);
    assert_eq!(origin.read(16, 1024), (End::Ok, [[3; 512], [9; 512]].concat()));
    assert_eq!(snapshot.read(16, 1024), (End::Ok, vec![3; 1024]));
    assert_eq!(snapshot.write(18, &[7; 512]), End::Ok);
    assert_eq!(origin.run(Op::Discard, 0, 24).0, End::Ok);
    assert_eq!(snapshot.read(0, 512), (End::Ok, vec![1; 512]));
    assert_eq!(snapshot.read(18, 512), (End::Ok, vec![7; 512]));
    assert_eq!(origin.read(0, 12288), (End::Ok, vec![0; 12288]));
    assert_eq!(status(&snapshot), "40/8192 16");
    assert_eq!((origin.ring.memory.live, snapshot.ring.memory.live), (0, 0));
}

#[test]
fn a_snapshot_that_the_origin_does_not_know_becomes_invalid() {
    let first = harness("late", "P 8");
    let mut origin = first.with_same_disks("snapshot-origin", "late-origin");
    let second = Harness::over("snapshot", "late-origin late-cow2 N 8", first.named_disks(), true).unwrap();
    let third = Harness::over("snapshot", "late-origin late-cow3 P 8", first.named_disks(), true).unwrap();
    origin.background.extend(third.background.iter().cloned());
    assert_eq!(origin.write(0, &[9; 512]), End::Ok);
    assert_eq!((status(&first).as_str(), status(&second).as_str()), ("24/8192 16", "Invalid"));
    assert_eq!(third.content(1, 0, 8), [b'S', b'n', b'A', b'p', 0, 0, 0, 0], "before the write completes");
    assert_eq!(status(&third.restart("snapshot", "late-origin late-cow3 P 8")), "Invalid");
}

#[test]
fn the_origin_is_not_written_before_the_header_says_invalid() {
    let mut snapshot = harness("header", "P 8");
    let mut origin = snapshot.with_same_disks("snapshot-origin", "header-origin");
    let background = std::mem::take(&mut snapshot.background);
    snapshot.fail(1, End::IoError);
    assert_eq!(snapshot.write(0, &[1; 512]), End::IoError);
    assert_eq!(snapshot.content(1, 0, 5)[4], 1, "the header is not written yet");
    origin.background = background;
    let (_, seen) = origin.run(Op::Write, 0, 1);
    assert_eq!(seen, [(0, Op::Write, 0, 1)]);
    assert_eq!(snapshot.content(1, 0, 5)[4], 0);
}

#[test]
fn a_table_loaded_while_another_is_active_has_the_writes_of_that_one() {
    for kind in ["P", "N"] {
        let name = format!("reload{kind}");
        let line = format!("{name}-origin {name}-cow {kind} 8");
        let mut before = harness(&name, &format!("{kind} 8"));
        let mut next = before.with_same_disks("snapshot", &line);
        assert_eq!(before.write(8, &[0x22; 512]), End::Ok);
        let usage = status(&before);
        drop(before);
        assert_eq!(next.read(8, 1024), (End::Ok, [[0x22; 512], [2; 512]].concat()), "{kind}");
        assert_eq!(status(&next), usage);
        assert_eq!(next.write(40, &[1; 512]), End::Ok);
        assert_eq!(next.read(8, 512), (End::Ok, vec![0x22; 512]));
    }
}

#[test]
fn a_store_in_use_is_refused_to_another_snapshot() {
    let first = harness("owned", "P 8");
    let refused =
        Harness::over("snapshot", "other-origin owned-cow P 8", first.named_disks(), true).err().unwrap();
    assert_eq!(refused.to_string(), "Unable to hand over the store of another snapshot");
    assert!(Harness::over("snapshot", "owned-origin owned-cow N 8", first.named_disks(), true).is_err());
}

#[test]
fn nothing_is_copied_for_a_removed_snapshot() {
    let snapshot = harness("removed", "P 8");
    let mut origin = snapshot.with_same_disks("snapshot-origin", "removed-origin");
    assert_eq!(origin.run(Op::Write, 0, 1).1[0], (0, Op::Read, 0, 8));
    drop(snapshot);
    assert_eq!(origin.run(Op::Write, 8, 1).1, [(0, Op::Write, 8, 1)]);
    let mut origin = origin.with_same_disks("snapshot-origin", "removed-origin");
    assert_eq!((origin.disks.len(), origin.run(Op::Write, 16, 1).1.len()), (1, 1));
}

#[test]
fn temporary_errors_do_not_make_a_snapshot_invalid() {
    for (disk, after) in [(0, 0), (1, 0), (1, 1), (1, 2)] {
        for status in [End::Requeue, End::Again, End::Resource] {
            let name = format!("again{disk}{after}{status:?}");
            let mut harness = harness(&name, "P 8");
            (0..after).for_each(|_| harness.fail(disk, End::Ok));
            harness.fail(disk, status);
            // The queue itself resubmits a request that ends with Requeue.
            assert_eq!(harness.write(8, &[9; 512]), End::Ok, "{name}");
            assert_eq!(harness.read(8, 1024), (End::Ok, [[9; 512], [2; 512]].concat()));
            assert_eq!(harness.ring.memory.live, 0);
            let mut harness = harness.restart("snapshot", &format!("{name}-origin {name}-cow P 8"));
            assert_eq!(harness.read(8, 1024), (End::Ok, [[9; 512], [2; 512]].concat()), "{name}: on disk");
        }
    }
}

#[test]
fn a_store_is_full_if_no_area_fits_after_a_full_one() {
    let harness = harness("end", "P 1");
    harness.disks[1].borrow_mut().content.truncate(34 * 512);
    let mut harness = harness.restart("snapshot", "end-origin end-cow PO 1");
    for sector in 0..32 {
        assert_eq!(harness.write(sector, &[9; 512]), End::Ok, "{sector}");
    }
    assert_eq!(harness.write(32, &[9; 512]), End::IoError);
    assert_eq!(status(&harness), "Overflow");
    let mut harness = harness.restart("snapshot", "end-origin end-cow PO 1");
    assert_eq!(harness.read(31, 1024), (End::Ok, [[9; 512], [5; 512]].concat()));
    assert!(status(&harness).starts_with("34/34 "));
}

#[test]
fn a_full_store_does_not_stop_the_origin() {
    let snapshot = harness("stop", "P 8");
    let mut origin = snapshot.with_same_disks("snapshot-origin", "stop-origin");
    origin.background.extend(snapshot.background.iter().cloned());
    origin.fail(1, End::NoSpace);
    assert_eq!(origin.write(0, &[9; 512]), End::Ok);
    assert_eq!(origin.content(0, 0, 512), [9; 512]);
    assert_eq!(status(&snapshot), "Invalid");
}
