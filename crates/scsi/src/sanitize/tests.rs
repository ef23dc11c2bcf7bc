use super::*;
use crate::program::{Buffer, Completed, ProgramMemory, Step};
use crate::{Access, Attributes, Identity, LogicalUnit, Lun, NexusName, Outcome};
use block::{Op, Status};
use proptest::prelude::*;

fn nexus(can: Can, blocks: u64) -> Arc<Nexus> {
    let media = Media { can, ..Media::new(blocks, 512) };
    let unit = LogicalUnit::new(Identity::new("v", "p", "1", "7f2a2e05"), media, Attributes::default());
    let name = NexusName {
        initiator: "iqn.i".into(),
        isid: [1; 6],
        target: "iqn.t".into(),
        portal_group: 1,
        relative_port: 1,
    };
    unit.attach_nexus(name, Lun::new(0), Access::ReadWrite)
}

fn cdb(action: u8, len: usize) -> [u8; 10] {
    let [high, low] = (len as u16).to_be_bytes();
    [0x48, action, 0, 0, 0, 0, 0, high, low, 0]
}

/// The effects of a program.
#[derive(Default)]
struct Trace {
    disk: Vec<u8>,
    ops: Vec<Op>,
    early: Option<Outcome>,
    outcome: Option<Outcome>,
}

/// Executes a program on an in-memory disk. Request number `fails` fails, and at request number `drops` the
/// program is dropped.
fn run(blocks: usize, begin: Begin, state: &Sanitize, fails: usize, drops: usize) -> Trace {
    let Begin::Program(mut program) = begin else { panic!("{begin:?}") };
    assert!(program.survives_abort());
    let mut trace = Trace { disk: vec![0x11; blocks * 512], ..Trace::default() };
    let mut scratch = vec![0x77; program.needs().scratch as usize];
    let (mut flying, mut completed, mut last) = (Vec::new(), None, 0);
    loop {
        let mut memory = ProgramMemory { data_out: &[], scratch: &mut scratch };
        match program.step(completed.take(), &mut memory) {
            Step::Submit(io) => flying.push(io),
            Step::Respond(outcome) => trace.early = Some(outcome),
            Step::Wait => {
                if trace.ops.len() == drops {
                    return trace;
                }
                let io = flying.remove(flying.len() / 2);
                trace.ops.push(io.op);
                let range = io.offset as usize..(io.offset + io.len) as usize;
                let status = if trace.ops.len() == fails { Status::IoError } else { Status::Ok };
                match (io.op, io.buffer) {
                    (Op::Write, Buffer::Scratch(from)) => {
                        trace.disk[range].copy_from_slice(&scratch[from.start as usize..from.end as usize]);
                    }
                    (Op::WriteZeroes, Buffer::None) => trace.disk[range].fill(0),
                    (Op::Discard | Op::Flush, Buffer::None) => (),
                    other => panic!("{other:?}"),
                }
                completed = Some(Completed { slot: io.slot, status });
                let Some(Sense { key: Key::NotReady, specific: Specific::Progress(progress), .. }) =
                    state.sense()
                else {
                    panic!("not in progress")
                };
                assert!(progress >= last, "progress never decreases");
                last = progress;
            }
            Step::Finished(outcome) => {
                assert!(flying.is_empty());
                trace.outcome = Some(outcome);
                return trace;
            }
        }
    }
}

fn overwrite(first: u8, pattern: &[u8]) -> Vec<u8> {
    [&[first, 0][..], &(pattern.len() as u16).to_be_bytes(), pattern].concat()
}

#[test]
fn overwrite_fills_every_block_with_the_pattern_and_inverts_every_second_pass() {
    for (first, complement, passes) in [(0x01, 0, 1), (0x82, 0xFF, 2), (0x83, 0, 3), (0x02, 0, 2)] {
        let (nexus, state) = (nexus(Can::empty(), 9_001), Arc::default());
        let list = overwrite(first, &[1, 2, 3]);
        let begin = begin(&nexus, &state, &cdb(action::OVERWRITE, list.len()), &list, |_| ());
        assert_eq!(state.check(&[0x28]).unwrap_err().ascq, 0x1B);
        let trace = run(9_001, begin, &state, 0, usize::MAX);
        assert_eq!(trace.outcome, Some(Outcome::good(list.len() as u64)));
        let block: Vec<u8> =
            [1, 2, 3].into_iter().cycle().take(512).map(|byte: u8| byte ^ complement).collect();
        assert!(trace.disk.chunks(512).all(|other| other == block), "{first:02x}");
        assert_eq!(trace.ops.iter().filter(|op| **op == Op::Flush).count(), passes);
        assert_eq!(state.sense(), None);
    }
}

#[test]
fn block_erase_writes_zeroes_and_discards_where_that_reads_as_zeroes() {
    let all = Can::UNMAP | Can::WRITE_ZEROES | Can::UNMAP_ZEROES;
    for (can, expected) in [
        (all, vec![Op::WriteZeroes, Op::Flush, Op::Discard, Op::Flush]),
        (Can::UNMAP | Can::WRITE_ZEROES, vec![Op::WriteZeroes, Op::Flush]),
        (Can::UNMAP | Can::UNMAP_ZEROES, vec![Op::Write, Op::Flush, Op::Discard, Op::Flush]),
    ] {
        let (nexus, state) = (nexus(can, 64), Arc::default());
        assert!(supports(&nexus.unit().media(), true, action::BLOCK_ERASE));
        let trace =
            run(64, begin(&nexus, &state, &cdb(action::BLOCK_ERASE, 0), &[], |_| ()), &state, 0, usize::MAX);
        assert_eq!(trace.ops, expected);
        assert!(trace.disk.iter().all(|byte| *byte == 0));
    }
    let media = Media::new(64, 512);
    assert!(!supports(&media, false, action::BLOCK_ERASE) && !supports(&media, true, action::BLOCK_ERASE));
    assert!(!supports(&media, true, 0x03), "CRYPTO ERASE");
}

#[test]
fn with_immed_the_command_ends_before_the_operation() {
    let (nexus, state) = (nexus(Can::empty(), 64), Arc::default());
    let list = overwrite(1, &[9]);
    let begin = begin(&nexus, &state, &cdb(0x80 | action::OVERWRITE, list.len()), &list, |_| ());
    let trace = run(64, begin, &state, 0, usize::MAX);
    assert_eq!((trace.early, trace.outcome), (Some(Outcome::good(5)), Some(Outcome::good(5))));
}

#[test]
fn while_it_runs_few_commands_are_processed() {
    let state = Arc::<Sanitize>::default();
    let operation = state.begin(false);
    for opcode in [0x12, 0xA0, 0x03, 0x4D] {
        assert!(state.check(&[opcode, 0]).is_ok());
    }
    for opcode in [0x00, 0x1B, 0x28, 0x2A, 0x88, 0x1A, 0x48, 0x5F] {
        let sense = state.check(&[opcode, 0]).unwrap_err();
        assert_eq!((sense.key, sense.asc, sense.ascq), (Key::NotReady, 0x04, 0x1B), "{opcode:02x}");
    }
    assert!(state.begin(false).is_none(), "one at a time");
    drop(operation);
}

#[test]
fn a_failed_operation_leaves_only_sanitize_and_exit_failure_mode_needs_ause() {
    let list = overwrite(1, &[9]);
    for (flags, drops) in [(0x20, usize::MAX), (0x00, usize::MAX), (0x20, 3)] {
        let (nexus, state) = (nexus(Can::empty(), 30_000), Arc::default());
        let cdb = cdb(flags | action::OVERWRITE, list.len());
        let trace = run(30_000, begin(&nexus, &state, &cdb, &list, |_| ()), &state, 2.min(drops - 1), drops);
        if drops == usize::MAX {
            assert_eq!(trace.outcome, Some(Outcome::check(SANITIZE_FAILED)));
        }
        assert_eq!(state.check(&[0x28]), Err(SANITIZE_FAILED));
        assert!(state.check(&[0x48, 0x1F]).is_ok());
        let result = state.exit_failure_mode();
        assert_eq!(result.is_ok(), flags != 0);
        assert_eq!(state.sense().is_none(), flags != 0);
        // A new operation that succeeds also ends the failed state.
        run(30_000, begin(&nexus, &state, &cdb, &list, |_| ()), &state, 0, usize::MAX);
        assert_eq!(state.sense(), None);
    }
    assert_eq!(Sanitize::default().exit_failure_mode(), Ok(()), "nothing failed");
}

#[test]
fn the_parameter_list_fits_the_service_action_and_the_block_size() {
    let media = Media::new(64, 512);
    for len in [0, 1, 4, 517, 60_000] {
        assert_eq!(list_len(&cdb(action::OVERWRITE, len), &media), Err(Sense::cdb_field(7, None)), "{len}");
    }
    assert_eq!(list_len(&cdb(action::OVERWRITE, 516), &media), Ok(516));
    for action in [action::BLOCK_ERASE, action::EXIT_FAILURE_MODE] {
        assert_eq!(list_len(&cdb(action, 8), &media), Err(Sense::cdb_field(7, None)));
        assert_eq!(list_len(&cdb(action, 0), &media), Ok(0));
    }
    let parse = |list: &[u8]| steps::Overwrite::parse(list, &media);
    assert_eq!(parse(&overwrite(0, &[1])), Err(Sense::parameter_field(0, Some(4))), "count zero");
    assert_eq!(parse(&overwrite(0x21, &[1])), Err(Sense::parameter_field(0, Some(6))), "TEST");
    assert_eq!(parse(&overwrite(1, &[])), Err(Sense::parameter_field(2, None)));
    assert_eq!(parse(&overwrite(1, &[1; 516])), Err(Sense::parameter_field(2, None)));
    assert_eq!(parse(&[1, 0, 0, 9, 1]), Err(Sense::PARAMETER_LIST_LENGTH));
}

proptest! {
    #[test]
    fn foreign_bytes_never_panic(cdb in any::<[u8; 10]>(), list in prop::collection::vec(any::<u8>(), 0..40)) {
        let media = Media::new(64, 512);
        let _ = list_len(&cdb, &media);
        let _ = steps::Overwrite::parse(&list, &media);
        let _ = Sanitize::default().check(&cdb);
    }
}
