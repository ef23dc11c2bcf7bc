//! Zoned devices over iSCSI: what an initiator of host-managed units (ZBC) reads and may do.

use blockyard_tests::iscsi::initiator::Initiator;
use blockyard_tests::iscsi::{NAME, Target};
use blockyard_tests::on_both_engines;
use blockyard_tests::server::{Engine, Sandbox};
use proto::iscsi::initiator::Options;

on_both_engines!(
    an_initiator_reads_the_zones_and_manages_them,
    writes_that_break_a_rule_say_which,
    a_report_of_many_zones_is_continued,
    zones_are_counted_in_logical_blocks,
    reservations_and_read_only_mappings_keep_zones_as_they_are,
);

const MIB: u64 = 1 << 20;
/// Blocks of a zone, and of its writable part.
const ZONE: u64 = MIB / 512;
const CAPACITY: u64 = ZONE * 3 / 4;
/// Eight zones of 1 MiB, of which 768 KiB are writable; the first is conventional, and the last read-only.
const STACK: &str = "null:8M,memory_backed,zoned,zone_size=1M,zone_capacity=768k,zone_nr_conv=1,zone_max_open=2,\
                     zone_readonly=14336";

const CLOSE: u8 = 1;
const FINISH: u8 = 2;
const OPEN: u8 = 3;
const RESET: u8 = 4;

fn session(target: &Target) -> Initiator {
    session_of(target, "iqn.2026-11.io.blockyard.test:one")
}

fn session_of(target: &Target, initiator: &str) -> Initiator {
    let options = Options::new(initiator, Some(NAME));
    let mut session = Initiator::log_in(target.portal(), options).expect("a login");
    session.attentions(0);
    session
}

/// Returns a CDB of 16 bytes. `last`: its byte 14.
fn cdb(code: u8, action: u8, lba: u64, len: u32, last: u8) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[14]) = (code, action, last);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&len.to_be_bytes());
    cdb
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Returns type, condition, first block, length and write pointer of the zones from a block on.
fn zones(session: &mut Initiator, lba: u64, allocation: u32) -> Vec<(u8, u8, u64, u64, u64)> {
    let report = session.good(0, &cdb(0x95, 0, lba, allocation, 0x80), &[], allocation);
    let zones = report[64..].chunks_exact(64);
    zones.map(|one| (one[0], one[1] >> 4, word(one, 16), word(one, 8), word(one, 24))).collect()
}

fn state(session: &mut Initiator, zone: u64) -> (u8, u64) {
    let zone = zones(session, zone * ZONE, 128)[0];
    (zone.1, zone.4)
}

fn manage(session: &mut Initiator, action: u8, zone: u64) {
    session.good(0, &cdb(0x94, action, zone * ZONE, 0, 0), &[], 0);
}

fn sense(session: &mut Initiator, cdb: &[u8], data: &[u8], data_in: u32) -> Option<(u8, u8, u8)> {
    session.command(0, cdb, data, data_in).expect("an answer").sense_code()
}

fn an_initiator_reads_the_zones_and_manages_them(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let target = Target::serve(&sandbox, STACK, "", &[]);
    let mut session = session(&target);
    assert_eq!(session.good(0, &[0x12, 0, 0, 0, 96, 0], &[], 96)[0], 0x14);
    let page = session.good(0, &[0x12, 1, 0xB6, 0, 64, 0], &[], 64);
    assert_eq!((page[4], page[19], word(&page, 24)), (1, 2, ZONE), "URSWRZ, two open zones");
    let all = zones(&mut session, 0, 4096);
    assert_eq!(all.len(), 1 + 7 * 2);
    assert_eq!(all[0], (1, 0, 0, ZONE, u64::MAX));
    assert_eq!(all[1], (2, 1, ZONE, CAPACITY, ZONE));
    assert_eq!((all[2].0, all[2].2, all[2].3), (5, ZONE + CAPACITY, ZONE - CAPACITY), "the gap");
    assert_eq!((all[13].0, all[13].1), (2, 13), "read-only");

    let data = vec![0x5A; 64 << 10];
    session.good(0, &cdb(0x8A, 0, ZONE, 128, 0), &data, 0);
    assert!(session.good(0, &cdb(0x88, 0, ZONE, 128, 0), &[], 64 << 10) == data);
    assert_eq!(state(&mut session, 1), (2, ZONE + 128));
    for (action, expected) in [
        (OPEN, (3, ZONE + 128)),
        (CLOSE, (4, ZONE + 128)),
        (FINISH, (14, u64::MAX)),
        (CLOSE, (14, u64::MAX)),
        (RESET, (1, ZONE)),
    ] {
        manage(&mut session, action, 1);
        assert_eq!(state(&mut session, 1), expected, "{action}");
    }
    assert!(session.good(0, &cdb(0x88, 0, ZONE, 1, 0), &[], 512).iter().all(|byte| *byte == 0));
    // WRITE SAME of part of a zone, then all zones are reset.
    session.good(0, &cdb(0x93, 0, 2 * ZONE, 700, 0), &[0x77; 512], 0);
    assert_eq!(state(&mut session, 2), (2, 2 * ZONE + 700));
    session.good(0, &cdb(0x94, RESET, 0, 0, 1), &[], 0);
    assert_eq!(state(&mut session, 2), (1, 2 * ZONE));
    session.log_out();
}

fn writes_that_break_a_rule_say_which(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let target = Target::serve(&sandbox, STACK, "", &[]);
    let mut session = session(&target);
    let data = vec![1; 4096];
    let mut write = |lba| sense(&mut session, &cdb(0x8A, 0, lba, 8, 0), &data, 0);
    assert_eq!(write(ZONE + 8), Some((5, 0x21, 4)), "UNALIGNED WRITE COMMAND");
    assert_eq!(write(ZONE + CAPACITY - 4), Some((5, 0x21, 5)), "WRITE BOUNDARY VIOLATION");
    assert_eq!(write(ZONE - 4), Some((5, 0x21, 5)), "from a conventional zone");
    assert_eq!(write(ZONE + CAPACITY), Some((5, 0x21, 9)), "ATTEMPT TO ACCESS GAP ZONE");
    assert_eq!(write(7 * ZONE), Some((7, 0x27, 8)), "ZONE IS READ ONLY");
    let read = cdb(0x88, 0, ZONE - 4, 8, 0);
    assert_eq!(sense(&mut session, &read, &[], 4096), Some((5, 0x21, 6)), "ATTEMPT TO READ INVALID DATA");
    let large = vec![1; 1 << 20];
    let beyond = cdb(0x8A, 0, ZONE, CAPACITY as u32 + 1, 0);
    let len = (CAPACITY as usize + 1) * 512;
    assert_eq!(sense(&mut session, &beyond, &large[..len], 0), Some((5, 0x21, 5)), "into the gap");
    let whole = cdb(0x8A, 0, ZONE, CAPACITY as u32, 0);
    session.good(0, &whole, &large[..len - 512], 0);
    assert_eq!(sense(&mut session, &whole, &large[..len - 512], 0), Some((5, 0x24, 0)), "the zone is full");
    for zone in [2, 3] {
        manage(&mut session, OPEN, zone);
    }
    let open = cdb(0x94, OPEN, 4 * ZONE, 0, 0);
    assert_eq!(sense(&mut session, &open, &[], 0), Some((7, 0x55, 0x0E)), "INSUFFICIENT ZONE RESOURCES");
    let misplaced = cdb(0x94, RESET, ZONE + 1, 0, 0);
    assert_eq!(sense(&mut session, &misplaced, &[], 0), Some((5, 0x24, 0)), "INVALID FIELD IN CDB");
    session.log_out();
}

fn a_report_of_many_zones_is_continued(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let target = Target::serve(&sandbox, "null:20M,zoned,zone_size=4k", "", &[]);
    let mut session = session(&target);
    let report = session.good(0, &cdb(0x95, 0, 0, 512, 0), &[], 512);
    assert_eq!((report.len(), &report[..4]), (512, &(5120_u32 * 64).to_be_bytes()[..]), "all are counted");
    let all = zones(&mut session, 0, 1 << 20);
    assert_eq!(all.len(), 5120);
    assert!(all.iter().enumerate().all(|(index, zone)| zone.2 == index as u64 * 8));
    session.log_out();
}

fn zones_are_counted_in_logical_blocks(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let stack = "null:8M,memory_backed,blocksize=4096,zoned,zone_size=1M,zone_nr_conv=1";
    let target = Target::serve(&sandbox, stack, "", &[]);
    let mut session = session(&target);
    let page = session.good(0, &[0x12, 1, 0xB6, 0, 64, 0], &[], 64);
    assert_eq!(word(&page, 24), 256);
    let data = vec![0x33; 16384];
    // WRITE AND VERIFY, then WRITE, at the write pointer.
    session.good(0, &cdb(0x8E, 2, 256, 4, 0), &data, 0);
    session.good(0, &cdb(0x8A, 0, 260, 4, 0), &data, 0);
    assert_eq!(zones(&mut session, 256, 128), [(2, 2, 256, 256, 264)]);
    assert_eq!(sense(&mut session, &cdb(0x8A, 0, 260, 4, 0), &data, 0), Some((5, 0x21, 4)));
    // A read across two sequential zones.
    let read = session.good(0, &cdb(0x88, 0, 510, 4, 0), &[], 16384);
    assert_eq!(read, vec![0; 16384]);
    session.log_out();
}

fn reservations_and_read_only_mappings_keep_zones_as_they_are(engine: Engine) {
    const TWO: &str = "iqn.2026-11.io.blockyard.test:two";
    const THREE: &str = "iqn.2026-11.io.blockyard.test:three";
    let sandbox = Sandbox::new(engine);
    let options = format!(",acl=iqn.2026-11.io.blockyard.test:one,acl={TWO},acl-ro={THREE}");
    let target = Target::serve(&sandbox, STACK, &options, &[]);
    let (mut one, mut two) = (session(&target), session_of(&target, TWO));
    let reset = cdb(0x94, RESET, ZONE, 0, 0);
    // RESERVE (6) by the first initiator.
    one.good(0, &[0x16, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(two.command(0, &reset, &[], 0).expect("an answer").status, 0x18, "RESERVATION CONFLICT");
    one.good(0, &reset, &[], 0);
    one.good(0, &[0x17, 0, 0, 0, 0, 0], &[], 0);
    two.good(0, &reset, &[], 0);
    let mut three = session_of(&target, THREE);
    assert_eq!(sense(&mut three, &reset, &[], 0), Some((7, 0x27, 0)), "WRITE PROTECTED");
    assert_eq!(zones(&mut three, ZONE, 128), [(2, 1, ZONE, CAPACITY, ZONE)]);
    [one, two, three].into_iter().for_each(Initiator::log_out);
}
