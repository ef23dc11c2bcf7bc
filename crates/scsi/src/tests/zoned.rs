//! Tests of zoned units on a disk whose zones follow null_blk's rules.

use super::*;
use crate::bytes::{be32, be64};
use block::{Sectors, Zone, ZoneCondition, ZoneKind};

/// Blocks of a zone, and of its writable part in sequential zones.
const ZONE: u64 = 256;
const CAPACITY: u64 = 200;
const OPEN_MAX: u32 = 3;

const UNALIGNED: (u8, u8, u8) = (5, 0x21, 4);
const BOUNDARY: (u8, u8, u8) = (5, 0x21, 5);
const INVALID_DATA: (u8, u8, u8) = (5, 0x21, 6);
const IN_GAP: (u8, u8, u8) = (5, 0x21, 9);
const READ_ONLY: (u8, u8, u8) = (7, 0x27, 8);
const OFFLINE: (u8, u8, u8) = (7, 0x2C, 0x0E);
const NO_RESOURCES: (u8, u8, u8) = (7, 0x55, 0x0E);

const CLOSE: u8 = 1;
const FINISH: u8 = 2;
const OPEN: u8 = 3;
const RESET: u8 = 4;

/// Performs what depends on zones. Returns `None` if the data of a read or write is to be moved.
pub(super) fn request(zones: &mut [Zone], op: Op, offset: u64, len: u64, data: &mut [u8]) -> Option<Status> {
    let (sector, sectors) = (offset / 512, len / 512);
    let active = |zone: &Zone| {
        use ZoneCondition::{ExplicitOpen, ImplicitOpen};
        matches!(zone.condition, ImplicitOpen | ExplicitOpen)
    };
    let is_full = zones.iter().filter(|zone| active(zone)).count() >= OPEN_MAX as usize;
    let index = (sector / ZONE) as usize;
    let zone = &mut zones[index];
    let is_sequential = zone.kind == ZoneKind::SequentialRequired;
    let at_start = zone.start.0 == sector && is_sequential && len == 0;
    let set = |zone: &mut Zone, condition, written: u64| {
        (zone.condition, zone.write_pointer) = (condition, Sectors(zone.start.0 + written));
        Some(Status::Ok)
    };
    let dead = matches!(zone.condition, ZoneCondition::ReadOnly | ZoneCondition::Offline);
    match op {
        Op::ReportZones => {
            data.fill(0);
            let end = sector + sectors;
            let found = zones[index..].iter().filter(|zone| zone.start.0 < end);
            data.chunks_exact_mut(64).zip(found).for_each(|(to, zone)| to.copy_from_slice(&zone.to_record()));
            Some(Status::Ok)
        }
        Op::Write if !is_sequential => None,
        Op::Write => {
            let end = sector + sectors;
            if dead || zone.write_pointer.0 != sector || end > zone.start.0 + zone.capacity.0 {
                return Some(Status::IoError);
            }
            if is_full && !active(zone) {
                return Some(Status::ZoneOpenResource);
            }
            let written = end - zone.start.0;
            let condition = match zone.condition {
                _ if written == zone.capacity.0 => ZoneCondition::Full,
                ZoneCondition::ExplicitOpen => ZoneCondition::ExplicitOpen,
                _ => ZoneCondition::ImplicitOpen,
            };
            set(zone, condition, written);
            None
        }
        Op::Read if zone.condition == ZoneCondition::Offline => Some(Status::IoError),
        Op::Read => None,
        Op::ZoneResetAll => {
            let sequential = zones.iter_mut().filter(|zone| zone.kind == ZoneKind::SequentialRequired);
            for zone in sequential.filter(|zone| (zone.condition as u8) < 13 || zone.condition as u8 == 14) {
                set(zone, ZoneCondition::Empty, 0);
            }
            Some(Status::Ok)
        }
        Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish | Op::ZoneReset if !at_start || dead => {
            Some(Status::IoError)
        }
        Op::ZoneOpen if is_full && !active(zone) => Some(Status::ZoneOpenResource),
        Op::ZoneOpen => set(zone, ZoneCondition::ExplicitOpen, zone.write_pointer.0 - zone.start.0),
        Op::ZoneClose if zone.write_pointer == zone.start => set(zone, ZoneCondition::Empty, 0),
        Op::ZoneClose => set(zone, ZoneCondition::Closed, zone.write_pointer.0 - zone.start.0),
        Op::ZoneFinish => set(zone, ZoneCondition::Full, zone.len.0),
        Op::ZoneReset => set(zone, ZoneCondition::Empty, 0),
        _ => None,
    }
}

/// A unit with two conventional zones, then fourteen sequential ones, of which the last is offline and the
/// one before it read-only.
fn world() -> World {
    let zones = Some(Zoned { zone_blocks: ZONE, open_max: OPEN_MAX });
    let media = Media { zones, can: Can::FUA, ..media() };
    let mut world = World::with(media, Attributes::default());
    world.disk.zones = (0..BLOCKS as u64 / ZONE)
        .map(|index| {
            let (kind, condition, capacity) = match index {
                0 | 1 => (ZoneKind::Conventional, ZoneCondition::NotWritePointer, ZONE),
                14 => (ZoneKind::SequentialRequired, ZoneCondition::ReadOnly, CAPACITY),
                15 => (ZoneKind::SequentialRequired, ZoneCondition::Offline, CAPACITY),
                _ => (ZoneKind::SequentialRequired, ZoneCondition::Empty, CAPACITY),
            };
            let start = Sectors(index * ZONE);
            Zone {
                start,
                len: Sectors(ZONE),
                capacity: Sectors(capacity),
                write_pointer: start,
                kind,
                condition,
            }
        })
        .collect();
    world
}

fn report_cdb(lba: u64, allocation: u32, options: u8) -> [u8; 16] {
    let mut cdb = cdb16(0x95, 0, lba, allocation);
    cdb[14] = options;
    cdb
}

fn manage_cdb(action: u8, zone: u64, all: bool) -> [u8; 16] {
    let mut cdb = cdb16(0x94, action, zone, 0);
    cdb[14] = u8::from(all);
    cdb
}

/// Returns type, condition, start, length and write pointer of each zone in a report.
fn zones_of(report: &[u8]) -> Vec<(u8, u8, u64, u64, u64)> {
    let zones = report[64..].chunks_exact(64);
    zones.map(|one| (one[0], one[1] >> 4, be64(one, 16), be64(one, 8), be64(one, 24))).collect()
}

fn write(world: &mut World, lba: u64, count: u32) -> End {
    world.send(&cdb16(0x8A, 0, lba, count), &vec![7; count as usize * BLOCK])
}

/// Returns the condition and the write pointer of the zone at an LBA.
fn state(world: &mut World, lba: u64) -> (u8, u64) {
    let report = world.run(&report_cdb(lba, 128, 0x80)).good();
    let [zone] = zones_of(&report)[..] else { panic!("one zone") };
    (zone.1, zone.4)
}

#[test]
fn inquiry_and_capacity_name_a_host_managed_unit() {
    let mut world = world();
    let standard = world.run(&[0x12, 0, 0, 0, 255, 0]).good();
    assert_eq!(standard[0], 0x14);
    assert!(standard[58..74].chunks(2).any(|one| one == [0x06, 0x20]), "ZBC");
    let page = |world: &mut World, code| world.run(&[0x12, 1, code, 0, 255, 0]);
    assert_eq!(page(&mut world, 0x00).good().last(), Some(&0xB6));
    let zoned = page(&mut world, 0xB6).good();
    assert_eq!((zoned[0], zoned[1], zoned.len()), (0x14, 0xB6, 64));
    assert_eq!(zoned[4], 1, "URSWRZ without AAORB");
    assert_eq!((be64(&zoned, 8), be32(&zoned, 16)), (u64::MAX, OPEN_MAX));
    assert_eq!((zoned[23], be64(&zoned, 24)), (8, ZONE));
    assert_eq!(page(&mut world, 0xB1).good()[8] >> 4 & 3, 0);
    assert_eq!(be64(&page(&mut world, 0xB0).good(), 36), ZONE, "MAXIMUM WRITE SAME LENGTH");
    let capacity = world.run(&cdb16(0x9E, 0x10, 0, 32)).good();
    assert_eq!(capacity[12], 0x10, "RC_BASIS");
}

#[test]
fn other_units_have_neither_zones_nor_their_page() {
    let mut world = World::new();
    assert_eq!(world.run(&[0x12, 0, 0, 0, 255, 0]).good()[0], 0);
    assert!(!world.run(&[0x12, 1, 0, 0, 255, 0]).good().contains(&0xB6));
    assert_eq!(world.run(&[0x12, 1, 0xB6, 0, 255, 0]).sense(), INVALID_FIELD);
    assert_eq!(world.run(&cdb16(0x9E, 0x10, 0, 32)).good()[12], 0);
    assert_eq!(world.run(&report_cdb(0, 4096, 0)).sense(), INVALID_OPCODE);
    assert_eq!(world.run(&manage_cdb(RESET, 0, true)).sense(), INVALID_OPCODE);
}

#[test]
fn supported_operation_codes_are_those_of_a_zoned_unit() {
    let mut world = world();
    let mut support = |opcode, action| {
        let mut cdb = cdb12(0xA3, 0x0C, u32::from_be_bytes([3, opcode, 0, action]), 64);
        cdb[10] = 0;
        world.run(&cdb).good()[1] & 7
    };
    for action in [CLOSE, FINISH, OPEN, RESET] {
        assert_eq!(support(0x94, action), 3);
    }
    assert_eq!((support(0x95, 0), support(0x88, 0), support(0x93, 0)), (3, 3, 3));
    // COMPARE AND WRITE, ORWRITE, UNMAP, SANITIZE, EXTENDED COPY, WRITE ATOMIC.
    for (opcode, action) in [(0x89, 0), (0x8B, 0), (0x42, 0), (0x48, 1), (0x83, 0), (0x9C, 0)] {
        assert_eq!(support(opcode, action), 1, "{opcode:x}");
    }
}

#[test]
fn a_report_has_zones_and_the_gaps_behind_them() {
    let mut world = world();
    let report = world.run(&report_cdb(0, 1 << 16, 0)).good();
    let zones = zones_of(&report);
    assert_eq!((be32(&report, 0) as usize, zones.len()), (report.len() - 64, 2 + 14 * 2));
    assert_eq!((be64(&report, 8), be64(&report, 16)), (BLOCKS as u64 - 1, ZONE));
    assert_eq!(zones[0], (1, 0, 0, ZONE, u64::MAX));
    assert_eq!(zones[2], (2, 1, 512, CAPACITY, 512));
    assert_eq!(zones[3], (5, 0, 512 + CAPACITY, ZONE - CAPACITY, u64::MAX));
    let mut next = 0;
    for zone in &zones {
        assert_eq!(zone.2, next);
        next = zone.2 + zone.3;
    }
    assert_eq!(next, BLOCKS as u64);
}

#[test]
fn a_report_starts_with_the_zone_that_contains_the_lba() {
    let mut world = world();
    let mut first = |lba| zones_of(&world.run(&report_cdb(lba, 4096, 0)).good())[0].2;
    assert_eq!((first(255), first(600), first(512 + CAPACITY)), (0, 512, 512 + CAPACITY));
    assert_eq!(world.run(&report_cdb(BLOCKS as u64, 4096, 0)).sense(), OUT_OF_RANGE);
}

#[test]
fn the_list_length_counts_all_zones_or_with_partial_the_returned_ones() {
    let mut world = world();
    for (allocation, options, count, returned) in [
        (256, 0, 30, 3),
        (256, 0x80, 3, 3),
        (64, 0x80, 0, 0),
        (319, 0x80, 3, 3),
        (256, 0xBE, 3, 3),
        (0, 0, 0, 0),
    ] {
        let report = world.run(&report_cdb(0, allocation, options)).good();
        assert!(report.len() <= allocation as usize);
        assert_eq!(be32(&report, 0), count * 64, "{allocation} {options:x}");
        assert_eq!(zones_of(&[report, vec![0; 64]].concat()).len().saturating_sub(1), returned);
    }
}

#[test]
fn reporting_options_select_zones_by_condition() {
    let mut world = world();
    write(&mut world, 512, 8).good();
    world.run(&manage_cdb(OPEN, 768, false)).good();
    write(&mut world, 1024, 8).good();
    world.run(&manage_cdb(CLOSE, 1024, false)).good();
    world.run(&manage_cdb(FINISH, 1280, false)).good();
    let mut starts = |options| {
        let zones = zones_of(&world.run(&report_cdb(0, 1 << 16, options)).good());
        zones.iter().map(|zone| zone.2).collect::<Vec<_>>()
    };
    assert_eq!(starts(1).len(), 8, "empty");
    assert_eq!((starts(2), starts(3)), (vec![512], vec![768]), "implicitly and explicitly open");
    assert_eq!((starts(4), starts(5)), (vec![1024], vec![1280]), "closed, full");
    assert_eq!((starts(6), starts(7)), (vec![14 * ZONE], vec![15 * ZONE]), "read-only, offline");
    assert_eq!((starts(0x10), starts(0x11)), (vec![], vec![]));
    assert_eq!((starts(0x3E).len(), starts(0x3F).len()), (16, 2 + 14), "without gaps, without pointers");
    assert_eq!(world.run(&report_cdb(0, 4096, 9)).sense(), INVALID_FIELD);
}

#[test]
fn writes_go_to_the_write_pointer() {
    let mut world = world();
    write(&mut world, 512, 8).good();
    write(&mut world, 520, 8).good();
    assert_eq!(state(&mut world, 512), (2, 528));
    assert_eq!(world.run(&cdb16(0x88, 0, 512, 16)).good(), vec![7; 16 * BLOCK]);
    assert_eq!(write(&mut world, 512, 8).sense(), UNALIGNED);
    assert_eq!(write(&mut world, 600, 8).sense(), UNALIGNED);
    assert_eq!(write(&mut world, 528, (CAPACITY - 15) as u32).sense(), BOUNDARY, "into the gap");
    assert_eq!(write(&mut world, 528, 250).sense(), BOUNDARY, "into the next zone");
    assert_eq!(write(&mut world, 511, 2).sense(), BOUNDARY, "from a conventional zone");
    assert_eq!(write(&mut world, 512 + CAPACITY, 1).sense(), IN_GAP);
    assert_eq!(state(&mut world, 512), (2, 528), "failed writes change nothing");
    write(&mut world, 528, (CAPACITY - 16) as u32).good();
    assert_eq!(state(&mut world, 512), (14, u64::MAX));
    assert_eq!(write(&mut world, 512, 1).sense(), INVALID_FIELD, "full");
    assert_eq!(write(&mut world, 14 * ZONE, 1).sense(), READ_ONLY);
    assert_eq!(write(&mut world, 15 * ZONE, 1).sense(), OFFLINE);
}

#[test]
fn conventional_zones_are_written_anywhere_and_across() {
    let mut world = world();
    write(&mut world, 250, 12).good();
    write(&mut world, 5, 3).good();
    assert_eq!(world.blocks(250, 12), vec![7; 12 * BLOCK]);
    assert_eq!(world.run(&cdb16(0x88, 0, 250, 12)).good(), vec![7; 12 * BLOCK]);
}

#[test]
fn reads_stay_within_zones_of_one_type() {
    let mut world = world();
    world.run(&cdb16(0x88, 0, 520, 8)).good();
    assert_eq!(world.run(&cdb16(0x88, 0, 510, 4)).sense(), INVALID_DATA);
    assert_eq!(world.run(&cdb16(0x88, 0, 760, 16)).sense(), IN_GAP);
    assert_eq!(world.run(&cdb16(0x88, 0, 15 * ZONE, 1)).sense(), OFFLINE);
    for zone in &mut world.disk.zones {
        zone.capacity = zone.len;
    }
    assert_eq!(world.run(&cdb16(0x88, 0, 760, 16)).good(), world.blocks(760, 16));
}

#[test]
fn a_unit_with_a_cache_but_without_fua_flushes_after_a_checked_write() {
    let mut world = world();
    let media = Media { can: Can::empty(), ..world.unit.media() };
    world.unit.set_media(media);
    world.send(&cdb16(0x8A, 8, 512, 1), &[7; BLOCK]).good();
    assert_eq!(world.disk.log.last().map(|entry| entry.0), Some(Op::Flush));
    assert_eq!(world.send(&cdb16(0x8A, 8, 512, 1), &[7; BLOCK]).sense(), UNALIGNED);
}

#[test]
fn write_same_and_write_and_verify_obey_the_write_pointer() {
    let mut world = world();
    world.send(&cdb16(0x93, 0, 512, 100), &[9; BLOCK]).good();
    world.send(&cdb16(0x8E, 2, 612, 2), &[5; 2 * BLOCK]).good();
    assert_eq!(state(&mut world, 512), (2, 614));
    assert_eq!(world.blocks(512, 100), vec![9; 100 * BLOCK]);
    let writes = world.disk.log.len();
    assert_eq!(world.send(&cdb16(0x93, 0, 512, 4), &[9; BLOCK]).sense(), UNALIGNED);
    assert_eq!(world.send(&cdb16(0x93, 0, 614, 200), &[9; BLOCK]).sense(), BOUNDARY);
    assert_eq!(world.send(&cdb16(0x8E, 2, 512, 1), &[5; BLOCK]).sense(), UNALIGNED);
    let log = &world.disk.log[writes..];
    assert!(log.iter().all(|entry| entry.0 == Op::ReportZones), "nothing is written: {log:?}");
    assert_eq!(world.send(&cdb16(0x93, 0, 0, ZONE as u32 + 1), &[9; BLOCK]).sense(), INVALID_FIELD);
}

#[test]
fn zones_are_opened_closed_finished_and_reset() {
    let mut world = world();
    let mut run = |action, zone| world.run(&manage_cdb(action, zone, false)).good();
    // Commands without an effect succeed.
    for (action, zone) in [(RESET, 512), (CLOSE, 512), (OPEN, 512), (OPEN, 512)] {
        run(action, zone);
    }
    assert_eq!(state(&mut world, 512), (3, 512));
    write(&mut world, 512, 3).good();
    let mut after = |action| {
        world.run(&manage_cdb(action, 512, false)).good();
        state(&mut world, 512)
    };
    assert_eq!(after(CLOSE), (4, 515));
    assert_eq!(after(OPEN), (3, 515));
    assert_eq!(after(FINISH), (14, u64::MAX));
    assert_eq!((after(OPEN), after(CLOSE), after(FINISH)), ((14, u64::MAX), (14, u64::MAX), (14, u64::MAX)));
    assert_eq!(after(RESET), (1, 512));
}

#[test]
fn zone_ids_that_are_no_sequential_zone_are_refused() {
    let mut world = world();
    for action in [CLOSE, FINISH, OPEN, RESET] {
        let mut sense = |zone| world.run(&manage_cdb(action, zone, false)).sense();
        assert_eq!(
            (sense(513), sense(512 + CAPACITY), sense(256)),
            (INVALID_FIELD, INVALID_FIELD, INVALID_FIELD)
        );
        assert_eq!(sense(BLOCKS as u64), OUT_OF_RANGE);
        assert_eq!((sense(14 * ZONE), sense(15 * ZONE)), (READ_ONLY, OFFLINE));
    }
    let mut cdb = manage_cdb(RESET, 512, false);
    cdb[13] = 2;
    assert_eq!(world.run(&cdb).sense(), INVALID_FIELD, "ZONE COUNT");
    assert_eq!(world.run(&manage_cdb(0x10, 512, false)).sense(), INVALID_FIELD, "SEQUENTIALIZE ZONE");
}

#[test]
fn all_applies_to_the_zones_in_the_right_conditions() {
    let mut world = world();
    for zone in [512, 768, 1024] {
        write(&mut world, zone, 4).good();
    }
    let all = |world: &mut World, action| world.run(&manage_cdb(action, 77, true));
    let states = |world: &mut World| [512, 768, 1024, 1280].map(|zone| state(world, zone).0);
    all(&mut world, CLOSE).good();
    assert_eq!(states(&mut world), [4, 4, 4, 1]);
    all(&mut world, OPEN).good();
    assert_eq!(states(&mut world), [3, 3, 3, 1], "empty zones stay empty");
    all(&mut world, FINISH).good();
    assert_eq!(states(&mut world), [14, 14, 14, 1]);
    all(&mut world, RESET).good();
    assert_eq!(states(&mut world), [1; 4]);
}

#[test]
fn too_many_open_zones_are_refused() {
    let mut world = world();
    for zone in [512, 768, 1024] {
        world.run(&manage_cdb(OPEN, zone, false)).good();
    }
    assert_eq!(world.run(&manage_cdb(OPEN, 1280, false)).sense(), NO_RESOURCES);
    assert_eq!(write(&mut world, 1280, 1).sense(), NO_RESOURCES);
    world.disk.zones[6].condition = ZoneCondition::Closed;
    assert_eq!(world.run(&manage_cdb(OPEN, 0, true)).sense(), NO_RESOURCES, "none is opened");
    assert_eq!(world.disk.zones[6].condition, ZoneCondition::Closed);
}

#[test]
fn write_protection_and_reservations_apply_to_zone_management() {
    let mut world = world();
    let other = world.other.clone();
    world.run(&[0x16, 0, 0, 0, 0, 0]).good();
    let end = world.run_as(&other, &manage_cdb(RESET, 0, true), &[], 0);
    assert_eq!(end.outcome.status, ScsiStatus::ReservationConflict);
    world.run(&[0x17, 0, 0, 0, 0, 0]).good();
    world.unit.set_media(Media { read_only: true, ..world.unit.media() });
    world.nexus.take_attention(true);
    world.nexus.take_attention(true);
    assert_eq!(world.run(&manage_cdb(RESET, 0, true)).sense(), PROTECTED);
    world.run(&report_cdb(0, 4096, 0)).good();
}

#[test]
fn a_device_that_reports_no_zones_is_an_error() {
    let mut world = world();
    world.disk.fails.push((Op::ReportZones, Status::IoError));
    assert_eq!(world.run(&report_cdb(0, 4096, 0)).sense(), (3, 0x11, 0));
    assert_eq!(world.run(&manage_cdb(CLOSE, 0, true)).sense(), (3, 0x11, 0));
    assert_eq!(write(&mut world, 700, 1).sense(), (3, 0x0C, 0), "the failure itself");
}
