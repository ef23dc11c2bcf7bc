//! Path selectors: who of a priority group's usable paths gets the next request.
//!
//! What a table says of a selector and of its paths is [`SelectorArgs`] and [`PathArgs`]; [`Selector`] is what a
//! hardware queue keeps to choose by. Each queue has its own: what is in flight is what this queue has in flight,
//! so choosing writes nothing that another thread reads. The algorithms are the kernel's (drivers/md/dm-ps-*.c); that
//! they choose as the kernel's lists would is held by `model.rs`.

mod affinity;
mod fewest;
mod historical;
#[cfg(test)]
mod model;
mod soonest;

use crate::dm::{TargetError, Words, number};
use affinity::CpuMask;
use block::Bytes;
use fewest::Fewest;
use historical::Historical;
use queue::Nanos;
use soonest::Soonest;

/// More paths than a stack can have, whose nodes have numbers of eight bits.
pub(super) const PATHS_MAX: usize = 1 << u8::BITS;

/// Counts the turns in which paths were chosen from the beginning again, in the order that they have. What they are counted
/// in lies in the bits `turns` of a number for each path, and `turn` is one of it. What the next turn is.
#[cold]
fn count_turns_anew<'a>(numbers: impl Iterator<Item = &'a mut u64>, turn: u64, turns: u64) -> u64 {
    let mut order: Vec<&mut u64> = numbers.collect();
    order.sort_unstable_by_key(|number| **number & turns);
    let mut next = 0;
    for number in order {
        *number = (*number & !turns) + next;
        next += turn;
    }
    next
}

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
                // A path of which no queue has told anything is taken to be as each one begins.
                let service_time = match report.service_time {
                    0 => historical::FIXED_ONE,
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
#[repr(u8)]
pub(super) enum Selector {
    RoundRobin(Turns),
    /// Which path this queue's CPU was given, and how often it had none.
    Affinity {
        turns: Turns,
        own: Option<u8>,
        misses: u64,
    },
    QueueLength(Fewest),
    ServiceTime(Soonest),
    Historical(Box<Historical>),
}

/// The usable paths of a group where nothing is counted; those chosen longest ago come first.
#[derive(Default, Debug)]
pub(super) struct Turns {
    usable: Vec<u8>,
    count: u8,
}

impl Turns {
    fn new(count: u8) -> Turns {
        Turns { usable: Vec::with_capacity(count.into()), count }
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
    /// For a queue that is served by CPU `cpu`. No path is usable yet.
    pub(super) fn new(args: &SelectorArgs, paths: &[PathArgs], cpu: usize) -> Selector {
        // More do not fit a stack, which is refused for it before anything asks here.
        let paths = &paths[..paths.len().min(PATHS_MAX - 1)];
        let count = paths.len() as u8;
        match args {
            SelectorArgs::RoundRobin => Selector::RoundRobin(Turns::new(count)),
            SelectorArgs::Affinity => {
                let own = affinity::owner(paths, cpu);
                Selector::Affinity { turns: Turns::new(count), own, misses: 0 }
            }
            SelectorArgs::QueueLength => Selector::QueueLength(Fewest::new(count)),
            SelectorArgs::ServiceTime => Selector::ServiceTime(Soonest::new(paths)),
            SelectorArgs::Historical { base_weight, threshold } => {
                Selector::Historical(Box::new(Historical::new(*base_weight, *threshold, count)))
            }
        }
    }

    /// Of a group without paths.
    pub(super) fn nobody() -> Selector {
        Selector::RoundRobin(Turns::default())
    }

    /// Some paths have failed or come back. Those that stay keep their order; those that come back go last.
    pub(super) fn set_usable(&mut self, is_usable: impl Fn(u8) -> bool) {
        match self {
            Selector::RoundRobin(turns) | Selector::Affinity { turns, .. } => turns.set_usable(is_usable),
            Selector::QueueLength(fewest) => fewest.set_usable(is_usable),
            Selector::ServiceTime(soonest) => soonest.set_usable(is_usable),
            Selector::Historical(historical) => historical.set_usable(is_usable),
        }
    }

    /// Whether there is a path to choose.
    pub(super) fn has_usable(&self) -> bool {
        match self {
            Selector::RoundRobin(turns) | Selector::Affinity { turns, .. } => !turns.usable.is_empty(),
            Selector::QueueLength(fewest) => fewest.has_usable(),
            Selector::ServiceTime(soonest) => soonest.has_usable(),
            Selector::Historical(historical) => historical.has_usable(),
        }
    }

    /// The paths that requests take in turn, whatever is in flight: whoever sends them can do without asking. None: the
    /// selector is to be asked for each request.
    pub(super) fn turns(&self) -> &[u8] {
        match self {
            Selector::RoundRobin(turns) => &turns.usable,
            // Its own alone. Going without one is counted each time.
            Selector::Affinity { turns: Turns { usable, .. }, own: Some(own), .. } => {
                let place = usable.iter().position(|path| path == own);
                // Any is better than none; which it is stays the same as long as it lasts.
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
            Selector::QueueLength(fewest) => fewest.take_small(),
            Selector::ServiceTime(soonest) => soonest.take_small(len.0),
            Selector::Historical(historical) => historical.take_idle(),
            Selector::RoundRobin(_) | Selector::Affinity { .. } => None,
        }
    }

    fn take_in_general(&mut self, len: Bytes, now: Nanos) -> Option<u8> {
        match self {
            Selector::QueueLength(fewest) => Some(fewest.take_of_many()),
            Selector::ServiceTime(soonest) => Some(soonest.take_in_general(len.0)),
            Selector::Historical(historical) => Some(historical.take_from_list(now)),
            Selector::RoundRobin(turns) => turns.take(),
            Selector::Affinity { turns, own, misses } => {
                *misses += u64::from(own.is_none());
                let own = own.filter(|own| turns.usable.contains(own));
                own.or(turns.usable.first().copied())
            }
        }
    }

    /// Counts a request of `len` bytes as no longer in flight on `path`, whatever its status. It was sent
    /// there `went_ns` before `now`.
    pub(super) fn end(&mut self, path: u8, len: Bytes, went_ns: u64, now: Nanos) {
        match self {
            Selector::QueueLength(fewest) => fewest.end(path),
            Selector::ServiceTime(soonest) => soonest.end(path, len.0),
            Selector::Historical(historical) => historical.end(path, went_ns, now),
            Selector::RoundRobin(_) | Selector::Affinity { .. } => {}
        }
    }

    /// What this queue knows of each of the first `count` paths, where it knows anything.
    #[inline]
    pub(super) fn each_report(&self, count: u8, show: impl Fn(u8, Report)) {
        let paths = 0..count;
        match self {
            Selector::RoundRobin(_) => {}
            Selector::Affinity { misses, .. } => {
                paths.for_each(|path| show(path, Report { misses: *misses, ..Report::default() }));
            }
            Selector::QueueLength(fewest) => paths.for_each(|path| show(path, fewest.report(path))),
            Selector::ServiceTime(soonest) => paths.for_each(|path| show(path, soonest.report(path))),
            Selector::Historical(historical) => paths.for_each(|path| show(path, historical.report(path))),
        }
    }

    /// Between two turns of the queue.
    #[inline]
    pub(super) fn look_after_turns(&mut self) {
        match self {
            Selector::QueueLength(fewest) => fewest.look_after_turns(),
            Selector::ServiceTime(soonest) => soonest.look_after_turns(),
            _ => {}
        }
    }

    /// Whether it goes by what is in flight, and is to be told of each request that ends.
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

    /// What becomes of so many requests where paths are taken in turn.
    fn in_turn(selector: &Selector, count: usize) -> Vec<u8> {
        selector.turns().iter().copied().cycle().take(count).collect()
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
    fn round_robin_takes_each_in_turn_and_leaves_out_what_failed() {
        let mut selector =
            selector(SelectorArgs::RoundRobin, &[PathArgs::Plain, PathArgs::Plain, PathArgs::Plain]);
        assert_eq!(in_turn(&selector, 6), [0, 1, 2, 0, 1, 2]);
        assert_eq!((0..6).map(|_| next(&mut selector, 1)).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
        selector.set_usable(|path| path != 1);
        assert_eq!(in_turn(&selector, 4), [0, 2, 0, 2]);
        selector.set_usable(|_| false);
        assert!(selector.turns().is_empty() && selector.take(Bytes(1), NOW).is_none());
    }

    #[test]
    fn a_path_of_which_nobody_has_told_is_shown_as_it_begins() {
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
    fn service_time_goes_by_bytes_and_throughput() {
        let paths = [PathArgs::Throughput(1), PathArgs::Throughput(3)];
        let mut selector = selector(SelectorArgs::ServiceTime, &paths);
        // Nothing is in flight: the faster one. Then three times as much on that one.
        let order: Vec<_> = (0..8).map(|_| next(&mut selector, 4096)).collect();
        assert_eq!(order.iter().filter(|&&path| path == 1).count(), 6, "{order:?}");
        assert_eq!(report(&selector, 1).bytes, 6 * 4096);
    }

    #[test]
    fn a_path_of_no_throughput_is_the_last_resort() {
        let paths = [PathArgs::Throughput(0), PathArgs::Throughput(1)];
        let mut selector = selector(SelectorArgs::ServiceTime, &paths);
        assert!((0..4).all(|_| next(&mut selector, 4096) == 1));
        selector.set_usable(|path| path == 0);
        assert_eq!(next(&mut selector, 4096), 0);
    }

    #[test]
    fn a_cpu_keeps_to_its_path_and_borrows_when_that_fails() {
        let mask = |text: &str| PathArgs::Cpus(text.parse().unwrap());
        let paths = [mask("2"), mask("1")];
        let mut own = selector(SelectorArgs::Affinity, &paths);
        assert_eq!((in_turn(&own, 2), report(&own, 0).misses), (vec![1, 1], 0));
        own.set_usable(|path| path == 0);
        assert_eq!((in_turn(&own, 2), report(&own, 0).misses), (vec![0, 0], 0));
        own.set_usable(|_| false);
        assert!(own.turns().is_empty() && own.take(Bytes(1), NOW).is_none());
        let mut stranger = Selector::new(&SelectorArgs::Affinity, &paths, 7);
        stranger.set_usable(|_| true);
        assert_eq!((next(&mut stranger, 1), report(&stranger, 0).misses), (0, 1));
    }
}
