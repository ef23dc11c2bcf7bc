//! Whether a qcow2 image's reference counts are whole enough for it to be written.
//!
//! Who writes allocates clusters by these counts. An image that has none for a part of itself is damaged, and imago would look
//! for a place for the missing ones without end. Only whether they are there is looked at here, not whether they are right.
//!
//! But for one kind: imago writes where a new table of clusters is before it writes that the table's own cluster is taken. A
//! server that is killed between the two leaves a table in a cluster that counts as free, and the next to write would put
//! data over it. So tables that count as free are counted as taken here, before anything else is written.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The most bytes of the table that are looked at: 2^20 blocks of counts, for 2^35 clusters.
const TABLE_LEN_MAX: u64 = 8 << 20;

fn damaged() -> io::Error {
    let why = "its reference counts are damaged (mend it with qemu-img check -r all, or add ro)";
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// The header extension that names features, in entries of 48 bytes.
const FEATURE_NAMES: u32 = 0x6803_f857;
const FEATURE_NAME_LEN: u32 = 48;
/// A header of version 2.
const HEADER_LEN_MIN: usize = 72;
/// More extensions than any image has.
const EXTENSIONS_MAX: usize = 1024;

/// Check the header of an image, one that is only read as well, for what imago does not look at: it takes an entry of the
/// feature names that is cut off for a whole one, and the bytes of an encrypted image for those of the disk. What is no qcow2
/// image is passed over.
pub(crate) fn check_header(path: &Path) -> io::Result<()> {
    let file = std::fs::File::open(path)?;
    let mut header = [0; 104];
    let len = file.read_at(&mut header, 0)?;
    let half = |bytes: &[u8]| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    if len < HEADER_LEN_MIN || !header.starts_with(b"QFI\xfb") {
        return Ok(());
    }
    if half(&header[32..]) != 0 {
        let why = "it is encrypted, and only others can be read";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    if len < header.len() {
        return Ok(());
    }
    let mut at = if half(&header[4..]) >= 3 { u64::from(half(&header[100..])) } else { 72 };
    for _ in 0..EXTENSIONS_MAX {
        let mut head = [0; 8];
        if file.read_exact_at(&mut head, at).is_err() {
            return Ok(());
        }
        let (kind, len) = (half(&head), half(&head[4..]));
        if kind == FEATURE_NAMES && !len.is_multiple_of(FEATURE_NAME_LEN) {
            let why = "its table of feature names is cut off (mend it with qemu-img amend, or convert it)";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        if kind == 0 {
            return Ok(());
        }
        at += 8 + u64::from(len).next_multiple_of(8);
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "it has more header extensions than can be"))
}

/// The most bytes of the table of tables: QEMU's limit, for a disk of 32 PiB in clusters of 64 KiB.
const L1_LEN_MAX: u64 = 32 << 20;
/// The bits of an entry that are a place.
const PLACE: u64 = 0x00ff_ffff_ffff_fe00;

/// Check an image that is to be written, and count its tables as taken.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    let file = std::fs::File::open(path)?;
    let file_len = file.metadata()?.len();
    let mut header = [0; 104];
    file.read_exact_at(&mut header[..72], 0)?;
    let _ = file.read_at(&mut header[72..], 72)?;
    let half = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let word = |at: usize| u64::from(half(at)) << 32 | u64::from(half(at + 4));
    let order = if half(4) >= 3 { half(96) } else { 4 };
    let (bits, table_at, table_clusters) = (half(20), word(48), u64::from(half(56)));
    if !(9..=21).contains(&bits) || order > 6 {
        return Err(damaged());
    }
    // Each block of counts is a cluster, and counts that many clusters.
    let counted = 1u64 << (bits + 3 - order);
    let clusters = file_len.div_ceil(1 << bits);
    let blocks = clusters.div_ceil(counted).max(1);
    let table_len = blocks * 8;
    if table_len > TABLE_LEN_MAX || table_len > table_clusters << bits {
        return Err(damaged());
    }
    let mut table = vec![0; table_len as usize];
    file.read_exact_at(&mut table, table_at).map_err(|_| damaged())?;
    let blocks: Vec<u64> = table.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry)).collect();
    let is_there = |at: &u64| *at != 0 && at.is_multiple_of(1 << bits) && *at < file_len;
    if !blocks.iter().all(is_there) {
        return Err(damaged());
    }
    let counts = Counts { bits, order, counted, blocks };
    let (l1_at, l1_len) = (word(40), u64::from(half(36)) * 8);
    if l1_len > L1_LEN_MAX {
        return Err(damaged());
    }
    let mut tables = vec![0; l1_len as usize];
    file.read_exact_at(&mut tables, l1_at).map_err(|_| damaged())?;
    let places = tables.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry) & PLACE);
    counts.take(path, &file, places.filter(|&at| at != 0))
}

/// An image's reference counts.
struct Counts {
    bits: u32,
    /// A count has 2^order bits.
    order: u32,
    /// Counts in a block.
    counted: u64,
    blocks: Vec<u64>,
}

impl Counts {
    /// Count those of these clusters as taken, once, that count as free.
    fn take(&self, path: &Path, file: &std::fs::File, places: impl Iterator<Item = u64>) -> io::Result<()> {
        let mut writable = None;
        for place in places {
            let cluster = place >> self.bits;
            // Past the end of the file nothing is counted yet, and a table there is all holes.
            let Some(&block) = self.blocks.get((cluster / self.counted) as usize) else {
                return Err(damaged());
            };
            // Of counts of less than a byte the first is in the lowest bits.
            let bit = (cluster % self.counted) << self.order;
            let (at, shift, len) = (block + bit / 8, bit % 8, (1usize << self.order).div_ceil(8));
            let mut count = [0; 8];
            file.read_exact_at(&mut count[..len], at).map_err(|_| damaged())?;
            let mask = if self.order < 3 { ((1u8 << (1 << self.order)) - 1) << shift } else { 0xff };
            if count[..len].iter().any(|byte| byte & mask != 0) {
                continue;
            }
            count[len - 1] |= 1 << shift;
            let image = match &mut writable {
                Some(image) => image,
                none => none.insert(std::fs::File::options().write(true).open(path)?),
            };
            image.write_all_at(&count[..len], at)?;
        }
        writable.map_or(Ok(()), |image| {
            tracing::warn!("{}: tables that counted as free are counted as taken", path.display());
            image.sync_data()
        })
    }
}
