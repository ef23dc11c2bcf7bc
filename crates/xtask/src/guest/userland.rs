//! The programs of a guest: those of this machine, with their libraries.
//!
//! Everything is copied from where it is installed, so a guest has the same versions as the tests outside.
//! Busybox provides the shell and the small commands; real programs replace its own where installed.

use super::cpio::Tree;
use super::process::output;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs for jobs. Missing ones are reported once, and skipped.
const TOOLS: &[&str] = &[
    "bash",
    "fio",
    "mkfs.ext4",
    "e2fsck",
    "fsck.ext4",
    "resize2fs",
    "tune2fs",
    "mkfs.xfs",
    "xfs_repair",
    "xfs_growfs",
    "xfs_io",
    "mkfs.btrfs",
    "btrfs",
    "blkid",
    "sfdisk",
    "partx",
    "lsblk",
    "blockdev",
    "blkdiscard",
    "blkzone",
    "wipefs",
    "losetup",
    "mount",
    "umount",
    "findmnt",
    "nbd-client",
    "nbdkit",
    "nbdinfo",
    "nbdcopy",
    "strace",
    "dmsetup",
    "taskset",
    "unshare",
    "setpriv",
    "fallocate",
    "fstrim",
    "jq",
    "blktrace",
    "timeout",
    "stat",
    "dd",
    "cmp",
    "iscsid",
    "iscsiadm",
    "sg_inq",
    "sg_vpd",
    "sg_modes",
    "sg_opcodes",
    "sg_readcap",
    "sg_luns",
    "sg_turs",
    "sg_logs",
    "sg_persist",
    "sg_write_same",
    "sg_verify",
    "sg_compare_and_write",
    "sg_xcopy",
    "sg_unmap",
    "sg_get_lba_status",
    "sg_sync",
    "sg_reset",
    "sg_rep_zones",
    "sg_zone",
    "sg_reset_wp",
];

/// Whole directories that programs load at run time, if they exist.
const FOLDERS: &[&str] = &["/usr/lib/x86_64-linux-gnu/fio"];

/// Single files that programs load at run time. `libgcc_s` is loaded by the C library when a thread is
/// cancelled.
const FILES: &[&str] = &[
    "/etc/mke2fs.conf",
    "/lib/x86_64-linux-gnu/libgcc_s.so.1",
    "/usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-memory-plugin.so",
    "/usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-null-plugin.so",
    "/usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-file-plugin.so",
];

const INIT: &str = include_str!("init.sh");
const MODPROBE: &str = include_str!("modprobe.sh");

/// Finds a program in `PATH`, or where Debian keeps those for root.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// The guest's system without a job.
///
/// # Errors
/// Busybox is missing, or an installed program cannot be copied.
pub fn pack() -> Result<Tree, String> {
    let mut tree = base()?;
    tree.bytes("init", 0o755, INIT);
    tools(&mut tree, TOOLS)?;
    for folder in FOLDERS.iter().map(Path::new).filter(|folder| folder.is_dir()) {
        tree.copy_all(&place(folder), folder)?;
    }
    for file in FILES.iter().map(Path::new).filter(|file| file.is_file()) {
        tree.copy(&place(file), file)?;
        libraries(&mut tree, file)?;
    }
    Ok(tree)
}

/// The directories, the shell and the commands of busybox, without a first program.
///
/// # Errors
/// Busybox is missing.
pub fn base() -> Result<Tree, String> {
    let mut tree = Tree::default();
    for folder in ["dev", "proc", "sys", "tmp", "run", "var/tmp", "mnt", "out", "root", "job", "etc"] {
        tree.folder(folder);
    }
    // A single directory for programs and one for libraries, as on this machine: its paths then work in the
    // guest.
    for (link, to) in [("bin", "usr/bin"), ("sbin", "usr/sbin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
        tree.link(link, to);
    }
    let busybox = find("busybox").ok_or("busybox is missing (what to do: ./x install-deps)")?;
    tree.copy("usr/bin/busybox", &busybox)?;
    for applet in output(Command::new(&busybox).arg("--list"))?.lines().filter(|name| *name != "busybox") {
        tree.link(&format!("usr/bin/{applet}"), "busybox");
    }
    // /bin/sh is copied: Busybox's own shell would prefer its built-in commands to the real programs.
    program(&mut tree, "sh", Path::new("/bin/sh"))?;
    tree.bytes("usr/sbin/modprobe", 0o755, MODPROBE);
    tree.bytes(
        "etc/passwd",
        0o644,
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n",
    );
    tree.bytes("etc/group", 0o644, "root:x:0:\ndisk:x:6:\nnogroup:x:65534:\n");
    Ok(tree)
}

/// Adds installed programs; reports the missing ones.
///
/// # Errors
/// A program cannot be copied.
pub fn tools(tree: &mut Tree, names: &[&str]) -> Result<(), String> {
    let mut missing = Vec::new();
    for name in names {
        match find(name) {
            Some(path) => program(tree, name, &path)?,
            None => missing.push(*name),
        }
    }
    if !missing.is_empty() {
        eprintln!("guest: not installed, so not in the guest: {} (./x install-deps)", missing.join(" "));
    }
    Ok(())
}

/// Returns the path in the guest for a file of this machine. `/lib` is a symbolic link there, and unpacking
/// an archive must not write through it.
fn place(path: &Path) -> String {
    let path = path.to_string_lossy();
    if path.starts_with("/usr/") || path.starts_with("/etc/") {
        path.into_owned()
    } else {
        format!("/usr{path}")
    }
}

/// Adds a program as `name`, with its libraries.
///
/// # Errors
/// The program cannot be read.
pub fn program(tree: &mut Tree, name: &str, path: &Path) -> Result<(), String> {
    tree.copy(&format!("usr/bin/{name}"), path)?;
    libraries(tree, path)
}

fn libraries(tree: &mut Tree, program: &Path) -> Result<(), String> {
    // A script or a static program has none: ldd then fails with a message on stderr.
    let Ok(text) = output(Command::new("ldd").arg(program).env("LC_ALL", "C")) else { return Ok(()) };
    for library in libraries_of(&text)? {
        let library = Path::new(library);
        if !tree.has(&place(library)) {
            tree.copy(&place(library), library)?;
        }
    }
    Ok(())
}

/// The files in the output of `ldd`.
fn libraries_of(text: &str) -> Result<Vec<&str>, String> {
    if let Some(line) = text.lines().find(|line| line.contains("not found")) {
        return Err(format!("a library is missing: {}", line.trim()));
    }
    let path =
        |line: &'_ str| line.find('/').map(|at| at..line[at..].find(' ').map_or(line.len(), |end| at + end));
    Ok(text.lines().filter_map(|line| path(line).map(|range| &line[range])).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_parsed_from_the_output_of_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = vec!["/lib/x86_64-linux-gnu/libz.so.1", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(libraries_of(text), Ok(expected));
        assert!(libraries_of("\tlibfdt.so.1 => not found\n").is_err_and(|error| error.contains("libfdt")));
    }

    #[test]
    fn paths_of_a_split_system_are_placed_below_usr() {
        assert_eq!(place(Path::new("/lib64/ld.so")), "/usr/lib64/ld.so");
        assert_eq!(place(Path::new("/usr/lib/x.so")), "/usr/lib/x.so");
        assert_eq!(place(Path::new("/etc/mke2fs.conf")), "/etc/mke2fs.conf");
    }
}
