//! The overlay's format, byte by byte: docs/cow.md. All functions are arithmetic on bytes and offsets.
//!
//! | from | to | contents |
//! |---|---|---|
//! | 0 | 4 KiB | header |
//! | 4 KiB | 8 KiB | header, second copy |
//! | 64 KiB | … | table: one bit for each chunk that the overlay holds |
//! | behind the table | … | journal: checksums of data in chunks that the table lacks ([`records`](super::records)) |
//! | data | … | chunk n at data + n × chunk; chunks that were never written are holes |

use block::Bytes;

/// Length of a header in bytes, including reserved space.
pub const HEADER_LEN: usize = 4096;
/// Offset of the header's second copy.
pub const SECOND_AT: u64 = HEADER_LEN as u64;
/// Offset of the table.
pub const TABLE_AT: u64 = 64 << 10;
/// Bytes in a page, the unit in which the table is written.
pub const PAGE_LEN: u64 = 4096;
/// Alignment of the data in bytes.
const DATA_ALIGN: u64 = 1 << 20;
/// Smallest chunk in bytes.
pub const CHUNK_MIN: u64 = 4096;
/// Largest chunk in bytes.
pub const CHUNK_MAX: u64 = 16 << 20;
/// Largest number of chunks: a table of 128 MiB.
pub const CHUNKS_MAX: u64 = 1 << 30;
/// Up to this number of chunks, a table of 4 MiB, the default chunk size stays at its minimum.
const CHUNKS_SMALL: u64 = 1 << 25;

const MAGIC: &[u8; 8] = b"BLKYDCOW";
const VERSION: u32 = 2;
/// The format version that had a second table without checksums in place of the journal.
const VERSION_TALLY: u32 = 1;
/// Longest journal in bytes: records of 640 MiB of data.
const JOURNAL_LEN_MAX: u64 = 8 << 20;
/// Flag: the overlay is being committed.
const COMMITTING: u64 = 1;
/// Flag: the header has a [`Fingerprint`].
const HAS_FINGERPRINT: u64 = 2;
/// Offset of the fingerprint in the header.
const FINGERPRINT_AT: usize = 128;
/// Length of the encoded fingerprint: a count, samples, a CRC.
const FINGERPRINT_LEN: usize = 8 + SAMPLES as usize * 16 + 4;
/// Length of the part of the header that its checksum covers; the checksum follows.
const CHECKED_LEN: usize = 124;

/// Identifies the origin of an overlay, so that the overlay is not used over another one: the size, and a
/// hash of samples of the content. See [`Identity::samples`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Size of the origin.
    pub size: Bytes,
    /// FNV-1a, 128 bits, over the samples in order.
    pub hash: [u8; 16],
}

/// Number of samples of an origin.
const SAMPLES: u64 = 64;
/// Length of a sample in bytes.
pub const SAMPLE_LEN: u64 = 4096;

impl Identity {
    /// Returns the byte offsets of the samples of an origin of that size: the whole of a small origin, else
    /// the first block, the last block, and blocks spread evenly between them.
    pub fn samples(size: Bytes) -> impl Iterator<Item = u64> {
        let count = (size.0 / SAMPLE_LEN).min(SAMPLES);
        let last = (size.0 / SAMPLE_LEN).saturating_sub(1);
        (0..count).map(move |n| {
            let block = u128::from(last) * u128::from(n) / u128::from(count.saturating_sub(1).max(1));
            block as u64 * SAMPLE_LEN
        })
    }

    /// Hashes the bytes of the samples, in order.
    pub fn new(size: Bytes, samples: impl Iterator<Item = u8>) -> Identity {
        const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        let hash = samples.fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
        Identity { size, hash: hash.to_le_bytes() }
    }
}

/// Identifies the origin while the overlay is being committed to it: samples of data that the commit does not
/// change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fingerprint {
    /// Offset and hash of each sample, ascending.
    samples: [(u64, u64); SAMPLES as usize],
    count: usize,
}

impl Fingerprint {
    /// The fingerprint without samples.
    pub const EMPTY: Fingerprint = Fingerprint { samples: [(0, 0); SAMPLES as usize], count: 0 };

    /// Returns offsets at which to sample an origin of that size, spread evenly over the data that the
    /// overlay does not hold. `held` are the byte ranges that it holds, ascending.
    pub fn offsets(size: Bytes, held: impl IntoIterator<Item = (u64, u64)>) -> Vec<u64> {
        // The ranges between those that the overlay holds, in whole samples.
        let mut between = Vec::new();
        let mut from = 0u64;
        for (start, end) in held.into_iter().chain([(size.0, size.0)]) {
            let (first, last) =
                (from.next_multiple_of(SAMPLE_LEN), start.min(size.0) / SAMPLE_LEN * SAMPLE_LEN);
            if last > first {
                between.push((first, (last - first) / SAMPLE_LEN));
            }
            from = end;
        }
        let total: u64 = between.iter().map(|(_, count)| count).sum();
        let count = total.min(SAMPLES);
        let mut runs = between.into_iter();
        let (mut run, mut passed) = (runs.next(), 0);
        let mut offsets = Vec::new();
        for n in 0..count {
            let number = (u128::from(total - 1) * u128::from(n) / u128::from(count.max(2) - 1)) as u64;
            while let Some((_, len)) = run.filter(|(_, len)| number >= passed + len) {
                passed += len;
                run = runs.next();
            }
            offsets.extend(run.map(|(first, _)| first + (number - passed) * SAMPLE_LEN));
        }
        offsets
    }

    /// Creates a fingerprint from at most 64 offsets and hashes.
    pub fn new(samples: impl IntoIterator<Item = (u64, u64)>) -> Fingerprint {
        let mut fingerprint = Fingerprint::EMPTY;
        for (room, sample) in fingerprint.samples.iter_mut().zip(samples) {
            *room = sample;
            fingerprint.count += 1;
        }
        fingerprint
    }

    /// Returns offset and hash of each sample.
    pub fn samples(&self) -> &[(u64, u64)] {
        &self.samples[..self.count]
    }

    /// Returns the hash of a sample: FNV-1a, 64 bits.
    pub fn hash(sample: &[u8]) -> u64 {
        sample
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    }

    fn encode(&self) -> [u8; FINGERPRINT_LEN] {
        let mut bytes = [0; FINGERPRINT_LEN];
        bytes[..8].copy_from_slice(&(self.count as u64).to_le_bytes());
        for (room, (at, hash)) in bytes[8..].chunks_exact_mut(16).zip(self.samples()) {
            room[..8].copy_from_slice(&at.to_le_bytes());
            room[8..].copy_from_slice(&hash.to_le_bytes());
        }
        let crc = crc32fast::hash(&bytes[..FINGERPRINT_LEN - 4]);
        bytes[FINGERPRINT_LEN - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Fingerprint, HeaderError> {
        let (bytes, crc) = bytes[..FINGERPRINT_LEN].split_at(FINGERPRINT_LEN - 4);
        if crc != crc32fast::hash(bytes).to_le_bytes() {
            return Err(HeaderError::Damaged);
        }
        let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        if words[0] > SAMPLES {
            return Err(HeaderError::Inconsistent("it has more than 64 samples"));
        }
        let samples = words[1..].as_chunks::<2>().0.iter().map(|[at, hash]| (*at, *hash));
        Ok(Fingerprint::new(samples.take(words[0] as usize)))
    }
}

/// The contents of a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Counts writes of the header: the copy with the higher number is valid.
    pub sequence: u64,
    /// The origin that the overlay was created over.
    pub origin: Identity,
    /// The generation of the journal, which changes whenever the overlay is opened: only records of this
    /// generation are valid. 0: none are, because the overlay was written by a version without a journal.
    pub generation: u64,
    /// The sizes and offsets of the overlay's parts.
    pub layout: Layout,
    /// Whether the overlay is being committed to its origin. `origin` may not match it in the meantime.
    pub committing: bool,
    /// Identifies the origin during a commit. [`Fingerprint::EMPTY`]: no check is possible.
    pub fingerprint: Fingerprint,
}

/// The sizes of an overlay, from which all offsets in it follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Size of the device.
    pub size: Bytes,
    /// Size of a chunk, a power of two.
    pub chunk: Bytes,
}

/// The reason why a file is not a usable overlay.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeaderError {
    /// Neither copy starts with the magic.
    #[error("it is not an overlay")]
    NotOne,
    /// Both copies have a wrong checksum.
    #[error("both copies of its header are damaged")]
    Damaged,
    /// The format version is newer than this program.
    #[error(
        "it has format version {0}, but this program supports only versions up to 2 (use a newer blockyard)"
    )]
    Version(u32),
    /// The checksum is right, but the fields contradict each other.
    #[error("its header is inconsistent: {0}")]
    Inconsistent(&'static str),
}

impl Layout {
    /// Returns the layout for a device of that size. `chunk` is the chunk size that the user gave.
    ///
    /// # Errors
    /// Reason why the sizes are invalid.
    pub fn new(size: Bytes, chunk: Option<Bytes>) -> Result<Layout, &'static str> {
        if size.0 == 0 || !size.is_aligned(512) || size.0 > i64::MAX as u64 >> 1 {
            return Err("the size of the device is not a positive multiple of 512 bytes");
        }
        let chunk = chunk.unwrap_or_else(|| {
            let least = size.0.div_ceil(CHUNKS_SMALL).next_power_of_two();
            Bytes(least.clamp(CHUNK_MIN, CHUNK_MAX))
        });
        if !chunk.0.is_power_of_two() || !(CHUNK_MIN..=CHUNK_MAX).contains(&chunk.0) {
            return Err("a chunk is 4K, 8K, 16K … 16M");
        }
        let layout = Layout { size, chunk };
        if layout.chunks() > CHUNKS_MAX { Err("too many chunks: choose a larger chunk") } else { Ok(layout) }
    }

    /// Returns the number of chunks; the last may be shorter.
    pub fn chunks(self) -> u64 {
        self.size.0.div_ceil(self.chunk.0)
    }

    /// Returns the length of the table in bytes, a whole number of pages.
    pub fn table_len(self) -> u64 {
        self.chunks().div_ceil(8).next_multiple_of(PAGE_LEN)
    }

    /// Returns the offset of the journal.
    pub fn journal_at(self) -> Bytes {
        Bytes(TABLE_AT + self.table_len())
    }

    /// Returns the length of the journal in bytes: the whole pages before the data, up to a maximum.
    pub fn journal_len(self) -> u64 {
        (self.data_at().0 - self.journal_at().0).min(JOURNAL_LEN_MAX)
    }

    /// Returns the offset of chunk 0.
    pub fn data_at(self) -> Bytes {
        Bytes((TABLE_AT + 2 * self.table_len()).next_multiple_of(DATA_ALIGN))
    }

    /// Returns the length of the file.
    pub fn file_len(self) -> Bytes {
        // The last chunk is written in whole blocks, so the file covers all of its last block.
        Bytes(self.data_at().0 + self.size.0.next_multiple_of(CHUNK_MIN))
    }
}

impl Header {
    /// Encodes the header with its checksum.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &(CHECKED_LEN as u32 + 4).to_le_bytes());
        put(16, &self.sequence.to_le_bytes());
        let has_fingerprint = self.fingerprint != Fingerprint::EMPTY;
        let flags =
            if self.committing { COMMITTING } else { 0 } | if has_fingerprint { HAS_FINGERPRINT } else { 0 };
        put(24, &flags.to_le_bytes());
        if has_fingerprint {
            put(FINGERPRINT_AT, &self.fingerprint.encode());
        }
        put(32, &self.origin.size.0.to_le_bytes());
        put(40, &self.origin.hash);
        put(56, &self.layout.size.0.to_le_bytes());
        put(64, &(self.layout.chunk.0 as u32).to_le_bytes());
        put(72, &TABLE_AT.to_le_bytes());
        put(80, &self.layout.table_len().to_le_bytes());
        put(88, &self.layout.data_at().0.to_le_bytes());
        put(96, &self.layout.journal_at().0.to_le_bytes());
        put(104, &self.generation.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..CHECKED_LEN]);
        bytes[CHECKED_LEN..CHECKED_LEN + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes one copy.
    fn decode(bytes: &[u8]) -> Result<Header, HeaderError> {
        let word = |at: usize| {
            bytes.get(at..at + 8).map_or(0, |b| u64::from_le_bytes(b.try_into().unwrap_or_default()))
        };
        let half = |at: usize| (word(at) & 0xffff_ffff) as u32;
        if bytes.len() < HEADER_LEN || &bytes[..8] != MAGIC {
            return Err(HeaderError::NotOne);
        }
        if half(CHECKED_LEN) != crc32fast::hash(&bytes[..CHECKED_LEN]) {
            return Err(HeaderError::Damaged);
        }
        if ![VERSION, VERSION_TALLY].contains(&half(8)) {
            return Err(HeaderError::Version(half(8)));
        }
        let layout =
            Layout::new(Bytes(word(56)), Some(Bytes(half(64).into()))).map_err(HeaderError::Inconsistent)?;
        let offsets = [word(72), word(80), word(88), word(96)];
        if offsets != [TABLE_AT, layout.table_len(), layout.data_at().0, layout.journal_at().0]
            || word(24) & !(COMMITTING | HAS_FINGERPRINT) != 0
        {
            return Err(HeaderError::Inconsistent("offsets or flags do not match its version"));
        }
        let mut hash = [0; 16];
        hash.copy_from_slice(&bytes[40..56]);
        let generation = if half(8) == VERSION { word(104) } else { 0 };
        let origin = Identity { size: Bytes(word(32)), hash };
        let fingerprint = match word(24) & HAS_FINGERPRINT {
            0 => Fingerprint::EMPTY,
            _ => Fingerprint::decode(&bytes[FINGERPRINT_AT..])?,
        };
        let committing = word(24) & COMMITTING != 0;
        Ok(Header { sequence: word(16), origin, generation, layout, committing, fingerprint })
    }

    /// Decodes both copies of the header from the first bytes of a file, and returns the newer valid one.
    ///
    /// # Errors
    /// [`HeaderError`] if neither is valid.
    pub fn read(bytes: &[u8]) -> Result<Header, HeaderError> {
        let copies = [Header::decode(bytes), Header::decode(bytes.get(HEADER_LEN..).unwrap_or_default())];
        match copies {
            [Ok(one), Ok(other)] => Ok(if other.sequence > one.sequence { other } else { one }),
            [Ok(one), Err(_)] | [Err(_), Ok(one)] => Ok(one),
            [Err(HeaderError::NotOne), Err(why)] | [Err(why), Err(_)] => Err(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let layout = Layout::new(Bytes::gib(3), None).unwrap();
        let origin = Identity::new(Bytes::gib(2), [1, 2, 3].into_iter());
        Header {
            sequence: 7,
            origin,
            generation: 3,
            layout,
            committing: false,
            fingerprint: Fingerprint::EMPTY,
        }
    }

    #[test]
    fn a_header_reads_back_from_either_copy() {
        let mut bytes = [header().encode(), Header { sequence: 8, ..header() }.encode()].concat();
        assert_eq!(Header::read(&bytes).unwrap().sequence, 8);
        let committing = Header { committing: true, ..header() };
        assert_eq!(Header::read(&committing.encode()), Ok(committing));
        let fingerprinted = Header { fingerprint: Fingerprint::new([(0, 7), (8192, 9)]), ..committing };
        assert_eq!(Header::read(&fingerprinted.encode()), Ok(fingerprinted));
        let mut torn = fingerprinted.encode();
        torn[FINGERPRINT_AT + 20] ^= 1;
        assert_eq!(Header::read(&torn), Err(HeaderError::Damaged));
        bytes[HEADER_LEN + 60] ^= 1;
        assert_eq!(Header::read(&bytes), Ok(header()));
        bytes[0] ^= 1;
        assert_eq!(Header::read(&bytes), Err(HeaderError::Damaged));
        assert_eq!(Header::read(&[0; 2 * HEADER_LEN]), Err(HeaderError::NotOne));
        assert_eq!(Header::read(&[]), Err(HeaderError::NotOne));
    }

    #[test]
    fn contradictory_fields_with_a_valid_checksum_are_rejected() {
        for (at, value) in [(8, 3u8), (24, 4), (24, 8), (64, 1), (73, 1), (90, 9), (63, 0xff)] {
            let mut bytes = header().encode();
            bytes[at] = value;
            let crc = crc32fast::hash(&bytes[..CHECKED_LEN]);
            bytes[CHECKED_LEN..CHECKED_LEN + 4].copy_from_slice(&crc.to_le_bytes());
            let error = Header::read(&bytes).unwrap_err();
            assert!(matches!(error, HeaderError::Inconsistent(_) | HeaderError::Version(3)), "{at}: {error}");
        }
    }

    #[test]
    fn a_version_1_header_has_no_valid_journal_records() {
        let mut bytes = header().encode();
        bytes[8] = 1;
        let crc = crc32fast::hash(&bytes[..CHECKED_LEN]);
        bytes[CHECKED_LEN..CHECKED_LEN + 4].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Header::read(&bytes), Ok(Header { generation: 0, ..header() }));
    }

    #[test]
    fn every_layout_has_space_for_a_journal() {
        for size in [512, 1 << 20, 40 << 30, 58 << 30, 60 << 30, 1 << 40, 1 << 50] {
            for chunk in [None, Some(Bytes(CHUNK_MAX))] {
                let layout = Layout::new(Bytes(size), chunk).unwrap();
                assert!(layout.journal_len() >= 480 << 10 && layout.journal_len().is_multiple_of(PAGE_LEN));
                assert!(layout.journal_at().0 + layout.journal_len() <= layout.data_at().0);
            }
        }
    }

    #[test]
    fn chunks_are_small_unless_the_table_would_be_large() {
        let chunk = |size| Layout::new(size, None).unwrap().chunk;
        assert_eq!(chunk(Bytes(512)), Bytes(4096));
        assert_eq!(chunk(Bytes::gib(128)), Bytes(4096));
        assert_eq!(chunk(Bytes::gib(1024)), Bytes(32 << 10));
        let layout = Layout::new(Bytes::gib(1024), Some(Bytes(4096))).unwrap();
        assert_eq!((layout.table_len(), layout.data_at()), (32 << 20, Bytes::mib(65)));
        for (size, chunk) in
            [(0, 4096), (513, 4096), (1 << 30, 2048), (1 << 30, 5000), (1 << 30, 32 << 20), (1 << 43, 4096)]
        {
            assert!(Layout::new(Bytes(size), Some(Bytes(chunk))).is_err(), "{size} {chunk}");
        }
    }

    #[test]
    fn samples_avoid_chunks_that_the_overlay_holds() {
        let mib = 1 << 20;
        let held = [(0, 4096), (8192, 65536), (mib - 4096, mib)];
        let offsets = Fingerprint::offsets(Bytes(mib), held);
        assert_eq!((offsets.len(), offsets[0], offsets[63]), (64, 4096, mib - 8192));
        assert!(offsets.windows(2).all(|pair| pair[0] < pair[1]), "{offsets:?}");
        let is_held = |at: &u64| held.iter().any(|(start, end)| at + 4096 > *start && at < end);
        assert!(!offsets.iter().any(is_held), "{offsets:?}");
        assert_eq!(Fingerprint::offsets(Bytes(9000), []), [0, 4096]);
        assert_eq!(Fingerprint::offsets(Bytes(9000), [(0, 12288)]), []);
        assert_eq!(Fingerprint::offsets(Bytes(9000), [(0, 4096)]), [4096]);
        assert_eq!(Fingerprint::offsets(Bytes(512), []), []);
    }

    #[test]
    fn samples_lie_within_the_origin_and_reach_both_ends() {
        for size in [0, 512, 4096, 8192, 40960, 300 * 4096, 1 << 40, (1 << 62) + 512] {
            let all: Vec<u64> = Identity::samples(Bytes(size)).collect();
            assert!(all.iter().all(|at| at + SAMPLE_LEN <= size), "{size}: {all:?}");
            assert!(all.windows(2).all(|pair| pair[0] < pair[1]), "{size}: {all:?}");
            if size >= 8192 {
                assert_eq!((all[0], all[all.len() - 1]), (0, size / 4096 * 4096 - 4096));
            }
        }
    }
}
