//! Device-mapper targets: one file each, behind one trait.
//!
//! A table line is `start length type arguments…`. [`rows`](rows()) lists the target types.
//! [`TargetType::construct`] parses the arguments and opens the devices they name through [`Devices`], which
//! the loader of the table implements. It returns the shared part, a [`Target`]: a [`Layer`]
//! over the opened devices, in the order of opening, that also answers `dmsetup status`, `table` and
//! `message`. [`TableLayer`] concatenates the targets of a table and splits requests at target boundaries and
//! at every multiple of [`max_io_len`](Target::max_io_len).
//!
//! Offsets are relative to the target's start. A request never crosses the target's end or a multiple of its
//! `max_io_len`, except discards and write-zeroes for a target that [splits those
//! itself](Target::splits_discards). Each target receives a flush once; one with several devices sends it to
//! all of them ([`FanOut`]).
//!
//! *Invariant:* a bad table line is reported with the kernel's error text (`ti->error`) and errno.
//!
//! Targets are constructed and queried on the control plane; only their nodes run on the I/O path.

#[cfg(test)]
mod all_targets_tests;
mod area;
mod args;
mod as_layers;
pub mod background;
mod delay;
mod dust;
mod error;
mod error_target;
mod fan_out;
mod flakey;
#[cfg(test)]
mod harness;
mod linear;
pub mod log_writes;
pub mod migration;
#[cfg(test)]
mod migration_cut_tests;
#[cfg(test)]
mod migration_tests;
mod mirror;
mod names;
mod rows;
mod snapshot;
mod striped;
mod switch;
mod table;
#[cfg(test)]
pub(crate) mod testing;
mod unstriped;
mod zero;

pub(crate) use area::common_abilities;
pub use area::{Area, TargetRange, stack};
pub use args::{Args, parse_u32, parse_u64};
pub use as_layers::{DelayOptions, FlakeyOptions, LogOptions};
pub use delay::Delay;
pub use error::{LookupError, MessageError, TargetError};
pub use fan_out::FanOut;
pub use flakey::{CorruptByte, Features, Flakey};
pub use log_writes::LogWrites;
pub use names::Names;
pub use rows::{RandomLine, Simulated, TargetRow, TargetType, rows, target_types};
pub use table::{TableLayer, TableTarget};

use crate::Layer;
use crate::multipath::Multipath;
use block::{Bytes, Profile, Sectors};
use queue::Ring;
use std::io;
use std::sync::Arc;

/// The shared part of a target, as the control plane sees it.
pub trait Target<R: Ring>: Layer<R> {
    /// Returns the parts of devices that the target uses; a device may be named several times.
    fn areas(&self) -> Vec<Area>;

    /// Returns the length at whose multiples, counted from the target's start, the table splits requests.
    /// `None`: requests are not split.
    fn max_io_len(&self) -> Option<Sectors> {
        None
    }

    /// Returns whether discards and write-zeroes arrive unsplit: then the target itself sends each of its
    /// devices the part of the range on that device.
    fn splits_discards(&self) -> bool {
        false
    }

    /// Returns the text of `dmsetup table` or `dmsetup status` after the target type, as the kernel's
    /// `status` function formats it, including a trailing space where the kernel has one.
    fn status(&self, what: Status, names: &Names) -> String;

    /// Executes a message (`dmsetup message`). Some messages return a text.
    ///
    /// # Errors
    /// [`MessageError`]: an unknown message, or one that the target rejects.
    fn message(&self, args: &[&str], names: &Names) -> Result<Option<String>, MessageError> {
        let _ = (args, names);
        Err(MessageError::Invalid)
    }

    /// Returns the first words of the messages that the target accepts.
    fn messages(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns the event counter, which `dmsetup wait` waits on.
    fn events(&self) -> u32 {
        0
    }

    /// Reads on-disk state immediately before its table becomes active. The previous table has no request in
    /// flight by then, and its writes are on the devices; a read at load time would miss them. Called again
    /// if activation failed.
    ///
    /// # Errors
    /// If the table cannot become active; the previous one stays active.
    fn prepare(&self, disks: &mut dyn background::Disks) -> Result<(), TargetError> {
        let _ = disks;
        Ok(())
    }

    /// Prepares for the suspension of the device. With `noflush`, requests that cannot complete now must end
    /// with [`Requeue`](block::Status::Requeue); the next table processes them.
    fn presuspend(&self, noflush: bool) {
        let _ = noflush;
    }

    /// Resumes after a suspension, or starts when the table becomes active for the first time.
    fn resume(&self) {}

    /// Returns messages for the log of the process about changes since the last call, a sentence each.
    fn notices(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the target's background work, such as resynchronisation, if it has any.
    fn background_work(&self) -> Option<Arc<dyn background::BackgroundWork>> {
        None
    }

    /// Returns the paths of a multipath target, for the path checker.
    fn paths(&self) -> Option<Arc<Multipath>> {
        None
    }
}

/// The text that [`Target::status`] returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// `STATUSTYPE_INFO`: the current state.
    Info,
    /// `STATUSTYPE_TABLE`: the arguments of the table line.
    Table,
}

/// Access to devices while a table is loaded. Devices are numbered in the order of opening, and become the
/// children of the target's layer in that order.
pub trait Devices {
    /// Opens the device that an argument names, and returns its number.
    ///
    /// # Errors
    /// The reason; pass it to [`TargetError::lookup`].
    fn open(&mut self, arg: &str) -> Result<usize, LookupError>;

    /// Opens a device that may be unreachable for now, such as a path. Until the device can be reached, its
    /// length counts as `len`. Returns the number, and whether the device was reachable.
    ///
    /// # Errors
    /// If the argument is not a device, or names a missing device that has to exist.
    fn open_later(&mut self, arg: &str, len: Sectors) -> Result<(usize, bool), LookupError> {
        let _ = len;
        Ok((self.open(arg)?, true))
    }

    /// Returns the size, limits and abilities of a device.
    fn profile(&self, device: usize) -> &Profile;

    /// Returns the identity of a device, which is equal for two arguments that name the same device.
    fn identity(&self, device: usize) -> &str;

    /// Reads whole logical blocks from a device.
    ///
    /// # Errors
    /// The device's error.
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()>;

    /// Writes whole logical blocks to a device.
    ///
    /// # Errors
    /// The device's error.
    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()>;

    /// Flushes a device: earlier writes are on stable storage afterwards.
    ///
    /// # Errors
    /// The device's error.
    fn flush(&mut self, device: usize) -> io::Result<()>;
}

/// A function that parses the arguments of a table line and builds the target.
pub type Construct<R> = fn(TargetRange, &[&str], &mut dyn Devices) -> Result<Arc<dyn Target<R>>, TargetError>;

/// Returns the length of a target: `len` from its table line, or the length of its device for a layer without
/// a table (0).
fn len_or_device(len: Sectors, below: &[Profile]) -> Sectors {
    if len.0 == 0 { below[0].size.sectors() } else { len }
}
