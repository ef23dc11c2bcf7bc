//! Clean-up of a folder after killed servers and failed tests: mounted file systems, and loop devices over
//! its files. A folder with a mount could not be removed, and a loop device would stay bound for ever.
//!
//! A dropped [`crate::server::Sandbox`] calls this when no server runs there any more. Mounts and loop
//! devices of other programs are not touched.

use rustix::mount::UnmountFlags;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Detaches loop devices over files in the folder, and unmounts its mounts.
pub(crate) fn release_within(folder: &Path) {
    // Loop devices first, as their files have other names once the file system below is unmounted. A busy
    // loop device is detached when its last user, the mount, is gone.
    for node in loops_over(folder) {
        eprintln!("left behind, and detached: {}", node.display());
        let _ = Command::new("losetup").arg("--detach").arg(node).stderr(Stdio::null()).status();
    }
    // The last mount is on top.
    for at in mounts_within(folder).iter().rev() {
        eprintln!("left behind, and unmounted: {}", at.display());
        // Another process may have unmounted it.
        let _ = rustix::mount::unmount(at, UnmountFlags::DETACH);
    }
}

fn loops_over(folder: &Path) -> Vec<PathBuf> {
    let disks = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let names = disks.filter(|disk| disk.file_name().as_encoded_bytes().starts_with(b"loop"));
    let is_over = |name: &std::fs::DirEntry| {
        let file = std::fs::read(name.path().join("loop/backing_file")).unwrap_or_default();
        PathBuf::from(OsString::from_vec(file)).starts_with(folder)
    };
    names.filter(is_over).map(|name| Path::new("/dev").join(name.file_name())).collect()
}

fn mounts_within(folder: &Path) -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    places.map(unescaped).filter(|at| at.starts_with(folder)).collect()
}

/// Unescapes a path of the mount table, where blanks and the like are written as `\040`.
fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()).filter(|_| first == b'\\') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes).into()
}
