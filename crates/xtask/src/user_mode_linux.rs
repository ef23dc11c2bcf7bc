//! User-mode Linux, whose driver `virtio_uml` is a front-end of vhost-user: a kernel that runs as a process.
//!
//! Nothing is installed. Four files of two packages of [`SUITE`] are copied to `target/foreign/user-mode-linux`:
//!
//! | file | content |
//! |---|---|
//! | `linux` | the kernel, a dynamically linked program |
//! | `ld.so`, `libc.so.6` | the dynamic linker and the C library that it needs |
//! | `virtio_blk.ko` | the driver of block devices, a module |
//!
//! The kernel is started in this directory: it names its linker `./ld.so` instead of `/lib64/ld-linux-x86-64.so.2`.
//! A kernel that is an argument of its linker finds its heap far from its code, takes the distance for
//! memory, and panics.

use crate::foreign::at;
use crate::guest::apt::{Apt, numbers};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Environment variable with a directory of the four files to use instead of the fetched ones.
pub const USER_MODE_LINUX: &str = "BLOCKYARD_USER_MODE_LINUX";

/// The release whose kernel is new enough.
const SUITE: &str = "forky";
/// The first kernel that runs its processes with seccomp instead of ptrace.
const VERSION: &[u64] = &[6, 16];
const PACKAGES: &[&str] = &["user-mode-linux", "libc6"];
/// The linker's path in the kernel's program header, and the one that replaces it.
const LINKER: &[u8] = b"/lib64/ld-linux-x86-64.so.2\0";
const OWN_LINKER: &[u8] = b"./ld.so\0";

/// Fetches the files once, and returns their directory; a `String` says what the release or the machine
/// lacks.
///
/// # Errors
/// The message says which step failed, and how to name other files.
pub fn fetched(root: &Path) -> Result<Result<PathBuf, String>, String> {
    if let Some(named) = std::env::var_os(USER_MODE_LINUX) {
        return Ok(Ok(named.into()));
    }
    if !cfg!(target_arch = "x86_64") {
        return Ok(Err("user-mode Linux needs x86_64".into()));
    }
    let root = at(root, root.canonicalize())?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let folder = target.join("foreign/user-mode-linux");
    // The last file that is written.
    if folder.join("linux").is_file() {
        return Ok(Ok(folder));
    }
    let lacking = fetch(&target.join("foreign/apt"), &folder).map_err(|error| {
        format!("fetching user-mode Linux failed: {error} (what to do: {USER_MODE_LINUX}=DIRECTORY)")
    })?;
    Ok(lacking.map_or(Ok(folder), Err))
}

/// Returns what the release lacks, if anything.
fn fetch(apt: &Path, folder: &Path) -> Result<Option<String>, String> {
    eprintln!("fetching user-mode Linux of {SUITE}");
    let apt = Apt::open(apt.to_owned(), &[SUITE])?;
    let mut packages = Vec::new();
    for name in PACKAGES {
        match apt.offers(name)?.first() {
            Some(offer) if *name != "libc6" && numbers(&offer.version).as_slice() < VERSION => {
                return Ok(Some(format!("{SUITE} has {name} {}, which is older than 6.16", offer.version)));
            }
            // Versions are explicit, because apt prefers an installed package that is newer.
            Some(offer) => packages.push(format!("{name}={}", offer.version)),
            None => return Ok(Some(format!("{SUITE} has no package {name}"))),
        }
    }
    let root = folder.join("root");
    // The rest of an interrupted attempt.
    let _ = std::fs::remove_dir_all(&root);
    apt.unpack(&packages, &root)?;
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    copy(&libraries.join("ld-linux-x86-64.so.2"), &folder.join("ld.so"))?;
    copy(&libraries.join("libc.so.6"), &folder.join("libc.so.6"))?;
    let modules = root.join("usr/lib/uml/modules");
    let version = at(&modules, std::fs::read_dir(&modules))?.flatten().next();
    let version = version.ok_or_else(|| format!("{}: it is empty", modules.display()))?;
    let module = version.path().join("kernel/drivers/block/virtio_blk.ko");
    copy(&module, &folder.join("virtio_blk.ko"))?;
    let program = root.join("usr/bin/linux.uml");
    let kernel = with_own_linker(at(&program, std::fs::read(&program))?)
        .ok_or_else(|| format!("{}: it does not name its dynamic linker", program.display()))?;
    let (part, linux) = (folder.join("linux.part"), folder.join("linux"));
    at(&part, std::fs::write(&part, kernel))?;
    at(&part, std::fs::set_permissions(&part, Permissions::from_mode(0o755)))?;
    at(&root, std::fs::remove_dir_all(&root))?;
    at(&linux, std::fs::rename(&part, &linux))?;
    Ok(None)
}

/// Replaces the linker's path, which ends at its first zero byte; `None`: the program has none.
fn with_own_linker(mut program: Vec<u8>) -> Option<Vec<u8>> {
    let at = program.windows(LINKER.len()).position(|window| window == LINKER)?;
    program[at..at + OWN_LINKER.len()].copy_from_slice(OWN_LINKER);
    Some(program)
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    at(from, std::fs::copy(from, to)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_the_linker_is_replaced_in_place() {
        let program = [b"ELF", LINKER, b"rest"].concat();
        let replaced = with_own_linker(program.clone()).expect("it names a linker");
        assert_eq!(replaced.len(), program.len());
        assert!(replaced.starts_with(b"ELF./ld.so\0"));
        assert!(replaced.ends_with(b"rest"));
        assert_eq!(with_own_linker(b"static".to_vec()), None);
    }
}
