//! What a target has to do without being asked by a request: done by whoever looks after targets, on a thread that may wait.

use block::Bytes;
use queue::Nanos;
use std::io;

/// Something to do now and then. Shared between queues and the thread that does it.
pub trait Chore: Send + Sync {
    /// Whether there is something to do. `now`: on the clock of the rings.
    fn is_due(&self, now: Nanos) -> bool;

    /// Do some of it; asked again while it is due. One thread at a time does this.
    fn step(&self, now: Nanos, disks: &mut dyn Disks);
}

/// The devices of a target, by number. Whole logical blocks.
pub trait Disks {
    /// Read.
    ///
    /// # Errors
    /// What the device answered.
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()>;

    /// Write.
    ///
    /// # Errors
    /// What the device answered.
    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()>;

    /// Put what was written onto stable storage.
    ///
    /// # Errors
    /// What the device answered.
    fn flush(&mut self, device: usize) -> io::Result<()>;

    /// Write and put that onto stable storage, also on a device that takes nothing more because a sync failed
    /// ([`Flags::AFTER_LOSS`](block::Flags::AFTER_LOSS)). By default for devices that know no such state.
    ///
    /// # Errors
    /// What the device answered.
    fn record(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.write(device, at, from)?;
        self.flush(device)
    }
}
