//! The log as it lies on its device.

use super::super::chore::Disks;
use super::super::rig::Rig;
use super::super::testing::{error, made, names};
use super::super::{MessageError, Status};
use super::format::{DISCARD, ENTRY_LEN, FLUSH, FUA, Head, MARK, Super};
use super::shared::{Entry, Log, Next};
use block::{Bytes, Flags, Op, Request, Status as End};
use queue::Nanos;
use std::io;

fn rig() -> Rig {
    Rig::new("log-writes", "a log")
}

/// What is in the log: heads, with a byte of their data or the text of marks.
fn log(rig: &Rig) -> Vec<(Head, Vec<u8>)> {
    let first: [u8; 512] = rig.content(1, 0, 512).try_into().unwrap();
    let first = Super::decode(&first).expect("a log");
    assert_eq!(first.block, 512);
    let mut at = 1;
    let entry = |number| {
        let block = rig.content(1, at, 512);
        let head = Head::decode(&block, number).expect("an entry");
        let data = match head.text_len {
            0 => rig.content(1, at + 1, (head.data_blocks() * 512) as usize),
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
fn a_line_is_read_and_shown_again() {
    let target = made("log-writes", "8:0 8:16");
    assert_eq!(target.status(Status::Table, &names(&["8:0", "8:16"])), "8:0 8:16");
    assert_eq!(target.status(Status::Info, &names(&["8:0", "8:16"])), "0 0");
    assert_eq!(error("log-writes", "a"), "Invalid argument count");
    assert_eq!(error("log-writes", "missing b"), "Device lookup failed: missing: it is not there");
    assert_eq!(error("log-writes", "a missing"), "Log device lookup failed: missing: it is not there");
}

#[test]
fn flushes_are_asked_for_whatever_is_below() {
    use block::Features;
    let rig = rig();
    let below = super::super::testing::profile(Bytes::gib(1));
    assert!(!below.limits.features.has(Features::WRITE_CACHE), "nothing below would be flushed");
    assert!(rig.profile.limits.features.has(Features::WRITE_CACHE.with(Features::FUA)));
}

#[test]
fn what_a_flush_made_durable_is_logged_before_it() {
    let mut rig = rig();
    assert_eq!(rig.write(8, &[1; 1024]), End::Ok);
    assert_eq!(rig.write(0, &[2; 512]), End::Ok);
    assert_eq!(rig.run(Op::Discard, 64, 16).0, End::Ok);
    assert_eq!(rig.target.status(Status::Info, &names(&["a", "b"])), "0 0", "nothing is durable yet");
    assert_eq!(rig.run(Op::Flush, 0, 0).0, End::Ok);
    let wanted = [
        (head(8, 2, 0), vec![1; 1024]),
        (head(0, 1, 0), vec![2; 512]),
        (head(64, 16, DISCARD), vec![]),
        (head(0, 0, FLUSH), vec![]),
    ];
    assert_eq!(log(&rig), wanted);
    // A super block, four entries, and three sectors of data: 0 to 7.
    assert_eq!(rig.target.status(Status::Info, &names(&["a", "b"])), "4 7");
    assert_eq!(rig.content(0, 8, 1024), [1; 1024]);
    assert_eq!(rig.ring.live, 0);
}

#[test]
fn a_fua_write_is_logged_at_its_own_end() {
    let mut rig = rig();
    assert_eq!(rig.write(8, &[1; 512]), End::Ok);
    assert_eq!(rig.write_with(16, &[3; 512], Flags::FUA), End::Ok);
    assert_eq!(log(&rig), [(head(16, 1, FUA), vec![3; 512])], "what was not flushed is not in it");
    assert_eq!(rig.run(Op::Flush, 0, 0).0, End::Ok);
    assert_eq!(log(&rig).len(), 3);
}

#[test]
fn a_mark_lies_between_what_came_before_and_after() {
    let mut rig = rig();
    let target = rig.target.clone();
    let mark = |text: &str| target.message(&["MARK", text], &names(&[]));
    assert_eq!(rig.write_with(0, &[1; 512], Flags::FUA), End::Ok);
    assert_eq!(mark("one"), Ok(None));
    assert_eq!(rig.target.status(Status::Info, &names(&["a", "b"])), "2 3");
    assert_eq!(rig.write_with(1, &[2; 512], Flags::FUA), End::Ok);
    let marks = head(0, 0, MARK);
    assert_eq!(log(&rig)[1], (Head { text_len: 3, ..marks }, b"one".to_vec()));
    assert_eq!(mark(&"x".repeat(1000)), Ok(None));
    assert_eq!(rig.write(5, &[2; 512]), End::Ok, "a plain write carries it as well");
    assert_eq!(log(&rig)[3].1.len(), 479, "what fits its block");
    for words in [&["mark"][..], &["mark", "a", "b"], &["tell", "a"], &[]] {
        assert_eq!(target.message(words, &names(&[])), Err(MessageError::Invalid));
    }
}

#[test]
fn a_large_write_goes_to_the_log_in_parts() {
    let mut rig = rig();
    let data: Vec<u8> = (0..512 << 10).map(|at| (at / 512 % 251) as u8).collect();
    assert_eq!(rig.write_with(0, &data, Flags::FUA), End::Ok);
    assert_eq!(log(&rig), [(head(0, 1024, FUA), data)]);
}

#[test]
fn zeroes_are_to_be_written_as_data() {
    let mut rig = rig();
    assert_eq!(rig.run(Op::WriteZeroes, 0, 8).0, End::NotSupported);
    assert!(!rig.profile.abilities.write_zeroes && rig.profile.abilities.discard);
    assert_eq!(rig.read(0, 512), (End::Ok, vec![0; 512]));
}

#[test]
fn a_log_device_that_fails_or_is_full_ends_the_logging_and_nothing_else() {
    let mut rig = rig();
    rig.fail(1, End::IoError);
    assert_eq!(rig.write_with(0, &[1; 512], Flags::FUA), End::Ok);
    assert_eq!(rig.write_with(0, &[2; 512], Flags::FUA), End::Ok);
    assert_eq!(rig.target.status(Status::Info, &names(&["a", "b"])), "1 2 logging_disabled");
    let mut rig = self::rig();
    // 4 MiB of log hold seven writes of 512 KiB and their blocks, and not eight.
    for _ in 0..9 {
        assert_eq!(rig.write_with(0, &[1; 512 << 10], Flags::FUA), End::Ok);
    }
    assert!(rig.target.status(Status::Info, &names(&["a", "b"])).ends_with("logging_disabled"));
    assert_eq!(log(&rig).len(), 7);
}

#[test]
fn failed_writes_are_logged_as_in_the_kernel() {
    let mut rig = rig();
    rig.fail(0, End::IoError);
    assert_eq!(rig.write_with(0, &[1; 512], Flags::FUA), End::IoError);
    assert_eq!(log(&rig).len(), 1);
}

/// A log device that is asked by the chore, and while it is, someone else writes.
struct Meddled<'a> {
    rig: &'a mut Rig,
    meddle: bool,
}

impl Disks for Meddled<'_> {
    fn read(&mut self, _: usize, _: Bytes, _: &mut [u8]) -> io::Result<()> {
        unreachable!("a log is only written")
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        if std::mem::take(&mut self.meddle) {
            let discard = Request::new(Op::Discard, Bytes(4096), Bytes(4096));
            self.rig.submit(Request { flags: Flags::FUA, ..discard });
            assert_eq!(self.rig.in_flight(), 1, "its entry is not in the log yet, so it is not over");
        }
        let at = at.0 as usize;
        self.rig.disks[device].borrow_mut().content[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn flush(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn what_ends_while_another_writes_the_log_waits_for_its_own_entry() {
    let mut rig = rig();
    let target = rig.target.clone();
    target.message(&["mark", "one"], &names(&[])).unwrap();
    let chore = target.chore().unwrap();
    assert!(chore.is_due(Nanos(0)));
    chore.step(Nanos(0), &mut Meddled { rig: &mut rig, meddle: true });
    assert_eq!(rig.drain(), [End::Ok]);
    let found: Vec<Head> = log(&rig).into_iter().map(|(head, _)| head).collect();
    assert_eq!(found[1], head(8, 8, DISCARD | FUA));
}

#[test]
fn the_log_is_written_once_there_is_memory_again_and_nothing_is_kept() {
    for short in 1..6 {
        let mut rig = rig();
        // The chore would do it in the node's place.
        rig.chores.clear();
        rig.ring.short = short;
        let discard = Request::new(Op::Discard, Bytes(0), Bytes(4096));
        assert_eq!(rig.request(Request { flags: Flags::FUA, ..discard }).0, End::Ok);
        assert_eq!(log(&rig), [(head(0, 8, DISCARD | FUA), vec![])], "{short}");
        assert_eq!((rig.ring.short, rig.ring.live), (0, 0));
    }
}

#[test]
fn the_super_block_counts_no_entry_that_is_not_written() {
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
    log.told(1);
    assert!(log.holds(1) && !log.holds(2));
    assert_eq!(log.next(), Next::Entries(512));
    log.fill(&mut [0; 512]);
    log.told(2);
    assert_eq!(log.next(), Next::Nothing);
    assert!(!log.claim(), "all is said");
}
