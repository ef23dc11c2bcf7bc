//! Tests zones of a null device: null_blk's state machine, rule by rule, then at random against a simple
//! model.

use super::*;
use crate::testing::Harness;
use block::{Data, Flags, Op, Zone, ZoneCondition, ZoneKind};
use std::collections::VecDeque;

/// Zone size: 64 KiB.
const ZONE: u64 = 64 << 10;
const BLOCK: u64 = 4096;

fn zoned(change: impl FnOnce(&mut ZonedSpec)) -> NullSpec {
    let mut zoned = ZonedSpec { zone_size: Bytes(ZONE), ..ZonedSpec::default() };
    change(&mut zoned);
    NullSpec { size: Bytes(8 * ZONE), zoned: Some(zoned), ..NullSpec::default() }
}

struct Disk {
    null: Null,
    harness: Harness,
}

impl Disk {
    fn of(spec: &NullSpec) -> Disk {
        let null = Null::new(spec).unwrap();
        let harness = Harness::new(Box::new(null.node(None)));
        Disk { null, harness }
    }

    fn new(change: impl FnOnce(&mut ZonedSpec)) -> Disk {
        Disk::of(&zoned(change))
    }

    /// Writes one block at index `block` of a zone.
    fn write(&mut self, zone: u64, block: u64) -> Status {
        self.harness.write(zone * ZONE + block * BLOCK, &[7; BLOCK as usize], Flags::empty())
    }

    fn fill(&mut self, zone: u64, from: u64) -> Status {
        let len = (ZONE - from * BLOCK) as usize;
        self.harness.write(zone * ZONE + from * BLOCK, &vec![7; len], Flags::empty())
    }

    fn tell(&mut self, op: Op, zone: u64) -> Status {
        self.harness.bare(op, zone * ZONE, 0)
    }

    /// Returns the offset of an append of `blocks` blocks, in blocks from the zone's start.
    fn append(&mut self, zone: u64, blocks: u64) -> Result<u64, Status> {
        let data = vec![8; (blocks * BLOCK) as usize];
        let (status, offset) = self.harness.append(zone * ZONE, &data);
        if status.is_ok() { Ok((offset - zone * ZONE) / BLOCK) } else { Err(status) }
    }

    fn zone(&mut self, zone: u64) -> Zone {
        self.report(zone * ZONE, ZONE, 2)[0]
    }

    fn condition(&mut self, zone: u64) -> ZoneCondition {
        self.zone(zone).condition
    }

    /// Returns a write pointer in blocks from the zone's start.
    fn pointer(&mut self, zone: u64) -> u64 {
        let zone = self.zone(zone);
        (zone.write_pointer.0 - zone.start.0) * 512 / BLOCK
    }

    fn report(&mut self, offset: u64, len: u64, most: usize) -> Vec<Zone> {
        let bytes = self.harness.answer(Op::ReportZones, offset, len, most * Zone::RECORD_LEN);
        bytes.chunks(Zone::RECORD_LEN).map_while(Zone::from_record).collect()
    }
}

use ZoneCondition::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen, NotWritePointer, Offline, ReadOnly};

#[test]
fn a_write_opens_an_empty_zone_implicitly_and_moves_its_pointer() {
    let mut disk = Disk::new(|_| {});
    assert_eq!((disk.condition(1), disk.pointer(1)), (Empty, 0));
    assert_eq!(disk.write(1, 0), Status::Ok);
    assert_eq!((disk.condition(1), disk.pointer(1)), (ImplicitOpen, 1));
    assert_eq!(disk.condition(0), Empty, "and no other");
}

#[test]
fn a_write_anywhere_but_at_the_pointer_is_an_io_error() {
    let mut disk = Disk::new(|_| {});
    assert_eq!(disk.write(1, 1), Status::IoError, "ahead");
    assert_eq!(disk.condition(1), Empty, "it opened nothing");
    assert_eq!((disk.write(1, 0), disk.write(1, 0)), (Status::Ok, Status::IoError), "behind");
    assert_eq!(disk.pointer(1), 1);
}

#[test]
fn a_zone_written_to_its_end_is_full() {
    let mut disk = Disk::new(|_| {});
    assert_eq!((disk.write(2, 0), disk.fill(2, 1)), (Status::Ok, Status::Ok));
    assert_eq!((disk.condition(2), disk.pointer(2)), (Full, 16));
    assert_eq!(disk.write(2, 0), Status::IoError);
    assert_eq!(disk.fill(3, 0), Status::Ok, "in one write");
    assert_eq!(disk.condition(3), Full);
}

#[test]
fn writes_beyond_a_zones_capacity_fail() {
    let mut disk = Disk::new(|zoned| zoned.zone_capacity = Some(Bytes(3 * BLOCK)));
    assert_eq!(disk.zone(0).capacity, Bytes(3 * BLOCK).sectors());
    assert_eq!(disk.harness.write(0, &[1; 4 * BLOCK as usize], Flags::empty()), Status::IoError);
    assert_eq!(disk.harness.write(0, &[1; 3 * BLOCK as usize], Flags::empty()), Status::Ok);
    assert_eq!(disk.condition(0), Full);
    assert_eq!(disk.write(0, 3), Status::IoError);
}

#[test]
fn an_append_returns_its_offset() {
    let mut disk = Disk::new(|_| {});
    assert_eq!(disk.append(1, 1), Ok(0));
    assert_eq!(disk.append(1, 2), Ok(1));
    assert_eq!(disk.write(1, 3), Status::Ok);
    assert_eq!(disk.append(1, 12), Ok(4));
    assert_eq!(disk.condition(1), Full);
    assert_eq!(disk.append(1, 1), Err(Status::IoError));
}

#[test]
fn an_append_needs_a_zones_start_and_has_a_maximum_length() {
    let mut disk = Disk::new(|zoned| zoned.append_max = Sectors(16));
    assert_eq!(disk.null.limits().max_zone_append_sectors, Sectors(16));
    assert_eq!(disk.append(0, 2), Ok(0));
    assert_eq!(disk.append(0, 3), Err(Status::IoError));
    assert_eq!(disk.harness.append(BLOCK, &[1; BLOCK as usize]).0, Status::IoError);
}

#[test]
fn conventional_zones_are_written_anywhere_and_never_appended_to() {
    let mut disk = Disk::new(|zoned| zoned.nr_conv = 2);
    let zone = disk.zone(1);
    assert_eq!((zone.kind, zone.condition), (ZoneKind::Conventional, NotWritePointer));
    assert_eq!((disk.write(1, 5), disk.write(1, 2)), (Status::Ok, Status::Ok));
    assert_eq!(disk.append(1, 1), Err(Status::IoError));
    for op in [Op::ZoneReset, Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish] {
        assert_eq!(disk.tell(op, 1), Status::IoError, "{op:?}");
    }
    assert_eq!(disk.zone(2).kind, ZoneKind::SequentialRequired);
}

#[test]
fn at_least_one_zone_stays_sequential() {
    let mut disk = Disk::new(|zoned| zoned.nr_conv = 100);
    let kinds: Vec<_> = disk.report(0, 8 * ZONE, 9).iter().map(|zone| zone.kind).collect();
    assert_eq!(kinds.iter().filter(|&&kind| kind == ZoneKind::Conventional).count(), 7);
    assert_eq!(kinds[7], ZoneKind::SequentialRequired);
}

#[test]
fn opening_closing_finishing_and_resetting_follow_the_state_machine() {
    // The results of open, close, finish and reset in each condition of a zone.
    let make = |disk: &mut Disk, from| match from {
        Empty => Status::Ok,
        ImplicitOpen => disk.write(0, 0),
        ExplicitOpen => disk.tell(Op::ZoneOpen, 0),
        Closed => {
            disk.write(0, 0);
            disk.tell(Op::ZoneClose, 0)
        }
        Full => disk.tell(Op::ZoneFinish, 0),
        _ => unreachable!("not asked for"),
    };
    let failed = None;
    for (from, expected) in [
        (Empty, [Some(ExplicitOpen), failed, Some(Full), Some(Empty)]),
        (ImplicitOpen, [Some(ExplicitOpen), Some(Closed), Some(Full), Some(Empty)]),
        (ExplicitOpen, [Some(ExplicitOpen), Some(Empty), Some(Full), Some(Empty)]),
        (Closed, [Some(ExplicitOpen), Some(Closed), Some(Full), Some(Empty)]),
        (Full, [failed, failed, Some(Full), Some(Empty)]),
    ] {
        let ops = [Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish, Op::ZoneReset];
        for (op, expected) in ops.into_iter().zip(expected) {
            let mut disk = Disk::new(|_| {});
            assert_eq!(make(&mut disk, from), Status::Ok);
            assert_eq!(disk.condition(0), from);
            let status = disk.tell(op, 0);
            assert_eq!(
                status,
                if expected.is_some() { Status::Ok } else { Status::IoError },
                "{from:?} {op:?}"
            );
            assert_eq!(disk.condition(0), expected.unwrap_or(from), "{from:?} {op:?}");
        }
    }
}

#[test]
fn a_finished_zones_pointer_is_at_its_end_and_a_reset_ones_at_its_start() {
    let mut disk = Disk::new(|_| {});
    assert_eq!((disk.write(4, 0), disk.tell(Op::ZoneFinish, 4)), (Status::Ok, Status::Ok));
    assert_eq!(disk.pointer(4), 16);
    assert_eq!(disk.tell(Op::ZoneReset, 4), Status::Ok);
    assert_eq!((disk.pointer(4), disk.write(4, 0)), (0, Status::Ok));
}

#[test]
fn an_implicitly_open_zone_is_closed_to_open_another() {
    let mut disk = Disk::new(|zoned| zoned.max_open = 2);
    assert_eq!((disk.write(0, 0), disk.write(1, 0), disk.write(2, 0)), (Status::Ok, Status::Ok, Status::Ok));
    let conditions = |disk: &mut Disk| [0, 1, 2, 3].map(|zone| disk.condition(zone));
    assert_eq!(conditions(&mut disk), [Closed, ImplicitOpen, ImplicitOpen, Empty]);
    assert_eq!(disk.write(3, 0), Status::Ok);
    assert_eq!(conditions(&mut disk), [Closed, Closed, ImplicitOpen, ImplicitOpen]);
    assert_eq!(disk.write(0, 1), Status::Ok, "a closed zone opens again");
    assert_eq!(conditions(&mut disk), [ImplicitOpen, Closed, Closed, ImplicitOpen]);
}

#[test]
fn an_explicitly_open_zone_is_never_closed_for_another() {
    let mut disk = Disk::new(|zoned| zoned.max_open = 2);
    assert_eq!((disk.tell(Op::ZoneOpen, 0), disk.tell(Op::ZoneOpen, 1)), (Status::Ok, Status::Ok));
    assert_eq!(disk.write(2, 0), Status::ZoneOpenResource);
    assert_eq!(disk.tell(Op::ZoneOpen, 2), Status::ZoneOpenResource);
    assert_eq!(disk.tell(Op::ZoneFinish, 2), Status::ZoneOpenResource, "it would be open on the way");
    assert_eq!(disk.write(0, 0), Status::Ok, "those that are open go on");
    assert_eq!(disk.tell(Op::ZoneClose, 1), Status::Ok);
    assert_eq!(disk.write(2, 0), Status::Ok);
}

#[test]
fn closed_zones_stay_active_until_they_are_full_or_reset() {
    let mut disk = Disk::new(|zoned| zoned.max_active = 2);
    assert_eq!((disk.write(0, 0), disk.tell(Op::ZoneClose, 0)), (Status::Ok, Status::Ok));
    assert_eq!((disk.write(1, 0), disk.write(2, 0)), (Status::Ok, Status::ZoneActiveResource));
    assert_eq!(disk.append(2, 1), Err(Status::ZoneActiveResource));
    assert_eq!(disk.tell(Op::ZoneFinish, 0), Status::Ok);
    assert_eq!(disk.write(2, 0), Status::Ok, "a full zone is not active");
    assert_eq!((disk.tell(Op::ZoneReset, 1), disk.write(3, 0)), (Status::Ok, Status::Ok), "nor an empty one");
}

#[test]
fn no_zone_is_closed_for_another_at_the_limit_of_active_zones() {
    let mut disk = Disk::new(|zoned| (zoned.max_open, zoned.max_active) = (1, 2));
    assert_eq!((disk.write(0, 0), disk.write(1, 0)), (Status::Ok, Status::Ok));
    assert_eq!([disk.condition(0), disk.condition(1)], [Closed, ImplicitOpen]);
    assert_eq!(disk.write(0, 1), Status::ZoneOpenResource, "as null_blk has it");
    assert_eq!(disk.tell(Op::ZoneClose, 1), Status::Ok);
    assert_eq!(disk.write(0, 1), Status::Ok);
}

#[test]
fn unreachable_limits_are_no_limits() {
    let limits = |open, active| {
        let spec = zoned(|zoned| (zoned.max_open, zoned.max_active, zoned.nr_conv) = (open, active, 3));
        let limits = Null::new(&spec).unwrap().limits();
        (limits.max_open_zones, limits.max_active_zones)
    };
    assert_eq!(limits(4, 4), (4, 4), "of five sequential zones");
    assert_eq!(limits(5, 5), (0, 0));
    assert_eq!(limits(4, 5), (4, 0));
    assert_eq!(limits(4, 2), (2, 2), "an open zone is active");
    assert_eq!(limits(0, 2), (0, 2));
}

#[test]
fn zone_full_starts_full() {
    let mut disk = Disk::new(|zoned| zoned.full = true);
    assert_eq!((disk.condition(0), disk.pointer(7)), (Full, 16));
    assert_eq!((disk.write(0, 0), disk.tell(Op::ZoneReset, 0)), (Status::IoError, Status::Ok));
    assert_eq!(disk.write(0, 0), Status::Ok);
}

#[test]
fn read_only_zones_are_readable_and_offline_zones_are_not() {
    let spec = zoned(|zoned| {
        zoned.read_only = vec![Bytes(ZONE).sectors()];
        zoned.offline = vec![Bytes(2 * ZONE + 512).sectors()];
    });
    let mut disk = Disk::of(&spec);
    assert_eq!([disk.condition(1), disk.condition(2)], [ReadOnly, Offline]);
    assert_eq!(disk.zone(1).write_pointer, Sectors(u64::MAX));
    assert_eq!(
        (disk.harness.read(ZONE, 512).0, disk.harness.read(2 * ZONE, 512).0),
        (Status::Ok, Status::IoError)
    );
    for zone in [1, 2] {
        assert_eq!((disk.write(zone, 0), disk.append(zone, 1)), (Status::IoError, Err(Status::IoError)));
        for op in [Op::ZoneReset, Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish] {
            assert_eq!(disk.tell(op, zone), Status::IoError, "{op:?}");
        }
    }
    assert_eq!(disk.tell(Op::ZoneResetAll, 0), Status::Ok, "which leaves them alone");
    assert_eq!([disk.condition(1), disk.condition(2)], [ReadOnly, Offline]);
}

#[test]
fn reset_all_empties_every_sequential_zone() {
    for memory_backed in [false, true] {
        let mut disk = Disk::of(&NullSpec { memory_backed, ..zoned(|zoned| zoned.nr_conv = 1) });
        assert_eq!(
            (disk.write(0, 3), disk.write(1, 0), disk.fill(5, 0)),
            (Status::Ok, Status::Ok, Status::Ok)
        );
        assert_eq!(disk.tell(Op::ZoneResetAll, 0), Status::Ok);
        assert!((1..8).all(|zone| disk.condition(zone) == Empty));
        let kept = if memory_backed { 7 } else { 0 };
        assert_eq!(disk.harness.read(3 * BLOCK, 1).1, [kept], "the conventional one keeps its data");
        assert_eq!(disk.harness.read(5 * ZONE, 1).1, [0]);
    }
}

#[test]
fn a_reset_zone_reads_as_zeroes_and_frees_its_memory() {
    let spec = NullSpec {
        memory_backed: true,
        size: Bytes::mib(128),
        ..zoned(|zoned| zoned.zone_size = Bytes::mib(64))
    };
    let mut disk = Disk::of(&spec);
    let at = 64 << 20;
    assert_eq!(disk.harness.write(at, &[5; 8192], Flags::empty()), Status::Ok);
    assert_eq!(disk.harness.append(at, &[6; 4096]), (Status::Ok, at + 8192));
    assert_eq!(disk.harness.read(at + 8000, 400).1, [[5; 192].as_slice(), &[6; 208]].concat());
    let allocated = |disk: &Disk| disk.null.ram().unwrap().allocated();
    assert_eq!(allocated(&disk), Bytes(12288));
    assert_eq!(disk.harness.bare(Op::ZoneReset, at, 0), Status::Ok, "in several steps");
    assert_eq!(disk.harness.read(at, 12288).1, vec![0; 12288]);
    assert_eq!(allocated(&disk), Bytes::ZERO);
}

#[test]
fn a_zoned_null_neither_discards_nor_zeroes() {
    let mut disk = Disk::new(|zoned| zoned.nr_conv = 1);
    for op in [Op::Discard, Op::WriteZeroes] {
        assert_eq!(disk.harness.bare(op, 0, BLOCK), Status::NotSupported, "{op:?}");
    }
    let limits = disk.null.limits();
    assert_eq!((limits.max_discard_sectors, limits.max_write_zeroes_sectors), (Sectors(0), Sectors(0)));
    assert_eq!(limits.chunk_sectors, Bytes(ZONE).sectors());
    assert_eq!(disk.harness.bare(Op::Flush, 0, 0), Status::Ok);
}

#[test]
fn a_report_has_as_many_requested_zones_as_fit() {
    let mut disk = Disk::of(&NullSpec { size: Bytes(3 * ZONE + BLOCK), ..zoned(|_| {}) });
    let starts = |zones: Vec<Zone>| zones.iter().map(|zone| zone.start.0 / 128).collect::<Vec<_>>();
    assert_eq!(starts(disk.report(0, 3 * ZONE + BLOCK, 9)), [0, 1, 2, 3]);
    assert_eq!(starts(disk.report(ZONE + 512, 3 * ZONE, 2)), [1, 2], "no more room");
    assert_eq!(starts(disk.report(ZONE, ZONE, 9)), [1], "no more asked for");
    assert_eq!(disk.zone(3).len, Bytes(BLOCK).sectors(), "the last one is shorter");
}

#[test]
fn a_timed_zoned_null_completes_at_its_time() {
    let spec = NullSpec { memory_backed: true, ..zoned(|_| {}) }.completing_after(10_000);
    let mut disk = Disk::of(&spec);
    let before = disk.harness.ring.now.0;
    assert_eq!((disk.write(0, 0), disk.append(0, 1)), (Status::Ok, Ok(1)));
    assert_eq!((disk.tell(Op::ZoneReset, 0), disk.write(0, 0)), (Status::Ok, Status::Ok));
    assert_eq!(disk.harness.ring.now.0 - before, 40_000);
}

#[test]
fn invalid_zone_options_are_refused() {
    let why = |change: fn(&mut ZonedSpec)| Null::new(&zoned(change)).map(|_| ()).unwrap_err().to_string();
    assert!(why(|z| z.zone_size = Bytes(96 << 10)).contains("power of two"));
    assert!(why(|z| z.zone_size = Bytes::gib(1)).contains("smaller zone_size"));
    assert!(why(|z| z.zone_capacity = Some(Bytes(ZONE + 512))).contains("zone_capacity cannot be"));
    assert!(why(|z| (z.nr_conv, z.read_only) = (1, vec![Sectors(0)])).contains("sector 0"));
    assert!(why(|z| z.offline = vec![Sectors(1 << 30)]).contains("no sequential zone"));
    let odd = NullSpec { size: Bytes(3 * ZONE + BLOCK), ..zoned(|z| z.zone_capacity = Some(Bytes(BLOCK))) };
    assert!(Null::new(&odd).map(|_| ()).unwrap_err().to_string().contains("ends within a zone"));
    let many = NullSpec { size: Bytes::gib(1 << 10), ..zoned(|z| z.zone_size = Bytes(4096)) };
    assert!(Null::new(&many).map(|_| ()).unwrap_err().to_string().contains("larger zone_size"));
}

#[test]
fn concurrent_appends_never_share_an_offset() {
    let spec = zoned(|zoned| (zoned.max_open, zoned.max_active) = (2, 3));
    let zones = Zones::new(spec.zoned.as_ref().unwrap(), spec.size).unwrap();
    let places: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|worker: u64| {
                let zones = &zones;
                scope.spawn(move || {
                    let mut places = Vec::new();
                    for round in 0..2000 {
                        let zone = Bytes((worker + round) % 3 * ZONE);
                        if let zones::ZoneWrite::At(at) = zones.take(zone, Bytes(512), true, true) {
                            places.push(at.0);
                            zones.copied(at);
                        }
                        if round % 64 == worker {
                            zones.manage(Op::ZoneClose, zone);
                        }
                    }
                    places
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    let mut all = places.concat();
    all.sort_unstable();
    let expected: Vec<u64> = (0..3 * ZONE / 512).map(|sector| sector * 512).collect();
    assert_eq!(all, expected, "every sector of three zones was appended to once");
    assert!((0..3).all(|zone| zones.report(zone).condition == Full));
    assert!((0..3).all(|zone| zones.reset(zone, true) == zones::Reset::Clear), "nobody is copying");
}

/// A model of null_blk's rules, as simple as possible: no packed words, no lock, no unreachable limits.
struct Model {
    zones: Vec<(ZoneCondition, u64)>,
    max_open: usize,
    max_active: usize,
    close_next: usize,
}

impl Model {
    fn count(&self, wanted: &[ZoneCondition]) -> usize {
        self.zones.iter().filter(|zone| wanted.contains(&zone.0)).count()
    }

    fn room(&mut self, zone: usize) -> Result<(), Status> {
        let active = self.count(&[ImplicitOpen, ExplicitOpen, Closed]) < self.max_active;
        match self.zones[zone].0 {
            Empty if !active => return Err(Status::ZoneActiveResource),
            Empty | Closed => {}
            _ => return Ok(()),
        }
        if self.count(&[ImplicitOpen, ExplicitOpen]) < self.max_open {
            return Ok(());
        }
        let mut turn: VecDeque<usize> = (0..self.zones.len()).collect();
        turn.rotate_left(self.close_next);
        let open = turn.into_iter().find(|&zone| self.zones[zone].0 == ImplicitOpen);
        let Some(open) = open.filter(|_| active) else { return Err(Status::ZoneOpenResource) };
        self.zones[open].0 = Closed;
        self.close_next = (open + 1) % self.zones.len();
        Ok(())
    }

    fn write(&mut self, zone: usize, at: u64, blocks: u64) -> Status {
        let (condition, written) = self.zones[zone];
        if at != written || at + blocks > 16 || condition == Full {
            return Status::IoError;
        }
        if let Err(status) = self.room(zone) {
            return status;
        }
        let open = if condition == ExplicitOpen { ExplicitOpen } else { ImplicitOpen };
        self.zones[zone] = (if at + blocks == 16 { Full } else { open }, at + blocks);
        Status::Ok
    }

    fn tell(&mut self, op: Op, zone: usize) -> Status {
        let (condition, written) = self.zones[zone];
        let room = match (op, condition) {
            (Op::ZoneOpen, Empty | Closed) | (Op::ZoneFinish, Empty | Closed) => self.room(zone),
            _ => Ok(()),
        };
        if let Err(status) = room {
            return status;
        }
        self.zones[zone] = match (op, condition) {
            (Op::ZoneOpen, Full) | (Op::ZoneClose, Empty | Full) => return Status::IoError,
            (Op::ZoneOpen, _) => (ExplicitOpen, written),
            (Op::ZoneClose, _) => (if written == 0 { Empty } else { Closed }, written),
            (Op::ZoneFinish, _) => (Full, 16),
            _ => (Empty, 0),
        };
        Status::Ok
    }
}

#[test]
fn random_requests_match_a_simple_model() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut below = |limit: u64| random.u64(..limit);
    for (max_open, max_active) in [(2, 4), (1, 1), (3, 0), (0, 3)] {
        let mut disk = Disk::new(|zoned| (zoned.max_open, zoned.max_active) = (max_open, max_active));
        let limit = |limit: u32| if limit == 0 { 99 } else { limit as usize };
        let mut model = Model {
            zones: vec![(Empty, 0); 8],
            max_open: limit(max_open),
            max_active: limit(max_active),
            close_next: 0,
        };
        for step in 0..1500 {
            let zone = below(8);
            let (number, written) = (zone as usize, model.zones[zone as usize].1);
            match below(12) {
                0..=5 => {
                    let (at, blocks) =
                        (if below(8) == 0 { below(16) } else { written.min(15) }, 1 + below(5));
                    let data = vec![1; (blocks * BLOCK) as usize];
                    let status = disk.harness.write(zone * ZONE + at * BLOCK, &data, Flags::empty());
                    assert_eq!(status, model.write(number, at, blocks), "step {step}");
                }
                6..=7 => {
                    let blocks = 1 + below(3);
                    let expected = match model.write(number, written, blocks) {
                        Status::Ok => Ok(written),
                        status => Err(status),
                    };
                    assert_eq!(disk.append(zone, blocks), expected, "step {step}");
                }
                other => {
                    let ops = [Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish, Op::ZoneReset];
                    let op = ops[other as usize % 4];
                    assert_eq!(disk.tell(op, zone), model.tell(op, number), "step {step} {op:?}");
                }
            }
            let found: Vec<_> = (0..8).map(|zone| (disk.condition(zone), disk.pointer(zone))).collect();
            assert_eq!(found, model.zones, "step {step}");
        }
    }
}

#[test]
fn a_zoned_zero_copy_read_returns_zeroes() {
    let null = Null::new(&zoned(|_| {})).unwrap();
    let mut harness = Harness::new(Box::new(null.node(Some(Region(7)))));
    let (status, data) = harness.read_zero_copy(ZONE, 4096);
    assert!(status.is_ok() && matches!(data, Data::One(segment) if segment.region == Region(7)));
}
