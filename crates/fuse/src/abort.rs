//! Ending a connection from outside: whoever waits for an answer, or uses the file later, gets an error.
//!
//! The kernel's switch for that is a file of the file system `fusectl`. Where that is not mounted, root mounts it for
//! itself, in no place that anybody else sees.

use rustix::fs::{Mode, OFlags, open, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::io;
use std::os::fd::OwnedFd;

/// Where `fusectl` is mounted, if it is.
const CONTROL: &str = "/sys/fs/fuse/connections";

/// End the connection of this number, which is the minor number of its file system's device.
///
/// # Errors
/// `ENOENT`: there is none any more. Those of mounting: only root may.
pub fn abort(connection: u32) -> io::Result<()> {
    let name = format!("{connection}/abort");
    let switch = match open(format!("{CONTROL}/{name}"), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(switch) => switch,
        Err(_) => openat(control()?, &name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?,
    };
    rustix::io::write(switch, b"1")?;
    Ok(())
}

/// Whether this process could do that.
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
    fn a_connection_that_is_not_there_is_said_to_be_so() {
        if !can_abort() {
            return eprintln!("skipped: only root may mount fusectl, and only where there is FUSE");
        }
        assert_eq!(abort(u32::MAX).map_err(|why| why.raw_os_error()), Err(Some(libc::ENOENT)));
    }
}
