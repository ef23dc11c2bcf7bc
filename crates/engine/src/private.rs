//! Files and sockets that are private to this user: created without access for others, opened without
//! following links, and removed only while they are the files that were created.

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// How an existing file is opened for writing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteMode {
    /// Its content is removed.
    Truncate,
    /// Data is appended.
    Append,
}

/// Opens a file for writing, and creates it with mode 0600 if it is missing. A symbolic link in the last
/// component is refused, except in /dev and /proc (`/dev/stdout`), and so is a regular file of another user.
///
/// # Errors
/// The file cannot be opened or not be trusted; the message has a hint.
pub fn create(path: &Path, mode: WriteMode) -> io::Result<File> {
    let is_kernels = path.starts_with("/dev") || path.starts_with("/proc");
    let mut options = File::options();
    options.create(true).mode(0o600).custom_flags(if is_kernels { 0 } else { libc::O_NOFOLLOW });
    // Truncated only after its owner was checked.
    let options = options.write(true).append(mode == WriteMode::Append);
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
    if mode == WriteMode::Truncate {
        file.set_len(0)?;
    }
    Ok(file)
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// Device and inode of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// Returns the identity of a file, without following a link.
    pub fn of(path: &Path) -> io::Result<Identity> {
        let meta = fs::symlink_metadata(path)?;
        Ok(Identity { device: meta.dev(), inode: meta.ino() })
    }

    /// Removes the file at a path if it is still this one: another process may have replaced it.
    pub fn remove(self, path: &Path) {
        if Identity::of(path).is_ok_and(|found| found == self) {
            // A missing file is fine.
            let _ = fs::remove_file(path);
        }
    }
}

/// Returns whether nobody listens at a socket. Does not block, as connecting to a stopped server may.
pub fn is_dead(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return false };
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    matches!(connect(&socket, &address), Err(Errno::CONNREFUSED))
}

/// Removes the socket of a dead server. `false`: the server is alive, or the file is no socket.
pub fn remove_dead(path: &Path) -> io::Result<bool> {
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

/// Longest time that another process may take to replace a socket in the same directory.
const REPLACE_MAX: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Locks the directory of a socket while a dead one is replaced: otherwise, of two servers that find it dead,
/// the second would remove the first one's new socket. Blocks its thread for 2 s at most.
pub fn lock_folder(path: &Path) -> io::Result<OwnedFd> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    let begun = Instant::now();
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < REPLACE_MAX => std::thread::sleep(POLL_INTERVAL),
            result => return result.map(|()| folder).map_err(io::Error::from),
        }
    }
}

/// Returns why a directory must not be trusted with control sockets, with a hint.
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
    fn files_are_private_and_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link, victim) =
            (folder.path().join("new"), folder.path().join("link"), folder.path().join("victim"));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let before = rustix::process::umask(Mode::empty());
        let made = create(&path, WriteMode::Truncate);
        rustix::process::umask(before);
        io::Write::write_all(&mut made.unwrap(), b"text").unwrap();
        assert_eq!(mode(&path), 0o600);
        io::Write::write_all(&mut create(&path, WriteMode::Append).unwrap(), b" appended").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"text appended");
        drop(create(&path, WriteMode::Truncate).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"");
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        for write_mode in [WriteMode::Truncate, WriteMode::Append] {
            let why = create(&link, write_mode).unwrap_err().to_string();
            assert!(why.contains("symbolic link"), "{why}");
        }
        symlink(folder.path().join("absent"), folder.path().join("dangling")).unwrap();
        assert!(create(&folder.path().join("dangling"), WriteMode::Truncate).is_err());
        assert!(!folder.path().join("absent").exists());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        assert!(create(Path::new("/dev/null"), WriteMode::Truncate).is_ok());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&victim, Some(12345), None).unwrap();
            let why = create(&victim, WriteMode::Truncate).unwrap_err().to_string();
            assert!(why.contains("it belongs to user 12345"), "{why}");
            assert_eq!(fs::read(&victim).unwrap(), b"precious");
        }
    }

    #[test]
    fn only_the_created_file_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = UnixListener::bind(&path).unwrap();
        let identity = Identity::of(&path).unwrap();
        // Another socket replaces it; the first one is renamed so that its inode number is not reused.
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
