//! Tests reads, writes, and the programs.

use super::*;

#[test]
fn reads_and_writes_of_all_lengths_of_cdbs_move_the_blocks_that_they_name() {
    let mut world = World::new();
    for (lba, count) in [(0, 1), (7, 3), (BLOCKS - 2, 2)] {
        let data = vec![0xA5 ^ lba as u8; count * BLOCK];
        let (wide, narrow) = (lba as u64, lba as u32);
        let six = |opcode| [opcode, 0, (lba >> 8) as u8, lba as u8, count as u8, 0];
        for opcode in [0x0A, 0x2A, 0xAA, 0x8A] {
            world.disk.bytes[lba * BLOCK..(lba + count) * BLOCK].fill(0);
            let end = match opcode {
                0x0A => world.send(&six(0x0A), &data),
                0x2A => world.send(&cdb10(0x2A, 0, narrow, count as u16), &data),
                0xAA => world.send(&cdb12(0xAA, 0, narrow, count as u32), &data),
                _ => world.send(&cdb16(0x8A, 0, wide, count as u32), &data),
            };
            end.good();
            assert_eq!(world.blocks(lba, count), data, "{opcode:02x}");
        }
        assert_eq!(world.run(&six(0x08)).good(), data);
        assert_eq!(world.run(&cdb10(0x28, 0, narrow, count as u16)).good(), data);
        assert_eq!(world.run(&cdb12(0xA8, 0, narrow, count as u32)).good(), data);
        assert_eq!(world.run(&cdb16(0x88, 0, wide, count as u32)).good(), data);
    }
}

#[test]
fn a_length_of_zero_means_256_blocks_in_6_bytes_and_none_in_more() {
    let mut world = World::new();
    assert_eq!(world.run(&[0x08, 0, 0, 5, 0, 0]).good().len(), 256 * BLOCK);
    assert_eq!(world.disk.log.pop().unwrap().2, 256 * BLOCK as u64);
    for cdb in [&cdb10(0x28, 0, 5, 0)[..], &cdb12(0xA8, 0, 5, 0), &cdb16(0x88, 0, 5, 0)] {
        assert_eq!(world.run_with(cdb, &[], 0).good(), []);
    }
    for cdb in [&cdb10(0x2A, 0, 5, 0)[..], &cdb12(0xAA, 0, 5, 0), &cdb16(0x8A, 0, 5, 0)] {
        world.send(cdb, &[]).good();
    }
    assert!(world.disk.log.is_empty());
}

#[test]
fn fua_reaches_the_device_and_is_a_flush_where_the_device_has_only_that() {
    let data = vec![1; BLOCK];
    let mut world = World::new();
    world.send(&cdb10(0x2A, 0x08, 1, 1), &data).good();
    assert_eq!(world.disk.log, [(Op::Write, 512, 512, Flags::FUA)]);
    let media = Media { can: Can::empty(), ..media() };
    let mut world = World::with(media, Attributes::default());
    world.send(&cdb10(0x2A, 0x18, 1, 1), &data).good();
    assert_eq!(world.disk.log, [(Op::Write, 512, 512, Flags::empty()), (Op::Flush, 0, 0, Flags::empty())]);
    world.disk.fails = vec![(Op::Flush, Status::IoError)];
    assert_eq!(world.send(&cdb10(0x2A, 0x08, 1, 1), &data).sense(), (3, 0x0C, 0));
}

#[test]
fn residuals_tell_the_difference_between_the_cdb_and_what_the_initiator_expects() {
    let mut world = World::new();
    let cases: &[(u32, Residual, usize)] = &[
        (512, Residual::None, 512),
        (1000, Residual::Underflow(488), 512),
        (200, Residual::Overflow(312), 200),
        (0, Residual::Overflow(512), 0),
    ];
    for &(expected, residual, received) in cases {
        for cdb in [&cdb10(0x28, 0, 9, 1)[..], &cdb16(0x88, 0, 9, 1), &cdb12(0xA8, 0, 9, 1)] {
            let end = world.run_with(cdb, &[], expected);
            assert_eq!(end.outcome.residual(expected), residual);
            let data = end.good();
            assert_eq!(data, world.blocks(9, 1)[..received]);
        }
    }
    // A short allocation length is not an overflow: the CDB requests no more than that.
    let end = world.run_with(&[0x12, 0, 0, 0, 5, 0], &[], 5);
    assert_eq!((end.outcome.residual(5), end.data.len()), (Residual::None, 5));
    let end = world.run_with(&[0x12, 0, 0, 0, 255, 0], &[], 255);
    assert_eq!((end.outcome.residual(255), end.data.len()), (Residual::Underflow(159), 96));
}

#[test]
fn a_write_of_fewer_blocks_than_the_cdb_says_writes_those_and_parts_of_blocks_are_refused() {
    let mut world = World::new();
    let before = world.blocks(1, 1).to_vec();
    let end = world.send(&cdb10(0x2A, 0, 0, 2), &[7; BLOCK]);
    assert_eq!(end.outcome.residual(512), Residual::Overflow(512));
    end.good();
    assert_eq!((world.blocks(0, 1), world.blocks(1, 1)), (&[7; BLOCK][..], &before[..]));
    let end = world.send(&cdb10(0x2A, 0, 0, 1), &[8; 2 * BLOCK]);
    assert_eq!(end.outcome.residual(1024), Residual::Underflow(512));
    end.good();
    assert_eq!(world.blocks(1, 1), before);
    for sent in [0, 200] {
        let end = world.send(&cdb10(0x2A, 0, 0, 1), &vec![9; sent]);
        assert_eq!(end.sense(), (5, 0x0E, 3));
        assert_eq!(end.outcome.residual(sent as u32), Residual::Overflow(512 - sent as u32));
    }
    assert_eq!(world.blocks(0, 1), [8; BLOCK]);
}

#[test]
fn a_compare_and_write_of_many_blocks_writes_all_or_reports_the_first_difference() {
    let mut world = World::new();
    for count in [1, 2, 255] {
        let old = world.blocks(10, count).to_vec();
        let new = vec![count as u8; count * BLOCK];
        let mut data = [old.clone(), new.clone()].concat();
        let at = count * BLOCK - 27;
        data[at] ^= 1;
        let end = world.send(&compare_and_write(10, count as u8), &data);
        assert_eq!(end.sense(), MISCOMPARE);
        assert_eq!(end.outcome.sense.information, Some(at as u64));
        assert_eq!(world.blocks(10, count), old);
        data[at] ^= 1;
        world.send(&compare_and_write(10, count as u8), &data).good();
        assert_eq!(world.blocks(10, count), new);
    }
    world.send(&compare_and_write(10, 0), &[]).good();
    assert_eq!(world.send(&compare_and_write(10, 1), &[0; 4 * BLOCK]).sense(), (5, 0x0E, 3));
    assert_eq!(world.send(&compare_and_write(10, 3), &[0; 4 * BLOCK]).sense(), (5, 0x0E, 3));
    assert_eq!(world.send(&compare_and_write(BLOCKS as u64 - 1, 2), &[0; 4 * BLOCK]).sense(), OUT_OF_RANGE);
}

#[test]
fn orwrite_adds_bits_also_in_several_chunks() {
    let mut world = World::with(Media { transfer_max: 8 << 20, ..media() }, Attributes::default());
    let count = 3000;
    let before = world.blocks(5, count).to_vec();
    let operand: Vec<u8> = (0..count * BLOCK).map(|at| (at / 700) as u8).collect();
    world.send(&cdb16(0x8B, 0, 5, count as u32), &operand).good();
    let expected: Vec<u8> = before.iter().zip(&operand).map(|(one, other)| one | other).collect();
    assert_eq!(world.blocks(5, count), expected);
}

#[test]
fn write_and_verify_reads_back_what_it_wrote() {
    for (cdb, flags) in [(cdb16(0x8E, 0, 3, 9), 0), (cdb16(0x8E, 0x02, 3, 9), 1)] {
        let mut world = World::new();
        world.send(&cdb, &[flags; 9 * BLOCK]).good();
        assert_eq!(world.blocks(3, 9), [flags; 9 * BLOCK]);
        let ops: Vec<Op> = world.disk.log.iter().map(|entry| entry.0).collect();
        assert_eq!(ops, [Op::Write, Op::Read]);
        world.disk.fails = vec![(Op::Read, Status::Medium)];
        let end = world.send(&cdb, &[flags; 9 * BLOCK]);
        assert_eq!((end.sense(), end.outcome.sense.information), ((3, 0x11, 0), Some(3)));
    }
    assert_eq!(World::new().send(&cdb10(0x2E, 0x06, 0, 1), &[0; BLOCK]).sense(), INVALID_FIELD);
}

/// Tests that it behaves like WRITE, see above: libiscsi's iSCSIResiduals tests both.
#[test]
fn write_and_verify_writes_the_blocks_that_the_initiator_sends() {
    for bytchk in [0, 0x02] {
        let mut world = World::new();
        let before = world.blocks(4, 1).to_vec();
        let end = world.send(&cdb16(0x8E, bytchk, 3, 2), &[0xA5; BLOCK]);
        assert_eq!(end.outcome.residual(BLOCK as u32), Residual::Overflow(512));
        end.good();
        assert_eq!((world.blocks(3, 1), world.blocks(4, 1)), (&[0xA5; BLOCK][..], &before[..]));
        let end = world.send(&cdb16(0x8E, bytchk, 3, 1), &[0x5A; 2 * BLOCK]);
        assert_eq!(end.outcome.residual(2 * BLOCK as u32), Residual::Underflow(512));
        end.good();
        assert_eq!((world.blocks(3, 1), world.blocks(4, 1)), (&[0x5A; BLOCK][..], &before[..]));
        assert_eq!(world.send(&cdb16(0x8E, bytchk, 3, 2), &[0; 100]).sense(), (5, 0x0E, 3));
    }
}

#[test]
fn verify_compares_with_all_blocks_or_with_one() {
    for seed in 0..3 {
        let mut world = World::with(Media { transfer_max: 8 << 20, ..media() }, Attributes::default());
        world.seed = seed;
        let count = BLOCKS - 1;
        let mut data = world.blocks(1, count).to_vec();
        world.send(&cdb16(0x8F, 0x02, 1, count as u32), &data).good();
        for at in [data.len() - 1, BLOCK * 2100, 700] {
            data[at] ^= 0x80;
            let end = world.send(&cdb16(0x8F, 0x02, 1, count as u32), &data);
            assert_eq!((end.sense(), end.outcome.sense.information), (MISCOMPARE, Some(at as u64)));
        }
        // BYTCHK 0 needs no data, and finds unreadable blocks.
        world.run_with(&cdb16(0x8F, 0, 1, count as u32), &[], 0).good();
        // BYTCHK 3 compares one block with each block.
        world.disk.bytes.fill(0x5A);
        world.send(&cdb16(0x8F, 0x06, 1, count as u32), &[0x5A; BLOCK]).good();
        world.disk.bytes[BLOCK * 3000 + 9] = 0;
        let end = world.send(&cdb16(0x8F, 0x06, 1, count as u32), &[0x5A; BLOCK]);
        assert_eq!((end.sense(), end.outcome.sense.information), (MISCOMPARE, Some(2999 * 512 + 9)));
    }
    assert_eq!(World::new().send(&cdb10(0x2F, 0x04, 0, 1), &[0; BLOCK]).sense(), INVALID_FIELD, "BYTCHK 2");
    World::new().run(&cdb10(0x2F, 0, 0, 0)).good();
}

#[test]
fn write_same_writes_the_pattern_everywhere_and_zeroes_without_data_where_it_can() {
    let mut world = World::new();
    let pattern: Vec<u8> = (0..BLOCK).map(|at| at as u8).collect();
    for count in [1, 100, 3000] {
        world.send(&cdb16(0x93, 0, 7, count as u32), &pattern).good();
        assert!(world.blocks(7, count).chunks(BLOCK).all(|block| block == pattern));
        assert_ne!(world.blocks(7 + count, 1), pattern);
    }
    assert!(world.disk.log.iter().all(|entry| entry.0 == Op::Write && entry.2 <= 1 << 20));
    world.disk.log.clear();
    world.send(&cdb10(0x41, 0, 7, 100), &[0; BLOCK]).good();
    assert_eq!(world.disk.log, [(Op::WriteZeroes, 7 * 512, 51200, Flags::NO_UNMAP)]);
    // NDOB writes zeroes without data-out; with UNMAP it deallocates.
    world.disk.log.clear();
    world.send(&cdb16(0x93, 0x09, 7, 100), &[]).good();
    assert_eq!(world.disk.log, [(Op::WriteZeroes, 7 * 512, 51200, Flags::empty())]);
    assert!(world.disk.holes[7] && world.blocks(7, 100) == [0; 100 * BLOCK]);
    // UNMAP is set, but deallocated blocks do not read as this pattern.
    world.send(&cdb16(0x93, 0x08, 7, 100), &pattern).good();
    assert!(!world.disk.holes[7] && world.blocks(7, 1) == pattern);
    // A length of 0 is refused (WSNZ of the block limits page), after the check of the start.
    assert_eq!(world.run(&[0x12, 1, 0xB0, 0, 64, 0]).data[4] & 1, 1);
    assert_eq!(world.send(&cdb16(0x93, 0, BLOCKS as u64 - 9, 0), &pattern).sense(), (5, 0x24, 0));
    assert_eq!(world.send(&cdb16(0x93, 0, BLOCKS as u64 + 1, 0), &pattern).sense(), OUT_OF_RANGE);
    // WRITE SAME (32).
    let mut cdb = [0; 32];
    (cdb[0], cdb[7], cdb[9], cdb[10]) = (0x7F, 0x18, 0x0D, 0x00);
    (cdb[19], cdb[31]) = (4, 2);
    world.send(&cdb, &pattern).good();
    assert!(world.blocks(4, 2).chunks(BLOCK).all(|block| block == pattern));
    for data in [BLOCK / 2, 2 * BLOCK] {
        assert_eq!(world.send(&cdb10(0x41, 0x08, 0, 1), &vec![0; data]).sense(), (5, 0x0E, 3));
    }
}

#[test]
fn write_same_falls_back_to_writing_when_the_device_finds_that_it_cannot_zero() {
    let mut world = World::new();
    world.disk.fails = vec![(Op::WriteZeroes, Status::NotSupported)];
    world.send(&cdb16(0x93, 0x01, 7, 3000), &[]).good();
    assert_eq!(world.blocks(7, 3000), vec![0; 3000 * BLOCK]);
    world.disk.fails.push((Op::Write, Status::NoSpace));
    assert_eq!(world.send(&cdb16(0x93, 0x01, 7, 3000), &[]).sense(), (7, 0x27, 7));
}

/// Returns a parameter list of UNMAP.
pub(super) fn unmap_list(ranges: &[(u64, u32)]) -> Vec<u8> {
    let mut list = vec![0; 8];
    for (lba, count) in ranges {
        list.extend_from_slice(&lba.to_be_bytes());
        list.extend_from_slice(&count.to_be_bytes());
        list.extend_from_slice(&[0; 4]);
    }
    let len = list.len() as u16;
    list[..2].copy_from_slice(&(len - 2).to_be_bytes());
    list[2..4].copy_from_slice(&(len - 8).to_be_bytes());
    list
}

pub(super) fn unmap(world: &mut World, list: &[u8]) -> End {
    let mut cdb = [0; 10];
    cdb[0] = 0x42;
    cdb[7..9].copy_from_slice(&(list.len() as u16).to_be_bytes());
    world.send(&cdb, list)
}

#[test]
fn unmap_deallocates_each_range_several_at_a_time() {
    let mut world = World::new();
    let ranges: Vec<(u64, u32)> = (0..256).map(|index| (index * 8, 3)).collect();
    unmap(&mut world, &unmap_list(&ranges)).good();
    for lba in 0..2048 {
        assert_eq!(world.disk.holes[lba], lba % 8 < 3, "{lba}");
        assert_eq!(world.blocks(lba, 1) == [0; BLOCK], lba % 8 < 3);
    }
    assert!(world.disk.log.iter().all(|entry| entry.0 == Op::WriteZeroes), "LBPRZ is reported");
    world.unit.set_attribute("unmap_zeroes_data", 0).unwrap();
    world.disk.log.clear();
    unmap(&mut world, &unmap_list(&[(5, 1), (9, 0)])).good();
    assert_eq!(world.disk.log, [(Op::Discard, 5 * 512, 512, Flags::empty())]);
    world.disk.fails = vec![(Op::Discard, Status::NotSupported)];
    unmap(&mut world, &unmap_list(&[(5, 1)])).good();
}

#[test]
fn get_lba_status_reports_runs_of_mapped_and_deallocated_blocks() {
    let mut world = World::new();
    unmap(&mut world, &unmap_list(&[(10, 5), (20, 5)])).good();
    let mut cdb = cdb16(0x9E, 0x12, 8, 8 + 16 * 4);
    let data = world.run(&cdb).good();
    let run = |index: usize| {
        let at = &data[8 + 16 * index..];
        (
            u64::from_be_bytes(at[..8].try_into().unwrap()),
            u32::from_be_bytes(at[8..12].try_into().unwrap()),
            at[12],
        )
    };
    assert_eq!([run(0), run(1), run(2), run(3)], [(8, 2, 0), (10, 5, 1), (15, 5, 0), (20, 5, 1)]);
    assert_eq!(data.len(), 8 + 16 * 4);
    assert_eq!(data[..4], (data.len() as u32 - 4).to_be_bytes());
    cdb[13] = 23;
    assert_eq!(world.run(&cdb).sense(), INVALID_FIELD, "the allocation length has space for one descriptor");
    assert_eq!(world.run(&cdb16(0x9E, 0x12, BLOCKS as u64, 24)).sense(), OUT_OF_RANGE);
    // If extents are not supported, all blocks are reported as mapped.
    world.disk.fails = vec![(Op::Extents, Status::NotSupported)];
    let data = world.run(&cdb16(0x9E, 0x12, 8, 24)).good();
    assert_eq!((data.len(), data[20]), (24, 0));
    assert_eq!(data[16..20], (BLOCKS as u32 - 8).to_be_bytes());
}

#[test]
fn every_block_status_has_sense_data_that_initiators_understand() {
    use Status::*;
    let cases = [
        (Medium, (3, 0x11, 0)),
        (IoError, (3, 0x11, 0)),
        (NoSpace, (7, 0x27, 7)),
        (NotPermitted, (7, 0x27, 0)),
        (Offline, (2, 0x04, 0)),
        (Transport, (2, 0x08, 0)),
        (Requeue, (2, 0x08, 0)),
        (Again, (2, 0x08, 0)),
        (Timeout, (2, 0x08, 1)),
        (Resource, (0xB, 0x55, 0)),
        (DeviceResource, (0xB, 0x55, 0)),
        (DurationLimit, (0xB, 0x2E, 1)),
        (Protection, (0xB, 0x10, 1)),
        (Target, (4, 0x44, 0)),
        (Invalid, INVALID_FIELD),
        (NotSupported, INVALID_FIELD),
        (ZoneOpenResource, (7, 0x55, 0x0E)),
        (ZoneActiveResource, (7, 0x55, 0x0F)),
    ];
    let mut world = World::new();
    for (status, sense) in cases {
        world.disk.fails = vec![(Op::Read, status)];
        assert_eq!(world.run(&cdb10(0x28, 0, 2, 1)).sense(), sense, "{status:?}");
    }
    world.disk.fails = vec![(Op::Read, ReservationConflict)];
    let outcome = world.run(&cdb10(0x28, 0, 2, 1)).outcome;
    assert_eq!(outcome.status, ScsiStatus::ReservationConflict);
    world.disk.fails = vec![(Op::Write, Medium)];
    let end = world.send(&cdb10(0x2A, 0, 2, 1), &[0; BLOCK]);
    assert_eq!((end.sense(), end.outcome.sense.information), ((3, 0x0C, 0), Some(2)));
}
