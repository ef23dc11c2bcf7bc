//! Body of the fuzz target: opening and reading any image ends with a result or an error, without a panic or
//! an endless loop.
//!
//! The first byte of the input selects its kind. Even: changes to a valid qcow2 image with clusters of 512
//! bytes, so that all its tables are close together: records of an offset (two bytes), a length (one byte)
//! and as many bytes. Odd: a vmdk, with a file `flat` beside it that its extents may refer to.
//!
//! Images are opened by name, so each input has a directory, in memory if possible.

use crate::pool::{Job, Returns};
use crate::{Backing, CreateOptions, Format, Image, ImageSpec, create_qcow2, work};
use backends::Backend;
use block::{Bytes, Cookie, Flags, Op, Tag};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// Size of the valid image's disk.
const LEN: u64 = 64 << 10;
/// Offsets that an input may write to: past every table of the valid image.
const REACH: usize = 96 << 10;

/// A directory for one input, removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let shm = Path::new("/dev/shm");
        let base = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let name = format!("blockyard-fuzz-image.{}.{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let folder = Folder(base.join(name));
        std::fs::create_dir_all(&folder.0).expect("a folder for images");
        std::fs::write(folder.0.join("flat"), vec![0x5a; 8192]).expect("an extent");
        folder
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A valid image with data.
fn valid_image() -> &'static [u8] {
    static SOUND: OnceLock<Vec<u8>> = OnceLock::new();
    SOUND.get_or_init(|| {
        let folder = Folder::new();
        let path = folder.0.join("valid_image");
        let options = CreateOptions { cluster_size: 512, ..CreateOptions::new(LEN) };
        create_qcow2(&path, &options).expect("an image");
        let image = open(path.clone(), Format::Qcow2, false).expect("it is valid_image");
        for at in [0, 512 * 9, LEN - 512] {
            assert_eq!(run(&image, Op::Write, at, 512), 0);
        }
        assert_eq!(run(&image, Op::Flush, 0, 0), 0);
        drop(image);
        std::fs::read(&path).expect("an image")
    })
}

fn open(path: PathBuf, format: Format, read_only: bool) -> Option<Arc<Image>> {
    Image::open(&ImageSpec {
        path,
        format,
        detected: false,
        snapshot: None,
        read_only,
        share: true,
        backing: Backing::Beside,
        create: None,
    })
    .ok()
}

fn run(image: &Image, op: Op, offset: u64, len: u64) -> i64 {
    let back = Arc::new(Returns::new(Arc::new(|| {})));
    let io = Cookie { tag: Tag(0), generation: 0 };
    let memory = match op {
        Op::Read | Op::Write => vec![7; len as usize],
        Op::Extents => vec![0; 256],
        _ => Vec::new(),
    };
    let (offset, len) = (Bytes(offset), Bytes(len));
    work::run(&image.access, &mut Job { io, op, flags: Flags::empty(), offset, len, memory, back })
}

/// Opens an image, reads it at several offsets, and if it is writable, writes to it.
pub fn image(input: &[u8]) {
    check(input);
}

/// Checks an image; returns the number of successful reads, or `None` if it was not opened.
fn check(input: &[u8]) -> Option<usize> {
    let (&kind, mut rest) = input.split_first()?;
    let folder = Folder::new();
    let path = folder.0.join("image");
    let format = if kind % 2 == 0 { Format::Qcow2 } else { Format::Vmdk };
    let bytes = if format == Format::Vmdk {
        rest.to_vec()
    } else {
        let mut bytes = valid_image().to_vec();
        while let Some((&[low, high, len], tail)) = rest.split_first_chunk::<3>() {
            let content = &tail[..usize::from(len).min(tail.len())];
            rest = &tail[content.len()..];
            let at = usize::from(u16::from_le_bytes([low, high])) % REACH;
            bytes.resize(bytes.len().max(at + content.len()), 0);
            bytes[at..at + content.len()].copy_from_slice(content);
        }
        bytes
    };
    std::fs::write(&path, &bytes).expect("an image");
    let read_only = kind & 2 != 0;
    let image = open(path, format, read_only)?;
    let size = image.size().0;
    let mut good = 0;
    for at in [0, 512 * 9, 4096, size / 2 / 512 * 512, size - 512] {
        let at = at.min(size - 512);
        let len = 2048.min(size - at);
        good += usize::from(run(&image, Op::Read, at, len) == 0);
        run(&image, Op::Extents, at, len);
        if !image.read_only() {
            run(&image, Op::Write, at, 512);
            run(&image, Op::WriteZeroes, at, len);
            run(&image, Op::Discard, at, len);
        }
    }
    run(&image, Op::Flush, 0, 0);
    Some(good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_images_are_read() {
        assert_eq!(check(&[0]), Some(5));
        assert_eq!(check(&[2, 0, 0, 3, b'Q', b'F', b'I']), Some(5));
        assert_eq!(check(&[0, 0, 0, 1, 0]), None, "another magic");
        let vmdk =
            b"# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\
                     RW 16 FLAT \"flat\" 0\n";
        assert_eq!(check(&[&[1], &vmdk[..]].concat()), Some(5));
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/image");
        for entry in std::fs::read_dir(corpus).expect("a corpus") {
            image(&std::fs::read(entry.expect("an entry").path()).expect("an input"));
        }
    }
}
