//! Pauses between retries, and a limit on the log lines about them.
//!
//! Every loop of the control plane that reconnects uses both: a peer that accepts connections and closes them
//! at once must cause neither a connection storm nor a log that fills the disk.

use crate::log_limit::LogLimit;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

/// Pause after the first failure. Each later one doubles it.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// Longest pause.
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Lines about one peer that are logged per [`WINDOW`]; the others are counted.
const LINES_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_secs(10);

/// Returns the pause before the next attempt after that many failures in a row: none after 0, then 10 ms, 20
/// ms and so on up to 1 s, less up to half at random, so that clients of one lost server do not all come back
/// at once.
pub fn backoff(failures: u32) -> Duration {
    let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
    let pause = PAUSE_MIN.saturating_mul(1 << doublings.min(16)).min(PAUSE_MAX);
    // Each RandomState has its own keys.
    let random = RandomState::new().hash_one(failures) >> 40;
    pause - (pause / 2).mul_f64(random as f64 / (1 << 24) as f64)
}

/// Creates a limit on log lines about one peer.
pub fn peer_log_limit() -> Arc<LogLimit> {
    Arc::new(LogLimit::new(LINES_MAX, WINDOW))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_cap_and_differ() {
        assert_eq!(backoff(0), Duration::ZERO);
        for (failures, most_ms) in [(1, 10), (2, 20), (5, 160), (8, 1000), (40, 1000), (u32::MAX, 1000)] {
            let pauses: Vec<Duration> = (0..64).map(|_| backoff(failures)).collect();
            let most = Duration::from_millis(most_ms);
            assert!(pauses.iter().all(|&pause| pause >= most / 2 && pause <= most), "{failures}: {pauses:?}");
            assert!(pauses.iter().any(|&pause| pause != pauses[0]), "{failures}: no jitter");
        }
    }
}
