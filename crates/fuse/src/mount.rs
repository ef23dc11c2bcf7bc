//! Mounting on a file, and unmounting.

use crate::DEVICE;
use crate::fusermount;
use crate::mounts::{FS_TYPE, SOURCE_PREFIX, mounts};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, open, statx};
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Why a device cannot be mounted as a file.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// `/dev/fuse` is missing or not accessible.
    #[error("{DEVICE}: {0} (load the fuse module, or ask for access to {DEVICE})")]
    Device(#[source] io::Error),
    /// The mount point is not usable.
    #[error("{}: {why} (name a file that is empty or does not exist yet)", path.display())]
    Place {
        /// The mount point.
        path: PathBuf,
        /// Reason for the refusal.
        why: String,
    },
    /// The kernel refused the mount.
    #[error("{}: cannot mount there: {source} (root may mount in this namespace only)", path.display())]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// `fusermount3` is missing or failed.
    #[error("{}: cannot mount there: {why} ({}, or run as root)", path.display(), advice(why))]
    Helper {
        /// The mount point.
        path: PathBuf,
        /// Its error message.
        why: String,
    },
}

/// Options of a mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// The device's name, which `mount` lists as `blockyard:NAME`.
    pub name: String,
    /// The kernel refuses writes.
    pub read_only: bool,
}

/// Advice for an error of `fusermount3`.
fn advice(why: &str) -> &'static str {
    match why.contains(DEVICE) {
        true => "let your user open /dev/fuse, which modprobe fuse makes",
        false => "install fuse3",
    }
}

/// Opens `/dev/fuse` non-blocking.
pub(crate) fn open_device() -> io::Result<OwnedFd> {
    Ok(open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?)
}

/// A mount. Dropping this does not unmount.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
    /// The file at the mount point was created for it.
    made: bool,
}

impl Mount {
    /// Mounts on `path`, an empty file or one that does not exist. Requests are read from the returned
    /// descriptor; the first access to the mount waits until INIT is answered.
    /// # Errors
    /// [`MountError`]; nothing is left behind.
    /// [`MountError`]; nothing is left behind.
    pub fn new(path: &Path, options: &MountOptions) -> Result<(Mount, OwnedFd), MountError> {
        // An empty file under a dead mount was most likely created for it: `del` treats it so as well.
        let made = clear_dead(path) | prepare(path)?;
        // The canonical name is that in the mount table, by which it is found again.
        let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        // A device of length 0 looks like an empty file.
        if let Some(name) = mounted_device(&path) {
            return Err(MountError::Place { path, why: format!("the device {name} is mounted there") });
        }
        let mounted =
            if rustix::process::geteuid().is_root() { mount(&path, options) } else { ask(&path, options) };
        match mounted {
            Ok(device) => Ok((Mount { path, made }, device)),
            Err(why) => {
                if made {
                    // It was created a moment ago, and is empty.
                    let _ = std::fs::remove_file(&path);
                }
                Err(why)
            }
        }
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file at the mount point was created for the mount, and is removed with it.
    pub fn made_file(&self) -> bool {
        self.made
    }
}

/// Unmounts, and with `remove_file` removes the file at the mount point if it is empty. `lazily`: even while
/// it is in use; it is then detached at once, and unmounted when its last user closes it.
///
/// # Errors
/// `EBUSY`: the file is open. `EINVAL`: nothing is mounted there.
pub fn unmount(path: &Path, lazily: bool, remove_file: bool) -> io::Result<()> {
    let flags = UnmountFlags::NOFOLLOW | if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(path, flags) {
        Err(rustix::io::Errno::PERM) => fusermount::unmount(path, lazily)?,
        other => other?,
    }
    if remove_file && std::fs::symlink_metadata(path).is_ok_and(|under| under.is_file() && under.len() == 0) {
        // If another process removed it first, nothing is left to do.
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Whether the topmost mount at `path` is something other than this device.
pub fn is_covered(path: &Path, name: &str) -> bool {
    // `fusermount3` gets the name without these characters.
    let shown = name.replace(['\\', ','], "_");
    let all = mounts().unwrap_or_default();
    let top = all.iter().rfind(|one| one.path == path);
    top.is_some_and(|one| one.device_name().is_none_or(|device| device != name && device != shown))
}

/// Whether a mount of ours is at `path` whose server has died.
pub fn is_dead(path: &Path) -> bool {
    // Cached attributes of the file outlive its server.
    let asked = statx(CWD, path, AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
    // ECONNABORTED: it was asked while the kernel was aborting the requests of the server.
    let dead = [rustix::io::Errno::NOTCONN, rustix::io::Errno::CONNABORTED];
    asked.is_err_and(|why| dead.contains(&why))
        && mounts().is_ok_and(|all| all.iter().any(|one| one.path == path && one.device_name().is_some()))
}

/// Name of our device that is mounted at `path`.
fn mounted_device(path: &Path) -> Option<String> {
    let all = mounts().unwrap_or_default();
    all.iter().rfind(|one| one.path == path)?.device_name().map(str::to_owned)
}

/// Unmounts what dead servers have left at `path`; whether there was anything.
fn clear_dead(path: &Path) -> bool {
    // The mount table has canonical names, and the last component cannot be resolved.
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (Ok(dir), Some(name)) = (dir.canonicalize(), path.file_name()) else { return false };
    let path = dir.join(name);
    let mut cleared = false;
    while is_dead(&path) && unmount(&path, true, false).is_ok() {
        cleared = true;
    }
    cleared
}

/// Ensures that there is an empty file to mount on; whether it was created.
fn prepare(path: &Path) -> Result<bool, MountError> {
    let place = |why: String| MountError::Place { path: path.to_owned(), why };
    match std::fs::metadata(path) {
        Ok(there) if !there.is_file() => Err(place("not a regular file".to_owned())),
        // A mount hides the file under it: a mistyped name should not hide data.
        Ok(there) if there.len() > 0 => Err(place("the file is not empty".to_owned())),
        Ok(_) => Ok(false),
        Err(why) if why.kind() == io::ErrorKind::NotFound => {
            let made = std::fs::OpenOptions::new().write(true).create_new(true).open(path);
            made.map(|_| true).map_err(|why| match why.kind() {
                io::ErrorKind::NotFound => place("its directory does not exist".to_owned()),
                _ => place(why.to_string()),
            })
        }
        Err(why) => Err(place(why.to_string())),
    }
}

fn mount(path: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let device = open_device().map_err(MountError::Device)?;
    let failed = |source: io::Error| MountError::Mount { path: path.to_owned(), source };
    // The root is a regular file. The kernel checks permissions by the file's mode, so other users may be
    // allowed.
    let data = format!(
        "fd={},rootmode={:o},user_id=0,group_id=0,allow_other,default_permissions",
        device.as_raw_fd(),
        libc::S_IFREG
    );
    let data = CString::new(data).map_err(|why| failed(why.into()))?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if options.read_only {
        flags |= MountFlags::RDONLY;
    }
    let source = format!("{SOURCE_PREFIX}{}", options.name);
    rustix::mount::mount(source.as_str(), path, FS_TYPE, flags, Some(data.as_c_str()))
        .map_err(|errno| failed(errno.into()))?;
    Ok(device)
}

fn ask(path: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let device = fusermount::mount(path, options)
        .map_err(|why| MountError::Helper { path: path.to_owned(), why: why.to_string() })?;
    let flags = rustix::fs::fcntl_getfl(&device).map_err(|errno| MountError::Device(errno.into()))?;
    rustix::fs::fcntl_setfl(&device, flags | OFlags::NONBLOCK)
        .map_err(|errno| MountError::Device(errno.into()))?;
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_distinguishes_device_permission_from_a_missing_program() {
        let explained =
            |why: &str| MountError::Helper { path: PathBuf::from("/d.raw"), why: why.to_owned() }.to_string();
        let denied = explained("fusermount3: failed to open /dev/fuse: Permission denied");
        assert!(denied.contains("let your user open /dev/fuse"), "{denied}");
        assert!(explained("No such file or directory").ends_with("(install fuse3, or run as root)"));
    }

    #[test]
    fn data_is_not_hidden_by_a_mount() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk.img");
        std::fs::write(&file, "data").unwrap();
        let refused = prepare(&file).unwrap_err().to_string();
        assert!(refused.contains("the file is not empty"), "{refused}");
        assert!(prepare(dir.path()).unwrap_err().to_string().contains("not a regular file"));
    }

    #[test]
    fn a_missing_file_is_created_and_an_empty_one_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        assert!(prepare(&file).unwrap());
        assert!(!prepare(&file).unwrap());
    }
}
