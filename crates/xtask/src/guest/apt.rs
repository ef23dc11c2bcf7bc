//! Distribution packages without installing them: which versions there are, and their files unpacked in a folder.
//!
//! Works with lists, sources and archives of its own below the cache, so that neither root nor a change to the system
//! is needed. Where the packages come from is the machine's own choice: the source that offers its release also has
//! the other suites, and only their names are added here. What is already installed counts as installed, so that only
//! missing libraries are fetched with a program. Debian only; others get an error that says what to set instead.

use super::process::{fetch, output, quiet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The place in the machine's sources that offers its release.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Archive {
    /// Where it is.
    pub uri: String,
    /// Its options as in a one-line source, brackets included; empty without any.
    pub options: String,
}

/// Finds the source of `release` in a file of apt's, of either format; `None` if the file has none.
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
    // A key that stands in the file itself follows on further lines; apt then falls back on the trusted keys.
    let key = field("signed-by:").filter(|key| !key.is_empty());
    let options = key.map_or(String::new(), |key| format!("[signed-by={key}]"));
    Some(Archive { uri: uri.into(), options })
}

/// The numbers of a version, which order versions of one package well enough: `1:10.0.2+ds-2` is 10, 0, 2, 2.
pub fn numbers(version: &str) -> Vec<u64> {
    let upstream = version.split_once(':').map_or(version, |(_, rest)| rest);
    upstream.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// One line of `apt-cache madison`: a version of a package, and the suite that has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The version in full.
    pub version: String,
    /// The suite as the sources name it.
    pub suite: String,
}

fn offer(line: &str) -> Option<Offer> {
    let mut columns = line.split('|').skip(1).map(str::trim);
    let (version, place) = (columns.next()?, columns.next()?);
    let suite = place.split_whitespace().nth(1)?.split('/').next()?;
    Some(Offer { version: version.into(), suite: suite.into() })
}

/// A view of the archive: some suites, with lists and downloads in a folder of their own.
pub struct Apt {
    folder: PathBuf,
}

impl Apt {
    /// Reads the machine's sources and fetches the lists of those of `suites` that exist; `{release}` in a name is the
    /// machine's own release.
    ///
    /// # Errors
    /// Says which file or suite is missing and what to do about it.
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

    /// The code name of a suite that was opened, as its own release file has it.
    ///
    /// # Errors
    /// If apt has no such file.
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
            // Lists that did not come are no success.
            "APT::Update::Error-Mode=any".into(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".into(),
            // The unprivileged user that apt downloads as cannot write to a folder below a private home.
            "APT::Sandbox::User=".into(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }

    /// Names of packages that match a regular expression.
    ///
    /// # Errors
    /// Those of `apt-cache`.
    pub fn names(&self, pattern: &str) -> Result<Vec<String>, String> {
        let text = output(self.command("apt-cache").args(["search", "--names-only", pattern]))?;
        Ok(text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
    }

    /// The versions of a package, the newest first.
    ///
    /// # Errors
    /// Those of `apt-cache`.
    pub fn offers(&self, package: &str) -> Result<Vec<Offer>, String> {
        let text = output(self.command("apt-cache").args(["madison", package]))?;
        let mut offers: Vec<Offer> = text.lines().filter_map(offer).collect();
        offers.sort_by_key(|offer| std::cmp::Reverse(numbers(&offer.version)));
        Ok(offers)
    }

    /// Unpacks the named packages below `root`, without what they depend on.
    ///
    /// # Errors
    /// Those of apt and dpkg.
    pub fn unpack(&self, packages: &[String], root: &Path) -> Result<(), String> {
        let downloads = self.downloads()?;
        fetch(self.command("apt-get").arg("download").args(packages).current_dir(&downloads))?;
        unpack_all(&downloads, root)
    }

    /// Unpacks a program below `root`, with what it depends on and the machine lacks. `packages` may name versions as
    /// `NAME=VERSION`; dependencies come from `suite` where the release's own do not do.
    ///
    /// # Errors
    /// Those of apt and dpkg.
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

    /// The folder that downloads go to, empty.
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
/// If it names none.
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
    fn the_stanza_with_the_release_itself_is_taken_and_not_its_updates() {
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
    fn a_disabled_stanza_is_not_taken() {
        let text = "Enabled: no\nTypes: deb\nURIs: http://m/debian\nSuites: bookworm\nComponents: main\n";
        assert_eq!(archive_in(text, "bookworm"), None);
    }

    #[test]
    fn versions_order_by_their_numbers_and_not_as_text() {
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
