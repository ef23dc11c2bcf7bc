//! The mount table: our mounts, and other mounts.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// File system type of our mounts: `fuse` with a subtype.
pub const FS_TYPE: &str = "fuse.blockyard";
/// Prefix of the sources of our mounts; the device's name follows.
pub const SOURCE_PREFIX: &str = "blockyard:";

/// A line of the mount table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mounted {
    /// Device number of the file system, major and minor; for FUSE the minor is the number of its connection.
    pub device: (u32, u32),
    /// Mount point.
    pub path: PathBuf,
    /// File system type.
    pub kind: String,
    /// Source: for our mounts [`SOURCE_PREFIX`] and the device's name.
    pub source: String,
}

impl Mounted {
    /// Name of the device if this is a mount of ours.
    pub fn device_name(&self) -> Option<&str> {
        if self.kind == FS_TYPE { self.source.strip_prefix(SOURCE_PREFIX) } else { None }
    }
}

/// All mounts visible to this process.
///
/// # Errors
/// `/proc` is not mounted.
pub fn mounts() -> io::Result<Vec<Mounted>> {
    Ok(parse_mountinfo(&std::fs::read("/proc/self/mountinfo")?))
}

/// Parses the lines of a `mountinfo`, see proc(5); lines that cannot be parsed are skipped.
pub fn parse_mountinfo(text: &[u8]) -> Vec<Mounted> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Mounted> {
    // 36 35 98:0 /root /mount/point rw,noatime optional:1 ... - type source options
    let mut words = line.split(|byte| *byte == b' ');
    let device = std::str::from_utf8(words.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let path = unescaped(words.nth(1)?);
    words.by_ref().find(|word| *word == b"-")?;
    let (kind, source) = (words.next()?, words.next()?);
    Some(Mounted {
        device: (major.parse().ok()?, minor.parse().ok()?),
        path: PathBuf::from(OsString::from_vec(path)),
        kind: String::from_utf8_lossy(kind).into_owned(),
        source: String::from_utf8_lossy(&unescaped(source)).into_owned(),
    })
}

/// Unescapes a blank, a tab, a newline and a backslash, written as `\` and three octal digits.
fn unescaped(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.get(..3).filter(|_| first == b'\\');
        let code = digits.and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 8).ok());
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { &behind[3..] } else { behind };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_of_ours_has_its_device() {
        let text = b"25 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
            90 25 0:44 / /tmp/a\\040disk rw,nosuid shared:9 - fuse.blockyard blockyard:disk rw,user_id=0\n\
            half a line\n";
        let all = parse_mountinfo(text);
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].device_name(), None);
        assert_eq!((all[1].device_name(), all[1].device), (Some("disk"), (0, 44)));
        assert_eq!(all[1].path, PathBuf::from("/tmp/a disk"));
    }

    #[test]
    fn invalid_escapes_are_kept() {
        assert_eq!(unescaped(b"a\\9x\\04"), b"a\\9x\\04");
    }
}
