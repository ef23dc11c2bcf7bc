//! The signals that end a process that serves, the first one politely, the second one at once; and the one that asks.

use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT, SIGTERM and SIGHUP, kept from the moment this is made.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    /// Must be called within a runtime. The signals no longer end the process by themselves.
    pub(crate) fn new() -> io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// SIGUSR1, kept from the moment this is made: somebody asks what is under way. Must be called within a runtime.
    pub(crate) fn user() -> io::Result<Signal> {
        signal(SignalKind::user_defined1())
    }

    /// The next one's number.
    pub(crate) async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
            _ = self.hang_up.recv() => 1,
        }
    }
}

/// The status of a process that a signal ended, as shells count it.
pub(crate) fn status_of(signal: u8) -> u8 {
    128 + signal
}
