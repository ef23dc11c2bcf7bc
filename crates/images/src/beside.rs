//! Files that an image refers to: its backing file, and the extents of a vmdk.
//!
//! An image may be untrusted, and a client that can write to its file controls the names in its header. So
//! a name is followed only within the image's directory, unless the user has allowed more with `backing=`.
//! *Invariant:* every name in an image passes through [`Beside::open`] before the named file is read.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

/// Files that an image may refer to.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub enum Backing {
    /// Files in the image's directory and below it, by a relative name.
    #[default]
    Beside,
    /// No files.
    None,
    /// Every regular file that this process may read.
    Any,
    /// Files beside the image, plus these files and the content of these directories.
    Listed(Vec<PathBuf>),
}

/// Decides which of the names in an image and its backing files may be opened.
#[derive(Clone, Debug)]
pub(crate) struct Beside {
    /// Directory of the served image, which must also contain its backing files.
    folder: PathBuf,
    backing: Backing,
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// Returns the directory of a path.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

impl Beside {
    /// Creates the policy for the image at `path`.
    pub(crate) fn new(path: &Path, backing: Backing) -> Beside {
        Beside { folder: folder_of(path).to_owned(), backing }
    }

    /// Opens the file `name` for reading, to which the image at `naming` refers. Returns the file and its
    /// path.
    ///
    /// # Errors
    /// `PermissionDenied`: the user has not allowed the file; the message says which option allows it.
    /// Other errors: the file could not be opened.
    pub(crate) fn open(&self, naming: &Path, name: &Path) -> io::Result<(File, PathBuf)> {
        let shown = name.display();
        if self.backing == Backing::None {
            return Err(refused(format!("it refers to {shown}, but backing=none allows no other file")));
        }
        if has_protocol(name) {
            let why = format!("it refers to {shown}, but only files are supported (rebase it with qemu-img)");
            return Err(refused(why));
        }
        let path = folder_of(naming).join(name);
        let in_path = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let file = match self.open_within(&path, name) {
            Some(Ok(file)) => file,
            Some(Err(error)) => return Err(in_path(error)),
            None => self.open_elsewhere(&path, name)?,
        };
        if !file.metadata().map_err(in_path)?.is_file() {
            return Err(refused(format!("{} is not a regular file", path.display())));
        }
        Ok((file, path))
    }

    /// Opens a file by a relative name without `..`. `None`: symbolic links lead out of the image's
    /// directory.
    fn open_within(&self, path: &Path, name: &Path) -> Option<io::Result<File>> {
        let climbs = name.components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir));
        let within = path.strip_prefix(&self.folder).ok().filter(|_| !climbs)?;
        // Opening a FIFO must not block.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let folder = match rustix::fs::open(&self.folder, flags | OFlags::DIRECTORY, Mode::empty()) {
            Ok(folder) => folder,
            Err(error) => return Some(Err(error.into())),
        };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(&folder, within, flags, Mode::empty(), resolve) {
            // A symbolic link leads out of the directory.
            Err(Errno::XDEV | Errno::LOOP) => None,
            // A sandbox forbids the system call.
            Err(Errno::NOSYS) => self.open_resolved(path),
            opened => Some(opened.map(File::from).map_err(io::Error::from)),
        }
    }

    /// Does the work of `openat2` in two steps. The identity of the file reveals a link that changes in
    /// between.
    fn open_resolved(&self, path: &Path) -> Option<io::Result<File>> {
        let opened = (|| {
            let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
            let is_within = lies_within(&file, path, &std::fs::canonicalize(&self.folder)?)?;
            Ok(is_within.then_some(file))
        })();
        opened.transpose()
    }

    /// Opens a file outside the image's directory, if the user has allowed it.
    fn open_elsewhere(&self, path: &Path, name: &Path) -> io::Result<File> {
        let listed = match &self.backing {
            Backing::Any => None,
            Backing::Listed(listed) => Some(listed),
            Backing::Beside | Backing::None => return Err(self.outside(path, name)),
        };
        let in_path = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(in_path)?;
        let Some(listed) = listed else { return Ok(file) };
        for entry in listed {
            let Ok(entry) = std::fs::canonicalize(entry) else { continue };
            if lies_within(&file, path, &entry).map_err(in_path)? {
                return Ok(file);
            }
        }
        Err(self.outside(path, name))
    }

    fn outside(&self, path: &Path, name: &Path) -> io::Error {
        let (name, path) = (name.display(), path.display());
        let what = match self.backing {
            Backing::Listed(_) => "is neither in the image's directory nor listed in backing=",
            _ => "is not a relative name within the image's directory",
        };
        refused(format!(
            "it refers to {name}, which {what} (add backing={path} if you trust it, or backing=allow)"
        ))
    }
}

/// Whether an open file, reached through `path`, is `within` or below it. `within` must be canonical.
fn lies_within(file: &File, path: &Path, within: &Path) -> io::Result<bool> {
    let real = std::fs::canonicalize(path)?;
    let (found, opened) = (std::fs::metadata(&real)?, file.metadata()?);
    Ok((found.dev(), found.ino()) == (opened.dev(), opened.ino()) && real.starts_with(within))
}

/// Whether QEMU would interpret a name as something other than a file (`path_has_protocol`): `nbd://host`,
/// `json:{…}`.
fn has_protocol(name: &Path) -> bool {
    let bytes = name.as_os_str().as_bytes();
    bytes.iter().find(|byte| matches!(byte, b':' | b'/')) == Some(&b':')
}

/// Refuses a backing file that looks like an image if the header does not specify its format: with probing,
/// the author of that file could choose which files are read.
pub(crate) fn check_unspecified_format(file: &File, path: &Path) -> io::Result<()> {
    let mut head = [0; backends::HEAD_LEN];
    let len = file.read_at(&mut head, 0)?;
    let Some(format) = backends::container(&head[..len]) else { return Ok(()) };
    let base = path.display();
    Err(refused(format!(
        "it refers to {base} as its backing file without a format, but that begins like a {format} image (write the format \
         into the image: qemu-img rebase -u -b {base} -F {format}, or -F raw)"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_files_in_the_images_directory_are_opened_unless_more_is_allowed() {
        let base = tempfile::tempdir().unwrap();
        let (folder, other) = (base.path().join("images"), base.path().join("other"));
        std::fs::create_dir_all(folder.join("sub")).unwrap();
        std::fs::create_dir_all(&other).unwrap();
        for path in [folder.join("base"), folder.join("sub/base"), other.join("secret")] {
            std::fs::write(path, "x").unwrap();
        }
        symlink("base", folder.join("link")).unwrap();
        symlink("../other/secret", folder.join("out")).unwrap();
        symlink(&other, folder.join("away")).unwrap();
        symlink("/proc/self/fd/0", folder.join("magic")).unwrap();
        let image = folder.join("disk.qcow2");
        let opens = |backing: &Backing, name: &str| {
            let beside = Beside::new(&image, backing.clone());
            beside.open(&image, Path::new(name)).map(drop).map_err(|error| error.to_string())
        };
        let absolute = other.join("secret").display().to_string();
        let own = folder.join("base").display().to_string();
        for name in ["base", "./base", "sub/base", "link"] {
            assert_eq!(opens(&Backing::Beside, name), Ok(()), "{name}");
            assert!(opens(&Backing::None, name).unwrap_err().contains("backing=none"), "{name}");
        }
        for name in
            ["../other/secret", "sub/../base", "out", "away/secret", "magic", &absolute, &own, "/dev/zero"]
        {
            let why = opens(&Backing::Beside, name).unwrap_err();
            assert!(why.contains("is not a relative name within the image's directory"), "{name}: {why}");
        }
        for name in ["nbd://host/x", "json:{}", "file:base", "nbd:unix:/s"] {
            for backing in [Backing::Beside, Backing::Any] {
                let why = opens(&backing, name).unwrap_err();
                assert!(why.contains("only files are supported"), "{name}: {why}");
            }
        }
        for name in ["base", "out", "away/secret", "../other/secret", &absolute] {
            assert_eq!(opens(&Backing::Any, name), Ok(()), "{name}");
            for entry in [&other, &other.join("secret"), &folder.join("away")] {
                assert_eq!(opens(&Backing::Listed(vec![entry.clone()]), name), Ok(()), "{name}");
            }
        }
        for entry in [folder.join("sub"), other.join("sec"), base.path().join("absent")] {
            let why = opens(&Backing::Listed(vec![entry]), "out").unwrap_err();
            assert!(why.contains("is neither in the image's directory"), "{why}");
        }
        assert!(opens(&Backing::Any, "/dev/zero").unwrap_err().contains("not a regular file"));
        assert!(opens(&Backing::Beside, "sub").unwrap_err().contains("not a regular file"));
        assert!(opens(&Backing::Beside, "absent").unwrap_err().contains("absent: "));
    }

    #[test]
    fn a_relative_image_has_a_directory() {
        let beside = Beside::new(Path::new("disk.qcow2"), Backing::Beside);
        assert!(beside.open(Path::new("disk.qcow2"), Path::new("Cargo.toml")).is_ok());
        assert!(beside.open(Path::new("disk.qcow2"), Path::new("../images/Cargo.toml")).is_err());
    }
}
