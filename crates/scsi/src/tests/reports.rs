//! Tests that the properties which a unit reports agree with its behaviour.

use super::*;
use crate::opcodes::TABLE;

fn inquiry(world: &mut World, page: Option<u8>) -> Vec<u8> {
    let cdb = [0x12, u8::from(page.is_some()), page.unwrap_or(0), 1, 0, 0];
    world.run(&cdb).good()
}

fn be32(data: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(data[at..at + 4].try_into().unwrap())
}

/// Executes REPORT SUPPORTED OPERATION CODES.
fn opcodes(world: &mut World, options: u8, opcode: u8, action: u16) -> End {
    let mut cdb = [0xA3, 0x0C, options, opcode, 0, 0, 0, 0, 0xFF, 0xFF, 0, 0];
    cdb[4..6].copy_from_slice(&action.to_be_bytes());
    world.run(&cdb)
}

/// Returns the operation code, service action and length of all reported commands.
fn all_commands(world: &mut World) -> Vec<(u8, Option<u16>, usize)> {
    let data = opcodes(world, 0, 0, 0).good();
    assert_eq!(be32(&data, 0) as usize + 4, data.len());
    data[4..]
        .chunks(8)
        .map(|one| {
            let action = u16::from_be_bytes([one[2], one[3]]);
            assert!(one[5] == 1 || one[5] == 0 && action == 0);
            (one[0], (one[5] == 1).then_some(action), usize::from(one[7]))
        })
        .collect()
}

fn worlds() -> Vec<World> {
    let bare = Media { can: Can::empty(), atomic_max: 0, ..media() };
    let off = Attributes {
        emulate_fua_write: false,
        emulate_caw: false,
        emulate_tpu: false,
        emulate_tpws: false,
        emulate_pr: false,
        emulate_3pc: false,
        ..Attributes::default()
    };
    vec![
        World::new(),
        World::with(bare, Attributes::default()),
        World::with(media(), off),
        World::with(Media { atomic_max: 1 << 16, removable: true, ..media() }, Attributes::default()),
    ]
}

/// Returns a CDB that is zero except for the operation code and the service action.
fn plain(opcode: u8, action: Option<u16>, len: usize) -> Vec<u8> {
    let mut cdb = vec![0; len];
    cdb[0] = opcode;
    match action {
        Some(action) if opcode == 0x7F => {
            cdb[7] = len as u8 - 8;
            cdb[8..10].copy_from_slice(&action.to_be_bytes());
        }
        Some(action) => cdb[1] = action as u8,
        None => {}
    }
    cdb
}

#[test]
fn every_command_that_is_reported_is_known_and_no_other() {
    for mut world in worlds() {
        let known = all_commands(&mut world);
        for opcode in 0..=255 {
            let has_actions = known.iter().any(|one| one.0 == opcode && one.1.is_some());
            let actions: Vec<Option<u16>> =
                if has_actions { (0..32).map(Some).collect() } else { vec![None] };
            for action in actions {
                let found = known.iter().find(|one| (one.0, one.1) == (opcode, action));
                let len = found.map_or(if opcode == 0x7F { 32 } else { 16 }, |one| one.2);
                let end = world.run(&plain(opcode, action, len));
                let sense = end.outcome.sense;
                let is_unknown = (sense.asc, sense.ascq) == (0x20, 0);
                let names_action = sense.specific
                    == sense::Specific::Field(sense::FieldPointer {
                        in_cdb: true,
                        byte: if opcode == 0x7F { 8 } else { 1 },
                        bit: if opcode == 0x7F { None } else { Some(4) },
                    });
                match found {
                    Some(_) => {
                        assert!(!(is_unknown || has_actions && names_action), "{opcode:02x} {action:?}")
                    }
                    None if has_actions => assert!(names_action, "{opcode:02x} {action:?}"),
                    None => assert!(is_unknown, "{opcode:02x}: {sense:?}"),
                }
                while world.nexus.take_attention(true).is_some() {}
            }
        }
    }
}

#[test]
fn exactly_the_bits_of_the_usage_map_are_accepted() {
    for mut world in worlds() {
        for (opcode, action, len) in all_commands(&mut world) {
            let data =
                opcodes(&mut world, if action.is_some() { 2 } else { 1 }, opcode, action.unwrap_or(0)).good();
            assert_eq!((data[1], usize::from(data[3]), data.len()), (3, len, 4 + len));
            let usage = &data[4..];
            assert_eq!(usage[0], opcode);
            let plain = plain(opcode, action, len);
            for byte in 1..len {
                for bit in 0..8 {
                    let mut cdb = plain.clone();
                    cdb[byte] ^= 1 << bit;
                    let is_action = match action {
                        Some(_) if opcode == 0x7F => (7..10).contains(&byte),
                        Some(_) => byte == 1 && bit < 5,
                        None => false,
                    };
                    if is_action {
                        continue;
                    }
                    let rejected = Sense::cdb_field(byte as u16, Some(bit));
                    let end = world.run(&cdb);
                    let is_rejected = end.outcome.sense == rejected;
                    while world.nexus.take_attention(true).is_some() {}
                    // Load the medium, in case the command ejected it.
                    world.run(&[0x1B, 0, 0, 0, 3, 0]);
                    if usage[byte] & 1 << bit == 0 {
                        assert!(
                            is_rejected,
                            "{opcode:02x} {action:?} byte {byte} bit {bit}: {:?}",
                            end.outcome.sense
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn one_command_is_reported_as_in_the_list() {
    let mut world = World::new();
    for (opcode, action, _) in all_commands(&mut world) {
        let (right, wrong) = if action.is_some() { (2, 1) } else { (1, 2) };
        let action = action.unwrap_or(0);
        let timeouts = opcodes(&mut world, 0x80 | right, opcode, action).good();
        let plain = opcodes(&mut world, right, opcode, action).good();
        assert_eq!((timeouts[1], timeouts.len()), (0x83, plain.len() + 12));
        assert_eq!(timeouts[plain.len()..plain.len() + 2], [0, 10]);
        assert_eq!(opcodes(&mut world, wrong, opcode, action).sense(), INVALID_FIELD);
        assert_eq!(opcodes(&mut world, 3, opcode, action).good(), plain);
    }
    assert_eq!(opcodes(&mut world, 1, 0xFF, 0).good(), [0, 1, 0, 0]);
    assert_eq!(opcodes(&mut world, 2, 0x9E, 0x1F).good(), [0, 1, 0, 0]);
    assert_eq!(opcodes(&mut world, 4, 0, 0).sense(), INVALID_FIELD);
    let with = opcodes(&mut world, 0x80, 0, 0).good();
    assert!(with[4..].chunks(20).all(|one| one[5] & 2 != 0 && one[8..10] == [0, 10]));
}

#[test]
fn the_table_is_sorted_and_maps_have_the_length_of_their_cdb() {
    assert!(TABLE.is_sorted_by_key(|row| (row.opcode, row.action)));
    for row in TABLE {
        let mut cdb = [0; 32];
        (cdb[0], cdb[7]) = (row.opcode, 24);
        assert_eq!(crate::opcodes::cdb_len(&cdb), Some(row.len()), "{:02x}", row.opcode);
    }
}

#[test]
fn standard_inquiry_data_says_what_the_unit_is() {
    let mut world = World::new();
    let data = inquiry(&mut world, None);
    assert_eq!((data.len(), data[0], data[2], data[3], usize::from(data[4])), (96, 0, 6, 0x12, 96 - 5));
    assert_eq!((&data[8..16], &data[16..20], &data[32..36]), (&b"BLKYARD "[..], &b"disk"[..], &b"1.0 "[..]));
    assert_eq!(data[58..66], [0x00, 0xA0, 0x09, 0x60, 0x04, 0x60, 0x04, 0xC0]);
    assert_eq!(data[5] & 0x30, 0x30, "TPGS: implicit and explicit");
    assert_eq!(data[6], 0, "one port");
    let elsewhere = NexusName { relative_port: 2, ..name(7) };
    let _second = world.unit.attach_nexus(elsewhere, Lun::new(0), Access::ReadWrite);
    assert_eq!(inquiry(&mut world, None)[6], 0x10);
    assert_eq!(world.run(&[0x12, 0, 1, 0, 255, 0]).sense(), INVALID_FIELD, "a page without EVPD");
    assert_eq!(world.run(&[0x12, 0, 0, 0, 5, 0]).good().len(), 5);
}

#[test]
fn every_page_that_page_00_lists_exists_and_no_other() {
    let mut world = World::new();
    let list = inquiry(&mut world, Some(0));
    let pages = &list[4..];
    assert!(pages.is_sorted());
    for code in 0..=255 {
        let end = world.run(&[0x12, 1, code, 1, 0, 0]);
        match pages.contains(&code) {
            true => {
                let data = end.good();
                assert_eq!((data[1], usize::from(data[3]) + 4), (code, data.len()));
            }
            false => assert_eq!(end.sense(), INVALID_FIELD),
        }
    }
}

#[test]
fn designators_name_the_unit_the_port_and_the_target() {
    let mut world = World::new();
    let page = inquiry(&mut world, Some(0x83));
    let mut rest = &page[4..];
    let mut kinds = Vec::new();
    while !rest.is_empty() {
        let len = usize::from(rest[3]);
        kinds.push((rest[0], rest[1], rest[4..4 + len].to_vec()));
        rest = &rest[4 + len..];
    }
    assert_eq!(kinds[0], (0x01, 0x03, world.unit.identity().naa.to_vec()));
    assert_eq!(kinds[1], (0x02, 0x01, b"BLKYARD disk:0123456789abcdef".to_vec()));
    assert_eq!((kinds[2].0, kinds[2].1, kinds[2].2.as_slice()), (0x51, 0x94, &[0, 0, 0, 1][..]));
    assert_eq!((kinds[3].0, kinds[3].1, kinds[3].2.len()), (0x51, 0x95, 4));
    assert_eq!((kinds[4].0, kinds[4].1), (0x53, 0x98));
    assert!(kinds[4].2.starts_with(b"iqn.2026-11.example:disk,t,0x0001\0") && kinds[4].2.len() % 4 == 0);
    assert_eq!((kinds[5].0, kinds[5].1), (0x53, 0xA8));
    assert_eq!(&inquiry(&mut world, Some(0x80))[4..], b"0123456789abcdef");
}

#[test]
fn block_limits_are_those_that_are_enforced() {
    for mut world in worlds() {
        let media = world.unit.media();
        let page = inquiry(&mut world, Some(0xB0));
        assert_eq!(page.len(), 64);
        // MAXIMUM TRANSFER LENGTH.
        let most = be32(&page, 8);
        world.run_with(&cdb16(0x88, 0, 0, most), &[], most * 512).good();
        assert_eq!(world.run(&cdb16(0x88, 0, 0, most + 1)).sense(), INVALID_FIELD);
        // MAXIMUM COMPARE AND WRITE LENGTH.
        let most = page[5];
        if most == 0 {
            assert_eq!(world.send(&compare_and_write(0, 1), &[0; 1024]).sense(), INVALID_OPCODE);
        } else {
            let old = world.blocks(0, most.into()).to_vec();
            world.send(&compare_and_write(0, most), &[old.clone(), old].concat()).good();
        }
        // UNMAP agrees with READ CAPACITY and page B2h.
        let capacity = world.run(&cdb16(0x9E, 0x10, 0, 32)).good();
        let provisioning = inquiry(&mut world, Some(0xB2));
        let can_unmap =
            super::data::unmap(&mut world, &super::data::unmap_list(&[(0, 8)])).outcome.sense == Sense::NONE;
        assert_eq!(can_unmap, provisioning[5] & 0x80 != 0);
        assert_eq!(can_unmap, be32(&page, 20) > 0 && be32(&page, 24) > 0);
        let same = world.send(&cdb16(0x93, 0x08, 0, 8), &[0; BLOCK]).outcome.sense == Sense::NONE;
        assert_eq!(same, provisioning[5] & 0x40 != 0);
        let same10 = world.send(&cdb10(0x41, 0x08, 0, 8), &[0; BLOCK]).outcome.sense == Sense::NONE;
        assert_eq!(same10, provisioning[5] & 0x20 != 0);
        assert_eq!(can_unmap || same, capacity[14] & 0x80 != 0, "LBPME");
        assert_eq!(provisioning[5] & 0x1C != 0, capacity[14] & 0x40 != 0, "LBPRZ");
        if capacity[14] & 0x40 != 0 {
            assert!(world.blocks(0, 8).iter().all(|byte| *byte == 0));
        }
        assert_eq!(u64::from_be_bytes(capacity[..8].try_into().unwrap()), media.blocks - 1);
        // MAXIMUM ATOMIC TRANSFER LENGTH.
        let most = be32(&page, 44);
        let mut cdb = cdb16(0x9C, 0, 0, 0);
        cdb[12..14].copy_from_slice(&(most.max(1) as u16).to_be_bytes());
        let end = world.send(&cdb, &vec![0; most.max(1) as usize * BLOCK]);
        if most == 0 {
            assert_eq!(end.sense(), INVALID_OPCODE);
        } else {
            end.good();
            cdb[12..14].copy_from_slice(&(most as u16 + 1).to_be_bytes());
            assert_eq!(world.send(&cdb, &vec![0; (most as usize + 1) * BLOCK]).sense(), INVALID_FIELD);
        }
        // DPOFUA.
        let dpofua = world.run(&[0x1A, 0x08, 0x3F, 0, 255, 0]).good()[2] & 0x10 != 0;
        let fua = world.run(&cdb10(0x28, 0x08, 0, 1)).outcome.status == ScsiStatus::Good;
        assert_eq!(dpofua, fua);
        // RMB.
        let ejects = world.run(&[0x1B, 0, 0, 0, 2, 0]).outcome.status == ScsiStatus::Good;
        assert_eq!(inquiry(&mut world, None)[1] & 0x80 != 0, ejects);
    }
}

#[test]
fn capacity_of_large_devices_needs_16_bytes_and_descriptor_sense() {
    let mut world = World::with(Media { blocks: 1 << 33, ..media() }, Attributes::default());
    assert_eq!(world.run(&cdb10(0x25, 0, 0, 0)).good()[..4], [0xFF; 4]);
    assert_eq!(world.run(&cdb16(0x9E, 0x10, 0, 32)).good()[..8], ((1_u64 << 33) - 1).to_be_bytes());
    assert_eq!(world.run(&cdb16(0x9E, 0x10, 0, 12)).good().len(), 12);
    assert!(world.run(&cdb16(0x88, 0, 1 << 33, 1)).outcome.descriptor_sense);
}

#[test]
fn log_pages_that_are_listed_exist() {
    let mut world = World::new();
    let log = |code: u8, subpage: u8| [0x4D, 0, 0x40 | code, subpage, 0, 0, 0, 0, 255, 0];
    let list = world.run(&log(0, 0)).good();
    for code in 0..0x3F {
        let end = world.run(&log(code, 0));
        assert_eq!(end.outcome.status == ScsiStatus::Good, list[4..].contains(&code), "{code:02x}");
    }
    assert_eq!(world.run(&log(0, 0xFF)).good()[0], 0x40);
    assert_eq!(world.run(&log(0x2F, 1)).sense(), INVALID_FIELD);
}

#[test]
fn defect_lists_are_empty() {
    let mut world = World::new();
    assert_eq!(world.run(&[0x37, 0, 0x1D, 0, 0, 0, 0, 0, 8, 0]).good(), [0, 0x1D, 0, 0]);
    assert_eq!(world.run(&[0xB7, 0x1D, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0]).good(), [0, 0x1D, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn task_management_functions_are_reported_in_both_forms() {
    let mut world = World::new();
    assert_eq!(world.run(&cdb12(0xA3, 0x0D, 0, 4)).good(), [0xDA, 0, 0, 0]);
    let mut cdb = cdb12(0xA3, 0x0D, 0, 16);
    cdb[2] = 0x80;
    assert_eq!(world.run(&cdb).good().len(), 16);
    assert_eq!(world.run(&cdb12(0xA3, 0x0D, 0, 3)).sense(), INVALID_FIELD);
}

#[test]
fn target_port_groups_without_explicit_states_cannot_be_set_and_are_not_claimed() {
    let mut world = World::new();
    let set = cdb12(0xA4, 0x0A, 0, 0);
    world.run(&set).good();
    for (access_type, reports) in [(1, true), (0, false)] {
        world.unit.change_access_groups(None, |groups| {
            groups.set_attribute(crate::alua::DEFAULT_GROUP, "alua_access_type", access_type).unwrap();
        });
        assert_eq!(u64::from(inquiry(&mut world, None)[5] >> 4 & 3), access_type);
        assert_eq!(opcodes(&mut world, 2, 0xA4, 0x0A).good(), [0, 1, 0, 0]);
        assert!(world.run(&set).outcome.status == ScsiStatus::CheckCondition);
        let report = world.run(&cdb12(0xA3, 0x0A, 0, 255)).outcome.status == ScsiStatus::Good;
        assert_eq!(report, reports);
        assert_eq!(opcodes(&mut world, 2, 0xA3, 0x0A).good().len() > 4, reports);
        let has_group = inquiry(&mut world, Some(0x83)).windows(2).any(|two| two == [0x51, 0x95]);
        assert_eq!(has_group, reports);
    }
}
