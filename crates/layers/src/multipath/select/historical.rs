//! `historical-service-time`: paths by how long their requests took, of late more than long ago.
//!
//! Times are fixed-point numbers with ten binary digits behind the point. How much the past still weighs after a
//! request that took a given time is looked up: one weight for each 16 ms, the last of them 0.

use super::Report;
use queue::Nanos;
use std::cmp::Ordering;

const FIXED_SHIFT: u32 = 10;
const FIXED_ONE: u64 = 1 << FIXED_SHIFT;
/// A service time that still fits when it is multiplied by a weight.
const FIXED_MAX: u64 = u64::MAX >> FIXED_SHIFT;
/// 2^24 ns, about 16 ms, share a weight.
const BUCKET_SHIFT: u32 = 24;
const WEIGHTS: usize = 64;
/// From so many in flight on, products might overflow.
const REQUESTS_MAX: u64 = FIXED_ONE;

#[derive(Clone, Copy, Debug)]
struct Path {
    service_time: u64,
    stale_after: u64,
    last_end: u64,
    requests: u64,
}

/// All paths of a group.
#[derive(Debug)]
pub(super) struct Historical {
    weights: [u64; WEIGHTS],
    threshold: u64,
    paths: Box<[Path]>,
    usable_count: u64,
}

/// `base` to the power of `exponent`, rounded to the nearest after each step.
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

impl Historical {
    pub(super) fn new(base_weight: u32, threshold: u32, paths: usize) -> Historical {
        let mut weights = [0; WEIGHTS];
        for (place, weight) in weights.iter_mut().enumerate().take(WEIGHTS - 1) {
            *weight = power(base_weight.into(), place as u64 + 1);
        }
        let path = Path { service_time: FIXED_ONE, stale_after: 0, last_end: 0, requests: 0 };
        Historical { weights, threshold: threshold.into(), paths: vec![path; paths].into(), usable_count: 0 }
    }

    pub(super) fn set_usable_count(&mut self, count: usize) {
        self.usable_count = count as u64;
    }

    #[inline]
    pub(super) fn start(&mut self, path: u16) {
        self.paths[usize::from(path)].requests += 1;
    }

    pub(super) fn end(&mut self, path: u16, started: Nanos, now: Nanos) {
        let usable_count = self.usable_count;
        let path = &mut self.paths[usize::from(path)];
        // Of requests that were there together only the time after the one before is this one's own.
        let begun = started.0.max(path.last_end);
        path.last_end = now.0;
        let took = now.0.saturating_sub(begun);
        path.requests -= 1;
        let weight = self.weights[((took >> BUCKET_SHIFT) as usize).min(WEIGHTS - 1)];
        let took = took.saturating_mul(FIXED_ONE).min(FIXED_MAX);
        let sum = u128::from(path.service_time) * u128::from(weight)
            + u128::from(took) * u128::from(FIXED_ONE - weight)
            + u128::from(FIXED_ONE >> 1);
        path.service_time = (sum >> FIXED_SHIFT) as u64;
        path.stale_after =
            now.0.saturating_add(usable_count.saturating_mul(path.service_time >> FIXED_SHIFT));
    }

    /// The place of the best path; of equals the one chosen longest ago.
    pub(super) fn best(&self, usable: &[u16], now: Nanos) -> Option<usize> {
        let mut best = 0;
        usable.first()?;
        for place in 1..usable.len() {
            let (path, other) =
                (&self.paths[usize::from(usable[place])], &self.paths[usize::from(usable[best])]);
            if self.compare(path, other, now.0) == Ordering::Less {
                best = place;
            }
        }
        Some(best)
    }

    /// `Less`: `a` is better. The kernel's `hst_compare`.
    fn compare(&self, a: &Path, b: &Path, now: u64) -> Ordering {
        let (slow, fast) = if a.service_time > b.service_time { (a, b) } else { (b, a) };
        if slow.service_time <= self.threshold.saturating_mul(fast.service_time) {
            return a.requests.cmp(&b.requests);
        }
        let (a_idle, b_idle) = (a.requests == 0, b.requests == 0);
        // A path that nobody uses and nobody has heard of for long is tried; of two, the one longer unheard of.
        if (a_idle && a.stale_after < now) || (b_idle && b.stale_after < now) || (a_idle && b_idle) {
            let own = if b_idle { a.stale_after } else { 0 };
            let others = if a_idle { b.stale_after } else { 0 };
            return own.cmp(&others);
        }
        let (mut a_time, mut b_time) = (a.service_time, b.service_time);
        let b_better = if a.requests == b.requests {
            a_time > b_time
        } else {
            if a.requests >= REQUESTS_MAX || b.requests >= REQUESTS_MAX {
                a_time >>= FIXED_SHIFT;
                b_time >>= FIXED_SHIFT;
            }
            let estimate = |requests: u64, time: u64| (1 + requests).saturating_mul(time);
            estimate(a.requests, a_time) > estimate(b.requests, b_time)
        };
        // What is known of a winner that is stale may be too good to be true: no more for it than for the other.
        let winner = if b_better { b } else { a };
        if winner.stale_after < now {
            return a.requests.cmp(&b.requests);
        }
        if b_better { Ordering::Greater } else { Ordering::Less }
    }

    pub(super) fn report(&self, path: u16) -> Report {
        let path = &self.paths[usize::from(path)];
        Report {
            requests: path.requests,
            service_time: path.service_time,
            stale_after: path.stale_after,
            ..Report::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(service_time: u64, requests: u64, stale_after: u64) -> Path {
        Path { service_time, requests, stale_after, last_end: 0 }
    }

    #[test]
    fn weights_fall_with_time_and_end_at_none() {
        let historical = Historical::new(972, 0, 1);
        assert_eq!(historical.weights[0], 972);
        assert_eq!(historical.weights[1], power(972, 2));
        assert!(historical.weights.windows(2).all(|pair| pair[1] < pair[0]));
        assert_eq!(historical.weights[WEIGHTS - 1], 0);
        assert_eq!(power(512, 3), 128);
    }

    #[test]
    fn a_request_moves_the_average_by_what_it_took() {
        let mut historical = Historical::new(512, 0, 1);
        historical.set_usable_count(2);
        historical.start(0);
        historical.end(0, Nanos(1000), Nanos(2000));
        // Half of 1 ns, half of 1000 ns.
        assert_eq!(historical.report(0).service_time, (FIXED_ONE + 1000 * FIXED_ONE) / 2);
        assert_eq!(historical.report(0).stale_after, 2000 + 2 * 500);
        // One that was there at the same time counts from when the one before had ended.
        historical.start(0);
        historical.end(0, Nanos(1000), Nanos(2000));
        assert_eq!(historical.report(0).service_time >> FIXED_SHIFT, 250);
    }

    #[test]
    fn the_quicker_path_wins_until_it_is_too_busy() {
        let historical = Historical::new(972, 0, 2);
        let busy =
            |requests| historical.compare(&path(100 << 10, requests, 1000), &path(400 << 10, 1, 1000), 500);
        assert_eq!(busy(2), Ordering::Less);
        assert_eq!(busy(8), Ordering::Greater);
    }

    #[test]
    fn paths_within_the_threshold_go_by_what_is_in_flight() {
        let historical = Historical::new(972, 4, 2);
        assert_eq!(
            historical.compare(&path(400 << 10, 1, 1000), &path(100 << 10, 2, 1000), 500),
            Ordering::Less
        );
    }

    #[test]
    fn an_idle_path_that_is_stale_is_tried() {
        let historical = Historical::new(972, 0, 2);
        let slow_idle = path(9000 << 10, 0, 100);
        assert_eq!(historical.compare(&slow_idle, &path(10 << 10, 1, 1000), 500), Ordering::Less);
        assert_eq!(historical.compare(&path(10 << 10, 1, 1000), &slow_idle, 500), Ordering::Greater);
    }

    #[test]
    fn a_winner_that_is_stale_gets_no_more_than_its_share() {
        let historical = Historical::new(972, 0, 2);
        let stale = path(10 << 10, 3, 100);
        assert_eq!(historical.compare(&stale, &path(400 << 10, 2, 1000), 500), Ordering::Greater);
    }
}
