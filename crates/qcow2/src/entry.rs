//! Entries of L2 tables: the state of a cluster of the disk.

use crate::damaged;
use crate::header::Header;
use std::io;

/// Flag: the refcount of the cluster is exactly one, so it can be written in place.
pub(crate) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Flag: the cluster reads as zeroes; only in version 3, without extended L2 entries.
pub(crate) const ZERO: u64 = 1;
/// Mask of the bits of an entry that are an offset in the file.
pub(crate) const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
/// Number of subclusters per cluster with extended L2 entries.
const SUBCLUSTERS: u32 = 32;
const SUB_ALL_DATA: u64 = 0xffff_ffff;
const SUB_ALL_ZERO: u64 = 0xffff_ffff << 32;

/// The geometry of an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) cluster_bits: u32,
    pub(crate) version: u32,
    pub(crate) extended: bool,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
}

/// An L2 entry as stored; the bitmap is 0 without extended L2 entries.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Entry {
    pub(crate) word: u64,
    pub(crate) bitmap: u64,
}

/// Content of part of a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Not allocated: reads as the backing file, or as zeroes.
    Unallocated,
    Zero,
    /// Stored in the file, starting at offset `at`.
    Data {
        at: u64,
    },
    /// The whole cluster is stored in compressed form.
    Compressed {
        at: u64,
        len: u64,
    },
}

impl Geometry {
    pub(crate) fn new(header: &Header) -> Geometry {
        let Header { cluster_bits, version, extended_l2, size, .. } = *header;
        Geometry { cluster_bits, version, extended: extended_l2, size }
    }

    /// Returns the bytes of a cluster.
    pub(crate) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns the bytes of an L2 entry.
    pub(crate) fn entry_len(&self) -> usize {
        if self.extended { 16 } else { 8 }
    }

    /// Returns the number of entries of an L2 table.
    pub(crate) fn l2_entries(&self) -> u64 {
        self.cluster() / self.entry_len() as u64
    }

    /// Returns whether the format has entries for zero clusters.
    pub(crate) fn has_zero_clusters(&self) -> bool {
        self.version >= 3
    }

    /// Returns an entry that reads as zeroes and refers to no cluster.
    pub(crate) fn zero_entry(&self) -> Entry {
        match (self.has_zero_clusters(), self.extended) {
            (false, _) => Entry::default(),
            (true, false) => Entry { word: ZERO, bitmap: 0 },
            (true, true) => Entry { word: 0, bitmap: SUB_ALL_ZERO },
        }
    }

    /// Returns an entry for a data cluster with refcount one.
    pub(crate) fn data_entry(&self, at: u64) -> Entry {
        Entry { word: at | COPIED, bitmap: if self.extended { SUB_ALL_DATA } else { 0 } }
    }

    /// Returns the first cluster of the file that an entry refers to, and the number of clusters, which is
    /// 0 if it refers to none.
    ///
    /// # Errors
    /// The offset is not aligned.
    pub(crate) fn owned(&self, entry: Entry) -> io::Result<(u64, u64)> {
        if entry.word & COMPRESSED != 0 {
            let (at, len) = self.compressed(entry.word);
            let first = at >> self.cluster_bits;
            return Ok((first, ((at + len - 1) >> self.cluster_bits) - first + 1));
        }
        let at = entry.word & PLACE;
        if !at.is_multiple_of(self.cluster()) {
            return Err(damaged("an L2 entry has an unaligned offset"));
        }
        Ok((at >> self.cluster_bits, u64::from(at != 0)))
    }

    /// Returns whether the `COPIED` flag applies to an entry: it refers to a cluster that is not
    /// compressed.
    pub(crate) fn has_copied_flag(entry: Entry) -> bool {
        entry.word & COMPRESSED == 0 && entry.word & PLACE != 0
    }

    fn compressed(&self, word: u64) -> (u64, u64) {
        let bits = 62 - (self.cluster_bits - 8);
        let at = word & ((1 << bits) - 1);
        let sectors = (word & (COMPRESSED - 1)) >> bits;
        (at, (sectors + 1) * 512 - at % 512)
    }

    /// Returns the content at `skip` bytes into the cluster of this entry, and the number of bytes, up to
    /// `len`, with that content. `skip + len` is at most a cluster.
    ///
    /// # Errors
    /// The entry is invalid.
    pub(crate) fn kind(&self, entry: Entry, skip: u64, len: u64) -> io::Result<(Kind, u64)> {
        if entry.word & COMPRESSED != 0 {
            let (at, compressed_len) = self.compressed(entry.word);
            return Ok((Kind::Compressed { at, len: compressed_len }, len));
        }
        self.owned(entry)?;
        let at = entry.word & PLACE;
        if self.extended {
            return self.subclusters(at, entry.bitmap, skip, len);
        }
        if entry.word & ZERO != 0 {
            if !self.has_zero_clusters() {
                return Err(damaged("an L2 entry has the zero flag, which version 2 does not have"));
            }
            return Ok((Kind::Zero, len));
        }
        Ok((if at == 0 { Kind::Unallocated } else { Kind::Data { at: at + skip } }, len))
    }

    fn subclusters(&self, at: u64, bitmap: u64, skip: u64, len: u64) -> io::Result<(Kind, u64)> {
        let sub = self.cluster() / u64::from(SUBCLUSTERS);
        let state = |number: u64| (bitmap >> number & 1, bitmap >> (number + 32) & 1);
        let first = skip / sub;
        let kind = match state(first) {
            (0, 0) => Kind::Unallocated,
            (0, _) => Kind::Zero,
            (_, 0) if at != 0 => Kind::Data { at: at + skip },
            _ => return Err(damaged("the subclusters of an extended L2 entry are inconsistent")),
        };
        let mut next = first + 1;
        while next * sub < skip + len && state(next) == state(first) {
            next += 1;
        }
        Ok((kind, (next * sub).min(skip + len) - skip))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(cluster_bits: u32, version: u32, extended: bool) -> Geometry {
        Geometry { cluster_bits, version, extended, size: 1 << 30 }
    }

    #[test]
    fn entries_are_decoded() {
        let shape = geometry(16, 3, false);
        let kind = |word: u64| shape.kind(Entry { word, bitmap: 0 }, 512, 1024);
        assert_eq!(kind(0).unwrap(), (Kind::Unallocated, 1024));
        assert_eq!(kind(COPIED | 0x50000).unwrap(), (Kind::Data { at: 0x50200 }, 1024));
        assert_eq!(kind(COPIED | 0x50000 | ZERO).unwrap(), (Kind::Zero, 1024));
        assert!(kind(0x50200).is_err(), "between clusters");
        assert!(geometry(16, 2, false).kind(Entry { word: ZERO, bitmap: 0 }, 0, 512).is_err());
        // The offset has 54 bits, the number of sectors 8 bits.
        let word = COMPRESSED | 2 << 54 | 0x50210;
        assert_eq!(kind(word).unwrap().0, Kind::Compressed { at: 0x50210, len: 3 * 512 - 0x10 });
        let over = COMPRESSED | 1 << 54 | 0x5fe00;
        assert_eq!(shape.owned(Entry { word: over, bitmap: 0 }).unwrap(), (5, 2));
    }

    #[test]
    fn subclusters_have_separate_states() {
        let shape = geometry(16, 3, true);
        let entry = Entry { word: COPIED | 0x50000, bitmap: 0b11 | 1 << 34 };
        assert_eq!(shape.kind(entry, 512, 65024).unwrap(), (Kind::Data { at: 0x50200 }, 4096 - 512));
        assert_eq!(shape.kind(entry, 4096, 4096).unwrap(), (Kind::Zero, 2048));
        assert_eq!(shape.kind(entry, 6144, 8192).unwrap(), (Kind::Unallocated, 8192));
        assert!(shape.kind(Entry { bitmap: 1 | 1 << 32, ..entry }, 0, 512).is_err());
        assert_eq!(shape.kind(shape.zero_entry(), 0, 65536).unwrap(), (Kind::Zero, 65536));
    }
}
