//! `historical-service-time`: chooses paths by a moving average of their service times.
//!
//! Times are fixed-point numbers with ten fractional bits. The weight of the average after a request depends
//! on how long that request took: a table has one weight for each 16 ms, the last of them 0.
//!
//! Comparison is not transitive, so the best of three paths may depend on the order of comparison. That order
//! is kept in a list through the paths, least recently chosen first.
//!
//! *Invariant:* the list is a ring of all usable paths and [`ENDS`], which is before the first and after the
//! last.

use super::{PATHS_MAX, Report};
use queue::Nanos;

const FIXED_SHIFT: u32 = 10;
/// Fixed-point 1.0: the initial service time of a path.
pub(super) const FIXED_ONE: u64 = 1 << FIXED_SHIFT;
/// The largest service time that can be multiplied by a weight: nearly 2^44 ns.
const FIXED_MAX: u64 = u64::MAX >> FIXED_SHIFT;
/// Each bucket of times has one weight and is 2^24 ns wide, about 16 ms.
const BUCKET_SHIFT: u32 = 24;
const WEIGHTS: usize = 64;
/// Number of requests in flight from which on products might overflow.
const REQUESTS_MAX: u64 = FIXED_ONE;
/// The number that stands for the list's head and tail; no path has it.
const ENDS: u8 = (PATHS_MAX - 1) as u8;

#[derive(Clone, Copy, Debug)]
struct Path {
    service_time: u64,
    stale_after: u64,
    /// The service time of one more request: service time times (requests + 1). Invalid above `REQUESTS_MAX`.
    estimate: u64,
    requests: u32,
    /// The neighbours in the list while the path is usable.
    next: u8,
    previous: u8,
    usable: bool,
}

/// A bit above all times, which marks a path that is not usable.
const UNUSABLE: u64 = 1 << 63;
/// Keys compared in one step.
const STEP: usize = 4;

/// The key of a path while no request is in flight. Keys order paths by the time at which their average
/// becomes stale, then by their last choice.
#[derive(Clone, Copy, Debug)]
struct Key {
    /// The time at which the average becomes stale, in nanoseconds; the highest bit marks a path that is not
    /// usable.
    stale_after: u64,
    /// The stamp of the last choice, which never wraps; in the lowest byte the path.
    stamp: u64,
}

impl Key {
    #[inline]
    fn whole(self) -> u128 {
        u128::from(self.stale_after) << 64 | u128::from(self.stamp)
    }
}

/// The paths of a group.
#[derive(Debug)]
pub(in crate::multipath) struct HistoricalServiceTime {
    /// The key of each path.
    idle: [Key; PATHS_MAX],
    /// The last stamp.
    stamp: u64,
    paths: [Path; PATHS_MAX],
    /// The time at which a request of each path last ended, in nanoseconds.
    last_ends: [u64; PATHS_MAX],
    /// Requests in flight on all paths.
    requests: u32,
    weights: [u64; WEIGHTS],
    threshold: u64,
    /// Whether the threshold is 0 and no service time can become 0: then no two paths with different
    /// estimates count as equally fast.
    is_plain: bool,
    /// Whether `is_plain` is set and one step compares all paths.
    is_small: bool,
    usable_count: u64,
    count: u8,
}

/// Returns `base` to the power of `exponent`, rounded to nearest after each step.
fn power(mut base: u64, mut exponent: u64) -> u64 {
    let round = |product: u64| (product + (FIXED_ONE >> 1)) >> FIXED_SHIFT;
    let mut result = FIXED_ONE;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = round(result * base);
        }
        base = round(base * base);
        exponent >>= 1;
    }
    result
}

impl HistoricalServiceTime {
    /// Creates a selector of `count` paths, none of them usable.
    pub(super) fn new(base_weight: u32, threshold: u32, count: u8) -> HistoricalServiceTime {
        let mut weights = [0; WEIGHTS];
        for (place, weight) in weights.iter_mut().enumerate().take(WEIGHTS - 1) {
            *weight = power(base_weight.into(), place as u64 + 1);
        }
        // With a weight of at least a half, the smallest service time, 1, is rounded to 1 again, not to 0.
        let is_plain = threshold == 0 && u64::from(base_weight) >= FIXED_ONE / 2;
        let path = Path {
            service_time: FIXED_ONE,
            stale_after: 0,
            estimate: FIXED_ONE,
            requests: 0,
            next: ENDS,
            previous: ENDS,
            usable: false,
        };
        HistoricalServiceTime {
            idle: std::array::from_fn(|path| Key { stale_after: UNUSABLE, stamp: path as u64 }),
            stamp: 0,
            paths: [path; PATHS_MAX],
            last_ends: [0; PATHS_MAX],
            requests: 0,
            weights,
            threshold: threshold.into(),
            is_plain,
            is_small: is_plain && usize::from(count) <= STEP,
            usable_count: 0,
            count,
        }
    }

    #[inline]
    fn path(&mut self, path: u8) -> &mut Path {
        &mut self.paths[usize::from(path)]
    }

    /// Removes a path from the list.
    #[inline]
    fn leave(&mut self, path: u8) {
        let Path { next, previous, .. } = *self.path(path);
        self.path(previous).next = next;
        self.path(next).previous = previous;
    }

    /// Appends a path to the list.
    #[inline]
    fn follow(&mut self, path: u8) {
        self.stamp += 1 << u8::BITS;
        self.idle[usize::from(path)].stamp = self.stamp | u64::from(path);
        let last = std::mem::replace(&mut self.path(ENDS).previous, path);
        self.path(last).next = path;
        (self.path(path).previous, self.path(path).next) = (last, ENDS);
    }

    pub(super) fn set_usable(&mut self, is_usable: impl Fn(u8) -> bool) {
        for path in 0..self.count {
            match (self.path(path).usable, is_usable(path)) {
                (true, false) => {
                    self.leave(path);
                    self.idle[usize::from(path)].stale_after |= UNUSABLE;
                    self.usable_count -= 1;
                }
                (false, true) => {
                    self.follow(path);
                    self.idle[usize::from(path)].stale_after &= !UNUSABLE;
                    self.usable_count += 1;
                }
                _ => {}
            }
            self.path(path).usable = is_usable(path);
        }
    }

    pub(super) fn has_usable(&self) -> bool {
        self.usable_count > 0
    }

    /// Chooses the path for the next request if none is in flight, there is no threshold and one step
    /// compares all paths; counts the request as in flight there. The chosen path is the one whose average
    /// becomes stale first. Called only while a path is usable.
    #[inline(always)]
    pub(super) fn take_idle(&mut self) -> Option<u8> {
        if !self.is_small || self.requests > 0 {
            return None;
        }
        let (steps, _) = self.idle.as_chunks::<STEP>();
        let [a, b, c, d] = steps[0];
        Some(self.put(a.whole().min(b.whole()).min(c.whole()).min(d.whole()) as u8))
    }

    /// Chooses the path in all cases that [`take_idle`](HistoricalServiceTime::take_idle) leaves: compares
    /// the paths in the order of the list.
    pub(super) fn take_from_list(&mut self, now: Nanos) -> u8 {
        let best = match self.is_plain && u64::from(self.requests) < REQUESTS_MAX {
            true => self.best(|path, other| path.is_better_in_time(other, now.0)),
            false => self.best(|path, other| path.is_better(other, self.threshold, now.0)),
        };
        self.put(best)
    }

    /// Counts a request on a path, which becomes the last of the list.
    #[inline(always)]
    fn put(&mut self, best: u8) -> u8 {
        if self.path(best).next != ENDS {
            self.leave(best);
            self.follow(best);
        }
        self.requests += 1;
        let path = self.path(best);
        path.requests += 1;
        path.estimate = path.estimate.wrapping_add(path.service_time);
        best
    }

    /// Goes through the list once and keeps the best path so far. Returns the last one kept.
    #[inline(always)]
    fn best(&self, is_better: impl Fn(&Path, &Path) -> bool) -> u8 {
        let mut best = self.paths[usize::from(ENDS)].next;
        let mut known = &self.paths[usize::from(best)];
        let mut path = known.next;
        while path != ENDS {
            let other = &self.paths[usize::from(path)];
            if is_better(other, known) {
                (best, known) = (path, other);
            }
            path = other.next;
        }
        best
    }

    /// Counts the end of a request that was sent `sent_ns` before `now`.
    #[inline(always)]
    pub(in crate::multipath) fn end(&mut self, path: u8, sent_ns: u64, now: Nanos) {
        let last_end = std::mem::replace(&mut self.last_ends[usize::from(path)], now.0);
        // Requests in flight together share the path: only the time since the previous completion counts for
        // this one.
        let took = sent_ns.min(now.0.saturating_sub(last_end));
        let (weight, took) = if took >> BUCKET_SHIFT == 0 {
            (self.weights[0], took << FIXED_SHIFT)
        } else {
            self.weigh_long(took)
        };
        self.requests -= 1;
        let key = &mut self.idle[usize::from(path)];
        let path = &mut self.paths[usize::from(path)];
        path.requests -= 1;
        // A weighted mean of values within the limit does not exceed it.
        let sum = path.service_time * weight + took * (FIXED_ONE - weight) + (FIXED_ONE >> 1);
        path.service_time = sum >> FIXED_SHIFT;
        path.estimate = path.service_time.wrapping_mul(u64::from(path.requests) + 1);
        // The product of fewer than 2^8 paths and less than 2^44 ns does not overflow.
        let stale_ns = self.usable_count * (path.service_time >> FIXED_SHIFT);
        path.stale_after = now.0.saturating_add(stale_ns);
        key.stale_after = (key.stale_after & UNUSABLE) | (path.stale_after & !UNUSABLE);
    }

    /// Returns the weight of the average after a request that took longer than the first bucket, and its
    /// time.
    #[cold]
    fn weigh_long(&self, took: u64) -> (u64, u64) {
        let weight = self.weights[((took >> BUCKET_SHIFT) as usize).min(WEIGHTS - 1)];
        (weight, if took > FIXED_MAX >> FIXED_SHIFT { FIXED_MAX } else { took << FIXED_SHIFT })
    }

    pub(super) fn report(&self, path: u8) -> Report {
        let path = &self.paths[usize::from(path)];
        Report {
            requests: path.requests.into(),
            service_time: path.service_time,
            stale_after: path.stale_after,
            ..Report::default()
        }
    }
}

impl Path {
    /// Returns whether this path is preferred to one before it in the list, as the kernel's `hst_compare`
    /// does.
    fn is_better(&self, other: &Path, threshold: u64, now: u64) -> bool {
        let (slow, fast) =
            (self.service_time.max(other.service_time), self.service_time.min(other.service_time));
        if slow <= threshold.saturating_mul(fast) {
            return self.requests < other.requests;
        }
        let coarse = u64::from(self.requests.max(other.requests)) >= REQUESTS_MAX;
        let other_better = match self.requests == other.requests {
            true => self.service_time > other.service_time,
            false if coarse => self.coarse_estimate() > other.coarse_estimate(),
            false => self.estimate > other.estimate,
        };
        self.is_better_unless(other_better, other, now)
    }

    /// Compares as [`is_better`](Path::is_better), without a threshold and with few requests in flight.
    #[inline(always)]
    fn is_better_in_time(&self, other: &Path, now: u64) -> bool {
        self.is_better_unless(self.estimate > other.estimate, other, now)
    }

    /// Completes a comparison after the estimates: handles idle paths and stale averages.
    #[inline(always)]
    fn is_better_unless(&self, other_better: bool, other: &Path, now: u64) -> bool {
        let (idle, other_idle) = (self.requests == 0, other.requests == 0);
        // An idle path whose average is stale is tried; of two idle ones, the one that became stale earlier.
        if idle | other_idle {
            match (idle, other_idle) {
                (true, true) => return self.stale_after < other.stale_after,
                (true, false) if self.stale_after < now => return other.stale_after > 0,
                (false, true) if other.stale_after < now => return false,
                _ => {}
            }
        }
        // The average of a stale winner may be too low: it gets no more requests than the other one.
        let winner = if other_better { other } else { self };
        if winner.stale_after < now {
            return self.requests < other.requests;
        }
        !other_better
    }

    /// Returns the estimate where the exact product might overflow.
    fn coarse_estimate(&self) -> u64 {
        (1 + u64::from(self.requests)).saturating_mul(self.service_time >> FIXED_SHIFT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(service_time: u64, requests: u32, stale_after: u64) -> Path {
        let (next, previous, usable) = (ENDS, ENDS, true);
        let estimate = service_time * (1 + u64::from(requests));
        Path { service_time, requests, stale_after, estimate, next, previous, usable }
    }

    #[test]
    fn weights_decrease_with_time_to_zero() {
        let historical = HistoricalServiceTime::new(972, 0, 1);
        assert_eq!(historical.weights[0], 972);
        assert_eq!(historical.weights[1], power(972, 2));
        assert!(historical.weights.windows(2).all(|pair| pair[1] < pair[0]));
        assert_eq!(historical.weights[WEIGHTS - 1], 0);
        assert_eq!(power(512, 3), 128);
    }

    #[test]
    fn a_completion_updates_the_average() {
        let mut historical = HistoricalServiceTime::new(512, 0, 2);
        historical.set_usable(|_| true);
        assert_eq!(historical.take_from_list(Nanos(1000)), 0);
        historical.end(0, 1000, Nanos(2000));
        // Half of 1 ns, half of 1000 ns.
        assert_eq!(historical.report(0).service_time, (FIXED_ONE + 1000 * FIXED_ONE) / 2);
        assert_eq!(historical.report(0).stale_after, 2000 + 2 * 500);
        // A concurrent request counts from the end of the previous one.
        (historical.path(0).requests, historical.requests) = (1, 1);
        historical.end(0, 1000, Nanos(2000));
        assert_eq!(historical.report(0).service_time >> FIXED_SHIFT, 250);
    }

    #[test]
    fn a_very_long_service_time_does_not_overflow() {
        let mut historical = HistoricalServiceTime::new(1023, 0, 1);
        historical.set_usable(|_| true);
        for now in [1 << 44, u64::MAX / 2, u64::MAX] {
            assert_eq!(historical.take_from_list(Nanos(now)), 0);
            historical.end(0, u64::MAX, Nanos(now));
            assert_eq!(historical.report(0).service_time, FIXED_MAX);
        }
    }

    /// Returns whether `a`, which comes after `b` in the list, is better. The reverse comparison must be the
    /// opposite.
    fn wins(a: &Path, b: &Path, threshold: u64) -> bool {
        let (first, second) = (a.is_better(b, threshold, 500), b.is_better(a, threshold, 500));
        assert!(first != second, "{a:?} {b:?}");
        let few = a.requests.max(b.requests) < 1024;
        assert!(threshold > 0 || !few || a.is_better_in_time(b, 500) == first, "{a:?} {b:?}");
        first
    }

    #[test]
    fn the_faster_path_wins_until_it_is_too_busy() {
        let busy = |requests| wins(&path(100 << 10, requests, 1000), &path(400 << 10, 1, 1000), 0);
        assert!(busy(2) && !busy(8));
        // Products that would overflow are compared coarsely.
        let busy = |requests| wins(&path(100 << 10, requests, 1000), &path(400 << 10, 1024, 1000), 0);
        assert!(busy(4096) && !busy(4200));
    }

    #[test]
    fn paths_within_the_threshold_compare_by_requests_in_flight() {
        assert!(wins(&path(400 << 10, 1, 1000), &path(100 << 10, 2, 1000), 4));
    }

    #[test]
    fn an_idle_path_that_is_stale_is_tried() {
        assert!(wins(&path(9000 << 10, 0, 100), &path(10 << 10, 1, 1000), 0));
    }

    #[test]
    fn a_stale_winner_gets_no_more_than_its_share() {
        assert!(!wins(&path(10 << 10, 3, 100), &path(400 << 10, 2, 1000), 0));
    }
}
