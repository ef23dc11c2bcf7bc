//! Changing what an open file is served as: direct or buffered, longer or shorter, another file.
//!
//! Each change makes another [`File`], for new nodes; the one there is stays as it was, so that whoever
//! changes can go back to it. *Invariant:* nothing here is called while a request of the device is under
//! way: between direct and buffered, the open file that both share is switched.

use super::open::{device_size, length};
use super::{Direct, File, FileSpec, OpenError, sys};
use block::Bytes;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl File {
    /// The same file read and written past the page cache, or through it. What was written before is on
    /// stable storage first, so that none of it is left in the cache (as `LOOP_SET_DIRECT_IO`).
    ///
    /// # Errors
    /// [`OpenError`] when direct I/O is not possible with the blocks that the device has, or when what was
    /// written could not be stored; the file is served as before then.
    pub fn with_direct(&self, direct: Direct) -> Result<Arc<File>, OpenError> {
        let spec = FileSpec { direct, create: false, size: None, ..self.spec.clone() };
        self.sync()?;
        // What can be asked of a file depends on how it is open: it is looked at as one that is buffered.
        let changed = sys::set_direct(&self.handle, false)
            .map_err(|error| OpenError::call("switching", &spec, error))
            .and_then(|()| Self::examine(&spec, Arc::clone(&self.handle), self.locked, Some(self)));
        changed.inspect_err(|_| {
            // It could before.
            let _ = self.reinstate();
        })
    }

    /// Put what was written onto stable storage.
    ///
    /// # Errors
    /// What could not be stored, now or by a flush before: writes fail from now on.
    pub fn sync(&self) -> Result<(), OpenError> {
        if self.shared.facts.read_only {
            return Ok(());
        }
        if self.shared.flush_failed() {
            let error = std::io::Error::from_raw_os_error(libc::EIO);
            return Err(OpenError::call("flushing", &self.spec, error));
        }
        self.handle.sync_data().map_err(|error| {
            // The kernel will not say so twice.
            self.shared.fail_flushes();
            OpenError::call("flushing", &self.spec, error)
        })
    }

    /// Have the open file be direct or buffered as this one says: what shares it may have changed that.
    ///
    /// # Errors
    /// The file system cannot, although it could before.
    pub fn reinstate(&self) -> std::io::Result<()> {
        sys::set_direct(&self.handle, self.shared.facts.direct.is_some())
    }

    /// How long the device would be by the length that the file has now (as `LOOP_SET_CAPACITY`).
    ///
    /// # Errors
    /// The file cannot be measured.
    pub fn measured(&self) -> Result<Bytes, OpenError> {
        let length = length(&self.handle).map_err(|error| OpenError::call("measuring", &self.spec, error))?;
        Ok(device_size(length, &self.spec, self.shared.facts.block))
    }

    /// The same file with the length that it has now.
    ///
    /// # Errors
    /// The file cannot be measured.
    pub fn remeasured(&self) -> Result<Arc<File>, OpenError> {
        Ok(self.copy_with(self.spec.clone(), self.measured()?))
    }

    /// The device made so long: a limit is moved, and a regular file made longer if need be. What shrinks is
    /// [`cut`](File::cut) when nobody uses the end any more.
    ///
    /// # Errors
    /// [`OpenError`]: nothing has changed.
    pub fn resized(&self, size: Bytes) -> Result<Arc<File>, OpenError> {
        let facts = &self.shared.facts;
        let limit = self.spec.sizelimit.map(|_| size);
        let spec = FileSpec { sizelimit: limit, create: false, size: None, ..self.spec.clone() };
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
        // What lies behind a limit is not ours to cut off.
        let fits = end == measured || end < measured && limit.is_some();
        if !fits {
            if facts.block_device {
                let why = format!("it is a block device of {}, which has the size it has", Bytes(measured));
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

    /// Give back what lies behind the device's end, if all of the file is the device's.
    ///
    /// # Errors
    /// The file cannot be made shorter.
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

    /// Another file in the place of this one, of the same size, both read-only (as `LOOP_CHANGE_FD`).
    ///
    /// # Errors
    /// [`OpenError`]: the other file cannot be opened, or cannot take the place.
    pub fn replaced(&self, path: std::path::PathBuf) -> Result<Arc<File>, OpenError> {
        let facts = &self.shared.facts;
        if !facts.read_only {
            let why = "what was written to it would not be in the other file (only a device with ro changes its file)";
            return Err(OpenError::refused(&self.spec, why));
        }
        let spec = FileSpec { path, create: false, size: None, ..self.spec.clone() };
        let file = File::open(&FileSpec { block: Some(facts.block), ..spec.clone() })?;
        let other = file.shared.facts;
        if other.size != facts.size || other.block != facts.block {
            let why = format!(
                "its device would hold {} in blocks of {}, and this one holds {} in blocks of {} (give a file of the same size)",
                other.size, other.block, facts.size, facts.block
            );
            return Err(OpenError::refused(&spec, why));
        }
        Ok(file)
    }

    /// The same file, which is open to be read, opened a second time to be written. No other program may be let in
    /// between: until [`deny_writers`](File::deny_writers) this one's readers keep writers off no longer, and the
    /// second one's lock does.
    ///
    /// # Errors
    /// [`OpenError`]: it is in use by someone else too, or may not be written.
    pub fn reopened_for_writing(&self) -> Result<Arc<File>, OpenError> {
        super::lock::allow_writers(&self.handle, self.locked)
            .map_err(|error| OpenError::call("unlocking", &self.spec, error))?;
        let spec = FileSpec {
            read_only: false,
            direct: Direct::Off,
            block: Some(self.shared.facts.block),
            create: false,
            size: None,
            ..self.spec.clone()
        };
        let opened = File::open(&spec)?;
        if opened.identity()? != self.identity()? {
            let why = "another file has its name by now (give it back the one that is served)";
            return Err(OpenError::refused(&spec, why.to_owned()));
        }
        Ok(opened)
    }

    /// Keep other writers off again. Where that fails, `show` says so from here on.
    ///
    /// # Errors
    /// Somebody locks the bytes that stand for it.
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
            error_handle: self.error_handle.clone(),
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
