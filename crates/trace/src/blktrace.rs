//! Encodes blktrace records, version 7: the version that blkparse, btt, iowatcher and fio read. (Stock
//! blkparse refuses version 8, which recent kernels write as well.)
//!
//! A record has 48 bytes in native byte order, and a payload: include/uapi/linux/blktrace_api.h. Each
//! hardware queue appears as a CPU, its thread as the process. Operations without a category in this version
//! are mapped by their effect on data: write zeroes and zone appends to writes, a prefetch to read-ahead.

use crate::command::{Commands, Sessions, message};
use crate::wire::SessionName;
use crate::{Kind, Record};
use block::{Flags, Op};

/// First word of every record: `BLK_IO_TRACE_MAGIC | BLK_IO_TRACE_VERSION`.
const MAGIC: u32 = 0x6561_7407;
/// Length of a record without its payload, in bytes.
pub const RECORD_LEN: usize = 48;
/// Major number of devices in a trace, which the kernel reserves for local use
/// (Documentation/admin-guide/devices.txt): no driver has it.
pub const MAJOR: u32 = 240;

/// `BLK_TC_*`, before they are shifted into place.
mod category {
    pub(super) const READ: u32 = 1;
    pub(super) const WRITE: u32 = 2;
    pub(super) const FLUSH: u32 = 4;
    pub(super) const SYNC: u32 = 8;
    pub(super) const QUEUE: u32 = 0x10;
    pub(super) const REQUEUE: u32 = 0x20;
    pub(super) const ISSUE: u32 = 0x40;
    pub(super) const COMPLETE: u32 = 0x80;
    pub(super) const FS: u32 = 0x100;
    pub(super) const NOTIFY: u32 = 0x400;
    pub(super) const AHEAD: u32 = 0x800;
    pub(super) const DISCARD: u32 = 0x2000;
    pub(super) const FUA: u32 = 0x8000;
}

/// Numbers of notification records: `enum blktrace_notify`.
const PROCESS: u32 = 0;
const TIMESTAMP: u32 = 1;
const MESSAGE: u32 = 2;

/// Returns an event's number (`enum blktrace_act`), its categories besides those of its operation, and its
/// letter.
const fn action(kind: Kind) -> Option<(u32, u32, char)> {
    use category::*;
    Some(match kind {
        Kind::Queue => (1, QUEUE, 'Q'),
        Kind::BackMerge => (2, QUEUE, 'M'),
        Kind::FrontMerge => (3, QUEUE, 'F'),
        Kind::Get => (4, QUEUE, 'G'),
        Kind::Requeue => (6, REQUEUE | FS, 'R'),
        Kind::Issue => (7, ISSUE | FS, 'D'),
        Kind::Complete => (8, COMPLETE | FS, 'C'),
        Kind::Plug => (9, QUEUE, 'P'),
        Kind::Unplug => (10, QUEUE, 'U'),
        Kind::Insert => (12, QUEUE | FS, 'I'),
        Kind::Split => (13, 0, 'X'),
        Kind::Remap => (15, QUEUE, 'A'),
        Kind::Done | Kind::Start | Kind::Layer | Kind::Command => return None,
    })
}

/// Returns the letter of an event; a space for events that blktrace does not have.
pub(crate) fn letter(kind: Kind) -> char {
    action(kind).map_or(' ', |action| action.2)
}

fn op_categories(record: &Record) -> u32 {
    use category::*;
    let what = match record.op {
        Op::Read | Op::Extents | Op::ReportZones => READ,
        Op::Prefetch => READ | AHEAD,
        // A flush is shown as an empty bio with REQ_PREFLUSH, which the kernel's file systems send.
        Op::Flush => WRITE | FLUSH | SYNC,
        Op::Discard => WRITE | DISCARD,
        _ => WRITE,
    };
    if record.flags & Flags::FUA.bits() != 0 { what | category::FUA | SYNC } else { what }
}

/// Returns the categories of an event. A plug belongs to no request, and counts as a read.
fn record_categories(record: &Record) -> u32 {
    if matches!(record.kind, Kind::Plug | Kind::Unplug) { category::READ } else { op_categories(record) }
}

/// Returns the `RWBS` field: the letters that blkparse derives from the categories, in its order.
pub(crate) fn rwbs(record: &Record) -> String {
    let categories = record_categories(record);
    let has = |bit: u32| categories & bit != 0;
    let direction = match () {
        () if has(category::DISCARD) => 'D',
        () if has(category::WRITE) => 'W',
        () if record.len > 0 => 'R',
        () => 'N',
    };
    let mut text = String::new();
    let letters = [
        (has(category::FLUSH), 'F'),
        (true, direction),
        (has(category::FUA), 'F'),
        (has(category::AHEAD), 'A'),
        (has(category::SYNC), 'S'),
    ];
    text.extend(letters.into_iter().filter(|row| row.0).map(|row| row.1));
    text
}

/// Returns a minor number: the device's number in its process in the upper 12 bits, the number of the node in
/// the lower 8.
pub(crate) fn minor(number: u32, device: u8) -> u32 {
    (number & 0xfff) << 8 | u32::from(device)
}

fn device(number: u32, device: u8) -> u32 {
    MAJOR << 20 | minor(number, device)
}

/// Encodes records.
#[derive(Debug)]
pub struct Encoder {
    number: u32,
    queues: Vec<Stream>,
    sessions: Sessions,
}

/// State of a queue. Each queue has a separate file.
#[derive(Clone, Default, Debug)]
struct Stream {
    pid: u32,
    sequence: u32,
    /// Time of the last record.
    time_ns: u64,
    commands: Commands,
}

impl Encoder {
    /// Creates an encoder for a device; `number` is the device's number in its process.
    pub fn new(number: u32) -> Encoder {
        Encoder { number, queues: Vec::new(), sessions: Sessions::default() }
    }

    fn queue(&mut self, queue: u32) -> &mut Stream {
        let at = queue as usize;
        if at >= self.queues.len() {
            self.queues.resize(at + 1, Stream::default());
        }
        &mut self.queues[at]
    }

    /// Writes the wall-clock time at which the trace started, for the first queue's file.
    pub fn start(&mut self, clock_ns: u64, wall: (u64, u32), into: &mut Vec<u8>) {
        let payload = [wall.0 as u32, wall.1].map(u32::to_ne_bytes).concat();
        self.note(0, TIMESTAMP, clock_ns, &payload, into);
    }

    /// Writes the thread of a queue, once; without it, readers show its events as `[(null)]`.
    pub fn process(&mut self, queue: u32, pid: u32, comm: &str, clock_ns: u64, into: &mut Vec<u8>) {
        self.queue(queue).pid = pid;
        let mut payload = [0; 16];
        // The last byte stays 0, as in the kernel's comm.
        let len = comm.len().min(15);
        payload[..len].copy_from_slice(&comm.as_bytes()[..len]);
        self.note(queue, PROCESS, clock_ns, &payload, into);
    }

    /// Adds the name of a session, for the messages of its commands.
    pub fn session(&mut self, session: &SessionName) {
        self.sessions.add(session);
    }

    /// Writes that `count` events of a queue were dropped: a message, and a gap in the sequence numbers.
    pub fn dropped(&mut self, queue: u32, count: u64, into: &mut Vec<u8>) {
        let stream = self.queue(queue);
        stream.sequence = stream.sequence.wrapping_add(count as u32);
        stream.commands.forget();
        let time_ns = stream.time_ns;
        self.note(queue, MESSAGE, time_ns, format!("{count} events dropped").as_bytes(), into);
    }

    fn note(&mut self, queue: u32, what: u32, time_ns: u64, payload: &[u8], into: &mut Vec<u8>) {
        let (pid, device) = (self.queue(queue).pid, device(self.number, 0));
        let action = category::NOTIFY << 16 | what;
        let header =
            Header { sequence: 0, time_ns, sector: 0, bytes: 0, action, pid, device, queue, error: 0 };
        header.write(payload, into);
    }

    /// Writes the events of a record. An event of a command becomes a message.
    pub fn record(&mut self, queue: u32, record: &Record, into: &mut Vec<u8>) {
        if record.kind == Kind::Command {
            self.queue(queue);
            let note = self.queues[queue as usize].commands.record(record);
            let Some(text) = note.map(|note| message(&note, record, &self.sessions)) else { return };
            return self.note(queue, MESSAGE, record.time_ns, text.as_bytes(), into);
        }
        record.events().for_each(|event| self.event(queue, &event, into));
    }

    fn event(&mut self, queue: u32, record: &Record, into: &mut Vec<u8>) {
        let Some((code, categories, _)) = action(record.kind) else { return };
        let stream = self.queue(queue);
        stream.sequence = stream.sequence.wrapping_add(1);
        stream.time_ns = record.time_ns;
        let (sequence, pid) = (stream.sequence, stream.pid);
        let header = Header {
            sequence,
            time_ns: record.time_ns,
            sector: record.offset >> 9,
            bytes: record.len,
            action: (record_categories(record) | categories) << 16 | code,
            pid,
            device: device(self.number, record.device),
            queue,
            // A negative errno in 16 bits: EIO is 65531, which is what readers print.
            error: if record.kind == Kind::Complete { (record.value as u16).wrapping_neg() } else { 0 },
        };
        match record.kind {
            Kind::Split | Kind::Unplug => header.write(&record.value.to_be_bytes(), into),
            Kind::Remap => {
                let from = device(self.number, record.from).to_be_bytes();
                let to = header.device.to_be_bytes();
                header.write(&[&from[..], &to, &record.value.to_be_bytes()].concat(), into);
            }
            _ => header.write(&[], into),
        }
    }
}

struct Header {
    sequence: u32,
    time_ns: u64,
    sector: u64,
    bytes: u32,
    action: u32,
    pid: u32,
    device: u32,
    queue: u32,
    error: u16,
}

impl Header {
    fn write(&self, payload: &[u8], into: &mut Vec<u8>) {
        into.extend_from_slice(&MAGIC.to_ne_bytes());
        into.extend_from_slice(&self.sequence.to_ne_bytes());
        into.extend_from_slice(&self.time_ns.to_ne_bytes());
        into.extend_from_slice(&self.sector.to_ne_bytes());
        for word in [self.bytes, self.action, self.pid, self.device, self.queue] {
            into.extend_from_slice(&word.to_ne_bytes());
        }
        into.extend_from_slice(&self.error.to_ne_bytes());
        into.extend_from_slice(&(payload.len() as u16).to_ne_bytes());
        into.extend_from_slice(payload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: Kind, op: Op) -> Record {
        Record {
            time_ns: 0x0102_0304_0506_0708,
            offset: 2488 << 9,
            len: 255 << 9,
            tag: 0,
            kind,
            op,
            flags: 0,
            value: 0,
            from: 0,
            device: 0,
        }
    }

    fn encoded(record: Record) -> Vec<u8> {
        let (mut encoder, mut bytes) = (Encoder::new(1), Vec::new());
        encoder.process(2, 77, "reactor-0", 5, &mut Vec::new());
        encoder.record(2, &record, &mut bytes);
        bytes
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn a_record_is_laid_out_as_the_kernels() {
        let bytes = encoded(record(Kind::Issue, Op::Write));
        assert_eq!(bytes.len(), RECORD_LEN);
        assert_eq!((word(&bytes, 0), word(&bytes, 4)), (0x6561_7407, 1));
        assert_eq!(u64::from_ne_bytes(bytes[8..16].try_into().unwrap()), 0x0102_0304_0506_0708);
        assert_eq!(u64::from_ne_bytes(bytes[16..24].try_into().unwrap()), 2488);
        assert_eq!((word(&bytes, 24), word(&bytes, 28)), (255 << 9, 0x142 << 16 | 7));
        assert_eq!((word(&bytes, 32), word(&bytes, 36), word(&bytes, 40)), (77, 240 << 20 | 256, 2));
        assert_eq!(bytes[44..], [0; 4]);
    }

    #[test]
    fn payloads_of_split_and_remap_are_big_endian() {
        let bytes = encoded(Record { value: 2743, ..record(Kind::Split, Op::Write) });
        assert_eq!(bytes[46..48], 8u16.to_ne_bytes());
        assert_eq!(bytes[48..], 2743u64.to_be_bytes());
        let bytes = encoded(Record { value: 8, device: 3, ..record(Kind::Remap, Op::Read) });
        assert_eq!(word(&bytes, 36), 240 << 20 | 259, "the device field is the lower device");
        assert_eq!(bytes[48..52], (240u32 << 20 | 256).to_be_bytes());
        assert_eq!(bytes[52..56], (240u32 << 20 | 259).to_be_bytes());
        assert_eq!(bytes[56..], 8u64.to_be_bytes());
    }

    #[test]
    fn an_error_is_a_negative_errno_in_sixteen_bits() {
        let bytes = encoded(Record { value: 5, ..record(Kind::Complete, Op::Read) });
        assert_eq!(bytes[44..46], 65531u16.to_ne_bytes());
        assert_eq!(encoded(record(Kind::Complete, Op::Read))[44..46], [0, 0]);
    }

    #[test]
    fn operations_have_the_letters_that_blkparse_prints() {
        let letters = |op, flags| rwbs(&Record { flags, ..record(Kind::Queue, op) });
        assert_eq!(letters(Op::Read, 0), "R");
        assert_eq!(letters(Op::Prefetch, 0), "RA");
        assert_eq!(letters(Op::Write, 0), "W");
        assert_eq!(letters(Op::Write, Flags::FUA.bits()), "WFS");
        assert_eq!(letters(Op::WriteZeroes, 0), "W");
        assert_eq!(letters(Op::Discard, 0), "D");
        assert_eq!(letters(Op::Flush, 0), "FWS");
        let empty = Record { len: 0, ..record(Kind::Queue, Op::Read) };
        assert_eq!(rwbs(&empty), "N");
    }

    #[test]
    fn sequence_numbers_count_events_and_have_a_gap_for_lost_ones() {
        let (mut encoder, mut bytes) = (Encoder::new(0), Vec::new());
        encoder.start(1, (2, 3), &mut bytes);
        assert_eq!((word(&bytes, 4), word(&bytes, 28), word(&bytes, 48)), (0, 0x400 << 16 | 1, 2));
        bytes.clear();
        let start = Record { kind: Kind::Start, value: 7, ..record(Kind::Queue, Op::Read) };
        encoder.record(0, &start, &mut bytes);
        assert_eq!([word(&bytes, 4), word(&bytes, 52), word(&bytes, 100)], [1, 2, 3]);
        bytes.clear();
        encoder.dropped(0, 10, &mut bytes);
        assert_eq!(&bytes[48..], b"10 events dropped");
        bytes.clear();
        encoder.record(0, &record(Kind::Queue, Op::Read), &mut bytes);
        encoder.record(1, &record(Kind::Queue, Op::Read), &mut bytes);
        assert_eq!([word(&bytes, 4), word(&bytes, 52)], [14, 1]);
        bytes.clear();
        let command = crate::command::tests::write_10(9);
        command.iter().for_each(|record| encoder.record(0, record, &mut bytes));
        assert_eq!((word(&bytes, 4), word(&bytes, 28)), (0, 0x400 << 16 | 2), "a command is a message");
        assert!(bytes[RECORD_LEN..].starts_with(b"scsi 17: WRITE(10), cdb 2a 00"));
        bytes.clear();
        encoder.record(0, &record(Kind::Done, Op::Read), &mut bytes);
        assert!(bytes.is_empty(), "blktrace has no such event");
    }
}
