//! Damaged images: whatever their content, opening and reading them ends with a result or an error.

use crate::pool::{Job, Returns};
use crate::{Backing, CreateOptions, Format, Image, ImageError, ImageSpec, create_qcow2, work};
use backends::Backend;
use block::{Bytes, Cookie, Flags, Op, Tag};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const LEN: u64 = 4 << 20;

fn create(path: &Path) {
    create_qcow2(path, &CreateOptions::new(LEN)).expect("an image");
}

fn open(path: PathBuf, read_only: bool) -> Result<Arc<Image>, ImageError> {
    Image::open(&ImageSpec {
        path,
        format: Format::Qcow2,
        detected: false,
        snapshot: None,
        read_only,
        share: true,
        backing: Backing::Beside,
        create: None,
    })
}

/// Runs a request; returns its result and memory.
fn run(image: &Image, op: Op, flags: Flags, offset: u64, memory: Vec<u8>, len: u64) -> (i64, Vec<u8>) {
    let back = Arc::new(Returns::new(Arc::new(|| {})));
    let io = Cookie { tag: Tag(0), generation: 0 };
    let mut job = Job { io, op, flags, offset: Bytes(offset), len: Bytes(len), memory, back };
    let result = work::run(&image.access, &mut job);
    (result, job.memory)
}

fn write(image: &Image, offset: u64, byte: u8, len: usize) -> i64 {
    run(image, Op::Write, Flags::empty(), offset, vec![byte; len], len as u64).0
}

#[test]
fn an_image_keeps_flushed_data() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.qcow2");
    create(&path);
    let image = open(path.clone(), false).expect("an image");
    assert_eq!((image.size(), image.read_only()), (Bytes(LEN), false));
    assert_eq!(write(&image, 65536, 7, 1024), 0);
    assert_eq!(run(&image, Op::Flush, Flags::empty(), 0, Vec::new(), 0).0, 0);
    drop(image);
    let image = open(path, true).expect("an image");
    assert_eq!(run(&image, Op::Read, Flags::empty(), 65536, vec![0; 1024], 1024), (0, vec![7; 1024]));
    assert_eq!(write(&image, 0, 1, 512), -i64::from(libc::EIO), "it is read-only");
    let (result, records) = run(&image, Op::Extents, Flags::empty(), 0, vec![1; 64], LEN);
    let extents: Vec<_> = records.chunks(16).map_while(block::Extent::from_record).collect();
    assert_eq!((result, extents[0].len, extents[0].zero), (0, Bytes(65536), true));
    assert!(!extents[1].zero && extents[2].zero);
    assert_eq!(extents.iter().map(|extent| extent.len.0).sum::<u64>(), LEN);
}

/// In a truncated image, allocated and unallocated clusters cannot be distinguished any more, so all reads
/// and writes fail.
#[test]
fn a_truncated_image_fails_all_requests() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.qcow2");
    create(&path);
    let image = open(path.clone(), false).expect("an image");
    assert_eq!(write(&image, 65536, 7, 1 << 20), 0);
    assert_eq!(run(&image, Op::Flush, Flags::empty(), 0, Vec::new(), 0).0, 0);
    let file = std::fs::File::options().write(true).open(&path).expect("an image");
    let len = file.metadata().expect("an image").len();
    file.set_len(len - (512 << 10)).expect("it can be cut");
    let left = std::fs::read(&path).expect("an image");
    let failed = -i64::from(libc::EIO);
    let at = 65536 + (900 << 10);
    assert_eq!(run(&image, Op::Read, Flags::empty(), at, vec![0; 4096], 4096).0, failed);
    assert_eq!(run(&image, Op::Extents, Flags::empty(), at, vec![0; 64], 4096).0, failed);
    assert_eq!((write(&image, at, 1, 512), write(&image, 2 << 20, 1, 512)), (failed, failed));
    assert_eq!(run(&image, Op::Discard, Flags::empty(), 0, Vec::new(), 65536).0, failed);
    assert!(image.describe().iter().any(|(name, what)| *name == "failed" && what.contains("shorter")));
    // Growing the file to its old size does not restore it.
    file.set_len(len).expect("it can be made longer");
    assert_eq!(run(&image, Op::Read, Flags::empty(), at, vec![0; 4096], 4096).0, failed);
    file.set_len(left.len() as u64).expect("it can be cut");
    assert!(std::fs::read(&path).expect("an image") == left, "nothing was written");
}

#[test]
fn an_image_with_a_truncated_backing_file_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, under) = (folder.path().join("disk.qcow2"), folder.path().join("under.raw"));
    std::fs::write(&under, vec![5; LEN as usize]).expect("a file");
    let backing = Some((b"under.raw".to_vec(), b"raw".to_vec()));
    create_qcow2(&path, &CreateOptions { backing, ..CreateOptions::new(LEN) }).expect("an image");
    let image = open(path, false).expect("an image");
    let read = || run(&image, Op::Read, Flags::empty(), 3 << 20, vec![0; 512], 512);
    assert_eq!(read(), (0, vec![5; 512]));
    std::fs::File::options()
        .write(true)
        .open(&under)
        .expect("a file")
        .set_len(1 << 20)
        .expect("it can be cut");
    assert_eq!(read().0, -i64::from(libc::EIO));
}

#[test]
fn no_damage_makes_an_image_hang_or_panic() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.qcow2");
    create(&path);
    {
        let image = open(path.clone(), false).expect("an image");
        assert_eq!(write(&image, 0, 7, 1 << 20), 0);
        assert_eq!(run(&image, Op::Flush, Flags::empty(), 0, Vec::new(), 0).0, 0);
    }
    let sound = std::fs::read(&path).expect("an image");
    let tables = sound.len().min(6 << 16);
    let (mut opened, mut read) = (0, 0);
    for seed in 0..300u64 {
        let mut generator = fastrand::Rng::with_seed(seed);
        let mut random = |limit: usize| generator.usize(..limit);
        let mut bytes = sound.clone();
        for _ in 0..1 + random(6) {
            // Change headers more often than tables, and the beginning of tables more often than their end.
            let at = match random(3) {
                0 => random(112),
                1 => random(tables / 65536) * 65536 + random(64),
                _ => random(tables),
            };
            bytes[at] = [0, 0xff, 0x80, 1, random(256) as u8][random(5)];
        }
        let damaged = folder.path().join(format!("damaged-{seed}"));
        std::fs::write(&damaged, &bytes).expect("a file");
        for read_only in [true, false] {
            let Ok(image) = open(damaged.clone(), read_only) else { continue };
            opened += 1;
            let size = image.size().0;
            for at in [0, 65536, size / 2 / 512 * 512, size - 512] {
                let len = 4096.min(size - at);
                let (result, _) = run(&image, Op::Read, Flags::empty(), at, vec![0; len as usize], len);
                read += usize::from(result == 0);
                let _ = run(&image, Op::Extents, Flags::empty(), at, vec![0; 64], len);
                if !read_only {
                    let _ = write(&image, at, 1, 512);
                    let _ = run(&image, Op::Discard, Flags::empty(), at, Vec::new(), len);
                }
            }
            let _ = run(&image, Op::Flush, Flags::empty(), 0, Vec::new(), 0);
        }
        std::fs::remove_file(&damaged).expect("it was there");
    }
    assert!(opened > 100 && read > 100, "{opened} opened, {read} reads: nothing was tried");
}
