//! The control plane of a machine: opens disks for targets that are made, and does what their chores ask.
//!
//! It waits for each request while the machine goes on, and the power may go meanwhile: from then on all fails.

use super::machine::{Machine, Made};
use crate::simulation::breakage::{Breakage, RECORD_AT};
use crate::simulation::parts::Builder;
use block::{Bytes, Data, Flags, Op, Profile, Request};
use layers::dm::chore::Disks;
use layers::dm::{Devices, LookupError};
use queue::{Owner, Queue, QueueConfig, Ring as _, Stack};
use std::io;

/// The power goes at one of so many turns while the control plane waits for a disk.
const CUT_ONE_IN: u64 = 400;

impl Machine {
    /// The control plane asks something of a disk, and waits while the machine goes on.
    pub(super) fn ask(
        &mut self,
        disk: usize,
        flags: Flags,
        op: Op,
        at: Bytes,
        bytes: &mut [u8],
    ) -> io::Result<()> {
        if self.is_cut || self.wrong.is_some() {
            return Err(io::Error::other("the power is gone"));
        }
        let mut stack = Stack::default();
        let part = self.disks[disk].part.clone();
        Builder { setup: &self.setup, rng: &mut self.rng, calm: false }.add(&part, 0, &mut stack);
        let id = self.queues.vacant();
        let config = QueueConfig { id, depth: 1, segments_per_tag: 1, timeout_ns: None };
        self.queues.insert(Queue::new(config, stack).expect("the numbers fit"));
        let memory = (!bytes.is_empty()).then(|| {
            // The control plane has memory of its own.
            std::iter::repeat_with(|| self.ring.allocate(bytes.len() as u32)).flatten().next().expect("some")
        });
        let mut req = Request::new(op, at, Bytes(bytes.len() as u64));
        req.flags = flags;
        if let Some(memory) = memory {
            req.data = Data::One(memory);
            if op == Op::Write {
                self.ring.bytes_mut(memory).copy_from_slice(bytes);
            }
        }
        let queue = self.queues.touch(id);
        self.controls.push(id);
        let tag = queue.tag().expect("a new queue has one");
        queue.submit(tag, Owner(0), req, &mut self.ring);
        let status = loop {
            if let Err(why) = self.turn() {
                self.wrong = Some(why);
                return Err(io::Error::other("the run is over"));
            }
            if let Some(found) = self.answers.iter().position(|answer| answer.0 == id) {
                break self.answers.swap_remove(found).1;
            }
            if self.cuts && self.rng.below(CUT_ONE_IN) == 0 {
                self.shows.iter_mut().for_each(|show| show.last_words = show.status());
                self.is_cut = true;
                return Err(io::Error::other("the power goes"));
            }
        };
        self.queues.remove(id);
        self.controls.retain(|&control| control != id);
        if let Some(memory) = memory {
            if op == Op::Read {
                bytes.copy_from_slice(self.ring.bytes(memory));
            }
            self.ring.free(memory);
        }
        let args = [("disk", disk as u64), ("op", op as u64), ("at", at.0), ("status", status as u64)];
        self.note("control", &args);
        if status.is_ok() { Ok(()) } else { Err(io::Error::from_raw_os_error(status.errno())) }
    }
}

/// The disks that a line names, opened for its target.
pub(super) struct Opening<'a> {
    pub(super) machine: &'a mut Machine,
    pub(super) opened: Vec<(usize, Profile, String)>,
}

impl Devices for Opening<'_> {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        let disk = word.strip_prefix('d').and_then(|number| number.parse().ok()).expect("a disk");
        let identity = format!("simulated {} {word}", self.machine.number);
        self.opened.push((disk, self.machine.profile(disk), identity));
        Ok(self.opened.len() - 1)
    }

    fn profile(&self, device: usize) -> &Profile {
        &self.opened[device].1
    }

    fn identity(&self, device: usize) -> &str {
        &self.opened[device].2
    }

    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.machine.ask(self.opened[device].0, Flags::NONE, Op::Read, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.machine.ask(self.opened[device].0, Flags::NONE, Op::Write, at, &mut from.to_vec())
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.machine.ask(self.opened[device].0, Flags::NONE, Op::Flush, Bytes::ZERO, &mut [])
    }
}

/// The disks of a target, for its chores.
pub(super) struct Below<'a> {
    machine: &'a mut Machine,
    disks: Vec<usize>,
    has_log: bool,
    /// Something that was asked failed.
    pub(super) failed: bool,
}

impl<'a> Below<'a> {
    pub(super) fn new(machine: &'a mut Machine, made: &Made) -> Below<'a> {
        Below { machine, disks: made.disks.clone(), has_log: made.has_log(), failed: false }
    }

    fn ask(&mut self, device: usize, flags: Flags, op: Op, at: Bytes, bytes: &mut [u8]) -> io::Result<()> {
        let breakage = self.machine.breakage;
        let is_leg = !self.has_log || device > 0;
        let is_forgotten = match op {
            Op::Write => match breakage {
                Some(Breakage::UnrecordedLoss) => true,
                Some(Breakage::HalfCopied) => is_leg && self.machine.rng.chance(200),
                _ => false,
            },
            Op::Flush => breakage == Some(Breakage::EarlyUnmark) && is_leg,
            _ => false,
        };
        if is_forgotten {
            return Ok(());
        }
        if breakage == Some(Breakage::ForgottenRecord) && op == Op::Write && !is_leg {
            bytes[RECORD_AT].fill(0);
        }
        let result = self.machine.ask(self.disks[device], flags, op, at, bytes);
        self.failed |= result.is_err() && !self.machine.is_cut;
        if breakage == Some(Breakage::UnheededHeader) && flags.has(Flags::AFTER_LOSS) && !self.machine.is_cut
        {
            return Ok(());
        }
        result
    }
}

impl Disks for Below<'_> {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.ask(device, Flags::NONE, Op::Read, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.ask(device, Flags::NONE, Op::Write, at, &mut from.to_vec())
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.ask(device, Flags::NONE, Op::Flush, Bytes::ZERO, &mut [])
    }

    fn record(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.ask(device, Flags::AFTER_LOSS, Op::Write, at, &mut from.to_vec())?;
        self.ask(device, Flags::AFTER_LOSS, Op::Flush, Bytes::ZERO, &mut [])
    }
}
