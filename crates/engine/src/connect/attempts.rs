//! Attempts to connect to one server: the pauses between them, and their description for `show` and the log.
//!
//! Shared by all queues of an `nbd:` device. Each queue without a connection has one task that connects for
//! it, and so one entry.

use crate::log_limit::LogLimit;
use crate::retry::{backoff, peer_log_limit};
use crate::spec::format_time;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// State of the attempts of one queue.
#[derive(Clone, Default)]
struct Next {
    /// When the next attempt begins; empty during an attempt.
    at: Option<Instant>,
    /// Number of failures in a row.
    failures: u32,
    /// Why the last attempt failed or the connection was lost; empty before that.
    why: String,
}

/// All attempts to connect to one server.
pub(super) struct Attempts {
    server: String,
    /// The device that the server was first opened for, if known.
    device: Option<String>,
    /// By the number of the task.
    next: Mutex<BTreeMap<u64, Next>>,
    log: Arc<LogLimit>,
}

impl Attempts {
    pub(super) fn new(server: &str, device: Option<&str>) -> Attempts {
        let device = device.map(str::to_owned);
        Attempts { server: server.to_owned(), device, next: Mutex::default(), log: peer_log_limit() }
    }

    /// Returns the name of the device, for the log.
    pub(super) fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Next>> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a task that connects.
    pub(super) fn begin(self: &Arc<Attempts>) -> Attempt {
        let mut next = self.lock();
        let number = next.last_key_value().map_or(0, |(last, _)| last + 1);
        next.insert(number, Next::default());
        Attempt { of: self.clone(), number }
    }

    /// Returns whether a line about this server may be logged now. Others are counted, and the count is
    /// logged.
    pub(super) fn may_log(self: &Arc<Attempts>) -> bool {
        let of = self.clone();
        self.log.admit_or_report(move |suppressed| {
            tracing::warn!(
                device = of.device,
                server = of.server,
                suppressed,
                connecting = of.describe(),
                "connections to the server are lost repeatedly; log lines about that were suppressed"
            );
        })
    }

    /// Describes the state; of several queues, the one with the most failures.
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
            _ => format!("attempt {number} in progress"),
        };
        if worst.why.is_empty() { when } else { format!("{when} ({})", worst.why) }
    }
}

/// The attempts of one task, until it is dropped.
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

    /// Records why the last attempt failed or the connection was lost.
    pub(super) fn failed(&mut self, why: &str) {
        self.change(|next| why.clone_into(&mut next.why));
    }

    /// Waits until the next attempt is due after that many failures in a row.
    pub(super) async fn pause(&mut self, failures: u32) {
        let pause = backoff(failures);
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
