//! Tests of scheduling, after the kernel's documentation of its schedulers, and of merging.

use super::{Choice, Scheduler};
use crate::Layer;
use crate::testing::{Bench, Clock};
use block::{
    Abilities, Bytes, Data, Features, Flags, Op, Profile, QueueLimits, Region, Request, Sectors, Segment,
    Status,
};
use queue::{Event, Nanos, NodeId};

const MS: u64 = 1_000_000;

fn profile(change: impl Fn(&mut QueueLimits)) -> Profile {
    let mut limits = QueueLimits {
        max_hw_sectors: Sectors(2048),
        max_hw_discard_sectors: Sectors(1 << 20),
        ..QueueLimits::default()
    };
    change(&mut limits);
    limits.validate().unwrap();
    Profile {
        size: Bytes::gib(1),
        read_only: false,
        abilities: Abilities::MEMORY,
        limits,
        bytewise: true,
        zero_copy_reads: true,
        inline: true,
        sparse: true,
        opaque: true,
    }
}

fn bench_on(text: &str, below: &Profile) -> Bench {
    let scheduler = Scheduler::new(text.parse::<Choice>().unwrap());
    let whole = Layer::<Clock>::profile(&scheduler, std::slice::from_ref(below)).unwrap();
    scheduler.set_depth(64);
    let children = Layer::<Clock>::child_requests(&scheduler, 64);
    let bench = Bench::deep(64, children, scheduler.node(&whole, &[NodeId(1)]));
    bench.log.borrow_mut().holds = true;
    bench
}

/// A bench whose device holds requests until the test ends them.
fn bench(text: &str) -> Bench {
    bench_on(text, &profile(|_| ()))
}

/// Submits a request whose memory is adjacent to no other request's.
fn submit(bench: &mut Bench, op: Op, sector: u64, sectors: u64) {
    submit_with(bench, op, sector, sectors, Flags::empty());
}

fn submit_with(bench: &mut Bench, op: Op, sector: u64, sectors: u64, flags: Flags) {
    let mut req = Request::new(op, Sectors(sector).bytes(), Sectors(sectors).bytes());
    req.flags = flags;
    let memory = Segment { offset: sector << 20, len: (sectors << 9) as u32, region: Region(7) };
    let memory = [memory];
    bench.submit(req, if op.moves_data() { &memory } else { &[] });
}

/// Runs one turn. Returns the requests that reached the device in it: operation, start and length in sectors.
fn turn(bench: &mut Bench) -> Vec<(Op, u64, u64)> {
    bench.queue.turn(&mut bench.ring);
    let seen = std::mem::take(&mut bench.log.borrow_mut().seen);
    seen.into_iter().map(|(req, _)| (req.op, req.offset.0 >> 9, req.len.0 >> 9)).collect()
}

/// Ends held requests one by one. Returns the order in which requests reached the device.
fn drain(bench: &mut Bench) -> Vec<(Op, u64)> {
    let mut order: Vec<_> = turn(bench).into_iter().map(|(op, sector, _)| (op, sector)).collect();
    while !bench.log.borrow().held.is_empty() {
        bench.end_oldest(Status::Ok);
        order.extend(turn(bench).into_iter().map(|(op, sector, _)| (op, sector)));
    }
    order
}

fn trace_letters(bench: &Bench) -> String {
    let points = &bench.log.borrow().points;
    let letter = |event| match event {
        Event::Plugged => "P",
        Event::Unplugged { .. } => "U",
        Event::Queued => "Q",
        Event::Got => "G",
        Event::Merged { front: false } => "M",
        Event::Merged { front: true } => "F",
        Event::Inserted => "I",
        Event::Issued => "D",
        Event::Completed { .. } => "C",
        _ => "",
    };
    points.iter().map(|point| letter(point.event)).collect()
}

/// A bench with a request at the device, so that later ones wait.
fn busy_bench(text: &str) -> Bench {
    let mut bench = bench(text);
    submit(&mut bench, Op::Read, 1 << 20, 8);
    assert_eq!(turn(&mut bench).len(), 1);
    bench
}

#[test]
fn adjacent_requests_of_a_batch_are_dispatched_as_one() {
    for scheduler in ["mq-deadline", "kyber"] {
        let mut bench = bench(scheduler);
        for sector in [8, 16, 0, 32, 24] {
            submit(&mut bench, Op::Write, sector, 8);
        }
        assert!(bench.log.borrow().seen.is_empty(), "nothing is dispatched before the batch ends");
        bench.queue.turn(&mut bench.ring);
        let (req, memory) = bench.log.borrow_mut().seen.remove(0);
        assert_eq!((req.offset, req.len), (Bytes(0), Bytes(40 << 9)));
        let order: Vec<u64> = memory.iter().map(|piece| piece.offset >> 20).collect();
        assert_eq!(order, [0, 8, 16, 24, 32], "{scheduler}: memory in the order of sectors");
        assert!(bench.log.borrow().seen.is_empty());
        bench.end_oldest(Status::Ok);
        assert_eq!(turn(&mut bench), []);
        assert_eq!(bench.done(), [Status::Ok; 5]);
        assert_eq!(bench.counted().fields()[4..8], [1, 4, 40, 0], "one write, four merges");
    }
}

#[test]
fn a_failed_merged_request_fails_all_of_its_requests() {
    let mut bench = bench("mq-deadline");
    (0..3).for_each(|n| submit(&mut bench, Op::Read, n * 8, 8));
    assert_eq!(turn(&mut bench), [(Op::Read, 0, 24)]);
    bench.end_oldest(Status::IoError);
    turn(&mut bench);
    assert_eq!(bench.done(), [Status::IoError; 3]);
    assert_eq!(bench.counted().errors, 1);
}

#[test]
fn merged_zero_copy_reads_get_their_parts_of_the_memory() {
    let mut bench = bench("mq-deadline");
    bench.log.borrow_mut().zero_copy_reads = Some(Segment { offset: 1 << 20, len: 8192, region: Region(3) });
    bench.log.borrow_mut().holds = false;
    for sector in [8, 0] {
        let mut req = Request::new(Op::Read, Sectors(sector).bytes(), Bytes(4096));
        req.flags = Flags::ZERO_COPY;
        bench.submit(req, &[]);
    }
    bench.queue.turn(&mut bench.ring);
    let done: Vec<_> = bench.queue.done().collect();
    let mut reads: Vec<_> = done.iter().map(|done| *bench.queue.request(done.tag)).collect();
    reads.sort_by_key(|req| req.offset);
    let part = |offset| Data::One(Segment { offset, len: 4096, region: Region(3) });
    assert_eq!(reads.iter().map(|req| req.data).collect::<Vec<_>>(), [part(1 << 20), part((1 << 20) + 4096)]);
    assert_eq!(bench.log.borrow().seen.len(), 1);
}

#[test]
fn contiguous_memory_of_merged_requests_becomes_one_segment() {
    let mut bench = bench("mq-deadline");
    for n in 0..3 {
        let req = Request::new(Op::Read, Bytes(n * 4096), Bytes(4096));
        bench.submit(req, &[Segment { offset: n * 4096, len: 4096, region: Region(7) }]);
    }
    bench.queue.turn(&mut bench.ring);
    let seen = std::mem::take(&mut bench.log.borrow_mut().seen);
    assert_eq!(seen[0].1, [Segment { offset: 0, len: 12288, region: Region(7) }]);
}

#[test]
fn requests_that_must_stay_single_are_not_merged() {
    for (op, flags) in [
        (Op::Write, Flags::FUA),
        (Op::Write, Flags::NOWAIT),
        (Op::WriteZeroes, Flags::empty()),
        (Op::ZoneAppend, Flags::empty()),
    ] {
        let mut bench = bench("mq-deadline");
        (0..2).for_each(|n| submit_with(&mut bench, op, n * 8, 8, flags));
        assert_eq!(turn(&mut bench).len(), 2, "{op:?} {flags:?}");
    }
    let mut bench = bench("mq-deadline");
    submit(&mut bench, Op::Read, 0, 8);
    submit(&mut bench, Op::Write, 8, 8);
    submit(&mut bench, Op::Discard, 16, 8);
    submit_with(&mut bench, Op::Write, 24, 8, Flags::FUA);
    assert_eq!(turn(&mut bench).len(), 4, "different operations and flags");
}

#[test]
fn discards_are_merged_up_to_the_largest_discard() {
    let below = profile(|limits| limits.max_hw_discard_sectors = Sectors(24));
    let mut bench = bench_on("mq-deadline", &below);
    (0..4).for_each(|n| submit(&mut bench, Op::Discard, n * 8, 8));
    assert_eq!(turn(&mut bench), [(Op::Discard, 0, 24), (Op::Discard, 24, 8)]);
}

#[test]
fn merged_requests_stay_within_the_limits_of_the_device() {
    let below = profile(|limits| {
        limits.max_user_sectors = Sectors(16);
        limits.max_segments = 4;
    });
    let mut bench = bench_on("kyber", &below);
    (0..5).for_each(|n| submit(&mut bench, Op::Read, n * 8, 8));
    assert_eq!(turn(&mut bench), [(Op::Read, 0, 16), (Op::Read, 16, 16), (Op::Read, 32, 8)]);
    (0..5).for_each(|n| submit(&mut bench, Op::Write, n, 1));
    assert_eq!(turn(&mut bench), [(Op::Write, 0, 4), (Op::Write, 4, 1)], "four segments");
}

#[test]
fn nomerges_restricts_merging_to_the_last_group_or_none() {
    // Two interleaved sequences, and a third one that ends with a request in front of it.
    let insertion = [0, 100, 8, 108, 200, 208, 216, 192];
    for scheduler in ["mq-deadline", "kyber"] {
        for (level, expected) in [
            (0, &[(0, 16), (100, 16), (192, 32)][..]),
            (1, &[(0, 8), (8, 8), (100, 8), (108, 8), (192, 32)]),
            (2, &[(0, 8), (8, 8), (100, 8), (108, 8), (192, 8), (200, 8), (208, 8), (216, 8)]),
        ] {
            let mut bench = bench(&format!("{scheduler},nomerges={level}"));
            insertion.into_iter().for_each(|sector| submit(&mut bench, Op::Write, sector, 8));
            let mut whole: Vec<_> = turn(&mut bench).into_iter().map(|(_, at, len)| (at, len)).collect();
            whole.sort_unstable();
            assert_eq!(whole, expected, "{scheduler}, nomerges={level}");
        }
    }
}

#[test]
fn the_last_group_is_forgotten_when_it_is_dispatched() {
    let mut bench = bench("mq-deadline,nomerges=1");
    submit(&mut bench, Op::Write, 0, 8);
    assert_eq!(turn(&mut bench), [(Op::Write, 0, 8)]);
    submit(&mut bench, Op::Write, 8, 8);
    assert_eq!(turn(&mut bench), [(Op::Write, 8, 8)]);
}

#[test]
fn front_merges_0_disables_front_merges() {
    for (text, expected) in [("mq-deadline", 1), ("mq-deadline,front_merges=0", 2)] {
        let mut bench = bench(text);
        submit(&mut bench, Op::Read, 8, 8);
        submit(&mut bench, Op::Read, 0, 8);
        assert_eq!(turn(&mut bench).len(), expected, "{text}");
    }
}

#[test]
fn a_flush_bypasses_waiting_requests() {
    let mut bench = busy_bench("mq-deadline,queue_depth=1");
    submit(&mut bench, Op::Write, 0, 8);
    bench.submit(Request::flush(), &[]);
    assert_eq!(turn(&mut bench), [(Op::Flush, 0, 0)], "a flush covers only completed writes");
}

#[test]
fn at_most_queue_depth_requests_are_in_flight() {
    let mut bench = bench("mq-deadline,queue_depth=3");
    (0..8).for_each(|n| submit(&mut bench, Op::Read, n * 100, 8));
    assert_eq!(turn(&mut bench).len(), 3);
    bench.end_oldest(Status::Ok);
    assert_eq!(turn(&mut bench).len(), 1, "each completion dispatches another");
    assert_eq!(drain(&mut bench).len(), 4);
}

#[test]
fn deadline_reads_precede_writes_in_sector_order() {
    let mut bench = busy_bench("mq-deadline,queue_depth=1");
    for (op, sector) in
        [(Op::Write, 300), (Op::Read, 900), (Op::Read, 100), (Op::Write, 200), (Op::Read, 500)]
    {
        submit(&mut bench, op, sector, 8);
    }
    let order = drain(&mut bench);
    // The first read began at 2^20, and none lies ahead of it: the oldest one is next.
    let reads = [900, 100, 500].map(|sector| (Op::Read, sector));
    let writes = [200, 300].map(|sector| (Op::Write, sector));
    assert_eq!(order, [&reads[..], &writes].concat());
}

#[test]
fn deadline_a_batch_is_fifo_batch_requests_in_sector_order() {
    let mut bench = busy_bench("mq-deadline,queue_depth=1,fifo_batch=16,writes_starved=1");
    for n in (0..20).rev() {
        submit(&mut bench, Op::Read, n * 100, 8);
        submit(&mut bench, Op::Write, n * 100, 8);
    }
    let order = drain(&mut bench);
    let runs: Vec<(Op, usize)> = order.chunk_by(|a, b| a.0 == b.0).map(|run| (run[0].0, run.len())).collect();
    // No read lies ahead of the first request, nor ahead of the oldest one after it: those are batches of
    // one.
    let expected = [(Op::Read, 1), (Op::Write, 16), (Op::Read, 1), (Op::Write, 4), (Op::Read, 18)];
    assert_eq!(runs, expected);
    assert!(order[1..17].windows(2).all(|pair| pair[0].1 < pair[1].1), "{order:?}");
}

#[test]
fn deadline_writes_wait_for_writes_starved_batches_of_reads() {
    let mut bench = busy_bench("mq-deadline,queue_depth=1,fifo_batch=1");
    for n in 0..6 {
        submit(&mut bench, Op::Read, n * 100, 8);
        submit(&mut bench, Op::Write, n * 100, 8);
    }
    let ops: String = drain(&mut bench).iter().map(|row| if row.0 == Op::Read { 'r' } else { 'w' }).collect();
    assert_eq!(ops, "rrwrrwrrwwww");
}

#[test]
fn deadline_an_expired_request_begins_the_next_batch() {
    let mut bench = bench("mq-deadline,queue_depth=1,fifo_batch=1,read_expire=500");
    submit(&mut bench, Op::Read, 1000, 8);
    turn(&mut bench);
    submit(&mut bench, Op::Read, 100, 8);
    bench.ring.now = Nanos(400 * MS);
    submit(&mut bench, Op::Read, 2000, 8);
    bench.end_oldest(Status::Ok);
    assert_eq!(turn(&mut bench), [(Op::Read, 2000, 8)], "it lies ahead, and no deadline has expired");
    submit(&mut bench, Op::Read, 3000, 8);
    bench.ring.now = Nanos(501 * MS);
    bench.end_oldest(Status::Ok);
    assert_eq!(turn(&mut bench), [(Op::Read, 100, 8)], "it has waited for half a second");
}

#[test]
fn deadline_a_merged_group_keeps_the_earlier_deadline() {
    let mut bench = busy_bench("mq-deadline,queue_depth=1,fifo_batch=1,read_expire=10");
    for (time, sector) in [16, 500, 0, 8].into_iter().enumerate() {
        bench.ring.now = Nanos(10 + time as u64);
        submit(&mut bench, Op::Read, sector, 8);
    }
    bench.ring.now = Nanos(20 * MS);
    bench.end_oldest(Status::Ok);
    assert_eq!(turn(&mut bench), [(Op::Read, 0, 24)]);
}

#[test]
fn async_depth_limits_writes_and_not_reads() {
    let mut bench = bench("mq-deadline,async_depth=2,queue_depth=32");
    (0..5).for_each(|n| submit(&mut bench, Op::Write, n * 100, 8));
    (0..5).for_each(|n| submit(&mut bench, Op::Read, n * 100, 8));
    let seen = turn(&mut bench);
    let writes = seen.iter().filter(|row| row.0 == Op::Write).count();
    assert_eq!((writes, seen.len()), (2, 7));
    let rest = drain(&mut bench);
    assert_eq!(rest, [200, 300, 400].map(|sector| (Op::Write, sector)));
}

#[test]
fn zoned_writes_keep_their_order_of_arrival() {
    let below = profile(|limits| {
        limits.features = Features::ZONED;
        limits.chunk_sectors = Sectors(1 << 10);
        limits.max_hw_zone_append_sectors = Sectors(1 << 10);
    });
    for scheduler in ["mq-deadline,queue_depth=1", "kyber,queue_depth=1"] {
        let mut bench = bench_on(scheduler, &below);
        submit(&mut bench, Op::Write, 4096, 8);
        turn(&mut bench);
        for sector in [1024, 8192, 0, 1032] {
            submit(&mut bench, Op::Write, sector, 8);
        }
        let order = drain(&mut bench);
        assert_eq!(order, [1024, 8192, 0].map(|sector| (Op::Write, sector)), "{scheduler}");
    }
}

#[test]
fn merged_requests_are_traced_as_in_the_kernel() {
    let mut bench = bench("mq-deadline");
    submit(&mut bench, Op::Read, 8, 8);
    submit(&mut bench, Op::Read, 16, 8);
    submit(&mut bench, Op::Read, 0, 8);
    submit(&mut bench, Op::Read, 100, 8);
    turn(&mut bench);
    bench.end_oldest(Status::Ok);
    bench.end_oldest(Status::Ok);
    assert_eq!(trace_letters(&bench), "QPGQMQFQGUIIDDCC");
}

#[test]
fn kyber_serves_domains_in_turn_by_batch_size() {
    let mut bench = bench("kyber,queue_depth=1");
    submit(&mut bench, Op::Flush, 0, 0);
    submit(&mut bench, Op::Read, 1 << 20, 8);
    turn(&mut bench);
    for n in 0..20 {
        submit(&mut bench, Op::Read, 5000 - n * 100, 8);
        submit(&mut bench, Op::Write, n * 100, 8);
    }
    submit(&mut bench, Op::Discard, 9000, 8);
    submit(&mut bench, Op::WriteZeroes, 9100, 8);
    bench.log.borrow_mut().held.pop_front();
    let order = drain(&mut bench);
    let runs: Vec<(Op, usize)> = order.chunk_by(|a, b| a.0 == b.0).map(|run| (run[0].0, run.len())).collect();
    let expected = [
        (Op::Read, 15),
        (Op::Write, 8),
        (Op::Discard, 1),
        (Op::WriteZeroes, 1),
        (Op::Read, 5),
        (Op::Write, 12),
    ];
    assert_eq!(runs, expected, "16 reads, 8 writes, 1 discard and 1 other in turn");
    assert_eq!(order[0], (Op::Read, 5000), "in order of arrival");
}
