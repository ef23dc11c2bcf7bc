//! The modules of a distribution kernel that guests may need, with their dependencies.
//!
//! Each module lists its dependencies and the aliases under which the kernel requests it in its `.modinfo`
//! section; the two tables of `modprobe` are generated from that, so `depmod` is not needed. A module that a
//! kernel lacks is skipped: it is built in, newer, or was removed, and a job that needs it will report that.

use super::cpio::Tree;
use super::process::quiet;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Modules that jobs may load. Older kernels' file systems request the checksums by alias.
const WANTED: &[&str] = &[
    "ublk_drv",
    "nbd",
    "null_blk",
    "brd",
    "loop",
    "zram",
    "scsi_debug",
    "sd_mod",
    "sg",
    "dm-mod",
    "dm-multipath",
    "dm-round-robin",
    "dm-queue-length",
    "dm-service-time",
    "dm-historical-service-time",
    "dm-io-affinity",
    "dm-flakey",
    "dm-delay",
    "dm-zero",
    "dm-snapshot",
    "dm-thin-pool",
    "dm-crypt",
    "dm-log-writes",
    "dm-dust",
    "dm-switch",
    "dm-unstripe",
    "dm-mirror",
    "target_core_mod",
    "target_core_file",
    "target_core_iblock",
    "target_core_user",
    "tcm_loop",
    "iscsi_target_mod",
    "iscsi_tcp",
    "vhost_scsi",
    "nvmet",
    "nvmet-tcp",
    "nvme-tcp",
    "nvme-loop",
    "xfs",
    "btrfs",
    "ext4",
    "fuse",
    "configfs",
    "libcrc32c",
    "crc32c_generic",
    "crc32c-intel",
    "crc32c-cryptoapi",
    "xxhash_generic",
    "sha256_generic",
    "blake2b_generic",
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
];

/// Name of the archive of these modules. It depends on the list, so that an archive of an older list is not
/// reused.
pub fn archive() -> String {
    // FNV-1a, of 32 bits.
    let add = |sum: u32, byte: u8| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    format!("modules-{:08x}.cpio", WANTED.join(" ").bytes().fold(0x811c_9dc5, add))
}

/// Path of each module of a kernel, by name with underscores.
type Index = BTreeMap<String, PathBuf>;

fn name_of(file: &str) -> Option<String> {
    let (name, rest) = file.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| name.replace('-', "_"))
}

fn index(folder: &Path, found: &mut Index) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            index(&entry.path(), found)?;
        } else if let Some(name) = name_of(&entry.file_name().to_string_lossy()) {
            found.insert(name, entry.path());
        }
    }
    Ok(())
}

/// The module information that is used here.
#[derive(Default, PartialEq, Eq, Debug)]
struct Facts {
    depends: Vec<String>,
    aliases: Vec<String>,
}

/// Reads `depends=` and `alias=` from the bytes of a module. They are NUL-terminated texts; nothing else in a
/// module begins like this after a NUL, and a false alias would do no harm.
fn facts(module: &[u8]) -> Facts {
    let mut facts = Facts::default();
    for text in module.split(|byte| *byte == 0) {
        if let Some(names) = text.strip_prefix(b"depends=") {
            let names = String::from_utf8_lossy(names);
            facts
                .depends
                .extend(names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")));
        } else if let Some(alias) = text.strip_prefix(b"alias=") {
            facts.aliases.push(String::from_utf8_lossy(alias).into_owned());
        }
    }
    facts
}

/// Packs the modules that guests need: those below `folder`, the unpacked `lib/modules/VERSION`; `scratch` is
/// a directory for temporary files.
///
/// # Errors
/// The directory cannot be read, or a module cannot be decompressed.
pub fn pack(folder: &Path, version: &str, scratch: &Path) -> Result<Tree, String> {
    let mut index_of = Index::new();
    super::at(folder, "reading", index(&folder.join("kernel"), &mut index_of))?;
    // In the guest `lib` is a symbolic link, and unpacking an archive must not write through it.
    let root = format!("usr/lib/modules/{version}");
    let mut tree = Tree::default();
    let (mut table, mut aliases) = (BTreeMap::new(), String::new());
    let mut todo: Vec<String> = WANTED.iter().map(|name| name.replace('-', "_")).collect();
    let mut seen = BTreeSet::new();
    while let Some(name) = todo.pop() {
        let Some(path) = index_of.get(&name) else { continue };
        if !seen.insert(name.clone()) {
            continue;
        }
        let bytes = decompressed(path, scratch)?;
        let Facts { depends, aliases: more } = facts(&bytes);
        for alias in more {
            aliases.push_str(&format!("alias {alias} {name}\n"));
        }
        tree.bytes(&format!("{root}/{name}.ko"), 0o644, bytes);
        todo.extend(depends.iter().cloned());
        table.insert(name, depends);
    }
    tree.bytes(&format!("{root}/modules.dep"), 0o644, dependency_table(&table));
    tree.bytes(&format!("{root}/modules.alias"), 0o644, aliases);
    let builtin = std::fs::read_to_string(folder.join("modules.builtin")).unwrap_or_default();
    let builtin: String = builtin
        .lines()
        .filter_map(|line| name_of(line.rsplit('/').next()?))
        .map(|name| name + "\n")
        .collect();
    tree.bytes(&format!("{root}/builtin"), 0o644, builtin);
    Ok(tree)
}

/// One line per module: its file, a colon, and the files that it needs, nearest first.
fn dependency_table(table: &BTreeMap<String, Vec<String>>) -> String {
    let mut text = String::new();
    for name in table.keys() {
        let mut needed: Vec<&String> = Vec::new();
        let mut todo: Vec<&String> = table[name].iter().collect();
        while let Some(next) = todo.pop() {
            // A module that two others need is listed after both, so that it is loaded before both.
            needed.retain(|one| *one != next);
            needed.push(next);
            todo.extend(table.get(next).into_iter().flatten());
        }
        let files: String = needed.iter().map(|name| format!(" {name}.ko")).collect();
        text.push_str(&format!("{name}.ko:{files}\n"));
    }
    text
}

fn decompressed(path: &Path, scratch: &Path) -> Result<Vec<u8>, String> {
    let tool = match path.extension().and_then(|end| end.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return super::at(path, "reading", std::fs::read(path)),
    };
    let to = scratch.join("module.ko");
    quiet(Command::new("sh").args(["-c", "\"$0\" -dc <\"$1\" >\"$2\"", tool]).arg(path).arg(&to))?;
    super::at(&to, "reading", std::fs::read(&to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_information_is_parsed() {
        let module = b"\x7fELF...\0license=GPL\0depends=dm-mod,scsi_mod\0alias=dm-mpath\0alias=x\0depends\0";
        let expected = Facts {
            depends: vec!["dm_mod".into(), "scsi_mod".into()],
            aliases: vec!["dm-mpath".into(), "x".into()],
        };
        assert_eq!(facts(module), expected);
        assert_eq!(facts(b"\0depends=\0"), Facts::default());
    }

    #[test]
    fn names_of_modules_have_underscores_and_no_suffix() {
        assert_eq!(name_of("dm-mod.ko.xz").as_deref(), Some("dm_mod"));
        assert_eq!(name_of("nbd.ko").as_deref(), Some("nbd"));
        assert_eq!(name_of("nbd.ko.old"), None);
        assert_eq!(name_of("modules.order"), None);
    }

    #[test]
    fn dependencies_of_others_come_last() {
        let needs = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let table = BTreeMap::from([
            ("a".to_owned(), needs(&["c", "b"])),
            ("b".to_owned(), needs(&["c"])),
            ("c".to_owned(), needs(&[])),
        ]);
        assert_eq!(dependency_table(&table), "a.ko: b.ko c.ko\nb.ko: c.ko\nc.ko:\n");
    }
}
