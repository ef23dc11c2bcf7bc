//! Tests commands on the state that nexuses share: reservations, access states, third-party copy and
//! SANITIZE, as initiators send them. The iscsi-test-cu suites of these names test the same behaviour.

use super::*;
use crate::reservation::Kind;
use crate::sense::{Key, Specific};
use std::io;
use std::sync::Mutex;
use std::time::Duration;

const CONFLICT: ScsiStatus = ScsiStatus::ReservationConflict;

/// Executes PERSISTENT RESERVE OUT.
fn out(world: &mut World, nexus: &Arc<Nexus>, action: u8, kind: u8, keys: [u64; 2], flags: u8) -> End {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&keys[0].to_be_bytes());
    list[8..16].copy_from_slice(&keys[1].to_be_bytes());
    list[20] = flags;
    world.run_as(nexus, &[0x5F, action, kind, 0, 0, 0, 0, 0, 24, 0], &list, 0)
}

fn register(world: &mut World, nexus: &Arc<Nexus>, key: u64) {
    out(world, nexus, 6, 0, [0, key], 0).good();
}

fn read(world: &mut World, nexus: &Arc<Nexus>) -> ScsiStatus {
    world.run_as(nexus, &cdb10(0x28, 0, 1, 1), &[], 512).outcome.status
}

fn write(world: &mut World, nexus: &Arc<Nexus>) -> ScsiStatus {
    world.run_as(nexus, &cdb10(0x2A, 0, 1, 1), &[0; 512], 0).outcome.status
}

fn both(world: &World) -> [Arc<Nexus>; 2] {
    [world.nexus.clone(), world.other.clone()]
}

/// Executes TEST UNIT READY: returns the sense key, code and qualifier, or zeroes.
fn ready(world: &mut World, nexus: &Arc<Nexus>) -> (u8, u8, u8) {
    let end = world.run_as(nexus, &[0; 6], &[], 0);
    if end.outcome.status == ScsiStatus::Good { (0, 0, 0) } else { end.sense() }
}

#[test]
fn reads_and_writes_meet_the_reservation_on_the_fast_path_too() {
    for kind in Kind::ALL {
        let mut world = World::new();
        let [a, b] = both(&world);
        register(&mut world, &a, 1);
        out(&mut world, &a, 1, kind as u8, [1, 0], 0).good();
        let good_if = |is_good: bool| if is_good { ScsiStatus::Good } else { CONFLICT };
        assert_eq!([read(&mut world, &a), write(&mut world, &a)], [ScsiStatus::Good; 2]);
        assert_eq!([read(&mut world, &b), write(&mut world, &b)], [good_if(kind.admits_reads()), CONFLICT]);
        register(&mut world, &b, 2);
        let admits = good_if(kind.admits_registered());
        assert_eq!(write(&mut world, &b), admits, "{kind:?}");
        // A new session of the same initiator port is the same nexus.
        world.unit.detach_nexus(&a, NexusLoss::Loss);
        let again = world.unit.attach_nexus(a.name().clone(), Lun::new(0), Access::ReadWrite);
        again.take_attention(true);
        assert_eq!(write(&mut world, &again), ScsiStatus::Good, "{kind:?}");
        let third = world.unit.attach_nexus(name(3), Lun::new(0), Access::ReadWrite);
        third.take_attention(true);
        assert_eq!(write(&mut world, &third), CONFLICT, "a nexus that came later");
    }
}

#[test]
fn preempt_reports_to_the_victim_and_counts_once() {
    let mut world = World::new();
    let [a, b] = both(&world);
    register(&mut world, &a, 1);
    register(&mut world, &b, 2);
    let epoch = a.epoch();
    out(&mut world, &b, 5, 3, [2, 1], 0).good();
    assert!(a.epoch() > epoch, "its commands are aborted");
    assert_eq!(ready(&mut world, &a), (6, 0x2A, 0x05));
    assert_eq!([ready(&mut world, &a), ready(&mut world, &b)], [(0, 0, 0); 2]);
    let keys = world.run(&[0x5E, 0, 0, 0, 0, 0, 0, 0x40, 0, 0]).good();
    assert_eq!((keys[3], keys[7], keys.len(), keys[15]), (3, 8, 16, 2));
}

/// A store that keeps images in memory; `None` in `images` means that the stored image was removed.
#[derive(Default)]
struct Store {
    images: Mutex<Vec<Option<String>>>,
    fails: Mutex<bool>,
}

impl AptplStore for Store {
    fn store(&self, image: Option<&str>) -> io::Result<()> {
        if *self.fails.lock().unwrap() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.images.lock().unwrap().push(image.map(str::to_owned));
        Ok(())
    }
}

#[test]
fn nothing_is_acknowledged_before_it_is_stored() {
    const APTPL: u8 = 0x01;
    let mut world = World::new();
    let [a, b] = both(&world);
    assert_eq!(out(&mut world, &a, 0, 0, [0, 1], APTPL).sense(), INVALID_PARAMETER, "there is no store");
    let store = Arc::new(Store::default());
    world.unit.set_aptpl_store(Some(store.clone()));
    out(&mut world, &a, 0, 0, [0, 1], APTPL).good();
    *store.fails.lock().unwrap() = true;
    let before = world.unit.reservations();
    assert_eq!(out(&mut world, &a, 1, 3, [1, 0], 0).sense(), (4, 0x44, 0x00));
    assert_eq!(world.unit.reservations(), before, "without effect");
    *store.fails.lock().unwrap() = false;
    out(&mut world, &a, 1, 3, [1, 0], 0).good();
    let image = store.images.lock().unwrap().last().cloned().flatten().unwrap();

    // After a restart the other nexus is still denied access.
    let mut later = World::new();
    later.unit.restore_reservations(reservation::Reservations::parse_image(&image).unwrap());
    let [later_a, later_b] = both(&later);
    assert_eq!([write(&mut later, &later_a), read(&mut later, &later_b)], [ScsiStatus::Good, CONFLICT]);
    assert_eq!(read(&mut world, &b), CONFLICT);
    out(&mut world, &a, 6, 0, [0, 1], 0).good();
    assert_eq!(store.images.lock().unwrap().last(), Some(&None), "APTPL 0 removes the image");
}

/// A store that other servers change as well.
#[derive(Default)]
struct Common {
    image: Mutex<Option<String>>,
    valid_for: Mutex<Duration>,
    waits: Mutex<u32>,
    fails: Mutex<bool>,
}

impl AptplStore for Common {
    fn store(&self, image: Option<&str>) -> io::Result<()> {
        *self.image.lock().unwrap() = image.map(str::to_owned);
        Ok(())
    }

    fn valid_for(&self) -> Option<Duration> {
        Some(*self.valid_for.lock().unwrap())
    }

    fn load(&self) -> io::Result<Option<reservation::Reservations>> {
        if *self.fails.lock().unwrap() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let image = self.image.lock().unwrap().clone();
        image
            .map(|image| reservation::Reservations::parse_image(&image).map_err(io::Error::other))
            .transpose()
    }

    fn await_others(&self) {
        *self.waits.lock().unwrap() += 1;
    }
}

#[test]
fn reservations_of_a_common_store_are_outdated_until_they_are_read() {
    const HOUR: Duration = Duration::from_secs(3600);
    let (mut one, mut two) = (World::new(), World::new());
    let [a, b] = [one.nexus.clone(), two.other.clone()];
    assert!(!one.unit.is_outdated(), "it has no common store");
    let store = Arc::new(Common { valid_for: Mutex::new(HOUR), ..Common::default() });
    for unit in [&one.unit, &two.unit] {
        unit.set_aptpl_store(Some(store.clone()));
        assert!(unit.is_outdated(), "it was never read");
        unit.refresh_reservations().unwrap();
        assert!(!unit.is_outdated());
    }
    out(&mut one, &a, 0, 0, [0, 1], 0).good();
    out(&mut one, &a, 1, 3, [1, 0], 0).good();
    assert_eq!(*store.waits.lock().unwrap(), 2, "each change is announced");
    assert_eq!(read(&mut two, &b), ScsiStatus::Good, "the other server has not read it");
    two.unit.refresh_reservations().unwrap();
    assert_eq!(read(&mut two, &b), CONFLICT);

    // With a validity of zero, every value read is out of date.
    *store.valid_for.lock().unwrap() = Duration::ZERO;
    two.unit.refresh_reservations().unwrap();
    std::thread::sleep(Duration::from_millis(1));
    assert!(two.unit.is_outdated() && !one.unit.is_outdated());
    *store.fails.lock().unwrap() = true;
    assert!(one.unit.refresh_reservations().is_err() && one.unit.reservations().held().is_some());
}

#[test]
fn persistent_in_has_four_service_actions() {
    let mut world = World::new();
    for action in 0..0x20 {
        let end = world.run(&[0x5E, action, 0, 0, 0, 0, 0, 0x40, 0, 0]);
        assert_eq!(end.outcome.status == ScsiStatus::Good, action < 4, "{action:02x}");
    }
}

#[test]
fn reserve_ends_with_release_logout_loss_and_reset() {
    let mut world = World::new();
    let [a, b] = both(&world);
    let status = |world: &mut World, nexus: &Arc<Nexus>, opcode: u8| {
        world.run_as(nexus, &[opcode, 0, 0, 0, 0, 0], &[], 64).outcome.status
    };
    let (reserve, release, mode_sense) = (0x16, 0x17, 0x1A);
    assert_eq!(status(&mut world, &a, reserve), ScsiStatus::Good);
    assert_eq!(status(&mut world, &a, reserve), ScsiStatus::Good, "again");
    for opcode in [reserve, mode_sense, 0x00] {
        assert_eq!(status(&mut world, &b, opcode), CONFLICT, "{opcode:02x}");
    }
    assert_eq!([read(&mut world, &b), write(&mut world, &b)], [CONFLICT; 2]);
    assert_eq!(status(&mut world, &b, release), ScsiStatus::Good, "without effect");
    assert_eq!(status(&mut world, &b, reserve), CONFLICT);
    assert_eq!(status(&mut world, &a, release), ScsiStatus::Good);
    assert_eq!(status(&mut world, &b, reserve), ScsiStatus::Good);
    world.unit.reset(Reset::Unit);
    assert_eq!([ready(&mut world, &a).1, ready(&mut world, &b).1], [0x29, 0x29]);
    assert_eq!(status(&mut world, &a, reserve), ScsiStatus::Good, "after a reset");
    world.unit.detach_nexus(&a, NexusLoss::Logout);
    assert_eq!(status(&mut world, &b, reserve), ScsiStatus::Good, "after a logout");
}

#[test]
fn set_target_port_groups_is_reported_to_other_nexuses() {
    let mut world = World::new();
    let [a, b] = both(&world);
    let groups = world.run(&[0xA3, 0x0A, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]).good();
    assert_eq!((groups.len(), groups[3], groups[11], groups[15]), (16, 12, 1, 1), "one group with one port");
    let standby = [0, 0, 0, 0, 0x02, 0, 0, 0];
    world.send(&[0xA4, 0x0A, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0], &standby).good();
    assert_eq!(ready(&mut world, &a), (2, 0x04, 0x0B), "the sender gets no unit attention");
    assert_eq!(ready(&mut world, &b), (6, 0x2A, 0x06));
    assert_eq!([read(&mut world, &a), read(&mut world, &b)], [ScsiStatus::CheckCondition; 2]);
    let inquiry = world.run(&[0x12, 0, 0, 0, 96, 0]).good();
    assert_eq!(inquiry[5] >> 4 & 3, 3, "TPGS: implicit and explicit");
    world.send(&[0xA4, 0x0A, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0], &[0; 8]).good();
    assert_eq!(read(&mut world, &a), ScsiStatus::Good);
}

/// Executes EXTENDED COPY within the unit of the world.
fn extended_copy(world: &mut World, blocks: u16, from: u64, to: u64) -> End {
    let mut list = vec![0; 16 + 32 + 28];
    (list[0], list[3], list[11]) = (7, 32, 28);
    [list[16], list[20], list[21], list[23], list[46]] = [0xE4, 1, 3, 16, 2];
    list[24..40].copy_from_slice(&world.unit.identity().naa);
    (list[48], list[51]) = (0x02, 0x18);
    list[58..60].copy_from_slice(&blocks.to_be_bytes());
    list[60..68].copy_from_slice(&from.to_be_bytes());
    list[68..76].copy_from_slice(&to.to_be_bytes());
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x83, list.len() as u8);
    world.send(&cdb, &list)
}

#[test]
fn extended_copy_copies_and_leaves_a_result() {
    let mut world = World::new();
    let results = |action: u8, id: u8| [0x84, action, id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0];
    assert_eq!(world.run(&results(0, 7)).sense(), INVALID_FIELD, "no copy yet");
    let before = world.blocks(3, 2000).to_vec();
    extended_copy(&mut world, 2000, 3, 2048).good();
    assert!(world.blocks(2048, 2000) == before);
    assert_eq!(world.run(&results(0, 7)).good()[4], 1, "completed");
    assert_eq!(world.run(&results(3, 0)).good().len(), 46);
    assert_eq!(extended_copy(&mut world, 2048, 0, BLOCKS as u64 - 1).sense(), (0xA, 0, 0));
    let mut empty = [0; 16];
    empty[0] = 0x83;
    world.send(&empty, &[]).good();
    let page = world.run(&[0x12, 1, 0x8F, 1, 0, 0]).good();
    assert_eq!(page[4..].to_vec(), copy::third_party_page(&world.unit.media()));
    assert!(world.run(&[0x12, 1, 0, 1, 0, 0]).good()[4..].is_sorted());
    world.unit.set_attribute("emulate_3pc", 0).unwrap();
    assert_eq!(extended_copy(&mut world, 1, 0, 1).sense(), INVALID_OPCODE);
    assert_eq!(world.run(&[0x12, 1, 0x8F, 1, 0, 0]).sense(), INVALID_FIELD);
    assert_eq!(world.run(&[0x12, 0, 0, 0, 96, 0]).good()[5] & 0x08, 0, "3PC");
}

#[test]
fn extended_copy_respects_write_protection_and_reservations() {
    let mut world = World::with(Media { read_only: true, ..media() }, Attributes::default());
    assert_eq!(extended_copy(&mut world, 1, 0, 1).sense(), (0xA, 0x0D, 0x01));
    let mut world = World::new();
    let other = world.other.clone();
    register(&mut world, &other, 1);
    out(&mut world, &other, 1, 1, [1, 0], 0).good();
    assert_eq!(extended_copy(&mut world, 1, 0, 1).outcome.status, CONFLICT);
}

const OVERWRITE: [u8; 10] = [0x48, 0x01, 0, 0, 0, 0, 0, 0, 6, 0];
const PATTERN: [u8; 6] = [0x01, 0, 0, 2, 0xAB, 0xCD];
const BLOCK_ERASE: [u8; 10] = [0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn sanitize_overwrites_or_erases_the_medium() {
    let mut world = World::new();
    world.send(&OVERWRITE, &PATTERN).good();
    assert!(world.disk.bytes.chunks(2).all(|pair| pair == [0xAB, 0xCD]));
    world.run(&BLOCK_ERASE).good();
    assert!(world.disk.bytes.iter().all(|byte| *byte == 0) && world.disk.holes.iter().all(|hole| *hole));
    assert_eq!(world.run(&[0x12, 1, 0xB1, 0, 64, 0]).good()[7], 0x40, "WABEREQ");
    world.run(&[0x48, 0x1F, 0, 0, 0, 0, 0, 0, 0, 0]).good();
}

#[test]
fn sanitize_refuses_reserved_bits_unknown_actions_and_protected_media() {
    let mut world = World::new();
    for action in (0..0x20).filter(|action| !matches!(action, 0x01 | 0x02 | 0x1F)) {
        assert_eq!(world.run(&[0x48, action, 0, 0, 0, 0, 0, 0, 0, 0]).sense(), INVALID_FIELD, "{action:02x}");
    }
    for (at, bits) in [(1, 0x40), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)] {
        for mut cdb in [OVERWRITE, BLOCK_ERASE] {
            cdb[at] |= bits;
            let list: &[u8] = if cdb[8] != 0 { &PATTERN } else { &[] };
            assert_eq!(world.send(&cdb, list).sense(), INVALID_FIELD, "{cdb:02x?}");
        }
    }
    let other = world.other.clone();
    world.run_as(&other, &[0x16, 0, 0, 0, 0, 0], &[], 0).good();
    assert_eq!(world.send(&OVERWRITE, &PATTERN).outcome.status, CONFLICT);
    assert_eq!(world.run(&BLOCK_ERASE).outcome.status, CONFLICT);
    let mut world = World::with(Media { read_only: true, ..media() }, Attributes::default());
    assert_eq!(world.send(&OVERWRITE, &PATTERN).sense(), PROTECTED);
    assert_eq!(world.run(&BLOCK_ERASE).sense(), PROTECTED);
    let mut world = World::with(Media { can: Can::empty(), ..media() }, Attributes::default());
    assert_eq!(world.run(&BLOCK_ERASE).sense(), INVALID_FIELD, "not a thin unit");
    assert_eq!(world.run(&[0x12, 1, 0xB1, 0, 64, 0]).good()[7], 0);
}

#[test]
fn while_a_unit_is_sanitized_every_nexus_waits_and_request_sense_has_the_progress() {
    let mut world = World::new();
    let [a, b] = both(&world);
    let command = Command { cdb: &OVERWRITE, data_in: 0, data_out: 6, attribute: TaskAttribute::Simple };
    let Begin::Parameters(parameters) = begin(&a, &command, &world.luns) else { panic!("no list") };
    let Begin::Program(mut program) = parameters.begin(&PATTERN, &world.luns) else { panic!("no program") };
    let in_progress = (2, 0x04, 0x1B);
    let late = world.unit.attach_nexus(name(3), Lun::new(0), Access::ReadWrite);
    late.take_attention(true);
    for nexus in [&a, &b, &late] {
        assert_eq!(ready(&mut world, nexus), in_progress);
        assert_eq!([read(&mut world, nexus), write(&mut world, nexus)], [ScsiStatus::CheckCondition; 2]);
        world.run_as(nexus, &[0x12, 0, 0, 0, 96, 0], &[], 96).good();
        let sense = world.run_as(nexus, &[0x03, 0, 0, 0, 18, 0], &[], 18).good();
        assert_eq!((sense[2], sense[12], sense[13], sense[15]), (2, 0x04, 0x1B, 0x80));
    }
    // The operation continues after the session has ended and the unit was reset.
    world.unit.reset(Reset::Unit);
    world.unit.detach_nexus(&a, NexusLoss::Loss);
    ready(&mut world, &b);
    assert_eq!(ready(&mut world, &b), in_progress);
    assert_eq!(world.program(&mut program, &[]).status, ScsiStatus::Good);
    assert_eq!((ready(&mut world, &b), read(&mut world, &b)), ((0, 0, 0), ScsiStatus::Good));
}

#[test]
fn a_unit_whose_sanitizing_was_cut_off_keeps_its_data_from_everybody() {
    let mut world = World::new();
    let [a, b] = both(&world);
    let cdb = [0x48, 0x22, 0, 0, 0, 0, 0, 0, 0, 0];
    let command = Command { cdb: &cdb, data_in: 0, data_out: 0, attribute: TaskAttribute::Simple };
    drop(begin(&a, &command, &world.luns));
    assert_eq!(ready(&mut world, &b), (3, 0x31, 0x03));
    assert_eq!(read(&mut world, &a), ScsiStatus::CheckCondition);
    let sense = world.unit.guards.sanitize.sense();
    assert!(matches!(sense, Some(Sense { key: Key::MediumError, specific: Specific::None, .. })));
    world.run(&[0x48, 0x1F, 0, 0, 0, 0, 0, 0, 0, 0]).good();
    assert_eq!(read(&mut world, &b), ScsiStatus::Good);
}

/// The table of commands and the tables of conflicts are written separately; this test finds commands that
/// were added to only one.
#[test]
fn the_table_of_commands_and_the_tables_of_conflicts_agree() {
    use crate::opcodes::Medium;
    use crate::reservation::{Persistent, rules};
    for row in crate::opcodes::TABLE {
        let mut cdb = [0; 32];
        (cdb[0], cdb[1]) = (row.opcode, row.action.unwrap_or(0) as u8);
        let found = rules(&cdb).persistent;
        match row.medium {
            Medium::Written => {
                assert_eq!(found, Persistent::Writes, "{:02x} {:02x?}", row.opcode, row.action)
            }
            Medium::Needed => assert_ne!(found, Persistent::Own, "{:02x} {:02x?}", row.opcode, row.action),
            Medium::Unused => {}
        }
    }
}
