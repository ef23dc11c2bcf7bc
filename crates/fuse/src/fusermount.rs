//! `fusermount3`, which mounts for those who are not root.
//!
//! It gets one end of a socket pair under the number that `_FUSE_COMMFD` says, and sends the descriptor of
//! the mount through it.

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

/// Have it mount; the descriptor of the mount.
pub(crate) fn mount(path: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty())?;
    // Commas and backslashes end an option there.
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
    // It sends before it ends, or ends without sending.
    let device = receive(&ours);
    let outcome = child.wait_with_output()?;
    match device {
        Ok(Some(device)) if outcome.status.success() => Ok(device),
        Err(why) => Err(why),
        _ => {
            let said = String::from_utf8_lossy(&outcome.stderr);
            Err(io::Error::other(said.trim().to_owned()))
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

/// Have it unmount what it mounted.
pub(crate) fn unmount(path: &Path, lazily: bool) -> io::Result<()> {
    let mut words = vec![OsString::from("-u"), "-q".into()];
    if lazily {
        words.push("-z".into());
    }
    let outcome = Command::new(PROGRAM).args(words).arg("--").arg(path).stdin(Stdio::null()).output()?;
    if outcome.status.success() {
        return Ok(());
    }
    // With -q it does not say why; the one reason there is besides lacking permission.
    Err(io::Error::from(rustix::io::Errno::BUSY))
}
