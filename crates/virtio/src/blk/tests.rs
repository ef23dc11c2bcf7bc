use super::*;
use crate::Features;
use crate::driver::{AddressAllocator, Disk, Driver};
use crate::memory::{GuestMemory, GuestRegion, Mapping, Span};
use crate::ring::{Chain, Position, Ring};
use block::{Bytes, Flags, Op, QueueLimits, Region, Sectors};
use std::sync::Arc;

const LEN: u64 = 1 << 20;
const SHAPE: Shape =
    Shape { queues: 1, segments_max: 30, segment_len_max: 1 << 20, ranges_max: 4, is_read_only: false };

struct Rig {
    memory: Arc<GuestMemory>,
    ring: Ring,
    disk: Disk,
    chain: Chain,
    allocator: AddressAllocator,
}

fn rig() -> Rig {
    let mapping = Mapping::zeroed(LEN as usize);
    let region = GuestRegion { guest: 0, user: 0, len: LEN, mapping, region: Region(0) };
    let memory = Arc::new(GuestMemory::new(vec![region], None).unwrap());
    let features = Features::INDIRECT_DESC | Features::EVENT_IDX;
    let mut allocator = AddressAllocator::at(0);
    let layout = allocator.queue(32, features, 32);
    let driver = Driver::new(memory.clone(), &layout, features).unwrap();
    let disk = Disk::new(driver, memory.clone(), &mut allocator, 4, 8192).unwrap();
    let ring = Ring::new(memory.clone(), layout, features, Position::START).unwrap();
    Rig { ring, disk, chain: Chain::new(32), allocator, memory }
}

fn config() -> Config {
    Config::new(&limits(), Bytes(1 << 20), SHAPE)
}

fn limits() -> QueueLimits {
    let mut limits = QueueLimits {
        max_hw_discard_sectors: Sectors(100),
        max_write_zeroes_sectors: Sectors(200),
        ..QueueLimits::default()
    };
    limits.validate().unwrap();
    limits
}

impl Rig {
    /// Sends a chain with these bytes, split into readable descriptors of these lengths, and writable
    /// ranges; pops it.
    fn send(&mut self, bytes: &[u8], pieces: &[u32], writable: &[u32]) {
        assert_eq!(bytes.len(), pieces.iter().sum::<u32>() as usize);
        let mut rest = bytes;
        let readable: Vec<_> = pieces
            .iter()
            .map(|&len| {
                let address = self.allocator.take(len.into(), 1) + 3;
                self.allocator.take(3, 1);
                let piece;
                (piece, rest) = rest.split_at(len as usize);
                assert!(self.memory.write(self.memory.translate(address, len).unwrap(), piece));
                (address, len)
            })
            .collect();
        let writable: Vec<_> =
            writable.iter().map(|&len| (self.allocator.take(len.into(), 1), len)).collect();
        self.disk.driver().add(&readable, &writable).unwrap();
        let _ = self.disk.publish();
        assert_eq!(self.ring.pop(&mut self.chain), Ok(true));
    }

    fn parse(&mut self) -> Result<Request<'_>, Malformed> {
        parse(&self.memory, &mut self.chain)
    }
}

fn header(kind: Kind, sector: u64) -> Vec<u8> {
    [&kind.number().to_le_bytes()[..], &[0xee; 4], &sector.to_le_bytes()].concat()
}

fn lens(spans: &[Span]) -> Vec<u32> {
    spans.iter().map(|span| span.len()).collect()
}

#[test]
fn a_read_and_a_write_pass_from_driver_to_device_and_back() {
    let mut rig = rig();
    assert!(rig.disk.add(1, Kind::Read, 8, 4096) && rig.disk.add(2, Kind::Write, 16, 512));
    assert!(rig.disk.publish());
    for (kind, range) in [(Kind::Read, (8 * 512, 4096)), (Kind::Write, (16 * 512, 512))] {
        assert_eq!(rig.ring.pop(&mut rig.chain), Ok(true));
        let request = parse(&rig.memory, &mut rig.chain).unwrap();
        assert_eq!(request.kind, kind);
        assert_eq!(config().check_transfer(&request), Ok((Bytes(range.0), Bytes(range.1))));
        let status = if kind == Kind::Read { S_OK } else { S_IOERR };
        rig.ring.complete(&request.ticket, status);
    }
    rig.ring.publish();
    assert_eq!(rig.disk.take_completed(), Some((1, S_OK)));
    assert_eq!(rig.disk.take_completed(), Some((2, S_IOERR)));
    assert_eq!(rig.disk.take_completed(), None);
}

#[test]
fn the_boundaries_of_descriptors_have_no_meaning() {
    let data: Vec<u8> = (0..=255).cycle().take(1024).collect();
    let bytes = [header(Kind::Write, 7), data.clone()].concat();
    for pieces in [&[1040][..], &[16, 1024], &[1, 15, 24, 1000], &[20, 1020], &[5, 5, 5, 5, 20, 1000]] {
        let mut rig = rig();
        rig.send(&bytes, pieces, &[1]);
        let memory = rig.memory.clone();
        let request = rig.parse().unwrap();
        assert_eq!((request.kind, request.sector, request.len), (Kind::Write, 7, 1024), "{pieces:?}");
        let mut read = vec![0; 1024];
        let mut at = 0;
        for span in request.data {
            assert!(memory.read(*span, &mut read[at..at + span.len() as usize]));
            at += span.len() as usize;
        }
        assert_eq!(read, data);
        assert_eq!(request.ticket.written, 1);
    }
    for writable in [&[1025][..], &[1024, 1], &[1000, 25], &[512, 512, 1]] {
        let mut rig = rig();
        rig.send(&header(Kind::Read, 9), &[16], writable);
        let request = rig.parse().unwrap();
        assert_eq!((request.len, request.ticket.written, request.ticket.status.len()), (1024, 1025, 1));
        assert_eq!(lens(request.data).iter().sum::<u32>(), 1024);
    }
}

#[test]
fn a_request_without_header_or_status_is_malformed() {
    let mut rig = self::rig();
    rig.send(&[0; 15], &[15], &[1]);
    assert_eq!(rig.parse().unwrap_err(), Malformed::Header);
    let mut rig = self::rig();
    rig.send(&[0; 15], &[7, 8], &[1]);
    assert_eq!(rig.parse().unwrap_err(), Malformed::Header);
    let mut rig = self::rig();
    rig.send(&[0; 16], &[16], &[]);
    assert_eq!(rig.parse().unwrap_err(), Malformed::Status);
    let mut rig = self::rig();
    rig.send(&[], &[], &[17]);
    assert_eq!(rig.parse().unwrap_err(), Malformed::Header);
}

#[test]
fn a_header_is_read_once() {
    let mut rig = rig();
    rig.send(&header(Kind::Read, 1), &[16], &[512, 1]);
    let header = rig.chain.readable()[0];
    let memory = rig.memory.clone();
    let request = rig.parse().unwrap();
    assert!(memory.fill(header, 0xff), "the guest changes the header");
    assert_eq!((request.kind, request.sector), (Kind::Read, 1));
    assert_eq!(config().check_transfer(&request), Ok((Bytes(512), Bytes(512))));
}

#[test]
fn kinds_have_the_numbers_of_the_specification() {
    for number in 0..40 {
        assert_eq!(Kind::from_number(number).number(), number);
    }
    assert_eq!(Kind::from_number(2), Kind::Other(2), "a SCSI command of a legacy device");
    assert_eq!(Kind::from_number(14), Kind::Other(14), "secure erase");
}

#[test]
fn transfers_outside_of_the_device_fail() {
    // The device has 2048 sectors.
    for (sector, len, ok) in [
        (0, 512, true),
        (2047, 512, true),
        (2047, 1024, false),
        (2048, 512, false),
        (u64::MAX, 512, false),
        (u64::MAX / 512, 512, false),
        (1 << 55, 512, false),
        (0, 0, false),
        (0, 513, false),
        (0, 1, false),
    ] {
        for kind in [Kind::Read, Kind::Write] {
            let mut rig = rig();
            let write = kind == Kind::Write;
            let data = vec![0; if write { len } else { 0 }];
            let writable = if write { vec![1] } else { vec![len as u32, 1] };
            rig.send(
                &[header(kind, sector), data].concat(),
                &[16, if write { len as u32 } else { 0 }],
                &writable,
            );
            let result = config().check_transfer(&rig.parse().unwrap());
            let expected = if ok { Ok((Bytes(sector * 512), Bytes(len as u64))) } else { Err(S_IOERR) };
            assert_eq!(result, expected, "{sector} {len}");
        }
    }
}

#[test]
fn transfers_cover_whole_logical_blocks() {
    let mut limits = QueueLimits { logical_block_size: Bytes(4096), ..QueueLimits::default() };
    limits.validate().unwrap();
    let config = Config::new(&limits, Bytes(1 << 20), SHAPE);
    for (sector, len, ok) in [(8, 4096, true), (1, 4096, false), (8, 512, false)] {
        let mut rig = rig();
        rig.send(&header(Kind::Read, sector), &[16], &[len, 1]);
        assert_eq!(config.check_transfer(&rig.parse().unwrap()).is_ok(), ok, "{sector} {len}");
    }
}

#[test]
fn a_read_only_device_fails_writes_and_offers_no_discard() {
    let config = Config::new(&limits(), Bytes(1 << 20), Shape { is_read_only: true, ..SHAPE });
    assert!(config.features().contains(Features::RO));
    assert!(!config.features().intersects(Features::DISCARD | Features::WRITE_ZEROES));
    let mut rig = rig();
    rig.send(&[header(Kind::Write, 0), vec![0; 512]].concat(), &[528], &[1]);
    assert_eq!(config.check_transfer(&rig.parse().unwrap()), Err(S_IOERR));
    let mut rig = self::rig();
    rig.send(&header(Kind::Read, 0), &[16], &[513]);
    assert!(config.check_transfer(&rig.parse().unwrap()).is_ok());
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// Returns the result of a discard or write zeroes request with these ranges, in one descriptor and in
/// descriptors of 7 bytes.
fn ranges_of(kind: Kind, ranges: &[u8]) -> Result<(Op, Vec<Range>), u8> {
    let results = [ranges.len().max(1), 7].map(|piece| {
        let mut rig = rig();
        let pieces: Vec<u32> = ranges.chunks(piece).map(|piece| piece.len() as u32).collect();
        rig.send(&[header(kind, 0), ranges.to_vec()].concat(), &[&[16], &pieces[..]].concat(), &[1]);
        let mut found = [Range::EMPTY; 4];
        let memory = rig.memory.clone();
        let request = rig.parse().unwrap();
        config().read_ranges(&memory, &request, &mut found).map(|(op, count)| (op, found[..count].to_vec()))
    });
    assert_eq!(results[0], results[1], "the boundaries have no meaning");
    results[0].clone()
}

#[test]
fn ranges_of_discards_and_write_zeroes_are_read() {
    let one = |flags| Range { offset: Bytes(5 * 512), len: Bytes(100 * 512), flags };
    let unmap = Flags::empty();
    assert_eq!(ranges_of(Kind::Discard, &range(5, 100, 0)), Ok((Op::Discard, vec![one(unmap)])));
    let zeroes = [range(5, 100, 0), range(7, 0, 0), range(5, 100, 1)].concat();
    let expected = vec![one(Flags::NO_UNMAP), one(unmap)];
    assert_eq!(ranges_of(Kind::WriteZeroes, &zeroes), Ok((Op::WriteZeroes, expected)));
}

#[test]
fn ranges_that_break_a_rule_fail() {
    let discard = |bytes: &[u8]| ranges_of(Kind::Discard, bytes).unwrap_err();
    let zeroes = |bytes: &[u8]| ranges_of(Kind::WriteZeroes, bytes).unwrap_err();
    assert_eq!(discard(&range(0, 1, 1)), S_UNSUPP, "the flag unmap");
    assert_eq!(discard(&range(0, 1, 2)), S_UNSUPP);
    assert_eq!(zeroes(&range(0, 1, 1 << 31)), S_UNSUPP);
    assert_eq!(discard(&range(0, 101, 0)), S_IOERR, "longer than max_discard_sectors");
    assert_eq!(zeroes(&range(0, 201, 0)), S_IOERR);
    assert_eq!(discard(&range(2048, 1, 0)), S_IOERR, "past the end");
    assert_eq!(discard(&range(u64::MAX, 1, 0)), S_IOERR);
    assert_eq!(discard(&[]), S_IOERR, "no range");
    assert_eq!(discard(&[0; 24]), S_IOERR, "half a range");
    assert_eq!(discard(&[0; 16 * 5]), S_IOERR, "more ranges than max_discard_seg");
    assert_eq!(ranges_of(Kind::Read, &[]), Err(S_UNSUPP));
}

#[test]
fn ranges_of_types_that_are_not_offered_are_unsupported() {
    let mut limits = QueueLimits::default();
    limits.validate().unwrap();
    let config = Config::new(&limits, Bytes(1 << 20), SHAPE);
    for kind in [Kind::Discard, Kind::WriteZeroes] {
        let mut rig = rig();
        rig.send(&[header(kind, 0), range(0, 1, 0)].concat(), &[32], &[1]);
        let memory = rig.memory.clone();
        let request = rig.parse().unwrap();
        assert_eq!(config.read_ranges(&memory, &request, &mut [Range::EMPTY; 4]), Err(S_UNSUPP));
    }
}

#[test]
fn a_zone_append_has_room_for_the_sector() {
    let append = [header(Kind::ZoneAppend, 64), vec![0; 4096]].concat();
    let mut rig = rig();
    rig.send(&append, &[16, 4096], &[9]);
    let request = rig.parse().unwrap();
    assert_eq!((request.len, request.append_sector.len(), request.ticket.written), (4096, 8, 9));
    let mut rig = self::rig();
    rig.send(&append, &[16, 4096], &[4, 1]);
    let request = rig.parse().unwrap();
    assert!(request.append_sector.is_empty(), "four bytes are no sector");
}

#[test]
fn failed_requests_report_no_bytes_before_the_status() {
    let mut rig = rig();
    rig.send(&header(Kind::Read, 0), &[16], &[512, 1]);
    let ticket = rig.parse().unwrap().ticket;
    rig.ring.complete(&ticket, S_IOERR);
    rig.send(&header(Kind::Flush, 0), &[16], &[1]);
    let ticket = rig.parse().unwrap().ticket;
    rig.ring.complete(&ticket, S_UNSUPP);
    rig.ring.publish();
    let written: Vec<_> =
        std::iter::from_fn(|| rig.disk.driver().take_used()).map(|used| used.written).collect();
    assert_eq!(written, [0, 1]);
}

#[test]
fn the_configuration_space_has_the_layout_of_the_specification() {
    let mut limits = QueueLimits {
        physical_block_size: Bytes(4096),
        io_min: Bytes(4096),
        io_opt: Bytes(65536),
        alignment_offset: Bytes(512),
        max_hw_discard_sectors: Sectors(100),
        discard_granularity: Bytes(8192),
        max_write_zeroes_sectors: Sectors(200),
        max_hw_wzeroes_unmap_sectors: Sectors(200),
        ..QueueLimits::default()
    };
    limits.features |= block::Features::WRITE_CACHE;
    limits.validate().unwrap();
    let mut config = Config::new(&limits, Bytes(1 << 20), Shape { queues: 3, ..SHAPE });
    let space = config.to_bytes(config.features());
    let number = |at: usize, len: usize| {
        space[at..at + len].iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte))
    };
    let fields = [
        (0, 8, 2048),
        (8, 4, 1 << 20),
        (12, 4, 30),
        (16, 4, 0),
        (20, 4, 512),
        (24, 1, 3),
        (25, 1, 1),
        (26, 2, 8),
        (28, 4, 128),
        (32, 1, 1),
        (33, 1, 0),
        (34, 2, 3),
        (36, 4, 100),
        (40, 4, 4),
        (44, 4, 16),
        (48, 4, 200),
        (52, 4, 4),
        (56, 1, 1),
        (57, 3, 0),
    ];
    for (at, len, expected) in fields {
        assert_eq!(number(at, len), expected, "offset {at}");
    }
    assert!(space[60..].iter().all(|&byte| byte == 0));
    assert!(config.features().contains(Features::MQ | Features::DISCARD | Features::WRITE_ZEROES));
    config.set_write_back(false);
    config.set_capacity(Bytes(1 << 30));
    let space = config.to_bytes(config.features());
    assert_eq!((space[Config::WRITE_BACK_AT], space[2]), (0, 0x20));
}

#[test]
fn a_device_without_a_write_cache_stays_in_write_through() {
    let mut limits = QueueLimits::default();
    limits.features.remove(block::Features::WRITE_CACHE);
    limits.validate().unwrap();
    let mut config = Config::new(&limits, Bytes(1 << 20), SHAPE);
    config.set_write_back(true);
    assert!(!config.is_write_back());
    assert!(config.features().contains(Features::FLUSH | Features::CONFIG_WCE));
}

/// Returns a zoned device of four zones of 256 MiB.
fn zoned() -> Config {
    let mut limits = QueueLimits {
        chunk_sectors: Sectors(524_288),
        max_open_zones: 12,
        max_active_zones: 14,
        max_hw_zone_append_sectors: Sectors(128),
        max_hw_discard_sectors: Sectors(100),
        zone_write_granularity: Bytes(4096),
        ..QueueLimits::default()
    };
    limits.features |= block::Features::ZONED;
    limits.validate().unwrap();
    Config::new(&limits, Bytes(1 << 30), SHAPE)
}

#[test]
fn zones_are_described_to_drivers_that_know_them() {
    let config = zoned();
    assert!(config.features().contains(Features::ZONED) && !config.features().contains(Features::DISCARD));
    let space = config.to_bytes(Features::ZONED);
    let number = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
    assert_eq!([72, 76, 80, 84, 88, 92].map(number), [524_288, 12, 14, 128, 4096, 1]);
    assert!(config.to_bytes(Features::empty())[72..].iter().all(|&byte| byte == 0));
}

#[test]
fn statuses_become_bytes_of_the_specification() {
    use block::Status;
    let bytes =
        [Status::Ok, Status::NotSupported, Status::IoError, Status::ZoneOpenResource].map(status_byte);
    assert_eq!(bytes, [S_OK, S_UNSUPP, S_IOERR, S_ZONE_OPEN_RESOURCE]);
}

/// Checks a zone request at a sector, with this much data to write and these writable lengths.
fn check_zone(
    config: &Config,
    kind: Kind,
    sector: u64,
    data: u32,
    writable: &[u32],
) -> Result<ZoneRequest, u8> {
    let mut rig = rig();
    let bytes = [header(kind, sector), vec![0; data as usize]].concat();
    let pieces = if data > 0 { vec![16, data] } else { vec![16] };
    rig.send(&bytes, &pieces, writable);
    config.check_zone(&rig.parse().unwrap())
}

#[test]
fn zone_requests_become_operations_of_the_block_layer() {
    let config = zoned();
    let zone = Bytes::mib(256);
    let of = |op, offset, len, zones_max| Ok(ZoneRequest { op, offset, len, zones_max });
    for (kind, op) in [
        (Kind::ZoneOpen, Op::ZoneOpen),
        (Kind::ZoneClose, Op::ZoneClose),
        (Kind::ZoneFinish, Op::ZoneFinish),
        (Kind::ZoneReset, Op::ZoneReset),
    ] {
        assert_eq!(check_zone(&config, kind, 524_288, 0, &[1]), of(op, zone, Bytes(0), 0));
        for sector in [1, 524_289, 4 * 524_288, u64::MAX] {
            assert_eq!(check_zone(&config, kind, sector, 0, &[1]), Err(S_ZONE_INVALID_CMD), "{sector}");
        }
    }
    let all = check_zone(&config, Kind::ZoneResetAll, 77, 0, &[1]);
    assert_eq!(all, of(Op::ZoneResetAll, Bytes(0), Bytes(0), 0), "the sector is not used");
    let append =
        |sector, data, writable: &[u32]| check_zone(&config, Kind::ZoneAppend, sector, data, writable);
    assert_eq!(append(524_288, 4096, &[9]), of(Op::ZoneAppend, zone, Bytes(4096), 0));
    assert_eq!(append(524_296, 4096, &[9]), Err(S_ZONE_INVALID_CMD), "not the start of a zone");
    assert_eq!(append(0, 0, &[9]), Err(S_ZONE_INVALID_CMD), "no data");
    assert_eq!(append(0, 4096, &[1]), Err(S_ZONE_INVALID_CMD), "no room for the sector");
    assert_eq!(append(0, 4096 + 512, &[9]), Err(S_ZONE_UNALIGNED_WP));
    assert_eq!(append(0, 129 * 512, &[9]), Err(S_ZONE_INVALID_CMD), "longer than max_append_sectors");
    let report = |sector, room| check_zone(&config, Kind::ZoneReport, sector, 0, &[room, 1]);
    let rest = Bytes((1 << 30) - 512);
    assert_eq!(report(1, 64 + 3 * 64 + 5), of(Op::ReportZones, Bytes(512), rest, 3));
    assert_eq!(report(1, 63), Err(S_ZONE_INVALID_CMD));
}

#[test]
fn zone_requests_of_devices_without_zones_are_unsupported() {
    for kind in [Kind::ZoneAppend, Kind::ZoneReport, Kind::ZoneOpen, Kind::ZoneResetAll] {
        assert_eq!(check_zone(&config(), kind, 0, 0, &[256, 9]), Err(S_UNSUPP));
    }
    assert_eq!(check_zone(&zoned(), Kind::Read, 0, 0, &[512, 1]), Err(S_UNSUPP));
    let mut read_only = Config::new(&limits(), Bytes(1 << 20), Shape { is_read_only: true, ..SHAPE });
    read_only.zoned = zoned().zoned;
    assert_eq!(check_zone(&read_only, Kind::ZoneReset, 0, 0, &[1]), Err(S_IOERR));
    assert!(check_zone(&read_only, Kind::ZoneReport, 0, 0, &[64, 1]).is_ok());
}

#[test]
fn failed_requests_of_zones_have_the_status_of_their_reason() {
    use block::{Zone, ZoneCondition, ZoneKind};
    let zone = |condition| Zone {
        start: Sectors(1000),
        len: Sectors(1000),
        capacity: Sectors(900),
        write_pointer: Sectors(1100),
        kind: ZoneKind::SequentialRequired,
        condition,
    };
    let (open, full) = (zone(ZoneCondition::ImplicitOpen), zone(ZoneCondition::Full));
    let (read_only, offline) = (zone(ZoneCondition::ReadOnly), zone(ZoneCondition::Offline));
    let conventional = Zone { kind: ZoneKind::Conventional, ..zone(ZoneCondition::NotWritePointer) };
    for (op, sector, sectors, zone, status) in [
        (Op::Write, 1096, 8, open, S_ZONE_UNALIGNED_WP),
        (Op::Write, 1108, 8, open, S_ZONE_UNALIGNED_WP),
        (Op::Write, 1100, 8, open, S_IOERR),
        (Op::Write, 1100, 801, open, S_ZONE_INVALID_CMD),
        (Op::Write, 1096, 8, full, S_ZONE_INVALID_CMD),
        (Op::Write, 1096, 8, read_only, S_ZONE_INVALID_CMD),
        (Op::Write, 1096, 8, conventional, S_IOERR),
        (Op::ZoneAppend, 1000, 8, open, S_ZONE_INVALID_CMD),
        (Op::Read, 1996, 8, open, S_ZONE_INVALID_CMD),
        (Op::Read, 1000, 8, offline, S_ZONE_INVALID_CMD),
        (Op::Read, 1000, 8, read_only, S_IOERR),
    ] {
        assert_eq!(failed_status_byte(op, sector, sectors, &zone), status, "{op:?} {sector} {zone:?}");
    }
}

#[test]
fn a_report_has_as_many_zones_as_fit() {
    use block::{Zone, ZoneCondition, ZoneKind};
    let zone = |number: u64| Zone {
        start: Sectors(number * 1000),
        len: Sectors(1000),
        capacity: Sectors(900),
        write_pointer: Sectors(number * 1000 + 5),
        kind: ZoneKind::SequentialRequired,
        condition: ZoneCondition::Full,
    };
    let records: Vec<u8> = (0..3).flat_map(|number| zone(number).to_record()).chain([0; 64]).collect();
    for (len, count) in [(64 * 5, 3), (64 * 4, 3), (64 * 4 - 1, 2), (64, 0)] {
        let mut report = vec![0xff; len];
        assert_eq!(encode_report(&records, &mut report), count, "{len}");
        assert_eq!(report[..8], count.to_le_bytes());
        let word = |at: usize| u64::from_le_bytes(report[at..at + 8].try_into().unwrap());
        for at in (1..=count).map(|number| 64 * number as usize) {
            let start = 1000 * (at as u64 / 64 - 1);
            assert_eq!([word(at), word(at + 8), word(at + 16)], [900, start, start + 5]);
            assert_eq!(report[at + 24..at + 28], [2, 14, 0, 0]);
        }
        assert!(report[64 * (1 + count as usize)..].iter().all(|&byte| byte == 0));
    }
    assert_eq!(encode_report(&records, &mut [0; 63]), 0);
}

#[test]
fn errors_of_zones_have_the_statuses_of_the_specification() {
    use block::Status;
    let bytes =
        [Status::Ok, Status::Invalid, Status::ZoneActiveResource, Status::Medium].map(zone_status_byte);
    assert_eq!(bytes, [S_OK, S_ZONE_INVALID_CMD, S_ZONE_ACTIVE_RESOURCE, S_IOERR]);
}
