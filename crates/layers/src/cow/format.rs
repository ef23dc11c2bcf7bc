//! The overlay's format, byte by byte: docs/cow.md. Everything here is arithmetic on bytes and offsets.
//!
//! | from | to | what |
//! |---|---|---|
//! | 0 | 4 KiB | header |
//! | 4 KiB | 8 KiB | header, second copy |
//! | 64 KiB | … | table: a bit for each chunk, whether the overlay holds it |
//! | behind it | … | journal: checksums of what was written to chunks that the table lacks ([`records`](super::records)) |
//! | data | … | chunk n at data + n × chunk; what was never written is a hole |

use block::Bytes;

/// How long a header is, with what is kept free behind it.
pub const HEADER_LEN: usize = 4096;
/// Where its second copy is.
pub const SECOND_AT: u64 = HEADER_LEN as u64;
/// Where the table begins.
pub const TABLE_AT: u64 = 64 << 10;
/// The table is written in pages of that many bytes.
pub const PAGE_LEN: u64 = 4096;
/// Data begins on a multiple of this.
const DATA_ALIGN: u64 = 1 << 20;
/// Chunks from and to that many bytes.
pub const CHUNK_MIN: u64 = 4096;
/// See [`CHUNK_MIN`].
pub const CHUNK_MAX: u64 = 16 << 20;
/// The most chunks of an overlay: a table of 128 MiB.
pub const CHUNKS_MAX: u64 = 1 << 30;
/// Up to that many chunks, a table of 4 MiB, chunks stay small unless the user says otherwise.
const CHUNKS_SMALL: u64 = 1 << 25;

const MAGIC: &[u8; 8] = b"BLKYDCOW";
const VERSION: u32 = 2;
/// The version that had a second table, without checksums, where the journal is now.
const VERSION_TALLY: u32 = 1;
/// The journal is at most that long: records of 640 MiB.
const JOURNAL_LEN_MAX: u64 = 8 << 20;
/// The flag of an overlay that is being committed.
const COMMITTING: u64 = 1;
/// The flag of one whose header has a [`Witness`].
const WITNESSED: u64 = 2;
/// Where that is.
const WITNESS_AT: usize = 128;
/// How long it is, with its checksum: a count, samples, CRC.
const WITNESS_LEN: usize = 8 + SAMPLES as usize * 16 + 4;
/// What the checksum covers; it follows.
const CHECKED_LEN: usize = 124;

/// What an overlay is made over, so that it is not put over anything else: the size of the origin, and a hash
/// of some of its content. See [`Identity::samples`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// How long the origin is.
    pub size: Bytes,
    /// FNV-1a, 128 bits, over the samples in order.
    pub hash: [u8; 16],
}

/// Samples of an origin, and how long each is.
const SAMPLES: u64 = 64;
/// See [`Identity::samples`].
pub const SAMPLE_LEN: u64 = 4096;

impl Identity {
    /// Where the samples of an origin of that size begin: all of it if it is small, else the first, the last,
    /// and some between them.
    pub fn samples(size: Bytes) -> impl Iterator<Item = u64> {
        let count = (size.0 / SAMPLE_LEN).min(SAMPLES);
        let last = (size.0 / SAMPLE_LEN).saturating_sub(1);
        (0..count).map(move |n| {
            let block = u128::from(last) * u128::from(n) / u128::from(count.saturating_sub(1).max(1));
            block as u64 * SAMPLE_LEN
        })
    }

    /// From those samples, in order.
    pub fn new(size: Bytes, samples: impl Iterator<Item = u8>) -> Identity {
        const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        let hash = samples.fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
        Identity { size, hash: hash.to_le_bytes() }
    }
}

/// What an origin is recognised by while the overlay is being committed to it: samples of what the commit leaves as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Witness {
    /// Where each begins, ascending, and its hash.
    samples: [(u64, u64); SAMPLES as usize],
    count: usize,
}

impl Witness {
    /// None.
    pub const EMPTY: Witness = Witness { samples: [(0, 0); SAMPLES as usize], count: 0 };

    /// Where to take samples of an origin of that size, so that they are spread over all that lies between the runs of
    /// bytes that the overlay holds. `held`: these, ascending.
    pub fn places(size: Bytes, held: impl IntoIterator<Item = (u64, u64)>) -> Vec<u64> {
        // What is between, in whole samples.
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
        let mut places = Vec::new();
        for n in 0..count {
            let number = (u128::from(total - 1) * u128::from(n) / u128::from(count.max(2) - 1)) as u64;
            while let Some((_, len)) = run.filter(|(_, len)| number >= passed + len) {
                passed += len;
                run = runs.next();
            }
            places.extend(run.map(|(first, _)| first + (number - passed) * SAMPLE_LEN));
        }
        places
    }

    /// From places, at most 64, and what is there.
    pub fn new(samples: impl IntoIterator<Item = (u64, u64)>) -> Witness {
        let mut witness = Witness::EMPTY;
        for (room, sample) in witness.samples.iter_mut().zip(samples) {
            *room = sample;
            witness.count += 1;
        }
        witness
    }

    /// The samples: where each begins, and its hash.
    pub fn samples(&self) -> &[(u64, u64)] {
        &self.samples[..self.count]
    }

    /// The hash of a sample: FNV-1a, 64 bits.
    pub fn hash(sample: &[u8]) -> u64 {
        sample
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    }

    fn encode(&self) -> [u8; WITNESS_LEN] {
        let mut bytes = [0; WITNESS_LEN];
        bytes[..8].copy_from_slice(&(self.count as u64).to_le_bytes());
        for (room, (at, hash)) in bytes[8..].chunks_exact_mut(16).zip(self.samples()) {
            room[..8].copy_from_slice(&at.to_le_bytes());
            room[8..].copy_from_slice(&hash.to_le_bytes());
        }
        let crc = crc32fast::hash(&bytes[..WITNESS_LEN - 4]);
        bytes[WITNESS_LEN - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Witness, HeaderError> {
        let (bytes, crc) = bytes[..WITNESS_LEN].split_at(WITNESS_LEN - 4);
        if crc != crc32fast::hash(bytes).to_le_bytes() {
            return Err(HeaderError::Damaged);
        }
        let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        if words[0] > SAMPLES {
            return Err(HeaderError::Nonsense("it has more samples than there is room for"));
        }
        let samples = words[1..].as_chunks::<2>().0.iter().map(|[at, hash]| (*at, *hash));
        Ok(Witness::new(samples.take(words[0] as usize)))
    }
}

/// What a header says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The copy with the higher number holds.
    pub sequence: u64,
    /// What it is made over.
    pub origin: Identity,
    /// Which records of the journal count: those that name this life of the overlay, which begins whenever it is opened.
    /// 0: none do, because a program wrote it that knew no journal.
    pub life: u64,
    /// Where things are.
    pub layout: Layout,
    /// It is being written down into its origin, which need not be the one it was made over meanwhile.
    pub committing: bool,
    /// What tells that one from others then. [`Witness::EMPTY`]: nothing does.
    pub witness: Witness,
}

/// The sizes of an overlay, from which every place in it follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// How long the device is.
    pub size: Bytes,
    /// How long a chunk is: a power of two.
    pub chunk: Bytes,
}

/// Why a file is no overlay that can be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeaderError {
    /// Neither copy begins as one.
    #[error("it is not an overlay")]
    NotOne,
    /// Both copies are damaged.
    #[error("both copies of its header are damaged")]
    Damaged,
    /// It is newer than this program.
    #[error("it has version {0} of the format, and this program knows up to version 2 (use a newer one)")]
    Version(u32),
    /// A sound header that contradicts itself.
    #[error("its header makes no sense: {0}")]
    Nonsense(&'static str),
}

impl Layout {
    /// For a device of that size. `chunk`: what the user wants.
    ///
    /// # Errors
    /// What is wrong with the sizes.
    pub fn new(size: Bytes, chunk: Option<Bytes>) -> Result<Layout, &'static str> {
        if size.0 == 0 || !size.is_aligned(512) || size.0 > i64::MAX as u64 >> 1 {
            return Err("a device cannot have that size");
        }
        let chunk = chunk.unwrap_or_else(|| {
            let least = size.0.div_ceil(CHUNKS_SMALL).next_power_of_two();
            Bytes(least.clamp(CHUNK_MIN, CHUNK_MAX))
        });
        if !chunk.0.is_power_of_two() || !(CHUNK_MIN..=CHUNK_MAX).contains(&chunk.0) {
            return Err("a chunk has 4K, 8K, 16K … 16M");
        }
        let layout = Layout { size, chunk };
        if layout.chunks() > CHUNKS_MAX {
            Err("that makes too many chunks: choose a larger chunk")
        } else {
            Ok(layout)
        }
    }

    /// How many chunks there are; the last may be cut.
    pub fn chunks(self) -> u64 {
        self.size.0.div_ceil(self.chunk.0)
    }

    /// How long the table is: whole pages.
    pub fn table_len(self) -> u64 {
        self.chunks().div_ceil(8).next_multiple_of(PAGE_LEN)
    }

    /// Where the journal begins.
    pub fn journal_at(self) -> Bytes {
        Bytes(TABLE_AT + self.table_len())
    }

    /// How long the journal is: whole pages, all that is free before the data, up to a bound.
    pub fn journal_len(self) -> u64 {
        (self.data_at().0 - self.journal_at().0).min(JOURNAL_LEN_MAX)
    }

    /// Where chunk 0 begins.
    pub fn data_at(self) -> Bytes {
        Bytes((TABLE_AT + 2 * self.table_len()).next_multiple_of(DATA_ALIGN))
    }

    /// How long the file is.
    pub fn file_len(self) -> Bytes {
        // Room for the whole of the last chunk: it is written in whole blocks.
        Bytes(self.data_at().0 + self.size.0.next_multiple_of(CHUNK_MIN))
    }
}

impl Header {
    /// Written out.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &(CHECKED_LEN as u32 + 4).to_le_bytes());
        put(16, &self.sequence.to_le_bytes());
        let is_witnessed = self.witness != Witness::EMPTY;
        let flags = if self.committing { COMMITTING } else { 0 } | if is_witnessed { WITNESSED } else { 0 };
        put(24, &flags.to_le_bytes());
        if is_witnessed {
            put(WITNESS_AT, &self.witness.encode());
        }
        put(32, &self.origin.size.0.to_le_bytes());
        put(40, &self.origin.hash);
        put(56, &self.layout.size.0.to_le_bytes());
        put(64, &(self.layout.chunk.0 as u32).to_le_bytes());
        put(72, &TABLE_AT.to_le_bytes());
        put(80, &self.layout.table_len().to_le_bytes());
        put(88, &self.layout.data_at().0.to_le_bytes());
        put(96, &self.layout.journal_at().0.to_le_bytes());
        put(104, &self.life.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..CHECKED_LEN]);
        bytes[CHECKED_LEN..CHECKED_LEN + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Read from one copy.
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
            Layout::new(Bytes(word(56)), Some(Bytes(half(64).into()))).map_err(HeaderError::Nonsense)?;
        let places = [word(72), word(80), word(88), word(96)];
        if places != [TABLE_AT, layout.table_len(), layout.data_at().0, layout.journal_at().0]
            || word(24) & !(COMMITTING | WITNESSED) != 0
        {
            return Err(HeaderError::Nonsense("places and flags are not those of its version"));
        }
        let mut hash = [0; 16];
        hash.copy_from_slice(&bytes[40..56]);
        let life = if half(8) == VERSION { word(104) } else { 0 };
        let origin = Identity { size: Bytes(word(32)), hash };
        let witness = match word(24) & WITNESSED {
            0 => Witness::EMPTY,
            _ => Witness::decode(&bytes[WITNESS_AT..])?,
        };
        let committing = word(24) & COMMITTING != 0;
        Ok(Header { sequence: word(16), origin, life, layout, committing, witness })
    }

    /// The header of a file that begins with `bytes`, both copies: the newer of those that are sound.
    ///
    /// # Errors
    /// [`HeaderError`] when neither is.
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
        Header { sequence: 7, origin, life: 3, layout, committing: false, witness: Witness::EMPTY }
    }

    #[test]
    fn a_header_reads_back_from_either_copy() {
        let mut bytes = [header().encode(), Header { sequence: 8, ..header() }.encode()].concat();
        assert_eq!(Header::read(&bytes).unwrap().sequence, 8);
        let committing = Header { committing: true, ..header() };
        assert_eq!(Header::read(&committing.encode()), Ok(committing));
        let witnessed = Header { witness: Witness::new([(0, 7), (8192, 9)]), ..committing };
        assert_eq!(Header::read(&witnessed.encode()), Ok(witnessed));
        let mut torn = witnessed.encode();
        torn[WITNESS_AT + 20] ^= 1;
        assert_eq!(Header::read(&torn), Err(HeaderError::Damaged));
        bytes[HEADER_LEN + 60] ^= 1;
        assert_eq!(Header::read(&bytes), Ok(header()));
        bytes[0] ^= 1;
        assert_eq!(Header::read(&bytes), Err(HeaderError::Damaged));
        assert_eq!(Header::read(&[0; 2 * HEADER_LEN]), Err(HeaderError::NotOne));
        assert_eq!(Header::read(&[]), Err(HeaderError::NotOne));
    }

    #[test]
    fn a_sound_checksum_over_nonsense_is_refused() {
        for (at, value) in [(8, 3u8), (24, 4), (24, 8), (64, 1), (73, 1), (90, 9), (63, 0xff)] {
            let mut bytes = header().encode();
            bytes[at] = value;
            let crc = crc32fast::hash(&bytes[..CHECKED_LEN]);
            bytes[CHECKED_LEN..CHECKED_LEN + 4].copy_from_slice(&crc.to_le_bytes());
            let error = Header::read(&bytes).unwrap_err();
            assert!(matches!(error, HeaderError::Nonsense(_) | HeaderError::Version(3)), "{at}: {error}");
        }
    }

    #[test]
    fn a_header_of_version_1_reads_and_believes_no_journal() {
        let mut bytes = header().encode();
        bytes[8] = 1;
        let crc = crc32fast::hash(&bytes[..CHECKED_LEN]);
        bytes[CHECKED_LEN..CHECKED_LEN + 4].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Header::read(&bytes), Ok(Header { life: 0, ..header() }));
    }

    #[test]
    fn there_is_room_for_a_journal_whatever_the_size() {
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
    fn what_the_overlay_holds_is_no_witness() {
        let mib = 1 << 20;
        let held = [(0, 4096), (8192, 65536), (mib - 4096, mib)];
        let places = Witness::places(Bytes(mib), held);
        assert_eq!((places.len(), places[0], places[63]), (64, 4096, mib - 8192));
        assert!(places.windows(2).all(|pair| pair[0] < pair[1]), "{places:?}");
        let is_held = |at: &u64| held.iter().any(|(start, end)| at + 4096 > *start && at < end);
        assert!(!places.iter().any(is_held), "{places:?}");
        assert_eq!(Witness::places(Bytes(9000), []), [0, 4096]);
        assert_eq!(Witness::places(Bytes(9000), [(0, 12288)]), []);
        assert_eq!(Witness::places(Bytes(9000), [(0, 4096)]), [4096]);
        assert_eq!(Witness::places(Bytes(512), []), []);
    }

    #[test]
    fn samples_lie_within_and_reach_both_ends() {
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
