//! Which format a file has, by its first bytes.
//!
//! A raw image holds whatever its user writes, the first bytes of another format too: so a file that is found not to be
//! raw is served as what it says only when nobody said otherwise, and that is told.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A format.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Format {
    /// None: the bytes of the disk, one by one.
    #[default]
    Raw,
    /// QEMU's.
    Qcow2,
    /// VMware's.
    Vmdk,
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

/// How many bytes are looked at.
const LOOK_LEN: u64 = 512;

/// Look at a file. One that cannot be read, or is no regular file, is raw: whoever opens it will say more.
///
/// # Errors
/// It could be opened and not read.
pub fn detect(path: &Path) -> io::Result<Format> {
    // A FIFO must not hold us up.
    let Ok(file) = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) else {
        return Ok(Format::Raw);
    };
    if !file.metadata()?.is_file() {
        return Ok(Format::Raw);
    }
    let mut head = Vec::new();
    file.take(LOOK_LEN).read_to_end(&mut head)?;
    Ok(by_head(&head))
}

fn by_head(head: &[u8]) -> Format {
    let is_version = |number: u8| head.get(4..8) == Some(&[0, 0, 0, number]);
    if head.starts_with(b"QFI\xfb") && (is_version(2) || is_version(3)) {
        Format::Qcow2
    } else if head.starts_with(b"KDMV") || head.starts_with(b"# Disk DescriptorFile") {
        Format::Vmdk
    } else {
        Format::Raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_raw_unless_it_begins_as_another() {
        assert_eq!(by_head(b"QFI\xfb\0\0\0\x03rest"), Format::Qcow2);
        assert_eq!(by_head(b"QFI\xfb\0\0\0\x02"), Format::Qcow2);
        assert_eq!(by_head(b"# Disk DescriptorFile\nversion=1"), Format::Vmdk);
        assert_eq!(by_head(b"KDMV"), Format::Vmdk);
        for raw in [&b""[..], b"QFI", b"QFI\xfb\0\0\0\x01", b"# Disk", &[0; 512]] {
            assert_eq!(by_head(raw), Format::Raw, "{raw:?}");
        }
    }

    #[test]
    fn what_is_no_file_is_raw() {
        assert_eq!(detect(Path::new("/nowhere/at/all")).unwrap(), Format::Raw);
        assert_eq!(detect(Path::new("/tmp")).unwrap(), Format::Raw);
    }
}
