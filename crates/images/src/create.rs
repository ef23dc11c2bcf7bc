//! Creates qcow2 images.
//!
//! An image is built in an unnamed file (`O_TMPFILE`) and synced; linking it to its path publishes it. So
//! the path refers to a complete image or does not exist, even after a crash. If the file system lacks
//! unnamed files, the image is built under its name and the header is written last: an incomplete image
//! after a crash is refused by `open` and by the next `create`.
//!
//! *Invariant:* an existing file is never written or replaced: both methods fail with `EEXIST`.

use crate::beside::folder_of;
use crate::{Format, ImageError, ImageSpec, open};
use block::Bytes;
use qcow2::CreateOptions;
use rustix::fs::{AtFlags, CWD};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Properties of a qcow2 image that is created if its file is missing. All other properties are the
/// defaults of `qemu-img create`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Creation {
    /// Size of the disk in bytes.
    pub size: Bytes,
    /// Cluster size in bytes; `None`: 64 KiB.
    pub cluster_size: Option<u32>,
    /// The backing file as the image refers to it (relative to the image's directory), and its format.
    pub backing_file: Option<(PathBuf, Format)>,
}

impl Creation {
    fn options(&self) -> CreateOptions {
        let mut options = CreateOptions::new(self.size.0);
        if let Some(cluster_size) = self.cluster_size {
            options.cluster_size = cluster_size.into();
        }
        options.backing = self
            .backing_file
            .as_ref()
            .map(|(name, format)| (name.as_os_str().as_bytes().to_vec(), format.to_string().into_bytes()));
        options
    }

    /// Checks that the options are consistent and that the format supports a disk of this size.
    ///
    /// # Errors
    /// The message says which option is wrong.
    pub fn check(&self) -> io::Result<()> {
        self.options().check()
    }

    /// Creates the image unless its file exists; returns whether it was created.
    pub(crate) fn create(&self, spec: &ImageSpec) -> Result<bool, ImageError> {
        match fs::metadata(&spec.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Opening the file later reports the error.
            _ => return Ok(false),
        }
        // The image is published only after its backing files were opened as they will be when it is
        // served.
        let created = create(&spec.path, &self.options(), |file| open::dry_run(spec, file));
        let path = || spec.path.clone();
        created.map(|()| true).map_err(|source| ImageError::Create { path: path(), source })
    }

    /// Refuses an existing image whose properties differ.
    pub(crate) fn check_existing(&self, disk: &qcow2::Disk, path: &Path) -> io::Result<()> {
        let differs = |what: &str, has: String, wants: String| {
            let why =
                format!("it exists, and its {what} is {has}, not {wants} (omit create and its options)");
            Err(io::Error::new(io::ErrorKind::AlreadyExists, why))
        };
        if disk.size() != self.size.0 {
            return differs("size", Bytes(disk.size()).to_string(), self.size.to_string());
        }
        if let Some(wants) = self.cluster_size.filter(|len| u64::from(*len) != disk.cluster_size()) {
            let has = Bytes(disk.cluster_size()).to_string();
            return differs("cluster size", has, Bytes(wants.into()).to_string());
        }
        let Some((name, format)) = &self.backing_file else { return Ok(()) };
        let names = qcow2::names(&File::open(path)?)?;
        let shown = |name: &[u8], format: &[u8]| {
            let [name, format] = [name, format].map(String::from_utf8_lossy);
            format!("{} ({})", name.escape_debug(), format.escape_debug())
        };
        let (name, format) = (name.as_os_str().as_bytes(), format.to_string());
        if names.backing.as_deref() == Some(name) && names.format.as_deref() == Some(format.as_bytes()) {
            return Ok(());
        }
        let has = match &names.backing {
            Some(name) => shown(name, names.format.as_deref().unwrap_or(b"no format")),
            None => "none".to_owned(),
        };
        differs("backing file", has, shown(name, format.as_bytes()))
    }
}

/// Creates a qcow2 image in a file that must not exist yet, and makes its content and name durable.
///
/// # Errors
/// The file exists or cannot be written, or the options are inconsistent; the message says which.
pub fn create_qcow2(path: &Path, options: &CreateOptions) -> io::Result<()> {
    create(path, options, |_| Ok(()))
}

/// Creates an image that `check` accepts. `check` may read the image.
fn create(path: &Path, options: &CreateOptions, check: impl Fn(File) -> io::Result<()>) -> io::Result<()> {
    options.check()?;
    if let Some(file) = unnamed(folder_of(path))? {
        fill(&file, options, &check)?;
        match link(&file, path) {
            Ok(()) => return sync_name(&file, path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(error),
            // The file system does not support links, or /proc is not mounted.
            Err(_) => {}
        }
    }
    create_named(path, options, check)
}

/// Creates an image under its name.
fn create_named(
    path: &Path,
    options: &CreateOptions,
    check: impl Fn(File) -> io::Result<()>,
) -> io::Result<()> {
    let file = File::options().read(true).write(true).create_new(true).open(path)?;
    fill(&file, options, &check).inspect_err(|_| drop(fs::remove_file(path)))?;
    sync_name(&file, path)
}

/// Writes an image that `check` accepts to an empty file.
fn fill(file: &File, options: &CreateOptions, check: &impl Fn(File) -> io::Result<()>) -> io::Result<()> {
    qcow2::create(file, options)?;
    check(file.try_clone()?)
}

/// Opens a new unnamed file. `None`: the file system does not support this.
fn unnamed(folder: &Path) -> io::Result<Option<File>> {
    match File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o666).open(folder) {
        Ok(file) => Ok(Some(file)),
        // Without O_TMPFILE support, the call fails like opening a directory for writing.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn link(file: &File, path: &Path) -> io::Result<()> {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(CWD, unnamed, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// Makes the name of a new file durable; if that fails, the file is removed.
fn sync_name(file: &File, path: &Path) -> io::Result<()> {
    // Some file systems store the name with the file, others with the directory.
    let synced = file.sync_all().and_then(|()| sync_folder(folder_of(path)));
    synced.inspect_err(|_| drop(fs::remove_file(path)))
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    // A directory with write but no read permission cannot be synced, nor can directories of some file
    // systems.
    let Ok(folder) = File::open(folder) else { return Ok(()) };
    match folder.sync_all() {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(()),
        synced => synced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_published_atomically_and_replaces_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.qcow2");
        let names = || fs::read_dir(folder.path()).unwrap().count();
        let options = CreateOptions::new(1 << 30);
        let refuse = |file: File| {
            assert!(qcow2::check(&file).is_ok(), "it is whole");
            assert_eq!(names(), 0, "and has no name yet");
            Err(io::ErrorKind::Other.into())
        };
        create(&path, &options, refuse).unwrap_err();
        assert_eq!(names(), 0);
        // Without support for unnamed files.
        create_named(&path, &options, |_| Err(io::ErrorKind::Other.into())).unwrap_err();
        assert_eq!(names(), 0);
        create_named(&path, &options, |_| Ok(())).unwrap();
        assert!(qcow2::check(&File::open(&path).unwrap()).is_ok());
        create_named(&path, &options, |_| Ok(())).unwrap_err();
        fs::remove_file(&path).unwrap();
        create_qcow2(&path, &options).unwrap();
        let before = fs::read(&path).unwrap();
        let again = create_qcow2(&path, &CreateOptions::new(1 << 20)).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!((fs::read(&path).unwrap(), names()), (before, 1));
        // A dangling link is not followed.
        std::os::unix::fs::symlink("nowhere", folder.path().join("link")).unwrap();
        create_qcow2(&folder.path().join("link"), &options).unwrap_err();
        assert_eq!(names(), 2);
    }
}
