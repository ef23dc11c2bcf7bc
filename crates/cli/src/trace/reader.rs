//! Detects that the process that reads a trace from a pipe on stdout has exited.
//!
//! A write to the pipe would fail, but an idle device produces nothing to write: without this check the
//! trace would occupy the device until its next request.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::Duration;

/// Interval at which stdout is polled: the longest time until a device can be traced again after its reader
/// exited.
const PERIOD: Duration = Duration::from_millis(100);

/// The read end of stdout, if the trace goes there.
pub(super) struct Reader {
    is_watched: bool,
}

impl Reader {
    /// Watches stdout if `output` (`-o`) is missing or `-`.
    pub(super) fn new(output: Option<&str>) -> Reader {
        Reader { is_watched: matches!(output, None | Some("-")) }
    }

    /// Returns once the read end is closed; never, if stdout is no pipe or socket. Must be called within a runtime.
    pub(super) async fn gone(&self) {
        while !(self.is_watched && is_closed()) {
            tokio::time::sleep(PERIOD).await;
        }
    }
}

/// Whether stdout's read end is closed: poll(2) reports `POLLERR` for a pipe without a reader.
fn is_closed() -> bool {
    let stdout = std::io::stdout();
    let mut polled = [PollFd::new(&stdout, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&at_once)).is_ok() && polled[0].revents().contains(PollFlags::ERR)
}
