//! Mounts of a dead server, and the loop devices bound to them.
//!
//! They are found in the kernel's own lists (mounts, loop devices), so no state is kept in files.

use crate::helper::{self, Task};
use engine::rundir::RunDir;
use fuse::Mounted;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Longest wait for the proof that a mount's server is dead. The kernel answers at once unless the server
/// is just exiting.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns whether a file of ours is mounted there. A loop device alone does not count: loop devices belong
/// to the whole machine, and a server in another mount namespace (a container) may have a file of the same
/// name.
pub fn is_orphaned(file: &Path) -> bool {
    is_mounted(file)
}

/// Lists files that a dead server mounted for a device of this name: the one below its loop device in this
/// run directory, and those mounted on request anywhere. Files in other run directories are left out, as
/// names are per run directory. A mount that does not answer in time is not taken for dead.
pub fn orphaned_files(run: &RunDir, name: &str) -> Vec<PathBuf> {
    let own = run.loop_file(name);
    // The kernel reports paths with symbolic links resolved.
    let folder = run.path().canonicalize().unwrap_or_else(|_| run.path().to_owned());
    let own = own.file_name().map_or(own.clone(), |file| folder.join(file));
    orphaned(candidates(fuse::mounts().unwrap_or_default(), &own, name))
}

/// Selects the files, of all mounts, that belong to a device of this name; `own` is the file of its loop
/// device.
fn candidates(mounts: Vec<Mounted>, own: &Path, name: &str) -> Vec<PathBuf> {
    let of_it = mounts.into_iter().filter(|mount| mount.device_name() == Some(name)).map(|mount| mount.path);
    let mut files: Vec<PathBuf> =
        of_it.filter(|file| file == own || file.file_name() != own.file_name()).collect();
    // A file occurs once for each server that died there.
    files.sort();
    files.dedup();
    files
}

/// Returns the files whose server is dead. All are probed in parallel, as a stopped server never answers.
fn orphaned(files: Vec<PathBuf>) -> Vec<PathBuf> {
    let (sender, dead) = channel();
    for file in files {
        let sender = sender.clone();
        std::thread::spawn(move || {
            if fuse::is_dead(&file) {
                // The receiver does not exist any more after the timeout.
                let _ = sender.send(file);
            }
        });
    }
    drop(sender);
    let end = Instant::now() + PROBE_TIMEOUT;
    std::iter::from_fn(|| dead.recv_timeout(end.saturating_duration_since(Instant::now())).ok()).collect()
}

fn is_mounted(file: &Path) -> bool {
    let mounts = fuse::mounts().unwrap_or_default();
    mounts.iter().any(|mount| mount.path == file && mount.device_name().is_some())
}

/// Unmounts the file that a dead server left at `file`, and unbinds its loop devices. A loop device that is
/// still in use is unbound when its last user closes it; until then users get errors, and the returned
/// messages name them.
pub fn remove_orphan(file: &Path) -> Vec<String> {
    let mut left = Vec::new();
    // The kernel reports paths with symbolic links resolved.
    let Some(file) = file.parent().and_then(|dir| dir.canonicalize().ok()).zip(file.file_name()) else {
        return left;
    };
    let file = file.0.join(file.1);
    if !is_mounted(&file) {
        return left;
    }
    for bound in loopdev::bound_to(&file) {
        let users = loopdev::users(bound.number);
        let task = Task::Detach { number: bound.number, file: file.clone(), force: true };
        match helper::ask(&task) {
            Ok(_) if users.is_empty() => {}
            Ok(_) => {
                let users: Vec<String> = users.iter().map(ToString::to_string).collect();
                left.push(format!(
                    "/dev/loop{} has lost its server and is in use by {}",
                    bound.number,
                    users.join(" and ")
                ));
            }
            Err(why) => left.push(why.to_string()),
        }
    }
    // The path has one mount for each server that died there.
    while is_mounted(&file) {
        if let Err(why) = fuse::unmount(&file, true, true) {
            left.push(format!("{}: {why}", file.display()));
            break;
        }
    }
    for line in &left {
        tracing::warn!("{line}");
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounted(path: &str, kind: &str, source: &str) -> Mounted {
        Mounted { device: (0, 40), path: path.into(), kind: kind.to_owned(), source: source.to_owned() }
    }

    #[test]
    fn files_in_other_run_directories_are_left_out() {
        let ours = |path: &str, name: &str| mounted(path, fuse::FS_TYPE, &format!("blockyard:{name}"));
        let mounts = vec![
            ours("/run/one/disk.fuse", "disk"),
            ours("/run/two/disk.fuse", "disk"),
            ours("/srv/disk.raw", "disk"),
            // Two servers died there, one after the other.
            ours("/run/two/disk.fuse", "disk"),
            ours("/run/two/other.fuse", "other"),
            mounted("/srv/disk.img", "fuse.sshfs", "blockyard:disk"),
        ];
        let asked = |own: &str| candidates(mounts.clone(), Path::new(own), "disk");
        assert_eq!(asked("/run/two/disk.fuse"), ["/run/two/disk.fuse", "/srv/disk.raw"].map(PathBuf::from));
        assert_eq!(asked("/run/three/disk.fuse"), ["/srv/disk.raw"].map(PathBuf::from));
    }

    #[test]
    fn files_that_are_not_fuse_mounts_are_not_orphaned() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk.fuse");
        std::fs::write(&file, "").unwrap();
        assert!(orphaned(vec![file, folder.path().join("missing")]).is_empty());
        assert!(orphaned_files(&RunDir::at(folder.path()), "no-such-device").is_empty());
    }
}
