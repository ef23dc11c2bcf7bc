//! Zoned devices over vhost-user: what a driver with `VIRTIO_BLK_F_ZONED` reads and may do.

use blockyard_tests::server::{Engine, Sandbox, Server};
use blockyard_tests::vhost_user::{FrontEnd, Queue};
use proto::vhost_user::{Request, VringFile, VringState};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use virtio::Features;
use virtio::blk::{
    Kind, S_IOERR, S_OK, S_UNSUPP, S_ZONE_ACTIVE_RESOURCE, S_ZONE_INVALID_CMD, S_ZONE_OPEN_RESOURCE,
    S_ZONE_UNALIGNED_WP,
};

const MIB: u64 = 1 << 20;
/// Sectors of a zone.
const ZONE: u64 = MIB / 512;
/// Eight zones of 1 MiB, of which 768 KiB are writable; the first is conventional, and the last read-only.
const STACK: &str = "null:8M,memory_backed,zoned,zone_size=1M,zone_capacity=768k,zone_nr_conv=1,zone_max_open=2,\
                     zone_max_active=3,zone_append_max_sectors=64,zone_readonly=14336";

fn serve(sandbox: &Sandbox) -> (Server, FrontEnd) {
    let socket = sandbox.path("vm.sock");
    let export = format!("unix:{}", socket.display());
    let mut command = sandbox.blockyard(&["serve", STACK, "--vhost-user", &export, "--name", "disk"]);
    let server = sandbox.start(&mut command, 1);
    (server, FrontEnd::connect(&socket, 8 * MIB))
}

/// A descriptor of a zone report.
#[derive(PartialEq, Eq, Debug)]
struct Zone {
    capacity: u64,
    start: u64,
    write_pointer: u64,
    kind: u8,
    condition: u8,
}

/// Reads a report of `room` bytes from a sector on: the header's number, and that many zones.
fn report(front: &FrontEnd, queue: &mut Queue, sector: u64, room: u32) -> Vec<Zone> {
    assert_eq!(queue.perform(Kind::ZoneReport, sector, room), S_OK);
    let mut bytes = vec![0; room as usize];
    assert!(front.table().read(queue.data(0), &mut bytes));
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let zone = |at: usize| Zone {
        capacity: word(at),
        start: word(at + 8),
        write_pointer: word(at + 16),
        kind: bytes[at + 24],
        condition: bytes[at + 25],
    };
    (1..=word(0) as usize).map(|number| zone(number * 64)).collect()
}

fn pointer_of(front: &FrontEnd, queue: &mut Queue, zone: u64) -> u64 {
    report(front, queue, zone * ZONE, 128)[0].write_pointer - zone * ZONE
}

#[test]
fn a_driver_reads_the_zones_of_a_device() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (_server, mut front) = serve(&sandbox);
    assert!(front.features().contains(Features::ZONED) && !front.features().contains(Features::DISCARD));
    let config = front.config();
    let number = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().expect("four bytes"));
    assert_eq!([72, 76, 80, 84, 88, 92].map(number), [2048, 2, 3, 64, 512, 1]);
    let mut queue = front.start_queue(0, 64, 2, 64 << 10);
    let zones = report(&front, &mut queue, 0, 64 * 20);
    assert_eq!(zones.len(), 8);
    let conventional = Zone { capacity: ZONE, start: 0, write_pointer: u64::MAX, kind: 1, condition: 0 };
    assert_eq!((zones[0].kind, zones[0].condition, zones[0].capacity), (1, 0, conventional.capacity));
    let empty = Zone { capacity: 1536, start: ZONE, write_pointer: ZONE, kind: 2, condition: 1 };
    assert_eq!(zones[1], empty);
    assert_eq!(zones[7].condition, 13);
    // As many as there is room for, from the zone of the sector on.
    let some = report(&front, &mut queue, 3 * ZONE + 5, 64 * 3 + 10);
    assert_eq!(some.iter().map(|zone| zone.start).collect::<Vec<_>>(), [3 * ZONE, 4 * ZONE]);
    assert_eq!(queue.perform(Kind::ZoneReport, 0, 63), S_ZONE_INVALID_CMD);
    assert_eq!(queue.perform(Kind::ZoneReport, 8 * ZONE, 128), S_ZONE_INVALID_CMD);
}

#[test]
fn zones_are_written_at_their_pointer_and_appends_report_their_sector() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (_server, mut front) = serve(&sandbox);
    let mut queue = front.start_queue(0, 64, 8, 64 << 10);
    let block = |byte: u8| vec![byte; 4096];
    queue.write(&front, MIB, &block(1));
    assert!(front.table().write(queue.data(0), &block(2)));
    assert_eq!(queue.perform(Kind::Write, ZONE, 4096), S_ZONE_UNALIGNED_WP);
    assert_eq!(queue.perform(Kind::Write, ZONE + 16, 4096), S_ZONE_UNALIGNED_WP);
    assert_eq!(queue.perform(Kind::Write, 7 * ZONE, 4096), S_ZONE_INVALID_CMD, "read-only");
    // Appends at once: each one reports a place of its own.
    for slot in 0..8u16 {
        assert!(front.table().write(queue.data(slot), &block(10 + slot as u8)));
        assert!(queue.add(slot, Kind::ZoneAppend, ZONE, 4096));
    }
    queue.publish();
    (0..8).for_each(|_| assert_eq!(queue.wait().status, S_OK));
    let mut places: Vec<u64> = (0..8u16).map(|slot| queue.append_sector(slot)).collect();
    for slot in 0..8u16 {
        let data = queue.read(&front, places[usize::from(slot)] * 512, 4096);
        assert!(data == block(10 + slot as u8), "slot {slot}");
    }
    places.sort_unstable();
    assert_eq!(places, (1..9).map(|number| ZONE + number * 8).collect::<Vec<_>>());
    for (sector, len, status) in [
        (ZONE + 8, 4096, S_ZONE_INVALID_CMD),
        (ZONE, 33 << 10, S_ZONE_INVALID_CMD),
        (0, 4096, S_ZONE_INVALID_CMD),
        (ZONE, 100, S_ZONE_UNALIGNED_WP),
        (9 * ZONE, 4096, S_ZONE_INVALID_CMD),
    ] {
        assert_eq!(queue.perform(Kind::ZoneAppend, sector, len), status, "{len} bytes at {sector}");
    }
    assert_eq!(queue.perform(Kind::Read, 9 * ZONE, 4096), S_IOERR);
}

#[test]
fn zones_are_opened_closed_finished_and_reset() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (_server, mut front) = serve(&sandbox);
    let mut queue = front.start_queue(0, 64, 2, 64 << 10);
    let mut zone = |kind, number: u64| queue.perform(kind, number * ZONE, 0);
    assert_eq!([zone(Kind::ZoneOpen, 1), zone(Kind::ZoneOpen, 2)], [S_OK; 2]);
    assert_eq!(zone(Kind::ZoneOpen, 3), S_ZONE_OPEN_RESOURCE);
    assert_eq!(queue.perform(Kind::Write, ZONE, 512), S_OK);
    assert_eq!(queue.perform(Kind::Write, 2 * ZONE, 512), S_OK);
    let mut zone = |kind, number: u64| queue.perform(kind, number * ZONE, 0);
    assert_eq!([zone(Kind::ZoneClose, 1), zone(Kind::ZoneOpen, 3)], [S_OK; 2]);
    assert_eq!([zone(Kind::ZoneClose, 2), zone(Kind::ZoneOpen, 4)], [S_OK, S_ZONE_ACTIVE_RESOURCE]);
    assert_eq!([zone(Kind::ZoneFinish, 1), zone(Kind::ZoneReset, 2)], [S_OK; 2]);
    assert_eq!([zone(Kind::ZoneOpen, 0), zone(Kind::ZoneReset, 0)], [S_ZONE_INVALID_CMD; 2]);
    let conditions: Vec<u8> =
        report(&front, &mut queue, 0, 64 * 9).iter().map(|zone| zone.condition).collect();
    assert_eq!(conditions, [0, 14, 1, 3, 1, 1, 1, 13]);
    assert_eq!(queue.perform(Kind::Write, ZONE + 1536, 512), S_ZONE_INVALID_CMD, "full");
    assert_eq!(queue.perform(Kind::ZoneOpen, ZONE + 1, 0), S_ZONE_INVALID_CMD);
    assert_eq!(queue.perform(Kind::ZoneResetAll, 0, 0), S_OK);
    assert_eq!(pointer_of(&front, &mut queue, 1), 0);
    assert!(queue.read(&front, MIB, 512).iter().all(|byte| *byte == 0));
    assert_eq!(queue.perform(Kind::Discard, 0, 16), S_UNSUPP);
}

#[test]
fn a_driver_without_zones_cannot_use_a_zoned_device() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (_server, front) = serve(&sandbox);
    drop(front);
    let stream = UnixStream::connect(sandbox.path("vm.sock")).expect("the socket");
    let mut front = FrontEnd::over(stream, 4 * MIB, Features::VERSION_1);
    let queue = Queue::new(&mut front, 0, 64, 2, 4096);
    front.done(&Request::SetVringNum(VringState { index: 0, num: 64 }), &[]);
    front.set_addresses(&queue, 0);
    front.done(&Request::SetVringKick(VringFile { index: 0, has_fd: true }), &[queue.kick().as_fd()]);
    assert!(!front.is_done(&Request::SetVringEnable(VringState { index: 0, num: 1 }), &[]));
}
