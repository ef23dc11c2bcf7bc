//! Lays out the files of the Debian package and packs them.
//!
//! `dpkg-deb` packs what is laid out here; debhelper is not used, because the program itself generates half
//! of the files and the rest is a table ([`FILES`]).

use super::{Order, crates, epoch, shell};
use crate::guest::process::{output, quiet};
use crate::guest::{at, make_folder, write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The packages that were built.
pub(super) struct Built {
    pub(super) package: PathBuf,
    pub(super) symbols: PathBuf,
}

/// Files of the source tree, where they are installed, and their modes.
const FILES: &[(&str, &str, u32)] = &[
    ("packaging/systemd/blockyard@.service", "usr/lib/systemd/system/", 0o644),
    ("packaging/systemd/blockyard-nbd@.service", "usr/lib/systemd/system/", 0o644),
    ("packaging/systemd/blockyard-nbd@.socket", "usr/lib/systemd/system/", 0o644),
    ("packaging/systemd/blockyard-recover.service", "usr/lib/systemd/system/", 0o644),
    ("packaging/systemd/blockyard-recover@.service", "usr/lib/systemd/system/", 0o644),
    ("packaging/after-death", "usr/lib/blockyard/", 0o755),
    ("packaging/recover-all", "usr/lib/blockyard/", 0o755),
    ("packaging/60-blockyard.rules", "usr/lib/udev/rules.d/", 0o644),
    ("packaging/sysusers.conf", "usr/lib/sysusers.d/blockyard.conf", 0o644),
    ("packaging/tmpfiles.conf", "usr/lib/tmpfiles.d/blockyard.conf", 0o644),
    ("packaging/etc/example.toml", "etc/blockyard/", 0o644),
    ("packaging/debian/lintian-overrides", "usr/share/lintian/overrides/blockyard", 0o644),
    ("docs/install.md", "usr/share/doc/blockyard/", 0o644),
];

const DESCRIPTION: &str = "virtual block devices from user space
 Blockyard moves every virtual block driver of Linux into one user-space
 system. A backend holds the blocks (a file, memory, an NBD server, a Ceph
 image), layers change the I/O (copy-on-write, limits, delays, faults,
 device-mapper tables), and exports attach the device to hosts: NBD, iSCSI,
 ublk, loop, FUSE and virtual machines by vhost-user.";

/// Builds the package and the package of its debug symbols.
pub(super) fn build(root: &Path, binary: &Path, order: &Order) -> Result<Built, String> {
    let version = match &order.version {
        Some(version) => version.clone(),
        None => format!("{}-1", version_of(root)?),
    };
    let epoch = epoch(root)?;
    let architecture = output(Command::new("dpkg").arg("--print-architecture"))?.trim().to_owned();
    make_folder(&order.out)?;
    let (tree, symbols) = (order.out.join("tree"), order.out.join("tree-dbgsym"));
    for folder in [&tree, &symbols] {
        if folder.exists() {
            at(folder, "removing", std::fs::remove_dir_all(folder))?;
        }
        make_folder(&folder.join("DEBIAN"))?;
    }
    program(binary, &tree, &symbols, order.quick)?;
    for (from, to, mode) in FILES {
        let name = if to.ends_with('/') { Path::new(from).file_name() } else { None };
        let to = name.map_or_else(|| tree.join(to), |name| tree.join(to).join(name));
        put(&to, &at(&root.join(from), "reading", std::fs::read(root.join(from)))?, *mode)?;
    }
    pages(binary, &tree)?;
    documents(root, &tree, &version, &epoch)?;
    let depends = libraries(&tree, &order.out)?;
    let fields = format!(
        "Section: admin\nPriority: optional\nArchitecture: {architecture}\nMaintainer: Blockyard developers \
         <blockyard@localhost>\n"
    );
    let control = format!(
        "Package: blockyard\nVersion: {version}\n{fields}Depends: {depends}, systemd, udev\nSuggests: librbd1, \
         nbd-client\nDescription: {DESCRIPTION}\n"
    );
    pack_folder(&tree, &control)?;
    let control = format!(
        "Package: blockyard-dbgsym\nVersion: {version}\n{}Depends: blockyard (= {version})\nAuto-Built-Package: \
         debug-symbols\nDescription: debug symbols for blockyard\n",
        fields.replace("Section: admin", "Section: debug")
    );
    for script in ["postinst", "prerm", "postrm"] {
        let from = root.join("packaging/debian").join(script);
        put(&tree.join("DEBIAN").join(script), &at(&from, "reading", std::fs::read(&from))?, 0o755)?;
    }
    put(&tree.join("DEBIAN/conffiles"), b"/etc/blockyard/example.toml\n", 0o644)?;
    pack_folder(&symbols, &control)?;
    let name = |package: &str| order.out.join(format!("{package}_{version}_{architecture}.deb"));
    let built = Built { package: name("blockyard"), symbols: name("blockyard-dbgsym") };
    for (folder, to) in [(&tree, &built.package), (&symbols, &built.symbols)] {
        // A single thread: the number of processors must not change the bytes.
        let mut pack = Command::new("dpkg-deb");
        pack.args(if order.quick { ["-Zgzip", "-z1"] } else { ["-Zxz", "-z6"] });
        pack.args(["--root-owner-group", "--threads-max=1", "--build"]).arg(folder).arg(to);
        shell(
            "find \"$1\" -depth -exec touch --no-dereference --date=@\"$2\" {} +",
            &[folder, Path::new(&epoch)],
        )?;
        quiet(pack.env("SOURCE_DATE_EPOCH", &epoch))?;
    }
    Ok(built)
}

/// Writes a file with its folders.
fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<(), String> {
    if let Some(folder) = path.parent() {
        make_folder(folder)?;
    }
    write(path, bytes)?;
    at(path, "changing the mode of", std::fs::set_permissions(path, PermissionsExt::from_mode(mode)))
}

/// The version of the workspace.
fn version_of(root: &Path) -> Result<String, String> {
    let manifest = root.join("Cargo.toml");
    let text = at(&manifest, "reading", std::fs::read_to_string(&manifest))?;
    let line = text.lines().find_map(|line| line.strip_prefix("version = \""));
    line.map(|rest| rest.trim_end_matches('"').to_owned())
        .ok_or_else(|| format!("{}: no version", manifest.display()))
}

/// Installs the program without symbols, and the symbols by build ID, where debuggers look for them.
fn program(binary: &Path, tree: &Path, symbols: &Path, quick: bool) -> Result<(), String> {
    let notes = output(Command::new("readelf").arg("-n").arg(binary))?;
    let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ")).unwrap_or_default().trim();
    if id.len() < 4 {
        return Err(format!("{} has no build ID (link it with -Wl,--build-id)", binary.display()));
    }
    let (start, rest) = id.split_at(2);
    let debug = symbols.join(format!("usr/lib/debug/.build-id/{start}/{rest}.debug"));
    let installed = tree.join("usr/bin/blockyard");
    for path in [&debug, &installed] {
        make_folder(path.parent().unwrap_or(path))?;
    }
    let compress: &[&str] = if quick { &[] } else { &["--compress-debug-sections"] };
    quiet(Command::new("objcopy").arg("--only-keep-debug").args(compress).arg(binary).arg(&debug))?;
    let strip = ["--strip-all", "--remove-section=.comment", "--remove-section=.note", "-o"];
    quiet(Command::new("strip").args(strip).arg(&installed).arg(binary))?;
    for (path, mode) in [(&debug, 0o644), (&installed, 0o755)] {
        at(path, "changing the mode of", std::fs::set_permissions(path, PermissionsExt::from_mode(mode)))?;
    }
    let doc = symbols.join("usr/share/doc");
    make_folder(&doc)?;
    let link = doc.join("blockyard-dbgsym");
    at(&link, "linking", std::os::unix::fs::symlink("blockyard", &link))
}

/// Manual pages and completions, printed by the program.
fn pages(binary: &Path, tree: &Path) -> Result<(), String> {
    let man = tree.join("usr/share/man");
    let written = man.join("all");
    quiet(Command::new(binary).args(["man", "--folder"]).arg(&written))?;
    for entry in at(&written, "reading", std::fs::read_dir(&written))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let section = name.rsplit('.').next().unwrap_or("1");
        let to = man.join(format!("man{section}")).join(&name);
        put(&to, &at(&entry.path(), "reading", std::fs::read(entry.path()))?, 0o644)?;
        quiet(Command::new("gzip").args(["-9", "-n", "-f"]).arg(&to))?;
    }
    at(&written, "removing", std::fs::remove_dir_all(&written))?;
    for (shell, to) in [
        ("bash", "usr/share/bash-completion/completions/blockyard"),
        ("zsh", "usr/share/zsh/vendor-completions/_blockyard"),
        ("fish", "usr/share/fish/vendor_completions.d/blockyard.fish"),
    ] {
        let script = output(Command::new(binary).args(["completions", shell]))?;
        put(&tree.join(to), script.as_bytes(), 0o644)?;
    }
    Ok(())
}

/// Copyright, changelogs and the SBOM.
fn documents(root: &Path, tree: &Path, version: &str, epoch: &str) -> Result<(), String> {
    let doc = tree.join("usr/share/doc/blockyard");
    let read = |name: &str| at(&root.join(name), "reading", std::fs::read_to_string(root.join(name)));
    let paragraph = |line: &str| if line.is_empty() { " .\n".to_owned() } else { format!(" {line}\n") };
    let mit: String = read("LICENSE-MIT")?.trim().lines().map(paragraph).collect();
    let copyright = read("packaging/debian/copyright")?.replace("@MIT@\n", &mit);
    put(&doc.join("copyright"), copyright.as_bytes(), 0o644)?;
    let date =
        output(Command::new("date").env("LC_ALL", "C").args(["-u", "-R", "-d", &format!("@{epoch}")]))?;
    let changes = format!(
        "blockyard ({version}) unstable; urgency=medium\n\n  * See /usr/share/doc/blockyard/changelog.gz.\n\n -- \
         Blockyard developers <blockyard@localhost>  {date}"
    );
    put(&doc.join("changelog.Debian"), changes.as_bytes(), 0o644)?;
    put(&doc.join("changelog"), read("CHANGELOG.md")?.as_bytes(), 0o644)?;
    put(&doc.join("blockyard.cdx.json"), crates::sbom(root)?.as_bytes(), 0o644)?;
    for name in ["changelog.Debian", "changelog", "install.md", "blockyard.cdx.json"] {
        quiet(Command::new("gzip").args(["-9", "-n", "-f"]).arg(doc.join(name)))?;
    }
    Ok(())
}

/// Returns the packages of the libraries that the program is linked with.
fn libraries(tree: &Path, out: &Path) -> Result<String, String> {
    let folder = out.join("shlibdeps");
    make_folder(&folder.join("debian"))?;
    write(&folder.join("debian/control"), b"Source: blockyard\n\nPackage: blockyard\nArchitecture: any\n")?;
    let tree = at(tree, "finding", tree.canonicalize())?;
    let mut ask = Command::new("dpkg-shlibdeps");
    let text = output(ask.arg("-O").arg(tree.join("usr/bin/blockyard")).current_dir(&folder))?;
    at(&folder, "removing", std::fs::remove_dir_all(&folder))?;
    let depends = text.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    depends.map(|line| line.trim().to_owned()).ok_or_else(|| format!("dpkg-shlibdeps: {text}"))
}

/// Writes `control` and `md5sums` of a package, and makes modes independent of the umask.
fn pack_folder(tree: &Path, control: &str) -> Result<(), String> {
    let size = output(Command::new("du").args(["--apparent-size", "-sk", "--exclude=DEBIAN"]).arg(tree))?;
    let size = size.split_whitespace().next().unwrap_or("0");
    let control = control.replacen("Maintainer:", &format!("Installed-Size: {size}\nMaintainer:"), 1);
    put(&tree.join("DEBIAN/control"), control.as_bytes(), 0o644)?;
    let script = "cd \"$1\"; find usr etc -type f 2>/dev/null | LC_ALL=C sort | xargs -d '\\n' md5sum >DEBIAN/md5sums || \
                  true; test -s DEBIAN/md5sums; chmod 644 DEBIAN/md5sums; find . -type d -exec chmod 755 {} +";
    shell(script, &[tree])
}
