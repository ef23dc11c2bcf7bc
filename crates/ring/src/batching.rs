//! Decides whether the thread runs under `SCHED_BATCH`, so that more events accumulate for each turn.
//!
//! Where a client shares a CPU with this thread, each request that the client submits wakes this thread at
//! once, which then processes a single request for two context switches and a system call. Under
//! `SCHED_BATCH` the thread does not preempt the client: at a queue depth of 32, most of 32 requests then
//! arrive in one turn. Where they do not share a CPU it makes no difference, and where another process
//! competes for the CPU, or the client waits for each reply, it would be slower. So the policy is tried, and
//! kept only while turns bring many more events at the same rate.
//!
//! Knows events and time only; its owner makes the system call.

use queue::Nanos;

/// Rates are measured over windows of at least this many events and 1 ms.
const WINDOW_EVENTS: u64 = 128;
const WINDOW_NS_MIN: u64 = 1_000_000;
/// Below one event per 0.5 ms there is nothing to accumulate.
const EVENT_NS_MAX: u64 = 500_000;
/// Windows between two trials; doubled, up to the maximum, after each trial that fails.
const PAUSE_MIN: u32 = 4;
const PAUSE_MAX: u32 = 1024;
/// Windows after which a successful policy is switched off for a new comparison.
const KEEP: u32 = 512;

/// Rate of events during a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pace {
    /// Nanoseconds per 16 events.
    time_ns: u64,
    /// Events per 16 turns.
    gathered: u64,
}

impl Pace {
    /// Whether turns bring at least twice as many events as `plain`, at the same rate of events (25 %
    /// tolerance).
    fn pays_against(self, plain: Pace) -> bool {
        self.gathered >= 2 * plain.gathered && 4 * self.time_ns <= 5 * plain.time_ns
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// `SCHED_OTHER`, for so many more windows.
    Plain(u32),
    /// `SCHED_BATCH` on trial; `plain` is the rate before.
    Trial { plain: Pace },
    /// The thread has a policy that its user has chosen, which is not changed.
    Never,
    /// `SCHED_BATCH`, for so many more windows; `pace` is the best rate seen.
    Batch { left: u32, pace: Pace },
}

/// State of the decision.
#[derive(Debug)]
pub(crate) struct Batching {
    state: State,
    pause: u32,
    events: u64,
    turns: u64,
    since: Nanos,
}

impl Batching {
    /// `plain`: the thread has the default policy, so it may be changed.
    pub(crate) fn new(now: Nanos, plain: bool) -> Batching {
        let state = if plain { State::Plain(PAUSE_MIN) } else { State::Never };
        Batching { state, pause: PAUSE_MIN, events: 0, turns: 0, since: now }
    }

    /// Records the number of events of a turn.
    #[inline]
    pub(crate) fn gathered(&mut self, events: usize) {
        self.events += events as u64;
        self.turns += u64::from(events > 0);
    }

    /// Checks the rate at time `now`. `Some`: switch `SCHED_BATCH` on or off.
    #[inline]
    pub(crate) fn look(&mut self, now: Nanos) -> Option<bool> {
        if self.events < WINDOW_EVENTS {
            return None;
        }
        self.window(now)
    }

    fn window(&mut self, now: Nanos) -> Option<bool> {
        let time_ns = now.since(self.since);
        if time_ns < WINDOW_NS_MIN {
            return None;
        }
        let pace =
            Pace { time_ns: time_ns * 16 / self.events, gathered: self.events * 16 / self.turns.max(1) };
        (self.events, self.turns, self.since) = (0, 0, now);
        let busy = pace.time_ns < EVENT_NS_MAX * 16;
        let (state, switch) = match self.state {
            State::Plain(0) if busy => (State::Trial { plain: pace }, Some(true)),
            State::Never => return None,
            State::Plain(left) => (State::Plain(left.saturating_sub(u32::from(busy))), None),
            State::Trial { plain } if pace.pays_against(plain) => {
                self.pause = PAUSE_MIN;
                (State::Batch { left: KEEP, pace }, None)
            }
            State::Trial { .. } => {
                self.pause = (2 * self.pause).min(PAUSE_MAX);
                (State::Plain(self.pause), Some(false))
            }
            // Events have become slower: the load has changed, or other processes need the CPU.
            State::Batch { left, pace: before } if left == 0 || pace.time_ns > 2 * before.time_ns => {
                (State::Plain(PAUSE_MIN), Some(false))
            }
            State::Batch { left, pace: before } => {
                let pace = if pace.time_ns < before.time_ns { pace } else { before };
                (State::Batch { left: left - 1, pace }, None)
            }
        };
        self.state = state;
        switch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates turns whose events and duration `cost` determines for the policy in force.
    struct Load {
        batching: Batching,
        now: Nanos,
        is_batch: bool,
        switches: u32,
    }

    impl Load {
        fn new() -> Load {
            Load { batching: Batching::new(Nanos(0), true), now: Nanos(0), is_batch: false, switches: 0 }
        }

        /// Returns how many of `events` came while the policy was `SCHED_BATCH`.
        fn run(&mut self, mut events: u64, cost: impl Fn(bool) -> (u64, u64)) -> u64 {
            let mut batched = 0;
            while events > 0 {
                let (brought, time_ns) = cost(self.is_batch);
                self.now = self.now.after(time_ns);
                self.batching.gathered(brought as usize);
                events = events.saturating_sub(brought);
                batched += if self.is_batch { brought } else { 0 };
                if let Some(wish) = self.batching.look(self.now) {
                    self.is_batch = wish;
                    self.switches += 1;
                }
            }
            batched
        }
    }

    #[test]
    fn a_faster_policy_is_kept() {
        let mut load = Load::new();
        let batched = load.run(1_000_000, |batch| if batch { (16, 64_000) } else { (2, 20_000) });
        assert!(batched > 950_000, "{batched}");
        assert!(load.switches > 2, "it is compared again now and then");
    }

    #[test]
    fn a_slower_policy_is_tried_less_and_less_often() {
        let mut load = Load::new();
        let batched = load.run(1_000_000, |_| (1, 10_000));
        assert!(batched < 5_000 && !load.is_batch, "{batched}");
        assert!(load.switches < 30, "{}", load.switches);
    }

    #[test]
    fn a_competing_process_ends_it() {
        let mut load = Load::new();
        load.run(100_000, |batch| if batch { (16, 64_000) } else { (2, 20_000) });
        assert!(load.is_batch);
        let batched = load.run(100_000, |batch| if batch { (1, 3_000_000) } else { (1, 30_000) });
        assert!(batched < 2_000, "{batched}");
    }

    #[test]
    fn a_slow_load_is_left_alone() {
        let mut load = Load::new();
        assert_eq!(load.run(100_000, |_| (1, 1_000_000)), 0);
        assert_eq!(load.switches, 0);
    }
}
