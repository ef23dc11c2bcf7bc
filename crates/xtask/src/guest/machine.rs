//! `./x guest --machine DIR`: the files of a virtual machine whose root file system is an exported disk.
//!
//! | file | content |
//! |---|---|
//! | `vmlinux` | a link to the distribution's kernel |
//! | `initrd` | its modules, and an `init` that mounts `/dev/vda` and starts the system there |
//! | `root.img` | an ext4 file system of installed programs and the tests' `guest` program |
//! | `qemu` | a script that runs the emulator with its libraries |
//!
//! Tests of `vhost_machines` get the directory as `BLOCKYARD_MACHINE`, and copy the image.

use super::cpio::Tree;
use super::kernel::{Choice, Emulator, Kernel};
use super::process::quiet;
use super::{at, make_folder, userland, write};
use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

/// Programs of the root file system, besides busybox and the tests'.
const TOOLS: &[&str] =
    &["fio", "mkfs.ext4", "e2fsck", "resize2fs", "fstrim", "blkdiscard", "mount", "umount"];
/// Size of the root file system: the programs take half of it, most of them libraries of fio.
const ROOT_SIZE: &str = "192M";

const INIT: &str = include_str!("machine-init.sh");
const SYSTEM: &str = include_str!("machine-system.sh");

/// Runs the command; returns the exit status.
pub(super) fn main(root: &Path, folder: &Path) -> u8 {
    match prepare(root, folder) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("guest: {error}");
            1
        }
    }
}

/// Writes the files of a machine to a directory, in place of older ones.
///
/// # Errors
/// There is no kernel or emulator, a program cannot be copied, or a tool failed.
fn prepare(root: &Path, folder: &Path) -> Result<(), String> {
    let root = at(root, "finding", root.canonicalize())?;
    let kernel = super::kernel_of(&Choice::Newest, &super::cache(&root)?, false)?;
    let Kernel::Emulated { image, emulator, .. } = &kernel else {
        return Err("virtual machines need an emulated kernel".into());
    };
    let tests = super::suite(&root)?;
    make_folder(folder)?;
    let folder = at(folder, "finding", folder.canonicalize())?;
    let link = folder.join("vmlinux");
    // A link of an earlier run may point to another kernel.
    let _ = std::fs::remove_file(&link);
    at(&link, "making", symlink(image, &link))?;
    let mut tree = userland::base()?;
    tree.bytes("init", 0o755, INIT);
    tree.folder("system");
    super::write_initrd(&folder.join("initrd"), &kernel, &tree)?;
    emulator_script(emulator, &folder.join("qemu"))?;
    root_image(&tests, &folder)
}

fn emulator_script(emulator: &Emulator, path: &Path) -> Result<(), String> {
    let mut script = String::from("#!/bin/sh\n");
    let mut options = String::new();
    if let Some(root) = &emulator.root {
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        let (libraries, root) = (libraries.display(), root.display());
        script
            .push_str(&format!("export LD_LIBRARY_PATH='{libraries}' QEMU_MODULE_DIR='{libraries}/qemu'\n"));
        options = format!("-L '{root}/usr/share/qemu' -L '{root}/usr/share/seabios' ");
        options.push_str("-L /usr/share/seabios -L /usr/share/qemu ");
    }
    script.push_str(&format!("exec '{}' {options}\"$@\"\n", emulator.program.display()));
    write(path, script.as_bytes())?;
    at(path, "making executable", std::fs::set_permissions(path, Permissions::from_mode(0o755)))
}

/// Creates the file system from an unpacked archive: `mkfs.ext4` fills it without being root.
fn root_image(tests: &Path, folder: &Path) -> Result<(), String> {
    let mut tree = userland::base()?;
    userland::tools(&mut tree, TOOLS)?;
    userland::program(&mut tree, "guest", tests)?;
    tree.copy("etc/mke2fs.conf", Path::new("/etc/mke2fs.conf"))?;
    tree.bytes("usr/sbin/init", 0o755, SYSTEM);
    let (unpacked, image) = (folder.join("root"), folder.join("root.img"));
    // The rest of an interrupted run.
    let _ = std::fs::remove_dir_all(&unpacked);
    make_folder(&unpacked)?;
    unpack(&tree, &folder.join("root.cpio"), &unpacked)?;
    // Symbols would be two thirds of the image.
    quiet(Command::new("strip").arg(unpacked.join("usr/bin/guest")))?;
    let _ = std::fs::remove_file(&image);
    let mut format = Command::new(userland::find("mkfs.ext4").ok_or("mkfs.ext4 is missing")?);
    quiet(format.args(["-q", "-F", "-E", "root_owner=0:0", "-d"]).arg(&unpacked).arg(&image).arg(ROOT_SIZE))?;
    at(&unpacked, "removing", std::fs::remove_dir_all(&unpacked))
}

fn unpack(tree: &Tree, archive: &Path, to: &Path) -> Result<(), String> {
    let mut file = std::io::BufWriter::new(at(archive, "making", File::create(archive))?);
    at(archive, "writing", tree.write(&mut file).and_then(|()| file.flush()))?;
    drop(file);
    let busybox = userland::find("busybox").ok_or("busybox is missing")?;
    quiet(Command::new(busybox).args(["cpio", "-idmF"]).arg(archive).current_dir(to))?;
    at(archive, "removing", std::fs::remove_file(archive))
}
