//! The state directory, whose files survive a reboot, unlike those of the run directory.

use std::path::PathBuf;

/// Returns `$BLOCKYARD_STATE`, else `/var/lib/blockyard` as root, else `$XDG_STATE_HOME/blockyard` or
/// `~/.local/state/blockyard`. Does not create it. `None`: no variable names it.
pub fn locate() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(path) = variable("BLOCKYARD_STATE") {
        return Some(path);
    }
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from("/var/lib/blockyard"));
    }
    let of_user = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    of_user.map(|path| path.join("blockyard"))
}
