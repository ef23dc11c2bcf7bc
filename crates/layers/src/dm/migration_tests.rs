//! Tests of migrations: data on both devices, failures of either, and writes beside the copy.

use super::background::BackgroundWork;
use super::harness::{Harness, LEN, Memory};
use super::migration::{Migration, REGION};
use block::{Bytes, Data, Op, Request, Sectors, Status as End};
use queue::Nanos;
use std::sync::Arc;

const SECTOR: u64 = 512;
/// A time long after all writes.
const LATER: Nanos = Nanos(1 << 60);

fn moving(len: Sectors) -> (Arc<Migration>, Harness) {
    let migration = Migration::new(len, "elsewhere".into(), None);
    let harness = Harness::of_two_disks(migration.target::<Memory>());
    (migration, harness)
}

fn request(op: Op, sector: u64, sectors: u64) -> Request {
    Request::new(op, Bytes(sector * SECTOR), Bytes(sectors * SECTOR))
}

fn write(harness: &mut Harness, sector: u64, sectors: u64, byte: u8) {
    let segment = harness.ring.memory.own((sectors * SECTOR) as u32);
    queue::Ring::bytes_mut(&mut harness.ring, segment).fill(byte);
    harness.submit(Request { data: Data::One(segment), ..request(Op::Write, sector, sectors) });
}

fn copy_all(migration: &Migration, harness: &Harness) {
    let mut disks = harness.test_disks();
    for _ in 0..1000 {
        if !migration.is_due(LATER) {
            return;
        }
        migration.step(LATER, &mut disks);
    }
    panic!("the copy does not end");
}

fn equal(harness: &Harness, len: Sectors) -> bool {
    let len = len.bytes().0 as usize;
    let content = |disk: usize| harness.disks[disk].borrow().content[..len].to_vec();
    content(0) == content(1)
}

#[test]
fn data_is_copied_and_writes_reach_both_devices_afterwards() {
    let (migration, mut harness) = moving(LEN);
    write(&mut harness, 8, 16, 7);
    assert_eq!(harness.drain(), [End::Ok]);
    assert!(harness.disks[1].borrow().content.iter().all(|byte| *byte == 0), "nothing is copied yet");
    copy_all(&migration, &harness);
    assert!(migration.is_complete() && equal(&harness, LEN));
    write(&mut harness, 100, 4, 9);
    assert_eq!(harness.drain(), [End::Ok]);
    assert!(equal(&harness, LEN) && harness.disks[1].borrow().content[100 * 512] == 9);
    harness.submit(request(Op::WriteZeroes, 8, 8));
    assert_eq!(harness.drain(), [End::Ok]);
    assert!(equal(&harness, LEN) && migration.is_complete());
}

#[test]
fn old_data_of_the_destination_is_overwritten_also_where_the_source_has_zeroes() {
    let (migration, harness) = moving(LEN);
    harness.disks[1].borrow_mut().content.fill(0x55);
    copy_all(&migration, &harness);
    assert!(equal(&harness, LEN));
}

#[test]
fn an_error_of_the_destination_ends_the_migration_and_fails_no_request() {
    let (migration, mut harness) = moving(LEN);
    copy_all(&migration, &harness);
    harness.fail(1, End::NoSpace);
    write(&mut harness, 0, 8, 1);
    assert_eq!(harness.drain(), [End::Ok]);
    assert!(!migration.is_complete());
    let why = migration.failure().expect("a reason").to_owned();
    assert!(why.starts_with("writing the destination at offset 0 failed: No space left"), "{why}");
    // From now on writes go to the source only.
    write(&mut harness, 0, 8, 2);
    assert_eq!(harness.drain(), [End::Ok]);
    assert_eq!([0, 1].map(|disk| harness.disks[disk].borrow().content[0]), [2, 0]);
}

#[test]
fn a_failed_copy_ends_the_migration() {
    for (disk, text) in
        [(0, "reading the source at offset 0 failed"), (1, "the destination at offset 0 failed")]
    {
        let (migration, mut harness) = moving(LEN);
        harness.disks[0].borrow_mut().content[0] = 1;
        harness.break_disk(disk, true);
        copy_all(&migration, &harness);
        assert!(migration.failure().is_some_and(|why| why.contains(text)), "{:?}", migration.failure());
        harness.break_disk(disk, false);
        write(&mut harness, 0, 8, 2);
        assert_eq!(harness.drain(), [End::Ok]);
    }
}

#[test]
fn a_write_that_failed_is_copied_again() {
    let (migration, mut harness) = moving(LEN);
    copy_all(&migration, &harness);
    harness.fail(0, End::IoError);
    write(&mut harness, 0, 8, 1);
    assert_eq!(harness.drain(), [End::IoError]);
    assert!(!migration.is_complete() && migration.failure().is_none());
    // The disk has written a part of the request.
    harness.disks[0].borrow_mut().content[..512].fill(1);
    copy_all(&migration, &harness);
    assert!(migration.is_complete() && equal(&harness, LEN));
}

#[test]
fn discards_that_the_destination_does_not_support_are_copied_as_data() {
    let (migration, mut harness) = moving(LEN);
    write(&mut harness, 0, 16, 3);
    harness.drain();
    copy_all(&migration, &harness);
    // The source succeeds, then the destination refuses.
    harness.fail(1, End::NotSupported);
    harness.submit(request(Op::Discard, 0, 8));
    assert_eq!(harness.drain(), [End::Ok]);
    assert!(!migration.is_complete());
    copy_all(&migration, &harness);
    assert!(migration.is_complete() && equal(&harness, LEN));
}

#[test]
fn reads_and_flushes_go_to_the_source() {
    let (migration, mut harness) = moving(LEN);
    copy_all(&migration, &harness);
    harness.break_disk(1, true);
    harness.submit(request(Op::Read, 0, 8));
    harness.submit(Request::flush());
    assert_eq!(harness.drain(), [End::Ok, End::Ok]);
    assert!(migration.is_complete());
}

#[test]
fn the_rate_delays_the_next_region() {
    let len = Sectors(4 * REGION.sectors().0);
    let migration = Migration::new(len, "elsewhere".into(), Some(REGION.0));
    let harness = Harness::of_two_disks(migration.target::<Memory>());
    let mut disks = harness.test_disks();
    let now = Nanos(5_000_000_000);
    migration.step(now, &mut disks);
    assert!(!migration.is_due(now.after(999_999_999)) && migration.is_due(now.after(1_000_000_000)));
    assert_eq!(migration.progress(), (REGION, Bytes(4 * REGION.0)));
}

/// Seeds of random writes, failures and copies. After each run the source has what a model of the device has,
/// and so has the destination if the migration is complete.
#[test]
fn random_writes_beside_the_copy_reach_both_devices() {
    let len = Sectors(3 * REGION.sectors().0 + 40);
    for seed in 0..12 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (migration, mut harness) = moving(len);
        let mut model = vec![0_u8; len.bytes().0 as usize];
        let mut disks = harness.test_disks();
        for step in 0..200_u32 {
            if random.u32(..10) < 3 {
                migration.step(LATER, &mut disks);
                continue;
            }
            if seed % 3 == 0 && random.u8(..4) == 0 {
                let temporary = [End::NotSupported, End::Again, End::Requeue];
                harness.fail(1, temporary[random.usize(..3)]);
            }
            // Requests that cross regions are split.
            let zeroes = random.u8(..5) == 0;
            let sectors = if zeroes { random.u64(1..=5000) } else { random.u64(1..=64) };
            let sector = random.u64(0..=len.0 - sectors);
            let byte = if zeroes { 0 } else { step as u8 | 1 };
            if zeroes {
                harness.submit(request(Op::WriteZeroes, sector, sectors));
            } else {
                write(&mut harness, sector, sectors, byte);
            }
            assert_eq!(harness.drain(), [End::Ok], "seed {seed}");
            model[(sector * SECTOR) as usize..((sector + sectors) * SECTOR) as usize].fill(byte);
            // A status that no request took must not meet the copy.
            harness.break_disk(1, false);
        }
        copy_all(&migration, &harness);
        assert!(migration.is_complete(), "seed {seed}: {:?}", migration.failure());
        for disk in [0, 1] {
            let content = harness.disks[disk].borrow();
            assert!(content.content[..model.len()] == model[..], "seed {seed}, disk {disk}");
        }
    }
}
