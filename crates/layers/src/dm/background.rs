//! Background work of targets, such as resynchronisation, which no request triggers. It runs on a thread that
//! may block.

use block::Bytes;
use queue::Nanos;
use std::io;

/// The background work of a target. Shared by the target's queues and the thread that runs it.
pub trait BackgroundWork: Send + Sync {
    /// Returns whether work is due. `now` is a time of the rings' clock.
    fn is_due(&self, now: Nanos) -> bool;

    /// Performs a part of the work. One thread at a time calls it, again and again while work is due.
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

    /// Writes to a device and flushes it, even if it rejects all other writes because a flush failed
    /// ([`Flags::AFTER_LOSS`](block::Flags::AFTER_LOSS)). The default is for devices that have no such state.
    ///
    /// # Errors
    /// The device's error.
    fn write_durably(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.write(device, at, from)?;
        self.flush(device)
    }
}
