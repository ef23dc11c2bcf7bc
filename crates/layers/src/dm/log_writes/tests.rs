//! Tests of log-writes: the log on its device.

use super::super::background::Disks;
use super::super::harness::Harness;
use super::super::testing::{build, error, names};
use super::super::{MessageError, Status};
use super::format::{DISCARD, ENTRY_LEN, FLUSH, FUA, Head, MARK, Super};
use super::shared::{Entry, Log, Next};
use block::{Bytes, Flags, Op, Request, Status as End};
use queue::Nanos;
use std::io;

fn harness() -> Harness {
    Harness::new("log-writes", "a log")
}

/// The entries in the log: headers, with the data or the text of a mark.
fn log(harness: &Harness) -> Vec<(Head, Vec<u8>)> {
    let first: [u8; 512] = harness.content(1, 0, 512).try_into().unwrap();
    let first = Super::decode(&first).expect("a log");
    assert_eq!(first.block, 512);
    let mut at = 1;
    let entry = |number| {
        let block = harness.content(1, at, 512);
        let head = Head::decode(&block, number).expect("an entry");
        let data = match head.text_len {
            0 => harness.content(1, at + 1, (head.data_blocks() * 512) as usize),
            len => block[ENTRY_LEN..ENTRY_LEN + len as usize].to_vec(),
        };
        at += 1 + head.data_blocks();
        (head, data)
    };
    (0..first.entries).map(entry).collect()
}

fn head(sector: u64, sectors: u64, flags: u64) -> Head {
    Head { sector, sectors, flags, text_len: 0 }
}

#[test]
fn table_status_repeats_the_line() {
    let target = build("log-writes", "8:0 8:16");
    assert_eq!(target.status(Status::Table, &names(&["8:0", "8:16"])), "8:0 8:16");
    assert_eq!(target.status(Status::Info, &names(&["8:0", "8:16"])), "0 0");
    assert_eq!(error("log-writes", "a"), "Invalid argument count");
    assert_eq!(error("log-writes", "missing b"), "Device lookup failed: missing: no such device");
    assert_eq!(error("log-writes", "a missing"), "Log device lookup failed: missing: no such device");
}

#[test]
fn a_write_cache_is_reported_whatever_the_device_has() {
    use block::Features;
    let harness = harness();
    let below = super::super::testing::profile(Bytes::gib(1));
    assert!(!below.limits.features.contains(Features::WRITE_CACHE), "the device would not be flushed");
    assert!(harness.profile.limits.features.contains(Features::WRITE_CACHE.union(Features::FUA)));
}

#[test]
fn writes_that_a_flush_made_durable_are_logged_before_it() {
    let mut harness = harness();
    assert_eq!(harness.write(8, &[1; 1024]), End::Ok);
    assert_eq!(harness.write(0, &[2; 512]), End::Ok);
    assert_eq!(harness.run(Op::Discard, 64, 16).0, End::Ok);
    assert_eq!(harness.target.status(Status::Info, &names(&["a", "b"])), "0 0", "nothing is durable yet");
    assert_eq!(harness.run(Op::Flush, 0, 0).0, End::Ok);
    let wanted = [
        (head(8, 2, 0), vec![1; 1024]),
        (head(0, 1, 0), vec![2; 512]),
        (head(64, 16, DISCARD), vec![]),
        (head(0, 0, FLUSH), vec![]),
    ];
    assert_eq!(log(&harness), wanted);
    // A super block, four entries, and three sectors of data: 0 to 7.
    assert_eq!(harness.target.status(Status::Info, &names(&["a", "b"])), "4 7");
    assert_eq!(harness.content(0, 8, 1024), [1; 1024]);
    assert_eq!(harness.ring.memory.live, 0);
}

#[test]
fn a_fua_write_is_logged_when_it_completes() {
    let mut harness = harness();
    assert_eq!(harness.write(8, &[1; 512]), End::Ok);
    assert_eq!(harness.write_with(16, &[3; 512], Flags::FUA), End::Ok);
    assert_eq!(log(&harness), [(head(16, 1, FUA), vec![3; 512])], "the unflushed write is not logged");
    assert_eq!(harness.run(Op::Flush, 0, 0).0, End::Ok);
    assert_eq!(log(&harness).len(), 3);
}

#[test]
fn a_mark_is_logged_between_earlier_and_later_writes() {
    let mut harness = harness();
    let target = harness.target.clone();
    let mark = |text: &str| target.message(&["MARK", text], &names(&[]));
    assert_eq!(harness.write_with(0, &[1; 512], Flags::FUA), End::Ok);
    assert_eq!(mark("one"), Ok(None));
    assert_eq!(harness.target.status(Status::Info, &names(&["a", "b"])), "2 3");
    assert_eq!(harness.write_with(1, &[2; 512], Flags::FUA), End::Ok);
    let marks = head(0, 0, MARK);
    assert_eq!(log(&harness)[1], (Head { text_len: 3, ..marks }, b"one".to_vec()));
    assert_eq!(mark(&"x".repeat(1000)), Ok(None));
    assert_eq!(harness.write(5, &[2; 512]), End::Ok, "a plain write also writes the mark");
    assert_eq!(log(&harness)[3].1.len(), 479, "the part that fits its block");
    for args in [&["mark"][..], &["mark", "a", "b"], &["tell", "a"], &[]] {
        assert_eq!(target.message(args, &names(&[])), Err(MessageError::Invalid));
    }
}

#[test]
fn a_large_write_is_logged_in_several_requests() {
    let mut harness = harness();
    let data: Vec<u8> = (0..512 << 10).map(|at| (at / 512 % 251) as u8).collect();
    assert_eq!(harness.write_with(0, &data, Flags::FUA), End::Ok);
    assert_eq!(log(&harness), [(head(0, 1024, FUA), data)]);
}

#[test]
fn write_zeroes_is_not_supported() {
    let mut harness = harness();
    assert_eq!(harness.run(Op::WriteZeroes, 0, 8).0, End::NotSupported);
    assert!(!harness.profile.abilities.write_zeroes && harness.profile.abilities.discard);
    assert_eq!(harness.read(0, 512), (End::Ok, vec![0; 512]));
}

#[test]
fn a_failed_or_full_log_device_disables_logging_only() {
    let mut harness = harness();
    harness.fail(1, End::IoError);
    assert_eq!(harness.write_with(0, &[1; 512], Flags::FUA), End::Ok);
    assert_eq!(harness.write_with(0, &[2; 512], Flags::FUA), End::Ok);
    assert_eq!(harness.target.status(Status::Info, &names(&["a", "b"])), "1 2 logging_disabled");
    let mut harness = self::harness();
    // 4 MiB of log hold seven writes of 512 KiB and their blocks, and not eight.
    for _ in 0..9 {
        assert_eq!(harness.write_with(0, &[1; 512 << 10], Flags::FUA), End::Ok);
    }
    assert!(harness.target.status(Status::Info, &names(&["a", "b"])).ends_with("logging_disabled"));
    assert_eq!(log(&harness).len(), 7);
}

#[test]
fn failed_writes_are_logged_as_in_the_kernel() {
    let mut harness = harness();
    harness.fail(0, End::IoError);
    assert_eq!(harness.write_with(0, &[1; 512], Flags::FUA), End::IoError);
    assert_eq!(log(&harness).len(), 1);
}

/// The log device of the background work; a client submits a discard during the first write to it.
struct ConcurrentWriter<'a> {
    harness: &'a mut Harness,
    armed: bool,
}

impl Disks for ConcurrentWriter<'_> {
    fn read(&mut self, _: usize, _: Bytes, _: &mut [u8]) -> io::Result<()> {
        unreachable!("a log is only written")
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        if std::mem::take(&mut self.armed) {
            let discard = Request::new(Op::Discard, Bytes(4096), Bytes(4096));
            self.harness.submit(Request { flags: Flags::FUA, ..discard });
            assert_eq!(self.harness.in_flight(), 1, "its entry is not in the log yet");
        }
        let at = at.0 as usize;
        self.harness.disks[device].borrow_mut().content[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn flush(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_request_that_completes_while_the_log_is_written_waits_for_its_own_entry() {
    let mut harness = harness();
    let target = harness.target.clone();
    target.message(&["mark", "one"], &names(&[])).unwrap();
    let work = target.background_work().unwrap();
    assert!(work.is_due(Nanos(0)));
    work.step(Nanos(0), &mut ConcurrentWriter { harness: &mut harness, armed: true });
    assert_eq!(harness.drain(), [End::Ok]);
    let found: Vec<Head> = log(&harness).into_iter().map(|(head, _)| head).collect();
    assert_eq!(found[1], head(8, 8, DISCARD | FUA));
}

#[test]
fn the_log_is_written_once_memory_is_available_and_all_is_freed() {
    for short in 1..6 {
        let mut harness = harness();
        // Background work would write the log instead of the node.
        harness.background.clear();
        harness.ring.memory.short = short;
        let discard = Request::new(Op::Discard, Bytes(0), Bytes(4096));
        assert_eq!(harness.request(Request { flags: Flags::FUA, ..discard }).0, End::Ok);
        assert_eq!(log(&harness), [(head(0, 8, DISCARD | FUA), vec![])], "{short}");
        assert_eq!((harness.ring.memory.short, harness.ring.memory.live), (0, 0));
    }
}

#[test]
fn the_super_block_counts_only_written_entries() {
    let log = Log::new(512, block::Sectors(1024));
    let entry = || Entry { head: head(0, 0, FLUSH), data: Box::default() };
    log.append([entry()]);
    assert!(log.claim() && !log.claim());
    assert_eq!(log.next(), Next::Entries(512));
    log.fill(&mut [0; 512]);
    let next = log.next();
    assert_eq!(next, Next::Super(Super { entries: 1, block: 512 }));
    log.append([entry()]);
    assert!(!log.holds(1), "the super block is not written yet");
    log.super_written(1);
    assert!(log.holds(1) && !log.holds(2));
    assert_eq!(log.next(), Next::Entries(512));
    log.fill(&mut [0; 512]);
    log.super_written(2);
    assert_eq!(log.next(), Next::Nothing);
    assert!(!log.claim(), "nothing is pending");
}
