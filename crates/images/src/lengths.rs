//! Whether the files of an image are still as long as they were.
//!
//! A file of a format may end within its last cluster, so what lies past its end reads as zeroes: bytes of the
//! disk and entries of tables alike. Of a file that another process made shorter that would be what was written, read back
//! as zeroes, and new tables written over good ones. We make one shorter only when it is closed.
//!
//! Any thread of the image looks, before and after each request: one `fstat` a file. *Invariant:* what was found stays.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

#[derive(Debug)]
struct Watched {
    path: PathBuf,
    file: File,
    /// As long as it was at some time. A block device has no length.
    len: AtomicU64,
}

/// The files of an image, as long as they were.
#[derive(Debug)]
pub(crate) struct Lengths {
    files: Vec<Watched>,
    is_cut: AtomicBool,
}

impl Lengths {
    /// Of the files of these names, from now on.
    pub(crate) fn of<'a>(paths: impl Iterator<Item = &'a Path>) -> io::Result<Lengths> {
        let watch = |path: &Path| {
            let file = File::open(path)?;
            let len = AtomicU64::new(file.metadata()?.len());
            Ok(Watched { path: path.to_owned(), file, len })
        };
        let files = paths.map(watch).collect::<io::Result<_>>()?;
        Ok(Lengths { files, is_cut: AtomicBool::new(false) })
    }

    /// Whether one of them was found to be shorter.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut.load(Acquire)
    }

    /// Look.
    ///
    /// # Errors
    /// One of them is shorter, or was, or cannot be asked.
    pub(crate) fn check(&self) -> io::Result<()> {
        for Watched { path, file, len } in &self.files {
            // First, as others may find it longer meanwhile.
            let before = len.load(Acquire);
            let now = file.metadata()?.len();
            if now > before {
                len.fetch_max(now, Release);
            }
            if now < before && !self.is_cut.swap(true, Relaxed) {
                tracing::error!(
                    path = %path.display(),
                    "it was made shorter, from {before} to {now} bytes: nothing of this image can be trusted any more"
                );
            }
        }
        if self.is_cut() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}
