//! SCSI commands in a trace: their records, and the text that readers print.
//!
//! ```text
//!          offset       length   tag          value                                     from  device
//! begun    CDB 0..8     number   LUN          session (16) | task tag (32)              0     length of the CDB
//! more     CDB, 8 bytes number   at           CDB, 6 bytes                              1
//! request  of the request        its tag      number                                    2
//! ended    bytes moved  number                status | sense key, code and qualifier    3     1: no response
//! ```
//!
//! `more` follows `begun` at once, as often as the CDB needs: bytes 8 to 22 and 22 to 32.

use crate::{Kind, Record};
use block::Op;
use queue::{CDB_MAX, CommandEvent, CommandPoint};
use std::collections::HashMap;
use std::fmt::Write;

const BEGUN: u8 = 0;
const MORE: u8 = 1;
const REQUEST: u8 = 2;
const ENDED: u8 = 3;
/// Number of bytes of a CDB in the first record, and in each further one.
const FIRST: usize = 8;
const FURTHER: usize = 14;
/// Largest number of commands, and of sessions, that a reader remembers; beyond it the reader forgets all.
const REMEMBERED_MAX: usize = 1 << 16;

/// Passes the records of a command's event to `put`. `begins`: a request's record needs the beginning before
/// it.
pub(crate) fn encode(time_ns: u64, point: &CommandPoint, begins: bool, mut put: impl FnMut(Record)) {
    let empty = Record {
        time_ns,
        offset: 0,
        len: point.number,
        tag: 0,
        kind: Kind::Command,
        op: Op::Read,
        flags: 0,
        value: 0,
        from: 0,
        device: 0,
    };
    let eight = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| at_or_0(&point.cdb, at + byte)));
    if begins || point.event == CommandEvent::Begun {
        let value = u64::from(point.session) << 32 | u64::from(point.task);
        put(Record { offset: eight(0), tag: point.lun, value, from: BEGUN, device: point.cdb_len, ..empty });
        let mut at = FIRST;
        while at < usize::from(point.cdb_len).min(CDB_MAX) {
            let value = eight(at + 8) >> 16;
            put(Record { offset: eight(at), tag: at as u16, value, from: MORE, ..empty });
            at += FURTHER;
        }
    }
    match point.event {
        CommandEvent::Begun => {}
        CommandEvent::Request { tag, op, offset, len, .. } => {
            let (value, len) = (point.number.into(), Record::length(len.0));
            put(Record { offset: offset.0, len, tag: tag.0, op, value, from: REQUEST, ..empty });
        }
        CommandEvent::Ended { status, sense: [key, code, qualifier], is_silent, bytes } => {
            let value = u32::from_be_bytes([status, key, code, qualifier]);
            let device = is_silent.into();
            put(Record { offset: bytes, value: value.into(), from: ENDED, device, ..empty });
        }
    }
}

/// Returns the number of the session of a command that begins in this record.
pub fn session_of(record: &Record) -> Option<u16> {
    (record.kind == Kind::Command && record.from == BEGUN).then_some((record.value >> 32) as u16)
}

fn at_or_0(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or_default()
}

/// Returns the lowest byte of the service action of a CDB.
fn service_action(cdb: &[u8; CDB_MAX]) -> u8 {
    if cdb[0] == 0x7f { cdb[9] } else { cdb[1] & 0x1f }
}

/// A command as a reader reconstructs it from its records.
#[derive(Clone, Debug)]
pub(crate) struct Command {
    number: u32,
    session: u16,
    lun: u16,
    task: u32,
    cdb: [u8; CDB_MAX],
    cdb_len: usize,
}

impl Command {
    /// Returns the name of the command's operation.
    pub(crate) fn name(&self) -> String {
        name(self.cdb[0], service_action(&self.cdb))
    }

    /// Returns the CDB in hexadecimal digits.
    pub(crate) fn cdb(&self) -> String {
        let bytes: Vec<String> = self.cdb[..self.cdb_len].iter().map(|byte| format!("{byte:02x}")).collect();
        bytes.join(" ")
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn lun(&self) -> u16 {
        self.lun
    }

    pub(crate) fn task(&self) -> u32 {
        self.task
    }

    pub(crate) fn session(&self) -> u16 {
        self.session
    }
}

/// The end of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct End {
    status: u8,
    sense: [u8; 3],
    is_silent: bool,
    pub(crate) bytes: u64,
}

impl End {
    /// Returns the status as text: `GOOD`, or `CHECK CONDITION, sense 5/24/00 (ILLEGAL REQUEST)`.
    pub(crate) fn status(&self) -> String {
        let [key, code, qualifier] = self.sense;
        match (self.is_silent, self.status) {
            (true, _) => "aborted".to_owned(),
            (_, 0x00) => "GOOD".to_owned(),
            (_, 0x02) => {
                let name = SENSE_KEYS.get(usize::from(key)).copied().unwrap_or("unknown");
                format!("CHECK CONDITION, sense {key:x}/{code:02x}/{qualifier:02x} ({name})")
            }
            (_, 0x04) => "CONDITION MET".to_owned(),
            (_, 0x08) => "BUSY".to_owned(),
            (_, 0x18) => "RESERVATION CONFLICT".to_owned(),
            (_, 0x28) => "TASK SET FULL".to_owned(),
            (_, 0x30) => "ACA ACTIVE".to_owned(),
            (_, 0x40) => "TASK ABORTED".to_owned(),
            (_, other) => format!("status {other:#04x}"),
        }
    }
}

/// The meaning of a record, together with the records before it.
#[derive(Debug)]
pub(crate) enum Note<'a> {
    /// A command began.
    Begun(&'a Command),
    /// A block request of the command follows; `None`: it began before the trace, or its records were
    /// dropped.
    Request(u32, Option<&'a Command>),
    /// A command ended that had begun in this trace.
    Ended(Command, End),
}

/// The commands of a queue in progress.
#[derive(Clone, Default, Debug)]
pub(crate) struct Commands {
    open: HashMap<u32, Command>,
    /// The command whose CDB is not complete yet.
    partial: Option<Command>,
}

impl Commands {
    /// Processes the next record of the queue. Returns its meaning once that is complete.
    pub(crate) fn record(&mut self, record: &Record) -> Option<Note<'_>> {
        match record.from {
            BEGUN => {
                let mut cdb = [0; CDB_MAX];
                cdb[..FIRST].copy_from_slice(&record.offset.to_be_bytes());
                let command = Command {
                    number: record.len,
                    session: (record.value >> 32) as u16,
                    lun: record.tag,
                    task: record.value as u32,
                    cdb,
                    cdb_len: usize::from(record.device).min(CDB_MAX),
                };
                self.partial = None;
                if command.cdb_len > FIRST {
                    self.partial = Some(command);
                    return None;
                }
                self.begun(command)
            }
            MORE => {
                let at = usize::from(record.tag);
                let mut command = self.partial.take().filter(|command| command.number == record.len)?;
                let (first, second) = (record.offset.to_be_bytes(), record.value.to_be_bytes());
                for (place, byte) in command.cdb.iter_mut().skip(at).zip(first.iter().chain(&second[2..])) {
                    *place = *byte;
                }
                if command.cdb_len > at + FURTHER {
                    self.partial = Some(command);
                    return None;
                }
                self.begun(command)
            }
            REQUEST => {
                let number = record.value as u32;
                Some(Note::Request(number, self.open.get(&number)))
            }
            _ => {
                let command = self.open.remove(&record.len)?;
                let [status, sense @ ..] = (record.value as u32).to_be_bytes();
                let is_silent = record.device != 0;
                Some(Note::Ended(command, End { status, sense, is_silent, bytes: record.offset }))
            }
        }
    }

    /// Forgets all commands, because records were dropped.
    pub(crate) fn forget(&mut self) {
        *self = Commands::default();
    }

    fn begun(&mut self, command: Command) -> Option<Note<'_>> {
        if self.open.len() >= REMEMBERED_MAX {
            self.open.clear();
        }
        let number = command.number;
        // With a filter each request is preceded by the beginning of its command.
        let known =
            self.open.insert(number, command).is_some_and(|known| known.task == self.open[&number].task);
        if known { None } else { self.open.get(&number).map(Note::Begun) }
    }
}

/// Names of initiators, by the numbers of their sessions.
#[derive(Clone, Default, Debug)]
pub(crate) struct Sessions(HashMap<u16, String>);

impl Sessions {
    pub(crate) fn add(&mut self, session: &crate::wire::SessionName) {
        if self.0.len() >= REMEMBERED_MAX {
            self.0.clear();
        }
        self.0.insert(session.number, session.initiator.clone());
    }

    /// Describes a session: `session 3 iqn.2026-11.example:host`.
    pub(crate) fn describe(&self, number: u16) -> String {
        let initiator = self.0.get(&number).map(|name| format!(" {name}")).unwrap_or_default();
        format!("session {number}{initiator}")
    }

    pub(crate) fn initiator(&self, number: u16) -> &str {
        self.0.get(&number).map_or("", |name| name)
    }
}

/// Returns the message for a record in text and in blktrace's files.
pub(crate) fn message(note: &Note<'_>, record: &Record, sessions: &Sessions) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = match note {
        Note::Begun(command) => {
            let (name, cdb, session) = (command.name(), command.cdb(), sessions.describe(command.session));
            let Command { number, lun, task, .. } = command;
            write!(text, "scsi {number}: {name}, cdb {cdb}, lun {lun}, itt {task:#x}, {session}")
        }
        Note::Request(number, _) => {
            let (op, sector, sectors) = (record.op.name(), record.offset >> 9, record.len >> 9);
            match sectors {
                0 => write!(text, "scsi {number}: request {op}"),
                _ => write!(text, "scsi {number}: request {op} {sector} + {sectors}"),
            }
        }
        Note::Ended(command, end) => {
            let (number, name, status, bytes) = (command.number, command.name(), end.status(), end.bytes);
            write!(text, "scsi {number}: {name} ended, {status}, {bytes} bytes")
        }
    };
    text
}

const SENSE_KEYS: [&str; 16] = [
    "NO SENSE",
    "RECOVERED ERROR",
    "NOT READY",
    "MEDIUM ERROR",
    "HARDWARE ERROR",
    "ILLEGAL REQUEST",
    "UNIT ATTENTION",
    "DATA PROTECT",
    "BLANK CHECK",
    "vendor specific",
    "COPY ABORTED",
    "ABORTED COMMAND",
    "reserved",
    "VOLUME OVERFLOW",
    "MISCOMPARE",
    "COMPLETED",
];

/// Returns the name of an operation (SPC-6 and SBC-4), with its service action where that distinguishes
/// commands.
pub fn name(code: u8, action: u8) -> String {
    let name = match (code, action) {
        (0x00, _) => "TEST UNIT READY",
        (0x01, _) => "REZERO UNIT",
        (0x03, _) => "REQUEST SENSE",
        (0x04, _) => "FORMAT UNIT",
        (0x08, _) => "READ(6)",
        (0x0a, _) => "WRITE(6)",
        (0x0b, _) => "SEEK(6)",
        (0x12, _) => "INQUIRY",
        (0x15, _) => "MODE SELECT(6)",
        (0x16, _) => "RESERVE(6)",
        (0x17, _) => "RELEASE(6)",
        (0x1a, _) => "MODE SENSE(6)",
        (0x1b, _) => "START STOP UNIT",
        (0x1c, _) => "RECEIVE DIAGNOSTIC RESULTS",
        (0x1d, _) => "SEND DIAGNOSTIC",
        (0x1e, _) => "PREVENT ALLOW MEDIUM REMOVAL",
        (0x25, _) => "READ CAPACITY(10)",
        (0x28, _) => "READ(10)",
        (0x2a, _) => "WRITE(10)",
        (0x2b, _) => "SEEK(10)",
        (0x2e, _) => "WRITE AND VERIFY(10)",
        (0x2f, _) => "VERIFY(10)",
        (0x34, _) => "PRE-FETCH(10)",
        (0x35, _) => "SYNCHRONIZE CACHE(10)",
        (0x37, _) => "READ DEFECT DATA(10)",
        (0x3b, _) => "WRITE BUFFER",
        (0x3c, _) => "READ BUFFER(10)",
        (0x41, _) => "WRITE SAME(10)",
        (0x42, _) => "UNMAP",
        (0x48, _) => "SANITIZE",
        (0x4c, _) => "LOG SELECT",
        (0x4d, _) => "LOG SENSE",
        (0x55, _) => "MODE SELECT(10)",
        (0x56, _) => "RESERVE(10)",
        (0x57, _) => "RELEASE(10)",
        (0x5a, _) => "MODE SENSE(10)",
        (0x5e, _) => "PERSISTENT RESERVE IN",
        (0x5f, _) => "PERSISTENT RESERVE OUT",
        (0x7f, 0x09) => "READ(32)",
        (0x7f, 0x0a) => "VERIFY(32)",
        (0x7f, 0x0b) => "WRITE(32)",
        (0x7f, 0x0d) => "WRITE SAME(32)",
        (0x83, _) => "EXTENDED COPY",
        (0x84, _) => "RECEIVE COPY RESULTS",
        (0x88, _) => "READ(16)",
        (0x89, _) => "COMPARE AND WRITE",
        (0x8a, _) => "WRITE(16)",
        (0x8b, _) => "ORWRITE(16)",
        (0x8e, _) => "WRITE AND VERIFY(16)",
        (0x8f, _) => "VERIFY(16)",
        (0x90, _) => "PRE-FETCH(16)",
        (0x91, _) => "SYNCHRONIZE CACHE(16)",
        (0x93, _) => "WRITE SAME(16)",
        (0x94, 0x01) => "CLOSE ZONE",
        (0x94, 0x02) => "FINISH ZONE",
        (0x94, 0x03) => "OPEN ZONE",
        (0x94, 0x04) => "RESET WRITE POINTER",
        (0x95, 0x00) => "REPORT ZONES",
        (0x9b, _) => "READ BUFFER(16)",
        (0x9c, _) => "WRITE ATOMIC(16)",
        (0x9e, 0x10) => "READ CAPACITY(16)",
        (0x9e, 0x12) => "GET LBA STATUS(16)",
        (0xa0, _) => "REPORT LUNS",
        (0xa3, 0x05) => "REPORT IDENTIFYING INFORMATION",
        (0xa3, 0x0a) => "REPORT TARGET PORT GROUPS",
        (0xa3, 0x0b) => "REPORT ALIASES",
        (0xa3, 0x0c) => "REPORT SUPPORTED OPERATION CODES",
        (0xa3, 0x0d) => "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS",
        (0xa3, 0x0e) => "REPORT PRIORITY",
        (0xa3, 0x0f) => "REPORT TIMESTAMP",
        (0xa4, 0x06) => "SET IDENTIFYING INFORMATION",
        (0xa4, 0x0a) => "SET TARGET PORT GROUPS",
        (0xa8, _) => "READ(12)",
        (0xaa, _) => "WRITE(12)",
        (0xae, _) => "WRITE AND VERIFY(12)",
        (0xaf, _) => "VERIFY(12)",
        (0xb7, _) => "READ DEFECT DATA(12)",
        _ => return format!("command {code:02x}/{action:02x}"),
    };
    name.to_owned()
}

#[cfg(test)]
#[path = "command/tests.rs"]
pub(crate) mod tests;
