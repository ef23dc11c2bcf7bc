//! A log in memory: its writes, flushes, marks and the order of their events. Data stays where it is.

use crate::record::{FUA, HEADER_LEN, MAGIC, RECORD_LEN, Record, SECTOR, TEXT_LEN_MAX, Type};
use crate::source::Source;
use std::collections::BTreeMap;
use std::io;

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// It is neither a log of `blockyard crash` nor of dm-log-writes.
    #[error("it is not a log of blockyard crash or of dm-log-writes")]
    Magic,
    /// A record is invalid: its offset in the log, and why.
    #[error("the record at byte {at} is damaged: {why}")]
    Damaged {
        /// The offset in bytes.
        at: u64,
        /// The reason.
        why: String,
    },
    /// Reading failed.
    #[error("reading it failed: {0}")]
    Io(#[from] io::Error),
}

/// The type of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Writes data.
    Data,
    /// Discards blocks, which then read as zeroes.
    Discard,
    /// Writes zeroes.
    Zeroes,
}

/// A write, discard or write of zeroes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write {
    /// The first byte.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
    /// The offset of its data in the log.
    pub data_at: u64,
    /// The time of its submission in nanoseconds since the start.
    pub time_ns: u64,
    /// The index of the event of its submission.
    pub submitted: u32,
    /// The index of the event of its completion.
    pub completed: Option<u32>,
    /// The process that submitted it; 0 if unknown.
    pub pid: u32,
    /// Its type.
    pub kind: Kind,
    /// It is on stable storage when it completes.
    pub fua: bool,
}

/// A flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flush {
    /// The index of the event of its submission.
    pub submitted: u32,
    /// The index of the event of its completion.
    pub completed: Option<u32>,
    /// The time of its submission in nanoseconds.
    pub time_ns: u64,
}

/// A mark of the workload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The index of its event.
    pub event: u32,
    /// The time in nanoseconds.
    pub time_ns: u64,
    /// Its text.
    pub text: String,
}

/// An event; the numbers index the lists of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A write was submitted.
    Submit(u32),
    /// A write completed.
    Complete(u32),
    /// A flush was submitted.
    Flush(u32),
    /// A flush completed.
    Flushed(u32),
    /// A mark.
    Mark(u32),
}

/// The index of a log.
#[derive(Clone, Default, Debug)]
pub struct Log {
    /// The size of the device in bytes; 0 if the log does not say.
    pub size: u64,
    /// Writes in the order of submission, which is the order in which the device applied them.
    pub writes: Vec<Write>,
    /// Flushes in the order of submission.
    pub flushes: Vec<Flush>,
    /// Marks in their order.
    pub marks: Vec<Mark>,
    /// All events in their order.
    pub events: Vec<Event>,
    /// Names of processes.
    pub processes: BTreeMap<u32, String>,
    /// Why events after a point were not used: a recorder that was killed.
    pub truncated: bool,
}

impl Log {
    /// Reads the index of a log of either format; `len` is the length of the source in bytes.
    ///
    /// # Errors
    /// [`LogError`].
    pub fn read(source: &dyn Source, len: u64) -> Result<Log, LogError> {
        let mut head = [0; HEADER_LEN];
        source.read_at(0, &mut head)?;
        if head[..8] != MAGIC {
            return crate::dm::read(source, len);
        }
        let size = u64::from_le_bytes(head[8..16].try_into().unwrap_or_default());
        let mut log = Log { size, ..Log::default() };
        let mut at = HEADER_LEN as u64;
        let mut bytes = [0; RECORD_LEN];
        while at + RECORD_LEN as u64 <= len {
            source.read_at(at, &mut bytes)?;
            let damaged = |why: &str| LogError::Damaged { at, why: why.to_owned() };
            let record = Record::decode(&bytes).ok_or_else(|| damaged("its type is unknown"))?;
            let data_at = at + RECORD_LEN as u64;
            let Some(next) = data_at.checked_add(record.data_len()) else {
                return Err(damaged("its length is impossible"));
            };
            if next > len {
                log.truncated = true;
                return Ok(log);
            }
            log.add(&record, data_at, source).map_err(|why| match why {
                LogError::Damaged { why, .. } => LogError::Damaged { at, why },
                other => other,
            })?;
            at = next;
        }
        log.truncated = at != len;
        Ok(log)
    }

    fn add(&mut self, record: &Record, data_at: u64, source: &dyn Source) -> Result<(), LogError> {
        let damaged = |why: &str| LogError::Damaged { at: 0, why: why.to_owned() };
        if self.events.len() >= u32::MAX as usize - 1 {
            return Err(damaged("the log has more than 4 billion events"));
        }
        match record.kind {
            Type::Write | Type::Discard | Type::Zeroes => {
                let fits = record.offset.checked_add(record.len).is_some_and(|end| end <= self.size);
                if !fits || record.len == 0 || !(record.offset | record.len).is_multiple_of(SECTOR) {
                    return Err(damaged("its range is not one of whole sectors within the device"));
                }
                if record.number as usize != self.writes.len() {
                    return Err(damaged("its number is not the next"));
                }
                let kind = match record.kind {
                    Type::Write => Kind::Data,
                    Type::Discard => Kind::Discard,
                    _ => Kind::Zeroes,
                };
                let fua = record.flags & FUA != 0;
                self.submit(record.offset, record.len, data_at, record.time_ns, record.pid, kind, fua);
            }
            Type::Complete => {
                let event = self.events.len() as u32;
                let write = self.writes.get_mut(record.number as usize);
                let write = write.filter(|write| write.completed.is_none());
                write.ok_or_else(|| damaged("it completes no write in flight"))?.completed = Some(event);
                self.events.push(Event::Complete(record.number));
            }
            Type::Flush => {
                if record.number as usize != self.flushes.len() {
                    return Err(damaged("its number is not the next"));
                }
                self.flush(record.time_ns);
            }
            Type::FlushComplete => {
                let event = self.events.len() as u32;
                let flush = self.flushes.get_mut(record.number as usize);
                let flush = flush.filter(|flush| flush.completed.is_none());
                flush.ok_or_else(|| damaged("it completes no flush in flight"))?.completed = Some(event);
                self.events.push(Event::Flushed(record.number));
            }
            Type::Mark | Type::Process => {
                if record.len > TEXT_LEN_MAX as u64 {
                    return Err(damaged("its text is too long"));
                }
                let mut text = vec![0; record.len as usize];
                source.read_at(data_at, &mut text)?;
                let text = String::from_utf8_lossy(&text).into_owned();
                if record.kind == Type::Mark {
                    self.mark(text, record.time_ns);
                } else {
                    self.processes.insert(record.pid, text);
                }
            }
        }
        Ok(())
    }

    /// Adds the submission of a write; returns its number.
    #[expect(clippy::too_many_arguments, reason = "they are the fields of a record")]
    pub fn submit(
        &mut self,
        offset: u64,
        len: u64,
        data_at: u64,
        time_ns: u64,
        pid: u32,
        kind: Kind,
        fua: bool,
    ) -> u32 {
        let number = self.writes.len() as u32;
        let submitted = self.events.len() as u32;
        self.writes.push(Write { offset, len, data_at, time_ns, submitted, completed: None, pid, kind, fua });
        self.events.push(Event::Submit(number));
        number
    }

    /// Adds the completion of a write.
    pub fn complete(&mut self, number: u32) {
        self.writes[number as usize].completed = Some(self.events.len() as u32);
        self.events.push(Event::Complete(number));
    }

    /// Adds the submission of a flush; returns its number.
    pub fn flush(&mut self, time_ns: u64) -> u32 {
        let number = self.flushes.len() as u32;
        self.flushes.push(Flush { submitted: self.events.len() as u32, completed: None, time_ns });
        self.events.push(Event::Flush(number));
        number
    }

    /// Adds the completion of a flush.
    pub fn flushed(&mut self, number: u32) {
        self.flushes[number as usize].completed = Some(self.events.len() as u32);
        self.events.push(Event::Flushed(number));
    }

    /// Adds a mark.
    pub fn mark(&mut self, text: String, time_ns: u64) {
        let event = self.events.len() as u32;
        self.events.push(Event::Mark(self.marks.len() as u32));
        self.marks.push(Mark { event, time_ns, text });
    }

    /// Returns the number of writes that were submitted before a cut.
    pub fn writes_before(&self, cut: u32) -> u32 {
        self.writes.partition_point(|write| write.submitted < cut) as u32
    }

    /// Returns the marks before a cut.
    pub fn marks_before(&self, cut: u32) -> &[Mark] {
        &self.marks[..self.marks.partition_point(|mark| mark.event < cut)]
    }

    /// Returns the time of a cut: that of the last event before it that has one.
    pub fn time_at(&self, cut: u32) -> u64 {
        let mut events = self.events[..cut as usize].iter().rev();
        let time = |event: &Event| match *event {
            Event::Submit(number) => Some(self.writes[number as usize].time_ns),
            Event::Flush(number) => Some(self.flushes[number as usize].time_ns),
            Event::Mark(number) => Some(self.marks[number as usize].time_ns),
            Event::Complete(_) | Event::Flushed(_) => None,
        };
        events.find_map(time).unwrap_or(0)
    }
}
