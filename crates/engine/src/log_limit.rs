//! Limits on log lines: a number per window of time; the next line reports how many were left out.
//!
//! For events that a peer or a device can cause thousands of times a second. It takes a lock, so it is used
//! only where something failed, not for requests that succeed.

use queue::Nanos;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A limit of lines per window.
#[derive(Debug)]
pub struct LogLimit {
    lines_max: u32,
    window_ns: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Start of the window; empty before the first line.
    began: Option<Nanos>,
    lines: u32,
    left_out: u64,
}

impl State {
    fn is_admitted(&mut self, now: Nanos, limit: &LogLimit) -> bool {
        if self.began.is_none_or(|began| now.since(began) >= limit.window_ns) {
            (self.began, self.lines) = (Some(now), 0);
        }
        let is_admitted = self.lines < limit.lines_max;
        self.lines += u32::from(is_admitted);
        is_admitted
    }
}

/// Answer to a request for a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// The line may be logged.
    Line {
        /// Events without a line since the last one.
        left_out: u64,
    },
    /// The line is left out.
    LeftOut {
        /// Whether it is the first one since the last line or report.
        is_first: bool,
    },
}

/// One line in ten seconds.
impl Default for LogLimit {
    fn default() -> LogLimit {
        LogLimit::new(1, Duration::from_secs(10))
    }
}

impl LogLimit {
    /// Admits `lines_max` lines per `window`.
    pub const fn new(lines_max: u32, window: Duration) -> LogLimit {
        let state = State { began: None, lines: 0, left_out: 0 };
        LogLimit { lines_max, window_ns: window.as_nanos() as u64, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests a line about `count` events.
    pub fn admit(&self, now: Nanos, count: u64) -> Admission {
        let mut state = self.lock();
        if state.is_admitted(now, self) {
            return Admission::Line { left_out: std::mem::take(&mut state.left_out) };
        }
        let is_first = state.left_out == 0;
        state.left_out += count;
        Admission::LeftOut { is_first }
    }

    /// Requests a line about one event now. Returns the number of events since the last line, including this
    /// one; `None`: no line.
    pub fn admit_now(&self) -> Option<u64> {
        match self.admit(ring::clock(), 1) {
            Admission::Line { left_out } => Some(left_out + 1),
            Admission::LeftOut { .. } => None,
        }
    }

    /// Returns how many events were left out if their window is over: they are due for a line of their own.
    pub fn overdue(&self, now: Nanos) -> Option<u64> {
        let mut state = self.lock();
        let is_over = state.began.is_some_and(|began| now.since(began) >= self.window_ns);
        (is_over && state.left_out > 0).then(|| std::mem::take(&mut state.left_out))
    }

    /// Whether events were left out that no line has counted yet.
    pub fn has_left_out(&self) -> bool {
        self.lock().left_out > 0
    }

    /// Requests a line now. Must be called on a tokio runtime: with the first line that is refused, `report`
    /// is scheduled for the end of the window, with the number of lines left out by then. Admitted lines do
    /// not count them.
    pub fn admit_or_report(self: &Arc<Self>, report: impl FnOnce(u64) + Send + 'static) -> bool {
        let mut state = self.lock();
        if state.is_admitted(ring::clock(), self) {
            return true;
        }
        state.left_out += 1;
        if state.left_out == 1 {
            let limit = self.clone();
            tokio::spawn(async move {
                // The window is over by then, whenever it began.
                tokio::time::sleep(Duration::from_nanos(limit.window_ns)).await;
                let left_out = std::mem::take(&mut limit.lock().left_out);
                report(left_out);
            });
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn lines_are_limited_in_each_window_and_the_others_counted() {
        let limit = LogLimit::new(2, SECOND);
        let at = |ms: u64| Nanos(ms * 1_000_000);
        assert_eq!(limit.admit(at(5000), 1), Admission::Line { left_out: 0 });
        assert_eq!(limit.admit(at(5100), 1), Admission::Line { left_out: 0 });
        assert!(!limit.has_left_out());
        assert_eq!(limit.admit(at(5200), 3), Admission::LeftOut { is_first: true });
        assert_eq!(limit.admit(at(5999), 1), Admission::LeftOut { is_first: false });
        assert!(limit.has_left_out());
        assert_eq!(limit.admit(at(6000), 1), Admission::Line { left_out: 4 });
        assert_eq!(limit.admit(at(6001), 1), Admission::Line { left_out: 0 });
    }

    #[test]
    fn left_out_lines_are_due_when_their_window_is_over() {
        let limit = LogLimit::new(1, SECOND);
        assert_eq!(limit.overdue(Nanos(9)), None);
        limit.admit(Nanos(10), 1);
        limit.admit(Nanos(11), 2);
        assert_eq!([limit.overdue(Nanos(12)), limit.overdue(Nanos(1_000_000_010))], [None, Some(2)]);
        assert_eq!(limit.overdue(Nanos(2_000_000_000)), None, "once");
    }

    #[test]
    fn one_line_per_window_is_admitted_and_counts_the_others() {
        let limit = LogLimit::new(1, Duration::from_secs(3600));
        assert_eq!([limit.admit_now(), limit.admit_now(), limit.admit_now()], [Some(1), None, None]);
        limit.lock().began = None;
        assert_eq!(limit.admit_now(), Some(3));
    }

    #[tokio::test]
    async fn lines_beyond_the_limit_are_counted_and_reported() {
        let limit = Arc::new(LogLimit::new(8, Duration::from_millis(200)));
        let reported = Arc::new(AtomicU64::new(0));
        let mut logged = 0;
        for _ in 0..100 {
            let reported = reported.clone();
            let report = move |left_out| _ = reported.fetch_add(left_out, SeqCst);
            logged += u32::from(limit.admit_or_report(report));
        }
        // A busy machine may get to a second window.
        assert!((8..100).contains(&logged), "{logged}");
        let all_reported = async {
            while reported.load(SeqCst) + u64::from(logged) < 100 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), all_reported)
            .await
            .expect("what was left out is reported");
        assert!(limit.admit_or_report(|_| {}), "a new window");
    }
}
