//! Disk images in qcow2 and vmdk as a backend: connects the crate `qcow2`, imago's flat vmdk and [`sparse`]
//! vmdk to hardware queues.
//!
//! An [`Image`] is shared by all queues: the open image, the lock on its file, and a few threads. A node
//! copies requests to its own memory and passes them to those threads, which notify it when they have
//! completed them. So a reactor never waits for an image's tables. The price of the formats is that both
//! sides take a lock and copy data for a batch of requests.
//!
//! Files to which an image refers are checked before they are opened ([`open`]): backing files, for reading
//! only.
//!
//! *Invariant:* after a failed sync, no flush and no write succeeds on this [`Image`]; once a request has
//! detected that one of its files was truncated, no request does.

#![forbid(unsafe_code)]

mod beside;
mod create;
mod detect;
pub mod fuzzing;
mod lengths;
mod node;
mod open;
mod pool;
mod sparse;
#[cfg(test)]
mod tests;
mod work;

pub use beside::Backing;
pub use create::{Creation, create_qcow2};
pub use detect::{Format, detect, why_not_raw};
pub use node::ImageNode;
pub use open::ImageError;
pub use qcow2::CreateOptions;

use backends::{Backend, File};
use block::{Abilities, Bytes, Fact, Features, QueueLimits, Sectors, UNLIMITED_BYTES};
use imago::FormatAccess;
use lengths::Lengths;
use pool::Pool;
use std::path::PathBuf;
use std::sync::Arc;

/// Largest request: a client may request this much at once.
const REQUEST_MAX: Bytes = Bytes::mib(32);
/// Largest discard or write-zeroes request, so that a single one does not occupy a thread for long.
const CLEAR_MAX: Bytes = Bytes::gib(1);

/// Parameters of an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageSpec {
    /// Path of the image.
    pub path: PathBuf,
    /// The format. [`Format::Raw`] is not permitted, as a raw disk is served by the file backend.
    pub format: Format,
    /// Whether the format was detected, because of `format=probe`.
    pub detected: bool,
    /// Internal snapshot of a qcow2 image to serve, by its ID or name.
    pub snapshot: Option<String>,
    /// Whether writes are refused and the file is opened read-only.
    pub read_only: bool,
    /// Whether other writers are allowed at the same time.
    pub share: bool,
    /// Files to which the image may refer.
    pub backing: Backing,
    /// Properties of an image to create if its file is missing; only for [`Format::Qcow2`].
    pub create: Option<Creation>,
}

/// An open image by format.
pub(crate) enum Content {
    /// qcow2, the only writable one.
    Qcow2(Box<qcow2::Disk>),
    /// A vmdk with extents in other files.
    Imago(FormatAccess<imago::file::File>),
    /// A vmdk that imago does not support.
    Sparse(sparse::Sparse),
}

/// State shared by the threads.
pub(crate) struct Access {
    content: Content,
    lengths: Lengths,
    read_only: bool,
    /// The file whose lock is held until the content is closed.
    file: Arc<File>,
}

/// An open image: the part shared by all queues.
pub struct Image {
    spec: ImageSpec,
    size: Bytes,
    read_only: bool,
    /// Backing files, nearest first.
    backing: Vec<PathBuf>,
    access: Arc<Access>,
    pool: Pool,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("spec", &self.spec).field("size", &self.size).finish_non_exhaustive()
    }
}

impl Image {
    /// Creates the node of one hardware queue. `waker` makes the queue run.
    pub fn node(&self, waker: queue::QueueWaker) -> ImageNode {
        ImageNode::new(self.pool.clone(), waker)
    }

    /// The parameters of the image.
    pub fn spec(&self) -> &ImageSpec {
        &self.spec
    }
}

impl Drop for Image {
    /// Writes most of the cached tables now, rather than in a queue that may be the last owner of the pool.
    fn drop(&mut self) {
        self.access.write_back();
    }
}

impl Backend for Image {
    fn size(&self) -> Bytes {
        self.size
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn features(&self) -> Abilities {
        let writable = !self.read_only;
        Abilities {
            flush: true,
            fua: writable,
            discard: writable,
            write_zeroes: writable,
            fast_zero: false,
            rotational: false,
        }
    }

    fn limits(&self) -> QueueLimits {
        let mut limits = QueueLimits {
            features: if self.read_only {
                Features::empty()
            } else {
                Features::WRITE_CACHE.union(Features::FUA)
            },
            physical_block_size: Bytes(4096),
            max_hw_sectors: REQUEST_MAX.sectors(),
            max_user_sectors: REQUEST_MAX.sectors(),
            max_segments: u16::MAX,
            max_segment_size: UNLIMITED_BYTES,
            dma_alignment: 3,
            max_write_zeroes_sectors: if self.read_only { Sectors(0) } else { CLEAR_MAX.sectors() },
            max_hw_discard_sectors: if self.read_only { Sectors(0) } else { CLEAR_MAX.sectors() },
            discard_granularity: if self.read_only { Bytes::ZERO } else { self.access.cluster_size() },
            ..QueueLimits::default()
        };
        let checked = limits.validate();
        debug_assert_eq!(checked, Ok(()));
        limits
    }

    fn deleted(&self) -> Vec<PathBuf> {
        let own = self.access.file.deleted().into_iter();
        // Only the paths of backing files are known here.
        own.chain(self.backing.iter().filter(|path| matches!(path.try_exists(), Ok(false))).cloned())
            .collect()
    }

    fn describe(&self) -> Vec<Fact> {
        let how = if self.spec.detected { "detected, as format=probe asks" } else { "as given" };
        let mut facts = vec![
            ("backend", "image".to_owned()),
            ("path", self.spec.path.display().to_string()),
            ("format", format!("{} ({how})", self.spec.format)),
            ("size", self.size.to_string()),
            ("served", format!("by {} threads", pool::THREADS)),
        ];
        if let Some(snapshot) = &self.spec.snapshot {
            facts.push(("snapshot", snapshot.clone()));
        }
        if !self.backing.is_empty() {
            let backing: Vec<_> = self.backing.iter().map(|path| path.display().to_string()).collect();
            facts.push(("over", backing.join(", ")));
        }
        if self.read_only {
            facts.push(("read-only", "yes".to_owned()));
        }
        if self.access.lengths.is_cut() {
            facts.push((
                "failed",
                "one of its files was made shorter: it is refused until it is opened anew".to_owned(),
            ));
        }
        if self.access.has_failed() {
            facts.push(("failed", "a flush failed: writes are refused until it is opened anew".to_owned()));
        }
        facts
    }
}
