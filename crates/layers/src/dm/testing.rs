//! Targets for tests of arguments and status, over fake devices.

use super::{Devices, LookupError, Target, TargetError, TargetRange, target_types};
use crate::testing::Clock;
use block::{Abilities, Bytes, Profile, QueueLimits, Sectors};
use std::io;
use std::sync::Arc;

/// Devices of 1 GiB of zeroes under any name but `missing`.
#[derive(Default)]
pub(crate) struct FakeDevices {
    opened: Vec<(String, Profile)>,
}

impl Devices for FakeDevices {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        if word == "missing" {
            return Err(LookupError { why: "missing: no such device".into(), errno: libc::ENODEV });
        }
        self.opened.push((word.to_owned(), profile(Bytes::gib(1))));
        Ok(self.opened.len() - 1)
    }

    fn profile(&self, device: usize) -> &Profile {
        &self.opened[device].1
    }

    fn identity(&self, device: usize) -> &str {
        &self.opened[device].0
    }

    fn read(&mut self, _: usize, _: Bytes, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        Ok(())
    }

    fn write(&mut self, _: usize, _: Bytes, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn flush(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn profile(size: Bytes) -> Profile {
    let mut limits = QueueLimits::default();
    limits.validate().expect("limits that fit");
    Profile {
        size,
        read_only: false,
        abilities: Abilities::MEMORY,
        limits,
        bytewise: true,
        zero_copy_reads: false,
        inline: false,
        sparse: false,
        opaque: true,
    }
}

/// Creates a target of 1024 sectors.
pub(crate) fn try_build(kind: &str, args: &str) -> Result<Arc<dyn Target<Clock>>, TargetError> {
    let kind = target_types::<Clock>().into_iter().find(|known| known.row.name == kind).expect("a kind");
    let args: Vec<&str> = args.split_whitespace().collect();
    (kind.construct)(
        TargetRange { start: Sectors(0), len: Sectors(1024) },
        &args,
        &mut FakeDevices::default(),
    )
}

pub(crate) fn build(kind: &str, args: &str) -> Arc<dyn Target<Clock>> {
    try_build(kind, args).unwrap_or_else(|error| panic!("{kind} {args}: {error}"))
}

pub(crate) fn error(kind: &str, args: &str) -> String {
    match try_build(kind, args) {
        Ok(_) => panic!("{kind} {args} is accepted"),
        Err(error) => error.to_string(),
    }
}

/// Returns names of devices that are equal in table lines and in status.
pub(crate) fn names(shown: &[&str]) -> super::Names {
    let mut names = super::Names::default();
    shown.iter().for_each(|name| names.push(*name, *name));
    names
}
