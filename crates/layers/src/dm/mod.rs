//! Targets: what device-mapper's tables are made of, each one file behind one trait.
//!
//! A table line is `start length kind arguments…`. [`kinds`] lists the kinds there are; [`Kind::make`] reads the arguments,
//! with the devices that they name opened by whoever loads the table ([`Devices`]), and answers with the shared part: a
//! [`Target`], which is a [`Layer`](crate::Layer) over the devices that it opened, in the order in which it opened them,
//! and says and hears what `dmsetup status`, `table` and `message` carry. [`TableLayer`] puts the targets of a table next
//! to each other and cuts requests at their ends, and at every [`max_io_len`](Target::max_io_len).
//!
//! A target sees offsets from its own start, and never a request that reaches beyond its end or across a multiple of its
//! `max_io_len`, save discards and writes of zeroes where it [`spreads`](Target::spreads) them. A flush comes to every
//! target once: who stands on several devices sends it to all of them ([`Fan`]).
//!
//! *Invariant:* what is wrong with a line is said in the kernel's words (`ti->error`), with its errno.
//!
//! Made and asked on the control plane; nothing here runs on the path of a request but the nodes.

mod area;
mod as_layers;
pub mod chore;
mod delay;
mod dust;
mod error;
mod failing;
mod fan;
mod flakey;
#[cfg(test)]
mod intact;
mod linear;
pub mod log_writes;
mod mirror;
mod names;
#[cfg(test)]
mod rig;
mod snapshot;
mod striped;
mod switch;
mod table;
#[cfg(test)]
pub(crate) mod testing;
mod unstriped;
mod words;
mod zero;

pub(crate) use area::both;
pub use area::{Area, Place, stack};
pub use as_layers::{DelayWords, FlakeyWords, LogWords};
pub use delay::Delay;
pub use error::{LookupError, MessageError, TargetError};
pub use fan::Fan;
pub use flakey::{CorruptByte, Features, Flakey};
pub use log_writes::LogWrites;
pub use names::Names;
pub use striped::Striped;
pub use table::{Row, TableLayer};
pub use words::{Words, long_number, number};

use crate::Layer;
use crate::multipath::Multipath;
use block::{Bytes, Profile, Sectors};
use queue::Ring;
use std::io;
use std::sync::Arc;

/// The shared part of a target, as the control plane sees it.
pub trait Target<R: Ring>: Layer<R> {
    /// What it uses of the devices that it opened; a device may be named several times.
    fn areas(&self) -> Vec<Area>;

    /// Requests are cut at every multiple of this from the target's start. `None`: they are not.
    fn max_io_len(&self) -> Option<Sectors> {
        None
    }

    /// Discards and writes of zeroes are not cut at these multiples: the target sends each of its devices what lies there.
    fn spreads(&self) -> bool {
        false
    }

    /// What `dmsetup table` or `dmsetup status` says after the kind, as the kernel's `status` writes it: with the space
    /// at its end where that has one.
    fn status(&self, what: Status, names: &Names) -> String;

    /// Heed a message. Some are answered with a text.
    ///
    /// # Errors
    /// [`MessageError`]: nothing was done.
    fn message(&self, words: &[&str], names: &Names) -> Result<Option<String>, MessageError> {
        let _ = (words, names);
        Err(MessageError::Invalid)
    }

    /// How many things have happened that someone may wait for.
    fn events(&self) -> u32 {
        0
    }

    /// Its table is about to be put to use: the one before it has nothing under way any more, and what that one wrote is on
    /// the devices. What lies there is read now, not when the table is made; asked again when the table was not put to use
    /// after all.
    ///
    /// # Errors
    /// Why it cannot be put to use: the table before it goes on.
    fn prepare(&self, disks: &mut dyn chore::Disks) -> Result<(), TargetError> {
        let _ = disks;
        Ok(())
    }

    /// The device is about to be suspended: with `noflush`, requests that cannot go on are to come up as
    /// [`Requeue`](block::Status::Requeue), to be carried out by the table that comes.
    fn presuspend(&self, noflush: bool) {
        let _ = noflush;
    }

    /// The device goes on, or its table is in use for the first time.
    fn resume(&self) {}

    /// What happened since this was asked last that belongs into the log of the process, a sentence each.
    fn notices(&self) -> Vec<String> {
        Vec::new()
    }

    /// What it has to do without being asked by a request.
    fn chore(&self) -> Option<Arc<dyn chore::Chore>> {
        None
    }

    /// Its paths, if its devices are ways to one disk: whoever looks after those checks them.
    fn paths(&self) -> Option<Arc<Multipath>> {
        None
    }
}

/// What is asked of [`Target::status`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// `STATUSTYPE_INFO`: how it is.
    Info,
    /// `STATUSTYPE_TABLE`: what it was made from.
    Table,
}

/// What a target's constructor may ask of whoever loads the table. Devices are numbered in the order in which they
/// are opened, and become the children of the target's layer in that order.
pub trait Devices {
    /// Open what a word names.
    ///
    /// # Errors
    /// Why not, for whoever reads the log: say it as [`TargetError::lookup`].
    fn open(&mut self, word: &str) -> Result<usize, LookupError>;

    /// The same for a device that may be away for now, as a path is: it is taken to be `len` long until it is there.
    /// Whether it is.
    ///
    /// # Errors
    /// The word makes no sense, or what it names has to be there.
    fn open_later(&mut self, word: &str, len: Sectors) -> Result<(usize, bool), LookupError> {
        let _ = len;
        Ok((self.open(word)?, true))
    }

    /// What one of them is.
    fn profile(&self, device: usize) -> &Profile;

    /// Which device it is: two words that name the same one have the same identity.
    fn identity(&self, device: usize) -> &str;

    /// Read what lies on it. Whole logical blocks.
    ///
    /// # Errors
    /// What the device answered.
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()>;

    /// Write to it. Whole logical blocks.
    ///
    /// # Errors
    /// What the device answered.
    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()>;

    /// Put what was written to it onto stable storage.
    ///
    /// # Errors
    /// What the device answered.
    fn flush(&mut self, device: usize) -> io::Result<()>;
}

/// Reads the arguments of a line.
pub type Make<R> = fn(Place, &[&str], &mut dyn Devices) -> Result<Arc<dyn Target<R>>, TargetError>;

/// A kind of target.
pub struct Kind<R: Ring> {
    /// Its name in tables.
    pub name: &'static str,
    /// The version of the kernel's target whose words these are.
    pub version: [u32; 3],
    /// It stands alone in its table (`DM_TARGET_SINGLETON`).
    pub singleton: bool,
    /// A table that has it is followed only by tables that have it (`DM_TARGET_IMMUTABLE`).
    pub immutable: bool,
    /// Its constructor.
    pub make: Make<R>,
}

impl<R: Ring> Kind<R> {
    /// One that stands beside others, and that others may follow.
    pub const fn new(name: &'static str, version: [u32; 3], make: Make<R>) -> Kind<R> {
        Kind { name, version, singleton: false, immutable: false, make }
    }
}

/// How long a target is: as its table says, or, as a layer that has none (0), as long as what stands below.
fn len_over(len: Sectors, below: &[Profile]) -> Sectors {
    if len.0 == 0 { below[0].size.sectors() } else { len }
}

/// All kinds there are, by name.
pub fn kinds<R: Ring>() -> Vec<Kind<R>> {
    vec![
        delay::kind(),
        dust::kind(),
        failing::kind(),
        flakey::kind(),
        linear::kind(),
        log_writes::kind(),
        mirror::kind(),
        crate::multipath::kind(),
        snapshot::kind(),
        snapshot::origin_kind(),
        striped::kind(),
        switch::kind(),
        unstriped::kind(),
        zero::kind(),
    ]
}
