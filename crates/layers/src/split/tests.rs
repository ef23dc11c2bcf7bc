//! Tests of splitting, rule by rule; the numbers BLK-n refer to the project's list of kernel behaviours.

use super::*;
use crate::testing::Bench;
use block::{Bytes, Data, Flags, LimitOverrides, Region, Sectors, Segment};
use queue::Event;

fn limits(text: &str) -> QueueLimits {
    let mut limits = QueueLimits { max_hw_sectors: Sectors(1 << 20), ..QueueLimits::default() };
    let overrides: LimitOverrides = text.parse().expect("limits");
    overrides.apply(&mut limits).expect("valid limits");
    limits
}

fn bench(text: &str) -> Bench {
    Bench::new(64, |child| Split::new(&limits(text), child))
}

fn sectors(op: Op, start: u64, count: u64) -> Request {
    Request::new(op, Sectors(start).bytes(), Sectors(count).bytes())
}

fn memory(offset: u64, len: u64) -> Segment {
    Segment { offset, len: len as u32, region: Region(7) }
}

/// Returns start and length in sectors of each request that reaches the backend.
fn children(bench: &mut Bench, req: Request, memory: &[Segment]) -> Vec<(u64, u64)> {
    let (status, seen) = bench.run(req, memory);
    assert_eq!(status, Status::Ok);
    let mut end = req.offset;
    for (child, bytes) in &seen {
        assert_eq!(child.offset, end, "children are adjacent");
        assert_eq!(child.op, req.op);
        if req.op.moves_data() {
            assert_eq!(bytes.iter().map(|s| u64::from(s.len)).sum::<u64>(), child.len.0, "with their memory");
        }
        end = child.end();
    }
    assert_eq!(end, req.end(), "and cover the request");
    seen.iter().map(|(child, _)| (child.offset.0 >> 9, child.len.0 >> 9)).collect()
}

fn one(op: Op, text: &str, start: u64, count: u64) -> Vec<(u64, u64)> {
    children(&mut bench(text), sectors(op, start, count), &[memory(4096, count << 9)])
}

#[test]
fn blk_1_a_request_within_the_limits_goes_down_unchanged() {
    let mut bench = bench("max_sectors=255");
    let mut req = sectors(Op::Write, 2488, 255);
    req.flags = Flags::FUA.union(Flags::ZERO_COPY);
    let (status, seen) = bench.run(req, &[memory(512, 255 << 9)]);
    assert_eq!((status, seen.len()), (Status::Ok, 1));
    assert_eq!(seen[0].0, Request { data: Data::One(memory(512, 255 << 9)), ..req });
    assert_eq!(bench.counted().fields()[4], 1);
}

#[test]
fn a_zero_copy_read_submitted_before_limits_were_set_is_not_split() {
    let mut bench = bench("max_sectors=8");
    let mut req = sectors(Op::Read, 0, 64);
    req.flags = Flags::ZERO_COPY;
    let (status, seen) = bench.run(req, &[]);
    assert_eq!((status, seen.len()), (Status::Ok, 1));
    assert_eq!((seen[0].0.len, seen[0].0.flags), (Sectors(64).bytes(), Flags::ZERO_COPY));
}

#[test]
fn blk_1_children_end_on_a_physical_block_if_possible() {
    let text = "max_sectors=255,physical_block_size=4096";
    assert_eq!(one(Op::Read, text, 2488, 500), [(2488, 248), (2736, 248), (2984, 4)]);
    assert_eq!(one(Op::Read, text, 2490, 255), [(2490, 254), (2744, 1)], "even where the length would fit");
    assert_eq!(
        one(Op::Read, "max_sectors=8,physical_block_size=8K", 5, 20)[0],
        (5, 8),
        "no physical block ends within"
    );
}

#[test]
fn blk_1_no_request_crosses_a_chunk() {
    assert_eq!(one(Op::Write, "chunk_sectors=64", 60, 100), [(60, 4), (64, 64), (128, 32)]);
    assert_eq!(one(Op::Write, "chunk_sectors=24", 20, 40), [(20, 4), (24, 24), (48, 12)], "no power of two");
    assert_eq!(one(Op::Write, "chunk_sectors=64", 64, 64), [(64, 64)]);
    assert_eq!(one(Op::Write, "chunk_sectors=64,max_sectors=48", 0, 64), [(0, 48), (48, 16)]);
}

#[test]
fn blk_1_the_precomputed_split_equals_the_general_rule() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut shortcuts = 0;
    for _ in 0..2000 {
        let physical = 512u64 << random.u32(0..5);
        let text = format!(
            "physical_block_size={physical},max_sectors={},max_segments={},max_segment_size={},seg_boundary_mask={}",
            random.u64(8..600),
            random.u64(1..4),
            4096 << random.u32(0..8),
            (4096u64 << random.u32(0..9)) - 1,
        );
        let mut limits = QueueLimits { max_hw_sectors: Sectors(1 << 20), ..QueueLimits::default() };
        let overrides: LimitOverrides = text.parse().expect("limits");
        if overrides.apply(&mut limits).is_err() {
            continue;
        }
        let cuts = Cuts::new(&limits);
        for _ in 0..20 {
            let (offset, len) = (random.u64(0..4096) * 512, random.u64(1..2048) * 512);
            let one = memory(random.u64(0..512) * 512, len);
            if let Some(child) = cuts.even_child(offset, len) {
                assert_eq!(child, cuts.data(offset, std::iter::once(one), len), "{text} {offset} {one:?}");
                shortcuts += 1;
            }
        }
    }
    assert!(shortcuts > 1000, "{shortcuts}");
}

#[test]
fn blk_2_too_many_segments_are_split() {
    let four = [memory(0, 4096), memory(8192, 4096), memory(16384, 4096), memory(0, 4096)];
    let mut bench = bench("max_segments=3");
    let (_, seen) = bench.run(sectors(Op::Read, 0, 32), &four);
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0].1, four[..3]);
    assert_eq!(seen[1].1, four[3..]);
}

#[test]
fn blk_2_a_long_segment_counts_as_several() {
    let text = "max_segments=2,max_segment_size=4096";
    assert_eq!(one(Op::Read, text, 0, 40), [(0, 16), (16, 16), (32, 8)]);
    assert_eq!(one(Op::Read, "max_segments=1,max_segment_size=4096", 0, 16), [(0, 8), (8, 8)]);
}

#[test]
fn blk_2_a_segment_ends_at_a_boundary() {
    let mut bench = bench("max_segments=1,seg_boundary_mask=0xffff");
    let got = children(&mut bench, sectors(Op::Write, 0, 16), &[memory(65536 - 4096, 8192)]);
    assert_eq!(got, [(0, 8), (8, 8)], "each child lies on one side of 64 KiB");
    let got = children(&mut bench, sectors(Op::Write, 0, 16), &[memory(65536, 8192)]);
    assert_eq!(got, [(0, 16)]);
}

#[test]
fn blk_2_a_gap_at_a_virtual_boundary_is_split() {
    let mut bench = bench("virt_boundary_mask=4095");
    let whole = [memory(512, 4096 - 512), memory(8192, 4096), memory(4096, 512)];
    assert_eq!(children(&mut bench, sectors(Op::Write, 0, 16), &whole), [(0, 16)], "only the ends are odd");
    let starts_late = [memory(0, 4096), memory(8192 + 512, 4096)];
    assert_eq!(children(&mut bench, sectors(Op::Write, 0, 16), &starts_late), [(0, 8), (8, 8)]);
    let ends_early = [memory(0, 512), memory(8192, 4096)];
    assert_eq!(children(&mut bench, sectors(Op::Write, 0, 9), &ends_early), [(0, 1), (1, 8)]);
}

#[test]
fn blk_2_splits_lie_on_logical_blocks() {
    let odd = [memory(0, 700), memory(4096, 324)];
    let mut bench = bench("max_segments=1");
    let (status, seen) = bench.run(sectors(Op::Write, 0, 2), &odd);
    assert_eq!(status, Status::Invalid, "the rest's first segment is less than a block");
    assert_eq!(seen.iter().map(|(child, _)| child.len.0).collect::<Vec<_>>(), [512]);
    let tiny = [memory(0, 100), memory(4096, 412)];
    let (status, seen) = bench.run(sectors(Op::Write, 0, 1), &tiny);
    assert_eq!((status, seen.len()), (Status::Invalid, 0));
}

#[test]
fn blk_3_nowait_is_not_split() {
    let mut bench = bench("max_sectors=8");
    let mut req = sectors(Op::Read, 0, 9);
    req.flags = Flags::NOWAIT;
    let (status, seen) = bench.run(req, &[memory(0, 9 << 9)]);
    assert_eq!((status, seen.len()), (Status::Again, 0));
    req.len = Bytes(4096);
    assert_eq!(bench.run(req, &[memory(0, 4096)]).0, Status::Ok, "unless it fits");
}

#[test]
fn blk_4_discards_are_split_on_their_granularity() {
    let text = "max_hw_discard_sectors=100,discard_granularity=8192";
    // 100 sectors are rounded down to 96, six units of 16.
    assert_eq!(one(Op::Discard, text, 0, 200), [(0, 96), (96, 96), (192, 8)]);
    assert_eq!(one(Op::Discard, text, 5, 200), [(5, 91), (96, 96), (192, 13)], "the first split is shifted");
    assert_eq!(one(Op::Discard, text, 5, 96), [(5, 96)], "a discard within the limit is not split");
    let aligned = format!("{text},discard_alignment=2048");
    assert_eq!(one(Op::Discard, &aligned, 0, 200), [(0, 84), (84, 96), (180, 20)], "units begin at 4");
}

#[test]
fn blk_4_discards_ignore_chunks_and_stay_whole_if_unsupported() {
    let text = "max_hw_discard_sectors=1024,chunk_sectors=64";
    assert_eq!(one(Op::Discard, text, 60, 500), [(60, 500)]);
    assert_eq!(one(Op::Discard, "max_sectors=8", 0, 500), [(0, 500)], "the device below rejects it");
}

#[test]
fn blk_4_write_zeroes_are_split_by_their_own_limit_and_at_chunks() {
    let text = "max_sectors=8,max_write_zeroes_sectors=100,chunk_sectors=64";
    assert_eq!(one(Op::WriteZeroes, text, 60, 100), [(60, 4), (64, 64), (128, 32)]);
    assert_eq!(
        one(Op::WriteZeroes, "max_write_zeroes_sectors=100", 0, 250),
        [(0, 100), (100, 100), (200, 50)]
    );
    let physical = "max_write_zeroes_sectors=100,physical_block_size=4096";
    assert_eq!(one(Op::WriteZeroes, physical, 1, 150), [(1, 95), (96, 55)]);
    assert_eq!(one(Op::WriteZeroes, "max_sectors=8", 0, 250), [(0, 250)], "no limit of its own");
}

#[test]
fn blk_5_operations_that_must_stay_whole_are_never_split() {
    for op in [Op::Flush, Op::Prefetch, Op::Extents] {
        assert_eq!(one(op, "max_sectors=8,chunk_sectors=8", 3, 5000), [(3, 5000)], "{op:?}");
    }
}

#[test]
fn blk_6_the_split_event_describes_the_head_and_names_the_rest() {
    let mut bench = bench("max_sectors=8");
    bench.run(sectors(Op::Write, 100, 20), &[memory(0, 20 << 9)]);
    let splits: Vec<_> = bench
        .log
        .borrow()
        .points
        .iter()
        .filter_map(|p| match p.event {
            Event::Split { rest } => Some((p.offset.0 >> 9, p.len.0 >> 9, rest.0 >> 9)),
            _ => None,
        })
        .collect();
    assert_eq!(splits, [(100, 8, 108), (108, 8, 116)]);
}

#[test]
fn blk_7_the_worked_example() {
    let expected: Vec<_> = (0..8).map(|n| (2488 + 255 * n, 255)).chain([(4528, 8)]).collect();
    assert_eq!(one(Op::Write, "max_sectors=255", 2488, 2048), expected);
    let aligned = one(Op::Write, "max_sectors=255,physical_block_size=4096", 2488, 2048);
    assert_eq!(aligned[0], (2488, 248));
}

#[test]
fn blk_7_leaves_the_kernels_trace_and_counts_the_pieces() {
    let mut bench = bench("max_sectors=255");
    bench.run(sectors(Op::Write, 2488, 2048), &[memory(0, 2048 << 9)]);
    let letters: String = bench
        .log
        .borrow()
        .points
        .iter()
        .map(|p| match p.event {
            Event::Queued => "Q",
            Event::Split { .. } => "X",
            Event::Issued => "GID",
            Event::Completed { .. } => "C",
            Event::Requeued => "R",
            _ => "",
        })
        .collect();
    assert_eq!(letters, format!("Q{}{}", "X".repeat(8), "GIDC".repeat(9)));
    assert_eq!(bench.counted().fields()[4..7], [9, 0, 2048]);
}

#[test]
fn memory_is_cut_with_the_request() {
    let mut bench = bench("max_sectors=8");
    let run = [memory(0, 1024), memory(8192, 6144), memory(65536, 1024)];
    let (_, seen) = bench.run(sectors(Op::Read, 0, 16), &run);
    assert_eq!(seen[0].1, [memory(0, 1024), memory(8192, 3072)]);
    assert_eq!(seen[1].1, [memory(8192 + 3072, 3072), memory(65536, 1024)]);
    let (_, seen) = bench.run(sectors(Op::Read, 0, 16), &[memory(512, 8192)]);
    assert_eq!(seen[1].0.data, Data::One(memory(512 + 4096, 4096)));
}

#[test]
fn children_keep_the_flags_but_are_not_zero_copy() {
    let mut bench = bench("max_sectors=8");
    let mut req = sectors(Op::Read, 0, 16);
    req.flags = Flags::FUA.union(Flags::ZERO_COPY);
    let (_, seen) = bench.run(req, &[memory(0, 8192)]);
    assert!(seen.iter().all(|(child, _)| child.flags == Flags::FUA));
}

#[test]
fn the_first_error_is_returned_after_the_last_child() {
    let mut bench = bench("max_sectors=8");
    bench.log.borrow_mut().holds = true;
    bench.submit(sectors(Op::Write, 0, 24), &[memory(0, 24 << 9)]);
    bench.end_oldest(Status::Ok);
    bench.end_oldest(Status::Medium);
    assert_eq!(bench.done(), [], "one child is still in flight");
    bench.end_oldest(Status::NoSpace);
    assert_eq!(bench.done(), [Status::Medium]);
}

#[test]
fn children_start_as_others_end_when_few_are_spare() {
    let mut bench = Bench::new(2, |child| Split::new(&limits("max_sectors=8"), child));
    bench.log.borrow_mut().holds = true;
    bench.submit(sectors(Op::Write, 0, 40), &[memory(0, 40 << 9)]);
    bench.submit(sectors(Op::Write, 100, 16), &[memory(0, 16 << 9)]);
    assert!(bench.queue.has_parked(), "no child request is spare for the second");
    for in_flight in [2, 2, 2, 2, 1] {
        assert_eq!(bench.log.borrow().held.len(), in_flight);
        bench.end_oldest(Status::Ok);
    }
    assert_eq!(bench.done(), [Status::Ok]);
    bench.queue.turn(&mut bench.ring);
    bench.end_oldest(Status::Ok);
    bench.end_oldest(Status::Ok);
    assert_eq!(bench.done(), [Status::Ok]);
    let starts: Vec<_> = bench.log.borrow().seen.iter().map(|(child, _)| child.offset.0 >> 9).collect();
    assert_eq!(starts, [0, 8, 16, 24, 32, 100, 108]);
    assert!(!bench.queue.has_parked());
}

#[test]
fn no_child_starts_after_an_error() {
    let mut bench = Bench::new(2, |child| Split::new(&limits("max_sectors=8"), child));
    bench.log.borrow_mut().holds = true;
    bench.submit(sectors(Op::Write, 0, 80), &[memory(0, 80 << 9)]);
    bench.end_oldest(Status::IoError);
    assert_eq!(bench.done(), []);
    bench.end_oldest(Status::Ok);
    assert_eq!(bench.done(), [Status::IoError]);
    assert_eq!(bench.log.borrow().seen.len(), 2);
    let mut inline = Bench::new(2, |child| Split::new(&limits("max_sectors=8"), child));
    inline.log.borrow_mut().answers = [Status::Ok, Status::IoError].into();
    let (status, seen) = inline.run(sectors(Op::Write, 0, 800), &[memory(0, 800 << 9)]);
    assert_eq!(status, Status::IoError);
    assert!(seen.len() <= 3, "{}", seen.len());
}

#[test]
fn a_timeout_cancels_the_children() {
    let mut bench = bench("max_sectors=8");
    bench.log.borrow_mut().holds = true;
    bench.submit(sectors(Op::Write, 0, 16), &[memory(0, 16 << 9)]);
    bench.ring.now = bench.ring.now.after(2_000_000);
    bench.queue.set_timeout(Some(1_000_000));
    bench.queue.expire(&mut bench.ring);
    bench.queue.set_timeout(None);
    assert_eq!(bench.log.borrow().cancelled.len(), 2);
    bench.end_oldest(Status::IoError);
    bench.end_oldest(Status::Ok);
    assert_eq!(bench.done(), [Status::Timeout]);
}

#[test]
fn stacked_splits_enforce_both_limits() {
    let (outer, inner) = (limits("max_sectors=24"), limits("max_sectors=16"));
    let mut bench = Bench::over(64, |child| Split::new(&outer, child), |child| Split::new(&inner, child));
    let (status, seen) = bench.run(sectors(Op::Read, 0, 60), &[memory(0, 60 << 9)]);
    let mut got: Vec<_> = seen.iter().map(|(child, _)| (child.offset.0 >> 9, child.len.0 >> 9)).collect();
    got.sort_unstable();
    assert_eq!((status, got), (Status::Ok, vec![(0, 16), (16, 8), (24, 16), (40, 8), (48, 12)]));
    assert_eq!(bench.counted().fields()[..3], [5, 0, 60]);
}

#[test]
fn blk_5_a_zone_append_is_never_split() {
    let mut zoned = limits("chunk_sectors=64,max_sectors=32");
    zoned.features = zoned.features.union(block::Features::ZONED);
    zoned.max_hw_zone_append_sectors = Sectors(16);
    zoned.validate().expect("valid limits");
    let mut bench = Bench::new(64, |child| Split::new(&zoned, child));
    let mut append = |count: u64, flags| {
        let req = Request { flags, ..sectors(Op::ZoneAppend, 64, count) };
        let (status, seen) = bench.run(req, &[memory(4096, count << 9)]);
        (status, seen.len())
    };
    assert_eq!(append(16, Flags::empty()), (Status::Ok, 1));
    assert_eq!(append(17, Flags::empty()), (Status::Invalid, 0), "above max_zone_append_sectors");
    assert_eq!(append(17, Flags::NOWAIT), (Status::Invalid, 0), "waiting would not help");
    let mut plain = Bench::new(64, |child| Split::new(&limits("max_sectors=32"), child));
    let req = sectors(Op::ZoneAppend, 0, 33);
    assert_eq!(
        plain.run(req, &[memory(4096, 33 << 9)]).0,
        Status::Invalid,
        "the device does not support zone append"
    );
}

#[test]
fn zone_commands_are_not_split() {
    let mut bench = bench("chunk_sectors=64,max_sectors=32");
    for op in [Op::ZoneReset, Op::ZoneResetAll, Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish] {
        let (status, seen) = bench.run(sectors(op, 64, 0), &[]);
        assert_eq!((status, seen.len(), seen[0].0.offset), (Status::Ok, 1, Sectors(64).bytes()), "{op:?}");
    }
    let (status, seen) = bench.run(sectors(Op::ReportZones, 0, 640), &[memory(0, 4096)]);
    assert_eq!((status, seen.len()), (Status::Ok, 1), "longer than any data");
}
