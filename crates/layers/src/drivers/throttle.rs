//! `throttle,iops=1000,bps=100M`: limits requests and bytes a second.
//!
//! Each limit is a token bucket that issues the time at which its next request may start ([`Bucket::take`]).
//! A request takes a time from every bucket that it counts for, and one timer holds it until the latest of
//! them. So requests start in the order of arrival without polling, and the queues of a device share its
//! buckets without a lock. Unused time accumulates up to `burst`.
//!
//! Reads count as reads, operations that change data as writes, flushes not at all. Discards and writes of
//! zeroes carry no data and count as one request of 512 bytes, as discards do in the kernel's blk-throttle.
//! Devices of a process with the same `group` share one set of buckets, as in QEMU's throttle groups.

use super::driver::{Driver, read};
use crate::Layer;
use crate::layer::stacked;
use block::{Bytes, Cookie, Fact, Flags, LimitsError, Op, Profile, Request, Sectors, Status};
use options::{Escaped, OptionRow, Options, SpecError, format_time, parse_time};
use queue::{Cx, Nanos, Node, NodeId, Ring, Verdict};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;
const BURST_DEFAULT: Duration = Duration::from_millis(100);
/// The longest sleep of a held request before it checks whether the limits have changed.
const CHECK_NS: u64 = 50_000_000;
/// The number of bytes that a request without data counts as.
const BYTES_MIN: u64 = 512;

/// The options of rates: requests a second, then bytes a second; each in total, of reads, of writes.
const KEYS: [&str; 6] = ["iops", "iops_read", "iops_write", "bps", "bps_read", "bps_write"];

/// The parsed options of a throttle layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Throttle {
    limits: Limits,
    group: Option<String>,
}

/// Limits on requests and bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Limits {
    /// Units a second, in the order of [`KEYS`]; 0: unlimited.
    rates: [u64; 6],
    /// The longest unused time that accumulates.
    burst: Duration,
}

impl Limits {
    const NONE: Limits = Limits { rates: [0; 6], burst: BURST_DEFAULT };
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, rate)) in KEYS.into_iter().zip(self.rates).enumerate() {
            match rate {
                0 => {}
                _ if number < 3 => write!(f, ",{key}={rate}")?,
                _ => write!(f, ",{key}={}", Bytes(rate))?,
            }
        }
        if self.burst == BURST_DEFAULT { Ok(()) } else { write!(f, ",burst={}", format_time(self.burst)) }
    }
}

impl fmt::Display for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "throttle{}", self.limits)?;
        self.group.as_ref().map_or(Ok(()), |group| write!(f, ",group={}", Escaped(group)))
    }
}

impl Driver for Throttle {
    const NAME: &'static str = "throttle";
    const OPTIONS: &'static [OptionRow] = &[
        OptionRow::value(KEYS[0], "N", "no limit", "requests a second"),
        OptionRow::value(KEYS[1], "N", "no limit", "reads a second"),
        OptionRow::value(KEYS[2], "N", "no limit", "writes a second"),
        OptionRow::value(KEYS[3], "SIZE", "no limit", "bytes a second"),
        OptionRow::value(KEYS[4], "SIZE", "no limit", "bytes a second that are read"),
        OptionRow::value(KEYS[5], "SIZE", "no limit", "bytes a second that are written"),
        OptionRow::value("burst", "TIME", "100ms", "how much unused time may be saved up"),
        OptionRow::value(
            "group",
            "NAME",
            "none",
            "devices of a process with the same group share the limits",
        ),
    ];
    const USAGE: &'static str = "throttle[,iops=N][,iops_read=N][,iops_write=N][,bps=SIZE][,bps_read=SIZE][,bps_write=SIZE]\
                                 [,burst=TIME][,group=NAME]";
    const ABOUT: &'static str = "limits requests and bytes a second";
    const EXAMPLE: &'static str = "throttle,iops=1000,bps=100M";

    fn read(mut options: Options) -> Result<Throttle, SpecError> {
        let mut limits = Limits::NONE;
        for (number, (key, rate)) in KEYS.into_iter().zip(&mut limits.rates).enumerate() {
            let given = match number {
                0..3 => options.value::<u64>(key, "1000")?,
                _ => options.value::<Bytes>(key, "100M")?.map(|bytes| bytes.0),
            };
            if given == Some(0) {
                return Err(SpecError::new(
                    format!("{key}=0 would block every request"),
                    "leave it out for no limit, or use error: or suspend",
                ));
            }
            *rate = given.unwrap_or(0);
        }
        let burst = options.text("burst")?.map(|text| parse_time(&text)).transpose()?;
        limits.burst = burst.unwrap_or(BURST_DEFAULT);
        let group = options.text("group")?;
        if limits.rates == [0; 6] && (group.is_none() || burst.is_some()) {
            return Err(SpecError::new("throttle has no limit", "for example throttle,iops=1000"));
        }
        Ok(Throttle { limits, group })
    }

    fn random(below: &mut dyn FnMut(u64) -> u64) -> Throttle {
        let mut limits = Limits { rates: [0; 6], burst: Duration::from_nanos(below(20_000_000)) };
        let unit = |number: usize| if number < 3 { 1 } else { 4096 };
        let sure = below(6) as usize;
        for (number, rate) in limits.rates.iter_mut().enumerate() {
            if number == sure || below(3) == 0 {
                *rate = (1000 + below(1_000_000)) * unit(number);
            }
        }
        Throttle { limits, group: None }
    }

    fn layer<R: Ring>(&self, _: &[Profile]) -> Result<Arc<dyn Layer<R>>, String> {
        Ok(Arc::new(ThrottleLayer::new(self)))
    }
}

/// Issues start times so that they follow each other at a rate.
#[derive(Debug)]
struct Bucket {
    /// Units a second; 0: unlimited.
    rate: AtomicU64,
    /// The time at which the next request would start if no unused time had accumulated.
    due_ns: AtomicU64,
}

impl Bucket {
    /// Takes `units` and returns the time at which they may start.
    fn take(&self, now: Nanos, burst_ns: u64, units: u64) -> u64 {
        let rate = self.rate.load(Relaxed);
        if rate == 0 {
            return 0;
        }
        let takes = u128::from(units) * u128::from(SECOND) / u128::from(rate);
        let takes = u64::try_from(takes).unwrap_or(u64::MAX);
        let earliest = now.0.saturating_sub(burst_ns);
        let turn = |due: u64| due.max(earliest);
        let before = self.due_ns.fetch_update(Relaxed, Relaxed, |due| Some(turn(due).saturating_add(takes)));
        turn(before.unwrap_or_else(|due| due))
    }
}

/// The limits and buckets that the devices of a group share.
#[derive(Debug)]
struct Group {
    buckets: [Bucket; 6],
    burst_ns: AtomicU64,
    /// Counts changes of the limits: held requests take a new start time after each.
    changes: AtomicU32,
    /// The limits that are in force.
    limits: Mutex<Limits>,
}

impl Group {
    fn new(limits: Limits) -> Group {
        let buckets =
            limits.rates.map(|rate| Bucket { rate: AtomicU64::new(rate), due_ns: AtomicU64::new(0) });
        let burst_ns = AtomicU64::new(nanos(limits.burst));
        Group { buckets, burst_ns, changes: AtomicU32::new(0), limits: Mutex::new(limits) }
    }

    /// Changes the limits. Start times that were issued before become void.
    fn set(&self, limits: Limits) {
        let mut given = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        if *given == limits {
            return;
        }
        *given = limits;
        self.burst_ns.store(nanos(limits.burst), Relaxed);
        for (bucket, rate) in self.buckets.iter().zip(limits.rates) {
            bucket.due_ns.store(0, Relaxed);
            bucket.rate.store(rate, Relaxed);
        }
        self.changes.fetch_add(1, Release);
    }

    fn limits(&self) -> Limits {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a request that arrives now may have to wait.
    fn is_busy(&self, now: Nanos) -> bool {
        let used = self.buckets.iter().filter(|bucket| bucket.rate.load(Relaxed) > 0);
        used.map(|bucket| bucket.due_ns.load(Relaxed)).any(|due| due > now.0)
    }

    /// Takes from every bucket that the request counts for, and returns when it may start.
    fn take(&self, now: Nanos, is_write: bool, bytes: u64) -> Nanos {
        let burst_ns = self.burst_ns.load(Relaxed);
        let [all, reads, writes, bytes_all, bytes_read, bytes_written] = &self.buckets;
        let turns = match is_write {
            true => [(all, 1), (writes, 1), (bytes_all, bytes), (bytes_written, bytes)],
            false => [(all, 1), (reads, 1), (bytes_all, bytes), (bytes_read, bytes)],
        };
        let last = turns.into_iter().map(|(bucket, units)| bucket.take(now, burst_ns, units)).max();
        Nanos(last.unwrap_or(0))
    }
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// The named groups of this process, while a device uses them.
static GROUPS: LazyLock<Mutex<HashMap<String, Weak<Group>>>> = LazyLock::new(Mutex::default);

/// Returns the group of that name; creates it with these limits if it does not exist.
fn group(name: &str, limits: Limits) -> Arc<Group> {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|_, group| group.strong_count() > 0);
    if let Some(group) = groups.get(name).and_then(Weak::upgrade) {
        return group;
    }
    let group = Arc::new(Group::new(limits));
    groups.insert(name.to_owned(), Arc::downgrade(&group));
    group
}

/// The shared part of a throttle layer.
#[derive(Debug)]
struct ThrottleLayer {
    shared: Arc<Shared>,
    name: Option<String>,
}

#[derive(Debug)]
struct Shared {
    group: Arc<Group>,
    /// The limits that the group gets once this layer is in use; `None`: the group keeps its limits.
    wanted: Option<Limits>,
    is_applied: AtomicBool,
}

impl Shared {
    #[cold]
    fn apply(&self) {
        if let Some(limits) = self.wanted
            && !self.is_applied.swap(true, Acquire)
        {
            self.group.set(limits);
        }
    }
}

impl ThrottleLayer {
    fn new(options: &Throttle) -> ThrottleLayer {
        let group = match &options.group {
            Some(name) => group(name, options.limits),
            None => Arc::new(Group::new(options.limits)),
        };
        // A layer that is created and never used does not change its group.
        let wanted = (options.limits.rates != [0; 6]).then_some(options.limits);
        let is_applied = AtomicBool::new(wanted.is_none_or(|limits| limits == group.limits()));
        let shared = Shared { group, wanted, is_applied };
        ThrottleLayer { shared: Arc::new(shared), name: options.group.clone() }
    }
}

impl<R: Ring> Layer<R> for ThrottleLayer {
    fn name(&self) -> &'static str {
        Throttle::NAME
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let below = &below[0];
        let mut limits = stacked(&below.limits, Sectors(0));
        limits.validate()?;
        // Not sparse: a read of a hole counts like any other, and is not answered from an extent query.
        Ok(Profile { limits, inline: false, sparse: false, ..below.clone() })
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn child_start(&self, _: usize) -> Option<Bytes> {
        Some(Bytes::ZERO)
    }

    fn change(&self, options: &str) -> bool {
        match read::<Throttle>(options) {
            Ok(options) if options.group == self.name => {
                self.shared.group.set(options.limits);
                true
            }
            _ => false,
        }
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(ThrottleNode { child: below[0], shared: self.shared.clone(), held: Box::default() })
    }

    fn describe(&self) -> Vec<Fact> {
        let limits = self.shared.group.limits().to_string();
        let mut facts = vec![("throttled to", limits.trim_start_matches(',').replace(',', ", "))];
        if let Some(name) = &self.name {
            // The layer and the nodes of a device share one reference to the group, so the count is the
            // number of devices.
            let count = Arc::strong_count(&self.shared.group);
            facts.push((
                "throttle group",
                format!("{name} ({count} {})", if count == 1 { "device" } else { "devices" }),
            ));
        }
        facts
    }
}

/// The node of one hardware queue.
struct ThrottleNode {
    child: NodeId,
    shared: Arc<Shared>,
    /// By tag: the start time of a held request, and the value of `Group::changes` when it was computed.
    held: Box<[(Nanos, u32)]>,
}

impl ThrottleNode {
    /// Passes a request down, or holds it until its start time.
    fn queue<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let group = &self.shared.group;
        let bytes = if req.op.moves_data() { req.len.0 } else { BYTES_MIN };
        let changes = group.changes.load(Acquire);
        let at = group.take(cx.now(), req.op.is_write(), bytes);
        if at <= cx.now() {
            return Verdict::Down(self.child);
        }
        self.held[io.tag.index()] = (at, changes);
        self.hold(io, cx)
    }

    fn hold<R: Ring>(&self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        cx.timer(io, self.held[io.tag.index()].0.min(cx.now().after(CHECK_NS)));
        Verdict::Held
    }
}

impl<R: Ring> Node<R> for ThrottleNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.held = vec![(Nanos(0), 0); tags].into();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if !self.shared.is_applied.load(Relaxed) {
            self.shared.apply();
        }
        let counts = req.op.is_write() || req.op == Op::Read;
        if !counts {
            return Verdict::Down(self.child);
        }
        if req.flags.contains(Flags::NOWAIT) && self.shared.group.is_busy(cx.now()) {
            return Verdict::Up(Status::Again);
        }
        self.queue(io, req, cx)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let (at, changes) = self.held[io.tag.index()];
        match result {
            _ if result < 0 => Verdict::Up(Status::from_result(result, 0)),
            _ if changes != self.shared.group.changes.load(Acquire) => self.queue(io, req, cx),
            _ if at <= cx.now() => Verdict::Down(self.child),
            _ => self.hold(io, cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;
    use block::Segment;

    const MS: u64 = 1_000_000;

    fn parse(text: &str) -> Throttle {
        read(text).unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    fn create(text: &str) -> (Arc<dyn Layer<crate::testing::Clock>>, Bench) {
        let layer = parse(text).layer(&[]).expect("it accepts any profile");
        let profile = crate::dm::testing::profile(Bytes::gib(1));
        let node = layer.node(&profile, &[NodeId(1)]);
        (layer, Bench::deep(64, 0, node))
    }

    fn memory(len: u64) -> [Segment; 1] {
        [Segment { offset: 0, len: len as u32, region: block::Region(0) }]
    }

    fn submit(bench: &mut Bench, op: Op, len: u64) {
        bench.submit(Request::new(op, Bytes(0), Bytes(len)), &memory(len));
    }

    /// Submits `count` requests. Returns how many have completed at each time in milliseconds.
    fn ended(bench: &mut Bench, op: Op, len: u64, count: usize, at_ms: &[u64]) -> Vec<usize> {
        (0..count).for_each(|_| submit(bench, op, len));
        let mut all = 0;
        let mut look = |&ms: &u64| {
            bench.pass_until(Nanos(ms * MS));
            all += bench.done().len();
            all
        };
        at_ms.iter().map(&mut look).collect()
    }

    #[test]
    fn options_are_parsed_and_formatted() {
        for text in [
            "throttle,iops=1000",
            "throttle,iops_read=5,iops_write=7,bps=1M,bps_read=4K,bps_write=1G,burst=0",
            "throttle,bps=100M,burst=2s,group=a,, b",
            "throttle,group=a",
        ] {
            assert_eq!(parse(text).to_string(), text);
        }
        for (text, why) in [
            ("throttle", "has no limit"),
            ("throttle,iops=0", "would block every request"),
            ("throttle,burst=1s", "has no limit"),
            ("throttle,group=a,burst=1s", "has no limit"),
            ("throttle,iops=many", "option iops"),
            ("throttle,bps=1x", "option bps"),
        ] {
            let error = read::<Throttle>(text).expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn requests_start_at_the_rate_and_accumulated_ones_at_once() {
        let (layer, mut bench) = create("throttle,iops=1000,burst=0");
        let sparse = crate::dm::testing::profile(Bytes::gib(1));
        let whole = layer.profile(&[Profile { sparse: true, ..sparse }]).unwrap();
        assert!(!whole.sparse, "reads are not answered by extent queries");
        // One request starts each millisecond, the first at once.
        assert_eq!(ended(&mut bench, Op::Read, 512, 20, &[1, 5, 10, 18, 30]), [1, 5, 10, 18, 20]);
        let (_, mut bench) = create("throttle,iops=1000,burst=10ms");
        bench.ring.now = Nanos(1000 * MS);
        assert_eq!(ended(&mut bench, Op::Write, 512, 30, &[1000, 1005, 1030]), [11, 16, 30]);
    }

    #[test]
    fn bytes_are_limited_and_requests_without_data_count_as_one_sector() {
        let (_, mut bench) = create("throttle,bps_write=1M,burst=0");
        // 64 KiB take 62.5 ms.
        assert_eq!(ended(&mut bench, Op::Write, 64 << 10, 4, &[1, 63, 126, 188]), [1, 2, 3, 4]);
        assert_eq!(ended(&mut bench, Op::Read, 1 << 20, 9, &[188]), [9], "reads are free");
        let (_, mut bench) = create("throttle,bps=1M,burst=0");
        bench.ring.now = Nanos(MS);
        bench.submit(Request::new(Op::Discard, Bytes(0), Bytes(1 << 29)), &[]);
        bench.submit(Request::new(Op::WriteZeroes, Bytes(0), Bytes(1 << 29)), &[]);
        bench.submit(Request::flush(), &[]);
        assert_eq!(bench.done().len(), 2, "the flush does not wait");
        bench.pass_until(Nanos(2 * MS));
        assert_eq!(bench.done().len(), 1);
    }

    #[test]
    fn reads_and_writes_have_own_limits_besides_the_total() {
        let (_, mut bench) = create("throttle,iops=1000,iops_read=500,burst=0");
        (0..4).for_each(|_| submit(&mut bench, Op::Read, 512));
        bench.pass_until(Nanos(4 * MS + 1));
        assert_eq!(bench.done().len(), 3, "at 0, 2 and 4 ms");
        (0..4).for_each(|_| submit(&mut bench, Op::Write, 512));
        bench.pass_until(Nanos(7 * MS + 1));
        assert_eq!(bench.done().len(), 1 + 4, "a read at 6 ms, writes at 4, 5, 6 and 7 ms");
    }

    #[test]
    fn changed_limits_apply_to_held_requests() {
        let (layer, mut bench) = create("throttle,iops=1,burst=0");
        assert_eq!(ended(&mut bench, Op::Read, 512, 10, &[1, 900]), [1, 1]);
        assert!(layer.change("throttle,iops=1000,burst=0"));
        assert_eq!(layer.describe()[0], ("throttled to", "iops=1000, burst=0".to_owned()));
        bench.pass_until(Nanos(1000 * MS));
        assert_eq!(bench.done().len(), 9, "they check the limits again within {CHECK_NS} ns");
        assert!(!layer.change("throttle,iops=1,group=a"), "another group needs another layer");
    }

    #[test]
    fn devices_of_a_group_share_its_limits() {
        let (first, mut one) = create("throttle,iops=1000,burst=0,group=shared");
        let (_second, mut other) = create("throttle,group=shared");
        (0..5).for_each(|_| {
            submit(&mut one, Op::Read, 512);
            submit(&mut other, Op::Read, 512);
        });
        one.pass_until(Nanos(5 * MS));
        other.pass_until(Nanos(5 * MS));
        let all = one.done().len() + other.done().len();
        assert!((5..=6).contains(&all), "{all}");
        assert_eq!(first.describe()[1], ("throttle group", "shared (2 devices)".to_owned()));
        // A third device with limits of its own sets them for the group with its first request.
        let (_third, mut third) = create("throttle,iops=7,group=shared");
        assert!(first.describe()[0].1.contains("iops=1000"));
        submit(&mut third, Op::Read, 512);
        assert!(first.describe()[0].1.contains("iops=7"));
    }

    #[test]
    fn cancelled_requests_end_and_nowait_requests_return_again() {
        let (_, mut bench) = create("throttle,iops=1,burst=0");
        submit(&mut bench, Op::Read, 512);
        let mut nowait = Request::new(Op::Read, Bytes(0), Bytes(512));
        nowait.flags = Flags::NOWAIT;
        bench.submit(nowait, &memory(512));
        assert_eq!(bench.done(), [Status::Ok, Status::Again]);
        submit(&mut bench, Op::Read, 512);
        bench.queue.set_timeout(Some(1));
        bench.ring.now = Nanos(10);
        assert_eq!(bench.queue.expire(&mut bench.ring), 1);
        bench.pass_until(Nanos(20));
        assert_eq!(bench.done(), [Status::Timeout]);
    }

    #[test]
    fn threads_together_do_not_exceed_the_rate() {
        let group = Group::new(Limits { rates: [1000, 0, 0, 0, 0, 0], burst: Duration::ZERO });
        let last = std::thread::scope(|scope| {
            let each = || (0..1000).map(|_| group.take(Nanos(1), false, 512).0).max();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(each)).collect();
            threads.into_iter().filter_map(|thread| thread.join().expect("no panic")).max()
        });
        assert_eq!(last, Some(1 + 3999 * MS), "4000 start times, one each millisecond");
    }
}
