//! Attempts to connect to one server: the pauses between them, what `show` tells of them, and what of them is logged.
//!
//! Shared by all queues of an `nbd:` device. A queue that has no connection has one task that connects for it, and so one entry.

use crate::log_limit::LogLimit;
use crate::pace::{lines_about_a_peer, pause_after};
use crate::spec::format_time;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What is attempted for one queue.
#[derive(Clone, Default)]
struct Next {
    /// When the next attempt begins; empty while one is being made.
    at: Option<Instant>,
    /// How many failed before it.
    failures: u32,
    /// How the last one failed, or why the connection before was lost; empty before that.
    why: String,
}

/// All attempts to connect to one server.
pub(super) struct Attempts {
    server: String,
    /// By a number that each task gets.
    next: Mutex<BTreeMap<u64, Next>>,
    log: Arc<LogLimit>,
}

impl Attempts {
    pub(super) fn new(server: &str) -> Attempts {
        Attempts { server: server.to_owned(), next: Mutex::default(), log: lines_about_a_peer() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Next>> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A task begins to connect.
    pub(super) fn begin(self: &Arc<Attempts>) -> Attempt {
        let mut next = self.lock();
        let number = next.last_key_value().map_or(0, |(last, _)| last + 1);
        next.insert(number, Next::default());
        Attempt { of: self.clone(), number }
    }

    /// Whether a line about this server may be logged now. Those that may not are counted, and the log gets their number.
    pub(super) fn may_log(self: &Arc<Attempts>) -> bool {
        let of = self.clone();
        self.log.admits_or_reports(move |suppressed| {
            tracing::warn!(
                server = of.server,
                suppressed,
                connecting = of.describe(),
                "connections to the server come and go; lines about that were suppressed"
            );
        })
    }

    /// What goes on, for people: of several queues, the one that failed most often.
    pub(super) fn describe(&self) -> String {
        let next = self.lock();
        let Some(worst) = next.values().max_by_key(|next| next.failures) else { return "no".to_owned() };
        let number = worst.failures.saturating_add(1);
        let now = Instant::now();
        let when = match worst.at.map(|at| at.saturating_duration_since(now)) {
            Some(left) if !left.is_zero() => {
                format!(
                    "attempt {number} in {}",
                    format_time(Duration::from_millis(left.as_millis() as u64 + 1))
                )
            }
            _ => format!("attempt {number} is being made"),
        };
        if worst.why.is_empty() { when } else { format!("{when} ({})", worst.why) }
    }
}

/// The attempts of one task. They are over when it is dropped.
pub(super) struct Attempt {
    of: Arc<Attempts>,
    number: u64,
}

impl Attempt {
    fn change(&self, change: impl FnOnce(&mut Next)) {
        if let Some(next) = self.of.lock().get_mut(&self.number) {
            change(next);
        }
    }

    /// The last one failed, or the connection before was lost, for that reason.
    pub(super) fn failed(&mut self, why: &str) {
        self.change(|next| why.clone_into(&mut next.why));
    }

    /// Waits until the next one is due after so many failures in a row.
    pub(super) async fn pause(&mut self, failures: u32) {
        let pause = pause_after(failures);
        self.change(|next| (next.at, next.failures) = (Some(Instant::now() + pause), failures));
        tokio::time::sleep(pause).await;
        self.change(|next| next.at = None);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.of.lock().remove(&self.number);
    }
}
