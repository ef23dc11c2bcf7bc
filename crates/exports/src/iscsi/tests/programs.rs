//! Tests commands that consist of several block requests.

use super::client::{Client, Options, Session, read10, unit, write10};
use super::rig::{self, Reactor};
use proto::iscsi::pdu::{RESERVED_TAG, TaskFunction, TaskResult};

const GOOD: u8 = 0;
const CHECK: u8 = 2;

/// Returns COMPARE AND WRITE of one block.
fn compare_and_write(lba: u8) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[9], cdb[13]) = (0x89, lba, 1);
    cdb
}

fn compare(client: &mut Client, lba: u8, old: u8, new: u8) -> (u8, u8) {
    let mut data = vec![old; 512];
    data.resize(1024, new);
    let ended = client.write(0, &compare_and_write(lba), &data, 1024);
    (ended.status, ended.sense.0)
}

#[test]
fn compare_and_write_writes_only_where_the_data_is_as_expected() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    assert_eq!(compare(&mut client, 3, 0, 7), (GOOD, 0));
    assert_eq!(compare(&mut client, 3, 0, 8), (CHECK, 0xE), "a miscompare");
    assert_eq!(compare(&mut client, 3, 7, 9), (GOOD, 0));
    assert_eq!(reactor.disks[0].bytes(3 * 512, 512), [9; 512]);
    reactor.holds_no_memory();
}

#[test]
fn compare_and_write_of_two_sessions_exclude_each_other() {
    let reactor = Reactor::new(rig::Options::default());
    let unit = unit();
    let session = Session::open(&reactor, std::slice::from_ref(&unit), Options::default());
    let other = Session::open(
        &reactor,
        &[unit],
        Options { initiator: "iqn.2026-11.example:b", ..Options::default() },
    );
    let (mut client, mut neighbour) = (session.connect(&reactor), other.connect(&reactor));
    let data = |new: u8| [vec![0; 512], vec![new; 512]].concat();
    reactor.disks[0].hold(true);
    let first = client.start_write(0, &compare_and_write(0), 1024, &data(1));
    client.ping(&[]);
    let second = neighbour.start_write(0, &compare_and_write(0), 1024, &data(2));
    neighbour.ping(&[]);
    assert_eq!(reactor.disks[0].held(), 1, "the second one waits");
    reactor.release(0);
    let ended = [client.end_of(first, &[]), neighbour.end_of(second, &[])];
    assert_eq!(ended.each_ref().map(|ended| (ended.status, ended.sense.0)), [(GOOD, 0), (CHECK, 0xE)]);
    assert_eq!(reactor.disks[0].bytes(0, 512), [1; 512]);
    reactor.holds_no_memory();
}

#[test]
fn an_aborted_program_gives_up_its_claim() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    let data = [vec![0; 512], vec![1; 512]].concat();
    // The first command is in the stack, the second waits for the claim of the first.
    client.start_write(0, &compare_and_write(0), 1024, &data);
    client.start_write(0, &compare_and_write(0), 1024, &data);
    let function = client.management(TaskFunction::AbortTaskSet, 0, RESERVED_TAG, 0);
    client.ping(&[]);
    reactor.release(0);
    assert_eq!(client.managed(function), TaskResult::Complete);
    assert_eq!(compare(&mut client, 0, 0, 5), (GOOD, 0));
    assert_eq!(client.write(0, &write10(0, 1), &[6; 512], 512).status, GOOD);
    reactor.holds_no_memory();
}

#[test]
fn a_program_with_more_requests_than_tags_completes() {
    let reactor = Reactor::new(rig::Options { depth: 1, ..rig::Options::default() });
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    // WRITE SAME(16) of 32768 blocks with a pattern.
    let mut cdb = [0; 16];
    (cdb[0], cdb[12]) = (0x93, 0x80);
    for round in 0..4 {
        let (same, read) = (client.start_write(0, &cdb, 512, &[0xA5 + round; 512]), read10(0, 1));
        let read = client.start_read(0, &read, 512);
        let mut left = vec![same, read];
        while !left.is_empty() {
            let (response, _) = client.receive().unwrap();
            let (itt, status) = match response {
                proto::iscsi::pdu::Response::ScsiResponse(pdu) => (pdu.itt, pdu.status),
                proto::iscsi::pdu::Response::DataIn(pdu) => (pdu.itt, pdu.status.unwrap()),
                other => panic!("{other:?}"),
            };
            assert_eq!(status, GOOD);
            left.retain(|other| *other != itt);
        }
        assert!(reactor.disks[0].bytes(0, 16 << 20).iter().all(|byte| *byte == 0xA5 + round));
    }
    reactor.holds_no_memory();
}

#[test]
fn a_parameter_list_is_received_before_the_command_begins() {
    let reactor = Reactor::new(rig::Options::default());
    let mut media = scsi::Media::new(rig::BLOCKS, 512);
    media.can = scsi::Can::UNMAP;
    let identity = scsi::Identity::new("BLKYARD", "disk", "1", "0123456789abcdef");
    let unit = scsi::LogicalUnit::new(identity, media, scsi::Attributes::default());
    unit.set_attribute("emulate_tpu", 1).unwrap();
    let session = Session::open(&reactor, &[unit], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].fill(0, &[1; 8192]);
    // UNMAP of blocks 2 to 5.
    let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
    list.extend_from_slice(&2_u64.to_be_bytes());
    list.extend_from_slice(&4_u32.to_be_bytes());
    list.extend_from_slice(&[0; 4]);
    let mut cdb = [0; 16];
    (cdb[0], cdb[8]) = (0x42, 24);
    // The list is sent as immediate data, then in answer to an R2T.
    for immediate in [24, 0] {
        reactor.disks[0].fill(0, &[1; 8192]);
        assert_eq!(client.write(0, &cdb, &list, immediate).status, GOOD);
        let bytes = reactor.disks[0].bytes(0, 8192);
        assert_eq!((bytes[1023], bytes[1024], bytes[3071], bytes[3072]), (1, 0, 0, 1));
    }
    reactor.holds_no_memory();
}
#[test]
fn extended_copy_moves_data_between_the_luns_of_a_session() {
    let reactor = Reactor::new(rig::Options { disks: 2, ..rig::Options::default() });
    let name = |serial| scsi::Identity::new("BLKYARD", "disk", "1", serial);
    let media = scsi::Media::new(rig::BLOCKS, 512);
    let units = ["11111111", "22222222"]
        .map(|serial| scsi::LogicalUnit::new(name(serial), media, scsi::Attributes::default()));
    let session = Session::open(&reactor, &units, Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].fill(512, &[0x5C; 4096]);
    // LID1: two target descriptors (E4h), one segment descriptor (02h): 8 blocks from LBA 1 to LBA 100.
    let mut list = vec![0; 16];
    list[2..4].copy_from_slice(&64_u16.to_be_bytes());
    list[8..12].copy_from_slice(&28_u32.to_be_bytes());
    for unit in &units {
        let mut target = [0; 32];
        (target[0], target[4], target[5], target[7]) = (0xE4, 1, 3, 16);
        target[8..24].copy_from_slice(&unit.identity().naa);
        target[30] = 2;
        list.extend_from_slice(&target);
    }
    let mut segment = [0; 28];
    (segment[0], segment[1], segment[3], segment[7], segment[11]) = (0x02, 2, 24, 1, 8);
    (segment[19], segment[27]) = (1, 100);
    list.extend_from_slice(&segment);
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x83, list.len() as u8);
    let ended = client.write(0, &cdb, &list, list.len());
    assert_eq!((ended.status, ended.sense), (GOOD, (0, 0, 0)));
    assert_eq!(reactor.disks[1].bytes(100 * 512, 4096), [0x5C; 4096]);
    reactor.holds_no_memory();
}
