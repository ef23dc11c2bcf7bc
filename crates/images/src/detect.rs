//! Detects the format of a file by its first bytes, only if the user requests that with `format=probe`.
//!
//! The content of a raw disk, including the header of another format, is controlled by its clients. If the
//! format of such a disk is detected, they can choose which data and which files of the host the next server
//! reads.

use backends::Content;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// An image format.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Format {
    /// Raw: the file is the disk.
    #[default]
    Raw,
    /// QEMU's qcow2.
    Qcow2,
    /// VMware's vmdk.
    Vmdk,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 3] = [Format::Raw, Format::Qcow2, Format::Vmdk];
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Vmdk => "vmdk",
        })
    }
}

/// Detects the format of a file. A file that cannot be opened, or is not a regular file, counts as raw:
/// opening it to serve it will report the error. A file of an unsupported format also counts as raw, and is
/// then refused as a raw disk.
///
/// # Errors
/// The file could be opened, but not read.
pub fn detect(path: &Path) -> io::Result<Format> {
    Ok(match container_of(path)? {
        Some("qcow2") => Format::Qcow2,
        Some("vmdk") => Format::Vmdk,
        _ => Format::Raw,
    })
}

/// Returns the name of the image format with which a regular file begins; `None` if there is none, or if
/// the file cannot be opened or is not regular.
///
/// # Errors
/// The file could be opened, but not read.
pub(crate) fn container_of(path: &Path) -> io::Result<Option<&'static str>> {
    let Some(file) = open_regular(path)? else { return Ok(None) };
    let mut head = Vec::new();
    file.take(backends::HEAD_LEN as u64).read_to_end(&mut head)?;
    Ok(backends::container(&head))
}

/// Explains why a regular file is not served as a raw disk without an explicit `format=raw`, and what to
/// do. `None` if it is served, cannot be opened, or is not regular.
///
/// # Errors
/// The file could be opened, but not read.
pub fn why_not_raw(path: &Path) -> io::Result<Option<String>> {
    let Some(file) = open_regular(path)? else { return Ok(None) };
    Ok(match backends::content(&file, path)? {
        Content::Other(why) => Some(why),
        Content::Raw | Content::MayBeCompressed(_) => None,
    })
}

fn open_regular(path: &Path) -> io::Result<Option<File>> {
    // Opening a FIFO must not block.
    let Ok(file) = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) else {
        return Ok(None);
    };
    Ok(file.metadata()?.is_file().then_some(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_of_a_file_decide() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        for (head, format) in [
            (&b"QFI\xfb\0\0\0\x03rest"[..], Format::Qcow2),
            (b"# Disk DescriptorFile\nversion=1", Format::Vmdk),
            (b"KDMV", Format::Vmdk),
            (b"vhdxfile", Format::Raw),
            (b"", Format::Raw),
            (&[0; 512], Format::Raw),
        ] {
            std::fs::write(&path, head).unwrap();
            assert_eq!(detect(&path).unwrap(), format, "{}", head.escape_ascii());
        }
    }

    #[test]
    fn anything_but_a_regular_file_is_raw() {
        assert_eq!(detect(Path::new("/nowhere/at/all")).unwrap(), Format::Raw);
        assert_eq!(detect(Path::new("/tmp")).unwrap(), Format::Raw);
    }
}
