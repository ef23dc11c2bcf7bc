//! How often something that fails is tried again, and how many lines the log gets about it.
//!
//! Every loop of the control plane that connects again uses both: a peer that accepts and hangs up at once may cost neither a
//! storm of connections nor a log that fills the disk.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The pause after the first failure. Each later one doubles it.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// The longest pause.
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Lines about one peer that are logged in a [`WINDOW`]; the others are counted.
const LINES_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_secs(10);

/// How long to wait before the next attempt after so many failures in a row: not at all after none, then 10 ms, 20 ms and so
/// on up to 1 s, less up to half of it at random, so that clients that lost the same server do not all come back at once.
pub(crate) fn pause_after(failures: u32) -> Duration {
    let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
    let pause = PAUSE_MIN.saturating_mul(1 << doublings.min(16)).min(PAUSE_MAX);
    // Each RandomState has keys of its own.
    let random = RandomState::new().hash_one(failures) >> 40;
    pause - (pause / 2).mul_f64(random as f64 / (1 << 24) as f64)
}

/// Limits the log to a few lines about one peer in 10 s, and reports how many lines it left out.
#[derive(Clone)]
pub(crate) struct LogLimit {
    window: Arc<Mutex<Window>>,
    length: Duration,
}

impl Default for LogLimit {
    fn default() -> LogLimit {
        LogLimit { window: Arc::default(), length: WINDOW }
    }
}

#[derive(Default)]
struct Window {
    /// When it began; empty before the first line.
    began: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    fn lock(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a line may be logged now. Must be called on a tokio runtime: with the first line that may not, `report` is
    /// scheduled for the end of the window, with how many were suppressed by then.
    pub(crate) fn admits(&self, report: impl FnOnce(u64) + Send + 'static) -> bool {
        let mut window = self.lock();
        let now = Instant::now();
        let began = match window.began {
            Some(began) if now.duration_since(began) < self.length => began,
            _ => {
                (window.began, window.lines) = (Some(now), 0);
                now
            }
        };
        if window.lines < LINES_MAX {
            window.lines += 1;
            return true;
        }
        window.suppressed += 1;
        if window.suppressed == 1 {
            let limit = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep_until((began + limit.length).into()).await;
                let suppressed = std::mem::take(&mut limit.lock().suppressed);
                report(suppressed);
            });
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    #[test]
    fn pauses_double_up_to_a_cap_and_differ() {
        assert_eq!(pause_after(0), Duration::ZERO);
        for (failures, most_ms) in [(1, 10), (2, 20), (5, 160), (8, 1000), (40, 1000), (u32::MAX, 1000)] {
            let pauses: Vec<Duration> = (0..64).map(|_| pause_after(failures)).collect();
            let most = Duration::from_millis(most_ms);
            assert!(pauses.iter().all(|&pause| pause >= most / 2 && pause <= most), "{failures}: {pauses:?}");
            assert!(pauses.iter().any(|&pause| pause != pauses[0]), "{failures}: no jitter");
        }
    }

    #[tokio::test]
    async fn lines_beyond_the_limit_are_counted_and_reported() {
        let limit = LogLimit { length: Duration::from_millis(200), ..LogLimit::default() };
        let reported = Arc::new(AtomicU64::new(0));
        let mut logged = 0;
        for _ in 0..100 {
            let reported = reported.clone();
            logged += u32::from(limit.admits(move |suppressed| _ = reported.fetch_add(suppressed, SeqCst)));
        }
        // A machine that is busy may get to a second window.
        assert!((LINES_MAX..100).contains(&logged), "{logged}");
        let all_told = async {
            while reported.load(SeqCst) + u64::from(logged) < 100 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), all_told).await.expect("what was left out is reported");
        assert!(limit.admits(|_| {}), "a new window");
    }
}
