//! Aborts a FUSE connection: pending and later operations on the file fail.
//!
//! The kernel's switch is a file in the file system `fusectl`. If that is not mounted, root mounts it
//! privately, where no other process sees it.

use rustix::fs::{Mode, OFlags, open, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::io;
use std::os::fd::OwnedFd;

/// Mount point of `fusectl`, if it is mounted.
const CONTROL: &str = "/sys/fs/fuse/connections";

/// Aborts the connection of this number, which is the minor number of its file system's device.
///
/// # Errors
/// `ENOENT`: there is no such connection. Errors of mounting: only root may.
pub fn abort(connection: u32) -> io::Result<()> {
    let name = format!("{connection}/abort");
    let switch = match open(format!("{CONTROL}/{name}"), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(switch) => switch,
        Err(_) => openat(control()?, &name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?,
    };
    rustix::io::write(switch, b"1")?;
    Ok(())
}

/// Whether this process may abort connections.
pub fn can_abort() -> bool {
    control().is_ok()
}

fn control() -> io::Result<OwnedFd> {
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_connection_is_reported() {
        if !can_abort() {
            return eprintln!("skipped: only root may mount fusectl, and only where there is FUSE");
        }
        assert_eq!(abort(u32::MAX).map_err(|why| why.raw_os_error()), Err(Some(libc::ENOENT)));
    }
}
