use super::*;
use block::{Bytes, Tag};

fn point(number: u32, cdb: &[u8], event: CommandEvent) -> CommandPoint {
    let mut bytes = [0; CDB_MAX];
    bytes[..cdb.len()].copy_from_slice(cdb);
    let (session, lun, task, cdb_len) = (3, 2, 0x1000_0001, cdb.len() as u8);
    CommandPoint { number, session, lun, task, cdb: bytes, cdb_len, event }
}

fn request() -> CommandEvent {
    let (tag, op, offset, len) = (Tag(5), Op::Write, Bytes(2488 << 9), Bytes(4096));
    CommandEvent::Request { tag, op, offset, len, is_foreign: false }
}

fn ended(status: u8, sense: [u8; 3]) -> CommandEvent {
    CommandEvent::Ended { status, sense, is_silent: false, bytes: 4096 }
}

fn records(time_ns: u64, point: &CommandPoint, begins: bool) -> Vec<Record> {
    let mut records = Vec::new();
    encode(time_ns, point, begins, |record| records.push(Record::from_words(record.to_words())));
    records
}

const WRITE_10: [u8; 10] = [0x2a, 0, 0, 0, 0x09, 0xb8, 0, 0, 8, 0];

/// Returns the records of a WRITE(10) of 8 blocks.
pub(crate) fn write_10(time_ns: u64) -> Vec<Record> {
    let events = [CommandEvent::Begun, request(), ended(0, [0; 3])];
    let of = |(at, event)| records(time_ns + at as u64, &point(17, &WRITE_10, event), false);
    events.into_iter().enumerate().flat_map(of).collect()
}

fn messages(records: &[Record]) -> Vec<String> {
    let mut commands = Commands::default();
    let text = |record| Some(message(&commands.record(record)?, record, &Sessions::default()));
    records.iter().filter_map(text).collect()
}

#[test]
fn cdbs_of_every_length_arrive_whole() {
    for len in [6, 8, 10, 12, 16, 22, 23, 32] {
        let cdb: Vec<u8> = (0..len).map(|byte| 0x80 + byte).collect();
        let mut commands = Commands::default();
        let all = records(1, &point(1, &cdb, CommandEvent::Begun), false);
        let texts: Vec<String> = all
            .iter()
            .filter_map(|record| match commands.record(record)? {
                Note::Begun(command) => Some(command.cdb()),
                _ => None,
            })
            .collect();
        let expected: Vec<String> = cdb.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(texts, [expected.join(" ")], "{len}");
    }
}

#[test]
fn the_end_has_status_and_sense() {
    let of = |event| {
        let begun = records(1, &point(17, &WRITE_10, CommandEvent::Begun), false);
        messages(&[begun, records(2, &point(17, &WRITE_10, event), false)].concat())[1].clone()
    };
    assert_eq!(of(ended(0, [0; 3])), "scsi 17: WRITE(10) ended, GOOD, 4096 bytes");
    let sense = "scsi 17: WRITE(10) ended, CHECK CONDITION, sense 5/24/00 (ILLEGAL REQUEST), 4096 bytes";
    assert_eq!(of(ended(2, [5, 0x24, 0])), sense);
    assert_eq!(of(ended(0x18, [0; 3])), "scsi 17: WRITE(10) ended, RESERVATION CONFLICT, 4096 bytes");
    let aborted = CommandEvent::Ended { status: 0, sense: [0; 3], is_silent: true, bytes: 0 };
    assert_eq!(of(aborted), "scsi 17: WRITE(10) ended, aborted, 0 bytes");
}

#[test]
fn a_command_whose_beginning_was_dropped_has_no_end() {
    let all = write_10(1);
    assert_eq!(messages(&all).len(), 3);
    assert_eq!(messages(&all[1..]), ["scsi 17: request write 2488 + 8"], "its CDB is incomplete");
}

#[test]
fn a_beginning_that_comes_with_each_request_is_shown_once() {
    let with = records(1, &point(17, &WRITE_10, request()), true);
    let texts = messages(&[with.clone(), with].concat());
    assert_eq!(texts.len(), 3, "{texts:?}");
    assert!(texts[0].contains("WRITE(10), cdb"));
}

#[test]
fn any_record_is_read_without_a_panic() {
    let mut commands = Commands::default();
    let mut state = 1_u64;
    for _ in 0..20_000 {
        let mut word = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state
        };
        let (offset, value, low) = (word(), word() >> 16, word());
        let record = Record {
            offset,
            value,
            tag: (low >> 40) as u16 & 0x3f,
            len: (low >> 8) as u32 & 3,
            from: (low >> 60) as u8 & 3,
            device: low as u8,
            ..write_10(1)[0]
        };
        let Some(note) = commands.record(&record) else { continue };
        assert!(message(&note, &record, &Sessions::default()).starts_with("scsi "));
    }
}

#[test]
fn commands_of_zones_are_named_by_their_service_action() {
    let begun = |cdb: &[u8]| messages(&records(1, &point(1, cdb, CommandEvent::Begun), false)).concat();
    assert!(begun(&[0x94, 0x04, 0, 0, 0, 0, 0, 0, 2, 0]).contains("RESET WRITE POINTER"));
    assert!(begun(&[0x95, 0x00, 0, 0, 0, 0, 0, 0, 2, 0]).contains("REPORT ZONES"));
}
