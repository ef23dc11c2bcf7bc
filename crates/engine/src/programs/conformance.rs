//! The conformance test of the exec protocol: `blockyard exec-test COMMAND`.
//!
//! It starts the program as a device would, and checks each demand of docs/exec.md by itself. Ranges that it
//! writes get their content back.

use super::program::Program;
use crate::spec::ProgramSpec;
use backends::exec::{ExecSpec, SLOT_LEN, SLOTS};
use backends::nbd::ServerTimeouts;
use proto::exec::{FUA, Features, Operation, REPLY_LEN, REQUEST_LEN, Ready, Reply, Request};
use ring::SharedMemory;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Longest time for an answer of the program, and for its end.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// Result of a check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The program satisfies the demand.
    Passed,
    /// The check does not apply, for this reason.
    Skipped(&'static str),
    /// The program violates the demand; the text describes how.
    Failed(String),
}

/// A check and its result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checked {
    /// The demand.
    pub name: &'static str,
    /// The result.
    pub verdict: Verdict,
}

type Outcome = Result<Verdict, String>;

/// A connection to the program.
struct Peer {
    stream: UnixStream,
    memory: File,
    next_tag: u64,
}

impl Peer {
    fn connect(program: &Program) -> Result<Peer, String> {
        let memory = shared_memory()?;
        let stream = UnixStream::from(program.connect(&memory).map_err(|why| why.to_string())?);
        let set = stream.set_read_timeout(Some(ANSWER_TIME)).and(stream.set_write_timeout(Some(ANSWER_TIME)));
        set.map_err(|why| why.to_string())?;
        let memory = memory.as_fd().try_clone_to_owned().map_err(|why| why.to_string())?;
        Ok(Peer { stream, memory: memory.into(), next_tag: 0x1234_5678_9abc_0000 })
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.stream.write_all(bytes).map_err(|why| format!("sending a request failed: {why}"))
    }

    fn reply(&mut self) -> Result<Reply, String> {
        let mut bytes = [0; REPLY_LEN];
        self.stream.read_exact(&mut bytes).map_err(|why| match why.kind() {
            std::io::ErrorKind::WouldBlock => format!("it did not answer within {ANSWER_TIME:?}"),
            std::io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
            _ => why.to_string(),
        })?;
        Reply::parse(&bytes).ok_or_else(|| format!("its reply is malformed: {bytes:02x?}"))
    }

    fn encode(&mut self, operation: Operation, flags: u16, len: u32, offset: u64, place: u64) -> [u8; 32] {
        let mut bytes = [0; REQUEST_LEN];
        self.next_tag += 1;
        Request { tag: self.next_tag, operation, flags, len, offset, place }.put(&mut bytes);
        bytes
    }

    /// Sends a request and waits for its reply. Returns its errno.
    fn call(
        &mut self,
        operation: Operation,
        flags: u16,
        len: u32,
        offset: u64,
        place: u64,
    ) -> Result<u16, String> {
        let bytes = self.encode(operation, flags, len, offset, place);
        self.send(&bytes)?;
        let reply = self.reply()?;
        if reply.tag != self.next_tag {
            return Err(format!("its reply has tag {:#x} rather than {:#x}", reply.tag, self.next_tag));
        }
        Ok(reply.errno)
    }

    fn done(&mut self, operation: Operation, flags: u16, len: u32, offset: u64) -> Result<(), String> {
        match self.call(operation, flags, len, offset, 0)? {
            0 => Ok(()),
            errno => Err(format!("{operation:?} of {len} bytes at {offset} failed with errno {errno}")),
        }
    }

    fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, String> {
        self.done(Operation::Read, 0, len, offset)?;
        self.bytes(0, len)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), String> {
        self.put(0, data)?;
        self.done(Operation::Write, 0, data.len() as u32, offset)
    }

    fn bytes(&self, place: u64, len: u32) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; len as usize];
        self.memory.read_exact_at(&mut bytes, place).map_err(|why| why.to_string())?;
        Ok(bytes)
    }

    fn put(&self, place: u64, bytes: &[u8]) -> Result<(), String> {
        self.memory.write_all_at(bytes, place).map_err(|why| why.to_string())
    }
}

fn shared_memory() -> Result<Arc<SharedMemory>, String> {
    SharedMemory::create(SLOTS as usize * SLOT_LEN as usize).map_err(|why| why.to_string())
}

fn pattern(seed: u8, len: u32) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect()
}

/// The driver under test, with its connection.
struct Bench {
    program: Program,
    ready: Ready,
    /// Length of an ordinary request.
    unit: u32,
}

impl Bench {
    fn has(&self, feature: Features) -> bool {
        self.ready.features.contains(feature)
    }

    /// Runs a check on a new connection that may write, on a range of `units` units at the start of the disk,
    /// whose content is restored.
    fn writing(&self, units: u64, check: impl FnOnce(&mut Peer) -> Outcome) -> Outcome {
        if self.has(Features::READ_ONLY) {
            return Ok(Verdict::Skipped("the disk is read-only"));
        }
        let unit = u64::from(self.unit);
        if units * unit > self.ready.size {
            return Ok(Verdict::Skipped("the disk is too small"));
        }
        let mut peer = Peer::connect(&self.program)?;
        let before = (0..units).map(|at| peer.read(at * unit, self.unit)).collect::<Result<Vec<_>, _>>()?;
        let outcome = check(&mut peer)?;
        for (at, data) in (0..).zip(&before) {
            peer.write(at * unit, data)?;
        }
        Ok(outcome)
    }
}

fn same(found: &[u8], expected: &[u8], what: &str) -> Result<(), String> {
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        None if found.len() == expected.len() => Ok(()),
        at => Err(format!("{what} differs at byte {}", at.unwrap_or(found.len().min(expected.len())))),
    }
}

fn round_trip(bench: &Bench) -> Outcome {
    bench.writing(1, |peer| {
        for seed in [1, 2] {
            let data = pattern(seed, bench.unit);
            peer.write(0, &data)?;
            peer.put(0, &vec![0xee; data.len()])?;
            same(&peer.read(0, bench.unit)?, &data, "what was written and read")?;
        }
        Ok(Verdict::Passed)
    })
}

fn places(bench: &Bench) -> Outcome {
    bench.writing(1, |peer| {
        let (place, len) = (3 * u64::from(SLOT_LEN), bench.unit);
        let data = pattern(3, len);
        peer.put(0, &vec![0xdd; len as usize])?;
        peer.put(place, &data)?;
        if peer.call(Operation::Write, 0, len, 0, place)? != 0 {
            return Err("a write from another place failed".to_owned());
        }
        let target = 5 * u64::from(SLOT_LEN);
        peer.put(target - 16, &vec![0x77; len as usize + 32])?;
        if peer.call(Operation::Read, 0, len, 0, target)? != 0 {
            return Err("a read to another place failed".to_owned());
        }
        let found = peer.bytes(target - 16, len + 32)?;
        same(&found[16..16 + len as usize], &data, "data at another place")?;
        let around = [&found[..16], &found[16 + len as usize..]].concat();
        same(&around, &[0x77; 32], "memory around the place of a read")?;
        Ok(Verdict::Passed)
    })
}

fn large(bench: &Bench) -> Outcome {
    let len = bench.ready.transfer_max;
    if u64::from(len) > bench.ready.size {
        return Ok(Verdict::Skipped("the disk is smaller than the largest request"));
    }
    let mut peer = Peer::connect(&bench.program)?;
    let before = peer.read(0, len)?;
    if bench.has(Features::READ_ONLY) {
        return Ok(Verdict::Passed);
    }
    let data = pattern(4, len);
    peer.write(0, &data)?;
    same(&peer.read(0, len)?, &data, "the largest request")?;
    peer.write(0, &before)?;
    Ok(Verdict::Passed)
}

fn in_flight(bench: &Bench) -> Outcome {
    let mut peer = Peer::connect(&bench.program)?;
    let (count, unit) = (u64::from(bench.ready.depth_max), u64::from(bench.unit));
    let units = (bench.ready.size / unit).max(1);
    let (mut all, mut tags) = (Vec::new(), BTreeSet::new());
    for at in 0..count {
        let place = at * u64::from(SLOT_LEN);
        all.extend(peer.encode(Operation::Read, 0, bench.unit, at % units * unit, place));
        tags.insert(peer.next_tag);
    }
    peer.send(&all)?;
    for _ in 0..count {
        let reply = peer.reply()?;
        if !tags.remove(&reply.tag) {
            return Err(format!("a reply has tag {:#x}, which no unanswered request has", reply.tag));
        }
        if reply.errno != 0 {
            return Err(format!("a read failed with errno {}", reply.errno));
        }
    }
    Ok(Verdict::Passed)
}

fn pieces(bench: &Bench) -> Outcome {
    let mut peer = Peer::connect(&bench.program)?;
    let bytes = peer.encode(Operation::Read, 0, bench.unit, 0, 0);
    for piece in bytes.chunks(7) {
        peer.send(piece)?;
        std::thread::sleep(Duration::from_millis(2));
    }
    let reply = peer.reply()?;
    if (reply.tag, reply.errno) == (peer.next_tag, 0) {
        return Ok(Verdict::Passed);
    }
    Err(format!("a request that arrives in pieces is answered with errno {}", reply.errno))
}

fn last_block(bench: &Bench) -> Outcome {
    let mut peer = Peer::connect(&bench.program)?;
    let block = bench.ready.block.max(512);
    peer.read(bench.ready.size - u64::from(block), block)?;
    Ok(Verdict::Passed)
}

fn past_the_end(bench: &Bench) -> Outcome {
    let mut peer = Peer::connect(&bench.program)?;
    if peer.call(Operation::Read, 0, bench.unit, bench.ready.size, 0)? == 0 {
        return Err("a read past the end succeeds".to_owned());
    }
    peer.read(0, bench.unit)?;
    Ok(Verdict::Passed)
}

fn unknown_operation(bench: &Bench) -> Outcome {
    let mut peer = Peer::connect(&bench.program)?;
    let mut bytes = peer.encode(Operation::Read, 0, bench.unit, 0, 0);
    bytes[8..10].copy_from_slice(&999u16.to_le_bytes());
    peer.send(&bytes)?;
    let reply = peer.reply()?;
    if reply.tag != peer.next_tag || reply.errno == 0 {
        return Err("an unknown operation succeeds".to_owned());
    }
    peer.read(0, bench.unit)?;
    Ok(Verdict::Passed)
}

fn clears(bench: &Bench) -> Outcome {
    if !bench.has(Features::WRITE_ZEROES) && !bench.has(Features::DISCARD) {
        return Ok(Verdict::Skipped("it reports neither DISCARD nor WRITE_ZEROES"));
    }
    bench.writing(3, |peer| {
        let (unit, data) = (u64::from(bench.unit), pattern(5, bench.unit));
        for (feature, operation) in
            [(Features::WRITE_ZEROES, Operation::WriteZeroes), (Features::DISCARD, Operation::Discard)]
        {
            if !bench.has(feature) {
                continue;
            }
            (0..3).try_for_each(|at| peer.write(at * unit, &data))?;
            peer.done(operation, 0, bench.unit, unit)?;
            same(&peer.read(0, bench.unit)?, &data, "the range before the cleared one")?;
            same(&peer.read(2 * unit, bench.unit)?, &data, "the range behind the cleared one")?;
            let cleared = peer.read(unit, bench.unit)?;
            if operation == Operation::WriteZeroes {
                same(&cleared, &vec![0; data.len()], "the range of WRITE_ZEROES")?;
            }
        }
        Ok(Verdict::Passed)
    })
}

fn durable(bench: &Bench) -> Outcome {
    if !bench.has(Features::FLUSH) && !bench.has(Features::FUA) {
        return Ok(Verdict::Skipped("it reports neither FLUSH nor FUA"));
    }
    bench.writing(1, |peer| {
        let data = pattern(6, bench.unit);
        if bench.has(Features::FUA) {
            peer.put(0, &data)?;
            peer.done(Operation::Write, FUA, bench.unit, 0)?;
            same(&peer.read(0, bench.unit)?, &data, "a write with FUA")?;
        }
        if bench.has(Features::FLUSH) {
            peer.done(Operation::Flush, 0, 0, 0)?;
        }
        Ok(Verdict::Passed)
    })
}

fn refuses_writes(bench: &Bench) -> Outcome {
    if !bench.has(Features::READ_ONLY) {
        return Ok(Verdict::Skipped("the disk can be written"));
    }
    let mut peer = Peer::connect(&bench.program)?;
    if peer.call(Operation::Write, 0, bench.unit, 0, 0)? == 0 {
        return Err("a write to a read-only disk succeeds".to_owned());
    }
    Ok(Verdict::Passed)
}

fn next_connection(bench: &Bench) -> Outcome {
    bench.writing(1, |peer| {
        let data = pattern(7, bench.unit);
        peer.write(0, &data)?;
        // A program with one connection at a time takes the next one when this one is closed.
        peer.stream.shutdown(std::net::Shutdown::Both).map_err(|why| why.to_string())?;
        let mut next = Peer::connect(&bench.program)?;
        same(&next.read(0, bench.unit)?, &data, "what was written over an earlier connection")?;
        *peer = next;
        Ok(Verdict::Passed)
    })
}

fn several_connections(bench: &Bench) -> Outcome {
    if !bench.has(Features::MULTI) {
        return Ok(Verdict::Skipped("it does not report MULTI"));
    }
    bench.writing(1, |peer| {
        let mut other = Peer::connect(&bench.program)?;
        let data = pattern(8, bench.unit);
        peer.write(0, &data)?;
        same(&other.read(0, bench.unit)?, &data, "what was written over another connection")?;
        Ok(Verdict::Passed)
    })
}

/// A demand of the protocol, and the function that checks it.
type Check = (&'static str, fn(&Bench) -> Outcome);

/// The checks that share a started program.
const CHECKS: [Check; 13] = [
    ("written data is read back", round_trip),
    ("data is where the request places it, and nowhere else", places),
    ("the largest request works", large),
    ("as many requests as it allows are answered, each once", in_flight),
    ("a request may arrive in pieces", pieces),
    ("the last block can be read", last_block),
    ("a request past the end fails, and the next one works", past_the_end),
    ("an unknown operation fails, and the next one works", unknown_operation),
    ("DISCARD and WRITE_ZEROES affect their range only", clears),
    ("FLUSH and FUA work", durable),
    ("a read-only disk refuses writes", refuses_writes),
    ("the next connection finds the data of the last", next_connection),
    ("several connections see each other's writes", several_connections),
];

/// Checks a program. `report` is called with each result.
pub fn exec_test(spec: &ProgramSpec, mut report: impl FnMut(&Checked)) -> bool {
    let mut passed = true;
    let mut tell = |name, outcome: Outcome| {
        let verdict = outcome.unwrap_or_else(Verdict::Failed);
        passed &= !matches!(verdict, Verdict::Failed(_));
        report(&Checked { name, verdict });
    };
    let exec = ExecSpec {
        command: spec.command.clone(),
        timeouts: ServerTimeouts { timeout: spec.timeout, reconnect: spec.reconnect },
        read_only: spec.ro,
    };
    const HELLO: &str = "it starts and answers the hello";
    let start = || Program::start(spec, exec.clone(), None).map_err(|why| why.to_string());
    let (program, ready) = match start() {
        Ok(started) => started,
        Err(why) => {
            tell(HELLO, Err(why));
            return false;
        }
    };
    tell(HELLO, Ok(Verdict::Passed));
    let unit =
        ready.block.max(4096).min(ready.transfer_max).min(u32::try_from(ready.size).unwrap_or(u32::MAX));
    let bench = Bench { program, ready, unit };
    for (name, check) in CHECKS {
        tell(name, check(&bench));
    }
    let ends = bench.program.end(ANSWER_TIME).map(|()| Verdict::Passed);
    tell("it ends when its sockets are closed", ends);
    let again = start().and_then(|(program, again)| {
        backends::exec::Exec::admits(&ready, &again, spec.ro).map_err(|why| why.to_string())?;
        program.end(ANSWER_TIME)?;
        Ok(Verdict::Passed)
    });
    tell("it starts again with the same disk", again);
    passed
}
