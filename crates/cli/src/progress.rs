//! Shows a spinner on stderr while an operation takes longer than a second, if stderr is a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// Time before the spinner appears.
const SPINNER_DELAY: Duration = Duration::from_secs(1);

/// Awaits `work`; shows `message` with the elapsed time after [`SPINNER_DELAY`].
pub(crate) async fn shown<F: Future>(message: &str, work: F) -> F::Output {
    let mut work = std::pin::pin!(work);
    if let Ok(done) = tokio::time::timeout(SPINNER_DELAY, &mut work).await {
        return done;
    }
    if !std::io::stderr().is_terminal() {
        return work.await;
    }
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
    let bar = ProgressBar::new_spinner().with_message(message.to_owned()).with_elapsed(SPINNER_DELAY);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(Duration::from_millis(100));
    let done = work.await;
    bar.finish_and_clear();
    done
}
