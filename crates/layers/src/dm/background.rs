//! Background work of targets: what no request triggers, such as resynchronisation. It runs on a thread that
//! may block.

use block::Bytes;
use queue::Nanos;
use std::io;

/// The background work of a target. Shared by the target's queues and the thread that runs it.
pub trait BackgroundWork: Send + Sync {
    /// Whether there is something to do. `now`: on the clock of the rings.
    fn is_due(&self, now: Nanos) -> bool;

    /// Does a part of the work. Called again while it is due, by one thread at a time.
    fn step(&self, now: Nanos, disks: &mut dyn Disks);
}

/// Blocking I/O to the devices of a target, by number, in whole logical blocks.
pub trait Disks {
    /// Reads from a device.
    ///
    /// # Errors
    /// The device's error.
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()>;

    /// Writes to a device.
    ///
    /// # Errors
    /// The device's error.
    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()>;

    /// Flushes a device: earlier writes are on stable storage afterwards.
    ///
    /// # Errors
    /// The device's error.
    fn flush(&mut self, device: usize) -> io::Result<()>;

    /// Writes and flushes, also to a device that refuses all other writes because a flush failed
    /// ([`Flags::AFTER_LOSS`](block::Flags::AFTER_LOSS)). The default is for devices without that state.
    ///
    /// # Errors
    /// The device's error.
    fn write_durably(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.write(device, at, from)?;
        self.flush(device)
    }
}
