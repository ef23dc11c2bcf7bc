//! The device of a recording: reads come from the base and the log, and every write goes to the log.
//!
//! The base is never written. Gathered records are written to the log before the requests of their batch
//! are answered, so a log contains every write that completed, even if this process is killed.

use super::marks::Lines;
use super::served::{Disk, Request};
use crash::Source;
use crash::record::{FUA, Record, SECTOR, TEXT_LEN_MAX, Type, header};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

const CHUNK: u64 = crash::CHUNK;

/// The location of a chunk's current content.
enum ChunkLocation {
    /// At an offset of the log.
    Whole(u64),
    /// Zeroes.
    Zero,
    /// By sector: an offset of the log, [`BASE`] or [`ZERO`].
    Sectors(Box<[u64; 8]>),
}

const BASE: u64 = 0;
const ZERO: u64 = u64::MAX;

/// The log that is being written.
pub(super) struct Recorder {
    log: File,
    base: Arc<dyn Source>,
    /// Length of the log in bytes, including the records in `pending`, which are not written yet.
    len: u64,
    pending: Vec<u8>,
    start: Instant,
    writes: u32,
    flushes: u32,
    marks: u32,
    content: HashMap<u64, ChunkLocation>,
    processes: HashSet<u32>,
    /// The marks that the workload writes to a descriptor, while it is open.
    lines: Option<Lines>,
    error: Option<String>,
}

impl Recorder {
    pub(super) fn new(log: File, base: Arc<dyn Source>, size: u64) -> io::Result<Recorder> {
        log.write_all_at(&header(size), 0)?;
        Ok(Recorder {
            log,
            base,
            len: crash::record::HEADER_LEN as u64,
            pending: Vec::new(),
            start: Instant::now(),
            writes: 0,
            flushes: 0,
            marks: 0,
            content: HashMap::new(),
            processes: HashSet::new(),
            lines: None,
            error: None,
        })
    }

    pub(super) const fn counts(&self) -> (u32, u32, u32) {
        (self.writes, self.flushes, self.marks)
    }

    /// Returns why recording failed.
    pub(super) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Adds a record and its data; returns the offset of the data in the log.
    fn put(&mut self, mut record: Record, data: &[u8]) -> u64 {
        record.time_ns = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.pending.extend_from_slice(&record.encode());
        let at = self.len + self.pending.len() as u64;
        self.pending.extend_from_slice(data);
        at
    }

    fn write_out(&mut self) -> io::Result<()> {
        if let Err(why) = self.log.write_all_at(&self.pending, self.len) {
            self.error.get_or_insert_with(|| why.to_string());
            return Err(why);
        }
        self.len += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }

    /// Adds a mark.
    pub(super) fn mark(&mut self, text: &str) -> io::Result<()> {
        let mut end = text.len().min(TEXT_LEN_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let text = &text.as_bytes()[..end];
        let len = text.len() as u64;
        self.put(Record { number: self.marks, len, ..Record::new(Type::Mark) }, text);
        self.marks += 1;
        self.write_out()
    }

    /// Takes marks from a pipe as well.
    pub(super) fn read_lines(&mut self, lines: Lines) {
        self.lines = Some(lines);
    }

    /// Adds the marks that have arrived in the pipe.
    fn add_lines(&mut self) {
        let Some(mut lines) = self.lines.take() else { return };
        let mut texts = Vec::new();
        if lines.read(|text| texts.push(text.to_owned())) {
            self.lines = Some(lines);
        }
        for text in texts {
            // An error is kept, and ends the recording.
            let _ = self.mark(&text);
        }
    }

    /// Adds the marks that have arrived. Returns the pipe to wait for; `None` once it is closed.
    pub(super) fn wait_for_lines(&mut self) -> Option<File> {
        self.add_lines();
        self.lines.as_ref().and_then(|lines| lines.pipe().try_clone().ok())
    }

    fn process(&mut self, pid: u32) {
        if pid == 0 || !self.processes.insert(pid) {
            return;
        }
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let name = name.trim_end();
        if !name.is_empty() {
            let len = name.len() as u64;
            self.put(Record { len, pid, ..Record::new(Type::Process) }, name.as_bytes());
        }
    }

    fn read_at(&mut self, at: u64, into: &mut [u8]) -> io::Result<()> {
        if !self.pending.is_empty() {
            self.write_out()?;
        }
        let end = at + into.len() as u64;
        let mut from = at;
        while from < end {
            let (chunk, sector) = (from / CHUNK, from / SECTOR);
            // Whole chunks are read at once.
            let (source, to) = match self.content.get(&chunk) {
                None => (BASE, (chunk + 1) * CHUNK),
                Some(ChunkLocation::Zero) => (ZERO, (chunk + 1) * CHUNK),
                Some(ChunkLocation::Whole(place)) => (place + from % CHUNK, (chunk + 1) * CHUNK),
                Some(ChunkLocation::Sectors(places)) => {
                    let place = places[(sector % 8) as usize];
                    let within = if matches!(place, BASE | ZERO) { place } else { place + from % SECTOR };
                    (within, (sector + 1) * SECTOR)
                }
            };
            let to = to.min(end);
            let target = &mut into[(from - at) as usize..(to - at) as usize];
            match source {
                BASE => self.base.read_at(from, target)?,
                ZERO => target.fill(0),
                place => Source::read_at(&self.log, place, target)?,
            }
            from = to;
        }
        Ok(())
    }

    /// Records the content of sectors: `place` is the log's offset of the first one, or [`ZERO`].
    fn set(&mut self, at: u64, len: u64, place: u64) {
        let mut from = at;
        while from < at + len {
            let chunk = from / CHUNK;
            let to = ((chunk + 1) * CHUNK).min(at + len);
            let here = if place == ZERO { ZERO } else { place + (from - at) };
            if to - from == CHUNK {
                self.content.insert(
                    chunk,
                    if here == ZERO { ChunkLocation::Zero } else { ChunkLocation::Whole(here) },
                );
            } else {
                let entry =
                    self.content.entry(chunk).or_insert_with(|| ChunkLocation::Sectors(Box::new([BASE; 8])));
                if !matches!(entry, ChunkLocation::Sectors(_)) {
                    let at = |sector: usize| match entry {
                        ChunkLocation::Whole(place) => *place + sector as u64 * SECTOR,
                        _ => ZERO,
                    };
                    *entry = ChunkLocation::Sectors(Box::new(std::array::from_fn(at)));
                }
                let ChunkLocation::Sectors(places) = entry else { unreachable!("it was made one above") };
                for sector in from / SECTOR..to / SECTOR {
                    let offset = if here == ZERO { ZERO } else { here + (sector * SECTOR - from) };
                    places[(sector % 8) as usize] = offset;
                }
            }
            from = to;
        }
    }

    fn submit(&mut self, request: &Request, data: &[u8], pid: u32) -> io::Result<u32> {
        self.add_lines();
        self.process(pid);
        match *request {
            Request::Write { at, len, fua } => {
                let flags = if fua { FUA } else { 0 };
                let (start, end) = (at / SECTOR * SECTOR, (at + u64::from(len)).next_multiple_of(SECTOR));
                let new = Record::new(Type::Write);
                let record =
                    Record { flags, number: self.writes, offset: start, len: end - start, pid, ..new };
                let place = if start == at && end == at + u64::from(len) {
                    self.put(record, data)
                } else {
                    // A write of part of a sector is logged as a write of the whole sector.
                    let mut whole = vec![0; (end - start) as usize];
                    self.read_at(start, &mut whole)?;
                    let skip = (at - start) as usize;
                    whole[skip..skip + data.len()].copy_from_slice(data);
                    self.put(record, &whole)
                };
                self.set(start, end - start, place);
            }
            Request::Clear { at, len, zeroes } => {
                let start = at.next_multiple_of(SECTOR);
                let end = (at + len) / SECTOR * SECTOR;
                if start >= end {
                    return Err(rustix::io::Errno::OPNOTSUPP.into());
                }
                let kind = if zeroes { Type::Zeroes } else { Type::Discard };
                let new = Record::new(kind);
                self.put(Record { number: self.writes, offset: start, len: end - start, pid, ..new }, &[]);
                self.set(start, end - start, ZERO);
            }
            Request::Flush => {
                self.put(Record { number: self.flushes, pid, ..Record::new(Type::Flush) }, &[]);
                self.flushes += 1;
                return Ok(self.flushes - 1);
            }
            Request::Read { .. } => return Ok(0),
        }
        self.writes += 1;
        Ok(self.writes - 1)
    }

    fn complete(&mut self, request: &Request, ticket: u32) {
        let kind = if matches!(request, Request::Flush) { Type::FlushComplete } else { Type::Complete };
        self.put(Record { number: ticket, ..Record::new(kind) }, &[]);
    }
}

/// The recorder as a device, shared with the threads that add marks.
#[derive(Clone)]
pub(super) struct Recording(pub(super) Arc<Mutex<Recorder>>);

impl Recording {
    fn with<T>(&self, then: impl FnOnce(&mut Recorder) -> T) -> T {
        then(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Disk for Recording {
    fn submit(&mut self, request: &Request, data: &[u8], pid: u32) -> io::Result<u32> {
        self.with(|recorder| recorder.submit(request, data, pid))
    }

    fn complete(&mut self, request: &Request, _: &[u8], ticket: u32) -> io::Result<()> {
        self.with(|recorder| recorder.complete(request, ticket));
        Ok(())
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.with(|recorder| recorder.read_at(at, into))
    }

    fn end(&mut self) -> io::Result<()> {
        self.with(|recorder| if recorder.pending.is_empty() { Ok(()) } else { recorder.write_out() })
    }
}
