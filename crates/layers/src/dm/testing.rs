//! Targets made for tests, over devices that exist in name only.

use super::{Devices, LookupError, Place, Target, TargetError, kinds};
use crate::testing::Clock;
use block::{Abilities, Bytes, Profile, QueueLimits, Sectors};
use std::io;
use std::sync::Arc;

/// Every device is there, of 1 GiB of zeroes, but `missing`.
#[derive(Default)]
pub(crate) struct Shelf {
    opened: Vec<(String, Profile)>,
}

impl Devices for Shelf {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        if word == "missing" {
            return Err(LookupError { why: "missing: it is not there".into(), errno: libc::ENODEV });
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
        lends: false,
        in_place: false,
        sparse: false,
        opaque: true,
    }
}

/// A target of 1024 sectors at sector 0.
pub(crate) fn make(kind: &str, words: &str) -> Result<Arc<dyn Target<Clock>>, TargetError> {
    let kind = kinds::<Clock>().into_iter().find(|known| known.name == kind).expect("a kind");
    let words: Vec<&str> = words.split_whitespace().collect();
    (kind.make)(Place { start: Sectors(0), len: Sectors(1024) }, &words, &mut Shelf::default())
}

pub(crate) fn made(kind: &str, words: &str) -> Arc<dyn Target<Clock>> {
    make(kind, words).unwrap_or_else(|error| panic!("{kind} {words}: {error}"))
}

pub(crate) fn error(kind: &str, words: &str) -> String {
    match make(kind, words) {
        Ok(_) => panic!("{kind} {words} is taken"),
        Err(error) => error.to_string(),
    }
}

/// Names of devices as they are shown.
pub(crate) fn names(shown: &[&str]) -> super::Names {
    let mut names = super::Names::default();
    shown.iter().for_each(|name| names.push(*name, *name));
    names
}
