//! The processes that have a file open, for messages about files that cannot be removed.

use std::path::Path;

/// A process that has a file open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct User {
    /// Process ID.
    pub pid: u32,
    /// Name of its command (`/proc/PID/comm`).
    pub name: String,
}

/// Lists the processes that have `path` open, as far as `/proc` may be read. The file itself is not accessed:
/// links are compared by name, as the file may be on a file system that does not answer any more.
pub fn users_of(path: &Path) -> Vec<User> {
    let mut users: Vec<User> = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let descriptors = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let mut targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        if targets.any(|target| target == path) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            users.push(User { pid, name: name.trim_end().to_owned() });
        }
    }
    users.sort_by_key(|user| user.pid);
    users
}

/// Formats users as part of a sentence: ` by cat (17) and dd (18)`; empty without users.
pub(crate) fn listed(users: &[User]) -> String {
    let names: Vec<String> = users.iter().map(|user| format!("{} ({})", user.name, user.pid)).collect();
    match names.split_last() {
        None => String::new(),
        Some((only, [])) => format!(" by {only}"),
        Some((last, others)) => format!(" by {} and {last}", others.join(", ")),
    }
}
