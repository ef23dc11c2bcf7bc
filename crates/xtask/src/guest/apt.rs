//! Distribution packages without installation: lists versions, and unpacks packages to a directory.
//!
//! Uses its own lists, sources and archives in the cache, so that neither root nor a change to the system is
//! needed. Packages come from the machine's own archive: the source of its release also has the other suites,
//! of which only the names are added here. Packages installed on the system count as installed, so that only
//! missing libraries are fetched with a program. Debian only; on other systems an error says what to set
//! instead.

use super::process::{fetch, output, quiet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The source in the machine's configuration that provides its release.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Archive {
    /// Address of the archive.
    pub uri: String,
    /// Options as in a one-line source, with brackets; empty if none.
    pub options: String,
}

/// Finds the source of `release` in a file of apt's, in either format; `None` if the file has none.
pub fn archive_in(text: &str, release: &str) -> Option<Archive> {
    let one_line = text.lines().find_map(|line| archive_of_line(line, release));
    one_line.or_else(|| text.split("\n\n").find_map(|stanza| archive_of_stanza(stanza, release)))
}

fn archive_of_line(line: &str, release: &str) -> Option<Archive> {
    let rest = line.trim().strip_prefix("deb ")?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(_) => rest.split_at(rest.find(']')? + 1),
        None => ("", rest),
    };
    let mut words = rest.split_whitespace();
    let (uri, suite) = (words.next()?, words.next()?);
    let has_main = words.any(|word| word == "main");
    (suite == release && has_main).then(|| Archive { uri: uri.into(), options: options.into() })
}

fn archive_of_stanza(stanza: &str, release: &str) -> Option<Archive> {
    let field = |name: &str| {
        let line = stanza.lines().find(|line| line.to_ascii_lowercase().starts_with(name))?;
        Some(line[name.len()..].trim())
    };
    let has = |name: &str, word: &str| {
        field(name).is_some_and(|line| line.split_whitespace().any(|one| one == word))
    };
    if !has("types:", "deb")
        || !has("suites:", release)
        || !has("components:", "main")
        || has("enabled:", "no")
    {
        return None;
    }
    let uri = field("uris:")?.split_whitespace().next()?;
    // An embedded key follows on further lines; apt then uses the trusted keys.
    let key = field("signed-by:").filter(|key| !key.is_empty());
    let options = key.map_or(String::new(), |key| format!("[signed-by={key}]"));
    Some(Archive { uri: uri.into(), options })
}

/// The numbers of a version, which are enough to order versions of one package: `1:10.0.2+ds-2` is 10, 0, 2,
/// 2.
pub fn numbers(version: &str) -> Vec<u64> {
    let upstream = version.split_once(':').map_or(version, |(_, rest)| rest);
    upstream.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// A line of `apt-cache madison`: a version of a package, and its suite.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The full version.
    pub version: String,
    /// The suite as named in the sources.
    pub suite: String,
}

fn offer(line: &str) -> Option<Offer> {
    let mut columns = line.split('|').skip(1).map(str::trim);
    let (version, place) = (columns.next()?, columns.next()?);
    let suite = place.split_whitespace().nth(1)?.split('/').next()?;
    Some(Offer { version: version.into(), suite: suite.into() })
}

/// A view of the archive: some suites, with lists and downloads in a separate directory.
pub struct Apt {
    folder: PathBuf,
}

impl Apt {
    /// Reads the machine's sources and fetches the lists of `suites`; `{release}` in a name is replaced by
    /// the machine's release.
    ///
    /// # Errors
    /// The message says which file or suite is missing and what to do.
    pub fn open(folder: PathBuf, suites: &[&str]) -> Result<Apt, String> {
        let release = release_of(&std::fs::read_to_string("/etc/os-release").unwrap_or_default())?;
        let archive = machine_archive(&release)?;
        for part in ["lists/partial", "cache/archives/partial", "parts"] {
            super::make_folder(&folder.join(part))?;
        }
        let sources: String = suites
            .iter()
            .map(|suite| suite.replace("{release}", &release))
            .map(|suite| format!("deb {} {} {suite} main\n", archive.options, archive.uri))
            .collect();
        super::write(&folder.join("sources.list"), sources.as_bytes())?;
        let apt = Apt { folder };
        fetch(apt.command("apt-get").args(["update", "--allow-releaseinfo-change"]))?;
        Ok(apt)
    }

    /// The code name of a suite, from its release file.
    ///
    /// # Errors
    /// apt has no such file.
    pub fn code_name(&self, suite: &str) -> Result<String, String> {
        let lists = self.folder.join("lists");
        let end = format!("_dists_{suite}_InRelease");
        for entry in super::at(&lists, "reading", std::fs::read_dir(&lists))?.flatten() {
            if entry.file_name().to_string_lossy().ends_with(&end) {
                let text = super::at(&entry.path(), "reading", std::fs::read_to_string(entry.path()))?;
                return field_of_release(&text, "Codename: ")
                    .ok_or_else(|| format!("{}: no code name", entry.path().display()));
            }
        }
        Err(format!("the archive has no release file for {suite}"))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let folder = self.folder.display();
        command.env("DEBIAN_FRONTEND", "noninteractive").arg("-q");
        for option in [
            format!("Dir::Etc::sourcelist={folder}/sources.list"),
            format!("Dir::Etc::sourceparts={folder}/parts"),
            format!("Dir::State::lists={folder}/lists"),
            format!("Dir::Cache={folder}/cache"),
            "Debug::NoLocking=true".into(),
            "Acquire::Languages=none".into(),
            "Acquire::Retries=5".into(),
            // A failed download of lists is an error.
            "APT::Update::Error-Mode=any".into(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".into(),
            // The unprivileged user of apt's downloads cannot write to a directory below a private home.
            "APT::Sandbox::User=".into(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }

    /// Names of packages that match a regular expression.
    ///
    /// # Errors
    /// Errors of `apt-cache`.
    pub fn names(&self, pattern: &str) -> Result<Vec<String>, String> {
        let text = output(self.command("apt-cache").args(["search", "--names-only", pattern]))?;
        Ok(text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
    }

    /// The versions of a package, newest first.
    ///
    /// # Errors
    /// Errors of `apt-cache`.
    pub fn offers(&self, package: &str) -> Result<Vec<Offer>, String> {
        let text = output(self.command("apt-cache").args(["madison", package]))?;
        let mut offers: Vec<Offer> = text.lines().filter_map(offer).collect();
        offers.sort_by_key(|offer| std::cmp::Reverse(numbers(&offer.version)));
        Ok(offers)
    }

    /// Unpacks the named packages below `root`, without their dependencies.
    ///
    /// # Errors
    /// Errors of apt and dpkg.
    pub fn unpack(&self, packages: &[String], root: &Path) -> Result<(), String> {
        let downloads = self.downloads()?;
        fetch(self.command("apt-get").arg("download").args(packages).current_dir(&downloads))?;
        unpack_all(&downloads, root)
    }

    /// Unpacks a program below `root`, with those dependencies that the machine lacks. `packages` may name
    /// versions as `NAME=VERSION`; dependencies come from `suite` where the release's own are not sufficient.
    ///
    /// # Errors
    /// Errors of apt and dpkg.
    pub fn unpack_program(&self, packages: &[String], suite: &str, root: &Path) -> Result<(), String> {
        let downloads = self.downloads()?;
        let mut install = self.command("apt-get");
        install.args([
            "install",
            "--download-only",
            "--no-install-recommends",
            "--yes",
            "--target-release",
            suite,
        ]);
        fetch(install.args(packages))?;
        unpack_all(&downloads, root)
    }

    /// Unpacks the named packages with all of their dependencies below `root`, where directories may be
    /// links. Their scripts do not run.
    ///
    /// # Errors
    /// Errors of apt, dpkg and tar.
    pub fn unpack_system(&self, packages: &[&str], root: &Path) -> Result<(), String> {
        let downloads = self.downloads()?;
        let mut install = self.command("apt-get");
        install.args(["-o", "Dir::State::status=/dev/null", "install", "--download-only"]);
        fetch(install.args(["--no-install-recommends", "--yes"]).args(packages))?;
        let unpack = "for package in \"$1\"/*.deb; do
            dpkg-deb --fsys-tarfile \"$package\" | tar -C \"$2\" --keep-directory-symlink --no-same-owner -xf -
        done";
        let mut bash = Command::new("bash");
        quiet(bash.args(["-euo", "pipefail", "-c", unpack, "unpack"]).arg(&downloads).arg(root))
    }

    /// The download directory, emptied.
    fn downloads(&self) -> Result<PathBuf, String> {
        let folder = self.folder.join("cache/archives");
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "deb") {
                super::at(&entry.path(), "removing", std::fs::remove_file(entry.path()))?;
            }
        }
        Ok(folder)
    }
}

fn field_of_release(text: &str, field: &str) -> Option<String> {
    text.lines().find_map(|line| line.strip_prefix(field)).map(|name| name.trim().to_owned())
}

fn unpack_all(downloads: &Path, root: &Path) -> Result<(), String> {
    super::make_folder(root)?;
    for entry in super::at(downloads, "reading", std::fs::read_dir(downloads))?.flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            quiet(Command::new("dpkg-deb").arg("-x").arg(&path).arg(root))?;
            super::at(&path, "removing", std::fs::remove_file(&path))?;
        }
    }
    Ok(())
}

/// The code name of the machine's release, from the text of `/etc/os-release`.
///
/// # Errors
/// The text has none.
pub fn release_of(os_release: &str) -> Result<String, String> {
    let name = os_release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    name.map(|name| name.trim_matches('"').to_owned()).ok_or_else(|| {
        "/etc/os-release names no release (VERSION_CODENAME): guests are fetched on Debian only".into()
    })
}

fn machine_archive(release: &str) -> Result<Archive, String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    let parts = std::fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    let is_source = |path: &PathBuf| path.extension().is_some_and(|end| end == "list" || end == "sources");
    files.extend(parts.map(|entry| entry.path()).filter(is_source));
    let texts = files.iter().filter_map(|file| std::fs::read_to_string(file).ok());
    texts.into_iter().find_map(|text| archive_in(&text, release)).ok_or_else(|| {
        format!(
            "no source in /etc/apt offers '{release} main': a Debian archive is needed to fetch a kernel from"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_one_line_source_is_found_with_its_options() {
        let text = "# deb http://x/ bookworm main\ndeb-src http://m/debian bookworm main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://m/debian bookworm main contrib\n";
        let found = archive_in(text, "bookworm").expect("the third line");
        assert_eq!(found.uri, "http://m/debian");
        assert_eq!(found.options, "[arch=amd64 signed-by=/k.gpg]");
        assert_eq!(archive_in(text, "trixie"), None);
    }

    #[test]
    fn the_stanza_of_the_release_is_used_and_not_its_updates() {
        let text = "Types: deb\nURIs: http://m/security\nSuites: bookworm-security\nComponents: main\n\n\
                    Types: deb deb-src\nURIs: mirror+file:/etc/mirrors\nSuites: bookworm bookworm-updates\n\
                    Components: main\nSigned-By: /k.gpg\n";
        let found = archive_in(text, "bookworm").expect("the second stanza");
        assert_eq!(
            found,
            Archive { uri: "mirror+file:/etc/mirrors".into(), options: "[signed-by=/k.gpg]".into() }
        );
    }

    #[test]
    fn a_disabled_stanza_is_not_used() {
        let text = "Enabled: no\nTypes: deb\nURIs: http://m/debian\nSuites: bookworm\nComponents: main\n";
        assert_eq!(archive_in(text, "bookworm"), None);
    }

    #[test]
    fn versions_are_ordered_numerically() {
        assert!(numbers("7.3.4+deb13") > numbers("7.2.12+deb13"));
        assert!(numbers("1:10.0.2+ds-2") > numbers("1:7.2+dfsg-7"));
        assert!(numbers("6.12.90+deb12.1") > numbers("6.12.90+deb12"));
    }

    #[test]
    fn a_line_of_offers_is_read() {
        let line = " linux-image-cloud-amd64 | 6.12.107-1 | http://m/debian stable/main amd64 Packages";
        assert_eq!(offer(line), Some(Offer { version: "6.12.107-1".into(), suite: "stable".into() }));
        assert_eq!(offer("N: Unable to locate package"), None);
    }

    #[test]
    fn the_release_is_read_from_os_release() {
        assert_eq!(release_of("NAME=x\nVERSION_CODENAME=bookworm\n").as_deref(), Ok("bookworm"));
        assert!(release_of("NAME=x\n").is_err());
    }
}
