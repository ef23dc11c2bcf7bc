//! Mounts with `fusermount3`, for users other than root.
//!
//! It inherits one end of a socket pair, whose number is in `_FUSE_COMMFD`, and sends the descriptor of the
//! mount through it.

use crate::mount::MountOptions;
use crate::mounts::SOURCE_PREFIX;
use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};
use std::ffi::OsString;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};

const PROGRAM: &str = "fusermount3";

/// Mounts; returns the descriptor of the mount.
pub(crate) fn mount(path: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty())?;
    // Commas and backslashes separate options there.
    let name = options.name.replace(['\\', ','], "_");
    let mut words = format!("fsname={SOURCE_PREFIX}{name},subtype=blockyard,nosuid,nodev");
    if options.read_only {
        words += ",ro";
    }
    let child = Command::new(PROGRAM)
        .args(["-o", &words, "--"])
        .arg(path)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|why| io::Error::new(why.kind(), format!("{PROGRAM}: {why}")))?;
    drop(theirs);
    // It sends before it exits, or exits without sending.
    let device = receive(&ours);
    let outcome = child.wait_with_output()?;
    match device {
        Ok(Some(device)) if outcome.status.success() => Ok(device),
        Err(why) => Err(why),
        _ => {
            let errors = String::from_utf8_lossy(&outcome.stderr);
            Err(io::Error::other(errors.trim().to_owned()))
        }
    }
}

fn receive(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

/// Unmounts a mount made by `fusermount3`.
pub(crate) fn unmount(path: &Path, lazily: bool) -> io::Result<()> {
    let mut words = vec![OsString::from("-u"), "-q".into()];
    if lazily {
        words.push("-z".into());
    }
    let outcome = Command::new(PROGRAM).args(words).arg("--").arg(path).stdin(Stdio::null()).output()?;
    if outcome.status.success() {
        return Ok(());
    }
    // With -q it gives no reason; besides missing permission there is just one.
    Err(io::Error::from(rustix::io::Errno::BUSY))
}
