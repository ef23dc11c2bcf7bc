//! The record of legs that missed writes, in the part of a log's header that the kernel leaves alone.
//!
//! dm-log reads and writes header and bitmap as one buffer, of which it uses the first 16 bytes and the
//! bitmap from byte 1024 on. The record is between them, in the first sector, so that a power cut cannot tear
//! it:
//!
//! | bytes | |
//! |---|---|
//! | 16..24 | `BYLEGS01` |
//! | 24..28 | CRC-32 of bytes 28..512 |
//! | 28..32 | the number of entries |
//! | 32..512 | entries of 32 bytes: hashes of the leg's name in the table and of its identity, its start in sectors, flags |
//!
//! Without the magic number there is no record: every leg has all writes. An empty record is written as
//! zeroes. Numbers are little-endian.

/// The record's position in the log.
pub(super) const AT: std::ops::Range<usize> = 16..512;
const MAGIC: [u8; 8] = *b"BYLEGS01";
const ENTRIES_AT: usize = 32;
const ENTRY_LEN: usize = 32;
/// The number of entries that fit.
const ENTRIES_MAX: usize = (512 - ENTRIES_AT) / ENTRY_LEN;
/// Entry flag: the leg missed writes, so its data is never used.
const FAILED: u32 = 1;
/// Entry flag: the leg has all writes, also in regions that are out of sync.
const SOURCE: u32 = 2;

/// Identifies a leg, whatever its position in the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Key {
    /// Hash of the device's name in the table.
    name: u64,
    /// Hash of the device's identity: a file's inode, a disk's numbers.
    identity: u64,
    start: u64,
}

impl Key {
    pub(super) fn new(name: &str, identity: &str, start: u64) -> Key {
        Key { name: hash(name), identity: hash(identity), start }
    }

    /// Returns whether both keys may be of one leg: either the name or the identity of a device may have
    /// changed.
    fn may_be(self, other: Key) -> bool {
        self.start == other.start && (self.name == other.name || self.identity == other.identity)
    }
}

/// Returns the FNV-1a hash of a text, 64 bits. It is part of the format, so it must not change.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The record of a leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) key: Key,
    pub(super) failed: bool,
    pub(super) source: bool,
}

/// The state of a leg according to a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LegState {
    /// The leg has all writes to regions in sync.
    Good,
    /// The leg has all writes, also those to regions out of sync.
    Source,
    /// The leg missed writes.
    Failed,
    /// The leg is not recorded: it was not in the table when the record was written.
    Unknown,
}

/// The record of failed legs.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) struct Record(pub(super) Vec<Entry>);

impl Record {
    /// Decodes the bytes at [`AT`] of a log. `Err`: the record is damaged.
    pub(super) fn decode(bytes: &[u8]) -> Result<Record, ()> {
        let base = AT.start;
        if bytes[..MAGIC.len()] != MAGIC {
            return Ok(Record::default());
        }
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[at - base + byte]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let count = word(28) as usize;
        if word(24) != crc32fast::hash(&bytes[28 - base..]) || count > ENTRIES_MAX {
            return Err(());
        }
        let entry = |number: usize| {
            let at = ENTRIES_AT + number * ENTRY_LEN;
            let key = Key { name: long(at), identity: long(at + 8), start: long(at + 16) };
            let flags = word(at + 24);
            Entry { key, failed: flags & FAILED != 0, source: flags & SOURCE != 0 }
        };
        Ok(Record((0..count).map(entry).collect()))
    }

    /// Encodes the record into the bytes at [`AT`] of a log, which must be zeroes. Entries that do not fit
    /// are omitted.
    pub(super) fn encode(&self, into: &mut [u8]) {
        if self.0.is_empty() {
            return;
        }
        let (base, entries) = (AT.start, &self.0[..self.0.len().min(ENTRIES_MAX)]);
        let mut put = |at: usize, bytes: &[u8]| into[at - base..][..bytes.len()].copy_from_slice(bytes);
        put(AT.start, &MAGIC);
        put(28, &(entries.len() as u32).to_le_bytes());
        for (number, entry) in entries.iter().enumerate() {
            let at = ENTRIES_AT + number * ENTRY_LEN;
            put(at, &entry.key.name.to_le_bytes());
            put(at + 8, &entry.key.identity.to_le_bytes());
            put(at + 16, &entry.key.start.to_le_bytes());
            let flags = (u32::from(entry.failed) * FAILED) | (u32::from(entry.source) * SOURCE);
            put(at + 24, &flags.to_le_bytes());
        }
        let sum = crc32fast::hash(&into[28 - base..]);
        into[24 - base..28 - base].copy_from_slice(&sum.to_le_bytes());
    }

    /// Returns the recorded state of a leg. A leg counts as failed if its key may be that of a failed leg.
    pub(super) fn state_of(&self, key: Key) -> LegState {
        let mut same = self.0.iter().filter(|entry| entry.key.may_be(key));
        let Some(first) = same.next() else { return LegState::Unknown };
        let all = same.fold(*first, |all, entry| Entry {
            failed: all.failed || entry.failed,
            source: all.source || entry.source,
            ..all
        });
        match all {
            Entry { failed: true, .. } => LegState::Failed,
            Entry { source: true, .. } => LegState::Source,
            _ => LegState::Good,
        }
    }

    /// Returns the entries of legs that missed writes and are none of these.
    pub(super) fn absent(&self, keys: &[Key]) -> Vec<Entry> {
        let is_absent = |entry: &&Entry| entry.failed && !keys.iter().any(|key| key.may_be(entry.key));
        self.0.iter().filter(is_absent).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, failed: bool, source: bool) -> Entry {
        Entry { key: Key::new(name, &format!("file {name}"), 8), failed, source }
    }

    #[test]
    fn a_record_round_trips_and_damage_is_detected() {
        let record = Record(vec![entry("a", true, false), entry("b", false, true)]);
        let mut bytes = vec![0; AT.len()];
        Record::default().encode(&mut bytes);
        assert!(
            bytes.iter().all(|&byte| byte == 0),
            "nothing to record leaves the header as the kernel writes it"
        );
        assert_eq!(Record::decode(&bytes), Ok(Record::default()));
        record.encode(&mut bytes);
        assert_eq!(Record::decode(&bytes), Ok(record));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            let expected = if at < MAGIC.len() { Ok(Record::default()) } else { Err(()) };
            assert_eq!(Record::decode(&damaged), expected, "byte {at}");
        }
        let many: Vec<Entry> = (0..40).map(|number| entry(&number.to_string(), true, false)).collect();
        bytes.fill(0);
        Record(many.clone()).encode(&mut bytes);
        assert_eq!(Record::decode(&bytes).unwrap().0, many[..ENTRIES_MAX]);
    }

    #[test]
    fn a_leg_matches_by_name_or_identity_and_counts_as_failed_in_doubt() {
        let record = Record(vec![entry("a", true, false), entry("b", false, true), entry("c", false, false)]);
        let state = |name, identity, start| record.state_of(Key::new(name, identity, start));
        assert_eq!(state("a", "file new", 8), LegState::Failed, "copied elsewhere");
        assert_eq!(state("new", "file a", 8), LegState::Failed, "renamed");
        assert_eq!(state("a", "file b", 8), LegState::Failed, "the names were exchanged");
        assert_eq!(state("b", "file a", 8), LegState::Failed);
        assert_eq!(state("b", "file b", 8), LegState::Source);
        assert_eq!(state("c", "file x", 8), LegState::Good);
        assert_eq!(state("b", "file b", 0), LegState::Unknown, "another part of it");
        assert_eq!(state("d", "file d", 8), LegState::Unknown);
        let keys = [Key::new("b", "file b", 8)];
        assert_eq!(record.absent(&keys), [entry("a", true, false)]);
    }
}
