//! A writer that records which of its data must survive, for servers that die during writes.
//!
//! Several threads write blocks by direct I/O, each block with its number and a version in every sector. For
//! each block the ledger has the last acknowledged version, and those that failed after it, which may have
//! been written or not. The block must contain one of them, untorn.
//!
//! *Invariant:* a block belongs to one thread, so its versions are written in order.

use super::disk::Disk;
use crate::tools::{PATIENCE, until};
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of one write.
pub const BLOCK: usize = 4096;
const SECTOR: usize = 512;
/// Blocks of each thread.
const BLOCKS: u64 = 64;

/// A buffer aligned for direct I/O: its address is a multiple of its length.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new() -> Aligned {
        let bytes = vec![0; 2 * BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Aligned { bytes, start }
    }

    fn block(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + BLOCK]
    }
}

/// Writes sixteen bytes at the beginning of each sector, and a pattern of them to the rest.
fn stamp(block: &mut [u8], number: u64, version: u64) {
    for sector in block.chunks_exact_mut(SECTOR) {
        for (index, word) in sector.chunks_exact_mut(8).enumerate() {
            let value = if index % 2 == 0 { number } else { version };
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
}

/// Returns the version in a block, if it is this block's and untorn; a block that was never written has
/// version 0.
fn version_of(block: &[u8], number: u64) -> Result<u64, String> {
    if block.iter().all(|byte| *byte == 0) {
        return Ok(0);
    }
    let version = u64::from_le_bytes(block[8..16].try_into().expect("eight bytes"));
    let mut expected = vec![0; block.len()];
    stamp(&mut expected, number, version);
    match block.iter().zip(&expected).position(|(found, expected)| found != expected) {
        None => Ok(version),
        Some(at) => Err(format!("block {number}: byte {at} is not that of version {version}")),
    }
}

/// The possible versions of a block.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Promise {
    /// The last acknowledged version.
    kept: u64,
    /// The last submitted version; versions after `kept` failed, and may have been written.
    tried: u64,
}

impl Promise {
    fn allows(self, version: u64) -> bool {
        (self.kept..=self.tried).contains(&version)
    }
}

/// The possible versions of all blocks, by number.
#[derive(Default)]
pub struct Ledger {
    promises: Vec<Promise>,
    /// Writes that were acknowledged.
    pub acknowledged: u64,
    /// Writes that failed.
    pub failed: u64,
}

/// Threads that write.
pub struct Writer {
    threads: Vec<JoinHandle<Ledger>>,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
}

impl Writer {
    /// Starts this many threads on a device, each on blocks of its own from the start of it.
    pub fn start(disk: &Disk, threads: u64) -> Writer {
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let spawn = |thread| {
            let (path, stop, acknowledged) =
                (disk.node.clone(), Arc::clone(&stop), Arc::clone(&acknowledged));
            std::thread::spawn(move || write(&path, thread * BLOCKS, &stop, &acknowledged))
        };
        let threads = (0..threads).map(spawn).collect();
        Writer { threads, stop, acknowledged }
    }

    /// Returns the number of acknowledged writes so far.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Relaxed)
    }

    /// Waits for this many more acknowledged writes.
    ///
    /// # Panics
    /// If that takes minutes.
    #[track_caller]
    pub fn progress(&self, more: u64) {
        let goal = self.acknowledged() + more;
        let done = until(PATIENCE, || (self.acknowledged() >= goal).then_some(()));
        assert!(done.is_some(), "{} of {goal} writes were acknowledged: it hangs", self.acknowledged());
    }

    /// Ends the threads and returns their ledger.
    ///
    /// # Panics
    /// If one of them does not end.
    #[track_caller]
    pub fn finish(self) -> Ledger {
        self.stop.store(true, Relaxed);
        let mut ledger = Ledger::default();
        for thread in self.threads {
            let ended = until(PATIENCE, || thread.is_finished().then_some(()));
            assert!(ended.is_some(), "a write does not end");
            let part = thread.join().expect("the writer does not panic");
            ledger.promises.extend(part.promises);
            ledger.acknowledged += part.acknowledged;
            ledger.failed += part.failed;
        }
        ledger
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    const DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits() as i32;
    File::options().read(true).write(true).custom_flags(DIRECT).open(path)
}

fn write(path: &Path, first: u64, stop: &AtomicBool, acknowledged: &AtomicU64) -> Ledger {
    let promises = vec![Promise::default(); BLOCKS as usize];
    let mut ledger = Ledger { promises, ..Ledger::default() };
    let mut buffer = Aligned::new();
    let Ok(file) = open(path) else { return ledger };
    for version in 1.. {
        for index in 0..BLOCKS {
            if stop.load(Relaxed) {
                return ledger;
            }
            let number = first + index;
            let promise = &mut ledger.promises[index as usize];
            stamp(buffer.block(), number, version);
            promise.tried = version;
            match file.write_all_at(buffer.block(), number * BLOCK as u64) {
                Ok(()) => {
                    promise.kept = version;
                    ledger.acknowledged += 1;
                    acknowledged.fetch_add(1, Relaxed);
                }
                Err(_) => {
                    ledger.failed += 1;
                    // Yields the processor, which may be the only one.
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
    ledger
}

impl Ledger {
    /// Reads every block and compares it with the ledger.
    ///
    /// # Panics
    /// If one is wrong, or cannot be read.
    #[track_caller]
    pub fn check(&self, disk: &Disk) {
        let file = open(&disk.node).unwrap_or_else(|error| panic!("{}: {error}", disk.path()));
        let mut buffer = Aligned::new();
        for (number, promise) in (0_u64..).zip(&self.promises) {
            file.read_exact_at(buffer.block(), number * BLOCK as u64)
                .unwrap_or_else(|error| panic!("{}: block {number}: {error}", disk.path()));
            match version_of(buffer.block(), number) {
                Ok(version) => assert!(
                    promise.allows(version),
                    "block {number} holds version {version}: {} was acknowledged and {} tried",
                    promise.kept,
                    promise.tried
                ),
                Err(why) => panic!("{why}"),
            }
        }
    }
}

/// Writes to a device until the file `end` exists, then checks it; prints the number of acknowledged writes
/// meanwhile. No write may fail.
///
/// # Panics
/// If a write fails, or if a block does not have its last version.
pub fn write_until(device: &Path, end: &Path) {
    const THREADS: u64 = 4;
    let disk = Disk { node: device.to_owned() };
    let writer = Writer::start(&disk, THREADS);
    while !end.exists() {
        std::thread::sleep(Duration::from_millis(100));
        println!("{}", writer.acknowledged());
    }
    let ledger = writer.finish();
    assert_eq!(ledger.failed, 0, "writes failed");
    ledger.check(&disk);
    println!("{} writes, each block has its last version", ledger.acknowledged);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_contains_its_version() {
        let mut block = vec![0; BLOCK];
        assert_eq!(version_of(&block, 7), Ok(0));
        stamp(&mut block, 7, 9);
        assert_eq!(version_of(&block, 7), Ok(9));
        assert!(version_of(&block, 8).is_err(), "another block's");
    }

    #[test]
    fn a_torn_block_is_recognised() {
        let mut block = vec![0; BLOCK];
        stamp(&mut block, 7, 9);
        stamp(&mut block[SECTOR..], 7, 10);
        assert!(version_of(&block, 7).is_err());
    }

    #[test]
    fn a_failed_write_may_exist_and_an_acknowledged_one_must() {
        let promise = Promise { kept: 3, tried: 5 };
        assert!(promise.allows(3) && promise.allows(4) && promise.allows(5));
        assert!(!promise.allows(2), "an acknowledged write is lost");
        assert!(!promise.allows(6), "that was never written");
    }

    #[test]
    fn a_writers_blocks_have_their_acknowledged_versions() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk");
        File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a file");
        let disk = Disk { node: path.clone() };
        if open(&path).is_err() {
            crate::tools::skip("no direct I/O in the temporary folder");
            return;
        }
        let writer = Writer::start(&disk, 2);
        writer.progress(200);
        let ledger = writer.finish();
        assert!(ledger.acknowledged >= 200);
        ledger.check(&disk);
        std::fs::write(&path, vec![0; 1 << 20]).expect("a file");
        assert!(std::panic::catch_unwind(|| ledger.check(&disk)).is_err(), "all of it is lost");
    }
}
