//! Tests unit attentions, mode pages, and other commands that do not access data of the medium.

use super::*;

const READY: [u8; 6] = [0; 6];
const REQUEST_SENSE: [u8; 6] = [0x03, 0, 0, 0, 252, 0];

fn mode_sense(page: u8, control: u8) -> [u8; 6] {
    [0x1A, 0x08, control << 6 | page, 0, 255, 0]
}

/// Changes bits of a mode page's byte with MODE SELECT (6).
fn mode_select(world: &mut World, page: u8, at: usize, clear: u8, set: u8) -> End {
    let mut list = world.run(&mode_sense(page, 0)).good();
    list[0] = 0;
    list[2] = 0;
    list[4 + at] = list[4 + at] & !clear | set;
    world.send(&[0x15, 0x10, 0, 0, list.len() as u8, 0], &list)
}

#[test]
fn a_new_nexus_reports_power_on_once_and_inquiry_and_report_luns_do_not() {
    let mut world = World::new();
    let nexus = world.unit.attach_nexus(name(3), Lun::new(0), Access::ReadWrite);
    world.run_as(&nexus, &[0x12, 0, 0, 0, 96, 0], &[], 96).good();
    world.run_as(&nexus, &cdb12(0xA0, 0, 0, 64), &[], 64).good();
    assert_eq!(world.run_as(&nexus, &cdb10(0x28, 0, 0, 1), &[], 512).sense(), (6, 0x29, 0));
    world.run_as(&nexus, &cdb10(0x28, 0, 0, 1), &[], 512).good();
}

#[test]
fn request_sense_reports_and_clears_a_unit_attention() {
    let mut world = World::new();
    world.nexus.raise(Attention::CAPACITY_CHANGED);
    world.nexus.raise(Attention::LUNS_CHANGED);
    let data = world.run(&REQUEST_SENSE).good();
    assert_eq!((data[0], data[2], data[12], data[13]), (0x70, 6, 0x2A, 0x09));
    let mut descriptor = REQUEST_SENSE;
    descriptor[1] = 1;
    let data = world.run(&descriptor).good();
    assert_eq!(data, [0x72, 6, 0x3F, 0x0E, 0, 0, 0, 0]);
    let data = world.run(&REQUEST_SENSE).good();
    assert_eq!((data.len(), data[2], data[12]), (18, 0, 0));
    world.run(&READY).good();
}

#[test]
fn report_luns_clears_the_attention_about_luns() {
    let mut world = World::new();
    world.nexus.report_luns_changed();
    assert_eq!(world.run(&READY).sense(), (6, 0x3F, 0x0E));
    world.nexus.report_luns_changed();
    world.run(&cdb12(0xA0, 0, 0, 256)).good();
    world.run(&READY).good();
}

#[test]
fn a_nexus_that_was_lost_reports_the_loss_when_it_comes_back() {
    let mut world = World::new();
    world.unit.detach_nexus(&world.nexus, NexusLoss::Loss);
    world.unit.detach_nexus(&world.other, NexusLoss::Logout);
    for (number, code) in [(1, 7), (2, 0)] {
        let nexus = world.unit.attach_nexus(name(number), Lun::new(0), Access::ReadWrite);
        assert_eq!(world.run_as(&nexus, &READY, &[], 0).sense(), (6, 0x29, code));
    }
}

#[test]
fn a_resize_is_reported_to_every_nexus_and_takes_effect() {
    let mut world = World::new();
    world.unit.set_media(Media { blocks: 100, ..media() });
    let (own, other) = (world.nexus.clone(), world.other.clone());
    for nexus in [own, other] {
        assert_eq!(world.run_as(&nexus, &READY, &[], 0).sense(), (6, 0x2A, 9));
        assert_eq!(world.run_as(&nexus, &cdb10(0x28, 0, 100, 1), &[], 512).sense(), OUT_OF_RANGE);
        world.run_as(&nexus, &cdb10(0x28, 0, 99, 1), &[], 512).good();
    }
    assert_eq!(world.run(&cdb10(0x25, 0, 0, 0)).good(), [0, 0, 0, 99, 0, 0, 2, 0]);
}

#[test]
fn a_reset_aborts_releases_and_returns_modes_to_their_defaults() {
    let mut world = World::with(Media { removable: true, ..media() }, Attributes::default());
    mode_select(&mut world, 0x0A, 2, 0, 0x04).good();
    world.run(&[0x1E, 0, 0, 0, 1, 0]).good();
    world.run(&[0x16, 0, 0, 0, 0, 0]).good();
    let epochs = [world.nexus.epoch(), world.other.epoch()];
    world.unit.reset(Reset::Unit);
    assert!(world.nexus.epoch() > epochs[0] && world.other.epoch() > epochs[1]);
    let other = world.other.clone();
    for nexus in [&world.nexus.clone(), &other] {
        assert_eq!(world.run_as(nexus, &READY, &[], 0).sense(), (6, 0x29, 3));
    }
    assert_eq!(world.run(&mode_sense(0x0A, 0)).good()[6] & 0x04, 0);
    world.run_as(&other, &cdb10(0x28, 0, 0, 1), &[], 512).good();
    world.run(&[0x1B, 0, 0, 0, 2, 0]).good();
    world.unit.clear_task_set(&world.nexus);
    assert!(world.other.has_attention() && !world.nexus.has_attention());
}

#[test]
fn the_interlock_keeps_a_unit_attention_until_request_sense_clears_it() {
    let mut world = World::new();
    mode_select(&mut world, 0x0A, 4, 0x30, 0x20).good();
    world.nexus.raise(Attention::CAPACITY_CHANGED);
    for _ in 0..3 {
        assert_eq!(world.run(&READY).sense(), (6, 0x2A, 9));
    }
    world.run(&REQUEST_SENSE).good();
    world.run(&READY).good();
    assert_eq!(mode_select(&mut world, 0x0A, 4, 0x30, 0x10).sense(), INVALID_PARAMETER, "01b is reserved");
}

#[test]
fn mode_select_changes_what_it_says_and_notifies_the_other_nexuses() {
    let mut world = World::new();
    // D_SENSE.
    mode_select(&mut world, 0x0A, 2, 0, 0x04).good();
    assert!(world.other.has_attention() && !world.nexus.has_attention());
    let other = world.other.clone();
    assert_eq!(world.run_as(&other, &READY, &[], 0).sense(), (6, 0x2A, 1));
    let end = world.run(&cdb10(0x28, 0, u32::MAX, 1));
    let mut bytes = [0; Sense::LEN_MAX];
    let len = end.outcome.sense_bytes(&mut bytes);
    assert_eq!(bytes[..len], [0x72, 5, 0x21, 0, 0, 0, 0, 0]);
    mode_select(&mut world, 0x0A, 2, 0x04, 0).good();
    let end = world.run(&cdb10(0x28, 0, u32::MAX, 1));
    assert_eq!((end.outcome.sense_bytes(&mut bytes), bytes[0]), (18, 0x70));
    // SWP.
    mode_select(&mut world, 0x0A, 4, 0, 0x08).good();
    assert_eq!(world.run(&mode_sense(0x0A, 0)).good()[2] & 0x80, 0x80, "WP");
    assert_eq!(world.send(&cdb10(0x2A, 0, 0, 1), &[0; BLOCK]).sense(), PROTECTED);
    world.run(&cdb10(0x28, 0, 0, 1)).good();
    mode_select(&mut world, 0x0A, 4, 0x08, 0).good();
    world.send(&cdb10(0x2A, 0, 0, 1), &[0; BLOCK]).good();
    // TAS.
    assert!(world.unit.reports_aborted_tasks());
    mode_select(&mut world, 0x0A, 5, 0x40, 0).good();
    assert!(!world.unit.reports_aborted_tasks());
    // WCE: the cache is flushed, and writes are written through from then on.
    world.disk.log.clear();
    mode_select(&mut world, 0x08, 2, 0x04, 0).good();
    world.send(&cdb10(0x2A, 0, 0, 1), &[0; BLOCK]).good();
    world.send(&cdb16(0x93, 0, 0, 9), &[1; BLOCK]).good();
    assert_eq!(
        world.disk.log.iter().map(|entry| entry.0).collect::<Vec<_>>(),
        [Op::Flush, Op::Write, Op::Write]
    );
    assert!(world.disk.log[1..].iter().all(|entry| entry.3 == Flags::FUA));
}

#[test]
fn mode_select_rejects_what_cannot_change_and_changes_nothing_then() {
    let mut world = World::new();
    let before = world.run(&mode_sense(0x3F, 0)).good();
    assert_eq!(mode_select(&mut world, 0x0A, 3, 0, 0x02).sense(), INVALID_PARAMETER, "QERR");
    assert_eq!(mode_select(&mut world, 0x08, 2, 0, 0x01).sense(), INVALID_PARAMETER, "RCD");
    assert_eq!(mode_select(&mut world, 0x0A, 1, 0xFF, 9).sense(), INVALID_PARAMETER, "page length");
    assert_eq!(world.send(&[0x15, 0x11, 0, 0, 4, 0], &[0; 4]).sense(), INVALID_FIELD, "SP");
    assert_eq!(world.send(&[0x15, 0x00, 0, 0, 4, 0], &[0; 4]).sense(), INVALID_FIELD, "no PF");
    assert_eq!(world.send(&[0x15, 0x10, 0, 0, 3, 0], &[0; 3]).sense(), LIST_LENGTH);
    // The list has a correct page before a wrong one.
    let mut list = world.run(&[0x1A, 0x08, 0x0A, 0, 255, 0]).good();
    list[0] = 0;
    list[2] = 0;
    list[6] ^= 0x04;
    list.extend_from_slice(&[0x1C, 0x0A, 1]);
    assert_eq!(world.send(&[0x15, 0x10, 0, 0, list.len() as u8, 0], &list).sense(), LIST_LENGTH);
    list.extend_from_slice(&[0; 9]);
    assert_eq!(world.send(&[0x15, 0x10, 0, 0, list.len() as u8, 0], &list).sense(), INVALID_PARAMETER);
    assert_eq!(world.run(&mode_sense(0x3F, 0)).good(), before);
    assert!(!world.other.has_attention());
}

#[test]
fn mode_sense_has_all_pages_controls_and_block_descriptors() {
    let mut world = World::new();
    let all = world.run(&mode_sense(0x3F, 0)).good();
    assert_eq!(usize::from(all[0]) + 1, all.len());
    let mut at = 4;
    let mut codes = Vec::new();
    while at < all.len() {
        codes.push(all[at]);
        let len = usize::from(all[at + 1]) + 2;
        let one = world.run(&mode_sense(all[at], 0)).good();
        assert_eq!(one[4..], all[at..at + len]);
        at += len;
    }
    assert_eq!(codes, [0x01, 0x08, 0x0A, 0x1C]);
    assert_eq!(world.run(&mode_sense(0x3F, 2)).good(), all, "current values are the default ones");
    assert_eq!(world.run(&mode_sense(0x3F, 3)).sense(), (5, 0x39, 0));
    assert_eq!(world.run(&mode_sense(0x02, 0)).sense(), INVALID_FIELD);
    assert_eq!(world.run(&[0x1A, 0x08, 0x3F, 0xFF, 255, 0]).good(), all);
    assert_eq!(world.run(&[0x1A, 0x08, 0x3F, 0x01, 255, 0]).sense(), INVALID_FIELD);
    let short = world.run(&[0x1A, 0, 0x0A, 0, 255, 0]).good();
    assert_eq!((short[3], &short[4..12]), (8, &[0, 0, 0x10, 0, 0, 0, 2, 0][..]));
    let mut cdb = cdb10(0x5A, 0x10, 0, 255);
    cdb[2] = 0x0A;
    let long = world.run(&cdb).good();
    assert_eq!((long[4], long[7], long.len()), (1, 16, 8 + 16 + 12));
    assert_eq!(long[8..24], [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0]);
    assert_eq!(usize::from(long[1]) + 2, long.len());
}

#[test]
fn a_read_only_mapping_and_a_read_only_medium_refuse_writes_only() {
    let mut world = World::new();
    let nexus = world.unit.attach_nexus(name(3), Lun::new(1), Access::ReadOnly);
    nexus.take_attention(true);
    let writes: [(&[u8], usize); 8] = [
        (&cdb10(0x2A, 0, 0, 1), 1),
        (&cdb16(0x8A, 0, 0, 1), 1),
        (&cdb10(0x2E, 0, 0, 1), 1),
        (&cdb16(0x8B, 0, 0, 1), 1),
        (&compare_and_write(0, 1), 2),
        (&cdb10(0x41, 8, 0, 1), 1),
        (&cdb16(0x93, 8, 0, 1), 0),
        (&cdb10(0x42, 0, 0, 8), 1),
    ];
    for (cdb, blocks) in writes {
        assert_eq!(
            world.run_as(&nexus, cdb, &vec![0; blocks * BLOCK], 0).sense(),
            PROTECTED,
            "{:02x}",
            cdb[0]
        );
    }
    world.run_as(&nexus, &cdb10(0x28, 0, 0, 1), &[], 512).good();
    world.run_as(&nexus, &cdb10(0x35, 0, 0, 0), &[], 0).good();
    assert_eq!(world.run_as(&nexus, &mode_sense(8, 0), &[], 255).good()[2] & 0x80, 0x80);
    let mut world = World::with(Media { read_only: true, ..media() }, Attributes::default());
    for (cdb, blocks) in writes {
        assert_eq!(world.send(cdb, &vec![0; blocks * BLOCK]).sense(), PROTECTED, "{:02x}", cdb[0]);
    }
}

#[test]
fn report_luns_selects_and_commands_to_missing_units_fail() {
    let mut world = World::new();
    let mut cdb = cdb12(0xA0, 0, 0, 64);
    let luns = |data: &[u8]| data[8..].chunks(8).map(|lun| Lun(lun.try_into().unwrap())).collect::<Vec<_>>();
    let all = [Lun::new(0), Lun::new(300)];
    let cases: [(u8, &[Lun]); 6] = [
        (0, &all),
        (1, &[Lun::REPORT_LUNS]),
        (2, &[all[0], all[1], Lun::REPORT_LUNS]),
        (0x10, &[]),
        (0x11, &all),
        (0x12, &[]),
    ];
    for (select, expected) in cases {
        cdb[2] = select;
        let data = world.run(&cdb).good();
        assert_eq!(luns(&data), expected);
        assert_eq!(data[..4], (8 * expected.len() as u32).to_be_bytes());
    }
    cdb[2] = 3;
    assert_eq!(world.run(&cdb).sense(), INVALID_FIELD);
    assert_eq!(world.run(&cdb12(0xA0, 0, 0, 15)).sense(), INVALID_FIELD);
    let missing = |cdb: &[u8], lun: Lun| {
        let command = Command { cdb, data_in: 255, data_out: 0, attribute: TaskAttribute::Simple };
        no_unit(lun, &command, &Luns(all.to_vec()))
    };
    assert_eq!(missing(&[0x12, 0, 0, 0, 96, 0], Lun::new(5)).data[0], 0x7F);
    assert_eq!(missing(&READY, Lun::new(5)).sense, Sense::LUN_NOT_SUPPORTED);
    assert_eq!(missing(&cdb10(0x28, 0, 0, 1), Lun::new(5)).sense, Sense::LUN_NOT_SUPPORTED);
    assert_eq!(luns(&missing(&cdb12(0xA0, 0, 0, 64), Lun::new(5)).data), all);
    assert_eq!(missing(&REQUEST_SENSE, Lun::new(5)).data[12], 0x25);
    assert_eq!(missing(&[0x12, 0, 0, 0, 96, 0], Lun::REPORT_LUNS).data[0], 0x1E);
    assert_eq!(missing(&READY, Lun::REPORT_LUNS).status, ScsiStatus::Good);
    assert_eq!(missing(&[], Lun::new(5)).sense, Sense::LUN_NOT_SUPPORTED);
}

#[test]
fn identifying_information_is_kept_and_its_change_reported() {
    let mut world = World::new();
    let mut set = cdb12(0xA4, 0x06, 0, 3);
    world.send(&set, b"abc").good();
    assert!(world.other.has_attention());
    let mut get = cdb12(0xA3, 0x05, 0, 255);
    assert_eq!(world.run(&get).good(), b"\0\0\0\x03abc");
    (set[10], set[9]) = (0x04, 3);
    assert_eq!(world.send(&set, b"abc").sense(), INVALID_PARAMETER, "text ends with a null");
    world.send(&set, b"ab\0").good();
    get[10] = 0x04;
    assert_eq!(world.run(&get).good(), b"\0\0\0\x03ab\0");
    get[10] = 0xFE;
    assert_eq!(world.run(&get).good()[3], 8);
    get[10] = 0x02;
    assert_eq!(world.run(&get).sense(), INVALID_FIELD);
}

#[test]
fn the_echo_buffer_belongs_to_the_nexus() {
    let mut world = World::new();
    let buffer = |opcode: u8, mode: u8, len: u8| [opcode, mode, 0, 0, 0, 0, 0, 0, len, 0];
    assert_eq!(world.run(&buffer(0x3C, 0x0A, 9)).sense(), (5, 0x2C, 0));
    world.send(&buffer(0x3B, 0x0A, 9), b"blockyard").good();
    assert_eq!(world.run(&buffer(0x3C, 0x0A, 255)).good(), b"blockyard");
    let other = world.other.clone();
    assert_eq!(world.run_as(&other, &buffer(0x3C, 0x0A, 9), &[], 9).sense(), (5, 0x2C, 0));
    assert_eq!(world.run(&buffer(0x3C, 0x0B, 4)).good(), [0, 0, 0x10, 0]);
    assert_eq!(world.run(&buffer(0x3C, 0x03, 4)).good(), [0, 0, 0x10, 0]);
    assert_eq!(world.send(&buffer(0x3B, 0x05, 9), b"blockyard").sense(), INVALID_FIELD, "no microcode");
}

#[test]
fn diagnostics_find_nothing_wrong() {
    let mut world = World::new();
    world.run(&[0x1D, 0x04, 0, 0, 0, 0]).good();
    for code in [1, 2, 4, 5, 6] {
        world.run(&[0x1D, code << 5, 0, 0, 0, 0]).good();
    }
    assert_eq!(world.run(&[0x1D, 7 << 5, 0, 0, 0, 0]).sense(), INVALID_FIELD);
    world.send(&[0x1D, 0x10, 0, 0, 4, 0], &[0; 4]).good();
    assert_eq!(world.run(&[0x1C, 1, 0, 0, 255, 0]).good(), [0, 0, 0, 1, 0]);
    assert_eq!(world.run(&[0x1C, 1, 9, 0, 255, 0]).sense(), INVALID_FIELD);
}

#[test]
fn sense_data_has_both_formats() {
    let mut bytes = [0; Sense::LEN_MAX];
    let miscompare = Sense::miscompare(0x0102);
    assert_eq!(miscompare.encode(false, &mut bytes), 18);
    assert_eq!(bytes[..8], [0xF0, 0, 0x0E, 0, 0, 1, 2, 10]);
    assert_eq!(miscompare.encode(true, &mut bytes), 20);
    assert_eq!(bytes[7..20], [12, 0, 10, 0x80, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
    Sense::miscompare(1 << 40).encode(false, &mut bytes);
    assert_eq!(bytes[0], 0x70, "the offset does not fit");
    Sense::cdb_field(2, Some(5)).encode(false, &mut bytes);
    assert_eq!(bytes[15..18], [0xCD, 0, 2]);
    Sense::parameter_field(300, None).encode(true, &mut bytes);
    assert_eq!(bytes[8..16], [2, 6, 0, 0, 0x80, 1, 0x2C, 0]);
}

#[test]
fn threads_that_command_reset_and_reconfigure_a_unit_leave_it_usable() {
    let mut world = World::new();
    let unit = world.unit.clone();
    std::thread::scope(|scope| {
        for number in 10..13 {
            let unit = &unit;
            scope.spawn(move || {
                let luns = Luns(vec![Lun::new(0)]);
                for round in 0..300_u32 {
                    let nexus = unit.attach_nexus(name(number), Lun::new(0), Access::ReadWrite);
                    let cdbs: [&[u8]; 5] = [
                        &READY,
                        &cdb10(0x28, 0, 1, 1),
                        &cdb10(0x2A, 8, 1, 1),
                        &[0x16, 0, 0, 0, 0, 0],
                        &REQUEST_SENSE,
                    ];
                    for cdb in cdbs {
                        let attribute = TaskAttribute::Simple;
                        begin(&nexus, &Command { cdb, data_in: 512, data_out: 512, attribute }, &luns);
                    }
                    match round % 3 {
                        0 => unit.reset(Reset::Unit),
                        1 => unit.set_media(Media { blocks: 100 + u64::from(round), ..media() }),
                        _ => unit.clear_task_set(&nexus),
                    }
                    unit.detach_nexus(&nexus, NexusLoss::Loss);
                }
            });
        }
    });
    assert_eq!(unit.nexuses().len(), 2, "those of the threads have left");
    unit.set_media(media());
    while world.nexus.take_attention(true).is_some() {}
    world.run(&cdb10(0x28, 0, 1, 1)).good();
    world.send(&cdb10(0x2A, 0, 1, 1), &[1; BLOCK]).good();
}
