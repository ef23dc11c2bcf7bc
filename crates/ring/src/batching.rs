//! Whether the thread asks the scheduler to be woken with less haste (`SCHED_BATCH`), so that more gathers for each of
//! its turns.
//!
//! Where a client and this thread share a CPU, each request that the client starts wakes this thread at once, which
//! then carries one request for two changes of context and a system call. A thread of the other policy waits until the
//! client can do no more without an answer: at a depth of 32, most of 32 requests then come in one turn. Where they do
//! not share one it makes no difference, and where something else hogs the CPU, or the client waits for each answer,
//! it would do harm. So it is tried, and kept only while turns bring much more and events come no slower.
//!
//! Knows events and time, nothing else; the system call is its owner's.

use queue::Nanos;

/// Rates are taken over so many events, and this long at least: 1 ms.
const WINDOW_EVENTS: u64 = 128;
const WINDOW_NS_MIN: u64 = 1_000_000;
/// Slower than one event in half a millisecond there is nothing to gather.
const EVENT_NS_MAX: u64 = 500_000;
/// Windows between two tries at first; twice as many each time that it does not pay.
const PAUSE_MIN: u32 = 4;
const PAUSE_MAX: u32 = 1024;
/// Windows after which what was found to pay is tried again without.
const KEEP: u32 = 512;

/// How a window went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pace {
    /// Nanoseconds for 16 events.
    time_ns: u64,
    /// Events in 16 turns.
    gathered: u64,
}

impl Pace {
    /// Turns bring twice as much, and events come as fast, give or take what chance does.
    fn pays_against(self, plain: Pace) -> bool {
        self.gathered >= 2 * plain.gathered && 4 * self.time_ns <= 5 * plain.time_ns
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Plain, for so many more windows.
    Plain(u32),
    /// On trial, against the pace that there was without.
    Trial { plain: Pace },
    /// The thread has a policy that someone chose for it.
    Never,
    /// It pays, for so many more windows, at this pace.
    Batch { left: u32, pace: Pace },
}

/// What has been learnt.
#[derive(Debug)]
pub(crate) struct Batching {
    state: State,
    pause: u32,
    events: u64,
    turns: u64,
    since: Nanos,
}

impl Batching {
    /// `plain`: the thread is scheduled as threads are unless someone wants it otherwise.
    pub(crate) fn new(now: Nanos, plain: bool) -> Batching {
        let state = if plain { State::Plain(PAUSE_MIN) } else { State::Never };
        Batching { state, pause: PAUSE_MIN, events: 0, turns: 0, since: now }
    }

    /// A turn has brought so many events.
    #[inline]
    pub(crate) fn gathered(&mut self, events: usize) {
        self.events += events as u64;
        self.turns += u64::from(events > 0);
    }

    /// The clock says `now`. `Some`: have the scheduler treat the thread so from here on.
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
        let (state, wish) = match self.state {
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
            // Times have changed: the load is another, or the CPU is wanted by others.
            State::Batch { left, pace: before } if left == 0 || pace.time_ns > 2 * before.time_ns => {
                (State::Plain(PAUSE_MIN), Some(false))
            }
            State::Batch { left, pace: before } => {
                let pace = if pace.time_ns < before.time_ns { pace } else { before };
                (State::Batch { left: left - 1, pace }, None)
            }
        };
        self.state = state;
        wish
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Drives it with turns that bring so many events, and take so long, as `cost` says for the policy in force.
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

        /// How many of `events` came while the policy was the other one.
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
    fn what_pays_is_kept() {
        let mut load = Load::new();
        let batched = load.run(1_000_000, |batch| if batch { (16, 64_000) } else { (2, 20_000) });
        assert!(batched > 950_000, "{batched}");
        assert!(load.switches > 2, "it is looked at again now and then");
    }

    #[test]
    fn what_does_not_pay_is_tried_ever_less_often() {
        let mut load = Load::new();
        let batched = load.run(1_000_000, |_| (1, 10_000));
        assert!(batched < 5_000 && !load.is_batch, "{batched}");
        assert!(load.switches < 30, "{}", load.switches);
    }

    #[test]
    fn a_hog_that_comes_ends_it() {
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
