//! The lean initiator: one session with one connection, which costs little besides its system calls.
//!
//! As in the lean NBD client, each session has a blocking socket and a thread. The thread sends all
//! commands that its window and the target's CmdSN window permit in one vectored write, then receives once
//! into a buffer of 256 KiB. Data of reads stays in that buffer, data of writes comes from one constant
//! block. The initiator offers what Linux's initiator offers: immediate data, no initial R2T, no digests.
//!
//! It checks everything in the answers except the data: a status other than GOOD, an unknown task, a missing
//! byte or a reject ends the run. Source: RFC 7143, chapter 11.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const BHS: usize = 48;
/// Most commands in one send.
const BATCH_MAX: usize = 32;
/// Most bytes of one receive.
const RECEIVE_BYTES: usize = 256 << 10;
/// A target that sends nothing for this time counts as hanging.
const SILENCE: Duration = Duration::from_secs(20);
/// Data that may be sent without an R2T.
const FIRST_BURST: u32 = 262_144;

/// The keys that we offer, besides the names.
const KEYS: &[(&str, &str)] = &[
    ("SessionType", "Normal"),
    ("HeaderDigest", "None"),
    ("DataDigest", "None"),
    ("InitialR2T", "No"),
    ("ImmediateData", "Yes"),
    ("MaxRecvDataSegmentLength", "262144"),
    ("FirstBurstLength", "262144"),
    ("MaxBurstLength", "1048576"),
    ("MaxConnections", "1"),
    ("MaxOutstandingR2T", "1"),
    ("DefaultTime2Wait", "0"),
    ("DefaultTime2Retain", "0"),
    ("ErrorRecoveryLevel", "0"),
    ("DataPDUInOrder", "Yes"),
    ("DataSequenceInOrder", "Yes"),
];

/// The load of one session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Whether the session writes rather than reads.
    pub(super) writes: bool,
    /// Bytes of each command: a multiple of 512.
    pub(super) block: u32,
    /// Commands in flight.
    pub(super) depth: usize,
    /// Seed of the offsets.
    pub(super) seed: u64,
}

/// A logged-in session.
pub(super) struct Session {
    stream: TcpStream,
    lun: u16,
    cmd_sn: u32,
    max_cmd_sn: u32,
    exp_stat_sn: u32,
    /// The target's MaxRecvDataSegmentLength.
    segment: u32,
    first_burst: u32,
    is_immediate: bool,
    /// The unit's length in bytes.
    pub(super) size: u64,
}

fn broken(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_be_bytes)
}

fn data_len(bhs: &[u8; BHS]) -> usize {
    (word(bhs, 4) & 0x00ff_ffff) as usize
}

impl Session {
    /// Connects to the unit at `iscsi://HOST:PORT/NAME/LUN` and logs in; `number` is part of the session's
    /// identifier.
    pub(super) fn open(url: &str, number: u16) -> io::Result<Session> {
        let mut parts = url.strip_prefix("iscsi://").unwrap_or_default().split('/');
        let (portal, name) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let lun =
            parts.next().and_then(|lun| lun.parse().ok()).ok_or_else(|| broken(format!("{url}: no LUN")))?;
        let stream = TcpStream::connect(portal)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        let mut session = Session {
            stream,
            lun,
            cmd_sn: 1,
            max_cmd_sn: 1,
            exp_stat_sn: 0,
            segment: 8192,
            first_burst: 65_536,
            is_immediate: true,
            size: 0,
        };
        session.login(name, number)?;
        session.size = session.capacity()?;
        Ok(session)
    }

    fn login(&mut self, name: &str, number: u16) -> io::Result<()> {
        let initiator = format!("iqn.2026-11.io.blockyard.bench:{number}");
        let mut text = Vec::new();
        for (key, value) in [("InitiatorName", initiator.as_str()), ("TargetName", name)].iter().chain(KEYS) {
            text.extend_from_slice(format!("{key}={value}\0").as_bytes());
        }
        loop {
            let mut bhs = [0; BHS];
            bhs[0] = 0x43;
            // Transit from the operational stage to the full-feature phase.
            bhs[1] = 0x87;
            bhs[4..8].copy_from_slice(&(text.len() as u32).to_be_bytes());
            // ISID of the format "random".
            bhs[8] = 0x80;
            bhs[12..14].copy_from_slice(&number.to_be_bytes());
            bhs[24..28].copy_from_slice(&self.cmd_sn.to_be_bytes());
            bhs[28..32].copy_from_slice(&self.exp_stat_sn.to_be_bytes());
            text.resize(text.len().next_multiple_of(4), 0);
            self.stream.write_all(&[&bhs[..], &text].concat())?;
            let (answer, data) = self.receive()?;
            if answer[0] != 0x23 || answer[36] != 0 {
                return Err(broken(format!("login failed: status {:02x}{:02x}", answer[36], answer[37])));
            }
            self.exp_stat_sn = word(&answer, 24).wrapping_add(1);
            for pair in String::from_utf8_lossy(&data).split('\0') {
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                match (key, value.parse::<u32>()) {
                    ("MaxRecvDataSegmentLength", Ok(len)) => self.segment = len,
                    ("FirstBurstLength", Ok(len)) => self.first_burst = len.min(FIRST_BURST),
                    ("ImmediateData", _) => self.is_immediate = value == "Yes",
                    _ => {}
                }
            }
            self.max_cmd_sn = word(&answer, 32);
            if answer[1] & 0x80 != 0 {
                return Ok(());
            }
            text.clear();
        }
    }

    /// Receives one PDU with its data.
    fn receive(&mut self) -> io::Result<([u8; BHS], Vec<u8>)> {
        let mut bhs = [0; BHS];
        self.stream.read_exact(&mut bhs)?;
        let len = data_len(&bhs);
        let mut data = vec![0; (usize::from(bhs[4]) * 4) + len.next_multiple_of(4)];
        self.stream.read_exact(&mut data)?;
        data.truncate(len);
        Ok((bhs, data))
    }

    fn command(&mut self, task: u32, direction: u8, len: u32, cdb: &[u8]) -> [u8; BHS] {
        let mut bhs = [0; BHS];
        bhs[0] = 0x01;
        // Final, with the simple task attribute.
        bhs[1] = 0x81 | direction;
        bhs[8..10].copy_from_slice(&self.lun.to_be_bytes());
        bhs[16..20].copy_from_slice(&task.to_be_bytes());
        bhs[20..24].copy_from_slice(&len.to_be_bytes());
        bhs[24..28].copy_from_slice(&self.cmd_sn.to_be_bytes());
        bhs[28..32].copy_from_slice(&self.exp_stat_sn.to_be_bytes());
        bhs[32..32 + cdb.len()].copy_from_slice(cdb);
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        bhs
    }

    /// Returns the unit's length in bytes, by READ CAPACITY(10), after any unit attentions.
    fn capacity(&mut self) -> io::Result<u64> {
        for _ in 0..10 {
            let bhs = self.command(0, 0x40, 8, &[0x25]);
            self.stream.write_all(&bhs)?;
            let mut capacity = None;
            let status = loop {
                let (answer, data) = self.receive()?;
                self.note(&answer);
                if answer[0] == 0x25 && data.len() == 8 {
                    capacity = Some((u64::from(word(&data, 0)) + 1) * u64::from(word(&data, 4)));
                }
                if answer[0] == 0x21 || answer[1] & 1 != 0 {
                    break answer[3];
                }
            };
            // tgtd sends data even with a unit attention.
            if let Some(capacity) = capacity.filter(|_| status == 0) {
                return Ok(capacity);
            }
        }
        Err(broken("READ CAPACITY fails"))
    }

    /// Records the sequence numbers of an answer.
    fn note(&mut self, bhs: &[u8; BHS]) {
        let has_status = matches!(bhs[0], 0x21 | 0x23) || (bhs[0] == 0x25 && bhs[1] & 1 != 0);
        if has_status {
            self.exp_stat_sn = word(bhs, 24).wrapping_add(1);
        }
        self.max_cmd_sn = word(bhs, 32);
    }

    /// Sends a single command and waits for its answer.
    pub(super) fn read_once(&mut self) -> io::Result<()> {
        let bhs = self.command(0, 0x40, 4096, &[0x28, 0, 0, 0, 0, 0, 0, 0, 8]);
        self.stream.write_all(&bhs)?;
        loop {
            let (answer, _) = self.receive()?;
            self.note(&answer);
            if answer[0] == 0x21 || answer[1] & 1 != 0 {
                return if answer[3] == 0 { Ok(()) } else { Err(broken("a read failed")) };
            }
        }
    }

    /// Loads the target until `stop`, adding each completed command to `finished`.
    pub(super) fn run(mut self, load: Load, stop: &AtomicBool, finished: &AtomicU64) -> io::Result<()> {
        let mut tasks = Tasks::new(load, self.size);
        let mut buffer = vec![0; RECEIVE_BYTES];
        let mut parser = Parser::default();
        while !stop.load(Ordering::Relaxed) || tasks.free.len() < load.depth {
            if !stop.load(Ordering::Relaxed) {
                self.send(&mut tasks)?;
            }
            let len = self.stream.read(&mut buffer)?;
            if len == 0 {
                return Err(broken("the target closed the connection"));
            }
            let before = tasks.free.len();
            let mut rest = buffer.get(..len).unwrap_or_default();
            while let Some(bhs) = parser.next(&mut rest) {
                self.answer(&bhs, rest, &mut tasks)?;
            }
            finished.fetch_add((tasks.free.len() - before) as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sends as many new commands as both windows allow, in batches.
    fn send(&mut self, tasks: &mut Tasks) -> io::Result<()> {
        loop {
            let allowed = self.max_cmd_sn.wrapping_sub(self.cmd_sn).wrapping_add(1);
            let allowed = if allowed > 1 << 30 { 0 } else { allowed as usize };
            let count = tasks.free.len().min(allowed).min(BATCH_MAX);
            if count == 0 {
                return Ok(());
            }
            let load = tasks.load;
            let immediate = if load.writes && self.is_immediate {
                load.block.min(self.segment).min(self.first_burst)
            } else {
                0
            };
            let mut headers = Vec::with_capacity(count);
            for _ in 0..count {
                let Some(task) = tasks.free.pop() else { break };
                let block = tasks.start(task);
                let (blocks, lba) = (load.block / 512, block * (load.block / 512));
                let mut cdb = [0; 10];
                cdb[0] = if load.writes { 0x2a } else { 0x28 };
                cdb[2..6].copy_from_slice(&lba.to_be_bytes());
                cdb[7..9].copy_from_slice(&(blocks as u16).to_be_bytes());
                let direction = if load.writes { 0x20 } else { 0x40 };
                let mut bhs = self.command(task as u32, direction, load.block, &cdb);
                bhs[4..8].copy_from_slice(&immediate.to_be_bytes());
                headers.push(bhs);
            }
            let data = tasks.payload.get(..immediate as usize).unwrap_or_default();
            let mut slices = Vec::with_capacity(headers.len() * 2);
            for header in &headers {
                slices.push(IoSlice::new(header));
                if !data.is_empty() {
                    slices.push(IoSlice::new(data));
                }
            }
            write_all(&mut self.stream, &mut slices)?;
        }
    }

    /// Handles an answer; `behind` is the data received after its header.
    fn answer(&mut self, bhs: &[u8; BHS], behind: &[u8], tasks: &mut Tasks) -> io::Result<()> {
        self.note(bhs);
        let task = word(bhs, 16) as usize;
        match bhs[0] {
            0x25 => {
                tasks.received(task, data_len(bhs))?;
                if bhs[1] & 1 != 0 { tasks.end(task, bhs[3]) } else { Ok(()) }
            }
            0x21 if bhs[2] == 0 => tasks.end(task, bhs[3]).map_err(|error| {
                // Sense data follows its length of two bytes.
                let sense = behind.get(2..data_len(bhs)).unwrap_or_default();
                broken(format!("{error}, sense data {sense:02x?}"))
            }),
            0x31 => self.data_out(bhs, tasks),
            0x20 if word(bhs, 20) == u32::MAX => Ok(()),
            0x20 => {
                let mut pong = [0; BHS];
                pong[..2].copy_from_slice(&[0x40, 0x80]);
                pong[8..16].copy_from_slice(&bhs[8..16]);
                pong[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
                pong[20..24].copy_from_slice(&bhs[20..24]);
                pong[24..28].copy_from_slice(&self.cmd_sn.to_be_bytes());
                pong[28..32].copy_from_slice(&self.exp_stat_sn.to_be_bytes());
                self.stream.write_all(&pong)
            }
            opcode => {
                Err(broken(format!("an unexpected answer: opcode {opcode:#x}, response {:#x}", bhs[2])))
            }
        }
    }

    /// Sends the data that an R2T requests.
    fn data_out(&mut self, r2t: &[u8; BHS], tasks: &Tasks) -> io::Result<()> {
        let (offset, len) = (word(r2t, 40), word(r2t, 44));
        if offset.checked_add(len).is_none_or(|end| end > tasks.load.block) || len == 0 {
            return Err(broken("an R2T beyond the command's data"));
        }
        let (mut sent, mut number) = (0, 0_u32);
        while sent < len {
            let part = (len - sent).min(self.segment);
            let mut bhs = [0; BHS];
            bhs[0] = 0x05;
            bhs[1] = if sent + part == len { 0x80 } else { 0 };
            bhs[4..8].copy_from_slice(&part.to_be_bytes());
            bhs[8..16].copy_from_slice(&r2t[8..16]);
            bhs[16..24].copy_from_slice(&r2t[16..24]);
            bhs[28..32].copy_from_slice(&self.exp_stat_sn.to_be_bytes());
            bhs[36..40].copy_from_slice(&number.to_be_bytes());
            bhs[40..44].copy_from_slice(&(offset + sent).to_be_bytes());
            let start = (offset + sent) as usize;
            let data = tasks.payload.get(start..start + part as usize).unwrap_or_default();
            write_all(&mut self.stream, &mut [IoSlice::new(&bhs), IoSlice::new(data)])?;
            sent += part;
            number += 1;
        }
        Ok(())
    }
}

fn write_all(stream: &mut TcpStream, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        let len = stream.write_vectored(slices)?;
        if len == 0 {
            return Err(broken("the target takes no data"));
        }
        IoSlice::advance_slices(&mut slices, len);
    }
    Ok(())
}

/// The commands of a session, by task tag.
struct Tasks {
    load: Load,
    blocks: u32,
    random: fastrand::Rng,
    payload: Vec<u8>,
    /// Bytes that each task in flight has received; `None`: the task is free.
    received: Vec<Option<usize>>,
    free: Vec<usize>,
}

impl Tasks {
    fn new(load: Load, size: u64) -> Tasks {
        let mut random = fastrand::Rng::with_seed(load.seed);
        let blocks = (size / u64::from(load.block)).clamp(1, u64::from(u32::MAX / (load.block / 512)));
        let payload = (0..load.block).map(|_| random.u8(..)).collect();
        let received = vec![None; load.depth];
        Tasks { load, blocks: blocks as u32, random, payload, received, free: (0..load.depth).collect() }
    }

    /// Marks a task as in flight; returns the number of its block.
    fn start(&mut self, task: usize) -> u32 {
        if let Some(received) = self.received.get_mut(task) {
            *received = Some(0);
        }
        self.random.u32(..self.blocks)
    }

    fn received(&mut self, task: usize, len: usize) -> io::Result<()> {
        let received = self.received.get_mut(task).and_then(Option::as_mut);
        *received.ok_or_else(|| broken("data for an unknown task"))? += len;
        Ok(())
    }

    fn end(&mut self, task: usize, status: u8) -> io::Result<()> {
        let received = self.received.get_mut(task).and_then(Option::take);
        let received = received.ok_or_else(|| broken("an answer to an unknown task"))?;
        let expected = if self.load.writes { 0 } else { self.load.block as usize };
        if status != 0 || received != expected {
            return Err(broken(format!("status {status:#x}, {received} of {expected} bytes")));
        }
        self.free.push(task);
        Ok(())
    }
}

/// Finds the headers in a stream of PDUs and skips their data.
#[derive(Default)]
struct Parser {
    header: Vec<u8>,
    /// Bytes of data and padding that are still to be skipped.
    skip: usize,
}

impl Parser {
    /// Returns the next header; `None` when `bytes` is used up.
    fn next(&mut self, bytes: &mut &[u8]) -> Option<[u8; BHS]> {
        let skipped = self.skip.min(bytes.len());
        self.skip -= skipped;
        *bytes = &bytes[skipped..];
        let (head, rest) = bytes.split_at((BHS - self.header.len()).min(bytes.len()));
        self.header.extend_from_slice(head);
        *bytes = rest;
        let bhs: [u8; BHS] = self.header.as_slice().try_into().ok()?;
        self.header.clear();
        self.skip = usize::from(bhs[4]) * 4 + data_len(&bhs).next_multiple_of(4);
        Some(bhs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_found_wherever_the_stream_is_cut() {
        let mut stream = Vec::new();
        for (number, len) in [(1_u8, 0_u8), (2, 5), (3, 8)] {
            let mut bhs = [0; BHS];
            (bhs[0], bhs[7]) = (number, len);
            stream.extend_from_slice(&bhs);
            stream.resize(stream.len() + usize::from(len).next_multiple_of(4), 0xff);
        }
        for cut in 1..stream.len() {
            let (mut parser, mut found) = (Parser::default(), Vec::new());
            for mut part in [&stream[..cut], &stream[cut..]] {
                while let Some(bhs) = parser.next(&mut part) {
                    found.push(bhs[0]);
                }
            }
            assert_eq!(found, [1, 2, 3], "cut at {cut}");
        }
    }

    #[test]
    fn a_read_that_lacks_bytes_is_an_error() {
        let load = Load { writes: false, block: 4096, depth: 2, seed: 1 };
        let mut tasks = Tasks::new(load, 1 << 20);
        let task = tasks.free.pop().expect("two are free");
        assert!(tasks.end(task, 0).is_err(), "not started");
        tasks.start(task);
        tasks.received(task, 4096).expect("it is in flight");
        tasks.end(task, 0).expect("all bytes came");
        let task = tasks.free.pop().expect("two are free");
        tasks.start(task);
        tasks.received(task, 512).expect("it is in flight");
        assert!(tasks.end(task, 0).is_err());
    }
}
