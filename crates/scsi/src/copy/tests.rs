use super::*;
use crate::program::{Buffer, Completed, ProgramMemory, Step, Target};
use crate::{Access, Attributes, Identity, LogicalUnit, Lun, Media, NexusName};
use block::{Op, Status};
use proptest::prelude::*;

const BLOCK: usize = 512;

struct Disk {
    nexus: Arc<Nexus>,
    data: Vec<u8>,
}

fn disk(number: u8, blocks: u64) -> Disk {
    let serial = format!("{number:02x}5-7f2a-2e05-2b42-4a8f9c0e77f6a0");
    let unit = LogicalUnit::new(
        Identity::new("v", "p", "1", &serial),
        Media::new(blocks, 512),
        Attributes::default(),
    );
    let name = NexusName {
        initiator: "iqn.i".into(),
        isid: [1; 6],
        target: "iqn.t".into(),
        portal_group: 1,
        relative_port: 1,
    };
    let nexus = unit.attach_nexus(name, Lun::new(number.into()), Access::ReadWrite);
    let data = (0..blocks as usize * BLOCK)
        .map(|at| (at / BLOCK) as u8 ^ (at as u8).rotate_left(3) ^ number)
        .collect();
    Disk { nexus, data }
}

fn cscd(nexus: &Nexus) -> [u8; 32] {
    let mut cscd = [0; 32];
    [cscd[0], cscd[4], cscd[5], cscd[7], cscd[30]] = [0xE4, 1, 3, 16, 2];
    cscd[8..24].copy_from_slice(&nexus.unit().identity().naa);
    cscd
}

fn segment(source: u16, destination: u16, blocks: u16, from: u64, to: u64) -> [u8; 28] {
    let mut segment = [0; 28];
    [segment[0], segment[3]] = [0x02, 0x18];
    segment[4..6].copy_from_slice(&source.to_be_bytes());
    segment[6..8].copy_from_slice(&destination.to_be_bytes());
    segment[10..12].copy_from_slice(&blocks.to_be_bytes());
    segment[12..20].copy_from_slice(&from.to_be_bytes());
    segment[20..28].copy_from_slice(&to.to_be_bytes());
    segment
}

fn list(cscds: &[[u8; 32]], segments: &[[u8; 28]]) -> Vec<u8> {
    let mut list = vec![0; 16];
    list[0] = 1;
    list[2..4].copy_from_slice(&(32 * cscds.len() as u16).to_be_bytes());
    list[8..12].copy_from_slice(&(28 * segments.len() as u32).to_be_bytes());
    list.extend(cscds.iter().flatten());
    list.extend(segments.iter().flatten());
    list
}

/// Executes a program on in-memory disks. `newest_first` selects the order in which requests complete.
/// Returns the outcome, and the largest number of requests in flight.
fn run(disks: &mut [Disk], begin: Begin, newest_first: bool, fails: Option<usize>) -> (Outcome, usize) {
    let mut program = match begin {
        Begin::Program(program) => program,
        Begin::Finished(outcome) => return (outcome, 0),
        other => panic!("{other:?}"),
    };
    let mut scratch = vec![0; program.needs().scratch as usize];
    let (mut flying, mut completed, mut most, mut count) = (Vec::new(), None, 0, 0);
    loop {
        let mut memory = ProgramMemory { data_out: &[], scratch: &mut scratch };
        match program.step(completed.take(), &mut memory) {
            Step::Submit(io) => flying.push(io),
            Step::Wait => {
                let io = if newest_first { flying.pop() } else { Some(flying.remove(0)) }.unwrap();
                let index = match &io.unit {
                    Target::Own => 0,
                    Target::Other(nexus) => disks.iter().position(|d| Arc::ptr_eq(&d.nexus, nexus)).unwrap(),
                };
                let Buffer::Scratch(range) = io.buffer else { panic!("no scratch") };
                let (start, len) = (io.offset as usize, io.len as usize);
                let scratch = &mut scratch[range.start as usize..range.end as usize];
                let data = &mut disks[index].data[start..start + len];
                count += 1;
                let status = if fails == Some(count) { Status::IoError } else { Status::Ok };
                match io.op {
                    _ if status != Status::Ok => (),
                    Op::Read => scratch.copy_from_slice(data),
                    _ => data.copy_from_slice(scratch),
                }
                completed = Some(Completed { slot: io.slot, status });
            }
            Step::Finished(outcome) => return (outcome, most),
            Step::Respond(outcome) => panic!("{outcome:?}"),
        }
        most = most.max(flying.len());
    }
}

fn start(disks: &[Disk], list: &[u8], results: &CopyResults) -> Begin {
    let find = |naa: &[u8]| {
        let found = disks.iter().find(|disk| disk.nexus.unit().identity().naa == naa);
        found.map(|disk| disk.nexus.clone())
    };
    begin(&disks[0].nexus, list, results, &find, |_, _| true)
}

fn copy(disks: &mut [Disk], list: &[u8]) -> Outcome {
    let begin = start(disks, list, &CopyResults::default());
    run(disks, begin, false, None).0
}

#[test]
fn a_copy_between_units_moves_every_block_with_two_chunks_in_flight() {
    for newest_first in [false, true] {
        let mut disks = [disk(1, 16_384), disk(2, 20_000)];
        let before = disks[0].data.clone();
        let cscds = [cscd(&disks[0].nexus), cscd(&disks[1].nexus)];
        let list = list(&cscds, &[segment(0, 1, 10_001, 5, 9_000), segment(1, 0, 7, 9_000, 16_377)]);
        let begin = start(&disks, &list, &CopyResults::default());
        let (outcome, most) = run(&mut disks, begin, newest_first, None);
        assert_eq!((outcome, most), (Outcome::good(list.len() as u64), 2));
        assert!(disks[1].data[9_000 * BLOCK..19_001 * BLOCK] == before[5 * BLOCK..10_006 * BLOCK]);
        assert!(disks[0].data[16_377 * BLOCK..] == before[5 * BLOCK..12 * BLOCK], "the second segment");
    }
}

#[test]
fn a_copy_may_overlap_itself_in_either_direction() {
    for (from, to) in [(0, 3), (3, 0), (100, 2_300), (2_300, 100)] {
        let mut disks = [disk(1, 16_384)];
        let before = disks[0].data.clone();
        let list = list(&[cscd(&disks[0].nexus)], &[segment(0, 0, 5_000, from, to)]);
        assert_eq!(copy(&mut disks, &list).status, crate::ScsiStatus::Good);
        let at = |lba: u64| lba as usize * BLOCK..(lba as usize + 5_000) * BLOCK;
        assert!(disks[0].data[at(to)] == before[at(from)], "{from} to {to}");
    }
}

#[test]
fn the_list_length_descriptor_counts_and_types_are_checked_in_this_order() {
    let mut disks = [disk(1, 16_384)];
    let (target, one) = (cscd(&disks[0].nexus), segment(0, 0, 1, 0, 1));
    let check = |disks: &mut [Disk], list: &[u8]| copy(disks, list).sense;
    assert_eq!(copy(&mut disks, &[]), Outcome::good(0), "no list is no error");
    let good = list(&[target], &[one]);
    for cut in [1, 15, 16 + 31, 16 + 32 + 27] {
        assert_eq!(check(&mut disks, &good[..cut]), Sense::PARAMETER_LIST_LENGTH, "{cut}");
    }
    let (targets, segments) = (vec![target; CSCD_MAX as usize + 1], vec![one; SEGMENTS_MAX as usize + 1]);
    assert_eq!(check(&mut disks, &list(&targets, &[one])), TOO_MANY_TARGETS);
    assert_eq!(check(&mut disks, &list(&[target], &segments)), TOO_MANY_SEGMENTS);
    assert_eq!(check(&mut disks, &list(&targets, &segments)), Sense::PARAMETER_LIST_LENGTH);
    let change = |at: usize, byte: u8| {
        let mut list = good.clone();
        list[at] = byte;
        list
    };
    assert_eq!(check(&mut disks, &change(16, 0xE0)), UNSUPPORTED_TARGET);
    assert_eq!(check(&mut disks, &change(48, 0x03)), UNSUPPORTED_SEGMENT);
    assert_eq!(check(&mut disks, &change(17, 0xC0)), Sense::NONE, "LU ID TYPE is ignored");
    assert_eq!(check(&mut disks, &change(1, 0x08)), Sense::parameter_field(1, Some(4)), "LIST ID USAGE");
    assert_eq!(check(&mut disks, &change(51, 0x17)), Sense::parameter_field(50, None), "descriptor length");
}

#[test]
fn a_segment_that_cannot_be_copied_aborts_the_copy_with_its_number() {
    let mut disks = [disk(1, 16_384)];
    let target = cscd(&disks[0].nexus);
    let (mut null, mut unknown, mut blocks) = (target, target, target);
    (null[1], unknown[20], blocks[30]) = (0x20, 0xAA, 0x10);
    let good = segment(0, 0, 1, 0, 1);
    for (cscds, bad, sense) in [
        (vec![target], segment(0, 1, 1, 0, 0), NOT_REACHABLE),
        (vec![target, unknown], segment(0, 1, 1, 0, 0), NOT_REACHABLE),
        (vec![target, null], segment(0, 1, 1, 0, 0), UNREACHABLE_TARGET),
        (vec![target, blocks], segment(0, 1, 1, 0, 0), COPY_ABORTED),
        (vec![target], segment(0, 0, 2048, 0, 16_383), COPY_ABORTED),
        (vec![target], segment(0, 0, 1, u64::MAX, 0), COPY_ABORTED),
    ] {
        let outcome = copy(&mut disks, &list(&cscds, &[good, bad]));
        assert_eq!(outcome.sense, Sense { command: Some(1), ..sense });
    }
}

#[test]
fn a_failed_request_ends_the_copy_and_its_details_are_held_until_they_are_read() {
    let mut disks = [disk(1, 16_384)];
    let (results, media) = (CopyResults::default(), disks[0].nexus.unit().media());
    let list = list(&[cscd(&disks[0].nexus)], &[segment(0, 0, 8_000, 0, 8_000)]);
    let begin = start(&disks, &list, &results);
    let name = disks[0].nexus.name().clone();
    let ask = |action: u8, id: u8| {
        receive(&[0x84, action, id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0], &name, &results, &media)
    };
    assert_eq!(ask(0, 1).unwrap().0[4], 0, "in progress");
    let (outcome, _) = run(&mut disks, begin, false, Some(3));
    assert_eq!(outcome.sense, Sense { command: Some(0), ..THIRD_PARTY_FAILURE });
    assert_eq!(ask(0, 2), Err(Sense::cdb_field(2, None)), "another list identifier");
    let details = ask(4, 1).unwrap().0;
    assert_eq!((details[3] as usize, details[56], details[59]), (details.len() - 4, 0x02, 18));
    assert_eq!((details[62], details[72], details[73]), (0x0A, 0x0D, 0x01));
    assert_eq!(ask(0, 1), Err(Sense::cdb_field(2, None)), "it was read");
}

#[test]
fn copy_status_counts_bytes_and_segments() {
    let mut disks = [disk(1, 16_384)];
    let (results, media) = (CopyResults::default(), disks[0].nexus.unit().media());
    let list = list(&[cscd(&disks[0].nexus)], &[segment(0, 0, 100, 0, 200), segment(0xFFFF, 0, 4, 0, 900)]);
    let begin = start(&disks, &list, &results);
    run(&mut disks, begin, false, None);
    let name = disks[0].nexus.name().clone();
    let (data, _) = receive(&[0x84, 0, 1], &name, &results, &media).unwrap();
    assert_eq!(data, [0, 0, 0, 8, 1, 0, 2, 0, 0, 0, 0xD0, 0]);
}

#[test]
fn operating_parameters_and_vpd_8f_agree_with_what_is_enforced() {
    let media = Media::new(1 << 20, 4096);
    let name = disk(1, 8).nexus.name().clone();
    let (data, _) = receive(&[0x84, 0x03, 0], &name, &CopyResults::default(), &media).unwrap();
    assert_eq!((data.len(), data[3], data[4]), (46, 42, 1));
    assert_eq!(data[8..16], [0, 16, 0, 64, 0, 0, 0x09, 0x00]);
    assert_eq!(u32::from_be_bytes(data[16..20].try_into().unwrap()), 65_535 * 4096);
    assert_eq!((data[37], &data[43..]), (12, &[2, 0x02, 0xE4][..]));
    let page = third_party_page(&media);
    let (mut at, mut kinds) = (0, Vec::new());
    while at < page.len() {
        let len = usize::from(u16::from_be_bytes([page[at + 2], page[at + 3]]));
        assert_eq!(len % 4, 0);
        kinds.push(u16::from_be_bytes([page[at], page[at + 1]]));
        at += 4 + len;
    }
    assert_eq!((at, kinds), (page.len(), vec![1, 4, 8, 0x0C, 0x8001]));
    assert!(receive(&[0x84, 0x05], &name, &CopyResults::default(), &media).is_err());
}

proptest! {
    #[test]
    fn foreign_lists_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..160), fix in any::<bool>()) {
        let mut bytes = bytes;
        if fix && bytes.len() > 80 {
            (bytes[1], bytes[2], bytes[3]) = (0, 0, 32);
            bytes[8..16].copy_from_slice(&[0, 0, 0, 28, 0, 0, 0, 0]);
            (bytes[16], bytes[17]) = (0xE4, bytes[17] & 0x20);
            (bytes[48], bytes[50], bytes[51]) = (0x02, 0, 0x18);
        }
        let mut disks = [disk(1, 64)];
        let begin = start(&disks, &bytes, &CopyResults::default());
        let _ = run(&mut disks, begin, false, None);
        let name = disks[0].nexus.name().clone();
        let _ = receive(&bytes, &name, &CopyResults::default(), &disks[0].nexus.unit().media());
    }
}
