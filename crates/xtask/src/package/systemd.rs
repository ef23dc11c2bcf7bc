//! `./x package test`: the package under Debian's systemd, in a guest.
//!
//! The guest's disk is made from the packages of the machine's release, without running their scripts. A
//! unit on the disk runs [`JOB`], which reports like a job of `./x guest`. The guest is booted twice with
//! one disk: the first boot installs, serves, kills, recovers and upgrades; the second one checks that the
//! devices are served again, and removes the package.

use super::{Order, deb, shell};
use crate::guest::apt::Apt;
use crate::guest::boot::{self, Shape};
use crate::guest::kernel::{self, Choice};
use crate::guest::{CACHE, at, make_folder, userland, write, write_initrd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Packages of the guest's system, besides their dependencies.
const SYSTEM: &[&str] = &[
    "base-files",
    "base-passwd",
    "bash",
    "coreutils",
    "dash",
    "diffutils",
    "dpkg",
    "findutils",
    "grep",
    "gzip",
    "kmod",
    "libc-bin",
    "libnbd-bin",
    "mount",
    "procps",
    "sed",
    "systemd",
    "systemd-sysv",
    "tar",
    "udev",
    "util-linux",
];

const JOB: &str = include_str!("job.sh");
const SWITCH: &str = include_str!("switch.sh");

/// Creates the files that the scripts of the unpacked packages would have created. `$1`: the root.
const PREPARE: &str = r#"
cd "$1"
cp usr/share/base-passwd/passwd.master etc/passwd
cp usr/share/base-passwd/group.master etc/group
: >etc/machine-id
: >etc/fstab
ln -sf dash usr/bin/sh
mkdir -p var/lib/dpkg/info var/lib/dpkg/updates var/lib/dpkg/triggers var/lib/dpkg/alternatives var/log
: >var/lib/dpkg/status
cd etc/systemd/system
ln -sf /lib/systemd/system/multi-user.target default.target
for unit in serial-getty@ttyS0.service getty@tty1.service ldconfig.service systemd-hwdb-update.service \
    systemd-firstboot.service systemd-timesyncd.service systemd-networkd-wait-online.service; do
    ln -sf /dev/null $unit
done
mkdir -p multi-user.target.wants
ln -sf ../test.service multi-user.target.wants/test.service
"#;

const UNIT: &str = "\
[Unit]
After=multi-user.target
[Service]
Type=idle
ExecStart=/bin/bash /job.sh
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS1
";

/// Builds two versions of the package and the disk, and boots the guest twice.
pub(super) fn test(root: &Path, mut order: Order) -> Result<(), String> {
    let root = at(root, "finding", root.canonicalize())?;
    let binary = order.binary.take().unwrap_or_else(|| root.join("target/release/blockyard"));
    order.out = order.out.join("test");
    order.quick = true;
    let mut packages = Vec::new();
    for version in ["1.0-1", "1.1-1"] {
        order.version = Some(version.to_owned());
        packages.push(deb::build(&root, &binary, &order)?.package);
    }
    let cache = std::env::var_os(CACHE).map_or_else(|| root.join("target/guest"), PathBuf::from);
    make_folder(&cache)?;
    let cache = at(&cache, "finding", cache.canonicalize())?;
    let kernel = kernel::get(&Choice::Newest, &cache, false)?;
    let system = system(&cache)?;
    let disk = order.out.join("disk.img");
    add_packages(&system, &packages)?;
    shell(
        "rm -f \"$2\"; truncate -s 1G \"$2\"; PATH=$PATH:/usr/sbin:/sbin mkfs.ext4 -q -E root_owner=0:0 -d \"$1\" \"$2\"",
        &[&system, &disk],
    )?;
    let mut tree = userland::pack()?;
    tree.bytes("switch", 0o755, SWITCH);
    for boot in ["first", "second"] {
        let folder = order.out.join(boot);
        make_folder(&folder)?;
        let initrd = folder.join("initrd");
        write_initrd(&initrd, &kernel, &tree)?;
        let shape = Shape {
            cpus: 2,
            memory_mib: 1536,
            limit: Duration::from_secs(540),
            append: "rdinit=/switch systemd.log_target=kmsg".into(),
            disk: Some(disk.clone()),
            shell: false,
        };
        let report = boot::run(&kernel, &initrd, &shape, &folder)?;
        at(&initrd, "removing", std::fs::remove_file(&initrd))?;
        eprint!("{}", report.text());
        println!("the {boot} boot: status {} after {:.0} s", report.status(), report.took.as_secs_f64());
        if report.status() != 0 {
            return Err(format!("the {boot} boot failed (logs: {})", folder.display()));
        }
    }
    at(&disk, "removing", std::fs::remove_file(&disk))
}

/// The root file system of the guest, unpacked once.
fn system(cache: &Path) -> Result<PathBuf, String> {
    let (system, done) = (cache.join("systemd/root"), cache.join("systemd/done"));
    if !done.exists() {
        if system.exists() {
            at(&system, "removing", std::fs::remove_dir_all(&system))?;
        }
        for folder in ["usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "pkg"] {
            make_folder(&system.join(folder))?;
        }
        for name in ["bin", "sbin", "lib", "lib64"] {
            let link = system.join(name);
            at(&link, "linking", std::os::unix::fs::symlink(format!("usr/{name}"), &link))?;
        }
        Apt::open(cache.join("systemd/apt"), &["{release}"])?.unpack_system(SYSTEM, &system)?;
        write(&done, b"")?;
    }
    shell(PREPARE, &[&system])?;
    write(&system.join("etc/systemd/system/test.service"), UNIT.as_bytes())?;
    write(&system.join("job.sh"), JOB.as_bytes())?;
    Ok(system)
}

fn add_packages(system: &Path, packages: &[PathBuf]) -> Result<(), String> {
    for (package, name) in packages.iter().zip(["old.deb", "new.deb"]) {
        let to = system.join("pkg").join(name);
        at(package, "copying", std::fs::copy(package, to))?;
    }
    Ok(())
}
