//! Formats of disk images, recognised by the first sector of a file.
//!
//! A raw disk contains whatever its clients write, so its first bytes do not prove the file's format. They
//! decide two things here: a file that begins with an image header is not served as a raw disk unless the
//! user requests that, and a client cannot write such a header to the beginning of a raw disk (see
//! [`head`](super::head)).
//!
//! The list contains the formats that QEMU probes (`bdrv_probe` of its drivers), because a host may open
//! such a file with QEMU. LUKS is omitted deliberately: an encrypted raw disk begins with a LUKS header.
//!
//! Compressed files have a separate list. A client may write an archive to a raw disk with
//! `tar cz >/dev/nbd0`, which must not lock the owner out. So a file counts as compressed only if a property
//! that no client can change agrees: its name has a matching ending, or its length is not a multiple of a
//! sector.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Number of bytes that are examined, as in QEMU's `BLOCK_PROBE_BUF_SIZE`.
pub const HEAD_LEN: usize = 512;

/// Formats, with the first bytes of their files.
const BEGINNINGS: [(&[u8], &str); 12] = [
    (b"QFI\xfb\0\0\0\x01", "qcow"),
    (b"QFI\xfb", "qcow2"),
    (b"QED\0", "qed"),
    (b"KDMV", "vmdk"),
    (b"COWD", "vmdk"),
    (b"# Disk DescriptorFile", "vmdk"),
    (b"vhdxfile", "vhdx"),
    (b"conectix", "vhd"),
    (b"WithoutFreeSpace", "parallels"),
    (b"WithouFreSpacExt", "parallels"),
    (b"Bochs Virtual HD Image", "bochs"),
    (b"#!/bin/sh\n#V2.0 Format\n", "cloop"),
];
/// Compressed formats: first bytes, name, and endings of file names.
const COMPRESSED: [(&[u8], &str, &[&str]); 6] = [
    (b"\x1f\x8b\x08", "gzip", &["gz", "tgz"]),
    (b"\xfd7zXZ\0", "xz", &["xz", "txz"]),
    (b"\x28\xb5\x2f\xfd", "zstd", &["zst", "zstd"]),
    (b"BZh", "bzip2", &["bz2", "tbz2"]),
    (b"\x04\x22\x4d\x18", "lz4", &["lz4"]),
    (b"PK\x03\x04", "zip", &["zip"]),
];
/// Unit of disk lengths, in bytes.
const SECTOR_LEN: u64 = 512;
/// Offset of the signature in VirtualBox images, and the signature.
const VDI: (usize, &[u8]) = (0x40, &[0x7f, 0x10, 0xda, 0xbe]);

/// Returns the format that a probing program would detect in a file with these first bytes. `head` has the
/// first [`HEAD_LEN`] bytes, or all if there are fewer.
pub fn container(head: &[u8]) -> Option<&'static str> {
    let head = &head[..head.len().min(HEAD_LEN)];
    if let Some((_, name)) = BEGINNINGS.iter().find(|(beginning, _)| head.starts_with(beginning)) {
        return Some(name);
    }
    if head.get(VDI.0..).is_some_and(|rest| rest.starts_with(VDI.1)) {
        return Some("vdi");
    }
    is_vmdk_descriptor(head).then_some("vmdk")
}

/// Returns the compression of a file with these first bytes, and the usual endings of its name.
fn compression(head: &[u8]) -> Option<(&'static str, &'static [&'static str])> {
    let row = COMPRESSED.iter().find(|(beginning, ..)| head.starts_with(beginning))?;
    Some((row.1, row.2))
}

/// Content of a file whose format the user did not specify.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// Nothing contradicts a raw disk.
    Raw,
    /// By its name and length a raw disk, but it begins with data of this compression.
    MayBeCompressed(&'static str),
    /// Not served as a raw disk unless the user requests that. The text has the reason and what to do.
    Other(String),
}

/// Examines the first bytes, the length and the name of a file that may be a raw disk.
///
/// # Errors
/// The file cannot be read.
pub fn content(file: &File, path: &Path) -> io::Result<Content> {
    let mut head = [0; HEAD_LEN];
    let head_len = file.read_at(&mut head, 0)?;
    let head = &head[..head_len];
    if let Some(format) = container(head) {
        return Ok(Content::Other(not_raw(format)));
    }
    let Some((name, endings)) = compression(head) else { return Ok(Content::Raw) };
    let metadata = file.metadata()?;
    let ending = path.extension().and_then(|ending| ending.to_str());
    let is_named_so =
        ending.is_some_and(|ending| endings.iter().any(|known| ending.eq_ignore_ascii_case(known)));
    let is_file = metadata.is_file() && (is_named_so || !metadata.len().is_multiple_of(SECTOR_LEN));
    Ok(if is_file { Content::Other(compressed(name)) } else { Content::MayBeCompressed(name) })
}

/// Describes the content of a file that was specified as an image of a format but does not begin as one,
/// and says what to do.
///
/// # Errors
/// The file cannot be read.
pub fn instead_of_image(file: &File) -> io::Result<String> {
    let mut head = [0; HEAD_LEN];
    let len = file.read_at(&mut head, 0)?;
    let head = &head[..len];
    Ok(match (container(head), compression(head)) {
        (Some(format), _) => not_raw(format),
        (None, Some((name, _))) => compressed(name),
        (None, None) => {
            "its header is missing (give the path of an image, or format=raw to serve the file as a raw disk)"
                .into()
        }
    })
}

fn compressed(name: &str) -> String {
    format!("it is compressed with {name} (unpack it first, or add format=raw to serve the file as it is)")
}

/// Returns why a file with an image header is not served as a raw disk, and what to do.
fn not_raw(format: &str) -> String {
    let what = match format {
        "qcow2" | "vmdk" => format!("add format={format} to serve what is in it"),
        _ => "convert it with qemu-img to serve what is in it".to_owned(),
    };
    format!("it begins as a {format} image ({what}, or add format=raw to serve the file as it is)")
}

/// Implements QEMU's rule for the text of a vmdk descriptor: after comments and blank lines comes
/// `version=` with 1, 2 or 3.
fn is_vmdk_descriptor(head: &[u8]) -> bool {
    let mut lines = head.split_inclusive(|&byte| byte == b'\n');
    let is_passed = |line: &[u8]| line.starts_with(b"#") || line.trim_ascii().is_empty();
    let Some(line) = lines.find(|line| !is_passed(line)) else { return false };
    let Some(rest) = line.strip_prefix(b"version=") else { return false };
    matches!(rest, [b'1'..=b'3', b'\n'] | [b'1'..=b'3', b'\r', b'\n'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_recognised_by_their_first_bytes() {
        let vdi = [&[b' '; 0x40][..], VDI.1].concat();
        for (head, name) in [
            (&b"QFI\xfb\0\0\0\x03rest"[..], "qcow2"),
            (b"QFI\xfb\0\0\0\x02", "qcow2"),
            (b"QFI\xfb", "qcow2"),
            (b"QFI\xfb\0\0\0\x01", "qcow"),
            (b"QED\0", "qed"),
            (b"KDMV\x01", "vmdk"),
            (b"COWD", "vmdk"),
            (b"# Disk DescriptorFile\nversion=1\n", "vmdk"),
            (b"# any comment\n \nversion=3\r\n", "vmdk"),
            (b"version=1\n", "vmdk"),
            (b"vhdxfile", "vhdx"),
            (b"conectix", "vhd"),
            (b"WithoutFreeSpace", "parallels"),
            (b"Bochs Virtual HD Image", "bochs"),
            (b"#!/bin/sh\n#V2.0 Format\nmodprobe", "cloop"),
            (&vdi, "vdi"),
        ] {
            assert_eq!(container(head), Some(name), "{}", head.escape_ascii());
        }
    }

    #[test]
    fn a_compressed_file_is_distinguished_from_a_raw_disk_with_an_archive() {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str, head: &[u8], len: usize| {
            let path = folder.path().join(name);
            let mut bytes = head.to_vec();
            bytes.resize(len, 7);
            std::fs::write(&path, bytes).unwrap();
            content(&File::open(&path).unwrap(), &path).unwrap()
        };
        for (head, name, endings) in COMPRESSED {
            let refused = Content::Other(format!(
                "it is compressed with {name} (unpack it first, or add format=raw to serve the file as it is)"
            ));
            assert_eq!(of("disk.img", head, 1001), refused, "{name}: no disk has such a length");
            assert_eq!(
                of("disk.img", head, 1024),
                Content::MayBeCompressed(name),
                "a client may have written it"
            );
            for ending in endings {
                assert_eq!(of(&format!("disk.img.{ending}"), head, 1024), refused);
                assert_eq!(of(&format!("disk.{}", ending.to_uppercase()), head, 1024), refused);
                assert_eq!(of(&format!("disk.img.{ending}"), b"anything", 1024), Content::Raw);
            }
        }
        assert_eq!(of("disk.vhdx", b"vhdxfile", 1024), Content::Other(not_raw("vhdx")));
        assert_eq!(of("disk.img", b"", 0), Content::Raw);
    }

    #[test]
    fn common_content_of_raw_disks_is_not_an_image() {
        let mut boot = [0x90; HEAD_LEN];
        boot[..3].copy_from_slice(&[0xeb, 0x63, 0x90]);
        boot[510..].copy_from_slice(&[0x55, 0xaa]);
        for head in [
            &b""[..],
            b"QFI",
            b"QED",
            b"# Disk",
            b"#!/bin/sh\necho\n",
            b"version=4\n",
            b"version=1",
            b"LUKS\xba\xbe\0\x01",
            b"\x1f\x8b\x08",
            b"PK\x03\x04",
            &[0; HEAD_LEN],
            &boot,
        ] {
            assert_eq!(container(head), None, "{}", head.escape_ascii());
        }
        let late = [&[0; HEAD_LEN][..], b"QFI\xfb"].concat();
        assert_eq!(container(&late), None);
    }
}
