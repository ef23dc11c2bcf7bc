//! The header of an image and its extensions.
//!
//! Source: QEMU's `docs/interop/qcow2.txt`. All numbers are big-endian. *Invariant:* all numbers accepted by
//! [`Header::parse`] are valid, except for offsets in the file, which the reader and [`crate::verify`] check.

use crate::{damaged, unsupported};
use std::io;

/// The magic number, "QFI\xfb".
pub(crate) const MAGIC: u32 = 0x5146_49fb;
/// Length of a header of version 2, and minimum length of version 3, in bytes.
const LEN_V2: usize = 72;
const LEN_V3: usize = 104;
/// Limits as in QEMU: bytes of the L1 table and the refcount table, number of snapshots.
pub(crate) const L1_LEN_MAX: u64 = 32 << 20;
const TABLE_LEN_MAX: u64 = 8 << 20;
const SNAPSHOTS_MAX: u32 = 65536;
const BACKING_NAME_MAX: u64 = 1023;

/// Bits of incompatible features.
pub(crate) const DIRTY: u64 = 1;
pub(crate) const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
/// Autoclear feature: the bitmaps extension is consistent with the data.
pub(crate) const BITMAPS_CONSISTENT: u64 = 1;

/// Offsets of the fields that are updated.
pub(crate) const AT_TABLE: usize = 48;
pub(crate) const AT_INCOMPATIBLE: usize = 72;
pub(crate) const AT_AUTOCLEAR: usize = 88;

/// Types of header extensions.
const EXT_END: u32 = 0;
const EXT_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXT_FEATURE_NAMES: u32 = 0x6803_f857;
const EXT_BITMAPS: u32 = 0x2385_2875;
/// Length of an entry in the feature name table.
const FEATURE_NAME_LEN: usize = 48;

/// Compression of clusters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Compression {
    Deflate,
    Zstd,
}

/// The bitmap directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bitmaps {
    pub(crate) count: u32,
    pub(crate) directory_len: u64,
    pub(crate) directory_at: u64,
}

/// A parsed header.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) cluster_bits: u32,
    pub(crate) size: u64,
    pub(crate) l1_entries: u64,
    pub(crate) l1_at: u64,
    pub(crate) table_at: u64,
    pub(crate) table_clusters: u64,
    pub(crate) snapshots: u32,
    pub(crate) snapshots_at: u64,
    pub(crate) incompatible: u64,
    pub(crate) autoclear: u64,
    pub(crate) refcount_order: u32,
    pub(crate) compression: Compression,
    pub(crate) extended_l2: bool,
    pub(crate) backing: Option<Vec<u8>>,
    pub(crate) backing_format: Option<Vec<u8>>,
    pub(crate) bitmaps: Option<Bitmaps>,
    /// Whether there are extensions of unknown types, which may own clusters.
    pub(crate) unknown_extensions: bool,
}

pub(crate) fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from(half(bytes, at)) << 32 | u64::from(half(bytes, at + 4))
}

/// Returns the number of bytes that [`Header::parse`] needs: the first cluster, whose size is in the
/// header.
pub(crate) fn first_cluster_len(start: &[u8; LEN_V2]) -> io::Result<usize> {
    if half(start, 0) != MAGIC {
        // This is not `InvalidData`, because repair cannot turn the file into an image.
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a qcow2 image: its header is missing",
        ));
    }
    let bits = half(start, 20);
    if !(9..=21).contains(&bits) {
        // This is neither `InvalidData` nor `Unsupported`, because the image can be neither repaired nor
        // converted.
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "its header is invalid: clusters of 2^{bits} bytes, where qcow2 allows 2^9 to 2^21 \
                 (restore the image from a copy; format=raw serves the file as it is)"
            ),
        ));
    }
    Ok(1 << bits)
}

impl Header {
    /// Parses the first cluster.
    ///
    /// # Errors
    /// `Unsupported`, with the name of the unsupported feature; `InvalidData` if the header is invalid.
    pub(crate) fn parse(cluster: &[u8]) -> io::Result<Header> {
        let version = half(cluster, 4);
        if !(2..=3).contains(&version) {
            return Err(unsupported(format!("version {version} of qcow2 is not supported (2 and 3 are)")));
        }
        let v3 = version == 3;
        let header_len = if v3 { half(cluster, 100) as usize } else { LEN_V2 };
        if v3 && (header_len < LEN_V3 || header_len > cluster.len() || !header_len.is_multiple_of(8)) {
            return Err(damaged("the length of its header is invalid"));
        }
        let mut header = Header {
            version,
            cluster_bits: half(cluster, 20),
            size: word(cluster, 24),
            l1_entries: u64::from(half(cluster, 36)),
            l1_at: word(cluster, 40),
            table_at: word(cluster, 48),
            table_clusters: u64::from(half(cluster, 56)),
            snapshots: half(cluster, 60),
            snapshots_at: word(cluster, 64),
            incompatible: if v3 { word(cluster, AT_INCOMPATIBLE) } else { 0 },
            autoclear: if v3 { word(cluster, AT_AUTOCLEAR) } else { 0 },
            refcount_order: if v3 { half(cluster, 96) } else { 4 },
            compression: Compression::Deflate,
            extended_l2: false,
            backing: None,
            backing_format: None,
            bitmaps: None,
            unknown_extensions: false,
        };
        let (name_at, name_len) = (word(cluster, 8), u64::from(half(cluster, 16)));
        let end = if name_at == 0 { cluster.len() } else { (name_at as usize).min(cluster.len()) };
        let names = header.parse_extensions(cluster, header_len, end)?;
        header.check_features(&names)?;
        if half(cluster, 32) != 0 {
            let kind = if half(cluster, 32) == 2 { " with LUKS" } else { "" };
            return Err(unsupported(format!("it is encrypted{kind}, which is not supported")));
        }
        if header.incompatible & COMPRESSION != 0 {
            header.compression = match cluster[LEN_V3..].first().filter(|_| header_len > LEN_V3) {
                Some(0) => Compression::Deflate,
                Some(1) => Compression::Zstd,
                kind => return Err(unsupported(format!("its compression type {kind:?} is not supported"))),
            };
        }
        header.extended_l2 = header.incompatible & EXTENDED_L2 != 0;
        if name_at != 0 && name_len != 0 {
            let fits = name_len <= BACKING_NAME_MAX
                && name_at.checked_add(name_len).is_some_and(|end| end <= cluster.len() as u64);
            if !fits {
                return Err(damaged("the name of its backing file is outside its header"));
            }
            header.backing = Some(cluster[name_at as usize..(name_at + name_len) as usize].to_vec());
        }
        header.check_numbers()?;
        Ok(header)
    }

    /// Checks the consistency of sizes and offsets.
    pub(crate) fn check_numbers(&self) -> io::Result<()> {
        let cluster = 1u64 << self.cluster_bits;
        if self.refcount_order > 6 {
            return Err(damaged("its refcounts are wider than 64 bits"));
        }
        if self.extended_l2 && self.cluster_bits < 14 {
            return Err(damaged("it has extended L2 entries in clusters of less than 16 KiB"));
        }
        if self.size > i64::MAX as u64 {
            return Err(damaged("its disk is too large"));
        }
        if self.l1_entries * 8 > L1_LEN_MAX
            || self.table_clusters << self.cluster_bits > TABLE_LEN_MAX.max(cluster)
        {
            return Err(unsupported(
                "its tables are larger than QEMU allows (32 MiB of L1 table, 8 MiB of refcount table)".into(),
            ));
        }
        let entries = cluster / if self.extended_l2 { 16 } else { 8 };
        if self.size.div_ceil(cluster).div_ceil(entries) > self.l1_entries {
            return Err(damaged("its L1 table is too short for its disk"));
        }
        let aligned = |at: u64| at.is_multiple_of(cluster) && at <= i64::MAX as u64;
        if !aligned(self.l1_at) || (self.l1_entries > 0 && self.l1_at == 0) {
            return Err(damaged("its L1 table is not aligned to a cluster"));
        }
        if !aligned(self.table_at) || self.table_at == 0 || self.table_clusters == 0 {
            return Err(damaged("its refcount table is missing, or not aligned to a cluster"));
        }
        if self.snapshots > SNAPSHOTS_MAX || (self.snapshots > 0 && !aligned(self.snapshots_at)) {
            return Err(damaged("its snapshot table is invalid"));
        }
        Ok(())
    }

    /// Parses the extensions, and returns the feature name table.
    fn parse_extensions(&mut self, cluster: &[u8], from: usize, end: usize) -> io::Result<Vec<u8>> {
        let (mut at, mut names) = (from, Vec::new());
        // An extension has at least eight bytes, so the loop ends.
        while at + 8 <= end {
            let (kind, len) = (half(cluster, at), half(cluster, at + 4) as usize);
            if kind == EXT_END {
                return Ok(names);
            }
            at += 8;
            let Some(data) = cluster[..end].get(at..at.saturating_add(len)) else {
                return Err(damaged("a header extension is longer than the header"));
            };
            match kind {
                EXT_BACKING_FORMAT => self.backing_format = Some(data.to_vec()),
                EXT_FEATURE_NAMES if !len.is_multiple_of(FEATURE_NAME_LEN) => {
                    return Err(damaged("its feature name table is truncated"));
                }
                EXT_FEATURE_NAMES => names = data.to_vec(),
                EXT_BITMAPS if len >= 24 => {
                    self.bitmaps = Some(Bitmaps {
                        count: half(data, 0),
                        directory_len: word(data, 8),
                        directory_at: word(data, 16),
                    });
                }
                _ => self.unknown_extensions = true,
            }
            at += len.next_multiple_of(8);
        }
        Ok(names)
    }

    /// Refuses unknown incompatible features, by name.
    fn check_features(&self, names: &[u8]) -> io::Result<()> {
        if self.incompatible & DATA_FILE != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "its data is in another file, which is not opened",
            ));
        }
        let unknown = self.incompatible & !(DIRTY | CORRUPT | COMPRESSION | EXTENDED_L2);
        if unknown == 0 {
            return Ok(());
        }
        let name = |bit: u32| {
            let entry = names
                .chunks_exact(FEATURE_NAME_LEN)
                .find(|entry| entry[0] == 0 && u32::from(entry[1]) == bit)?;
            let text = String::from_utf8_lossy(&entry[2..]);
            Some(text.trim_end_matches('\0').escape_default().to_string())
        };
        let list: Vec<String> = (0..64)
            .filter(|bit| unknown >> bit & 1 != 0)
            .map(|bit| name(bit).unwrap_or_else(|| format!("bit {bit}")))
            .collect();
        Err(unsupported(format!("it needs unsupported features: {}", list.join(", "))))
    }
}
