//! What an image is stored in.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A file, or what stands in for one in tests. All methods may be called by several threads at once.
pub trait Storage: Send + Sync {
    /// Fill `into` from there. Bytes past the end read as zeroes.
    ///
    /// # Errors
    /// Whatever the file says.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()>;

    /// Write all of it there.
    ///
    /// # Errors
    /// Whatever the file says; any part of it may have been written.
    fn write_at(&self, from: &[u8], at: u64) -> io::Result<()>;

    /// Put everything that was written, and the length, on stable storage.
    ///
    /// # Errors
    /// Some of it may be lost; nothing that was written since the last sync is to be relied on.
    fn sync(&self) -> io::Result<()>;

    /// Bytes of the file.
    ///
    /// # Errors
    /// Whatever the file says.
    fn len(&self) -> io::Result<u64>;

    /// Whether it holds nothing.
    ///
    /// # Errors
    /// Whatever the file says.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Make it longer, with zeroes, or shorter.
    ///
    /// # Errors
    /// It cannot have that length.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Give back the space of a range that nothing refers to any more. What it reads as afterwards does not matter.
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
        // A block device has no length of its own.
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
        // Where it is not supported the space stays taken, and is used again by the next clusters.
        let _ = fallocate(self, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len);
    }
}
