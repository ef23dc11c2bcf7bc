//! Tests LIO's edge rules, by their numbers, and cases where these units support more.

use super::data::{unmap, unmap_list};
use super::*;

#[test]
fn lio_01_a_fua_write_is_on_stable_storage_when_it_completes() {
    let mut world = World::new();
    world.send(&cdb16(0x8A, 0x08, 0, 1), &[1; BLOCK]).good();
    assert_eq!(world.disk.log[0].3, Flags::FUA);
}

#[test]
fn lio_02_synchronize_cache_flushes_and_reports_errors_also_with_immed() {
    for cdb in
        [&cdb10(0x35, 0, 0, 0)[..], &cdb10(0x35, 2, 5, 9), &cdb16(0x91, 0, 0, 0), &cdb16(0x91, 2, 0, 0)]
    {
        let mut world = World::new();
        world.run(cdb).good();
        assert_eq!(world.disk.log, [(Op::Flush, 0, 0, Flags::empty())]);
        world.disk.fails = vec![(Op::Flush, Status::IoError)];
        assert_eq!(world.run(cdb).sense().0, 3);
    }
    assert_eq!(World::new().run(&cdb10(0x35, 0, BLOCKS as u32, 1)).sense(), OUT_OF_RANGE);
}

#[test]
fn lio_03_unmap_of_a_unit_that_is_to_read_zeroes_writes_zeroes_without_allocating() {
    let mut world = World::new();
    unmap(&mut world, &unmap_list(&[(3, 4)])).good();
    assert_eq!(world.disk.log, [(Op::WriteZeroes, 3 * 512, 4 * 512, Flags::empty())]);
}

#[test]
fn lio_04_write_same_repeats_the_block_in_requests_of_a_mebibyte() {
    let mut world = World::new();
    world.send(&cdb16(0x93, 0, 0, BLOCKS as u32), &[7; BLOCK]).good();
    assert_eq!(world.disk.log.len(), 2);
    assert!(world.disk.bytes.iter().all(|byte| *byte == 7));
}

#[test]
fn lio_10_ranges_that_overflow_or_end_past_the_device_are_refused() {
    let mut world = World::new();
    let past = BLOCKS as u64;
    let wide = [0x88, 0x8A, 0x8B, 0x8E, 0x8F, 0x90, 0x91, 0x93];
    for opcode in wide {
        for (lba, count) in [(past, 1), (past - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 2), (past + 1, 0)] {
            let end = world.send(&cdb16(opcode, 0, lba, count), &[0; 2 * BLOCK]);
            assert_eq!(end.sense(), OUT_OF_RANGE, "{opcode:02x} {lba} {count}");
        }
    }
    for opcode in [0x28, 0x2A, 0x2E, 0x2F, 0x34, 0x35, 0x41] {
        for (lba, count) in [(past as u32, 1), (u32::MAX, 1), (past as u32 + 1, 0)] {
            let end = world.send(&cdb10(opcode, 0, lba, count), &[0; BLOCK]);
            assert_eq!(end.sense(), OUT_OF_RANGE, "{opcode:02x}");
        }
    }
    for opcode in [0xA8, 0xAA, 0xAE, 0xAF] {
        assert_eq!(world.send(&cdb12(opcode, 0, past as u32, 1), &[0; BLOCK]).sense(), OUT_OF_RANGE);
    }
    assert_eq!(world.run(&[0x08, 0, 0x10, 0, 1, 0]).sense(), OUT_OF_RANGE);
    assert!(world.disk.log.is_empty());
}

#[test]
fn lio_11_dpo_and_fua_are_invalid_fields_where_fua_is_not_emulated() {
    let mut world = World::new();
    world.unit.set_attribute("emulate_fua_write", 0).unwrap();
    for flags in [0x08, 0x10, 0x18] {
        for opcode in [0x28, 0x2A] {
            assert_eq!(world.send(&cdb10(opcode, flags, 0, 1), &[0; BLOCK]).sense(), INVALID_FIELD);
        }
        assert_eq!(world.send(&cdb16(0x8A, flags, 0, 1), &[0; BLOCK]).sense(), INVALID_FIELD);
    }
    for opcode in [0x2E, 0x2F] {
        assert_eq!(world.send(&cdb10(opcode, 0x10, 0, 1), &[0; BLOCK]).sense(), INVALID_FIELD);
        world.send(&cdb10(opcode, 0, 0, 1), &[0; BLOCK]).good();
    }
    // RDPROTECT and WRPROTECT are refused, because there is no protection information.
    for protect in 1..8 {
        for opcode in [0x28, 0x2A, 0x2E, 0x2F, 0x41] {
            let end = world.send(&cdb10(opcode, protect << 5, 0, 1), &[0; BLOCK]);
            assert_eq!(end.sense(), INVALID_FIELD, "{opcode:02x}");
            let pointer = sense::FieldPointer {
                in_cdb: true,
                byte: 1,
                bit: Some(7 - (protect.leading_zeros() as u8 - 5)),
            };
            assert_eq!(end.outcome.sense.specific, sense::Specific::Field(pointer));
        }
    }
}

#[test]
fn lio_12_compare_and_write_has_255_blocks_and_can_be_switched_off() {
    let mut world = World::new();
    let data = [world.blocks(0, 2).to_vec(), vec![1; 2 * BLOCK]].concat();
    world.send(&compare_and_write(0, 2), &data).good();
    world.unit.set_attribute("emulate_caw", 0).unwrap();
    assert_eq!(world.send(&compare_and_write(0, 1), &data).sense(), INVALID_OPCODE);
    let attributes = Attributes { max_compare_and_write_len: 1, ..Attributes::default() };
    let mut world = World::with(media(), attributes);
    assert_eq!(world.send(&compare_and_write(0, 2), &data).sense(), INVALID_FIELD);
}

#[test]
fn lio_13_unmap_checks_its_list_before_any_range_changes() {
    let mut world = World::new();
    unmap(&mut world, &[]).good();
    for len in 1..8 {
        assert_eq!(unmap(&mut world, &vec![0; len]).sense(), LIST_LENGTH);
    }
    unmap(&mut world, &unmap_list(&[])).good();
    let cdb = cdb10(0x42, 0x01, 0, 24);
    assert_eq!(world.send(&cdb, &unmap_list(&[(0, 1)])).sense(), INVALID_FIELD, "ANCHOR");
    assert_eq!(unmap(&mut world, &unmap_list(&[(0, 1), (BLOCKS as u64, 1)])).sense(), OUT_OF_RANGE);
    assert_eq!(unmap(&mut world, &unmap_list(&[(0, 1), (u64::MAX, 2)])).sense(), OUT_OF_RANGE);
    world.unit.set_attribute("max_unmap_block_desc_count", 2).unwrap();
    assert_eq!(unmap(&mut world, &unmap_list(&[(0, 1); 3])).sense(), INVALID_PARAMETER);
    world.unit.set_attribute("max_unmap_lba_count", 10).unwrap();
    assert_eq!(unmap(&mut world, &unmap_list(&[(0, 8), (9, 3)])).sense(), INVALID_PARAMETER);
    assert!(world.disk.log.is_empty());
    world.unit.set_attribute("emulate_tpu", 0).unwrap();
    assert_eq!(unmap(&mut world, &unmap_list(&[(0, 1)])).sense(), INVALID_OPCODE);
}

#[test]
fn lio_14_write_same_checks_its_limit_and_bits() {
    let mut world = World::new();
    for (opcode, bits) in [(0x41, 0x17), (0x93, 0x16)] {
        for bit in (0..5).map(|bit| 1_u8 << bit).filter(|bit| bits & bit != 0) {
            let cdb = if opcode == 0x41 {
                cdb10(0x41, bit, 0, 1).to_vec()
            } else {
                cdb16(0x93, bit, 0, 1).to_vec()
            };
            assert_eq!(world.send(&cdb, &[0; BLOCK]).sense(), INVALID_FIELD, "{opcode:02x} {bit:02x}");
        }
    }
    world.unit.set_attribute("max_write_same_len", 16).unwrap();
    world.send(&cdb16(0x93, 0, 0, 16), &[1; BLOCK]).good();
    assert_eq!(world.send(&cdb16(0x93, 0, 0, 17), &[1; BLOCK]).sense(), INVALID_FIELD);
    assert_eq!(world.send(&cdb16(0x93, 0, 0, 0), &[1; BLOCK]).sense(), INVALID_FIELD, "to the end");
    world.unit.set_attribute("emulate_tpws", 0).unwrap();
    assert_eq!(world.send(&cdb16(0x93, 0x08, 0, 1), &[1; BLOCK]).sense(), INVALID_FIELD);
}

#[test]
fn lio_15_verify_compares_where_lio_does_nothing() {
    let mut world = World::new();
    let mut data = world.blocks(0, 1).to_vec();
    for cdb in [&cdb10(0x2F, 2, 0, 1)[..], &cdb12(0xAF, 2, 0, 1), &cdb16(0x8F, 2, 0, 1)] {
        world.send(cdb, &data).good();
        data[100] ^= 1;
        assert_eq!(world.send(cdb, &data).sense(), MISCOMPARE);
        data[100] ^= 1;
    }
}

#[test]
fn lio_16_start_stop_unit_ejects_removable_media_only() {
    let mut world = World::new();
    for bits in [0x01, 0x00, 0x04, 0x10, 0x11] {
        world.run(&[0x1B, 1, 0, 0, bits, 0]).good();
        world.run(&[0x1B, 0, 0, 0, bits, 0]).good();
    }
    assert_eq!(world.run(&[0x1B, 0, 0, 0, 0x02, 0]).sense(), INVALID_FIELD);
    assert_eq!(world.run(&[0x1B, 0, 0, 0, 0x43, 0]).sense(), INVALID_FIELD);
    let mut world = World::with(Media { removable: true, ..media() }, Attributes::default());
    let (own, other) = (world.nexus.clone(), world.other.clone());
    world.run_as(&other, &[0x1E, 0, 0, 0, 1, 0], &[], 0).good();
    assert_eq!(world.run(&[0x1B, 1, 0, 0, 2, 0]).sense(), (5, 0x53, 2));
    world.run_as(&other, &[0x1E, 0, 0, 0, 0, 0], &[], 0).good();
    world.run(&[0x1B, 1, 0, 0, 2, 0]).good();
    for nexus in [&own, &other] {
        for cdb in [&[0; 6][..], &cdb10(0x25, 0, 0, 0), &cdb10(0x28, 0, 0, 1), &cdb10(0x35, 0, 0, 0)] {
            assert_eq!(world.run_as(nexus, cdb, &[], 512).sense(), (2, 0x3A, 0), "{cdb:02x?}");
        }
    }
    // A locked drive does not load a medium either.
    world.run_as(&other, &[0x1E, 0, 0, 0, 1, 0], &[], 0).good();
    assert_eq!(world.run(&[0x1B, 1, 0, 0, 3, 0]).sense(), (5, 0x53, 2));
    world.run_as(&other, &[0x1E, 0, 0, 0, 0, 0], &[], 0).good();
    world.run(&[0x1B, 1, 0, 0, 3, 0]).good();
    world.run(&[0; 6]).good();
    assert_eq!(world.run_as(&other, &[0; 6], &[], 0).sense(), (6, 0x28, 0));
    world.run_as(&other, &[0; 6], &[], 0).good();
}

#[test]
fn lio_17_cdbs_of_variable_length_have_write_same_32_only() {
    let mut world = World::new();
    let mut cdb = [0; 32];
    (cdb[0], cdb[7], cdb[9], cdb[31]) = (0x7F, 0x18, 0x0D, 1);
    world.send(&cdb, &[0; BLOCK]).good();
    cdb[9] = 0x0B;
    assert_eq!(world.send(&cdb, &[0; BLOCK]).sense(), INVALID_FIELD);
    (cdb[7], cdb[9]) = (0x10, 0x0D);
    assert_eq!(world.send(&cdb, &[0; BLOCK]).sense(), INVALID_FIELD);
    assert_eq!(world.send(&cdb[..16], &[0; BLOCK]).sense(), INVALID_FIELD, "it is cut short");
    // `long_cdbs` can be turned off for initiators that misread the command's description.
    let mut world = World::with(media(), Attributes { long_cdbs: false, ..Attributes::default() });
    (cdb[7], cdb[9]) = (0x18, 0x0D);
    assert_eq!(world.send(&cdb, &[0; BLOCK]).sense(), INVALID_OPCODE);
    let one = world.run(&[0xA3, 0x0C, 0x02, 0x7F, 0, 0x0D, 0, 0, 1, 0, 0, 0]).good();
    assert_eq!(one[1] & 7, 1, "not supported");
}

#[test]
fn lio_18_reservations_can_be_switched_off() {
    let mut world = World::new();
    world.unit.set_attribute("emulate_pr", 0).unwrap();
    for cdb in
        [&[0x16, 0, 0, 0, 0, 0][..], &[0x17, 0, 0, 0, 0, 0], &cdb10(0x56, 0, 0, 0), &cdb10(0x5E, 0, 0, 8)]
    {
        assert_eq!(world.run(cdb).sense(), INVALID_OPCODE);
    }
}

#[test]
fn lio_19_persistent_reservations_conflict_with_a_reservation_of_reserve() {
    let mut world = World::new();
    let other = world.other.clone();
    world.run(&[0x16, 0, 0, 0, 0, 0]).good();
    let mut cdb = cdb10(0x5E, 0, 0, 8);
    assert_eq!(world.run(&cdb).outcome.status, ScsiStatus::ReservationConflict);
    (cdb[0], cdb[8]) = (0x5F, 24);
    assert_eq!(world.send(&cdb, &[0; 24]).outcome.status, ScsiStatus::ReservationConflict);
    // Reads and writes of the other nexus leave the fast path and conflict, those of the holder do not.
    let read = cdb10(0x28, 0, 0, 1);
    assert_eq!(world.run_as(&other, &read, &[], 512).outcome.status, ScsiStatus::ReservationConflict);
    world.run(&read).good();
    world.run(&[0x17, 0, 0, 0, 0, 0]).good();
    world.run_as(&other, &read, &[], 512).good();
    world.run(&[0x16, 0, 0, 0, 0, 0]).good();
    let nexus = world.nexus.clone();
    world.unit.detach_nexus(&nexus, NexusLoss::Logout);
    world.run_as(&other, &read, &[], 512).good();
}
