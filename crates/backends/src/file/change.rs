//! Online changes of how an open file is served: direct or buffered, longer or shorter, another file.
//!
//! Each change creates another [`File`] for new nodes. The old one stays unchanged, so that the caller can
//! return to it. *Invariant:* nothing here is called while a request of the device is in flight, because a
//! switch between direct and buffered changes the flags of the open file, which both share.

use super::open::{device_size, length};
use super::{Direct, File, FileSpec, OpenError, sys};
use block::Bytes;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl File {
    /// Returns the same file with direct or buffered I/O. Written data is synced first, so that none of it is
    /// left in the page cache (as `LOOP_SET_DIRECT_IO`).
    ///
    /// # Errors
    /// [`OpenError`] if direct I/O is not possible with the device's block size, or if data could not be
    /// synced; the file is then served as before.
    pub fn with_direct(&self, direct: Direct) -> Result<Arc<File>, OpenError> {
        let spec = FileSpec { direct, create: None, ..self.spec.clone() };
        self.sync()?;
        // The properties depend on the open mode: read them in buffered mode.
        let changed = sys::set_direct(&self.handle, false)
            .map_err(|error| OpenError::call("switching", &spec, error))
            .and_then(|()| Self::examine(&spec, Arc::clone(&self.handle), self.locked, Some(self)));
        changed.inspect_err(|_| {
            // This succeeds, because the mode was possible before.
            let _ = self.reinstate();
        })
    }

    /// Syncs written data.
    ///
    /// # Errors
    /// Data could not be stored, now or by an earlier flush; writes fail from then on.
    pub fn sync(&self) -> Result<(), OpenError> {
        if self.shared.facts.read_only {
            return Ok(());
        }
        if self.shared.flush_failed() {
            let error = std::io::Error::from_raw_os_error(libc::EIO);
            return Err(OpenError::call("flushing", &self.spec, error));
        }
        self.handle.sync_data().map_err(|error| {
            // The kernel will not report the loss again.
            self.shared.fail_flushes();
            OpenError::call("flushing", &self.spec, error)
        })
    }

    /// Switches the open file back to this [`File`]'s mode, direct or buffered, which another `File` may
    /// have changed.
    ///
    /// # Errors
    /// The file system refuses, although the mode was possible before.
    pub fn reinstate(&self) -> std::io::Result<()> {
        sys::set_direct(&self.handle, self.shared.facts.direct.is_some())
    }

    /// Returns the device size that results from the current length of the file (as `LOOP_SET_CAPACITY`).
    ///
    /// # Errors
    /// The length of the file cannot be determined.
    pub fn measured(&self) -> Result<Bytes, OpenError> {
        let length = length(&self.handle).map_err(|error| OpenError::call("measuring", &self.spec, error))?;
        Ok(device_size(length, &self.spec, self.shared.facts.block))
    }

    /// Returns the same file with its current length.
    ///
    /// # Errors
    /// The length of the file cannot be determined.
    pub fn remeasured(&self) -> Result<Arc<File>, OpenError> {
        Ok(self.copy_with(self.spec.clone(), self.measured()?))
    }

    /// Returns the same file with a device of this size: changes the limit, if there is one, and extends a
    /// regular file if necessary. To shrink the file, call [`cut`](File::cut) when its end is no longer
    /// used.
    ///
    /// # Errors
    /// [`OpenError`]: nothing has changed.
    pub fn resized(&self, size: Bytes) -> Result<Arc<File>, OpenError> {
        let facts = &self.shared.facts;
        let limit = self.spec.sizelimit.map(|_| size);
        let spec = FileSpec { sizelimit: limit, create: None, ..self.spec.clone() };
        let refused = |why: String| Err(OpenError::refused(&spec, why));
        if !size.is_aligned(facts.block.into()) || size == Bytes::ZERO {
            return refused(format!(
                "a device of blocks of {} cannot hold {size} (give a multiple)",
                facts.block
            ));
        }
        let Some(end) = facts.start.0.checked_add(size.0).filter(|&end| end <= i64::MAX as u64) else {
            return refused(format!("no file holds {size} (give less)"));
        };
        let measured = length(&self.handle).map_err(|error| OpenError::call("measuring", &spec, error))?;
        // Bytes beyond a limit do not belong to the device, so they are kept.
        let fits = end == measured || end < measured && limit.is_some();
        if !fits {
            if facts.block_device {
                let why = format!("it is a block device of {}, which cannot be resized", Bytes(measured));
                return refused(format!("{why} (give a size that fits, with sizelimit)"));
            }
            if facts.read_only {
                return refused("it is read-only (set the file's size, then resize without one)".to_owned());
            }
            if end > measured {
                self.handle.set_len(end).map_err(|error| OpenError::call("sizing", &spec, error))?;
            }
        }
        Ok(self.copy_with(spec, size))
    }

    /// Truncates the file at the device's end, if the device covers the whole file.
    ///
    /// # Errors
    /// The file cannot be truncated.
    pub fn cut(&self) -> Result<(), OpenError> {
        let facts = &self.shared.facts;
        let end = facts.start.0 + facts.size.0;
        let call = |doing| move |error| OpenError::call(doing, &self.spec, error);
        let keeps = facts.block_device || facts.read_only || self.spec.sizelimit.is_some();
        if keeps || length(&self.handle).map_err(call("measuring"))? < end + u64::from(facts.block) {
            return Ok(());
        }
        self.handle.set_len(end).map_err(call("sizing"))
    }

    /// Returns another file of the same size in place of this one, both read-only (as `LOOP_CHANGE_FD`).
    ///
    /// # Errors
    /// [`OpenError`]: the other file cannot be opened, or does not fit.
    pub fn replaced(&self, path: std::path::PathBuf) -> Result<Arc<File>, OpenError> {
        let facts = &self.shared.facts;
        if !facts.read_only {
            let why =
                "the other file would lack data written to it (only a device with ro can change its file)";
            return Err(OpenError::refused(&self.spec, why));
        }
        let spec = FileSpec { path, create: None, ..self.spec.clone() };
        let file = File::open(&FileSpec { block: Some(facts.block), ..spec.clone() })?;
        let other = file.shared.facts;
        if other.size != facts.size || other.block != facts.block {
            let why = format!(
                "it would be a device of {} in blocks of {} instead of {} in blocks of {} (give a file of equal size)",
                other.size, other.block, facts.size, facts.block
            );
            return Err(OpenError::refused(&spec, why));
        }
        Ok(file)
    }

    /// Opens the same file, which is open for reading, a second time for writing. No other program may open
    /// it for writing in between: until [`deny_writers`](File::deny_writers), the locks of the second open
    /// file exclude writers instead of those of this one.
    ///
    /// # Errors
    /// [`OpenError`]: another program uses the file too, or it must not be written.
    pub fn reopened_for_writing(&self) -> Result<Arc<File>, OpenError> {
        super::lock::allow_writers(&self.handle, self.locked)
            .map_err(|error| OpenError::call("unlocking", &self.spec, error))?;
        let spec = FileSpec {
            ro: false,
            direct: Direct::Off,
            block: Some(self.shared.facts.block),
            create: None,
            ..self.spec.clone()
        };
        let opened = File::open(&spec)?;
        if opened.identity()? != self.identity()? {
            let why = "its path names another file now (restore the file that is served)";
            return Err(OpenError::refused(&spec, why.to_owned()));
        }
        Ok(opened)
    }

    /// Excludes other writers again. If that fails, `show` reports it from now on.
    ///
    /// # Errors
    /// Another program has locked the bytes.
    pub fn deny_writers(&self) -> std::io::Result<()> {
        let denied = super::lock::deny_writers(&self.handle, self.locked);
        self.shared.lets_writers.store(denied.is_err(), Ordering::Relaxed);
        denied
    }

    fn identity(&self) -> Result<(u64, u64), OpenError> {
        use std::os::unix::fs::MetadataExt;
        let meta =
            self.handle.metadata().map_err(|error| OpenError::call("looking at", &self.spec, error))?;
        Ok((meta.dev(), meta.ino()))
    }

    fn copy_with(&self, spec: FileSpec, size: Bytes) -> Arc<File> {
        let facts = super::Facts { size, ..self.shared.facts };
        Arc::new(File {
            handle: Arc::clone(&self.handle),
            sync_handle: self.sync_handle.clone(),
            spec,
            shared: self.shared.changed(facts),
            file_system: self.file_system,
            locked: self.locked,
            why: self.why.clone(),
            limits: self.limits.clone(),
            discards: self.discards,
            rotational: self.rotational,
        })
    }
}
