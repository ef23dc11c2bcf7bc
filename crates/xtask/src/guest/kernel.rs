//! Finds the kernels and the emulator for guests; fetches them once, and keeps them in the cache.
//!
//! *newest* is the newest cloud kernel in any suite of the machine's archive, *older* that of the current
//! stable release; the beginning of a version, such as `6.1`, selects another. They are unmodified Debian
//! packages. The choice is remembered, so that the network is used once; `--update` looks again. The emulator
//! is the first on this machine that is new enough, otherwise Debian's.

use super::apt::{Apt, numbers};
use super::process::{output, quiet};
use super::{at, make_folder, modules, write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Environment variable with a user-mode kernel to use instead of an emulated one; it may be compressed with
/// zstd.
pub const USER_MODE: &str = "BLOCKYARD_UML_KERNEL";
/// Environment variable with an emulator to use instead of the one found.
pub const EMULATOR: &str = "BLOCKYARD_QEMU";

/// Oldest major version of the emulator: earlier ones corrupt the memory of guests with two processors.
const EMULATOR_MAJOR_MIN: u64 = 8;

/// The kernel to boot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Kernel {
    /// A distribution kernel under QEMU.
    Emulated {
        /// Version as in `uname -r`.
        version: String,
        /// Kernel image.
        image: PathBuf,
        /// Archive with its modules.
        modules: PathBuf,
        /// The emulator.
        emulator: Emulator,
    },
    /// A kernel that runs as a program of this machine, with everything built in.
    UserMode {
        /// The program.
        program: PathBuf,
    },
}

/// QEMU, with the directory of its files if it is not installed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Emulator {
    /// The program.
    pub program: PathBuf,
    /// Directory to which it was unpacked.
    pub root: Option<PathBuf>,
}

/// The selected kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Choice {
    /// The newest distribution kernel.
    Newest,
    /// The kernel of the stable release.
    Older,
    /// The newest whose version begins with this.
    Version(String),
    /// User-mode Linux.
    UserMode,
}

impl Choice {
    /// Parses the value of `--kernel`.
    ///
    /// # Errors
    /// The value is invalid.
    pub fn parse(word: &str) -> Result<Choice, String> {
        match word {
            "newest" => Ok(Choice::Newest),
            "older" => Ok(Choice::Older),
            "uml" => Ok(Choice::UserMode),
            _ if word.starts_with(|c: char| c.is_ascii_digit()) => Ok(Choice::Version(word.into())),
            _ => Err(format!("--kernel {word}: newest, older, uml, or the beginning of a version")),
        }
    }

    /// The user-mode kernel if the environment names one, otherwise the newest.
    pub fn usual() -> Choice {
        if std::env::var_os(USER_MODE).is_some() { Choice::UserMode } else { Choice::Newest }
    }

    fn word(&self) -> &str {
        match self {
            Choice::Newest => "newest",
            Choice::Older => "older",
            Choice::UserMode => "uml",
            Choice::Version(version) => version,
        }
    }
}

/// Finds or fetches a kernel.
///
/// # Errors
/// The message says what is not available and what to do.
pub fn get(choice: &Choice, cache: &Path, update: bool) -> Result<Kernel, String> {
    if *choice == Choice::UserMode {
        return user_mode(cache);
    }
    let machine = output(Command::new("uname").arg("-m"))?;
    if machine.trim() != "x86_64" {
        return Err(format!("guests are emulated for x86_64 only, and this machine is {}", machine.trim()));
    }
    let emulator = emulator(cache)?;
    let remembered = cache.join(format!("chosen-{}", choice.word()));
    let known = std::fs::read_to_string(&remembered).ok().filter(|_| !update);
    let version = match known {
        Some(version) => version,
        None => {
            let version = fetch(choice, cache)?;
            write(&remembered, version.as_bytes())?;
            version
        }
    };
    let folder = cache.join("kernels").join(&version);
    let (image, modules) = (folder.join("vmlinux"), folder.join(modules::archive()));
    if !modules.is_file() {
        // The cache was cleaned, or guests need other modules: forget the remembered choice and start over.
        at(&remembered, "removing", std::fs::remove_file(&remembered))?;
        return get(choice, cache, true);
    }
    Ok(Kernel::Emulated { version, image, modules, emulator })
}

fn user_mode(cache: &Path) -> Result<Kernel, String> {
    let named = std::env::var_os(USER_MODE).map(PathBuf::from);
    let named = named.ok_or_else(|| format!("--kernel uml: {USER_MODE} names no user-mode kernel"))?;
    if !named.is_file() {
        return Err(format!("{USER_MODE}={}: there is no such file", named.display()));
    }
    if named.extension().is_none_or(|end| end != "zst") {
        return Ok(Kernel::UserMode { program: named });
    }
    let program = cache.join(named.file_stem().unwrap_or_default());
    let time = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    if time(&program) < time(&named) {
        let part = program.with_extension("part");
        quiet(Command::new("zstd").args(["-qdf"]).arg(&named).arg("-o").arg(&part))?;
        quiet(Command::new("chmod").arg("755").arg(&part))?;
        at(&program, "making", std::fs::rename(&part, &program))?;
    }
    Ok(Kernel::UserMode { program })
}

/// Parses the version in `QEMU emulator version 10.0.2 (Debian …)`.
fn emulator_major(text: &str) -> Option<u64> {
    let (_, version) = text.split_once("version ")?;
    numbers(version).first().copied()
}

fn emulator(cache: &Path) -> Result<Emulator, String> {
    if let Some(program) = std::env::var_os(EMULATOR) {
        return Ok(Emulator { program: program.into(), root: None });
    }
    const INSTALLED: &str = "qemu-system-x86_64";
    let installed = output(Command::new(INSTALLED).arg("--version")).ok();
    if installed.and_then(|text| emulator_major(&text)).is_some_and(|major| major >= EMULATOR_MAJOR_MIN) {
        return Ok(Emulator { program: INSTALLED.into(), root: None });
    }
    let root = cache.join("qemu");
    let program = root.join("usr/bin").join(INSTALLED);
    if !program.is_file() {
        let part = cache.join("qemu.part");
        // Removes what an earlier attempt left, if anything.
        let _ = std::fs::remove_dir_all(&part);
        fetch_emulator(cache, &part)?;
        at(&root, "making", std::fs::rename(&part, &root))?;
    }
    Ok(Emulator { program, root: Some(root) })
}

fn fetch_emulator(cache: &Path, root: &Path) -> Result<(), String> {
    eprintln!("guest: fetching QEMU");
    let apt = Apt::open(cache.join("apt/emulator"), &["{release}", "{release}-backports"])
        .or_else(|_| Apt::open(cache.join("apt/emulator"), &["{release}"]))?;
    let offers = apt.offers("qemu-system-x86")?;
    let new_enough =
        |version: &str| numbers(version).first().is_some_and(|major| *major >= EMULATOR_MAJOR_MIN);
    // The oldest that is sufficient: that of the release itself is the best tested.
    let offer = offers.iter().rev().find(|offer| new_enough(&offer.version)).ok_or_else(|| {
        format!("no QEMU {EMULATOR_MAJOR_MIN} or newer in this release or its backports (what to do: {EMULATOR}=FILE)")
    })?;
    let packages = ["qemu-system-x86", "qemu-system-common", "qemu-system-data"];
    let packages = packages.map(|name| format!("{name}={}", offer.version));
    apt.unpack_program(&packages, &offer.suite, root)
}

/// Selects a kernel by the names of packages, `linux-image-7.3.4+deb13-cloud-amd64`. Returns the part after
/// `linux-image-`.
fn newest<'a>(names: &'a [String], beginning: &str) -> Option<&'a str> {
    let versions = names.iter().filter_map(|name| name.strip_prefix("linux-image-"));
    let fits = |version: &&str| {
        let rest = version.strip_prefix(beginning);
        rest.is_some_and(|rest| beginning.is_empty() || !rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    versions
        .filter(|version| !version.contains("unsigned"))
        .filter(fits)
        .max_by_key(|version| numbers(version))
}

/// Fetches a kernel to the cache; returns its version.
fn fetch(choice: &Choice, cache: &Path) -> Result<String, String> {
    eprintln!("guest: looking for the {} kernel", choice.word());
    let place = cache.join("apt/kernel");
    let apt = Apt::open(place.clone(), &["{release}", "stable"])?;
    // The suite is named by its code name, because mirrors update `stable-backports` later.
    let stable = apt.code_name("stable")?;
    let suites = ["{release}", "{release}-backports", &stable, &format!("{stable}-backports")];
    // The testing release has no backports.
    let apt = Apt::open(place.clone(), &suites).or_else(|_| Apt::open(place, &["{release}", &stable]))?;
    let beginning = match choice {
        Choice::Newest | Choice::UserMode => String::new(),
        Choice::Version(version) => version.clone(),
        Choice::Older => {
            let offers = apt.offers("linux-image-cloud-amd64")?;
            let offer = offers.iter().find(|offer| offer.suite == stable);
            let offer = offer.ok_or("the stable release has no linux-image-cloud-amd64")?;
            offer.version.split('-').next().unwrap_or_default().to_owned()
        }
    };
    let names = apt.names("^linux-(image|binary|modules|base)-[0-9].*-cloud-amd64$")?;
    let version =
        newest(&names, &beginning).ok_or_else(|| format!("no cloud kernel {beginning} in the archive"))?;
    let folder = cache.join("kernels").join(version);
    if !folder.join(modules::archive()).is_file() {
        eprintln!("guest: fetching Linux {version}");
        // Newer packages are split: the image's own package is empty then.
        let is_split = names.contains(&format!("linux-binary-{version}"));
        let parts: &[&str] =
            if is_split { &["linux-binary", "linux-modules", "linux-base"] } else { &["linux-image"] };
        let packages: Vec<String> = parts
            .iter()
            .map(|part| format!("{part}-{version}"))
            .filter(|name| names.contains(name))
            .collect();
        let unpacked = cache.join(format!("kernels/{version}.part"));
        // Removes what an earlier attempt left, if anything.
        let _ = std::fs::remove_dir_all(&unpacked);
        apt.unpack(&packages, &unpacked)?;
        prepare(version, &unpacked, &folder)?;
        at(&unpacked, "removing", std::fs::remove_dir_all(&unpacked))?;
    }
    Ok(version.into())
}

/// Creates image and modules from an unpacked package.
fn prepare(version: &str, unpacked: &Path, folder: &Path) -> Result<(), String> {
    make_folder(folder)?;
    let library = ["usr/lib/modules", "lib/modules"].map(|place| unpacked.join(place).join(version));
    let library = library.iter().find(|place| place.is_dir()).ok_or("the kernel's package has no modules")?;
    let images = [library.join("vmlinuz"), unpacked.join(format!("boot/vmlinuz-{version}"))];
    let image = images.iter().find(|file| file.is_file()).ok_or("the kernel's package has no image")?;
    let bytes = at(image, "reading", std::fs::read(image))?;
    let bare = payload(&bytes).and_then(|(tool, packed)| unpack_image(tool, packed, folder));
    // Without its own decompressor the kernel boots two seconds faster under emulation; with it, it boots as
    // well.
    write(&folder.join("vmlinux"), bare.as_deref().unwrap_or(&bytes))?;
    let tree = modules::pack(library, version, folder)?;
    let part = folder.join("modules.part");
    let mut file = at(&part, "making", std::fs::File::create(&part))?;
    at(&part, "writing", tree.write(&mut file))?;
    at(&part, "renaming", std::fs::rename(&part, folder.join(modules::archive())))
}

/// The compressed kernel in a `bzImage`, and the tool that decompresses it. Source: the kernel's
/// Documentation/arch/x86/boot.rst, fields `setup_sects`, `payload_offset`, `payload_length`.
fn payload(image: &[u8]) -> Option<(&'static str, &[u8])> {
    const TOOLS: &[(&str, &[u8])] = &[
        ("zstd", &[0x28, 0xb5, 0x2f, 0xfd]),
        ("xz", &[0xfd, b'7', b'z', b'X', b'Z', 0]),
        ("gzip", &[0x1f, 0x8b]),
    ];
    let number = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let setup = (usize::from(*image.get(0x1f1)?) + 1) * 512;
    let start = setup + number(0x248)?;
    let packed = image.get(start..start.checked_add(number(0x24c)?)?)?;
    TOOLS.iter().find(|(_, magic)| packed.starts_with(magic)).map(|(tool, _)| (*tool, packed))
}

/// The kernel as an ELF file, or `None` on any failure. The payload ends with its size, about which the tools
/// complain after they have written everything; so only the output counts.
fn unpack_image(tool: &str, packed: &[u8], scratch: &Path) -> Option<Vec<u8>> {
    let (from, to) = (scratch.join("image.packed"), scratch.join("image"));
    std::fs::write(&from, packed).ok()?;
    let _ = quiet(Command::new("sh").args(["-c", "\"$0\" -dc <\"$1\" >\"$2\"", tool]).arg(&from).arg(&to));
    let bytes = std::fs::read(&to).ok();
    for file in [from, to] {
        // Files that cannot be removed stay in the cache, where they do no harm.
        let _ = std::fs::remove_file(file);
    }
    bytes.filter(|bytes| bytes.starts_with(b"\x7fELF"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(versions: &[&str]) -> Vec<String> {
        versions.iter().map(|version| format!("linux-image-{version}-cloud-amd64")).collect()
    }

    #[test]
    fn the_newest_kernel_is_chosen_by_number() {
        let names = names(&["7.2.12+deb13", "7.3.4+deb13", "6.12.107+deb13", "6.1.0-50"]);
        assert_eq!(newest(&names, ""), Some("7.3.4+deb13-cloud-amd64"));
        assert_eq!(newest(&names, "7.2"), Some("7.2.12+deb13-cloud-amd64"));
        // 6.1 is not the beginning of 6.12.
        assert_eq!(newest(&names, "6.1"), Some("6.1.0-50-cloud-amd64"));
        assert_eq!(newest(&names, "5"), None);
    }

    #[test]
    fn kernels_are_named_by_a_word_or_a_version() {
        assert_eq!(Choice::parse("older"), Ok(Choice::Older));
        assert_eq!(Choice::parse("6.1"), Ok(Choice::Version("6.1".into())));
        assert!(Choice::parse("latest").is_err());
    }

    #[test]
    fn the_version_of_an_emulator_is_read() {
        assert_eq!(emulator_major("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)"), Some(10));
        assert_eq!(emulator_major("something else"), None);
    }

    #[test]
    fn the_payload_of_an_image_is_found() {
        let mut image = vec![0; 4096];
        image[0x1f1] = 3;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&100_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&8_u32.to_le_bytes());
        image[2148..2156].copy_from_slice(&[0x28, 0xb5, 0x2f, 0xfd, 1, 2, 3, 4]);
        assert_eq!(payload(&image), Some(("zstd", &image[2148..2156])));
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(payload(&image), None, "a length beyond the end");
        assert_eq!(payload(&image[..0x210]), None, "cut short");
    }
}
