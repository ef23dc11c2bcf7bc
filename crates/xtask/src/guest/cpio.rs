//! Writes initramfs archives: cpio, format `newc`.
//!
//! Source: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel. Supports what a guest
//! needs: directories, files, links, all owned by root. Entries are sorted by path, so that directories come
//! before their content; a later entry replaces an earlier one of its path.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

#[derive(Clone, PartialEq, Eq, Debug)]
enum Entry {
    Folder,
    Link(String),
    Bytes { mode: u32, bytes: Vec<u8> },
    Copy { mode: u32, from: PathBuf },
}

/// The entries of an archive. Paths have no leading slash.
#[derive(Default, Debug)]
pub struct Tree {
    entries: BTreeMap<String, Entry>,
}

const FOLDER: u32 = 0o040_755;
const LINK: u32 = 0o120_777;
const FILE: u32 = 0o100_000;

impl Tree {
    fn insert(&mut self, path: &str, entry: Entry) {
        let path = path.trim_matches('/');
        for (at, _) in path.match_indices('/') {
            self.entries.entry(path[..at].into()).or_insert(Entry::Folder);
        }
        self.entries.insert(path.into(), entry);
    }

    /// Whether there is an entry of this path.
    pub fn has(&self, path: &str) -> bool {
        self.entries.contains_key(path.trim_matches('/'))
    }

    /// Adds an empty directory, and its parents.
    pub fn folder(&mut self, path: &str) {
        if !self.has(path) {
            self.insert(path, Entry::Folder);
        }
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, to: &str) {
        self.insert(path, Entry::Link(to.into()));
    }

    /// Adds a file with this content.
    pub fn bytes(&mut self, path: &str, mode: u32, bytes: impl Into<Vec<u8>>) {
        self.insert(path, Entry::Bytes { mode, bytes: bytes.into() });
    }

    /// Adds a file of this machine, which is read when the archive is written; its permissions are kept.
    ///
    /// # Errors
    /// The file does not exist.
    pub fn copy(&mut self, path: &str, from: &Path) -> Result<(), String> {
        let metadata = std::fs::metadata(from).map_err(|error| format!("{}: {error}", from.display()))?;
        let mode = metadata.permissions().mode() & 0o777;
        self.insert(path, Entry::Copy { mode, from: from.into() });
        Ok(())
    }

    /// Adds everything below a directory of this machine.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn copy_all(&mut self, path: &str, from: &Path) -> Result<(), String> {
        let entries = std::fs::read_dir(from).map_err(|error| format!("{}: {error}", from.display()))?;
        for entry in entries.flatten() {
            let below = format!("{path}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                self.copy_all(&below, &entry.path())?
            } else {
                self.copy(&below, &entry.path())?
            }
        }
        Ok(())
    }

    /// Writes the archive, padded so that another may follow it.
    ///
    /// # Errors
    /// Errors of the copied files, and of `to`.
    pub fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        for (number, (path, entry)) in (1_u32..).zip(&self.entries) {
            match entry {
                Entry::Folder => record(to, number, path, FOLDER, &[])?,
                Entry::Link(target) => record(to, number, path, LINK, target.as_bytes())?,
                Entry::Bytes { mode, bytes } => record(to, number, path, FILE | mode, bytes)?,
                Entry::Copy { mode, from } => {
                    let bytes = std::fs::read(from).map_err(|error| {
                        io::Error::new(error.kind(), format!("{}: {error}", from.display()))
                    })?;
                    record(to, number, path, FILE | mode, &bytes)?;
                }
            }
        }
        record(to, 0, "TRAILER!!!", 0, &[])
    }
}

/// Writes a record: a header of thirteen numbers with eight hexadecimal digits each, the path with a NUL, the
/// content; path and content are padded to multiples of four.
fn record(to: &mut dyn Write, inode: u32, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
    let size =
        |len: usize| u32::try_from(len).map_err(|_| io::Error::other(format!("{path}: 4 GiB or more")));
    let (user, group, links, time, device, check) = (0, 0, 1, 0, [0; 4], 0);
    let numbers = [inode, mode, user, group, links, time, size(content.len())?];
    to.write_all(b"070701")?;
    for number in numbers.into_iter().chain(device).chain([size(path.len() + 1)?, check]) {
        write!(to, "{number:08x}")?;
    }
    const HEADER: usize = 110;
    to.write_all(path.as_bytes())?;
    to.write_all(&[0; 4][..1 + padding(HEADER + path.len() + 1)])?;
    to.write_all(content)?;
    to.write_all(&[0; 4][..padding(content.len())])
}

fn padding(len: usize) -> usize {
    len.next_multiple_of(4) - len
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses an archive: path, mode, content.
    fn read(mut archive: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut found = Vec::new();
        loop {
            assert_eq!(&archive[..6], b"070701");
            let number = |index: usize| {
                let digits =
                    std::str::from_utf8(&archive[6 + 8 * index..14 + 8 * index]).expect("hexadecimal");
                u32::from_str_radix(digits, 16).expect("hexadecimal") as usize
            };
            let (mode, size, name) = (number(1), number(6), number(11));
            let content = (110 + name).next_multiple_of(4);
            let path = String::from_utf8(archive[110..110 + name - 1].to_vec()).expect("text");
            if path == "TRAILER!!!" {
                assert_eq!(archive.len(), content);
                return found;
            }
            found.push((
                path,
                u32::try_from(mode).expect("small"),
                archive[content..content + size].to_vec(),
            ));
            archive = &archive[(content + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn an_archive_lists_directories_first() {
        let mut tree = Tree::default();
        tree.bytes("/a/b/file", 0o755, *b"12345");
        tree.link("a/link", "b/file");
        let mut archive = Vec::new();
        tree.write(&mut archive).expect("memory");
        let expected = [
            ("a", FOLDER, &b""[..]),
            ("a/b", FOLDER, b""),
            ("a/b/file", FILE | 0o755, b"12345"),
            ("a/link", LINK, b"b/file"),
        ];
        assert_eq!(
            read(&archive),
            expected.map(|(path, mode, bytes)| (path.to_owned(), mode, bytes.to_vec()))
        );
    }

    #[test]
    fn later_entries_replace_earlier_ones_and_directories_stay() {
        let mut tree = Tree::default();
        tree.bytes("etc/x", 0o644, *b"1");
        tree.folder("etc");
        tree.bytes("etc/x", 0o644, *b"2");
        let mut archive = Vec::new();
        tree.write(&mut archive).expect("memory");
        let found = read(&archive);
        assert_eq!(found.len(), 2);
        assert_eq!(found[1].2, b"2");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Tree::default().copy("x", Path::new("/no/such/file")).expect_err("it is missing");
        assert!(error.starts_with("/no/such/file: "), "{error}");
    }
}
