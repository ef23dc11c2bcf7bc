//! Says what is going on when it takes over a second, on a terminal, on stderr, and takes it back.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// How long something may take without a word.
const PATIENCE: Duration = Duration::from_secs(1);

/// Awaits `work`; `message` is shown with the time that passed once that is over a second.
pub(crate) async fn shown<F: Future>(message: &str, work: F) -> F::Output {
    let mut work = std::pin::pin!(work);
    if let Ok(done) = tokio::time::timeout(PATIENCE, &mut work).await {
        return done;
    }
    if !std::io::stderr().is_terminal() {
        return work.await;
    }
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
    let bar = ProgressBar::new_spinner().with_message(message.to_owned()).with_elapsed(PATIENCE);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(Duration::from_millis(100));
    let done = work.await;
    bar.finish_and_clear();
    done
}
