//! The directory of a run: its log, its options, and a directory for each finding.

use super::args::MountFor;
use crash::View;
use crash::report::{Finding, Summary, timeline};
use serde::{Deserialize, Serialize};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The options to repeat a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Options {
    /// The log.
    pub(super) log: PathBuf,
    /// The file under the log; `None`: zeroes, or `on`.
    pub(super) base: Option<PathBuf>,
    /// The stack under the log.
    pub(super) on: Option<String>,
    /// The size of the device in bytes.
    pub(super) size: u64,
    pub(super) fs: Option<String>,
    pub(super) variant: String,
    pub(super) atomic: u64,
    pub(super) cache: Option<u64>,
    pub(super) check: String,
    /// The directory in which the check ran.
    #[serde(default)]
    pub(super) dir: PathBuf,
    pub(super) mounts: bool,
    pub(super) block: bool,
    pub(super) deadline_ms: u64,
}

/// A run and its directory.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) name: String,
    pub(super) dir: PathBuf,
}

impl Run {
    /// Creates a directory under `save` with a name of four digits that no other run has.
    pub(super) fn create(save: &Path) -> Result<Run, String> {
        std::fs::create_dir_all(save).map_err(|why| format!("{}: {why}", save.display()))?;
        // The path is absolute, so that messages and scripts can name it from any directory.
        let save = std::fs::canonicalize(save).map_err(|why| format!("{}: {why}", save.display()))?;
        let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seed = seed.map_or(0, |time| time.as_nanos() as u64) ^ u64::from(std::process::id()) << 3;
        for step in 0..10_000_u64 {
            let mixed = (seed.wrapping_add(step)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
            let name = format!("{mixed:04x}");
            let dir = save.join(&name);
            match std::fs::create_dir(&dir) {
                Ok(()) => return Ok(Run { name, dir }),
                Err(why) if why.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(why) => return Err(format!("{}: {why}", dir.display())),
            }
        }
        Err(format!("{}: it is full of runs (remove old ones)", save.display()))
    }

    /// Finds a finding by its ID, with its run and the run's options.
    pub(super) fn find(save: &Path, id: &str) -> Result<(Run, Options, Finding), String> {
        let wrong = || format!("{id}: not the name of a finding, such as 7f3a-12");
        let (name, number) = id.split_once('-').ok_or_else(wrong)?;
        let plain = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !plain(name) || !plain(number) {
            return Err(wrong());
        }
        let dir = save.join(name);
        if !dir.join(number).is_dir() {
            let at = save.display();
            return Err(format!("{at}: it has no finding {id} (give the directory of its run with --save)"));
        }
        let finding = read(&dir.join(number).join("finding.json"))?;
        let options = read(&dir.join("run.json"))?;
        let dir = std::fs::canonicalize(&dir).map_err(|why| format!("{}: {why}", dir.display()))?;
        Ok((Run { name: name.to_owned(), dir }, options, finding))
    }

    /// Returns the absolute path of a file that the run stores in its directory.
    pub(super) fn file(&self, path: &Path) -> PathBuf {
        self.dir.join(path)
    }
}

fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, String> {
    let text = std::fs::read_to_string(path).map_err(|why| format!("{}: {why}", path.display()))?;
    serde_json::from_str(&text).map_err(|why| format!("{}: {why}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|why| format!("{}: {why}", path.display()))
}

fn json<T: Serialize>(value: &T) -> Result<String, String> {
    serde_json::to_string_pretty(value).map(|text| text + "\n").map_err(|why| why.to_string())
}

/// Saves the options of a run.
pub(super) fn save_options(run: &Run, options: &Options) -> Result<(), String> {
    write(&run.file(Path::new("run.json")), &json(options)?)
}

/// Saves the summary of a run as text and JSON.
pub(super) fn save_summary(run: &Run, summary: &Summary) -> Result<(), String> {
    write(&run.file(Path::new("summary.json")), &json(summary)?)?;
    let findings: String = summary.findings.iter().map(Finding::text).collect();
    write(&run.file(Path::new("summary.txt")), &format!("{}\n{findings}", summary.table()))
}

/// Saves a finding: its description, its timeline, and a script that checks it again.
pub(super) fn save_finding(run: &Run, view: &View, finding: &Finding) -> Result<(), String> {
    let number = finding.id.rsplit('-').next().unwrap_or_default();
    let dir = run.file(Path::new(number));
    std::fs::create_dir_all(&dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    write(&dir.join("finding.json"), &json(finding)?)?;
    write(&dir.join("finding.txt"), &finding.text())?;
    write(&dir.join("output.txt"), &finding.output)?;
    write(&dir.join("timeline.html"), &timeline(view, finding))?;
    let script = dir.join("reproduce.sh");
    let text = format!(
        "#!/bin/sh\n# Runs the check on the state of {id} again; ends with status 1 if it fails.\n\
         cd \"$(dirname \"$0\")/../..\" || exit 2\n\
         exec \"${{BLOCKYARD:-blockyard}}\" crash replay {id} --save . --again\n",
        id = finding.id
    );
    write(&script, &text)?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))
        .map_err(|why| format!("{}: {why}", script.display()))
}

/// Returns whether the workload and the check get a mounted device.
pub(super) fn mounts(which: Option<MountFor>, fs: bool, workload: &str, check: &str) -> (bool, bool) {
    match which {
        Some(MountFor::None) => (false, false),
        Some(MountFor::Workload) => (true, false),
        Some(MountFor::Check) => (false, true),
        Some(MountFor::Both) => (true, true),
        None => {
            let names = |text: &str, name: &str| text.contains(name);
            let workload = names(workload, "MNT") || fs;
            (workload, names(check, "MNT") || fs && !names(check, "DEV"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_decide_what_is_mounted() {
        assert_eq!(mounts(None, true, "./write.sh", "./verify.sh"), (true, true));
        assert_eq!(mounts(None, true, "./write.sh", "fsck.ext4 -fn $DEV"), (true, false));
        assert_eq!(mounts(None, false, "dd of=$DEV", "cat $MNT/a"), (false, true));
        assert_eq!(mounts(None, false, "dd of=$DEV", "cmp $DEV a"), (false, false));
        assert_eq!(mounts(Some(MountFor::Both), false, "a", "b"), (true, true));
    }
}
