//! What the control plane looks at a few times a second while there is something to look at, and not at all while there is
//! nothing.

use std::time::Duration;
use tokio::sync::Notify;

/// How often it looks.
const PERIOD: Duration = Duration::from_millis(50);

/// Look again and again. `look` says whether there was anything; if not, the next look is when something has come.
pub(crate) async fn while_any(came: &Notify, mut look: impl FnMut() -> bool) {
    loop {
        if look() {
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
    async fn what_is_not_there_is_not_looked_for() {
        let (came, looks) = (Arc::new(Notify::new()), Arc::new(AtomicU32::new(0)));
        let there = Arc::new(AtomicU32::new(0));
        let task = {
            let (came, looks, there) = (came.clone(), looks.clone(), there.clone());
            tokio::spawn(async move {
                while_any(&came, || {
                    looks.fetch_add(1, SeqCst);
                    there.load(SeqCst) > 0
                })
                .await;
            })
        };
        tokio::time::sleep(PERIOD * 5).await;
        assert!(looks.load(SeqCst) <= 1);
        there.store(1, SeqCst);
        came.notify_one();
        let again = async {
            while looks.load(SeqCst) < 4 {
                tokio::time::sleep(PERIOD).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), again).await.expect("it looks again and again");
        task.abort();
    }
}
