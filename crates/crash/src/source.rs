//! Random access to the bytes of a log and of a base.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that are read at any offset. What is beyond the end reads as zeroes.
pub trait Source: Send + Sync {
    /// Reads at an offset; fills the rest with zeroes at the end.
    ///
    /// # Errors
    /// Reading fails.
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
}

impl Source for File {
    fn read_at(&self, mut at: u64, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            match FileExt::read_at(self, into, at) {
                Ok(0) => {
                    into.fill(0);
                    return Ok(());
                }
                Ok(read) => {
                    at += read as u64;
                    into = &mut into[read..];
                }
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }
}

impl Source for Vec<u8> {
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(at).unwrap_or(usize::MAX).min(self.len());
        let len = into.len().min(self.len() - start);
        into[..len].copy_from_slice(&self[start..start + len]);
        into[len..].fill(0);
        Ok(())
    }
}

impl<S: Source + ?Sized> Source for std::sync::Arc<S> {
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        (**self).read_at(at, into)
    }
}
