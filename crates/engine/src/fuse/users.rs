//! Who has a file open: for messages when something cannot be taken away.

use std::path::Path;

/// A process that has a file open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct User {
    /// The process.
    pub pid: u32,
    /// Its command's name.
    pub name: String,
}

/// Processes that have `path` open, as far as we may see them. The file is not looked at: where its links lead
/// is compared by name, as it may be on a file system that does not answer any more.
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

/// Users as part of a sentence: ` by cat (17) and dd (18)`; nothing when there are none.
pub(crate) fn listed(users: &[User]) -> String {
    let names: Vec<String> = users.iter().map(|user| format!("{} ({})", user.name, user.pid)).collect();
    match names.split_last() {
        None => String::new(),
        Some((only, [])) => format!(" by {only}"),
        Some((last, others)) => format!(" by {} and {last}", others.join(", ")),
    }
}
