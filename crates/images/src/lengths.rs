//! Detects that a file of an image was truncated while the image is open.
//!
//! A file of an image format may end within its last cluster, so reads past its end return zeroes, for data
//! and table entries alike. If another process truncated the file, written data would read as zeroes, and
//! new tables would overwrite valid ones. This process truncates files only when it closes the image.
//!
//! Every thread of the image checks before and after each request: one `fstat` per file. *Invariant:* a
//! truncation, once detected, is reported forever.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

#[derive(Debug)]
struct Watched {
    path: PathBuf,
    file: File,
    /// The largest size seen. 0 for block devices.
    len: AtomicU64,
}

/// The files of an image, with the largest sizes seen.
#[derive(Debug)]
pub(crate) struct Lengths {
    files: Vec<Watched>,
    is_cut: AtomicBool,
}

impl Lengths {
    /// Watches these files from now on.
    pub(crate) fn of<'a>(paths: impl Iterator<Item = &'a Path>) -> io::Result<Lengths> {
        let watch = |path: &Path| {
            let file = File::open(path)?;
            let len = AtomicU64::new(file.metadata()?.len());
            Ok(Watched { path: path.to_owned(), file, len })
        };
        let files = paths.map(watch).collect::<io::Result<_>>()?;
        Ok(Lengths { files, is_cut: AtomicBool::new(false) })
    }

    /// Returns whether a file was found to be truncated.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut.load(Acquire)
    }

    /// Checks the sizes of all files.
    ///
    /// # Errors
    /// A file is or was shorter, or its size cannot be read.
    pub(crate) fn check(&self) -> io::Result<()> {
        for Watched { path, file, len } in &self.files {
            // The recorded size is loaded first: other threads may record a larger one meanwhile.
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
