//! Disk images in qcow2 and vmdk, as a backend: brings the crate `qcow2`, imago's flat vmdk and [`sparse`] vmdk to hardware
//! queues.
//!
//! An [`Image`] is the shared part: the open image, the lock on its file, and a few threads. A node hands what was asked
//! of it to those threads, with memory of its own, and is nudged when they are done: so a reactor never waits for an image's
//! tables. Both halves take a lock and move memory for a batch of requests: an image pays for its format.
//!
//! What an image names beside itself is opened with care ([`open`]): backing files to be read, nothing else.
//!
//! *Invariant:* after a sync that failed, no flush and no write succeeds on this [`Image`]; once a request has
//! met one of its files made shorter by others, nothing does.

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
pub use pool::Nudge;
pub use qcow2::CreateOptions;

use backends::{Backend, File};
use block::{Abilities, Bytes, Fact, Features, QueueLimits, Sectors, UNLIMITED_BYTES};
use imago::FormatAccess;
use lengths::Lengths;
use pool::Pool;
use std::path::PathBuf;
use std::sync::Arc;

/// The most in one request: what a client may ask for at once.
const REQUEST_MAX: Bytes = Bytes::mib(32);
/// The most in one discard or write zeroes: so that one does not keep a thread for long.
const CLEAR_MAX: Bytes = Bytes::gib(1);

/// What is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageSpec {
    /// The image.
    pub path: PathBuf,
    /// Its format; not [`Format::Raw`], which is a file.
    pub format: Format,
    /// The format was detected, as the user asked for with `format=probe`.
    pub detected: bool,
    /// Serve the disk as it was when this internal snapshot of a qcow2 image was made, by its id or name.
    pub snapshot: Option<String>,
    /// Refuse writes, and open it so.
    pub read_only: bool,
    /// Let others write to it at the same time.
    pub share: bool,
    /// Which files it may name beside itself.
    pub backing: Backing,
    /// Create it, if its file is missing: only with [`Format::Qcow2`].
    pub create: Option<Creation>,
}

/// An open image in its format.
pub(crate) enum Content {
    /// The only one that is written.
    Qcow2(Box<qcow2::Disk>),
    /// A vmdk with extents beside it.
    Imago(FormatAccess<imago::file::File>),
    /// A vmdk that imago does not read.
    Sparse(sparse::Sparse),
}

/// What the threads work on.
pub(crate) struct Access {
    content: Content,
    lengths: Lengths,
    read_only: bool,
    /// Keeps the lock until the content is closed.
    file: Arc<File>,
}

/// An open image: the part that all queues share.
pub struct Image {
    spec: ImageSpec,
    size: Bytes,
    read_only: bool,
    /// Files under it, nearest first.
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
    /// The node of one hardware queue, which takes a turn when `nudge` is called.
    pub fn node(&self, nudge: Nudge) -> ImageNode {
        ImageNode::new(self.pool.clone(), nudge)
    }

    /// What was asked for.
    pub fn spec(&self) -> &ImageSpec {
        &self.spec
    }
}

impl Drop for Image {
    /// Most of what is left is written here, and not where a queue may be the last to drop the pool.
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
            features: if self.read_only { Features::NONE } else { Features::WRITE_CACHE.with(Features::FUA) },
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
        // Of what is under it only the names are known here.
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
