//! Path selectors: choose a path of a priority group for each request.
//!
//! [`SelectorArgs`] and [`PathArgs`] are the arguments of a selector and its paths in a table line;
//! [`Selector`] is the state of one hardware queue. Each queue has its own and counts only its own requests
//! in flight, so choosing a path writes nothing that another thread reads. The algorithms are the kernel's
//! (drivers/md/dm-ps-*.c); `model.rs` tests that they choose as the kernel's lists do.

mod historical_service_time;
mod io_affinity;
#[cfg(test)]
mod model;
mod queue_length;
mod service_time;

use crate::dm::{Args, TargetError, parse_u32};
use block::Bytes;
use historical_service_time::HistoricalServiceTime;
use io_affinity::CpuMask;
use queue::Nanos;
use queue_length::QueueLength;
use service_time::ServiceTime;

/// Upper bound of the number of paths: the nodes of a stack have numbers of eight bits.
pub(super) const PATHS_MAX: usize = 1 << u8::BITS;

/// Renumbers the stamps of paths from 0 and keeps their order. The bits `stamps` of each path's key hold its
/// stamp, in units of `stamp`. Returns the next stamp.
#[cold]
fn renumber<'a>(numbers: impl Iterator<Item = &'a mut u64>, stamp: u64, stamps: u64) -> u64 {
    let mut order: Vec<&mut u64> = numbers.collect();
    order.sort_unstable_by_key(|number| **number & stamps);
    let mut next = 0;
    for number in order {
        *number = (*number & !stamps) + next;
        next += stamp;
    }
    next
}

/// `HST_FIXED_95`: 0.95 with ten fractional bits.
const BASE_WEIGHT_DEFAULT: u32 = 972;
/// 1.0 with ten fractional bits.
const FIXED_ONE: u32 = 1024;

/// A path selector with its arguments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SelectorArgs {
    /// Each usable path in turn.
    RoundRobin,
    /// The path with the fewest requests in flight.
    QueueLength,
    /// The path that would complete a request first, by bytes in flight and relative throughput.
    ServiceTime,
    /// The path that would complete a request first, by historical service times.
    Historical {
        /// Weight of the past, out of 1024.
        base_weight: u32,
        /// Service times within this factor count as equal.
        threshold: u32,
    },
    /// The path assigned to the CPU.
    Affinity,
}

/// A selector's arguments for one path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PathArgs {
    /// No argument with an effect: at most the repeat count of older kernels, which is always 1.
    Plain,
    /// Relative throughput, 0 to 100.
    Throughput(u32),
    /// A path of `historical-service-time`, whose argument is not shown again.
    Historical,
    /// The CPUs that the path is assigned to.
    Cpus(CpuMask),
}

impl SelectorArgs {
    /// Returns whether a selector of that name exists.
    pub fn is_known(name: &str) -> bool {
        SelectorArgs::named(name).is_some()
    }

    fn named(name: &str) -> Option<SelectorArgs> {
        Some(match name {
            "round-robin" => SelectorArgs::RoundRobin,
            "queue-length" => SelectorArgs::QueueLength,
            "service-time" => SelectorArgs::ServiceTime,
            "historical-service-time" => {
                SelectorArgs::Historical { base_weight: BASE_WEIGHT_DEFAULT, threshold: 0 }
            }
            "io-affinity" => SelectorArgs::Affinity,
            _ => return None,
        })
    }

    /// Returns the name in a table.
    pub fn name(&self) -> &'static str {
        match self {
            SelectorArgs::RoundRobin => "round-robin",
            SelectorArgs::QueueLength => "queue-length",
            SelectorArgs::ServiceTime => "service-time",
            SelectorArgs::Historical { .. } => "historical-service-time",
            SelectorArgs::Affinity => "io-affinity",
        }
    }

    /// Parses a selector's arguments. As in the kernel, only `historical-service-time` uses any.
    pub(super) fn parse(name: &str, mut args: Args<'_>) -> Result<SelectorArgs, TargetError> {
        let failed = || TargetError::new("path selector constructor failed");
        let mut selector = SelectorArgs::named(name).ok_or(TargetError::new("unknown path selector type"))?;
        if let SelectorArgs::Historical { base_weight, threshold } = &mut selector {
            if args.len() > 2 {
                return Err(failed());
            }
            if let Some(word) = args.take_next() {
                *base_weight = parse_u32(word).filter(|&weight| weight < FIXED_ONE).ok_or_else(failed)?;
            }
            if let Some(word) = args.take_next() {
                *threshold = parse_u32(word).ok_or_else(failed)?;
            }
        }
        Ok(selector)
    }

    /// Parses the selector's arguments for one path.
    pub(super) fn parse_path(&self, mut args: Args<'_>) -> Result<PathArgs, TargetError> {
        let (most, errors) = match self {
            SelectorArgs::RoundRobin => {
                (1, ["round-robin ps: incorrect number of arguments", "round-robin ps: invalid repeat count"])
            }
            SelectorArgs::QueueLength => (
                1,
                ["queue-length ps: incorrect number of arguments", "queue-length ps: invalid repeat count"],
            ),
            SelectorArgs::ServiceTime => (
                2,
                ["service-time ps: incorrect number of arguments", "service-time ps: invalid repeat count"],
            ),
            SelectorArgs::Historical { .. } => (
                1,
                [
                    "historical-service-time ps: incorrect number of arguments",
                    "historical-service-time ps: invalid repeat count",
                ],
            ),
            SelectorArgs::Affinity => return io_affinity::parse(args),
        };
        if args.len() > most {
            return Err(TargetError::new(errors[0]));
        }
        if let Some(word) = args.take_next() {
            parse_u32(word).ok_or(TargetError::new(errors[1]))?;
        }
        Ok(match self {
            SelectorArgs::ServiceTime => {
                let throughput = match args.take_next() {
                    Some(word) => parse_u32(word).filter(|&throughput| throughput <= 100),
                    None => Some(1),
                };
                let error = "service-time ps: invalid relative_throughput value";
                PathArgs::Throughput(throughput.ok_or(TargetError::new(error))?)
            }
            SelectorArgs::Historical { .. } => PathArgs::Historical,
            _ => PathArgs::Plain,
        })
    }

    /// Formats the selector's arguments with their count, each followed by a space.
    pub fn table(&self) -> String {
        match self {
            SelectorArgs::Historical { base_weight, threshold } => format!("2 {base_weight} {threshold} "),
            _ => "0 ".to_owned(),
        }
    }

    /// Returns how many arguments a table shows for each path.
    pub fn table_args(&self) -> usize {
        if matches!(self, SelectorArgs::ServiceTime) { 2 } else { 1 }
    }

    /// Returns how many values a status shows for each path.
    pub fn info_args(&self) -> usize {
        match self {
            SelectorArgs::RoundRobin => 0,
            SelectorArgs::QueueLength | SelectorArgs::Affinity => 1,
            SelectorArgs::ServiceTime => 2,
            SelectorArgs::Historical { .. } => 3,
        }
    }

    /// Formats the status values of a path, each followed by a space. `report` combines all queues.
    pub fn info(&self, path: &PathArgs, report: &Report) -> String {
        match (self, path) {
            (SelectorArgs::QueueLength, _) => format!("{} ", report.requests),
            (SelectorArgs::ServiceTime, PathArgs::Throughput(throughput)) => {
                format!("{} {throughput} ", report.bytes)
            }
            (SelectorArgs::Historical { .. }, _) => {
                // 0: no queue has published a service time, so the initial value is shown.
                let service_time = match report.service_time {
                    0 => historical_service_time::FIXED_ONE,
                    time => time,
                };
                format!("{service_time} {} {} ", report.requests, report.stale_after)
            }
            (SelectorArgs::Affinity, _) => format!("{} ", report.misses),
            _ => String::new(),
        }
    }
}

impl PathArgs {
    /// Formats the arguments, each followed by a space.
    pub fn table(&self) -> String {
        match self {
            PathArgs::Plain => "1 ".to_owned(),
            PathArgs::Throughput(throughput) => format!("1 {throughput} "),
            PathArgs::Historical => "0 ".to_owned(),
            PathArgs::Cpus(mask) => format!("{mask} "),
        }
    }
}

/// A selector's counts for one path, for a status.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Requests in flight.
    pub requests: u64,
    /// Bytes in flight.
    pub bytes: u64,
    /// Average service time in nanoseconds, with ten fractional bits.
    pub service_time: u64,
    /// The time at which that average becomes stale, in nanoseconds.
    pub stale_after: u64,
    /// Number of requests whose CPU had no path.
    pub misses: u64,
}

/// The state with which one hardware queue chooses among the paths of one group. Paths are numbered within
/// the group.
#[derive(Debug)]
#[repr(u8)]
pub(super) enum Selector {
    RoundRobin(RoundRobin),
    /// The path of this queue's CPU, and the number of requests for which that CPU had none.
    Affinity {
        round_robin: RoundRobin,
        own: Option<u8>,
        misses: u64,
    },
    QueueLength(QueueLength),
    ServiceTime(ServiceTime),
    Historical(Box<HistoricalServiceTime>),
}

/// The usable paths of a group without counters, least recently chosen first.
#[derive(Default, Debug)]
pub(super) struct RoundRobin {
    usable: Vec<u8>,
    count: u8,
}

impl RoundRobin {
    fn new(count: u8) -> RoundRobin {
        RoundRobin { usable: Vec::with_capacity(count.into()), count }
    }

    fn set_usable(&mut self, is_usable: impl Fn(u8) -> bool) {
        self.usable.retain(|&path| is_usable(path));
        for path in 0..self.count {
            if is_usable(path) && !self.usable.contains(&path) {
                self.usable.push(path);
            }
        }
    }

    fn take(&mut self) -> Option<u8> {
        let first = *self.usable.first()?;
        self.usable.rotate_left(1);
        Some(first)
    }
}

impl Selector {
    /// Creates a selector for the queue of CPU `cpu`. No path is usable yet.
    pub(super) fn new(args: &SelectorArgs, paths: &[PathArgs], cpu: usize) -> Selector {
        // A stack with more paths is rejected before it gets here.
        let paths = &paths[..paths.len().min(PATHS_MAX - 1)];
        let count = paths.len() as u8;
        match args {
            SelectorArgs::RoundRobin => Selector::RoundRobin(RoundRobin::new(count)),
            SelectorArgs::Affinity => {
                let own = io_affinity::owner(paths, cpu);
                Selector::Affinity { round_robin: RoundRobin::new(count), own, misses: 0 }
            }
            SelectorArgs::QueueLength => Selector::QueueLength(QueueLength::new(count)),
            SelectorArgs::ServiceTime => Selector::ServiceTime(ServiceTime::new(paths)),
            SelectorArgs::Historical { base_weight, threshold } => {
                Selector::Historical(Box::new(HistoricalServiceTime::new(*base_weight, *threshold, count)))
            }
        }
    }

    /// Returns a selector without paths.
    pub(super) fn empty() -> Selector {
        Selector::RoundRobin(RoundRobin::default())
    }

    /// Sets which paths are usable. Paths that stay usable keep their order; newly usable ones are chosen
    /// last.
    pub(super) fn set_usable(&mut self, is_usable: impl Fn(u8) -> bool) {
        match self {
            Selector::RoundRobin(round_robin) | Selector::Affinity { round_robin, .. } => {
                round_robin.set_usable(is_usable)
            }
            Selector::QueueLength(selector) => selector.set_usable(is_usable),
            Selector::ServiceTime(selector) => selector.set_usable(is_usable),
            Selector::Historical(selector) => selector.set_usable(is_usable),
        }
    }

    /// Returns whether any path is usable.
    pub(super) fn has_usable(&self) -> bool {
        match self {
            Selector::RoundRobin(round_robin) | Selector::Affinity { round_robin, .. } => {
                !round_robin.usable.is_empty()
            }
            Selector::QueueLength(selector) => selector.has_usable(),
            Selector::ServiceTime(selector) => selector.has_usable(),
            Selector::Historical(selector) => selector.has_usable(),
        }
    }

    /// Returns the paths that requests take in turn regardless of what is in flight; the caller cycles
    /// through them itself. Empty: the selector has to be asked for each request.
    pub(super) fn cycle(&self) -> &[u8] {
        match self {
            Selector::RoundRobin(round_robin) => &round_robin.usable,
            // The cycle is the CPU's own path. A CPU without one has no cycle, so that each request is
            // counted.
            Selector::Affinity { round_robin: RoundRobin { usable, .. }, own: Some(own), .. } => {
                let place = usable.iter().position(|path| path == own);
                // If the CPU's path is not usable, the first usable path is taken.
                place.map_or(&usable[..usable.len().min(1)], |place| &usable[place..=place])
            }
            _ => &[],
        }
    }

    /// Chooses the path for a request of `len` bytes, and counts the request as in flight there. Called only
    /// while a path is usable.
    pub(super) fn take(&mut self, len: Bytes, now: Nanos) -> Option<u8> {
        self.take_small(len).or_else(|| self.take_in_general(len, now))
    }

    /// [`take`](Selector::take) for the usual cases, which need neither a call nor a loop: at most four
    /// paths, of equal throughput for `service-time`, and nothing in flight for `historical-service-time`.
    /// `None`: any other case.
    #[inline(always)]
    pub(super) fn take_small(&mut self, len: Bytes) -> Option<u8> {
        match self {
            Selector::QueueLength(selector) => selector.take_small(),
            Selector::ServiceTime(selector) => selector.take_small(len.0),
            Selector::Historical(selector) => selector.take_idle(),
            Selector::RoundRobin(_) | Selector::Affinity { .. } => None,
        }
    }

    fn take_in_general(&mut self, len: Bytes, now: Nanos) -> Option<u8> {
        match self {
            Selector::QueueLength(selector) => Some(selector.take_of_many()),
            Selector::ServiceTime(selector) => Some(selector.take_in_general(len.0)),
            Selector::Historical(selector) => Some(selector.take_from_list(now)),
            Selector::RoundRobin(round_robin) => round_robin.take(),
            Selector::Affinity { round_robin, own, misses } => {
                *misses += u64::from(own.is_none());
                let own = own.filter(|own| round_robin.usable.contains(own));
                own.or(round_robin.usable.first().copied())
            }
        }
    }

    /// Counts a request of `len` bytes as no longer in flight on `path`, whatever its status. It was sent
    /// there `sent_ns` before `now`.
    pub(super) fn end(&mut self, path: u8, len: Bytes, sent_ns: u64, now: Nanos) {
        match self {
            Selector::QueueLength(selector) => selector.end(path),
            Selector::ServiceTime(selector) => selector.end(path, len.0),
            Selector::Historical(selector) => selector.end(path, sent_ns, now),
            Selector::RoundRobin(_) | Selector::Affinity { .. } => {}
        }
    }

    /// Passes this queue's counts of the first `count` paths to `show`, if the selector has counts.
    #[inline]
    pub(super) fn each_report(&self, count: u8, show: impl Fn(u8, Report)) {
        let paths = 0..count;
        match self {
            Selector::RoundRobin(_) => {}
            Selector::Affinity { misses, .. } => {
                paths.for_each(|path| show(path, Report { misses: *misses, ..Report::default() }));
            }
            Selector::QueueLength(selector) => paths.for_each(|path| show(path, selector.report(path))),
            Selector::ServiceTime(selector) => paths.for_each(|path| show(path, selector.report(path))),
            Selector::Historical(selector) => paths.for_each(|path| show(path, selector.report(path))),
        }
    }

    /// Renumbers stamps if needed; called between two iterations of the queue.
    #[inline]
    pub(super) fn renumber_stamps(&mut self) {
        match self {
            Selector::QueueLength(selector) => selector.renumber_stamps(),
            Selector::ServiceTime(selector) => selector.renumber_stamps(),
            _ => {}
        }
    }

    /// Returns whether the selector counts requests in flight, and needs `end` for each request.
    pub(super) fn counts(&self) -> bool {
        !matches!(self, Selector::RoundRobin(_) | Selector::Affinity { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Nanos = Nanos(1);

    fn selector(args: SelectorArgs, paths: &[PathArgs]) -> Selector {
        let mut selector = Selector::new(&args, paths, 0);
        selector.set_usable(|_| true);
        selector
    }

    /// Returns the paths of `count` requests in a round-robin cycle.
    fn in_turn(selector: &Selector, count: usize) -> Vec<u8> {
        selector.cycle().iter().copied().cycle().take(count).collect()
    }

    fn report(selector: &Selector, path: u8) -> Report {
        let found = std::cell::Cell::new(Report::default());
        selector.each_report(path + 1, |_, report| found.set(report));
        found.get()
    }

    fn next(selector: &mut Selector, len: u64) -> u8 {
        selector.take(Bytes(len), NOW).unwrap()
    }

    #[test]
    fn round_robin_skips_failed_paths() {
        let mut selector =
            selector(SelectorArgs::RoundRobin, &[PathArgs::Plain, PathArgs::Plain, PathArgs::Plain]);
        assert_eq!(in_turn(&selector, 6), [0, 1, 2, 0, 1, 2]);
        assert_eq!((0..6).map(|_| next(&mut selector, 1)).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
        selector.set_usable(|path| path != 1);
        assert_eq!(in_turn(&selector, 4), [0, 2, 0, 2]);
        selector.set_usable(|_| false);
        assert!(selector.cycle().is_empty() && selector.take(Bytes(1), NOW).is_none());
    }

    #[test]
    fn a_path_without_measurements_shows_the_initial_service_time() {
        let historical = SelectorArgs::Historical { base_weight: 972, threshold: 0 };
        assert_eq!(historical.info(&PathArgs::Historical, &Report::default()), "1024 0 0 ");
    }

    #[test]
    fn queue_length_takes_the_path_with_least_in_flight() {
        let mut selector = selector(SelectorArgs::QueueLength, &[PathArgs::Plain, PathArgs::Plain]);
        assert_eq!((0..4).map(|_| next(&mut selector, 512)).collect::<Vec<_>>(), [0, 1, 0, 1]);
        selector.end(1, Bytes(512), 0, NOW);
        assert_eq!(next(&mut selector, 512), 1);
        assert_eq!(report(&selector, 0).requests, 2);
    }

    #[test]
    fn service_time_chooses_by_bytes_and_throughput() {
        let paths = [PathArgs::Throughput(1), PathArgs::Throughput(3)];
        let mut selector = selector(SelectorArgs::ServiceTime, &paths);
        // While nothing is in flight the faster path is chosen, then it gets three times as many requests.
        let order: Vec<_> = (0..8).map(|_| next(&mut selector, 4096)).collect();
        assert_eq!(order.iter().filter(|&&path| path == 1).count(), 6, "{order:?}");
        assert_eq!(report(&selector, 1).bytes, 6 * 4096);
    }

    #[test]
    fn a_path_with_zero_throughput_is_the_last_resort() {
        let paths = [PathArgs::Throughput(0), PathArgs::Throughput(1)];
        let mut selector = selector(SelectorArgs::ServiceTime, &paths);
        assert!((0..4).all(|_| next(&mut selector, 4096) == 1));
        selector.set_usable(|path| path == 0);
        assert_eq!(next(&mut selector, 4096), 0);
    }

    #[test]
    fn a_cpu_uses_its_path_and_another_if_that_fails() {
        let mask = |text: &str| PathArgs::Cpus(text.parse().unwrap());
        let paths = [mask("2"), mask("1")];
        let mut own = selector(SelectorArgs::Affinity, &paths);
        assert_eq!((in_turn(&own, 2), report(&own, 0).misses), (vec![1, 1], 0));
        own.set_usable(|path| path == 0);
        assert_eq!((in_turn(&own, 2), report(&own, 0).misses), (vec![0, 0], 0));
        own.set_usable(|_| false);
        assert!(own.cycle().is_empty() && own.take(Bytes(1), NOW).is_none());
        let mut stranger = Selector::new(&SelectorArgs::Affinity, &paths, 7);
        stranger.set_usable(|_| true);
        assert_eq!((next(&mut stranger, 1), report(&stranger, 0).misses), (0, 1));
    }
}
