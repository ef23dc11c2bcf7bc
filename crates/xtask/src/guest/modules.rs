//! The modules of a distribution kernel that a guest may need, with what they depend on.
//!
//! Each module says in its `.modinfo` section what it depends on and under which aliases the kernel asks for it; the
//! two tables that `modprobe` reads are made from that, so `depmod` is not needed. A name that a kernel does not have
//! is left out: it is built in, or newer, or gone, and the job that needs it will say so.

use super::cpio::Tree;
use super::process::quiet;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What jobs may load. The checksums are what older kernels' file systems ask for by alias.
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
    "virtio_console",
];

/// The name of the archive of them. It changes with the list, so that one that was kept from before is not taken for whole.
pub fn archive() -> String {
    // FNV-1a, of 32 bits.
    let add = |sum: u32, byte: u8| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    format!("modules-{:08x}.cpio", WANTED.join(" ").bytes().fold(0x811c_9dc5, add))
}

/// The modules of a kernel: where each is. Names have underscores.
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

/// What a module says of itself.
#[derive(Default, PartialEq, Eq, Debug)]
struct Facts {
    depends: Vec<String>,
    aliases: Vec<String>,
}

/// Reads `depends=` and `alias=` out of a module's bytes. They stand as texts that end with NUL; nothing else in a
/// module starts so after a NUL, and a false alias would do no harm.
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

/// Writes the modules of `kernel` that guests need to an archive: those below `folder`, which is its
/// `lib/modules/VERSION` as unpacked; `scratch` is a folder for what is in between.
///
/// # Errors
/// If the folder cannot be read, or a module not be decompressed.
pub fn pack(folder: &Path, version: &str, scratch: &Path) -> Result<Tree, String> {
    let mut index_of = Index::new();
    super::at(folder, "reading", index(&folder.join("kernel"), &mut index_of))?;
    // `lib` itself is a link in the guest, which an archive must not write through.
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

/// One line a module: its file, a colon, and the files of all that it needs, the nearest first.
fn dependency_table(table: &BTreeMap<String, Vec<String>>) -> String {
    let mut text = String::new();
    for name in table.keys() {
        let mut needed: Vec<&String> = Vec::new();
        let mut todo: Vec<&String> = table[name].iter().collect();
        while let Some(next) = todo.pop() {
            // A module that two need must come after both, so that it is loaded before both.
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
    fn what_a_module_says_of_itself_is_read() {
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
    fn whatever_is_needed_by_others_comes_last() {
        let needs = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let table = BTreeMap::from([
            ("a".to_owned(), needs(&["c", "b"])),
            ("b".to_owned(), needs(&["c"])),
            ("c".to_owned(), needs(&[])),
        ]);
        assert_eq!(dependency_table(&table), "a.ko: b.ko c.ko\nb.ko: c.ko\nc.ko:\n");
    }
}
