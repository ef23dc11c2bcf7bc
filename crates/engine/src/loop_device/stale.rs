//! What a server that died left: a mount that nobody answers for, and loop devices bound to it.
//!
//! All of it is found by asking the kernel, which forgets nothing and does not lie: no file has to be kept, and none
//! can be wrong.

use super::helper::{self, Task};
use crate::rundir::RunDir;
use fuse::Mounted;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long a mount may take to say that its server is dead, which the kernel says at once unless that one is just ending.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether a mount of ours is there. A loop device alone is none of ours: loop devices are the whole machine's, and in
/// another mount namespace (a container) another server has a file of the same name.
pub fn is_left_behind(file: &Path) -> bool {
    is_mounted(file)
}

/// Files that a device of this name was shown as, by a server that died: the one below its loop device in this run
/// directory, and those that it was mounted on by request, wherever they lie. What lies in another run directory is for
/// whoever has that one, as a name is known in its own only. A mount that nobody answers for in time is not dead.
pub fn dead_files(run: &RunDir, name: &str) -> Vec<PathBuf> {
    let own = run.loop_file(name);
    // The kernel knows paths without links.
    let folder = run.path().canonicalize().unwrap_or_else(|_| run.path().to_owned());
    let own = own.file_name().map_or(own.clone(), |file| folder.join(file));
    dead_among(to_ask(fuse::mounts().unwrap_or_default(), &own, name))
}

/// The files among all mounts that a device of this name may have been shown as; `own` is that of its loop device.
fn to_ask(mounts: Vec<Mounted>, own: &Path, name: &str) -> Vec<PathBuf> {
    let of_it = mounts.into_iter().filter(|mount| mount.device_name() == Some(name)).map(|mount| mount.path);
    let mut files: Vec<PathBuf> =
        of_it.filter(|file| file == own || file.file_name() != own.file_name()).collect();
    // As often as servers died there.
    files.sort();
    files.dedup();
    files
}

/// Those that are dead. Each is asked beside the others: a server that was stopped never answers.
fn dead_among(files: Vec<PathBuf>) -> Vec<PathBuf> {
    let (sender, dead) = channel();
    for file in files {
        let sender = sender.clone();
        std::thread::spawn(move || {
            if fuse::is_dead(&file) {
                // Nobody waits for it any more: it came too late.
                let _ = sender.send(file);
            }
        });
    }
    drop(sender);
    let end = Instant::now() + PATIENCE;
    std::iter::from_fn(|| dead.recv_timeout(end.saturating_duration_since(Instant::now())).ok()).collect()
}

fn is_mounted(file: &Path) -> bool {
    let mounts = fuse::mounts().unwrap_or_default();
    mounts.iter().any(|mount| mount.path == file && mount.device_name().is_some())
}

/// Take away what was left at `file`, whose server is known to be dead. A loop device that somebody still uses goes
/// with its last user, who gets errors meanwhile; here it is told who they are.
pub fn clear_stale(file: &Path) -> Vec<String> {
    let mut left = Vec::new();
    // The kernel knows paths without links.
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
                    "/dev/loop{} has lost its server and is used by {}",
                    bound.number,
                    users.join(" and ")
                ));
            }
            Err(why) => left.push(why.to_string()),
        }
    }
    // As often as servers died there.
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
    fn what_lies_in_another_run_directory_is_for_whoever_has_that() {
        let ours = |path: &str, name: &str| mounted(path, fuse::FS_TYPE, &format!("blockyard:{name}"));
        let mounts = vec![
            ours("/run/one/disk.fuse", "disk"),
            ours("/run/two/disk.fuse", "disk"),
            ours("/srv/disk.raw", "disk"),
            // Two servers died there, one upon the other.
            ours("/run/two/disk.fuse", "disk"),
            ours("/run/two/other.fuse", "other"),
            mounted("/srv/disk.img", "fuse.sshfs", "blockyard:disk"),
        ];
        let asked = |own: &str| to_ask(mounts.clone(), Path::new(own), "disk");
        assert_eq!(asked("/run/two/disk.fuse"), ["/run/two/disk.fuse", "/srv/disk.raw"].map(PathBuf::from));
        assert_eq!(asked("/run/three/disk.fuse"), ["/srv/disk.raw"].map(PathBuf::from));
    }

    #[test]
    fn what_is_no_mount_of_ours_is_not_dead() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk.fuse");
        std::fs::write(&file, "").unwrap();
        assert!(dead_among(vec![file, folder.path().join("missing")]).is_empty());
        assert!(dead_files(&RunDir::at(folder.path()), "a-name-that-nobody-gave").is_empty());
    }
}
