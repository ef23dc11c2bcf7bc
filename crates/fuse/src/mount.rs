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

/// Why a device cannot be shown as a file.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel has no FUSE, or keeps it from us.
    #[error("{DEVICE}: {0} (load the fuse module, or ask for access to {DEVICE})")]
    Device(#[source] io::Error),
    /// The mount point.
    #[error("{}: {why} (name a file that is empty or not there yet)", path.display())]
    Place {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The kernel refused.
    #[error("{}: it cannot be mounted on: {source} (root may mount in this namespace only)", path.display())]
    Mount {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// `fusermount3` is missing or refused.
    #[error("{}: it cannot be mounted on: {why} ({}, or run as root)", path.display(), what_helps(why))]
    Helper {
        /// Where.
        path: PathBuf,
        /// What it said.
        why: String,
    },
}

/// How a device is mounted.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// The device's name, which `mount` lists as `blockyard:NAME`.
    pub name: String,
    /// Writes are refused by the kernel already.
    pub read_only: bool,
}

/// What to do about what `fusermount3` said.
fn what_helps(why: &str) -> &'static str {
    match why.contains(DEVICE) {
        true => "let your user open /dev/fuse, which modprobe fuse makes",
        false => "install fuse3",
    }
}

/// Open `/dev/fuse` so that reading it does not block.
pub(crate) fn open_device() -> io::Result<OwnedFd> {
    Ok(open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?)
}

/// A mount of ours. It stays when this is dropped: see [`Mount::end`].
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
    /// The file at the mount point was made for it.
    made: bool,
}

impl Mount {
    /// Mount on `path`, a file that is empty or not there. What is asked of the mount is read from the
    /// descriptor; the first to use the mount waits until that was answered.
    ///
    /// # Errors
    /// [`MountError`]; nothing is left behind.
    pub fn new(path: &Path, options: &MountOptions) -> Result<(Mount, OwnedFd), MountError> {
        // What lies empty under a dead mount was made for that, as far as anybody can tell: `del` takes it for that, too.
        let made = clear_dead(path) | prepare(path)?;
        // The name that the mount table has: without links, so that it is found again there.
        let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        // A device of no length looks like an empty file.
        if let Some(name) = shown_at(&path) {
            return Err(MountError::Place { path, why: format!("the device {name} is shown there") });
        }
        let mounted =
            if rustix::process::geteuid().is_root() { mount(&path, options) } else { ask(&path, options) };
        match mounted {
            Ok(device) => Ok((Mount { path, made }, device)),
            Err(why) => {
                if made {
                    // It was ours a moment ago, and empty.
                    let _ = std::fs::remove_file(&path);
                }
                Err(why)
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file at the mount point was made for it, and goes with it.
    pub fn made_file(&self) -> bool {
        self.made
    }
}

/// Take a mount away, and the file under it if `remove_file` and it is empty. `lazily`: also while it is in
/// use; then it vanishes from sight now and for good with its last user.
///
/// # Errors
/// `EBUSY`: somebody has the file open. `EINVAL`: nothing is mounted there.
pub fn unmount(path: &Path, lazily: bool, remove_file: bool) -> io::Result<()> {
    let flags = UnmountFlags::NOFOLLOW | if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(path, flags) {
        Err(rustix::io::Errno::PERM) => fusermount::unmount(path, lazily)?,
        other => other?,
    }
    if remove_file && std::fs::symlink_metadata(path).is_ok_and(|under| under.is_file() && under.len() == 0) {
        // Whoever took it away first did what was to be done.
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Whether what is mounted at `path`, on top, is something else than this device.
pub fn is_covered(path: &Path, name: &str) -> bool {
    // fusermount3 is given the name without these.
    let shown = name.replace(['\\', ','], "_");
    let all = mounts().unwrap_or_default();
    let top = all.iter().rfind(|one| one.path == path);
    top.is_some_and(|one| one.device_name().is_none_or(|device| device != name && device != shown))
}

/// Whether a mount of ours is at `path` that nobody answers for any more.
pub fn is_dead(path: &Path) -> bool {
    // What the kernel remembers of the file outlives its server.
    let asked = statx(CWD, path, AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
    // The second: it was asked while the kernel took back what it had given to the server.
    let dead = [rustix::io::Errno::NOTCONN, rustix::io::Errno::CONNABORTED];
    asked.is_err_and(|why| dead.contains(&why))
        && mounts().is_ok_and(|all| all.iter().any(|one| one.path == path && one.device_name().is_some()))
}

/// The device of ours that is mounted at `path`.
fn shown_at(path: &Path) -> Option<String> {
    let all = mounts().unwrap_or_default();
    all.iter().rfind(|one| one.path == path)?.device_name().map(str::to_owned)
}

/// Take away what servers that died have left at `path`; whether there was anything.
fn clear_dead(path: &Path) -> bool {
    // The mount table has no links, and the last part of the name cannot be asked about.
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (Ok(dir), Some(name)) = (dir.canonicalize(), path.file_name()) else { return false };
    let path = dir.join(name);
    let mut cleared = false;
    while is_dead(&path) && unmount(&path, true, false).is_ok() {
        cleared = true;
    }
    cleared
}

/// See that there is an empty file to mount on; whether it had to be made.
fn prepare(path: &Path) -> Result<bool, MountError> {
    let place = |why: String| MountError::Place { path: path.to_owned(), why };
    match std::fs::metadata(path) {
        Ok(there) if !there.is_file() => Err(place("it is no regular file".to_owned())),
        // What lies under a mount cannot be seen: a name mistaken for another should not hide data.
        Ok(there) if there.len() > 0 => Err(place("there is data in it".to_owned())),
        Ok(_) => Ok(false),
        Err(why) if why.kind() == io::ErrorKind::NotFound => {
            let made = std::fs::OpenOptions::new().write(true).create_new(true).open(path);
            made.map(|_| true).map_err(|why| match why.kind() {
                io::ErrorKind::NotFound => place("its folder is not there".to_owned()),
                _ => place(why.to_string()),
            })
        }
        Err(why) => Err(place(why.to_string())),
    }
}

fn mount(path: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let device = open_device().map_err(MountError::Device)?;
    let failed = |source: io::Error| MountError::Mount { path: path.to_owned(), source };
    // The root is a regular file. The kernel checks permissions by the file's mode, so others may be let in.
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
    fn a_device_that_may_not_be_opened_is_no_missing_program() {
        let said =
            |why: &str| MountError::Helper { path: PathBuf::from("/d.raw"), why: why.to_owned() }.to_string();
        let denied = said("fusermount3: failed to open /dev/fuse: Permission denied");
        assert!(denied.contains("let your user open /dev/fuse"), "{denied}");
        assert!(said("No such file or directory").ends_with("(install fuse3, or run as root)"));
    }

    #[test]
    fn data_is_not_hidden_by_a_mount() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk.img");
        std::fs::write(&file, "data").unwrap();
        let refused = prepare(&file).unwrap_err().to_string();
        assert!(refused.contains("there is data in it"), "{refused}");
        assert!(prepare(dir.path()).unwrap_err().to_string().contains("no regular file"));
    }

    #[test]
    fn a_file_that_is_not_there_is_made_and_an_empty_one_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        assert!(prepare(&file).unwrap());
        assert!(!prepare(&file).unwrap());
    }
}
