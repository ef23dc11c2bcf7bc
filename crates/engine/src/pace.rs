//! How often something that fails is tried again, and how many lines the log gets about it.
//!
//! Every loop of the control plane that connects again uses both: a peer that accepts and hangs up at once may cost neither a
//! storm of connections nor a log that fills the disk.

use crate::log_limit::LogLimit;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

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

/// Limits the log to a few lines about one peer.
pub(crate) fn lines_about_a_peer() -> Arc<LogLimit> {
    Arc::new(LogLimit::new(LINES_MAX, WINDOW))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
