//! Path selectors: who of a priority group's usable paths gets the next request.
//!
//! What a table says of a selector and of its paths is [`SelectorArgs`] and [`PathArgs`]; [`Selector`] is what a
//! hardware queue keeps to choose by. Each queue has its own: what is in flight is what this queue has in flight,
//! so choosing writes nothing that another thread reads. The algorithms are the kernel's (drivers/md/dm-ps-*.c).

mod affinity;
mod historical;
mod load;

use crate::target::{TargetError, Words, number};
use affinity::CpuMask;
use block::Bytes;
use historical::Historical;
use load::Load;
use queue::Nanos;

/// `HST_FIXED_95`: 0.95 in ten binary digits.
const BASE_WEIGHT_DEFAULT: u32 = 972;
/// 1 in ten binary digits.
const FIXED_ONE: u32 = 1024;

/// A selector and its own arguments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SelectorArgs {
    /// Each in turn.
    RoundRobin,
    /// The one with the fewest requests in flight.
    QueueLength,
    /// The one that would be done first, by bytes in flight and relative throughput.
    ServiceTime,
    /// The one that would be done first, by how long requests took.
    Historical {
        /// How much the past weighs, of 1024.
        base_weight: u32,
        /// How many times slower a path must be to count as slower.
        threshold: u32,
    },
    /// The one that the CPU was given.
    Affinity,
}

/// What a selector is told of a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PathArgs {
    /// Nothing that still matters: the requests in a row of older kernels, which are always 1.
    Plain,
    /// How much the path carries beside the others, 0 to 100.
    Throughput(u32),
    /// A path of `historical-service-time`, whose argument is not shown again.
    Historical,
    /// The CPUs that it is for.
    Cpus(CpuMask),
}

impl SelectorArgs {
    /// Whether there is a selector of that name.
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

    /// The name in a table.
    pub fn name(&self) -> &'static str {
        match self {
            SelectorArgs::RoundRobin => "round-robin",
            SelectorArgs::QueueLength => "queue-length",
            SelectorArgs::ServiceTime => "service-time",
            SelectorArgs::Historical { .. } => "historical-service-time",
            SelectorArgs::Affinity => "io-affinity",
        }
    }

    /// A selector by name, with the arguments that follow. All but one take any and heed none.
    pub(super) fn parse(name: &str, mut args: Words<'_>) -> Result<SelectorArgs, TargetError> {
        let failed = || TargetError::new("path selector constructor failed");
        let mut selector = SelectorArgs::named(name).ok_or(TargetError::new("unknown path selector type"))?;
        if let SelectorArgs::Historical { base_weight, threshold } = &mut selector {
            if args.len() > 2 {
                return Err(failed());
            }
            if let Some(word) = args.take_next() {
                *base_weight = number(word).filter(|&weight| weight < FIXED_ONE).ok_or_else(failed)?;
            }
            if let Some(word) = args.take_next() {
                *threshold = number(word).ok_or_else(failed)?;
            }
        }
        Ok(selector)
    }

    /// What the selector is told of one path.
    pub(super) fn parse_path(&self, mut args: Words<'_>) -> Result<PathArgs, TargetError> {
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
            SelectorArgs::Affinity => return affinity::parse(args),
        };
        if args.len() > most {
            return Err(TargetError::new(errors[0]));
        }
        if let Some(word) = args.take_next() {
            number(word).ok_or(TargetError::new(errors[1]))?;
        }
        Ok(match self {
            SelectorArgs::ServiceTime => {
                let throughput = match args.take_next() {
                    Some(word) => number(word).filter(|&throughput| throughput <= 100),
                    None => Some(1),
                };
                let error = "service-time ps: invalid relative_throughput value";
                PathArgs::Throughput(throughput.ok_or(TargetError::new(error))?)
            }
            SelectorArgs::Historical { .. } => PathArgs::Historical,
            _ => PathArgs::Plain,
        })
    }

    /// Its own arguments as they are shown, with their count, each followed by a space.
    pub fn table(&self) -> String {
        match self {
            SelectorArgs::Historical { base_weight, threshold } => format!("2 {base_weight} {threshold} "),
            _ => "0 ".to_owned(),
        }
    }

    /// How many words are shown of each path in a table.
    pub fn table_args(&self) -> usize {
        if matches!(self, SelectorArgs::ServiceTime) { 2 } else { 1 }
    }

    /// How many words are shown of each path in a status.
    pub fn info_args(&self) -> usize {
        match self {
            SelectorArgs::RoundRobin => 0,
            SelectorArgs::QueueLength | SelectorArgs::Affinity => 1,
            SelectorArgs::ServiceTime => 2,
            SelectorArgs::Historical { .. } => 3,
        }
    }

    /// What is shown of a path in a status, each word followed by a space. `report`: what all queues together say.
    pub fn info(&self, path: &PathArgs, report: &Report) -> String {
        match (self, path) {
            (SelectorArgs::QueueLength, _) => format!("{} ", report.requests),
            (SelectorArgs::ServiceTime, PathArgs::Throughput(throughput)) => {
                format!("{} {throughput} ", report.bytes)
            }
            (SelectorArgs::Historical { .. }, _) => {
                format!("{} {} {} ", report.service_time, report.requests, report.stale_after)
            }
            (SelectorArgs::Affinity, _) => format!("{} ", report.misses),
            _ => String::new(),
        }
    }
}

impl PathArgs {
    /// As they are shown in a table, each followed by a space.
    pub fn table(&self) -> String {
        match self {
            PathArgs::Plain => "1 ".to_owned(),
            PathArgs::Throughput(throughput) => format!("1 {throughput} "),
            PathArgs::Historical => "0 ".to_owned(),
            PathArgs::Cpus(mask) => format!("{mask} "),
        }
    }
}

/// What selectors know of a path, for a status.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Requests in flight.
    pub requests: u64,
    /// Bytes in flight.
    pub bytes: u64,
    /// How long requests take, in nanoseconds with ten binary digits behind the point.
    pub service_time: u64,
    /// Until when that is believed, in nanoseconds.
    pub stale_after: u64,
    /// How often a CPU was given no path.
    pub misses: u64,
}

/// How one hardware queue chooses among the paths of one group. Paths are numbered within the group.
#[derive(Debug)]
pub(super) struct Selector {
    kind: Kind,
    /// The usable ones; those chosen longest ago come first.
    usable: Vec<u16>,
}

#[derive(Debug)]
enum Kind {
    RoundRobin,
    QueueLength(Box<[Load]>),
    ServiceTime(Box<[Load]>),
    Historical(Box<Historical>),
    /// Which path this queue's CPU was given, and how often it had none.
    Affinity {
        own: Option<u16>,
        misses: u64,
    },
}

impl Selector {
    /// For a queue that is served by CPU `cpu`. No path is usable yet.
    pub(super) fn new(args: &SelectorArgs, paths: &[PathArgs], cpu: usize) -> Selector {
        let kind = match args {
            SelectorArgs::RoundRobin => Kind::RoundRobin,
            SelectorArgs::QueueLength => Kind::QueueLength(load::of(paths)),
            SelectorArgs::ServiceTime => Kind::ServiceTime(load::of(paths)),
            SelectorArgs::Historical { base_weight, threshold } => {
                Kind::Historical(Box::new(Historical::new(*base_weight, *threshold, paths.len())))
            }
            SelectorArgs::Affinity => Kind::Affinity { own: affinity::owner(paths, cpu), misses: 0 },
        };
        Selector { kind, usable: Vec::with_capacity(paths.len()) }
    }

    /// Some paths have failed or come back. Those that stay keep their order; those that come back go last.
    pub(super) fn set_usable(&mut self, is_usable: impl Fn(u16) -> bool, count: u16) {
        self.usable.retain(|&path| is_usable(path));
        for path in 0..count {
            if is_usable(path) && !self.usable.contains(&path) {
                self.usable.push(path);
            }
        }
        if let Kind::Historical(historical) = &mut self.kind {
            historical.set_usable_count(self.usable.len());
        }
    }

    /// Whether there is a path to choose.
    pub(super) fn has_usable(&self) -> bool {
        !self.usable.is_empty()
    }

    /// The paths that requests take in turn, whatever is in flight: whoever sends them can do without asking. None: the
    /// selector is to be asked for each request.
    pub(super) fn turns(&self) -> &[u16] {
        match &self.kind {
            Kind::RoundRobin => &self.usable,
            // Its own alone. Going without one is counted each time.
            Kind::Affinity { own: Some(own), .. } => {
                let place = self.usable.iter().position(|path| path == own);
                // Any is better than none; which it is stays the same as long as it lasts.
                place.map_or(&self.usable[..self.usable.len().min(1)], |place| &self.usable[place..=place])
            }
            _ => &[],
        }
    }

    /// The path for a request of that length.
    #[inline]
    pub(super) fn choose(&mut self, len: Bytes, now: Nanos) -> Option<u16> {
        let place = match &mut self.kind {
            Kind::RoundRobin => 0,
            Kind::QueueLength(loads) => load::shortest(loads, &self.usable)?,
            Kind::ServiceTime(loads) => load::soonest(loads, &self.usable, len.0)?,
            Kind::Historical(historical) => historical.best(&self.usable, now)?,
            Kind::Affinity { own, misses } => {
                *misses += u64::from(own.is_none());
                let own = own.filter(|own| self.usable.contains(own));
                return own.or(self.usable.first().copied());
            }
        };
        self.usable.get(place)?;
        let path = self.usable[place];
        // It goes last. A rotation in general would take longer than the rest of this.
        for place in place + 1..self.usable.len() {
            self.usable[place - 1] = self.usable[place];
        }
        *self.usable.last_mut()? = path;
        Some(path)
    }

    /// A request goes down a path.
    #[inline]
    pub(super) fn start(&mut self, path: u16, len: Bytes) {
        match &mut self.kind {
            Kind::QueueLength(loads) | Kind::ServiceTime(loads) => loads[usize::from(path)].start(len.0),
            Kind::Historical(historical) => historical.start(path),
            Kind::RoundRobin | Kind::Affinity { .. } => {}
        }
    }

    /// It has come back, however it ended. It had gone down at `started`.
    #[inline]
    pub(super) fn end(&mut self, path: u16, len: Bytes, started: Nanos, now: Nanos) {
        match &mut self.kind {
            Kind::QueueLength(loads) | Kind::ServiceTime(loads) => loads[usize::from(path)].end(len.0),
            Kind::Historical(historical) => historical.end(path, started, now),
            Kind::RoundRobin | Kind::Affinity { .. } => {}
        }
    }

    /// What this queue knows of a path.
    pub(super) fn report(&self, path: u16) -> Report {
        match &self.kind {
            Kind::RoundRobin => Report::default(),
            Kind::QueueLength(loads) | Kind::ServiceTime(loads) => loads[usize::from(path)].report(),
            Kind::Historical(historical) => historical.report(path),
            Kind::Affinity { misses, .. } => Report { misses: *misses, ..Report::default() },
        }
    }

    /// Whether it goes by what is in flight, and is to be told of each request that ends.
    pub(super) fn counts(&self) -> bool {
        !matches!(self.kind, Kind::RoundRobin | Kind::Affinity { .. })
    }

    /// Whether [`report`](Selector::report) says anything.
    pub(super) fn reports(&self) -> bool {
        !matches!(self.kind, Kind::RoundRobin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Nanos = Nanos(1);

    fn selector(args: SelectorArgs, paths: &[PathArgs]) -> Selector {
        let mut selector = Selector::new(&args, paths, 0);
        selector.set_usable(|_| true, paths.len() as u16);
        selector
    }

    /// What becomes of so many requests where paths are taken in turn.
    fn in_turn(selector: &Selector, count: usize) -> Vec<u16> {
        selector.turns().iter().copied().cycle().take(count).collect()
    }

    fn next(selector: &mut Selector, len: u64) -> u16 {
        let path = selector.choose(Bytes(len), NOW).unwrap();
        selector.start(path, Bytes(len));
        path
    }

    #[test]
    fn round_robin_takes_each_in_turn_and_leaves_out_what_failed() {
        let mut selector =
            selector(SelectorArgs::RoundRobin, &[PathArgs::Plain, PathArgs::Plain, PathArgs::Plain]);
        assert_eq!(in_turn(&selector, 6), [0, 1, 2, 0, 1, 2]);
        assert_eq!((0..6).map(|_| next(&mut selector, 1)).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
        selector.set_usable(|path| path != 1, 3);
        assert_eq!(in_turn(&selector, 4), [0, 2, 0, 2]);
        selector.set_usable(|_| false, 3);
        assert!(selector.turns().is_empty() && selector.choose(Bytes(1), NOW).is_none());
    }

    #[test]
    fn queue_length_takes_the_path_with_least_in_flight() {
        let mut selector = selector(SelectorArgs::QueueLength, &[PathArgs::Plain, PathArgs::Plain]);
        assert_eq!((0..4).map(|_| next(&mut selector, 512)).collect::<Vec<_>>(), [0, 1, 0, 1]);
        selector.end(1, Bytes(512), NOW, NOW);
        assert_eq!(next(&mut selector, 512), 1);
        assert_eq!(selector.report(0).requests, 2);
    }

    #[test]
    fn service_time_goes_by_bytes_and_throughput() {
        let paths = [PathArgs::Throughput(1), PathArgs::Throughput(3)];
        let mut selector = selector(SelectorArgs::ServiceTime, &paths);
        // Nothing is in flight: the faster one. Then three times as much on that one.
        let order: Vec<_> = (0..8).map(|_| next(&mut selector, 4096)).collect();
        assert_eq!(order.iter().filter(|&&path| path == 1).count(), 6, "{order:?}");
        assert_eq!(selector.report(1).bytes, 6 * 4096);
    }

    #[test]
    fn a_path_of_no_throughput_is_the_last_resort() {
        let paths = [PathArgs::Throughput(0), PathArgs::Throughput(1)];
        let mut selector = selector(SelectorArgs::ServiceTime, &paths);
        assert!((0..4).all(|_| next(&mut selector, 4096) == 1));
        selector.set_usable(|path| path == 0, 2);
        assert_eq!(next(&mut selector, 4096), 0);
    }

    #[test]
    fn a_cpu_keeps_to_its_path_and_borrows_when_that_fails() {
        let mask = |text: &str| PathArgs::Cpus(text.parse().unwrap());
        let paths = [mask("2"), mask("1")];
        let mut own = selector(SelectorArgs::Affinity, &paths);
        assert_eq!((in_turn(&own, 2), own.report(0).misses), (vec![1, 1], 0));
        own.set_usable(|path| path == 0, 2);
        assert_eq!((in_turn(&own, 2), own.report(0).misses), (vec![0, 0], 0));
        own.set_usable(|_| false, 2);
        assert!(own.turns().is_empty() && own.choose(Bytes(1), NOW).is_none());
        let mut stranger = Selector::new(&SelectorArgs::Affinity, &paths, 7);
        stranger.set_usable(|_| true, 2);
        assert_eq!((next(&mut stranger, 1), stranger.report(0).misses), (0, 1));
    }
}
