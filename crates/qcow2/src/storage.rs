//! The storage on which an image is kept.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A file, or a replacement for it in tests. All methods may be called by several threads at once.
pub trait Storage: Send + Sync {
    /// Reads into `into` from `at`. Bytes past the end read as zeroes.
    ///
    /// # Errors
    /// The file cannot be read.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()>;

    /// Writes all of `from` at `at`.
    ///
    /// # Errors
    /// The file cannot be written; any part may have been written.
    fn write_at(&self, from: &[u8], at: u64) -> io::Result<()>;

    /// Puts everything written, and the length, on stable storage.
    ///
    /// # Errors
    /// Some data may be lost: nothing written since the last sync can be relied on.
    fn sync(&self) -> io::Result<()>;

    /// Returns the length of the file in bytes.
    ///
    /// # Errors
    /// The length cannot be determined.
    fn len(&self) -> io::Result<u64>;

    /// Returns whether the length is 0.
    ///
    /// # Errors
    /// The length cannot be determined.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Extends the file with zeroes, or truncates it.
    ///
    /// # Errors
    /// The file cannot have this length.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Deallocates a range that nothing refers to any more. Its content afterwards is undefined.
    fn punch(&self, at: u64, len: u64);
}

impl Storage for File {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            match FileExt::read_at(self, &mut into[done..], at + done as u64) {
                Ok(0) => {
                    into[done..].fill(0);
                    break;
                }
                Ok(len) => done += len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_at(&self, from: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(from, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        // The metadata of a block device does not contain its length.
        io::Seek::seek(&mut &*self, io::SeekFrom::End(0))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if self.metadata()?.is_file() {
            return File::set_len(self, len);
        }
        if len <= Storage::len(self)? { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
    }

    fn punch(&self, at: u64, len: u64) {
        use rustix::fs::{FallocateFlags, fallocate};
        // If punching holes is not supported, the space stays allocated, and later clusters reuse it.
        let _ = fallocate(self, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len);
    }
}
