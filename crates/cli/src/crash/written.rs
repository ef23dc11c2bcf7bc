//! What a check writes to its state: chunks in memory up to a limit, more in a temporary file that has no name.

use crash::CHUNK;
use rustix::fs::{FallocateFlags, fallocate};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Chunks in memory at most, of each job: 32 MiB.
pub(super) const IN_MEMORY_MAX: usize = 8192;

/// The chunks that a check wrote.
pub(super) struct Written {
    in_memory_max: usize,
    in_memory: HashMap<u64, Box<[u8]>>,
    /// The chunks in the file, each at its own offset, as bits; the file is sparse.
    in_file: Vec<u64>,
    file: Option<File>,
    dir: PathBuf,
}

impl Written {
    /// `dir`: where the file is created once it is needed.
    pub(super) fn new(dir: PathBuf, in_memory_max: usize) -> Written {
        Written { in_memory_max, in_memory: HashMap::new(), in_file: Vec::new(), file: None, dir }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.in_memory.clear();
        self.in_file.clear();
        self.file = None;
    }

    pub(super) fn contains(&self, chunk: u64) -> bool {
        let word = self.in_file.get((chunk / 64) as usize).copied().unwrap_or(0);
        word >> (chunk % 64) & 1 == 1 || self.in_memory.contains_key(&chunk)
    }

    /// Reads a part of a chunk that was written.
    pub(super) fn read(&self, chunk: u64, skip: usize, into: &mut [u8]) -> io::Result<()> {
        match (self.in_memory.get(&chunk), &self.file) {
            (Some(bytes), _) => into.copy_from_slice(&bytes[skip..skip + into.len()]),
            (None, Some(file)) => file.read_exact_at(into, chunk * CHUNK + skip as u64)?,
            (None, None) => into.fill(0),
        }
        Ok(())
    }

    /// Adds a whole chunk that was not written.
    pub(super) fn add(&mut self, chunk: u64, bytes: Box<[u8]>) -> io::Result<()> {
        if self.in_memory.len() < self.in_memory_max {
            self.in_memory.insert(chunk, bytes);
            return Ok(());
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(tempfile::tempfile_in(&self.dir)?),
        };
        if bytes.iter().any(|byte| *byte != 0) {
            file.write_all_at(&bytes, chunk * CHUNK)?;
        } else if file.metadata()?.len() < (chunk + 1) * CHUNK {
            file.set_len((chunk + 1) * CHUNK)?;
        }
        let word = (chunk / 64) as usize;
        if self.in_file.len() <= word {
            self.in_file.resize(word + 1, 0);
        }
        self.in_file[word] |= 1 << (chunk % 64);
        Ok(())
    }

    /// Replaces a part of a chunk that was written; zeroes if `data` is empty.
    pub(super) fn write(&mut self, chunk: u64, skip: usize, len: usize, data: &[u8]) -> io::Result<()> {
        let (at, is_clear) = (chunk * CHUNK + skip as u64, data.is_empty());
        let zeroes = [0; CHUNK as usize];
        let data = if data.is_empty() { &zeroes[..len] } else { data };
        match (self.in_memory.get_mut(&chunk), &self.file) {
            (Some(bytes), _) => bytes[skip..skip + len].copy_from_slice(data),
            (None, Some(file)) if is_clear => {
                // A hole, so that a check that clears a large device fills no disk.
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                if fallocate(file, flags, at, len as u64).is_err() {
                    file.write_all_at(data, at)?;
                }
            }
            (None, Some(file)) => file.write_all_at(data, at)?,
            (None, None) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_beyond_the_limit_are_in_a_file_and_read_the_same() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut written = Written::new(dir.path().to_owned(), 4);
        for chunk in 0..16_u64 {
            let bytes = vec![chunk as u8; CHUNK as usize].into_boxed_slice();
            written.add(chunk * 3, bytes).expect("room");
        }
        assert_eq!(written.in_memory.len(), 4);
        written.write(30, 100, 3, b"abc").expect("room");
        written.write(33, 0, 4096, &[]).expect("room");
        let mut bytes = [0; 4096];
        for chunk in 0..16_u64 {
            written.read(chunk * 3, 0, &mut bytes).expect("it is readable");
            let mut expected = vec![if chunk == 11 { 0 } else { chunk as u8 }; 4096];
            if chunk == 10 {
                expected[100..103].copy_from_slice(b"abc");
            }
            assert_eq!(bytes[..], expected[..], "{chunk}");
        }
        assert!(written.contains(45) && !written.contains(46));
        assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 0, "the file has no name");
        written.clear();
        assert!(!written.contains(0) && !written.contains(45));
    }
}
