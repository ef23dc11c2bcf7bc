//! Test programs of other releases of the distribution, unpacked beside the system's.
//!
//! `iscsi-test-cu` of libiscsi 1.20 tests more commands than that of older releases, and needs a newer C
//! library than those have. So it is unpacked with its libraries to `target/foreign` and started by its own
//! dynamic linker. Nothing is installed, and no other program sees these libraries. Clients of
//! vhost-user are unpacked likewise: QEMU's tools with the driver `virtio-blk-vhost-user`, and blkio-bench of
//! libblkio, which the distribution has as a source file only.

use crate::guest::apt::{Apt, numbers};
use crate::guest::process::quiet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Environment variable with a program to use instead of the fetched `iscsi-test-cu`.
pub const ISCSI_TEST: &str = "BLOCKYARD_ISCSI_TEST";

/// The release that has [`VERSION`].
const SUITE: &str = "trixie";
/// Beginning of the required version of libiscsi, as numbers: the list of tests that the target is expected
/// to skip was written for this version.
const VERSION: &[u64] = &[1, 20];
/// The program's package, the libraries that it loads, and the C library with the dynamic linker.
const PACKAGES: &[&str] = &[
    "libiscsi-bin",
    "libcunit1",
    "libibverbs1",
    "librdmacm1t64",
    "libnl-3-200",
    "libnl-route-3-200",
    "libc6",
];

/// Starts the program with the libraries beside it.
const LAUNCHER: &str = "\
#!/bin/sh
# Starts iscsi-test-cu by the dynamic linker that was unpacked with it, whose C library is newer than the system's.
root=$(dirname \"$(readlink -f \"$0\")\")/root
for libraries in \"$root\"/usr/lib/*-linux-gnu*; do
    for linker in \"$libraries\"/ld-linux*; do
        exec \"$linker\" --library-path \"$libraries\" \"$root/usr/bin/iscsi-test-cu\" \"$@\"
    done
done
";

/// Environment variable with a directory of `qemu-io`, `qemu-img` and `blkio-bench` to use instead of the
/// fetched ones.
pub const VHOST_CLIENTS: &str = "BLOCKYARD_VHOST_CLIENTS";

/// Packages of the clients of vhost-user that are unpacked with their dependencies.
const CLIENT_PACKAGES: &[&str] = &["qemu-utils", "libblkio1"];
/// Packages of which files are needed, but not the dependencies: QEMU's driver is in a module, beside modules
/// for Ceph, iSCSI and others.
const CLIENT_PARTS: &[&str] = &["qemu-block-extra", "libblkio-dev"];
/// The module with the driver `virtio-blk-vhost-user`.
const CLIENT_MODULE: &str = "qemu/block-blkio.so";

/// Starts the program of its own name with the libraries beside it.
const CLIENT_LAUNCHER: &str = "\
#!/bin/sh
# Starts a client of vhost-user by the dynamic linker and with the QEMU modules that were unpacked with it.
root=$(dirname \"$(readlink -f \"$0\")\")/root
for libraries in \"$root\"/usr/lib/*-linux-gnu*; do
    for linker in \"$libraries\"/ld-linux*; do
        QEMU_MODULE_DIR=\"$libraries/qemu\"
        export QEMU_MODULE_DIR
        exec \"$linker\" --library-path \"$libraries\" \"$root/usr/bin/$(basename \"$0\")\" \"$@\"
    done
done
";

/// Fetches the clients of vhost-user once, and returns their directory; a `String` says which of them the
/// release lacks.
///
/// # Errors
/// The message says which step failed, and how to name other programs.
pub fn vhost_clients(root: &Path) -> Result<Result<PathBuf, String>, String> {
    if let Some(named) = std::env::var_os(VHOST_CLIENTS) {
        return Ok(Ok(named.into()));
    }
    let root = at(root, root.canonicalize())?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let folder = target.join("foreign/vhost-clients");
    // The last file that is written.
    if folder.join("blkio-bench").is_file() {
        return Ok(Ok(folder));
    }
    let lacking = fetch_clients(&target.join("foreign"), &folder).map_err(|error| {
        format!("fetching clients of vhost-user failed: {error} (what to do: {VHOST_CLIENTS}=DIRECTORY)")
    })?;
    Ok(lacking.map_or(Ok(folder), Err))
}

/// Returns what the release lacks, if anything.
fn fetch_clients(foreign: &Path, folder: &Path) -> Result<Option<String>, String> {
    eprintln!("fetching qemu-io, qemu-img and blkio-bench of {SUITE}");
    let apt = Apt::open(foreign.join("apt"), &[SUITE])?;
    let mut parts = Vec::new();
    for name in CLIENT_PACKAGES.iter().chain(CLIENT_PARTS) {
        match apt.offers(name)?.first() {
            Some(offer) if CLIENT_PARTS.contains(name) => parts.push(format!("{name}={}", offer.version)),
            Some(_) => {}
            None => return Ok(Some(format!("{SUITE} has no package {name}"))),
        }
    }
    let root = folder.join("root");
    at(&root, std::fs::create_dir_all(&root))?;
    apt.unpack_system(CLIENT_PACKAGES, &root)?;
    apt.unpack(&parts, &root)?;
    let Some(libraries) = libraries_with(&root, CLIENT_MODULE)? else {
        return Ok(Some(format!("qemu-block-extra of {SUITE} has no {CLIENT_MODULE}")));
    };
    // The system's compiler and C library: the program runs with the newer one.
    let mut compile = Command::new("cc");
    compile
        .arg("-O1")
        .arg("-I")
        .arg(root.join("usr/include"))
        .arg("-o")
        .arg(root.join("usr/bin/blkio-bench"));
    compile.arg(root.join("usr/share/doc/libblkio-dev/examples/blkio-bench.c"));
    quiet(compile.arg(libraries.join("libblkio.so.1")))?;
    for name in ["qemu-io", "qemu-img", "blkio-bench"] {
        write_launcher(folder, &folder.join(name), CLIENT_LAUNCHER)?;
    }
    Ok(None)
}

/// Returns the directory of libraries below `root` that has `file`.
fn libraries_with(root: &Path, file: &str) -> Result<Option<PathBuf>, String> {
    let all = root.join("usr/lib");
    let entries = at(&all, std::fs::read_dir(&all))?.flatten();
    Ok(entries.map(|entry| entry.path()).find(|path| path.join(file).is_file()))
}

/// Returns the path of `iscsi-test-cu`, which is fetched once.
///
/// # Errors
/// The message says which package is missing, and how to name another program.
pub fn iscsi_test(root: &Path) -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os(ISCSI_TEST) {
        return Ok(named.into());
    }
    let root = at(root, root.canonicalize())?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let folder = target.join("foreign/iscsi-test");
    let program = folder.join("iscsi-test-cu");
    if !program.is_file() {
        fetch(&target.join("foreign"), &folder, &program).map_err(|error| {
            format!("fetching iscsi-test-cu failed: {error} (what to do: {ISCSI_TEST}=FILE)")
        })?;
    }
    Ok(program)
}

fn fetch(foreign: &Path, folder: &Path, program: &Path) -> Result<(), String> {
    eprintln!("fetching iscsi-test-cu of {SUITE}");
    let apt = Apt::open(foreign.join("apt"), &[SUITE])?;
    let mut packages = Vec::new();
    for name in PACKAGES {
        let offers = apt.offers(name)?;
        let offer = offers.first().ok_or_else(|| format!("{SUITE} has no package {name}"))?;
        if *name == "libiscsi-bin" && !numbers(&offer.version).starts_with(VERSION) {
            return Err(format!("{SUITE} has libiscsi-bin {}, not 1.20", offer.version));
        }
        // Versions are explicit, because apt prefers an installed package that is newer.
        packages.push(format!("{name}={}", offer.version));
    }
    apt.unpack(&packages, &folder.join("root"))?;
    write_launcher(folder, program, LAUNCHER)
}

/// Writes the script that starts a program. It is written after everything else, so that an interrupted attempt
/// is repeated.
fn write_launcher(folder: &Path, program: &Path, text: &str) -> Result<(), String> {
    let part = folder.join("launcher.part");
    at(&part, std::fs::write(&part, text))?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    at(&part, std::fs::set_permissions(&part, mode))?;
    at(program, std::fs::rename(&part, program))
}

pub(crate) fn at<T>(path: &Path, result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{}: {error}", path.display()))
}
