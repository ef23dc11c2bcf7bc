//! kyber: chooses the next request and limits the requests in flight per domain. The kernel's
//! block/kyber-iosched.c.
//!
//! Reads, writes, discards and other requests are domains, each with a number of tokens; a request in flight
//! holds one. Domains take turns, in batches. Latencies are counted in buckets of a quarter of the target:
//! the first four are good. A timer of 100 ms evaluates them: if a domain's latency at the device exceeds its
//! target (90th percentile), domains whose total latency (99th percentile) is within their targets lose
//! tokens in proportion, and a domain whose requests are late gains some.

use super::lists::Lists;
use super::values::{Parameter, Snapshot};
use block::{Op, Tag};
use queue::Nanos;

/// Number of domains: reads, writes, discards, and others, in the order in which they are served.
pub(super) const DOMAINS: usize = 4;
const OTHER: usize = 3;
/// Largest number of tokens of each domain (`kyber_depth`).
const DEPTH: [u32; DOMAINS] = [256, 128, 64, 16];
/// Requests that each domain may dispatch in a batch (`kyber_batch_size`).
const BATCH: [u32; DOMAINS] = [16, 8, 1, 1];
const DISCARD_TARGET_NS: u64 = 5_000_000_000;
/// The width of a bucket is the target shifted right by this number of bits.
const SHIFT: u32 = 2;
/// Number of buckets for latencies within the target.
const GOOD: usize = 1 << SHIFT;
const BUCKETS: usize = 2 << SHIFT;
/// The time from the first latency to the evaluation, in nanoseconds.
const TIMER_NS: u64 = 100_000_000;
/// Number of latencies that an evaluation needs, and how long it waits for that many.
const SAMPLES: u32 = 500;
const SAMPLES_NS: u64 = 1_000_000_000;

/// A histogram of latencies.
#[derive(Clone, Copy, Default, Debug)]
struct Latencies {
    buckets: [u32; BUCKETS],
    /// The time at which even a few latencies are evaluated. The kernel has one such time for both histograms
    /// of a domain.
    until: Option<Nanos>,
}

impl Latencies {
    fn add(&mut self, target_ns: u64, latency_ns: u64) {
        // A latency of 0 means that the request completed within one turn; it does not measure the device.
        if latency_ns > 0 {
            let bucket = (latency_ns - 1) / (target_ns >> SHIFT).max(1);
            self.buckets[(bucket as usize).min(BUCKETS - 1)] += 1;
        }
    }

    /// Returns the bucket of a percentile and clears the histogram; `None` if there are too few latencies.
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
    /// Latencies from dispatch (at the device), and from arrival (in total).
    device: Latencies,
    total: Latencies,
    /// The 99th percentile of total latency while the device was not congested.
    domain_p99: Option<usize>,
}

/// The state of one queue.
#[derive(Debug)]
pub(super) struct Kyber {
    domains: [Domain; DOMAINS],
    current: usize,
    batched: u32,
    /// The time of the next evaluation; `None`: there are no latencies.
    timer_at: Option<Nanos>,
}

impl Default for Kyber {
    fn default() -> Kyber {
        let domains = DEPTH.map(|tokens| Domain { tokens, ..Domain::default() });
        Kyber { domains, current: 0, batched: 0, timer_at: None }
    }
}

/// Returns the domain of an operation.
pub(super) fn class(op: Op) -> usize {
    match op {
        Op::Read => 0,
        Op::Write => 1,
        Op::Discard => 2,
        _ => OTHER,
    }
}

impl Kyber {
    /// Returns the next request to dispatch, with its domain.
    pub(super) fn next(&mut self, lists: &Lists) -> Option<(usize, Tag)> {
        if self.batched < BATCH[self.current]
            && let Some(lead) = self.head(lists, self.current)
        {
            self.batched += 1;
            return Some((self.current, lead));
        }
        self.batched = 0;
        for _ in 0..DOMAINS {
            self.current = (self.current + 1) % DOMAINS;
            if let Some(lead) = self.head(lists, self.current) {
                self.batched = 1;
                return Some((self.current, lead));
            }
        }
        None
    }

    fn head(&self, lists: &Lists, domain: usize) -> Option<Tag> {
        let Domain { tokens, used, .. } = self.domains[domain];
        if used < tokens { lists.oldest(domain) } else { None }
    }

    /// Counts a request of a domain that is dispatched.
    pub(super) fn started(&mut self, domain: usize) {
        self.domains[domain].used += 1;
    }

    /// Counts the completion of a request that arrived and was dispatched at these times.
    pub(super) fn ended(
        &mut self,
        domain: usize,
        arrived: Nanos,
        started: Nanos,
        now: Nanos,
        values: &Snapshot,
    ) {
        let of_it = &mut self.domains[domain];
        of_it.used -= 1;
        if domain == OTHER {
            return;
        }
        let target = target(domain, values);
        of_it.total.add(target, now.since(arrived));
        of_it.device.add(target, now.since(started));
        self.timer_at.get_or_insert(now.after(TIMER_NS));
    }

    /// Evaluates latencies and adjusts tokens if the evaluation is due.
    pub(super) fn evaluate(&mut self, now: Nanos) {
        if self.timer_at.is_none_or(|at| now < at) {
            return;
        }
        self.timer_at = None;
        let mut congested = false;
        for domain in &mut self.domains[..OTHER] {
            let p90 = domain.device.percentile(90, now);
            congested |= p90.is_some_and(|bucket| bucket >= GOOD);
        }
        for (domain, most) in self.domains[..OTHER].iter_mut().zip(DEPTH) {
            let mut p99 = domain.total.percentile(99, now);
            if congested {
                p99 = p99.or(domain.domain_p99);
                domain.domain_p99 = None;
            } else if p99.is_some() {
                domain.domain_p99 = p99;
            }
            if let Some(bucket) = p99
                && (congested || bucket >= GOOD)
            {
                domain.tokens = ((domain.tokens * (bucket as u32 + 1)) >> SHIFT).clamp(1, most);
            }
        }
    }

    /// Returns the tokens of each domain.
    #[cfg(test)]
    pub(super) fn tokens(&self) -> [u32; DOMAINS] {
        self.domains.map(|domain| domain.tokens)
    }
}

fn target(domain: usize, values: &Snapshot) -> u64 {
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

    /// Completes `count` requests of a domain with these latencies at the device and in total.
    fn end(kyber: &mut Kyber, domain: usize, count: u32, device_ms: u64, total_ms: u64) {
        let values = Values::new(&Choice::of(Policy::Kyber)).snapshot();
        let now = Nanos(10_000 * MS);
        for _ in 0..count {
            kyber.started(domain);
            let (arrived, started) = (now.0 - total_ms * MS, now.0 - device_ms * MS);
            kyber.ended(domain, Nanos(arrived), Nanos(started), now, &values);
        }
    }

    fn evaluate(kyber: &mut Kyber, ms: u64) {
        kyber.evaluate(Nanos((10_000 + ms) * MS));
    }

    #[test]
    fn tokens_stay_at_their_maximum_while_latencies_are_good() {
        let mut kyber = Kyber::default();
        end(&mut kyber, 0, 500, 1, 1);
        end(&mut kyber, 1, 500, 5, 5);
        evaluate(&mut kyber, 100);
        assert_eq!(kyber.tokens(), DEPTH);
    }

    #[test]
    fn a_congested_device_takes_tokens_from_domains_within_their_target() {
        let mut kyber = Kyber::default();
        // Reads take twice their target; writes less than a quarter of theirs.
        end(&mut kyber, 0, 500, 4, 4);
        end(&mut kyber, 1, 500, 2, 2);
        evaluate(&mut kyber, 100);
        assert_eq!(kyber.tokens(), [256, 32, 64, 16], "reads keep all tokens");
        for _ in 0..9 {
            end(&mut kyber, 0, 500, 4, 4);
            end(&mut kyber, 1, 500, 2, 2);
            evaluate(&mut kyber, 100);
        }
        assert_eq!(kyber.tokens()[1], 1, "one token is always left");
    }

    #[test]
    fn a_throttled_domain_above_its_target_gains_tokens() {
        let mut kyber = Kyber::default();
        end(&mut kyber, 0, 500, 4, 4);
        end(&mut kyber, 1, 500, 2, 2);
        evaluate(&mut kyber, 100);
        end(&mut kyber, 1, 500, 2, 15);
        evaluate(&mut kyber, 100);
        assert_eq!(kyber.tokens()[1], 48, "latency is 1.5 times the target: 1.5 times the tokens");
    }

    #[test]
    fn latencies_are_not_evaluated_early_or_on_few_samples() {
        let mut kyber = Kyber::default();
        end(&mut kyber, 0, 500, 4, 4);
        end(&mut kyber, 1, 500, 2, 2);
        evaluate(&mut kyber, 99);
        assert_eq!(kyber.tokens(), DEPTH);
        let mut few = Kyber::default();
        end(&mut few, 0, 499, 4, 4);
        end(&mut few, 1, 499, 2, 2);
        evaluate(&mut few, 100);
        assert_eq!(few.tokens(), DEPTH, "fewer than 500 samples within a second");
        end(&mut few, 0, 1, 4, 4);
        end(&mut few, 1, 1, 2, 2);
        evaluate(&mut few, 1100);
        assert_eq!(few.tokens()[1], 32);
    }
}
