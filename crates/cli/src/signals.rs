//! Signals of a server process: the first SIGINT, SIGTERM or SIGHUP drains and ends it, the second ends it at once;
//! SIGUSR1 lists the requests in flight.

use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// A receiver of SIGINT, SIGTERM and SIGHUP. Signals are queued from its creation on.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    /// Registers handlers, after which the signals no longer end the process. Must be called within a runtime.
    pub(crate) fn new() -> io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Registers a handler of SIGUSR1, which asks for a list of requests in flight. Must be called within a runtime.
    pub(crate) fn user() -> io::Result<Signal> {
        signal(SignalKind::user_defined1())
    }

    /// Waits for the next signal and returns its number.
    pub(crate) async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
            _ = self.hang_up.recv() => 1,
        }
    }
}

/// Returns the exit status that shells use for a process ended by `signal`.
pub(crate) fn status_of(signal: u8) -> u8 {
    128 + signal
}
