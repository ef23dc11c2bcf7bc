//! kyber: which request is next, and how many of a kind may be at the device. The kernel's block/kyber-iosched.c.
//!
//! Reads, writes, discards and the rest are domains, each with so many tokens: a request takes one for as long as it is
//! at the device. Domains take turns, in batches. Latencies are counted in buckets of a quarter of what is aimed at: the
//! first four are good. Every tenth of a second they are looked at: where the device itself is slow for a domain
//! (90 % of its requests), domains whose requests are in time all told (99 %) get fewer tokens, in proportion; one
//! whose requests are late gets more.

use super::lines::Lines;
use super::values::{Now, Parameter};
use block::{Op, Tag};
use queue::Nanos;

/// Reads, writes, discards, and others, in the order of their turns.
pub(super) const DOMAINS: usize = 4;
const OTHER: usize = 3;
/// The most tokens of each (`kyber_depth`).
const DEPTH: [u32; DOMAINS] = [256, 128, 64, 16];
/// Requests that each may start in a turn (`kyber_batch_size`).
const BATCH: [u32; DOMAINS] = [16, 8, 1, 1];
const DISCARD_TARGET_NS: u64 = 5_000_000_000;
/// A bucket is this part of a target, as a shift.
const SHIFT: u32 = 2;
/// Buckets of requests that are in time.
const GOOD: usize = 1 << SHIFT;
const BUCKETS: usize = 2 << SHIFT;
/// How long after the first latency they are looked at.
const LOOK_NS: u64 = 100_000_000;
/// Latencies that suffice for a look, and how long it waits for as many.
const SAMPLES: u32 = 500;
const SAMPLES_NS: u64 = 1_000_000_000;

/// What a domain's latencies came to.
#[derive(Clone, Copy, Default, Debug)]
struct Latencies {
    buckets: [u32; BUCKETS],
    /// When they are looked at though there are few. The kernel has one such time for both of a domain's.
    until: Option<Nanos>,
}

impl Latencies {
    fn add(&mut self, target_ns: u64, latency_ns: u64) {
        // What ended in the turn in which it began took no time that can be seen.
        if latency_ns > 0 {
            let bucket = (latency_ns - 1) / (target_ns >> SHIFT).max(1);
            self.buckets[(bucket as usize).min(BUCKETS - 1)] += 1;
        }
    }

    /// The bucket in which so many percent of them have ended, when there are enough: they are gone then.
    fn percentile(&mut self, percent: u32, now: Nanos) -> Option<usize> {
        let samples: u32 = self.buckets.iter().sum();
        if samples == 0 {
            return None;
        }
        let due = *self.until.get_or_insert(now.after(SAMPLES_NS));
        if samples < SAMPLES && now < due {
            return None;
        }
        let mut left = (u64::from(samples) * u64::from(percent)).div_ceil(100);
        let reached = self.buckets[..BUCKETS - 1].iter().position(|&count| {
            let is_here = u64::from(count) >= left;
            left = left.saturating_sub(count.into());
            is_here
        });
        *self = Latencies::default();
        Some(reached.unwrap_or(BUCKETS - 1))
    }
}

#[derive(Clone, Copy, Default, Debug)]
struct Domain {
    tokens: u32,
    used: u32,
    /// From the start at the device, and from the arrival.
    device: Latencies,
    total: Latencies,
    /// What was seen while all was well, for when it is not.
    seen: Option<usize>,
}

/// The state of one queue.
#[derive(Debug)]
pub(super) struct Kyber {
    domains: [Domain; DOMAINS],
    current: usize,
    batched: u32,
    /// When latencies are looked at next; `None`: there are none since.
    look_at: Option<Nanos>,
}

impl Default for Kyber {
    fn default() -> Kyber {
        let domains = DEPTH.map(|tokens| Domain { tokens, ..Domain::default() });
        Kyber { domains, current: 0, batched: 0, look_at: None }
    }
}

/// The domain.
pub(super) fn class(op: Op) -> usize {
    match op {
        Op::Read => 0,
        Op::Write => 1,
        Op::Discard => 2,
        _ => OTHER,
    }
}

impl Kyber {
    /// The next to go, with its domain.
    pub(super) fn next(&mut self, lines: &Lines) -> Option<(usize, Tag)> {
        if self.batched < BATCH[self.current]
            && let Some(lead) = self.head(lines, self.current)
        {
            self.batched += 1;
            return Some((self.current, lead));
        }
        self.batched = 0;
        for _ in 0..DOMAINS {
            self.current = (self.current + 1) % DOMAINS;
            if let Some(lead) = self.head(lines, self.current) {
                self.batched = 1;
                return Some((self.current, lead));
            }
        }
        None
    }

    fn head(&self, lines: &Lines, domain: usize) -> Option<Tag> {
        let Domain { tokens, used, .. } = self.domains[domain];
        if used < tokens { lines.oldest(domain) } else { None }
    }

    /// One of that domain goes to the device.
    pub(super) fn started(&mut self, domain: usize) {
        self.domains[domain].used += 1;
    }

    /// One of that domain is over that arrived, and was started, then.
    pub(super) fn ended(&mut self, domain: usize, arrived: Nanos, started: Nanos, now: Nanos, values: &Now) {
        let of_it = &mut self.domains[domain];
        of_it.used -= 1;
        if domain == OTHER {
            return;
        }
        let target = target(domain, values);
        of_it.total.add(target, now.since(arrived));
        of_it.device.add(target, now.since(started));
        self.look_at.get_or_insert(now.after(LOOK_NS));
    }

    /// Look at the latencies, if it is time.
    pub(super) fn look(&mut self, now: Nanos) {
        if self.look_at.is_none_or(|at| now < at) {
            return;
        }
        self.look_at = None;
        let mut congested = false;
        for domain in &mut self.domains[..OTHER] {
            let p90 = domain.device.percentile(90, now);
            congested |= p90.is_some_and(|bucket| bucket >= GOOD);
        }
        for (domain, most) in self.domains[..OTHER].iter_mut().zip(DEPTH) {
            let mut p99 = domain.total.percentile(99, now);
            if congested {
                p99 = p99.or(domain.seen);
                domain.seen = None;
            } else if p99.is_some() {
                domain.seen = p99;
            }
            if let Some(bucket) = p99
                && (congested || bucket >= GOOD)
            {
                domain.tokens = ((domain.tokens * (bucket as u32 + 1)) >> SHIFT).clamp(1, most);
            }
        }
    }

    /// Tokens of each domain.
    #[cfg(test)]
    pub(super) fn tokens(&self) -> [u32; DOMAINS] {
        self.domains.map(|domain| domain.tokens)
    }
}

fn target(domain: usize, values: &Now) -> u64 {
    match domain {
        0 => values.get(Parameter::ReadLatNsec),
        1 => values.get(Parameter::WriteLatNsec),
        _ => DISCARD_TARGET_NS,
    }
}

#[cfg(test)]
mod tests {
    use super::super::values::{Choice, Policy, Values};
    use super::*;

    const MS: u64 = 1_000_000;

    /// So many of a domain that took that long at the device, and all told.
    fn end(kyber: &mut Kyber, domain: usize, count: u32, device_ms: u64, total_ms: u64) {
        let values = Values::new(&Choice::of(Policy::Kyber)).now();
        let now = Nanos(10_000 * MS);
        for _ in 0..count {
            kyber.started(domain);
            let (arrived, started) = (now.0 - total_ms * MS, now.0 - device_ms * MS);
            kyber.ended(domain, Nanos(arrived), Nanos(started), now, &values);
        }
    }

    fn look(kyber: &mut Kyber, ms: u64) {
        kyber.look(Nanos((10_000 + ms) * MS));
    }

    #[test]
    fn all_tokens_are_there_while_latencies_are_good() {
        let mut kyber = Kyber::default();
        end(&mut kyber, 0, 500, 1, 1);
        end(&mut kyber, 1, 500, 5, 5);
        look(&mut kyber, 100);
        assert_eq!(kyber.tokens(), DEPTH);
    }

    #[test]
    fn a_congested_device_gets_less_of_the_domain_that_is_in_time() {
        let mut kyber = Kyber::default();
        // Reads take twice what is aimed at; writes less than a quarter of it.
        end(&mut kyber, 0, 500, 4, 4);
        end(&mut kyber, 1, 500, 2, 2);
        look(&mut kyber, 100);
        assert_eq!(kyber.tokens(), [256, 32, 64, 16], "reads have all that there are");
        for _ in 0..9 {
            end(&mut kyber, 0, 500, 4, 4);
            end(&mut kyber, 1, 500, 2, 2);
            look(&mut kyber, 100);
        }
        assert_eq!(kyber.tokens()[1], 1, "one is always left");
    }

    #[test]
    fn a_domain_that_was_throttled_and_is_late_gets_tokens_back() {
        let mut kyber = Kyber::default();
        end(&mut kyber, 0, 500, 4, 4);
        end(&mut kyber, 1, 500, 2, 2);
        look(&mut kyber, 100);
        end(&mut kyber, 1, 500, 2, 15);
        look(&mut kyber, 100);
        assert_eq!(kyber.tokens()[1], 48, "one and a half times as late as aimed at: so many more");
    }

    #[test]
    fn nothing_is_looked_at_too_soon_or_on_too_little() {
        let mut kyber = Kyber::default();
        end(&mut kyber, 0, 500, 4, 4);
        end(&mut kyber, 1, 500, 2, 2);
        look(&mut kyber, 99);
        assert_eq!(kyber.tokens(), DEPTH);
        let mut few = Kyber::default();
        end(&mut few, 0, 499, 4, 4);
        end(&mut few, 1, 499, 2, 2);
        look(&mut few, 100);
        assert_eq!(few.tokens(), DEPTH, "fewer than 500 within a second");
        end(&mut few, 0, 1, 4, 4);
        end(&mut few, 1, 1, 2, 2);
        look(&mut few, 1100);
        assert_eq!(few.tokens()[1], 32);
    }
}
