//! Finds the users of a block device: mounts, swap areas, stacked devices, processes that have it open.

use std::path::{Path, PathBuf};

/// A user of a device or of one of its partitions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum User {
    /// A file system on it is mounted at this path.
    Mount(PathBuf),
    /// The kernel swaps to it.
    Swap(String),
    /// Another block device is stacked on it.
    Holder(String),
    /// A process has it open.
    Process {
        /// Its process id.
        pid: u32,
        /// Name of its command.
        name: String,
    },
}

impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            User::Mount(path) => write!(f, "the file system on {} (umount {0})", path.display()),
            User::Swap(device) => write!(f, "swap (swapoff {device})"),
            User::Holder(device) => write!(f, "{device} above it"),
            User::Process { pid, name } => write!(f, "{name} (pid {pid})"),
        }
    }
}

/// Formats users for the end of a message: ` by A and B`.
pub(crate) fn listed(users: &[User]) -> String {
    let all: Vec<String> = users.iter().map(User::to_string).collect();
    if all.is_empty() { String::new() } else { format!(" by {}", all.join(" and ")) }
}

/// The users of loop device `number` that are visible to this process.
pub fn users(number: u32) -> Vec<User> {
    let (parts, numbers) = names(number);
    let mut users = mounts(&numbers);
    users.extend(swaps(&parts));
    users.extend(holders(&parts));
    users.extend(processes(&parts));
    users
}

/// The mounts in this namespace, swap areas and stacked devices on loop device `number`: users that a few small files
/// of the kernel list. Processes that have it open are not searched.
pub fn stacked_on(number: u32) -> u64 {
    let (parts, numbers) = names(number);
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    (mounted_from(&mounts, &numbers).len() + swaps(&parts).len() + holders(&parts).len()) as u64
}

/// Whether a device has users. Searches all processes only if three files show no mount in this namespace,
/// swap area or stacked device.
pub fn is_used(number: u32) -> bool {
    if stacked_on(number) > 0 {
        return true;
    }
    let (parts, numbers) = names(number);
    !processes(&parts).is_empty() || !mounts(&numbers).is_empty()
}

/// Names of the device and its partitions, and their device numbers.
fn names(number: u32) -> (Vec<String>, Vec<String>) {
    let disk = format!("loop{number}");
    let parts: Vec<String> = std::iter::once(disk.clone()).chain(partitions(&disk)).collect();
    let numbers = parts.iter().filter_map(|part| device_number(part)).collect();
    (parts, numbers)
}

fn holders(parts: &[String]) -> Vec<User> {
    let of = |part: &String| std::fs::read_dir(format!("/sys/class/block/{part}/holders"));
    let entries = parts.iter().flat_map(|part| of(part).into_iter().flatten().flatten());
    entries.map(|entry| User::Holder(entry.file_name().to_string_lossy().into_owned())).collect()
}

fn partitions(disk: &str) -> Vec<String> {
    let entries = std::fs::read_dir(format!("/sys/block/{disk}")).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&format!("{disk}p"))).collect()
}

/// `major:minor`.
fn device_number(name: &str) -> Option<String> {
    Some(std::fs::read_to_string(format!("/sys/class/block/{name}/dev")).ok()?.trim().to_owned())
}

/// Mounts in every mount namespace visible in `/proc`; each path once.
fn mounts(numbers: &[String]) -> Vec<User> {
    let mut found: Vec<User> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let of_process = process.path();
        let Ok(namespace) = std::fs::read_link(of_process.join("ns/mnt")) else { continue };
        if !seen.insert(namespace) {
            continue;
        }
        let text = std::fs::read(of_process.join("mountinfo")).unwrap_or_default();
        for place in mounted_from(&text, numbers) {
            let user = User::Mount(place);
            if !found.contains(&user) {
                found.push(user);
            }
        }
    }
    found
}

/// The paths in a `mountinfo` at which one of these devices is mounted. btrfs shows a device number of its
/// own there, so the source is compared as well.
fn mounted_from(text: &[u8], numbers: &[String]) -> Vec<PathBuf> {
    let text = String::from_utf8_lossy(text);
    let names: Vec<String> = numbers.iter().filter_map(|number| name_of(number)).collect();
    text.lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let dash = words.iter().position(|word| *word == "-")?;
            let source = words.get(dash + 2)?;
            let is_it = numbers.iter().any(|number| words.get(2) == Some(&number.as_str()))
                || names.iter().any(|name| source.strip_prefix("/dev/") == Some(name));
            is_it.then(|| PathBuf::from(words[4].replace("\\040", " ")))
        })
        .collect()
}

fn name_of(number: &str) -> Option<String> {
    let link = std::fs::read_link(format!("/sys/dev/block/{number}")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

fn swaps(parts: &[String]) -> Vec<User> {
    let text = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let devices = text.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    let ours = devices.filter(|device| parts.iter().any(|part| device.strip_prefix("/dev/") == Some(part)));
    ours.map(|device| User::Swap(device.to_owned())).collect()
}

fn processes(parts: &[String]) -> Vec<User> {
    let mut users = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let descriptors = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let mut targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        let is_ours = |target: PathBuf| {
            target.strip_prefix("/dev").is_ok_and(|name| parts.iter().any(|part| name == Path::new(part)))
        };
        if targets.any(is_ours) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            users.push(User::Process { pid, name: name.trim_end().to_owned() });
        }
    }
    users
}
