//! Disk images in qcow2 and vmdk, as a backend. The formats are imago's, but for [`sparse`] vmdk; what is here brings them to
//! hardware queues.
//!
//! An [`Image`] is the shared part: the open image, the lock on its file, and a few threads. A node hands what was asked
//! of it to those threads, with memory of its own, and is nudged when they are done: so a reactor never waits for an image's
//! tables. Both halves take a lock and move memory for a batch of requests: an image pays for its format.
//!
//! What an image names beside itself is opened with care ([`open`]): backing files to be read, nothing else.
//!
//! *Invariant:* after a flush that failed, no flush and no write succeeds on this [`Image`]; once a request has
//! met one of its files made shorter by others, nothing does.

#![forbid(unsafe_code)]

mod beside;
mod detect;
pub mod fuzzing;
mod lengths;
mod node;
mod open;
mod pool;
mod sound;
mod sparse;
#[cfg(test)]
mod tests;
mod work;

pub use beside::Backing;
pub use detect::{Format, container_of, detect};
pub use node::ImageNode;
pub use open::ImageError;
pub use pool::Nudge;

use backends::{Backend, File};
use block::{Abilities, Bytes, Fact, Features, QueueLimits, Sectors, UNLIMITED_BYTES};
use imago::FormatAccess;
use lengths::Lengths;
use pool::Pool;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};

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
    /// Refuse writes, and open it so.
    pub read_only: bool,
    /// Let others write to it at the same time.
    pub share: bool,
    /// Which files it may name beside itself.
    pub backing: Backing,
}

/// An open image in its format.
pub(crate) enum Content {
    /// One of imago's.
    Imago(FormatAccess<imago::file::File>),
    /// A vmdk that imago does not read.
    Sparse(sparse::Sparse),
}

/// What the threads work on.
pub(crate) struct Access {
    /// Discards want it alone.
    image: RwLock<Content>,
    failed: AtomicBool,
    /// One flush at a time: the kernel reports a lost write to one sync of an open file only.
    flushing: Mutex<()>,
    lengths: Lengths,
    read_only: bool,
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
    /// Keeps the lock.
    file: Arc<File>,
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
            // A cluster, in nearly all images.
            discard_granularity: Bytes(if self.read_only { 0 } else { 65536 }),
            ..QueueLimits::default()
        };
        let checked = limits.validate();
        debug_assert_eq!(checked, Ok(()));
        limits
    }

    fn deleted(&self) -> Vec<PathBuf> {
        let own = self.file.deleted().into_iter();
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
        if self.access.failed.load(Ordering::Acquire) {
            facts.push(("failed", "a flush failed: writes are refused until it is opened anew".to_owned()));
        }
        facts
    }
}
