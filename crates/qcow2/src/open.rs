//! Opens images.

use crate::compress::Decompressed;
use crate::entry::Geometry;
use crate::flush::Rounds;
use crate::header::{BITMAPS_CONSISTENT, CORRUPT, Header, first_cluster_len};
use crate::meta::Meta;
use crate::ranges::Ranges;
use crate::refcounts::Refcounts;
use crate::{Disk, Options, Source, Storage, damaged, snapshots, verify};
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// The backing file in an image's header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Names {
    /// Name of the backing file.
    pub backing: Option<Vec<u8>>,
    /// Format of the backing file.
    pub format: Option<Vec<u8>>,
}

/// Reads and checks a header.
pub(crate) fn read_header(storage: &dyn Storage) -> io::Result<Header> {
    let mut start = [0; 72];
    storage.read_at(&mut start, 0)?;
    let mut cluster = vec![0; first_cluster_len(&start)?];
    storage.read_at(&mut cluster, 0)?;
    Header::parse(&cluster)
}

/// Reads a table of 64-bit words, which must be within the file.
pub(crate) fn read_words(storage: &dyn Storage, at: u64, count: u64, what: &str) -> io::Result<Vec<u64>> {
    let end = at.checked_add(count * 8).filter(|end| *end <= i64::MAX as u64);
    if end.is_none_or(|end| storage.len().is_ok_and(|len| end > len)) {
        // This is not `InvalidData`, because repair cannot restore the missing part.
        let why = format!(
            "{what} is past the end of the file: the file is truncated, or its header is damaged (restore it from a copy)"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let mut bytes = vec![0; count as usize * 8];
    storage.read_at(&mut bytes, at)?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect())
}

/// Returns the backing file named in an image's header, after checking the header.
///
/// # Errors
/// The image cannot be read, is damaged, or needs an unsupported feature, which the message names.
pub fn names(storage: &dyn Storage) -> io::Result<Names> {
    let header = read_header(storage)?;
    Ok(Names { backing: header.backing, format: header.backing_format })
}

impl Disk {
    /// Opens an image with its backing file ([`names`]); without it, unallocated clusters read as zeroes.
    ///
    /// For writing, the whole image is checked first, and refcounts that are too low are repaired durably.
    ///
    /// # Errors
    /// See [`names`]; or the image is opened for writing and cannot be repaired.
    pub fn open(
        storage: Arc<dyn Storage>,
        backing: Option<Box<dyn Source>>,
        options: Options,
    ) -> io::Result<Disk> {
        let header = read_header(&*storage)?;
        Disk::with_header(storage, header, backing, options)
    }

    /// Opens an internal snapshot read-only, by its id or otherwise by its name.
    ///
    /// # Errors
    /// See [`names`]; `InvalidInput` if the snapshot does not exist, or the name is ambiguous.
    pub fn open_snapshot(
        storage: Arc<dyn Storage>,
        backing: Option<Box<dyn Source>>,
        snapshot: &str,
        options: Options,
    ) -> io::Result<Disk> {
        let mut header = read_header(&*storage)?;
        snapshots::select(&*storage, &mut header, snapshot)?;
        Disk::with_header(storage, header, backing, Options { writable: false, ..options })
    }

    fn with_header(
        storage: Arc<dyn Storage>,
        mut header: Header,
        backing: Option<Box<dyn Source>>,
        options: Options,
    ) -> io::Result<Disk> {
        if options.writable {
            if header.incompatible & CORRUPT != 0 {
                return Err(damaged("it is marked as corrupt"));
            }
            verify::repair(&*storage, &mut header)?;
        }
        let shape = Geometry::new(&header);
        let l1 = read_words(&*storage, header.l1_at, header.l1_entries, "its L1 table")?;
        let table_len = header.table_clusters << header.cluster_bits >> 3;
        let table = if options.writable {
            read_words(&*storage, header.table_at, table_len, "its refcount table")?
        } else {
            Vec::new()
        };
        let (bits, order, len) = (header.cluster_bits, header.refcount_order, storage.len()?);
        let refs = Refcounts::new(bits, order, table, header.table_at, len, options.refcount_cache_len);
        if header.autoclear & BITMAPS_CONSISTENT != 0 && options.writable {
            tracing::warn!("the bitmaps of a qcow2 image become inconsistent with the first write to it");
        }
        Ok(Disk {
            storage,
            backing,
            shape,
            order,
            compression: header.compression,
            expanded: Decompressed::default(),
            writable: options.writable,
            meta: Mutex::new(Meta::new(shape, l1, header.l1_at, options.l2_cache_len, refs)),
            ranges: Ranges::default(),
            rounds: Rounds::default(),
            failed: AtomicBool::new(false),
            autoclear: AtomicBool::new(header.autoclear != 0),
            #[cfg(test)]
            fault: crate::SeededFault::None,
        })
    }
}
