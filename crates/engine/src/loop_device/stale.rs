//! What a server that died left: a mount that nobody answers for, and loop devices bound to it.
//!
//! All of it is found by asking the kernel, which forgets nothing and does not lie: no file has to be kept, and none
//! can be wrong.

use super::helper::{self, Task};
use std::path::{Path, PathBuf};

/// Whether a mount of ours is there. A loop device alone is none of ours: loop devices are the whole machine's, and in
/// another mount namespace (a container) another server has a file of the same name.
pub fn is_left_behind(file: &Path) -> bool {
    is_mounted(file)
}

/// Files that a device of this name was shown as, by a server that died.
pub fn dead_files(name: &str) -> Vec<PathBuf> {
    let mounts = fuse::mounts().unwrap_or_default();
    let of_it = mounts.into_iter().filter(|mount| mount.device_name() == Some(name));
    of_it.map(|mount| mount.path).filter(|path| fuse::is_dead(path)).collect()
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
