//! The run directory, through which the processes of one user find each other.
//!
//! ```text
//! control.PID      the control socket of a process (HTTP)
//! NAME.control     a link to the control socket of the process that serves the device NAME
//! NAME.lock        locked by that process for as long as it lives; holds its PID
//! NAME.sock        the device's NBD socket, if no export was requested
//! NAME.fuse        the FUSE file below the device's loop device
//! NAME.log         the log of the process started by `add`
//! ```
//!
//! *Invariant:* a device belongs to the process that holds the lock on `NAME.lock`. The kernel drops the lock
//! when a process dies in any way, so nothing here trusts a PID, and files of dead processes are
//! distinguished from files in use. Directories are created with mode 0700, sockets with 0600.

use crate::private::{Identity, distrusted as distrusted_why, remove_dead};
use crate::spec::DeviceName;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open};
use rustix::io::Errno;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Why the run directory, or something in it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// No variable names the directory.
    #[error("there is no run directory (set BLOCKYARD_RUN or XDG_RUNTIME_DIR)")]
    Nowhere,
    /// A process serves a device of that name.
    #[error("the name is taken (choose another with --name, or run: blockyard del {0})")]
    Taken(DeviceName),
    /// Other users could change its content.
    #[error("the run directory {} is not used: {why}", path.display())]
    Distrusted {
        /// The directory.
        path: PathBuf,
        /// The reason, with a hint.
        why: String,
    },
    /// The operating system refused.
    #[error("{}: {source} ({fix})", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
        /// A hint.
        fix: &'static str,
    },
}

fn io_error(path: &Path, fix: &'static str) -> impl FnOnce(io::Error) -> RunDirError {
    move |source| RunDirError::Io { path: path.to_owned(), source, fix }
}

/// The run directory.
#[derive(Clone, Debug)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// Returns `$BLOCKYARD_RUN`, else `/run/blockyard` as root, else `$XDG_RUNTIME_DIR/blockyard`. Does not
    /// create it.
    ///
    /// # Errors
    /// [`RunDirError::Nowhere`].
    pub fn locate() -> Result<RunDir, RunDirError> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(path) = variable("BLOCKYARD_RUN") {
            let path = PathBuf::from(path);
            return Ok(RunDir(std::path::absolute(&path).unwrap_or(path)));
        }
        if rustix::process::geteuid().is_root() {
            return Ok(RunDir(PathBuf::from("/run/blockyard")));
        }
        let runtime = variable("XDG_RUNTIME_DIR").ok_or(RunDirError::Nowhere)?;
        Ok(RunDir(PathBuf::from(runtime).join("blockyard")))
    }

    /// Returns the run directory at `path`.
    pub fn at(path: impl Into<PathBuf>) -> RunDir {
        RunDir(path.into())
    }

    /// Creates the directory if it is missing.
    ///
    /// # Errors
    /// The operating system refuses, or other users own it or may write to it.
    pub fn create(&self) -> Result<(), RunDirError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.0)
            .map_err(io_error(&self.0, "set BLOCKYARD_RUN to a directory of yours"))?;
        self.check()
    }

    /// Checks that other users neither own the directory nor may write to it: sockets in it could lead
    /// anywhere. A missing directory passes.
    ///
    /// # Errors
    /// [`RunDirError::Distrusted`], or the operating system refuses.
    pub fn check(&self) -> Result<(), RunDirError> {
        let distrusted = |why: String| RunDirError::Distrusted { path: self.0.clone(), why };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = match open(&self.0, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(io_error(&self.0, "is the run directory yours?")(errno.into())),
        };
        if fs::symlink_metadata(&self.0).is_ok_and(|meta| meta.is_symlink()) {
            let why = "it is a symbolic link (set BLOCKYARD_RUN to where it leads)".to_owned();
            return Err(distrusted(why));
        }
        match distrusted_why(folder).map_err(io_error(&self.0, "is the run directory yours?"))? {
            Some(why) => Err(distrusted(why)),
            None => Ok(()),
        }
    }

    /// Checks that its entries can be listed. A missing directory passes.
    ///
    /// # Errors
    /// The operating system refuses, or it is not a directory.
    pub fn check_readable(&self) -> Result<(), RunDirError> {
        match fs::read_dir(&self.0) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => {
                let fix = "its devices cannot be listed: change its mode, or set BLOCKYARD_RUN to another directory";
                Err(io_error(&self.0, fix)(why))
            }
            _ => Ok(()),
        }
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Path of the NBD socket of a device without another export.
    pub fn nbd_socket(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.sock"))
    }

    /// Path of the FUSE file below a device's loop device.
    pub fn loop_file(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.fuse"))
    }

    /// Path of the log of a process started by `add`.
    pub fn log_file(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.log"))
    }

    /// Path of the link to the control socket of the process that serves the device.
    pub fn control_link(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.control"))
    }

    fn lock_file(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.lock"))
    }

    /// Claims a name for this process, and removes files of a dead owner.
    ///
    /// # Errors
    /// Another process has it, or the operating system refuses.
    pub fn claim(&self, name: &DeviceName) -> Result<NameClaim, RunDirError> {
        let path = self.lock_file(name.as_str());
        loop {
            let mode = Mode::RUSR | Mode::WUSR;
            let file = open(&path, OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC, mode)
                .map_err(|errno| io_error(&path, "is the run directory yours?")(errno.into()))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(RunDirError::Taken(name.clone())),
                Err(errno) => return Err(io_error(&path, "does it allow locks?")(errno.into())),
            }
            // Its owner may have unlinked it between open and lock: then the lock is on no file.
            if fstat(&file).is_ok_and(|stat| stat.st_nlink > 0) {
                let mut file = File::from(file);
                let pid = std::process::id();
                file.set_len(0)
                    .and_then(|()| writeln!(file, "{pid}"))
                    .map_err(io_error(&path, "is there free space?"))?;
                let claim = NameClaim { dir: self.clone(), name: name.clone(), _lock: file };
                claim.clear();
                return Ok(claim);
            }
        }
    }

    /// Creates the control socket of this process.
    ///
    /// # Errors
    /// The operating system refuses, or the path is too long for a socket.
    pub fn control_socket(&self) -> Result<ControlSocket, RunDirError> {
        let path = self.0.join(format!("control.{}", std::process::id()));
        // A process that had this PID before is dead.
        remove(&path);
        let listener = private_listener(&path)
            .map_err(io_error(&path, "set BLOCKYARD_RUN to a short path that is yours"))?;
        let file = Identity::of(&path).map_err(io_error(&path, "is the run directory yours?"))?;
        Ok(ControlSocket { path, file, listener: Some(listener) })
    }

    /// Lists the control sockets of all live processes, by PID. Files of dead ones are removed.
    pub fn processes(&self) -> Vec<PathBuf> {
        let mut found: Vec<(u32, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid = name.to_str().and_then(|name| name.strip_prefix("control.")).map(str::parse);
            let Some(Ok(pid)) = pid else { continue };
            match UnixStream::connect(entry.path()) {
                Ok(_) => found.push((pid, entry.path())),
                Err(why) if why.kind() == io::ErrorKind::ConnectionRefused => self.sweep(&entry.path()),
                // The socket vanished, or belongs to another user.
                Err(_) => {}
            }
        }
        found.sort();
        found.into_iter().map(|(_, path)| path).collect()
    }

    /// Removes the files of the dead owner of a control socket.
    fn sweep(&self, socket: &Path) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let link = entry.path();
            let named = link.file_name().and_then(|name| name.to_str()?.strip_suffix(".control"));
            let Some(Ok(name)) = named.map(str::parse::<DeviceName>) else { continue };
            let leads_there = fs::read_link(&link).is_ok_and(|target| self.0.join(target) == socket);
            if leads_there && let Ok(claim) = self.claim(&name) {
                drop(claim);
            }
        }
        remove(socket);
    }
}

fn remove(path: &Path) {
    // A missing file is fine, and one that stays is found again next time.
    let _ = fs::remove_file(path);
}

/// Creates a listening Unix socket that only its owner may connect to. It appears under its name once it
/// listens, as sockets without a listener are taken for a dead process's and removed.
fn private_listener(path: &Path) -> io::Result<UnixListener> {
    let early = path.with_extension(format!("~{}", std::process::id()));
    remove(&early);
    let before = rustix::process::umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
    let listener = UnixListener::bind(&early);
    rustix::process::umask(before);
    let listener = listener?;
    fs::rename(&early, path).inspect_err(|_| remove(&early))?;
    Ok(listener)
}

/// A claim on a name, until it is dropped; then the files of that name are removed.
#[derive(Debug)]
pub struct NameClaim {
    dir: RunDir,
    name: DeviceName,
    _lock: File,
}

impl NameClaim {
    /// Points `NAME.control` at this process, whose control socket is at `control`.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn publish(&self, control: &Path) -> Result<(), RunDirError> {
        let link = self.dir.control_link(self.name.as_str());
        let target = control.file_name().unwrap_or_default();
        std::os::unix::fs::symlink(target, &link).map_err(io_error(&link, "is the run directory yours?"))
    }

    /// Renames `NAME.control` and the log when a device of this process is renamed.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn rename_from(&self, before: &NameClaim) -> Result<(), RunDirError> {
        let (run, from, to) = (&self.dir, before.name.as_str(), self.name.as_str());
        let link = run.control_link(to);
        fs::rename(run.control_link(from), &link).map_err(io_error(&link, "is the run directory yours?"))?;
        // There may be no log.
        let _ = fs::rename(run.log_file(from), run.log_file(to));
        Ok(())
    }

    fn clear(&self) {
        let name = self.name.as_str();
        remove(&self.dir.control_link(name));
        // It may be the socket of another device, which was configured to listen there.
        let _ = remove_dead(&self.dir.nbd_socket(name));
        // A non-empty log is kept: it may say why its process died.
        let log = self.dir.log_file(name);
        if fs::metadata(&log).is_ok_and(|metadata| metadata.len() == 0) {
            remove(&log);
        }
    }
}

impl Drop for NameClaim {
    fn drop(&mut self) {
        self.clear();
        // Still locked: a process that opened it meanwhile sees that it is unlinked.
        remove(&self.dir.lock_file(self.name.as_str()));
    }
}

/// The control socket of this process. Its file is removed on drop.
#[derive(Debug)]
pub struct ControlSocket {
    path: PathBuf,
    /// Identity of the file at `path`, while it is ours.
    file: Identity,
    /// Empty once taken.
    listener: Option<UnixListener>,
}

impl ControlSocket {
    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the listening socket. `None` the second time.
    pub fn listener(&mut self) -> Option<UnixListener> {
        self.listener.take()
    }

    /// Removes the file early, for a process that exits without dropping its values.
    pub fn remove(&self) {
        self.file.remove(&self.path);
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn run() -> (tempfile::TempDir, RunDir) {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDir::at(directory.path().join("run"));
        run.create().unwrap();
        (directory, run)
    }

    fn name(text: &str) -> DeviceName {
        text.parse().unwrap()
    }

    #[test]
    fn a_socket_that_cannot_be_created_has_a_reason() {
        let (_guard, run) = run();
        let long = run.path().join("x".repeat(120));
        let why = private_listener(&long).unwrap_err();
        assert_eq!(why.kind(), io::ErrorKind::InvalidInput, "{why}");
        let why = private_listener(&run.path().join("absent/control")).unwrap_err();
        assert_eq!(why.kind(), io::ErrorKind::NotFound, "{why}");
    }

    #[test]
    fn a_name_has_one_owner_until_its_claim_is_dropped() {
        let (_guard, run) = run();
        let claim = run.claim(&name("disk")).unwrap();
        assert!(matches!(run.claim(&name("disk")), Err(RunDirError::Taken(_))));
        assert!(run.claim(&name("other")).is_ok());
        drop(claim);
        assert!(run.claim(&name("disk")).is_ok());
        assert_eq!(fs::read_dir(run.path()).unwrap().count(), 0);
    }

    #[test]
    fn directory_and_control_socket_are_private() {
        let (_guard, run) = run();
        let control = run.control_socket().unwrap();
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(run.path()), 0o700);
        assert_eq!(mode(control.path()), 0o600);
    }

    #[test]
    fn files_of_a_dead_process_are_removed() {
        let (_guard, run) = run();
        let socket = run.path().join("control.1");
        drop(UnixListener::bind(&socket).unwrap());
        std::os::unix::fs::symlink("control.1", run.control_link("disk")).unwrap();
        fs::write(run.path().join("disk.lock"), "1\n").unwrap();
        drop(UnixListener::bind(run.nbd_socket("disk")).unwrap());
        fs::write(run.log_file("disk"), "").unwrap();
        assert!(run.processes().is_empty());
        assert_eq!(fs::read_dir(run.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_live_process_is_found_and_its_names_lead_to_it() {
        let (_guard, run) = run();
        let mut control = run.control_socket().unwrap();
        let claim = run.claim(&name("disk")).unwrap();
        claim.publish(control.path()).unwrap();
        assert_eq!(run.processes(), [control.path()]);
        assert!(UnixStream::connect(run.control_link("disk")).is_ok());
        assert!(control.listener().is_some() && control.listener().is_none());
        drop(control);
        assert!(run.processes().is_empty());
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        let (guard, run) = run();
        let why = |run: &RunDir| run.create().unwrap_err().to_string();
        let chmod = |mode| fs::set_permissions(run.path(), fs::Permissions::from_mode(mode)).unwrap();
        for mode in [0o777, 0o770, 0o702] {
            chmod(mode);
            let (why, checked) = (why(&run), run.check().unwrap_err().to_string());
            assert!(why.contains("others may write to it") && why.contains("chmod 700"), "{why}");
            assert_eq!(why, checked);
        }
        chmod(0o755);
        run.create().unwrap();
        let link = RunDir::at(guard.path().join("link"));
        std::os::unix::fs::symlink(run.path(), link.path()).unwrap();
        assert!(why(&link).contains("it is a symbolic link"));
        assert!(RunDir::at(guard.path().join("absent")).check().is_ok());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(run.path(), Some(12345), None).unwrap();
            assert!(why(&run).contains("it belongs to user 12345 and not to you"), "{}", why(&run));
        }
    }

    #[test]
    fn a_lock_is_not_taken_through_a_link() {
        let (guard, run) = run();
        let victim = guard.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, run.path().join("disk.lock")).unwrap();
        assert!(run.claim(&name("disk")).is_err());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }

    #[test]
    fn sockets_of_other_processes_are_kept() {
        let (_guard, run) = run();
        let control = run.control_socket().unwrap();
        fs::rename(control.path(), run.path().join("before")).unwrap();
        let path = control.path().to_owned();
        let _other = UnixListener::bind(&path).unwrap();
        drop(control);
        assert!(path.exists(), "another process has replaced it");
        // A device that was configured to listen at the default path of another device's socket.
        let live = UnixListener::bind(run.nbd_socket("disk")).unwrap();
        drop(run.claim(&name("disk")).unwrap());
        assert!(run.nbd_socket("disk").exists());
        drop(live);
        drop(run.claim(&name("disk")).unwrap());
        assert!(!run.nbd_socket("disk").exists(), "the dead server's socket is removed");
    }

    #[test]
    fn a_log_that_is_not_empty_is_kept() {
        let (_guard, run) = run();
        let claim = run.claim(&name("disk")).unwrap();
        fs::write(run.log_file("disk"), "why\n").unwrap();
        drop(claim);
        assert!(run.log_file("disk").exists());
    }

    #[test]
    fn a_path_too_long_for_a_socket_has_a_hint() {
        let (_guard, run) = run();
        let run = RunDir::at(run.path().join("x".repeat(120)));
        run.create().unwrap();
        let error = run.control_socket().unwrap_err().to_string();
        assert!(error.contains("set BLOCKYARD_RUN to a short path"), "{error}");
    }
}
