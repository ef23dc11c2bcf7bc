//! Files and sockets that are this user's alone: made so that nobody else reads them, opened without following a link
//! that somebody else may have put there, and removed only as long as they are the ones that were made.

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// How a file is opened that is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// What it held is gone.
    New,
    /// It grows.
    Goes,
}

/// Opens a file to be written, and makes it with mode 0600 if it is missing. A link at its end is refused, but for the
/// kernel's own (`/dev/stdout`), and so is a regular file of another user.
///
/// # Errors
/// It cannot be opened, or is not to be trusted; the message says what to do.
pub fn create(path: &Path, content: Content) -> io::Result<File> {
    let is_kernels = path.starts_with("/dev") || path.starts_with("/proc");
    let mut options = File::options();
    options.create(true).mode(0o600).custom_flags(if is_kernels { 0 } else { libc::O_NOFOLLOW });
    // It is emptied when it is known to be ours.
    let options = options.write(true).append(content == Content::Goes);
    let file = options.open(path).map_err(|why| match why.raw_os_error() {
        Some(libc::ELOOP) => refused("it is a symbolic link, which is not followed (give the file itself)"),
        _ => why,
    })?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Ok(file);
    }
    if meta.uid() != rustix::process::geteuid().as_raw() {
        return Err(refused(&format!("it belongs to user {} (remove it, or give another)", meta.uid())));
    }
    if content == Content::New {
        file.set_len(0)?;
    }
    Ok(file)
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// Which socket file a path led to when it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// Of what is at a path, itself and not what it leads to.
    pub(crate) fn of(path: &Path) -> io::Result<Identity> {
        let meta = fs::symlink_metadata(path)?;
        Ok(Identity { device: meta.dev(), inode: meta.ino() })
    }

    /// Removes the file at a path if it is still this one: another process may have put its own there.
    pub(crate) fn remove(self, path: &Path) {
        if Identity::of(path).is_ok_and(|found| found == self) {
            // Gone already is as good.
            let _ = fs::remove_file(path);
        }
    }
}

/// Whether nobody listens at a socket any more. Does not wait, as a connection to a server that is stopped may.
pub(crate) fn is_dead(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return false };
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    matches!(connect(&socket, &address), Err(Errno::CONNREFUSED))
}

/// Removes the socket that a dead server left. `false`: what is there is alive or no socket.
pub(crate) fn remove_dead(path: &Path) -> io::Result<bool> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    let identity = Identity::of(path)?;
    let is_dead = is_dead(path);
    if is_dead {
        identity.remove(path);
    }
    Ok(is_dead)
}

/// How long another process may take to replace a socket in the same folder.
const REPLACING_MAX: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(5);

/// Holds the folder of a socket while a dead one is replaced: of two servers that find the same dead socket, the second
/// would remove the first one's new one.
pub(crate) fn hold_folder(path: &Path) -> io::Result<OwnedFd> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    let begun = Instant::now();
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < REPLACING_MAX => std::thread::sleep(LOOK),
            result => return result.map(|()| folder).map_err(io::Error::from),
        }
    }
}

/// Why a folder is not to be trusted with control sockets, and what to do.
pub(crate) fn distrusted(folder: impl AsFd) -> io::Result<Option<String>> {
    let stat = rustix::fs::fstat(folder)?;
    let ours = rustix::process::geteuid();
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(Some("it is not a directory (set BLOCKYARD_RUN to one of yours)".to_owned()));
    }
    if stat.st_uid != ours.as_raw() {
        let (theirs, ours) = (stat.st_uid, ours.as_raw());
        return Ok(Some(format!(
            "it belongs to user {theirs} and not to you, user {ours} (set BLOCKYARD_RUN to a directory of yours)"
        )));
    }
    let mode = stat.st_mode & 0o777;
    Ok((mode & 0o022 != 0).then(|| {
        format!("others may write to it, its mode is {mode:04o} (chmod 700, or set BLOCKYARD_RUN to another)")
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_file_is_made_for_its_owner_alone_and_no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link, victim) =
            (folder.path().join("new"), folder.path().join("link"), folder.path().join("victim"));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let before = rustix::process::umask(Mode::empty());
        let made = create(&path, Content::New);
        rustix::process::umask(before);
        io::Write::write_all(&mut made.unwrap(), b"text").unwrap();
        assert_eq!(mode(&path), 0o600);
        io::Write::write_all(&mut create(&path, Content::Goes).unwrap(), b" goes on").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"text goes on");
        drop(create(&path, Content::New).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"");
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        for content in [Content::New, Content::Goes] {
            let why = create(&link, content).unwrap_err().to_string();
            assert!(why.contains("symbolic link"), "{why}");
        }
        symlink(folder.path().join("absent"), folder.path().join("dangling")).unwrap();
        assert!(create(&folder.path().join("dangling"), Content::New).is_err());
        assert!(!folder.path().join("absent").exists());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        assert!(create(Path::new("/dev/null"), Content::New).is_ok());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&victim, Some(12345), None).unwrap();
            let why = create(&victim, Content::New).unwrap_err().to_string();
            assert!(why.contains("it belongs to user 12345"), "{why}");
            assert_eq!(fs::read(&victim).unwrap(), b"precious");
        }
    }

    #[test]
    fn only_the_file_that_was_made_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = UnixListener::bind(&path).unwrap();
        let identity = Identity::of(&path).unwrap();
        // Another one takes its place; the first is still there under another name, so that its number is not used anew.
        fs::rename(&path, folder.path().join("before")).unwrap();
        let second = UnixListener::bind(&path).unwrap();
        identity.remove(&path);
        assert!(path.exists());
        assert!(!is_dead(&path) && !remove_dead(&path).unwrap());
        drop((first, second));
        assert!(is_dead(&path) && remove_dead(&path).unwrap());
        assert!(!path.exists());
    }
}
