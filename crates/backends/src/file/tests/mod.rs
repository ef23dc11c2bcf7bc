//! Tests on real files, with seeded faults where a real file system has none.

mod change;
mod clear;
mod direct;
mod full;
mod head;
mod io;
mod open;

use super::*;
use crate::testing::{Fault, Harness};
use block::{Bytes, Flags, Op, Status};
use queue::{FileId, FileOp};
use std::sync::Arc;
use tempfile::TempDir;

/// Returns the facts of a regular, buffered file of 1 MiB on a disk.
pub(super) fn buffered_facts() -> Facts {
    Facts {
        start: Bytes::ZERO,
        size: Bytes::mib(1),
        block: 512,
        read_only: false,
        direct: None,
        memory: false,
        nowait_reads: true,
        nowait_writes: false,
        timed_writes: true,
        block_device: false,
        head: 0,
    }
}

/// Returns whether an operation is a read, for faults.
fn is_read(op: &FileOp) -> bool {
    matches!(op, FileOp::Read { .. })
}

fn is_write(op: &FileOp) -> bool {
    matches!(op, FileOp::Write { .. })
}

fn is_sync(op: &FileOp) -> bool {
    matches!(op, FileOp::Sync)
}

fn is_allocate(op: &FileOp) -> bool {
    matches!(op, FileOp::Allocate { .. })
}

/// Creates a folder with a file of 1 MiB that contains a counting byte pattern.
fn image() -> (TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, content(0, 1 << 20)).unwrap();
    (dir, path)
}

fn content(from: u64, len: u64) -> Vec<u8> {
    (from..from + len).map(|at| (at % 251) as u8).collect()
}

/// Creates a queue on a file with these facts, regardless of the real file system.
fn with_facts(path: &std::path::Path, facts: Facts) -> (Arc<FileState>, Harness) {
    let shared = FileState::new(facts);
    let node = FileNode::new(Arc::clone(&shared), FileId(0)).with_sync_file(FileId(1));
    let handle = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let again = std::fs::File::open(path).unwrap();
    (shared, Harness::with_files(Box::new(node), vec![handle, again]))
}

/// Creates a queue on a file with the facts found when it was opened.
fn opened(file: &File) -> Harness {
    use std::os::fd::AsFd;
    let handle = file.as_fd().try_clone_to_owned().unwrap();
    Harness::with_files(Box::new(file.node(FileId(0))), vec![handle.into()])
}
