//! Test programs of other releases of the distribution, unpacked beside the system's.
//!
//! `iscsi-test-cu` of libiscsi 1.20 tests more commands than that of older releases, and needs a newer C
//! library than those have. So it is unpacked with its libraries to `target/foreign` and started by its own
//! dynamic linker. Nothing is installed, and no other program sees these libraries.

use crate::guest::apt::{Apt, numbers};
use std::path::{Path, PathBuf};

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
    // The launcher is written last, so that an interrupted attempt is repeated.
    let part = folder.join("launcher.part");
    at(&part, std::fs::write(&part, LAUNCHER))?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    at(&part, std::fs::set_permissions(&part, mode))?;
    at(program, std::fs::rename(&part, program))
}

fn at<T>(path: &Path, result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{}: {error}", path.display()))
}
