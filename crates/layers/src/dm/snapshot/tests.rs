//! Snapshots and their origins: what is read after which write, and what lies on the COW device.

use super::super::Status;
use super::super::rig::Rig;
use super::super::testing::{error, names};
use block::{Op, Sectors, Status as End};

/// Chunks of 8 sectors; the origin holds its chunks' numbers plus 1. Names are a test's own: origins are known by them.
fn rig(name: &str, rest: &str) -> Rig {
    let rig = Rig::new("snapshot", &format!("{name}-origin {name}-cow {rest}"));
    for (chunk, bytes) in rig.disks[0].borrow_mut().content.chunks_mut(4096).enumerate() {
        bytes.fill((chunk as u8).wrapping_add(1));
    }
    rig
}

fn status(rig: &Rig) -> String {
    rig.target.status(Status::Info, &names(&["a", "b"]))
}

#[test]
fn a_line_is_read_and_shown_again() {
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
        let rig = Rig::new("snapshot", &format!("line-origin line-cow {rest}"));
        assert_eq!(rig.target.status(Status::Table, &shown), format!("8:0 8:16 {table}"));
    }
    assert_eq!(status(&Rig::new("snapshot", "line-origin line-cow P 8")), "16/8192 16");
    assert_eq!(status(&Rig::new("snapshot", "line-origin line-cow N 8")), "0/8192 0");
}

#[test]
fn what_is_wrong_is_said_in_the_kernels_words() {
    for (words, text) in [
        ("a b P", "requires 4 or more arguments"),
        ("missing b P 8", "Cannot get origin device: missing: it is not there"),
        ("a missing P 8", "Cannot get COW device: missing: it is not there"),
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
        assert_eq!(error("snapshot", words), text, "{words}");
    }
    assert_eq!(error("snapshot-origin", "a b"), "incorrect number of arguments");
    assert_eq!(error("snapshot-origin", "missing"), "Cannot get target device: missing: it is not there");
}

#[test]
fn a_line_longer_than_its_origin_is_refused_before_there_is_memory_for_it() {
    use super::super::{Place, kinds, testing::Shelf};
    let place = Place { start: Sectors(0), len: Sectors(1 << 53) };
    let kinds = kinds::<crate::testing::Clock>();
    let kind = kinds.iter().find(|kind| kind.name == "snapshot").unwrap();
    let error = (kind.make)(place, &["a", "b", "P", "8"], &mut Shelf::default()).err().unwrap();
    assert!(error.to_string().starts_with("a too small for target: start=0"), "{error}");
}

#[test]
fn an_empty_store_without_a_size_has_the_kernels_chunks() {
    let rig = Rig::new("snapshot", "sizeless-origin sizeless-cow P 0");
    assert_eq!(rig.target.status(Status::Table, &names(&["a", "b"])), "a b P 32");
}

#[test]
fn writes_go_to_the_cow_device_and_the_rest_is_the_origins() {
    for kept in ["P", "N"] {
        let mut rig = rig(&format!("writes{kept}"), &format!("{kept} 8"));
        assert_eq!(rig.read(16, 512), (End::Ok, vec![3; 512]));
        assert_eq!(rig.write(17, &[9; 512]), End::Ok);
        assert_eq!(rig.read(16, 1536), (End::Ok, [[3; 512], [9; 512], [3; 512]].concat()));
        assert_eq!(rig.write(18, &[8; 512]), End::Ok, "into the copy");
        assert_eq!(rig.write(4, &[7; 4096]), End::Ok, "over two chunks");
        let mut wanted = vec![1; 2048];
        wanted.extend([7; 4096]);
        wanted.extend([2; 2048]);
        wanted.extend([[3; 512], [9; 512], [8; 512], [3; 512]].concat());
        assert_eq!(rig.read(0, 10240), (End::Ok, wanted));
        assert_eq!(rig.content(0, 17, 512), [3; 512], "the origin is as it was");
        assert_eq!(rig.ring.live, 0);
    }
}

#[test]
fn a_whole_chunk_is_written_without_reading_the_origin() {
    let mut rig = rig("whole", "P 8");
    assert_eq!(rig.write(8, &[9; 4096]), End::Ok);
    rig.disks[0].borrow_mut().content.fill(0);
    assert_eq!(rig.read(8, 4096), (End::Ok, vec![9; 4096]));
}

#[test]
fn the_store_on_disk_is_the_kernels_and_is_read_again() {
    let mut rig = rig("disk", "P 8");
    assert_eq!(status(&rig), "16/8192 16");
    for (sector, value) in [(40, 5), (8, 6)] {
        assert_eq!(rig.write(sector, &[value; 512]), End::Ok);
    }
    assert_eq!(status(&rig), "32/8192 16");
    assert_eq!(rig.content(1, 0, 16), [b'S', b'n', b'A', b'p', 1, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0]);
    let mut area = [0u8; 48];
    (area[0], area[8], area[16], area[24]) = (5, 2, 1, 3);
    assert_eq!(rig.content(1, 8, 48), area);
    assert_eq!(rig.content(1, 16, 512), [5; 512]);
    assert_eq!(rig.content(1, 17, 512), [6; 512], "the rest of chunk 5 of the origin");
    let mut rig = rig.again("snapshot", "disk-origin disk-cow P 64");
    assert_eq!(rig.target.status(Status::Table, &names(&["a", "b"])), "a b P 8", "the device says 8");
    assert_eq!(status(&rig), "32/8192 16");
    assert_eq!(rig.read(40, 1024), (End::Ok, [[5; 512], [6; 512]].concat()));
    assert_eq!(rig.read(8, 512), (End::Ok, vec![6; 512]));
    assert_eq!(rig.write(16, &[7; 512]), End::Ok);
    assert_eq!(status(&rig), "40/8192 16");
}

#[test]
fn many_exceptions_fill_areas() {
    let mut rig = rig("areas", "P 1");
    for sector in 0..100 {
        assert_eq!(rig.write(sector * 3, &[sector as u8 + 100; 512]), End::Ok, "{sector}");
    }
    let before = status(&rig);
    // 100 copies of a sector, areas of 32 pairs: header, four areas.
    assert_eq!(before, "105/8192 5");
    let mut rig = rig.again("snapshot", "areas-origin areas-cow P 1");
    assert_eq!(status(&rig), before);
    for sector in 0..100 {
        assert_eq!(rig.read(sector * 3, 512), (End::Ok, vec![sector as u8 + 100; 512]), "{sector}");
    }
}

#[test]
fn what_a_write_needs_is_on_disk_before_it_ends() {
    let mut rig = rig("order", "P 8");
    let (_, seen) = rig.run(Op::Write, 0, 1);
    let asked: Vec<_> = seen.iter().map(|&(disk, op, sector, _)| (disk, op, sector)).collect();
    let wanted = [(0, Op::Read, 0), (1, Op::Write, 16), (1, Op::Flush, 0), (1, Op::Write, 8)];
    assert_eq!(asked, wanted);
}

#[test]
fn the_area_after_a_full_one_is_empty_on_disk_before_that_is() {
    let mut rig = rig("next", "P 1");
    for sector in 0..31 {
        assert_eq!(rig.write(sector, &[9; 512]), End::Ok, "{sector}");
    }
    let (_, seen) = rig.run(Op::Write, 31, 1);
    let asked: Vec<_> = seen.iter().map(|&(_, op, sector, _)| (op, sector)).collect();
    assert_eq!(asked, [(Op::Write, 33), (Op::Write, 34), (Op::Flush, 0), (Op::Write, 1)]);
}

#[test]
fn a_store_that_fails_makes_the_snapshot_invalid() {
    let mut rig = rig("lost", "N 32");
    rig.fail(1, End::IoError);
    assert_eq!(rig.write(0, &[1; 512]), End::IoError);
    assert_eq!(status(&rig), "Invalid");
    assert_eq!(rig.read(0, 512).0, End::IoError);
    assert_eq!(rig.target.events(), 1);
    let mut rig = self::rig("failed", "P 8");
    assert_eq!(rig.write(0, &[1; 512]), End::Ok);
    rig.fail(1, End::IoError);
    assert_eq!(rig.write(8, &[1; 512]), End::IoError);
    assert_eq!(rig.content(1, 0, 8), [b'S', b'n', b'A', b'p', 0, 0, 0, 0], "and its header says so");
    let rig = rig.again("snapshot", "failed-origin failed-cow P 8");
    assert_eq!(status(&rig), "Invalid");
}

#[test]
fn a_full_store_is_invalid_or_overflows() {
    for (kept, said, reads) in [("P", "Invalid", End::IoError), ("PO", "Overflow", End::Ok)] {
        let name = format!("full{kept}");
        let rig = rig(&name, &format!("{kept} 8"));
        rig.disks[1].borrow_mut().content.truncate(4096 * 5);
        let mut rig = rig.again("snapshot", &format!("{name}-origin {name}-cow {kept} 8"));
        for chunk in 0..3 {
            assert_eq!(rig.write(chunk * 8, &[9; 512]), End::Ok, "{chunk}");
        }
        assert_eq!(rig.write(64, &[9; 512]), End::IoError);
        assert_eq!(status(&rig), said);
        assert_eq!(rig.read(0, 512).0, reads);
    }
}

#[test]
fn a_discard_zeroes_the_copy() {
    let mut rig = rig("discard", "P 8 2 discard_zeroes_cow discard_passdown_origin");
    assert_eq!(rig.write(0, &[9; 4096]), End::Ok);
    assert_eq!(rig.run(Op::Discard, 0, 8).0, End::Ok);
    assert_eq!(rig.read(0, 512), (End::Ok, vec![0; 512]));
    assert_eq!(rig.run(Op::Discard, 8, 8).1[0], (0, Op::Discard, 8, 8));
    let mut rig = self::rig("nodiscard", "P 8");
    assert_eq!(rig.run(Op::Discard, 0, 8).0, End::NotSupported);
    assert!(!rig.profile.abilities.discard && !rig.profile.abilities.write_zeroes);
}

#[test]
fn what_is_written_to_the_origin_is_copied_first() {
    let mut snapshot = rig("copied", "P 8");
    let mut origin = snapshot.beside("snapshot-origin", "copied-origin");
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
    assert_eq!((origin.ring.live, snapshot.ring.live), (0, 0));
}

#[test]
fn a_snapshot_that_the_origin_does_not_know_of_is_not_believed() {
    let first = rig("late", "P 8");
    let mut origin = first.beside("snapshot-origin", "late-origin");
    let second = Rig::over("snapshot", "late-origin late-cow2 N 8", first.kept(), true).unwrap();
    let third = Rig::over("snapshot", "late-origin late-cow3 P 8", first.kept(), true).unwrap();
    origin.chores.extend(third.chores.iter().cloned());
    assert_eq!(origin.write(0, &[9; 512]), End::Ok);
    assert_eq!((status(&first).as_str(), status(&second).as_str()), ("24/8192 16", "Invalid"));
    assert_eq!(third.content(1, 0, 8), [b'S', b'n', b'A', b'p', 0, 0, 0, 0], "before the write has ended");
    assert_eq!(status(&third.again("snapshot", "late-origin late-cow3 P 8")), "Invalid");
}

#[test]
fn no_write_passes_a_lost_snapshot_by_until_its_header_says_so() {
    let mut snapshot = rig("header", "P 8");
    let mut origin = snapshot.beside("snapshot-origin", "header-origin");
    let chores = std::mem::take(&mut snapshot.chores);
    snapshot.fail(1, End::IoError);
    assert_eq!(snapshot.write(0, &[1; 512]), End::IoError);
    assert_eq!(snapshot.content(1, 0, 5)[4], 1, "nobody has written it");
    origin.chores = chores;
    let (_, seen) = origin.run(Op::Write, 0, 1);
    assert_eq!(seen, [(0, Op::Write, 0, 1)]);
    assert_eq!(snapshot.content(1, 0, 5)[4], 0);
}

#[test]
fn a_table_that_is_loaded_while_another_is_in_use_has_what_that_one_has_written() {
    for kept in ["P", "N"] {
        let name = format!("reload{kept}");
        let line = format!("{name}-origin {name}-cow {kept} 8");
        let mut before = rig(&name, &format!("{kept} 8"));
        let mut next = before.beside("snapshot", &line);
        assert_eq!(before.write(8, &[0x22; 512]), End::Ok);
        let usage = status(&before);
        drop(before);
        assert_eq!(next.read(8, 1024), (End::Ok, [[0x22; 512], [2; 512]].concat()), "{kept}");
        assert_eq!(status(&next), usage);
        assert_eq!(next.write(40, &[1; 512]), End::Ok);
        assert_eq!(next.read(8, 512), (End::Ok, vec![0x22; 512]));
    }
}

#[test]
fn a_store_in_use_is_not_another_snapshots() {
    let first = rig("owned", "P 8");
    let refused = Rig::over("snapshot", "other-origin owned-cow P 8", first.kept(), true).err().unwrap();
    assert_eq!(refused.to_string(), "Unable to hand over the store of another snapshot");
    assert!(Rig::over("snapshot", "owned-origin owned-cow N 8", first.kept(), true).is_err());
}

#[test]
fn nothing_is_copied_for_a_snapshot_that_was_removed() {
    let snapshot = rig("removed", "P 8");
    let mut origin = snapshot.beside("snapshot-origin", "removed-origin");
    assert_eq!(origin.run(Op::Write, 0, 1).1[0], (0, Op::Read, 0, 8));
    drop(snapshot);
    assert_eq!(origin.run(Op::Write, 8, 1).1, [(0, Op::Write, 8, 1)]);
    let mut origin = origin.beside("snapshot-origin", "removed-origin");
    assert_eq!((origin.disks.len(), origin.run(Op::Write, 16, 1).1.len()), (1, 1));
}

#[test]
fn what_another_table_would_take_does_not_make_a_snapshot_invalid() {
    for (disk, after) in [(0, 0), (1, 0), (1, 1), (1, 2)] {
        for status in [End::Requeue, End::Again, End::Resource] {
            let name = format!("again{disk}{after}{status:?}");
            let mut rig = rig(&name, "P 8");
            (0..after).for_each(|_| rig.fail(disk, End::Ok));
            rig.fail(disk, status);
            // The queue itself carries out again what comes up to be.
            assert_eq!(rig.write(8, &[9; 512]), End::Ok, "{name}");
            assert_eq!(rig.read(8, 1024), (End::Ok, [[9; 512], [2; 512]].concat()));
            assert_eq!(rig.ring.live, 0);
            let mut rig = rig.again("snapshot", &format!("{name}-origin {name}-cow P 8"));
            assert_eq!(rig.read(8, 1024), (End::Ok, [[9; 512], [2; 512]].concat()), "{name}: on disk");
        }
    }
}

#[test]
fn a_store_that_ends_with_a_full_area_is_full() {
    let rig = rig("end", "P 1");
    rig.disks[1].borrow_mut().content.truncate(34 * 512);
    let mut rig = rig.again("snapshot", "end-origin end-cow PO 1");
    for sector in 0..32 {
        assert_eq!(rig.write(sector, &[9; 512]), End::Ok, "{sector}");
    }
    assert_eq!(rig.write(32, &[9; 512]), End::IoError);
    assert_eq!(status(&rig), "Overflow");
    let mut rig = rig.again("snapshot", "end-origin end-cow PO 1");
    assert_eq!(rig.read(31, 1024), (End::Ok, [[9; 512], [5; 512]].concat()));
    assert!(status(&rig).starts_with("34/34 "));
}

#[test]
fn a_full_store_does_not_stop_the_origin() {
    let snapshot = rig("stop", "P 8");
    let mut origin = snapshot.beside("snapshot-origin", "stop-origin");
    origin.chores.extend(snapshot.chores.iter().cloned());
    origin.fail(1, End::NoSpace);
    assert_eq!(origin.write(0, &[9; 512]), End::Ok);
    assert_eq!(origin.content(0, 0, 512), [9; 512]);
    assert_eq!(status(&snapshot), "Invalid");
}
