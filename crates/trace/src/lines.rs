//! Formats records as blkparse's default lines, with all queues merged by time. Events of SCSI commands are
//! messages.

use crate::blktrace::{MAJOR, letter, minor, rwbs};
use crate::command::{Commands, Sessions, message};
use crate::wire::Frame;
use crate::{Kind, Record};
use std::collections::VecDeque;
use std::fmt::Write;

/// The time for which an event is kept back for earlier events of other threads, in nanoseconds: a thread
/// that was preempted between reading the clock and writing the record delivers the record late.
const SLACK_NS: u64 = 2_000_000;

/// Converts frames to lines.
#[derive(Default, Debug)]
pub struct Lines {
    number: u32,
    /// Time of the first event.
    first_ns: Option<u64>,
    queues: Vec<Stream>,
    sessions: Sessions,
}

#[derive(Clone, Default, Debug)]
struct Stream {
    pid: u32,
    comm: String,
    sequence: u32,
    waiting: VecDeque<Item>,
    commands: Commands,
}

#[derive(Clone, Debug)]
enum Item {
    Event(Record),
    Dropped(u64),
}

impl Lines {
    /// Appends the lines that can be printed after this frame.
    pub fn frame(&mut self, frame: &Frame, into: &mut String) {
        match frame {
            Frame::Opened(opened) => self.number = opened.number,
            Frame::Queue(queue, buffer) => {
                let stream = self.queue(*queue);
                (stream.pid, stream.comm) = (buffer.pid, buffer.comm.clone());
            }
            Frame::Records(queue, records) => {
                let events = records.iter().flat_map(|record| record.events()).map(Item::Event);
                self.queue(*queue).waiting.extend(events);
            }
            Frame::Dropped(queue, count) => self.queue(*queue).waiting.push_back(Item::Dropped(*count)),
            Frame::Tick(time) => self.flush(time.saturating_sub(SLACK_NS), into),
            Frame::Closed => self.flush(u64::MAX, into),
            Frame::Session(session) => self.sessions.add(session),
        }
    }

    fn queue(&mut self, queue: u32) -> &mut Stream {
        let at = queue as usize;
        if at >= self.queues.len() {
            self.queues.resize(at + 1, Stream::default());
        }
        &mut self.queues[at]
    }

    /// Prints all events before `before_ns`.
    fn flush(&mut self, before_ns: u64, into: &mut String) {
        loop {
            let time = |item: &Item| match item {
                Item::Event(record) => record.time_ns,
                Item::Dropped(_) => 0,
            };
            let heads = self.queues.iter().enumerate();
            let heads = heads.filter_map(|(at, stream)| stream.waiting.front().map(|item| (time(item), at)));
            let Some((time_ns, at)) = heads.min().filter(|head| head.0 < before_ns) else { return };
            match self.queues[at].waiting.pop_front() {
                Some(Item::Event(record)) => {
                    self.first_ns.get_or_insert(time_ns);
                    self.line(at, &record, into);
                }
                Some(Item::Dropped(count)) => {
                    let stream = &mut self.queues[at];
                    stream.sequence = stream.sequence.wrapping_add(count as u32);
                    stream.commands.forget();
                    let _ = writeln!(into, "{:<7} {at:>2} {count} events dropped", "");
                }
                None => return,
            }
        }
    }

    fn line(&mut self, at: usize, record: &Record, into: &mut String) {
        if record.kind == Kind::Command {
            return self.message(at, record, into);
        }
        if letter(record.kind) == ' ' {
            return;
        }
        let stream = &mut self.queues[at];
        stream.sequence = stream.sequence.wrapping_add(1);
        let since = record.time_ns.saturating_sub(self.first_ns.unwrap_or_default());
        let (seconds, nanoseconds) = (since / 1_000_000_000, since % 1_000_000_000);
        let (Stream { pid, comm, sequence, .. }, minor) = (stream, minor(self.number, record.device));
        let (letter, rwbs) = (letter(record.kind), rwbs(record));
        // Writing to a string does not fail.
        let _ = write!(
            into,
            "{MAJOR:>3},{minor:<3} {at:>2} {sequence:>8} {seconds:>5}.{nanoseconds:09} {pid:>5} {letter:>2} {rwbs:>3} "
        );
        let (sector, sectors) = (record.offset >> 9, record.len >> 9);
        let range = if sectors > 0 { format!("{sector} + {sectors} ") } else { String::new() };
        let _ = match record.kind {
            Kind::Complete if sectors > 0 => {
                writeln!(into, "{range}[{}]", (record.value as u16).wrapping_neg())
            }
            Kind::Complete => writeln!(into, "{sector} [{}]", (record.value as u16).wrapping_neg()),
            Kind::Requeue if sectors > 0 => writeln!(into, "{range}[0]"),
            Kind::Requeue => writeln!(into, "{sector} [0]"),
            Kind::Unplug => writeln!(into, "[{comm}] {}", record.value),
            Kind::Split => writeln!(into, "{sector} / {} [{comm}]", record.value),
            Kind::Remap => {
                let from = crate::blktrace::minor(self.number, record.from);
                writeln!(into, "{sector} + {sectors} <- ({MAJOR},{from}) {}", record.value)
            }
            _ => writeln!(into, "{range}[{comm}]"),
        };
    }
}

impl Lines {
    /// Prints an event of a command as blkparse prints messages, which have no sequence number.
    fn message(&mut self, at: usize, record: &Record, into: &mut String) {
        let stream = &mut self.queues[at];
        let Some(note) = stream.commands.record(record) else { return };
        let text = message(&note, record, &self.sessions);
        let since = record.time_ns.saturating_sub(self.first_ns.unwrap_or_default());
        let (seconds, nanoseconds) = (since / 1_000_000_000, since % 1_000_000_000);
        let (pid, minor) = (stream.pid, minor(self.number, 0));
        // Writing to a string does not fail.
        let _ = writeln!(
            into,
            "{MAJOR:>3},{minor:<3} {at:>2} {:>8} {seconds:>5}.{nanoseconds:09} {pid:>5} {:>2} {:>3} {text}",
            0, 'm', 'N'
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Opened, TracedQueueInfo};
    use block::Op;

    fn record(time_ns: u64, kind: Kind) -> Record {
        Record {
            time_ns,
            offset: 2488 << 9,
            len: 255 << 9,
            tag: 0,
            kind,
            op: Op::Write,
            flags: 0,
            value: 0,
            from: 0,
            device: 0,
        }
    }

    fn lines(frames: &[Frame]) -> String {
        let (mut lines, mut text) = (Lines::default(), String::new());
        let opened =
            Opened { device: "disk".into(), number: 0, clock_ns: 0, wall: (0, 0), nodes: Vec::new() };
        lines.frame(&Frame::Opened(opened), &mut text);
        for queue in 0..2 {
            let info = TracedQueueInfo { pid: 40 + queue, comm: format!("reactor-{queue}") };
            lines.frame(&Frame::Queue(queue, info), &mut text);
        }
        frames.iter().for_each(|frame| lines.frame(frame, &mut text));
        text
    }

    #[test]
    fn lines_have_blkparses_format() {
        let split = Record { value: 2743, ..record(1_500_001_250, Kind::Split) };
        let failed = Record { value: 5, ..record(2_000_000_000, Kind::Complete) };
        let frames =
            [Frame::Records(0, vec![record(1_000_000_000, Kind::Queue), split, failed]), Frame::Closed];
        let expected = "\
240,0    0        1     0.000000000    40  Q   W 2488 + 255 [reactor-0]
240,0    0        2     0.500001250    40  X   W 2488 / 2743 [reactor-0]
240,0    0        3     1.000000000    40  C   W 2488 + 255 [65531]
";
        assert_eq!(lines(&frames), expected);
    }

    #[test]
    fn commands_are_messages_with_their_initiator() {
        let (mut lines, mut text) = (Lines::default(), String::new());
        let session = crate::wire::SessionName { number: 3, initiator: "iqn.2026-11.example:host".into() };
        let records = crate::command::tests::write_10(1_000_000_000);
        let buffer = TracedQueueInfo { pid: 40, comm: "reactor-0".into() };
        let frames =
            [Frame::Queue(0, buffer), Frame::Session(session), Frame::Records(0, records), Frame::Closed];
        frames.iter().for_each(|frame| lines.frame(frame, &mut text));
        let expected = "\
240,0    0        0     0.000000000    40  m   N scsi 17: WRITE(10), cdb 2a 00 00 00 09 b8 00 00 08 00, lun 2, \
itt 0x10000001, session 3 iqn.2026-11.example:host
240,0    0        0     0.000000001    40  m   N scsi 17: request write 2488 + 8
240,0    0        0     0.000000002    40  m   N scsi 17: WRITE(10) ended, GOOD, 4096 bytes
";
        assert_eq!(text, expected);
    }

    #[test]
    fn queues_are_merged_by_time_and_recent_events_wait() {
        let at = |time_ns| record(time_ns, Kind::Queue);
        let frames = [
            Frame::Records(0, vec![at(5), at(50_000_000)]),
            Frame::Records(1, vec![at(3), at(7)]),
            Frame::Tick(50_000_000),
        ];
        let text = lines(&frames);
        let pids: Vec<&str> = text.lines().map(|line| line.split_whitespace().nth(4).unwrap()).collect();
        assert_eq!(pids, ["41", "40", "41"]);
    }
}
