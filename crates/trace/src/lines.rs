//! blkparse's default lines, of all queues in the order of time.

use crate::blktrace::{MAJOR, letter, minor, rwbs};
use crate::wire::Frame;
use crate::{Kind, Record};
use std::collections::VecDeque;
use std::fmt::Write;

/// How long an event is kept for others that may come before it: a thread that was kept from running between
/// looking at the clock and writing down what it saw tells of it late.
const SLACK_NS: u64 = 2_000_000;

/// Makes lines of frames.
#[derive(Default, Debug)]
pub struct Lines {
    number: u32,
    /// The time of the first event.
    first_ns: Option<u64>,
    queues: Vec<Stream>,
}

#[derive(Clone, Default, Debug)]
struct Stream {
    pid: u32,
    comm: String,
    sequence: u32,
    waiting: VecDeque<Told>,
}

#[derive(Clone, Debug)]
enum Told {
    Event(Record),
    Dropped(u64),
}

impl Lines {
    /// What can be said now that this has come.
    pub fn frame(&mut self, frame: &Frame, into: &mut String) {
        match frame {
            Frame::Opened(opened) => self.number = opened.number,
            Frame::Lane(queue, lane) => {
                let stream = self.queue(*queue);
                (stream.pid, stream.comm) = (lane.pid, lane.comm.clone());
            }
            Frame::Records(queue, records) => {
                let events = records.iter().flat_map(|record| record.events()).map(Told::Event);
                self.queue(*queue).waiting.extend(events);
            }
            Frame::Dropped(queue, count) => self.queue(*queue).waiting.push_back(Told::Dropped(*count)),
            Frame::Tick(time) => self.flush(time.saturating_sub(SLACK_NS), into),
            Frame::Closed => self.flush(u64::MAX, into),
        }
    }

    fn queue(&mut self, queue: u32) -> &mut Stream {
        let at = queue as usize;
        if at >= self.queues.len() {
            self.queues.resize(at + 1, Stream::default());
        }
        &mut self.queues[at]
    }

    /// Everything that happened before then.
    fn flush(&mut self, before_ns: u64, into: &mut String) {
        loop {
            let time = |told: &Told| match told {
                Told::Event(record) => record.time_ns,
                Told::Dropped(_) => 0,
            };
            let heads = self.queues.iter().enumerate();
            let heads = heads.filter_map(|(at, stream)| stream.waiting.front().map(|told| (time(told), at)));
            let Some((time_ns, at)) = heads.min().filter(|head| head.0 < before_ns) else { return };
            match self.queues[at].waiting.pop_front() {
                Some(Told::Event(record)) => {
                    self.first_ns.get_or_insert(time_ns);
                    self.line(at, &record, into);
                }
                Some(Told::Dropped(count)) => {
                    let stream = &mut self.queues[at];
                    stream.sequence = stream.sequence.wrapping_add(count as u32);
                    let _ = writeln!(into, "{:<7} {at:>2} {count} events dropped", "");
                }
                None => return,
            }
        }
    }

    fn line(&mut self, at: usize, record: &Record, into: &mut String) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{LaneInfo, Opened};
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
        let opened = Opened { device: "disk".into(), number: 0, clock_ns: 0, wall: (0, 0) };
        lines.frame(&Frame::Opened(opened), &mut text);
        for queue in 0..2 {
            let info = LaneInfo { pid: 40 + queue, comm: format!("reactor-{queue}") };
            lines.frame(&Frame::Lane(queue, info), &mut text);
        }
        frames.iter().for_each(|frame| lines.frame(frame, &mut text));
        text
    }

    #[test]
    fn lines_are_blkparses() {
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
    fn queues_are_merged_by_time_and_what_may_still_be_preceded_waits() {
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
