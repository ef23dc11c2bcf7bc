//! The kernel's selectors as a model (drivers/md/dm-ps-*.c): a list of paths, compared one by one with the
//! best so far; the chosen one moves to its end. The tests compare a queue's selectors with it, while paths
//! fail and are reinstated, requests end in random order, and time jumps now and then.

use super::{PathArgs, Selector, SelectorArgs};
use block::Bytes;
use queue::Nanos;
use std::cmp::Ordering;

#[derive(Clone, Default)]
struct Path {
    requests: u64,
    bytes: u64,
    throughput: u64,
    service_time: u64,
    stale_after: u64,
    last_end: u64,
}

struct Model {
    args: SelectorArgs,
    paths: Vec<Path>,
    /// The usable paths.
    list: Vec<u8>,
}

/// `fixed_power`, `fixed_ema` and the weights of dm-ps-historical-service-time.c, without overflow.
fn average(last: u64, next: u64, base: u64, took: u64) -> u64 {
    let round = |product: u64| (product + 512) >> 10;
    let (mut weight, mut base, mut exponent) = (1024, base, (took >> 24) + 1);
    if exponent > 63 {
        weight = 0;
    }
    while exponent > 0 {
        if exponent & 1 == 1 {
            weight = round(weight * base);
        }
        base = round(base * base);
        exponent >>= 1;
    }
    let sum = u128::from(last) * u128::from(weight) + u128::from(next) * u128::from(1024 - weight);
    ((sum + 512) >> 10) as u64
}

impl Model {
    fn new(args: &SelectorArgs, paths: &[PathArgs]) -> Model {
        let path = |path: &PathArgs| {
            let throughput = if let PathArgs::Throughput(throughput) = path { *throughput } else { 1 };
            Path { throughput: throughput.into(), service_time: 1024, ..Path::default() }
        };
        Model { args: args.clone(), paths: paths.iter().map(path).collect(), list: Vec::new() }
    }

    fn set_usable(&mut self, usable: &[bool]) {
        self.list.retain(|&path| usable[usize::from(path)]);
        let back =
            (0..usable.len() as u8).filter(|path| usable[usize::from(*path)] && !self.list.contains(path));
        self.list.extend(back.collect::<Vec<_>>());
    }

    fn take(&mut self, len: u64, now: u64) -> Option<u8> {
        let mut best = *self.list.first()?;
        for &path in &self.list[1..] {
            let (one, other) = (&self.paths[usize::from(path)], &self.paths[usize::from(best)]);
            let order = match self.args {
                SelectorArgs::QueueLength => one.requests.cmp(&other.requests),
                SelectorArgs::ServiceTime => service_time(one, other, len),
                SelectorArgs::Historical { threshold, .. } => historical(one, other, threshold.into(), now),
                _ => Ordering::Equal,
            };
            if order == Ordering::Less {
                best = path;
            }
        }
        self.list.retain(|&path| path != best);
        self.list.push(best);
        let path = &mut self.paths[usize::from(best)];
        path.requests += 1;
        path.bytes += len;
        Some(best)
    }

    fn end(&mut self, path: u8, len: u64, sent: u64, now: u64) {
        let usable = self.list.len() as u64;
        let path = &mut self.paths[usize::from(path)];
        path.requests -= 1;
        path.bytes -= len;
        if let SelectorArgs::Historical { base_weight, .. } = self.args {
            let took = now.saturating_sub(sent.max(path.last_end));
            path.last_end = now;
            let fixed = took.saturating_mul(1024).min(u64::MAX >> 10);
            path.service_time = average(path.service_time, fixed, base_weight.into(), took);
            path.stale_after = now.saturating_add(usable.saturating_mul(path.service_time >> 10));
        }
    }
}

/// `st_compare_load`.
fn service_time(a: &Path, b: &Path, len: u64) -> Ordering {
    if a.throughput == b.throughput {
        return a.bytes.cmp(&b.bytes);
    }
    let by_throughput = b.throughput.cmp(&a.throughput);
    if a.bytes == b.bytes || a.throughput == 0 || b.throughput == 0 {
        return by_throughput;
    }
    ((a.bytes + len) * b.throughput).cmp(&((b.bytes + len) * a.throughput)).then(by_throughput)
}

/// `hst_compare`.
fn historical(a: &Path, b: &Path, threshold: u64, now: u64) -> Ordering {
    let (slow, fast) = if a.service_time > b.service_time { (a, b) } else { (b, a) };
    let by_requests = a.requests.cmp(&b.requests);
    if slow.service_time <= threshold.saturating_mul(fast.service_time) {
        return by_requests;
    }
    let (a_idle, b_idle) = (a.requests == 0, b.requests == 0);
    if (a_idle && a.stale_after < now) || (b_idle && b.stale_after < now) || (a_idle && b_idle) {
        let of = |path: &Path, counts: bool| if counts { path.stale_after } else { 0 };
        return of(a, b_idle).cmp(&of(b, a_idle));
    }
    let estimate = |path: &Path| u128::from(1 + path.requests) * u128::from(path.service_time);
    let b_better = estimate(a) > estimate(b);
    let winner = if b_better { b } else { a };
    if winner.stale_after < now {
        return by_requests;
    }
    if b_better { Ordering::Greater } else { Ordering::Less }
}

/// Runs random events on a selector with `count` paths. Returns how often each path was chosen.
fn live(args: &SelectorArgs, count: usize, seed: u64) -> Vec<usize> {
    let mut random = fastrand::Rng::with_seed(seed);
    let even = random.u64(..2) == 0;
    let mut path = || match args {
        SelectorArgs::ServiceTime => PathArgs::Throughput(if even { 7 } else { random.u64(..5) as u32 }),
        SelectorArgs::Historical { .. } => PathArgs::Historical,
        _ => PathArgs::Plain,
    };
    let paths: Vec<PathArgs> = (0..count).map(|_| path()).collect();
    let (mut model, mut selector) = (Model::new(args, &paths), Selector::new(args, &paths, 0));
    let (mut usable, mut now, mut chosen) = (vec![true; count], 1_000_000, vec![0; count]);
    let mut in_flight: Vec<(u8, u64, u64)> = Vec::new();
    let depth = 1 + random.u64(..40) as usize;
    for step in 0..2_000 {
        if step == 0 || random.u64(..50) == 0 {
            let path = random.u64(..count as u64) as usize;
            usable[path] = step == 0 || !usable[path];
            model.set_usable(&usable);
            selector.set_usable(|path| usable[usize::from(path)]);
        }
        now += [0, 0, 1, 700, 90_000, 20_000_000, 3_000_000_000][random.u64(..7) as usize];
        if in_flight.len() < depth && random.u64(..5) < 3 {
            let len = random.u64(..9) * 512;
            let expected = model.take(len, now);
            let found = selector.has_usable().then(|| selector.take(Bytes(len), Nanos(now))).flatten();
            assert_eq!(found, expected, "{args:?}, seed {seed}, step {step}");
            in_flight.extend(expected.map(|path| (path, len, now)));
            expected.into_iter().for_each(|path| chosen[usize::from(path)] += 1);
        } else if !in_flight.is_empty() {
            let (path, len, sent) = in_flight.swap_remove(random.u64(..in_flight.len() as u64) as usize);
            model.end(path, len, sent, now);
            selector.end(path, Bytes(len), now - sent, Nanos(now));
        }
        if random.u64(..400) == 0 {
            selector.exhaust_stamps();
        }
        selector.renumber_stamps();
    }
    selector.each_report(count as u8, |number, report| {
        let path = &model.paths[usize::from(number)];
        assert_eq!(report.requests, path.requests, "{args:?}, seed {seed}");
        match args {
            SelectorArgs::ServiceTime => assert_eq!(report.bytes, path.bytes, "seed {seed}"),
            SelectorArgs::Historical { .. } => {
                let shown = (report.service_time, report.stale_after);
                assert_eq!(shown, (path.service_time, path.stale_after), "seed {seed}");
            }
            _ => {}
        }
    });
    chosen
}

#[test]
fn selectors_choose_as_the_kernels_lists_would() {
    let historical = |base_weight, threshold| SelectorArgs::Historical { base_weight, threshold };
    let all = [
        SelectorArgs::QueueLength,
        SelectorArgs::ServiceTime,
        historical(972, 0),
        historical(512, 3),
        historical(0, 0),
        historical(1023, 1),
    ];
    for args in &all {
        for seed in 0..60 {
            // One to nine paths, and the most that a stack can have.
            let count = if seed == 59 { 254 } else { 1 + seed as usize % 9 };
            let chosen = live(args, count, seed);
            let several = chosen.iter().filter(|&&times| times > 0).count() > 1;
            assert!(count == 1 || several, "{args:?}, seed {seed}: {chosen:?}");
        }
    }
}

impl Selector {
    fn exhaust_stamps(&mut self) {
        match self {
            Selector::QueueLength(selector) => selector.exhaust_stamps(),
            Selector::ServiceTime(selector) => selector.exhaust_stamps(),
            _ => {}
        }
    }
}
