//! `--guest KERNEL`: the same command on another kernel, in the guest harness of a checkout (`./x guest`).
//!
//! The whole laboratory runs in the guest: the workload, the recording, and the checks, so that also recovery is
//! that of the other kernel (ADR 52). The run's directory comes back and is like that of any other run.

use super::args::CrashArgs;
use super::save::Run;
use crash::report::Summary;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Seconds for booting, recording and the return of the results, beside the time to explore.
const SECONDS_MORE: u64 = 600;
/// Memory of the guest in MiB: the run's directory is in it.
const MEMORY_MIB: &str = "3072";

/// Loads what the laboratory uses; a kernel without one of them has it built in, or does without.
const SCRIPT: &str = "for module in fuse loop ublk_drv; do modprobe $module 2>/dev/null; done
exec blockyard crash \"$@\" --save /out/crash >/dev/null";

/// Returns the harness: `x` in a directory above the current one, or above this program.
fn harness() -> Result<PathBuf, String> {
    let places = [std::env::current_dir(), std::env::current_exe()];
    let found = places.iter().flatten().flat_map(|place| place.ancestors()).find_map(|dir| {
        let harness = dir.join("x");
        (harness.is_file() && dir.join("crates/xtask").is_dir()).then_some(harness)
    });
    found.ok_or_else(|| {
        "--guest needs a checkout of Blockyard, whose ./x guest fetches and boots kernels (run it in one)"
            .to_owned()
    })
}

/// Returns the words of the command without the options that are for the harness.
fn words_of_guest(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    const OURS: [&str; 3] = ["--guest", "--with", "--save"];
    let mut arguments = arguments.skip_while(|word| word != "crash").skip(1);
    let mut kept = Vec::new();
    while let Some(word) = arguments.next() {
        let text = word.to_string_lossy();
        if OURS.iter().any(|ours| text == *ours) {
            arguments.next();
        } else if !OURS.iter().any(|ours| text.strip_prefix(ours).is_some_and(|rest| rest.starts_with('='))) {
            let has_value = text.starts_with("--") && !text.contains('=') && text != "--json";
            kept.push(word);
            // The value of an option may look like one of ours.
            kept.extend(if has_value { arguments.next() } else { None });
        }
    }
    kept
}

/// Runs the command in a guest. Returns the run and its summary.
pub(super) fn run(args: &CrashArgs, kernel: &str) -> Result<(Run, Summary), String> {
    let harness = harness()?;
    std::fs::create_dir_all(&args.save).map_err(|why| format!("{}: {why}", args.save.display()))?;
    // Beside the runs, so that the run can be renamed.
    let out =
        tempfile::Builder::new().prefix(".guest-").tempdir_in(&args.save).map_err(|why| why.to_string())?;
    let out_path = std::fs::canonicalize(out.path()).map_err(|why| why.to_string())?;
    let seconds = args.time.as_secs().saturating_add(SECONDS_MORE).to_string();
    let mut command = Command::new(&harness);
    command.args(["guest", "--kernel", kernel, "--memory", MEMORY_MIB, "--timeout", &seconds]);
    command.arg("--out").arg(&out_path);
    for file in &args.with {
        let file = std::fs::canonicalize(file).map_err(|why| format!("{}: {why}", file.display()))?;
        command.arg("--with").arg(file);
    }
    let words = words_of_guest(std::env::args_os());
    command.args(["--", "sh", "-c", SCRIPT, "crash"]).args(words);
    // Standard output is for the result.
    command.stdin(Stdio::null()).stdout(Stdio::from(std::io::stderr()));
    if let Ok(program) = std::env::current_exe() {
        command.env("BLOCKYARD_BIN", program);
    }
    let status = command.status().map_err(|why| format!("{}: {why}", harness.display()))?;
    let failed =
        || format!("the guest of kernel {kernel} ended with {status} and no result (its output is above)");
    if !matches!(status.code(), Some(0 | 1)) {
        return Err(failed());
    }
    let kept = only_run(&out_path.join("out/crash")).ok_or_else(failed)?;
    let name = kept.file_name().unwrap_or_default();
    let dir = args.save.join(name);
    if dir.exists() {
        return Err(format!(
            "{}: a run of this name exists (remove it, and repeat the command)",
            dir.display()
        ));
    }
    std::fs::rename(&kept, &dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    let dir = std::fs::canonicalize(&dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    let text = std::fs::read_to_string(dir.join("summary.json")).map_err(|_| failed())?;
    let summary = serde_json::from_str(&text).map_err(|why| format!("{}: {why}", dir.display()))?;
    Ok((Run { name: name.to_string_lossy().into_owned(), dir }, summary))
}

/// Returns the only directory of a run.
fn only_run(dir: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path());
    let mut runs = entries.filter(|path| path.is_dir() && path.file_name() != Some(OsStr::new(".")));
    runs.next().filter(|_| runs.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_harness_stay_here() {
        let line =
            ["blockyard", "crash", "--guest", "6.1", "--with=a", "--fs", "ext4", "--save", "d", "--json"];
        let more = ["--workload", "--guest", "--check=true", "--with", "b", "--guest=6.1", "--states", "3"];
        let words = words_of_guest(line.iter().chain(&more).map(OsString::from));
        assert_eq!(
            words,
            ["--fs", "ext4", "--json", "--workload", "--guest", "--check=true", "--states", "3"]
        );
    }
}
