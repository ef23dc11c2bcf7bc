//! The format of a log with submissions and completions.
//!
//! ```text
//! [ header, 64 bytes ][ record, 40 bytes ][ data ]…[ record ][ data ]…
//! ```
//!
//! The data of a write follows its record, as does the text of a mark or the name of a process. All numbers
//! are little-endian. A record that a killed recorder left incomplete at the end is ignored.

/// The first bytes of a log.
pub const MAGIC: [u8; 8] = *b"BYCRASH1";
/// The length of the header in bytes.
pub const HEADER_LEN: usize = 64;
/// The length of a record in bytes, without its data.
pub const RECORD_LEN: usize = 40;
/// The unit of all offsets and lengths of writes, in bytes.
pub const SECTOR: u64 = 512;
/// The longest text of a mark in bytes.
pub const TEXT_LEN_MAX: usize = 4096;

/// The type of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Type {
    /// A write was submitted; its data follows.
    Write = 1,
    /// A discard was submitted.
    Discard = 2,
    /// A write of zeroes was submitted.
    Zeroes = 3,
    /// The write, discard or write of zeroes with this number completed.
    Complete = 4,
    /// A flush was submitted.
    Flush = 5,
    /// The flush with this number completed.
    FlushComplete = 6,
    /// A mark; its text follows.
    Mark = 7,
    /// The name of a process; it follows.
    Process = 8,
}

/// The flag of a write with FUA.
pub const FUA: u8 = 1;

/// A record without its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Its type.
    pub kind: Type,
    /// Its flags: 0 or [`FUA`].
    pub flags: u8,
    /// The number of the write or flush, from 0, each in order of submission.
    pub number: u32,
    /// Nanoseconds since the start of the recording.
    pub time_ns: u64,
    /// The first byte of a write.
    pub offset: u64,
    /// The length of a write in bytes, or of the text that follows.
    pub len: u64,
    /// The process that submitted it; 0 if unknown.
    pub pid: u32,
}

impl Record {
    /// Creates a record of a type with zeroes in all other fields.
    pub const fn new(kind: Type) -> Record {
        Record { kind, flags: 0, number: 0, time_ns: 0, offset: 0, len: 0, pid: 0 }
    }

    /// Returns the number of bytes that follow the record.
    pub const fn data_len(&self) -> u64 {
        match self.kind {
            Type::Write | Type::Mark | Type::Process => self.len,
            _ => 0,
        }
    }

    /// Encodes the record.
    pub fn encode(&self) -> [u8; RECORD_LEN] {
        let mut bytes = [0; RECORD_LEN];
        bytes[0] = self.kind as u8;
        bytes[1] = self.flags;
        bytes[4..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.time_ns.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.len.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.pid.to_le_bytes());
        bytes
    }

    /// Decodes a record. `None`: it has an unknown type.
    pub fn decode(bytes: &[u8; RECORD_LEN]) -> Option<Record> {
        let kind = match bytes[0] {
            1 => Type::Write,
            2 => Type::Discard,
            3 => Type::Zeroes,
            4 => Type::Complete,
            5 => Type::Flush,
            6 => Type::FlushComplete,
            7 => Type::Mark,
            8 => Type::Process,
            _ => return None,
        };
        let long =
            |at: usize| bytes[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let short =
            |at: usize| bytes[at..at + 4].iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        Some(Record {
            kind,
            flags: bytes[1],
            number: short(4),
            time_ns: long(8),
            offset: long(16),
            len: long(24),
            pid: short(32),
        })
    }
}

/// Encodes the header of a log of a device with this size in bytes.
pub fn header(size: u64) -> [u8; HEADER_LEN] {
    let mut bytes = [0; HEADER_LEN];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&size.to_le_bytes());
    bytes
}
