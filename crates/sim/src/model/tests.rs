use super::*;
use crate::fill_sector;

const ONE: Sectors = Sectors(1);
const AT: Sectors = Sectors(3);

fn model() -> Model {
    Model::new(Sectors(8), false)
}

fn content(version: Option<u64>) -> [u8; SECTOR_LEN] {
    let mut bytes = [0; SECTOR_LEN];
    if let Some(version) = version {
        fill_sector(&mut bytes, AT.0, version);
    }
    bytes
}

fn begin(model: &mut Model, op: Op) -> Ticket {
    model.begin(op, Flags::empty(), AT, ONE)
}

/// A completed write; returns its version.
fn write(model: &mut Model, flags: Flags, status: Status) -> Option<u64> {
    let ticket = model.begin(Op::Write, flags, AT, ONE);
    model.end(ticket, status);
    Some(ticket.start)
}

fn flush(model: &mut Model) {
    let ticket = model.begin(Op::Flush, Flags::empty(), Sectors(0), Sectors(0));
    model.end(ticket, Status::Ok);
}

fn end_read(model: &mut Model, ticket: Ticket, version: Option<u64>) -> bool {
    model.end_read(ticket, Status::Ok, [&content(version)[..]].into_iter()).is_ok()
}

fn may_read(model: &Model, version: Option<u64>) -> bool {
    let mut model = model.clone();
    let ticket = begin(&mut model, Op::Read);
    end_read(&mut model, ticket, version)
}

fn may_survive(model: &Model, version: Option<u64>) -> bool {
    let mut model = model.clone();
    model.power_cut();
    model.settle(AT, &content(version)).is_ok()
}

#[test]
fn a_write_that_ended_hides_earlier_writes() {
    let mut model = model();
    assert!(may_read(&model, None));
    let first = write(&mut model, Flags::empty(), Status::Ok);
    let second = write(&mut model, Flags::empty(), Status::Ok);
    assert!(may_read(&model, second) && !may_read(&model, first) && !may_read(&model, None));
    assert!(!may_read(&model, Some(999)));
}

#[test]
fn a_read_may_see_a_write_in_flight_or_not() {
    let mut model = model();
    let first = write(&mut model, Flags::empty(), Status::Ok);
    let read = begin(&mut model, Op::Read);
    let second = begin(&mut model, Op::Write);
    assert!(end_read(&mut model.clone(), read, first));
    assert!(end_read(&mut model.clone(), read, Some(second.start)));
    model.end(second, Status::Ok);
    assert!(end_read(&mut model.clone(), read, first), "the read began before the write ended");
    assert!(!may_read(&model, first));
}

#[test]
fn a_sector_is_read_torn_only_while_it_is_written() {
    let mut model = model();
    let first = write(&mut model, Flags::empty(), Status::Ok);
    let read = begin(&mut model, Op::Read);
    let second = begin(&mut model, Op::Write);
    let mut torn = content(first);
    torn[100..].copy_from_slice(&content(Some(second.start))[100..]);
    let end = |model: &Model, read, bytes: &[u8]| {
        model.clone().end_read(read, Status::Ok, [bytes].into_iter()).is_ok()
    };
    assert!(end(&model, read, &torn));
    model.end(second, Status::Ok);
    assert!(end(&model, read, &torn));
    assert!(!end(&model, read, &[0xA5; SECTOR_LEN]));
    let late = begin(&mut model, Op::Read);
    assert!(!end(&model, late, &torn));
}

#[test]
fn either_of_two_concurrent_writes_may_win() {
    let mut model = model();
    let (first, second) = (begin(&mut model, Op::Write), begin(&mut model, Op::Write));
    model.end(second, Status::Ok);
    model.end(first, Status::Ok);
    assert!(may_read(&model, Some(first.start)) && may_read(&model, Some(second.start)));
    assert!(!may_read(&model, None));
}

#[test]
fn a_write_that_failed_may_have_taken_effect() {
    let mut model = model();
    let first = write(&mut model, Flags::empty(), Status::Ok);
    let failed = write(&mut model, Flags::FUA, Status::IoError);
    assert!(may_read(&model, first) && may_read(&model, failed) && !may_read(&model, None));
}

#[test]
fn a_discard_leaves_zeroes_or_the_old_content_unless_it_promises_zeroes() {
    let mut model = model();
    let first = write(&mut model, Flags::empty(), Status::Ok);
    let discard = begin(&mut model, Op::Discard);
    model.end(discard, Status::Ok);
    assert!(may_read(&model, first) && may_read(&model, None));

    let mut model = Model::new(Sectors(8), true);
    let first = write(&mut model, Flags::empty(), Status::Ok);
    let discard = begin(&mut model, Op::Discard);
    model.end(discard, Status::Ok);
    assert!(!may_read(&model, first) && may_read(&model, None));
}

#[test]
fn write_zeroes_leaves_zeroes() {
    let mut model = model();
    let first = write(&mut model, Flags::empty(), Status::Ok);
    let zeroes = begin(&mut model, Op::WriteZeroes);
    assert!(may_read(&model, first) && may_read(&model, None));
    model.end(zeroes, Status::Ok);
    assert!(!may_read(&model, first) && may_read(&model, None));
}

#[test]
fn unflushed_writes_may_be_lost() {
    let mut model = model();
    let first = write(&mut model, Flags::empty(), Status::Ok);
    let second = write(&mut model, Flags::empty(), Status::Ok);
    assert!([None, first, second].into_iter().all(|version| may_survive(&model, version)));
}

#[test]
fn a_flush_makes_writes_stable_that_ended_before_it_started() {
    let mut model = model();
    let first = write(&mut model, Flags::empty(), Status::Ok);
    let late = begin(&mut model, Op::Write);
    flush(&mut model);
    model.end(late, Status::Ok);
    assert!(may_survive(&model, first) && may_survive(&model, Some(late.start)));
    assert!(!may_survive(&model, None));
    flush(&mut model);
    assert!(!may_survive(&model, first));
}

#[test]
fn a_failed_flush_makes_nothing_stable() {
    let mut model = model();
    write(&mut model, Flags::empty(), Status::Ok);
    let ticket = model.begin(Op::Flush, Flags::empty(), Sectors(0), Sectors(0));
    model.end(ticket, Status::IoError);
    assert!(may_survive(&model, None));
}

#[test]
fn fua_makes_its_own_write_stable() {
    let mut model = model();
    let first = write(&mut model, Flags::FUA, Status::Ok);
    assert!(may_survive(&model, first) && !may_survive(&model, None));
    let second = write(&mut model, Flags::empty(), Status::Ok);
    assert!(may_survive(&model, first) && may_survive(&model, second));
}

#[test]
fn content_found_after_a_power_cut_is_stable() {
    let mut model = model();
    let first = write(&mut model, Flags::empty(), Status::Ok);
    model.power_cut();
    assert!(may_read(&model, first) && may_read(&model, None));
    assert_eq!(model.settle(AT, &content(None)), Ok(()));
    assert!(may_survive(&model, None) && !may_survive(&model, first) && !may_read(&model, first));
}

#[test]
fn misdirected_and_torn_data_are_refused_by_name() {
    let mut model = model();
    let version = write(&mut model, Flags::empty(), Status::Ok);
    let mut elsewhere = [0; SECTOR_LEN];
    fill_sector(&mut elsewhere, AT.0 + 1, version.unwrap_or(0));
    let refused = model.settle(AT, &elsewhere).map_err(|violation| violation.to_string());
    assert!(refused.is_err_and(|text| text.contains("sector 3") && text.contains("sector: 4")));
    let refused = model.settle(AT, &[0xA5; SECTOR_LEN]).map_err(|violation| violation.to_string());
    assert!(refused.is_err_and(|text| text.contains("Garbage")));
}

#[test]
fn history_does_not_grow_once_flushed() {
    let mut model = model();
    for _ in 0..100 {
        write(&mut model, Flags::empty(), Status::Ok);
        flush(&mut model);
    }
    assert!(model.sectors[AT.0 as usize].len() <= 3);
}
