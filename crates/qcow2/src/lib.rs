//! qcow2 images, for reading and writing.
//!
//! A [`Disk`] works on a [`Storage`], such as a file, and may be used by several threads. It supports
//! versions 2 and 3, all cluster sizes and refcount widths, backing files, compressed clusters (deflate and
//! zstd), extended L2 entries and internal snapshots, which can be read and are preserved. Source: QEMU's
//! `docs/interop/qcow2.txt`.
//!
//! Metadata is written in such an order ([`meta`]) that every power cut leaves a consistent image,
//! whichever of the writes since the last sync survive: no refcount is too low, no cluster shows data that
//! belongs to another, and flushed data is present. A power cut may leak clusters; [`verify`] frees them when
//! the image is next opened for writing.
//!
//! Requests that change the state of a cluster hold a range lock exclusively ([`ranges`]).
//!
//! *Invariant:* after a failed sync nothing is written to the storage any more.
//! *Invariant:* no content of an image causes a panic or an endless loop; memory is bounded by [`Options`],
//! by the L1 table (at most 32 MiB) and the refcount table (8 MiB), and during a check by 64 MiB more.

#![forbid(unsafe_code)]

mod cache;
mod compress;
mod create;
mod entry;
mod flush;
mod header;
mod meta;
#[cfg(test)]
mod model;
mod open;
mod ranges;
mod refcounts;
mod snapshots;
mod storage;
#[cfg(test)]
mod tests;
mod verify;
mod write;

pub use create::{CreateOptions, create};
pub use open::{Names, names};
pub use storage::Storage;
pub use verify::{Report, check};

use entry::{Geometry, Kind};
use flush::Rounds;
use header::Compression;
use meta::Meta;
use ranges::{Held, Ranges};
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A backing file, which is read where the image has no data.
pub trait Source: Send + Sync {
    /// Returns the size in bytes. Data past the end reads as zeroes.
    fn size(&self) -> u64;

    /// Reads into `into` from offset `at`; the range is within the size.
    ///
    /// # Errors
    /// The backing file cannot be read.
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<()>;

    /// Returns whether the range is unallocated and zero at `at`, and for how many bytes, up to `len`, this
    /// holds.
    ///
    /// # Errors
    /// The backing file cannot be read.
    fn mapping(&self, at: u64, len: u64) -> io::Result<(bool, u64)>;
}

/// Options for opening an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Whether to open the image for writing.
    pub writable: bool,
    /// Maximum bytes of cached L2 tables; at least four tables are cached.
    pub l2_cache_len: u64,
    /// Maximum bytes of cached refcount blocks; at least four blocks are cached.
    pub refcount_cache_len: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options { writable: false, l2_cache_len: 32 << 20, refcount_cache_len: 8 << 20 }
    }
}

/// A seeded fault that the model has to detect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests make them"))]
pub(crate) enum SeededFault {
    None,
    /// Entries may reach the disk before the refcounts and the data that they refer to.
    NoEarlySync,
    /// Clusters are reused before the removal of their old entry is durable.
    FreeAtOnce,
    /// Requests do not take range locks.
    NoRanges,
    /// Reused clusters are not filled.
    NoFill,
    /// After a refcount table has grown, its pending entries are forgotten.
    ForgetTable,
}

/// An open image.
pub struct Disk {
    storage: Arc<dyn Storage>,
    backing: Option<Box<dyn Source>>,
    shape: Geometry,
    order: u32,
    compression: Compression,
    expanded: compress::Decompressed,
    writable: bool,
    meta: Mutex<Meta>,
    ranges: Ranges,
    rounds: Rounds,
    failed: AtomicBool,
    /// Whether the header has autoclear features, which must be cleared before the first write.
    autoclear: AtomicBool,
    #[cfg(test)]
    fault: SeededFault,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk")
            .field("shape", &self.shape)
            .field("writable", &self.writable)
            .finish_non_exhaustive()
    }
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn unsupported(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why)
}

/// Returns the error of an image that has no space left.
fn full() -> io::Error {
    io::ErrorKind::StorageFull.into()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// Returns the size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.shape.size
    }

    /// Returns the bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.shape.cluster()
    }

    /// Returns whether a flush has failed permanently, so that nothing is written any more.
    pub fn has_failed(&self) -> bool {
        self.failed.load(std::sync::atomic::Ordering::Acquire)
    }

    /// Returns whether tables have changes that only a flush writes.
    pub fn has_changes(&self) -> bool {
        self.writable && lock(&self.meta).has_changes()
    }

    fn has_fault(&self, fault: SeededFault) -> bool {
        #[cfg(test)]
        return self.fault == fault;
        #[cfg(not(test))]
        {
            let _ = fault;
            false
        }
    }

    fn hold(&self, offset: u64, len: u64, exclusive: bool) -> Held<'_> {
        let bits = self.shape.cluster_bits;
        let clusters = offset >> bits..(offset + len).div_ceil(1 << bits);
        self.ranges.hold(clusters, exclusive && !self.has_fault(SeededFault::NoRanges))
    }

    /// Reads into `into` from `offset`. The range must be within the disk.
    ///
    /// # Errors
    /// The file cannot be read, or a table is invalid.
    pub fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let _held = self.hold(offset, into.len() as u64, false);
        self.read_held(into, offset)
    }

    /// Reads like [`read`](Disk::read), for a caller that holds the range. The range may extend past the
    /// end of the disk, which reads as zeroes.
    fn read_held(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let (kind, len) = lock(&self.meta).lookup(&*self.storage, at, (into.len() - done) as u64)?;
            let piece = &mut into[done..done + len as usize];
            match kind {
                Kind::Zero => piece.fill(0),
                Kind::Data { at } => self.storage.read_at(piece, at)?,
                Kind::Unallocated => self.read_backing(piece, at)?,
                Kind::Compressed { at: place, len } => {
                    let cluster = self.expanded.cluster(place, || {
                        let mut bytes = vec![0; len as usize];
                        self.storage.read_at(&mut bytes, place)?;
                        compress::expand(self.compression, &bytes, self.shape.cluster() as usize)
                    })?;
                    let skip = (at % self.shape.cluster()) as usize;
                    piece.copy_from_slice(&cluster[skip..skip + piece.len()]);
                }
            }
            done += len as usize;
        }
        Ok(())
    }

    fn read_backing(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let size = self.backing.as_ref().map_or(0, |backing| backing.size());
        let there = (size.saturating_sub(at)).min(into.len() as u64) as usize;
        into[there..].fill(0);
        match &self.backing {
            Some(backing) if there > 0 => backing.read(&mut into[..there], at),
            _ => Ok(()),
        }
    }

    /// Returns whether the range is unallocated and zero at `offset`, and for how many bytes, up to `len`,
    /// this holds.
    ///
    /// # Errors
    /// A table cannot be read, or is invalid.
    pub fn mapping(&self, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        let mut done = 0;
        let mut found = None;
        while done < len {
            let (zero, run) = self.mapping_once(offset + done, len - done)?;
            if found.is_some_and(|found| found != zero) {
                break;
            }
            found = Some(zero);
            done += run;
        }
        Ok((found.unwrap_or(false), done))
    }

    fn mapping_once(&self, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        let (kind, run) = lock(&self.meta).lookup(&*self.storage, offset, len)?;
        match (kind, &self.backing) {
            (Kind::Zero, _) | (Kind::Unallocated, None) => Ok((true, run)),
            (Kind::Unallocated, Some(backing)) if offset >= backing.size() => Ok((true, run)),
            (Kind::Unallocated, Some(backing)) => backing.mapping(offset, run.min(backing.size() - offset)),
            _ => Ok((false, run)),
        }
    }

    /// Returns whether unallocated clusters read as zeroes at `offset`.
    fn is_bare(&self, offset: u64) -> bool {
        self.backing.as_ref().is_none_or(|backing| offset >= backing.size())
    }
}

impl Source for Disk {
    fn size(&self) -> u64 {
        self.shape.size
    }

    fn read(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        Disk::read(self, into, at)
    }

    fn mapping(&self, at: u64, len: u64) -> io::Result<(bool, u64)> {
        Disk::mapping(self, at, len)
    }
}

impl Drop for Disk {
    /// Flushes, and truncates the file to the length in use.
    fn drop(&mut self) {
        if !self.writable || self.has_failed() {
            return;
        }
        // The first flush frees clusters; the second writes their refcounts.
        let flushed = self.flush().and_then(|()| if self.has_changes() { self.flush() } else { Ok(()) });
        if let Err(error) = flushed {
            tracing::error!("flushing a qcow2 image at its end failed: {error}");
            return;
        }
        let meta = lock(&self.meta);
        if meta.refs.file_len() > meta.refs.used_len() {
            // A failure only wastes space.
            let _ = self.storage.set_len(meta.refs.used_len());
        }
    }
}
