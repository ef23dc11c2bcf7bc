//! Polls several times a second while there is something to poll, and sleeps while there is nothing.

use std::time::Duration;
use tokio::sync::Notify;

/// Polling interval.
const PERIOD: Duration = Duration::from_millis(50);

/// Calls `poll` every [`PERIOD`] while it returns true. After it has returned false, waits for `came` before
/// the next call.
pub(crate) async fn poll_while_any(came: &Notify, mut poll: impl FnMut() -> bool) {
    loop {
        if poll() {
            tokio::time::sleep(PERIOD).await;
        } else {
            came.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    #[tokio::test]
    async fn nothing_is_polled_until_notified() {
        let (came, polls) = (Arc::new(Notify::new()), Arc::new(AtomicU32::new(0)));
        let there = Arc::new(AtomicU32::new(0));
        let task = {
            let (came, polls, there) = (came.clone(), polls.clone(), there.clone());
            tokio::spawn(async move {
                poll_while_any(&came, || {
                    polls.fetch_add(1, SeqCst);
                    there.load(SeqCst) > 0
                })
                .await;
            })
        };
        tokio::time::sleep(PERIOD * 5).await;
        assert!(polls.load(SeqCst) <= 1);
        there.store(1, SeqCst);
        came.notify_one();
        let again = async {
            while polls.load(SeqCst) < 4 {
                tokio::time::sleep(PERIOD).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), again).await.expect("it polls again and again");
        task.abort();
    }
}
