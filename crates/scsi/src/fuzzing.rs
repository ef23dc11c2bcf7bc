//! Body of the fuzz target: no sequence of commands may cause a panic, a request past the end of the
//! medium, or a program that does not end.
//!
//! The input is a byte of settings, then commands. A command is a byte with the length of the CDB in its
//! lower six bits and the nexus in the highest one, the CDB, two lengths of two bytes (data-out, data-in,
//! little-endian), a byte that selects how block requests end (0: success), and the byte that fills the
//! data-out.

use crate::program::{Buffer, Completed, PARALLEL_MAX, Program, ProgramIo, ProgramMemory, Step, Target};
use crate::{
    Access, Attributes, Begin, BlockIo, Can, Command, Identity, LogicalUnit, Lun, Media, Nexus, NexusName,
    Outcome, Sense, Session, TaskAttribute, Zoned, begin, complete, explain,
};
use block::{Op, Status};
use std::sync::Arc;

const BLOCKS: u64 = 4096;
const BLOCK: u64 = 512;
/// Maximum number of requests of a program on this medium.
const REQUESTS_MAX: usize = 1 << 16;

struct Lone([Lun; 1], Arc<Nexus>);

impl Session for Lone {
    fn luns(&self) -> &[Lun] {
        &self.0
    }

    fn find_unit(&self, _: &[u8]) -> Option<Arc<Nexus>> {
        Some(self.1.clone())
    }
}

/// Reads the fields of the input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|one| one[0])
    }

    fn len(&mut self) -> Option<u32> {
        self.take(2).map(|two| u16::from_le_bytes([two[0], two[1]]).into())
    }
}

/// Runs the commands of an input. Returns how many of them ended.
pub fn commands(input: &[u8]) -> usize {
    let mut input = Input(input);
    let settings = input.byte().unwrap_or(0);
    let media = Media {
        removable: settings & 1 != 0,
        write_cache: settings & 2 != 0,
        atomic_max: if settings & 4 != 0 { 1 << 16 } else { 0 },
        can: Can::from_bits_truncate(settings >> 3),
        // A medium without abilities is zoned.
        zones: (settings >> 3 == 0).then_some(Zoned { zone_blocks: 256, open_max: 4 }),
        ..Media::new(BLOCKS, BLOCK as u32)
    };
    let identity = Identity::new("BLKYARD", "fuzz", "1", "0123456789");
    let unit = LogicalUnit::new(identity, media, Attributes::default());
    let nexuses = [1, 2].map(|number| {
        let name = NexusName {
            initiator: format!("iqn.2026-11.example:{number}"),
            isid: [0, 0, 0, 0, 0, number],
            target: "iqn.2026-11.example:disk".to_owned(),
            portal_group: 1,
            relative_port: 1,
        };
        unit.attach_nexus(name, Lun::new(0), Access::ReadWrite)
    });
    let session = Lone([Lun::new(0)], nexuses[1].clone());
    let mut ended = 0;
    while let Some(()) = command(&mut input, &nexuses, &session) {
        ended += 1;
    }
    ended
}

fn command(input: &mut Input<'_>, nexuses: &[Arc<Nexus>; 2], session: &Lone) -> Option<()> {
    let head = input.byte()?;
    let cdb = input.take(usize::from(head & 0x3F))?;
    let (data_out, data_in) = (input.len()?, input.len()?);
    let (end, fill) = (input.byte()?, input.byte()?);
    let nexus = &nexuses[usize::from(head >> 7)];
    let data = vec![fill; data_out as usize];
    let command = Command { cdb, data_in, data_out, attribute: TaskAttribute::Simple };
    let mut next = begin(nexus, &command, session);
    let outcome = loop {
        next = match next {
            Begin::Finished(outcome) => break outcome,
            Begin::Io(io) => break single(nexus, &io, (data_out, data_in), end),
            Begin::Parameters(parameters) => {
                assert!(parameters.len <= data_out);
                parameters.begin(&data[..parameters.len as usize], session)
            }
            Begin::Store(work) => break work.run(),
            Begin::Program(mut program) => break run(&mut program, &data, end),
        };
    };
    let mut sense = [0; Sense::LEN_MAX];
    assert!(outcome.sense_bytes(&mut sense) <= sense.len());
    outcome.residual(data_out.max(data_in));
    Some(())
}

/// Returns the status of a request, by a byte of the input: 0 is success, other values select a status by
/// number. With the highest bit, only writes get that status.
fn status(end: u8, op: Op) -> Status {
    if end & 0x80 != 0 && !op.is_write() {
        return Status::Ok;
    }
    Status::from_errno(i32::from(end & 0x7F))
}

fn check(op: Op, offset: u64, len: u64) {
    let stop = offset.checked_add(len).expect("no request overflows");
    assert!(stop <= BLOCKS * BLOCK, "{op:?} at {offset} of {len}");
    assert!(offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK), "{op:?} of parts of blocks");
    assert!(len > 0 || op == Op::Flush || op.is_special(), "{op:?} of no length");
}

fn single(nexus: &Arc<Nexus>, io: &BlockIo, (data_out, data_in): (u32, u32), end: u8) -> Outcome {
    check(io.op, io.offset, io.len);
    match io.op {
        Op::Write => assert!(io.len <= data_out.into()),
        Op::Read => assert!(io.transfer <= data_in && u64::from(io.transfer) <= io.len),
        _ => {}
    }
    let status = if end == 0 { Status::Ok } else { status(end, io.op) };
    match explain(nexus, io, status) {
        Some(mut program) => run(&mut program, &[], end),
        None => complete(io, status),
    }
}

fn run(program: &mut Program, data: &[u8], end: u8) -> Outcome {
    let needs = program.needs();
    assert!(needs.data_out as usize <= data.len() && needs.scratch <= 64 << 20);
    let mut scratch = vec![0; needs.scratch as usize];
    let data_out = &data[..needs.data_out as usize];
    let mut in_flight: Vec<ProgramIo> = Vec::new();
    let mut completed = None;
    let mut responded = None;
    for _ in 0..REQUESTS_MAX {
        let mut memory = ProgramMemory { data_out, scratch: &mut scratch };
        match program.step(completed.take(), &mut memory) {
            Step::Submit(io) => {
                check(io.op, io.offset, io.len);
                assert!(matches!(io.unit, Target::Own | Target::Other(_)));
                let room = match &io.buffer {
                    Buffer::None => io.len,
                    Buffer::DataOut(range) => data_out[range.start as usize..range.end as usize].len() as u64,
                    Buffer::Scratch(range) => scratch[range.start as usize..range.end as usize].len() as u64,
                };
                assert!(!io.op.moves_data() || room == io.len, "{io:?}");
                assert!(usize::from(io.slot) < PARALLEL_MAX);
                assert!(in_flight.iter().all(|other| other.slot != io.slot));
                in_flight.push(io);
            }
            Step::Wait => {
                assert!(!in_flight.is_empty(), "the program waits for nothing");
                let io = in_flight.swap_remove(usize::from(end) % in_flight.len());
                let status = if end == 0 { Status::Ok } else { status(end, io.op) };
                completed = Some(Completed { slot: io.slot, status });
            }
            Step::Respond(outcome) => responded = Some(outcome),
            Step::Finished(outcome) => {
                assert!(in_flight.is_empty(), "requests are in flight at the end");
                return responded.unwrap_or(outcome);
            }
        }
    }
    panic!("the program does not end");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opcodes::TABLE;
    use proptest::prelude::*;

    /// Returns an input with one command for each row of the table.
    fn seed(settings: u8) -> Vec<u8> {
        let mut input = vec![settings];
        for row in TABLE {
            let mut cdb = vec![0; row.len()];
            cdb[0] = row.opcode;
            match row.action {
                Some(action) if row.opcode == 0x7F => (cdb[7], cdb[9]) = (24, action as u8),
                Some(action) => cdb[1] = action as u8,
                None => {}
            }
            input.push(cdb.len() as u8);
            input.extend_from_slice(&cdb);
            input.extend_from_slice(&[0, 2, 0, 2, 0, 0]);
        }
        input
    }

    #[test]
    fn kept_inputs_run_to_their_end() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/scsi_command");
        let mut ended = 0;
        for entry in std::fs::read_dir(folder).expect("a corpus") {
            ended += commands(&std::fs::read(entry.expect("an entry").path()).expect("an input"));
        }
        assert!(ended >= 40, "the seed has one command of each kind");
        assert_eq!(commands(&seed(0xFB)), TABLE.len());
        assert_eq!(commands(&seed(0x03)), TABLE.len());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn changed_seeds_do_not_panic(
            settings in prop_oneof![Just(0xFB), Just(0x03)],
            changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..60),
        ) {
            let mut input = seed(settings);
            for (at, byte) in changes {
                let len = input.len();
                input[at % len] = byte;
            }
            commands(&input);
        }
    }
}
