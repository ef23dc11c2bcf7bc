//! Tests of commands on an in-memory disk: [`World`] does the work of a transport.

mod atomicity;
mod commands;
mod data;
mod fuzz;
mod lio;
mod model;
mod reports;
mod shared;
mod zoned;

use crate::program::{Buffer, Completed, ProgramMemory, Step, Target};
use crate::*;
use block::{Extent, Flags, Op, Status};
use std::sync::Arc;

pub(crate) const BLOCK: usize = 512;
pub(crate) const BLOCKS: usize = 4096;

/// An in-memory disk that supports discards and records holes.
pub(crate) struct Disk {
    pub(crate) bytes: Vec<u8>,
    /// Whether each block is a hole.
    pub(crate) holes: Vec<bool>,
    /// Operation, offset, length and flags of each request.
    pub(crate) log: Vec<(Op, u64, u64, Flags)>,
    /// Statuses to return for operations instead of executing them.
    pub(crate) fails: Vec<(Op, Status)>,
    /// Zones, or none.
    pub(crate) zones: Vec<block::Zone>,
    /// Whether it supports `Op::CompareAndWrite`.
    pub(crate) compares: bool,
}

impl Disk {
    pub(crate) fn new() -> Disk {
        let mut disk = Disk {
            // In this pattern no two neighbouring blocks are equal.
            bytes: (0..515_u32)
                .map(|at| (at * 37) as u8)
                .collect::<Vec<u8>>()
                .repeat(BLOCKS * BLOCK / 515 + 1),
            holes: vec![false; BLOCKS],
            log: Vec::new(),
            fails: Vec::new(),
            zones: Vec::new(),
            compares: false,
        };
        disk.bytes.truncate(BLOCKS * BLOCK);
        disk
    }

    pub(crate) fn request(&mut self, op: Op, offset: u64, len: u64, flags: Flags, data: &mut [u8]) -> Status {
        if op == Op::CompareAndWrite && !self.compares {
            return Status::NotSupported;
        }
        self.log.push((op, offset, len, flags));
        if let Some((_, status)) = self.fails.iter().find(|(failing, _)| *failing == op) {
            return *status;
        }
        if !self.zones.is_empty()
            && let Some(status) = zoned::request(&mut self.zones, op, offset, len, data)
        {
            return status;
        }
        let range = offset as usize..(offset + len) as usize;
        assert!(range.end <= self.bytes.len(), "{op:?} past the end: {range:?}");
        assert!(op == Op::Flush || len > 0, "{op:?} of no length");
        assert_eq!((offset % BLOCK as u64, len % BLOCK as u64), (0, 0), "{op:?} of parts of blocks");
        if matches!(op, Op::Read | Op::Write) {
            assert_eq!(data.len(), range.len(), "{op:?}: memory and length differ");
        }
        let blocks = range.start / BLOCK..range.end / BLOCK;
        match op {
            Op::Read => data.copy_from_slice(&self.bytes[range]),
            Op::Write => {
                self.bytes[range].copy_from_slice(data);
                self.holes[blocks].fill(false);
            }
            Op::CompareAndWrite => {
                let (old, new) = data.split_at(range.len());
                if self.bytes[range.clone()] != *old {
                    return Status::Protection;
                }
                self.bytes[range].copy_from_slice(new);
                self.holes[blocks].fill(false);
            }
            Op::Discard => {
                self.bytes[range].fill(0xDD);
                self.holes[blocks].fill(true);
            }
            Op::WriteZeroes => {
                self.bytes[range].fill(0);
                self.holes[blocks].fill(!flags.contains(Flags::NO_UNMAP));
            }
            Op::Extents => {
                let runs = self.holes[blocks].chunk_by(|one, other| one == other);
                let extents = runs.map(|run| Extent {
                    len: block::Bytes((run.len() * BLOCK) as u64),
                    hole: run[0],
                    zero: run[0],
                });
                data.fill(0);
                data.chunks_exact_mut(Extent::RECORD_LEN)
                    .zip(extents)
                    .for_each(|(record, extent)| record.copy_from_slice(&extent.to_record()));
            }
            Op::Flush | Op::Prefetch => {}
            _ => return Status::NotSupported,
        }
        Status::Ok
    }
}

/// LUNs of the session of all tests.
pub(crate) struct Luns(pub(crate) Vec<Lun>);

impl Session for Luns {
    fn luns(&self) -> &[Lun] {
        &self.0
    }

    fn find_unit(&self, _: &[u8]) -> Option<Arc<Nexus>> {
        None
    }
}

pub(crate) fn media() -> Media {
    Media {
        write_cache: true,
        can: Can::UNMAP | Can::WRITE_ZEROES | Can::FUA | Can::EXTENTS | Can::THIN,
        transfer_max: 1 << 20,
        ..Media::new(BLOCKS as u64, BLOCK as u32)
    }
}

pub(crate) fn name(number: u8) -> NexusName {
    NexusName {
        initiator: format!("iqn.2026-11.example:host{number}"),
        isid: [0, 2, 0x3D, 0, 0, number],
        target: "iqn.2026-11.example:disk".to_owned(),
        portal_group: 1,
        relative_port: 1,
    }
}

/// A unit with its disk and some nexuses, whose first unit attention has already been reported.
pub(crate) struct World {
    pub(crate) unit: Arc<LogicalUnit>,
    pub(crate) nexus: Arc<Nexus>,
    pub(crate) other: Arc<Nexus>,
    pub(crate) disk: Disk,
    pub(crate) luns: Luns,
    /// Seed of the order in which requests complete.
    pub(crate) seed: u64,
}

/// The outcome of a command, and its data-in.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) outcome: Outcome,
    pub(crate) data: Vec<u8>,
}

impl End {
    #[track_caller]
    pub(crate) fn good(self) -> Vec<u8> {
        assert_eq!(self.outcome.status, ScsiStatus::Good, "{:?}", self.outcome.sense);
        self.data
    }

    /// Returns the sense key, additional sense code and qualifier.
    #[track_caller]
    pub(crate) fn sense(&self) -> (u8, u8, u8) {
        assert_eq!(self.outcome.status, ScsiStatus::CheckCondition);
        (self.outcome.sense.key as u8, self.outcome.sense.asc, self.outcome.sense.ascq)
    }
}

pub(crate) const INVALID_OPCODE: (u8, u8, u8) = (5, 0x20, 0);
pub(crate) const INVALID_FIELD: (u8, u8, u8) = (5, 0x24, 0);
pub(crate) const INVALID_PARAMETER: (u8, u8, u8) = (5, 0x26, 0);
pub(crate) const LIST_LENGTH: (u8, u8, u8) = (5, 0x1A, 0);
pub(crate) const OUT_OF_RANGE: (u8, u8, u8) = (5, 0x21, 0);
pub(crate) const MISCOMPARE: (u8, u8, u8) = (0xE, 0x1D, 0);
pub(crate) const PROTECTED: (u8, u8, u8) = (7, 0x27, 0);

impl World {
    pub(crate) fn new() -> World {
        World::with(media(), Attributes::default())
    }

    pub(crate) fn with(media: Media, attributes: Attributes) -> World {
        let identity = Identity::new("BLKYARD", "disk", "1.0", "0123456789abcdef");
        let unit = LogicalUnit::new(identity, media, attributes);
        let [nexus, other] = [1, 2].map(|number| {
            let nexus = unit.attach_nexus(name(number), Lun::new(0), Access::ReadWrite);
            nexus.take_attention(true);
            nexus
        });
        World { unit, nexus, other, disk: Disk::new(), luns: Luns(vec![Lun::new(0), Lun::new(300)]), seed: 1 }
    }

    /// Runs a command without data-out.
    pub(crate) fn run(&mut self, cdb: &[u8]) -> End {
        self.run_with(cdb, &[], 1 << 20)
    }

    /// Runs a command that sends data.
    pub(crate) fn send(&mut self, cdb: &[u8], data_out: &[u8]) -> End {
        self.run_with(cdb, data_out, 0)
    }

    pub(crate) fn run_with(&mut self, cdb: &[u8], data_out: &[u8], data_in: u32) -> End {
        let nexus = self.nexus.clone();
        self.run_as(&nexus, cdb, data_out, data_in)
    }

    pub(crate) fn run_as(&mut self, nexus: &Arc<Nexus>, cdb: &[u8], data_out: &[u8], data_in: u32) -> End {
        let attribute = TaskAttribute::Simple;
        let command = Command { cdb, data_in, data_out: data_out.len() as u32, attribute };
        let mut next = begin(nexus, &command, &self.luns);
        loop {
            next = match next {
                Begin::Finished(outcome) => return ended(outcome, data_in),
                Begin::Io(io) => return self.io(&io, data_out, data_in),
                Begin::Parameters(parameters) => {
                    assert!(parameters.len as usize <= data_out.len());
                    parameters.begin(&data_out[..parameters.len as usize], &self.luns)
                }
                Begin::Store(work) => return ended(work.run(), data_in),
                Begin::Program(mut program) => return ended(self.program(&mut program, data_out), data_in),
            };
        }
    }

    fn io(&mut self, io: &BlockIo, data_out: &[u8], data_in: u32) -> End {
        let mut data = match io.op {
            Op::Read => vec![0; io.len as usize],
            Op::Write => data_out[..io.len as usize].to_vec(),
            _ => Vec::new(),
        };
        let status = self.disk.request(io.op, io.offset, io.len, io.flags, &mut data);
        if let Some(mut program) = explain(&self.nexus, io, status) {
            return ended(self.program(&mut program, data_out), data_in);
        }
        let outcome = complete(io, status);
        assert!(u64::from(io.transfer) <= io.wanted || io.op != Op::Read);
        if io.op == Op::Read && status.is_ok() {
            assert!(io.transfer <= data_in);
            data.truncate(io.transfer as usize);
            return End { outcome, data };
        }
        End { outcome, data: Vec::new() }
    }

    /// Executes a program. Requests complete in an arbitrary order.
    pub(crate) fn program(&mut self, program: &mut Program, data_out: &[u8]) -> Outcome {
        let needs = program.needs();
        assert!(needs.scratch <= 32 << 20 && needs.data_out as usize <= data_out.len());
        let mut scratch = vec![0xEE; needs.scratch as usize];
        let data_out = &data_out[..needs.data_out as usize];
        let mut in_flight = Vec::new();
        let (mut completed, mut early) = (None, None);
        loop {
            let mut memory = ProgramMemory { data_out, scratch: &mut scratch };
            match program.step(completed.take(), &mut memory) {
                Step::Submit(io) => {
                    assert!(matches!(io.unit, Target::Own));
                    assert!(in_flight.iter().all(|other: &program::ProgramIo| other.slot != io.slot));
                    assert!(usize::from(io.slot) < program::PARALLEL_MAX);
                    if let (Some(range), true) = (&needs.exclusive, io.op.is_write()) {
                        assert!(range.start <= io.offset && io.offset + io.len <= range.end);
                    }
                    in_flight.push(io);
                }
                Step::Wait => {
                    assert!(!in_flight.is_empty(), "it waits for nothing");
                    self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let io = in_flight.swap_remove((self.seed >> 33) as usize % in_flight.len());
                    let mut data = match &io.buffer {
                        Buffer::None => Vec::new(),
                        Buffer::DataOut(range) => data_out[range.start as usize..range.end as usize].to_vec(),
                        Buffer::Scratch(range) => scratch[range.start as usize..range.end as usize].to_vec(),
                    };
                    let status = self.disk.request(io.op, io.offset, io.len, io.flags, &mut data);
                    if let Buffer::Scratch(range) = &io.buffer {
                        scratch[range.start as usize..range.end as usize].copy_from_slice(&data);
                    }
                    completed = Some(Completed { slot: io.slot, status });
                }
                Step::Finished(outcome) => {
                    assert!(in_flight.is_empty(), "requests are in flight at the end");
                    return early.unwrap_or(outcome);
                }
                Step::Respond(outcome) => early = Some(outcome),
            }
        }
    }

    /// Returns the bytes of blocks on the disk.
    pub(crate) fn blocks(&self, lba: usize, count: usize) -> &[u8] {
        &self.disk.bytes[lba * BLOCK..(lba + count) * BLOCK]
    }
}

fn ended(mut outcome: Outcome, data_in: u32) -> End {
    let mut data = std::mem::take(&mut outcome.data);
    data.truncate(data_in as usize);
    End { outcome, data }
}

/// Returns a CDB of 16 bytes, with the LBA at byte 2 and the length at byte 10.
pub(crate) fn cdb16(opcode: u8, flags: u8, lba: u64, count: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (opcode, flags);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&count.to_be_bytes());
    cdb
}

/// Returns a CDB of 12 bytes, with the LBA at byte 2 and the length at byte 6.
pub(crate) fn cdb12(opcode: u8, flags: u8, lba: u32, count: u32) -> [u8; 12] {
    let mut cdb = [0; 12];
    (cdb[0], cdb[1]) = (opcode, flags);
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[6..10].copy_from_slice(&count.to_be_bytes());
    cdb
}

/// Returns a CDB of 10 bytes, with the LBA at byte 2 and the length at byte 7.
pub(crate) fn cdb10(opcode: u8, flags: u8, lba: u32, count: u16) -> [u8; 10] {
    let mut cdb = [0; 10];
    (cdb[0], cdb[1]) = (opcode, flags);
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[7..9].copy_from_slice(&count.to_be_bytes());
    cdb
}

/// Returns a COMPARE AND WRITE.
pub(crate) fn compare_and_write(lba: u64, count: u8) -> [u8; 16] {
    let mut cdb = cdb16(0x89, 0, lba, 0);
    cdb[13] = count;
    cdb
}
