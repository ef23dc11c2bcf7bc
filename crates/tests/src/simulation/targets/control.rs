//! The control plane of a machine: opens disks for new targets, and does their background work.
//!
//! It waits for each of its requests while the machine continues, and the power may fail meanwhile: from then
//! on all requests fail.

use super::machine::{BuiltTarget, Machine};
use crate::simulation::parts::Builder;
use crate::simulation::seeded_fault::{RECORD_AT, SeededFault};
use block::{Bytes, Data, Flags, Op, Profile, Request};
use layers::dm::background::Disks;
use layers::dm::{Devices, LookupError};
use queue::{Owner, Queue, QueueConfig, Ring as _, Stack};
use std::io;

/// The power fails in one in this many turns while the control plane waits for a disk.
const CUT_ONE_IN: u64 = 400;

impl Machine {
    /// Sends a request to a disk, and waits while the machine continues.
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
        let mut queue = Queue::new(config, stack).expect("the numbers fit");
        queue.set_waker(self.wakes.waker(id));
        self.queues.insert(queue);
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
                self.shows.iter_mut().for_each(|show| show.last_status = show.status());
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

/// The disks of a table line, opened for its target.
pub(super) struct DeviceOpener<'a> {
    pub(super) machine: &'a mut Machine,
    pub(super) opened: Vec<(usize, Profile, String)>,
}

impl Devices for DeviceOpener<'_> {
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
        self.machine.ask(self.opened[device].0, Flags::empty(), Op::Read, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.machine.ask(self.opened[device].0, Flags::empty(), Op::Write, at, &mut from.to_vec())
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.machine.ask(self.opened[device].0, Flags::empty(), Op::Flush, Bytes::ZERO, &mut [])
    }
}

/// The disks of a target, for its background work.
pub(super) struct TargetDisks<'a> {
    machine: &'a mut Machine,
    disks: Vec<usize>,
    has_log: bool,
    /// A request failed.
    pub(super) failed: bool,
}

impl<'a> TargetDisks<'a> {
    pub(super) fn new(machine: &'a mut Machine, made: &BuiltTarget) -> TargetDisks<'a> {
        TargetDisks { machine, disks: made.disks.clone(), has_log: made.has_log(), failed: false }
    }

    fn ask(&mut self, device: usize, flags: Flags, op: Op, at: Bytes, bytes: &mut [u8]) -> io::Result<()> {
        let seeded_fault = self.machine.seeded_fault;
        let is_leg = !self.has_log || device > 0;
        let is_forgotten = match op {
            Op::Write => match seeded_fault {
                Some(SeededFault::UnrecordedLoss) => true,
                Some(SeededFault::HalfCopied) => is_leg && self.machine.rng.chance(200),
                _ => false,
            },
            Op::Flush => seeded_fault == Some(SeededFault::EarlyUnmark) && is_leg,
            _ => false,
        };
        if is_forgotten {
            return Ok(());
        }
        if seeded_fault == Some(SeededFault::ForgottenRecord) && op == Op::Write && !is_leg {
            bytes[RECORD_AT].fill(0);
        }
        let result = self.machine.ask(self.disks[device], flags, op, at, bytes);
        self.failed |= result.is_err() && !self.machine.is_cut;
        if seeded_fault == Some(SeededFault::UnheededHeader)
            && flags.contains(Flags::AFTER_LOSS)
            && !self.machine.is_cut
        {
            return Ok(());
        }
        result
    }
}

impl Disks for TargetDisks<'_> {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.ask(device, Flags::empty(), Op::Read, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.ask(device, Flags::empty(), Op::Write, at, &mut from.to_vec())
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.ask(device, Flags::empty(), Op::Flush, Bytes::ZERO, &mut [])
    }

    fn write_durably(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.ask(device, Flags::AFTER_LOSS, Op::Write, at, &mut from.to_vec())?;
        self.ask(device, Flags::AFTER_LOSS, Op::Flush, Bytes::ZERO, &mut [])
    }
}
