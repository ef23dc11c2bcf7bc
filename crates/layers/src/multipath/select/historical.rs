//! `historical-service-time`: paths by how long their requests took, of late more than long ago.
//!
//! Times are fixed-point numbers with ten binary digits behind the point. How much the past still weighs after a
//! request that took a given time is looked up: one weight for each 16 ms, the last of them 0.
//!
//! Which of three paths is best may depend on the order in which they are compared, so that order is kept as a list
//! through the paths themselves: those that were chosen longest ago come first.
//!
//! *Invariant:* the list is a ring of all usable paths and [`ENDS`], which stands before the first and after the last.

use super::{PATHS_MAX, Report};
use queue::Nanos;

const FIXED_SHIFT: u32 = 10;
/// 1, as which a path's time begins.
pub(super) const FIXED_ONE: u64 = 1 << FIXED_SHIFT;
/// A service time that still fits when it is multiplied by a weight: one of 2^44 ns, less a little.
const FIXED_MAX: u64 = u64::MAX >> FIXED_SHIFT;
/// 2^24 ns, about 16 ms, share a weight.
const BUCKET_SHIFT: u32 = 24;
const WEIGHTS: usize = 64;
/// From so many in flight on, products might overflow.
const REQUESTS_MAX: u64 = FIXED_ONE;
/// No path has this number.
const ENDS: u8 = (PATHS_MAX - 1) as u8;

#[derive(Clone, Copy, Debug)]
struct Path {
    service_time: u64,
    stale_after: u64,
    /// How long one more request would take here: as many service times as there would be requests. Without meaning
    /// while there are too many for that.
    estimate: u64,
    requests: u32,
    /// Its neighbours in the list, while it is usable.
    next: u8,
    previous: u8,
    usable: bool,
}

/// Above all times: a path that is not usable.
const UNUSABLE: u64 = 1 << 63;
/// So many lanes are compared at once.
const STEP: usize = 4;

/// What decides about a path while nothing is in flight: when what is known of it is stale, and then when it was chosen.
#[derive(Clone, Copy, Debug)]
struct Lane {
    /// In nanoseconds; above that, whether it is not usable.
    stale_after: u64,
    /// In turns, of which there are more than there will ever be requests; in the lowest byte, the path.
    turn: u64,
}

impl Lane {
    #[inline]
    fn whole(self) -> u128 {
        u128::from(self.stale_after) << 64 | u128::from(self.turn)
    }
}

/// All paths of a group.
#[derive(Debug)]
pub(in crate::multipath) struct Historical {
    /// By path.
    idle: [Lane; PATHS_MAX],
    /// The next turn.
    turn: u64,
    paths: [Path; PATHS_MAX],
    /// When a request last came back from each.
    last_ends: [u64; PATHS_MAX],
    /// Requests in flight on all paths.
    requests: u32,
    weights: [u64; WEIGHTS],
    threshold: u64,
    /// The threshold is 0, and no service time ever becomes 0: no two paths count as equally fast.
    is_plain: bool,
    /// `is_plain` holds, and one step compares all paths.
    is_small: bool,
    usable_count: u64,
    count: u8,
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
    /// With so many paths, none of them usable.
    pub(super) fn new(base_weight: u32, threshold: u32, count: u8) -> Historical {
        let mut weights = [0; WEIGHTS];
        for (place, weight) in weights.iter_mut().enumerate().take(WEIGHTS - 1) {
            *weight = power(base_weight.into(), place as u64 + 1);
        }
        // Half of the least that a service time can be is rounded up to the same again.
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
        Historical {
            idle: std::array::from_fn(|path| Lane { stale_after: UNUSABLE, turn: path as u64 }),
            turn: 0,
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

    /// Take a path out of the list.
    #[inline]
    fn leave(&mut self, path: u8) {
        let Path { next, previous, .. } = *self.path(path);
        self.path(previous).next = next;
        self.path(next).previous = previous;
    }

    /// Put it at the end.
    #[inline]
    fn follow(&mut self, path: u8) {
        self.turn += 1 << u8::BITS;
        self.idle[usize::from(path)].turn = self.turn | u64::from(path);
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
    /// compares all paths; counts the request as in flight there. It is the path whose last request ended
    /// longest ago. Called only while a path is usable.
    #[inline(always)]
    pub(super) fn take_idle(&mut self) -> Option<u8> {
        if !self.is_small || self.requests > 0 {
            return None;
        }
        let (steps, _) = self.idle.as_chunks::<STEP>();
        let [a, b, c, d] = steps[0];
        Some(self.put(a.whole().min(b.whole()).min(c.whole()).min(d.whole()) as u8))
    }

    /// [`take_idle`](Historical::take_idle) in general: compares the paths in the order of the list.
    pub(super) fn take_from_list(&mut self, now: Nanos) -> u8 {
        let best = match self.is_plain && u64::from(self.requests) < REQUESTS_MAX {
            true => self.best(|path, other| path.is_better_in_time(other, now.0)),
            false => self.best(|path, other| path.is_better(other, self.threshold, now.0)),
        };
        self.put(best)
    }

    /// A request goes down a path, which becomes the last of the list.
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

    /// The first path of the list than which none that comes later is better.
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

    /// A request that had gone down at some time `went` ago has come back.
    #[inline(always)]
    pub(in crate::multipath) fn end(&mut self, path: u8, went_ns: u64, now: Nanos) {
        let last_end = std::mem::replace(&mut self.last_ends[usize::from(path)], now.0);
        // Of requests that were there together only the time after the one before is this one's own.
        let took = went_ns.min(now.0.saturating_sub(last_end));
        let (weight, took) = if took >> BUCKET_SHIFT == 0 {
            (self.weights[0], took << FIXED_SHIFT)
        } else {
            self.weigh_long(took)
        };
        self.requests -= 1;
        let lane = &mut self.idle[usize::from(path)];
        let path = &mut self.paths[usize::from(path)];
        path.requests -= 1;
        // Neither is more than the most, so neither is what lies between.
        let sum = path.service_time * weight + took * (FIXED_ONE - weight) + (FIXED_ONE >> 1);
        path.service_time = sum >> FIXED_SHIFT;
        path.estimate = path.service_time.wrapping_mul(u64::from(path.requests) + 1);
        // Fewer than 2^8 times less than 2^44.
        let stale_ns = self.usable_count * (path.service_time >> FIXED_SHIFT);
        path.stale_after = now.0.saturating_add(stale_ns);
        lane.stale_after = (lane.stale_after & UNUSABLE) | (path.stale_after & !UNUSABLE);
    }

    /// How much the past weighs after a request that took more than the shortest of times, and that time.
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
    /// Whether it is to be preferred to one that comes before it in the list. The kernel's `hst_compare`.
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

    /// The same where no threshold makes them alike, and few requests are in flight.
    #[inline(always)]
    fn is_better_in_time(&self, other: &Path, now: u64) -> bool {
        self.is_better_unless(self.estimate > other.estimate, other, now)
    }

    /// The same unless the other is the better one by what it would take, and nothing else is to be said.
    #[inline(always)]
    fn is_better_unless(&self, other_better: bool, other: &Path, now: u64) -> bool {
        let (idle, other_idle) = (self.requests == 0, other.requests == 0);
        // A path that nobody uses and nobody has heard of for long is tried; of two, the one longer unheard of.
        if idle | other_idle {
            match (idle, other_idle) {
                (true, true) => return self.stale_after < other.stale_after,
                (true, false) if self.stale_after < now => return other.stale_after > 0,
                (false, true) if other.stale_after < now => return false,
                _ => {}
            }
        }
        // What is known of a winner that is stale may be too good to be true: no more for it than for the other.
        let winner = if other_better { other } else { self };
        if winner.stale_after < now {
            return self.requests < other.requests;
        }
        !other_better
    }

    /// What one more request would take, where a product might overflow.
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
        let mut historical = Historical::new(512, 0, 2);
        historical.set_usable(|_| true);
        assert_eq!(historical.take_from_list(Nanos(1000)), 0);
        historical.end(0, 1000, Nanos(2000));
        // Half of 1 ns, half of 1000 ns.
        assert_eq!(historical.report(0).service_time, (FIXED_ONE + 1000 * FIXED_ONE) / 2);
        assert_eq!(historical.report(0).stale_after, 2000 + 2 * 500);
        // One that was there at the same time counts from when the one before had ended.
        (historical.path(0).requests, historical.requests) = (1, 1);
        historical.end(0, 1000, Nanos(2000));
        assert_eq!(historical.report(0).service_time >> FIXED_SHIFT, 250);
    }

    #[test]
    fn a_request_that_took_for_ever_fits() {
        let mut historical = Historical::new(1023, 0, 1);
        historical.set_usable(|_| true);
        for now in [1 << 44, u64::MAX / 2, u64::MAX] {
            assert_eq!(historical.take_from_list(Nanos(now)), 0);
            historical.end(0, u64::MAX, Nanos(now));
            assert_eq!(historical.report(0).service_time, FIXED_MAX);
        }
    }

    /// Whether the first is better, which comes after the other in the list; the other way round it must not be.
    fn wins(a: &Path, b: &Path, threshold: u64) -> bool {
        let (first, second) = (a.is_better(b, threshold, 500), b.is_better(a, threshold, 500));
        assert!(first != second, "{a:?} {b:?}");
        let few = a.requests.max(b.requests) < 1024;
        assert!(threshold > 0 || !few || a.is_better_in_time(b, 500) == first, "{a:?} {b:?}");
        first
    }

    #[test]
    fn the_quicker_path_wins_until_it_is_too_busy() {
        let busy = |requests| wins(&path(100 << 10, requests, 1000), &path(400 << 10, 1, 1000), 0);
        assert!(busy(2) && !busy(8));
        // Where the products would not fit.
        let busy = |requests| wins(&path(100 << 10, requests, 1000), &path(400 << 10, 1024, 1000), 0);
        assert!(busy(4096) && !busy(4200));
    }

    #[test]
    fn paths_within_the_threshold_go_by_what_is_in_flight() {
        assert!(wins(&path(400 << 10, 1, 1000), &path(100 << 10, 2, 1000), 4));
    }

    #[test]
    fn an_idle_path_that_is_stale_is_tried() {
        assert!(wins(&path(9000 << 10, 0, 100), &path(10 << 10, 1, 1000), 0));
    }

    #[test]
    fn a_winner_that_is_stale_gets_no_more_than_its_share() {
        assert!(!wins(&path(10 << 10, 3, 100), &path(400 << 10, 2, 1000), 0));
    }
}
