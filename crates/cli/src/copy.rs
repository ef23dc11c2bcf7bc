//! `copy`: copies the contents of one stack to another.

use crate::args::CopyArgs;
use crate::failure::{Failure, print};
use crate::plan;
use engine::copy::{CopyError, CopyOptions, CopyProgress, copy};
use engine::spec::{Bytes, StackSpec};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The progress of a copy in its resume file, from which a later run continues.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Resume {
    source: String,
    target: String,
    size: u64,
    offset: u64,
}

impl Resume {
    fn read(path: &Path) -> io::Result<Option<Resume>> {
        match std::fs::read(path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces the file atomically, so that a later run reads the old or the new progress.
    fn write(&self, path: &Path) -> io::Result<()> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        let beside = PathBuf::from(beside);
        let file = std::fs::File::create(&beside)?;
        serde_json::to_writer(&file, self).map_err(io::Error::other)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    }
}

pub(crate) fn copy_stacks(args: &CopyArgs) -> Result<ExitCode, Failure> {
    let source = plan::device("copy", &args.source, &[])?.stack;
    let target = plan::device("copy", &args.target, &[])?.stack;
    let rate = args.rate.as_ref().map(|rate| rate.parse::<Bytes>()).transpose();
    let rate = rate.map_err(|why| Failure::usage("copy", "--rate", why))?.map(|rate| rate.0.max(1));
    let resumed = args.resume.as_deref().map(Resume::read).transpose();
    let resumed = resumed.map_err(|why| failed(args, why))?.flatten();
    if let Some(before) = &resumed
        && (before.source != source.to_string() || before.target != target.to_string())
    {
        let why = format!(
            "the file belongs to a copy of {} to {} (remove it to begin anew)",
            before.source, before.target
        );
        return Err(failed(args, why));
    }
    let options =
        CopyOptions { from: resumed.as_ref().map_or(0, |before| before.offset), rate, verify: false };
    let done = run(args, &source, &target, options, resumed)?;
    if args.verify {
        let options = CopyOptions { verify: true, ..CopyOptions::default() };
        run(args, &source, &target, options, None)?;
    }
    if let Some(path) = &args.resume
        && let Err(why) = std::fs::remove_file(path)
        && why.kind() != io::ErrorKind::NotFound
    {
        return Err(failed(args, why));
    }
    let verified = if args.verify { ", verified" } else { "" };
    let (size, data, holes) = (Bytes(done.size), Bytes(done.data), Bytes(done.holes));
    print(&format!("copied {size}: {data} of data, {holes} of holes{verified}\n"));
    Ok(ExitCode::SUCCESS)
}

fn failed(args: &CopyArgs, why: impl std::fmt::Display) -> Failure {
    let file = args.resume.as_ref().map(|path| path.display().to_string());
    Failure::new("copy", file.unwrap_or_default(), why)
}

/// Copies or compares, with a progress bar if stderr is a terminal, and checkpoints.
fn run(
    args: &CopyArgs,
    source: &StackSpec,
    target: &StackSpec,
    options: CopyOptions,
    mut resumed: Option<Resume>,
) -> Result<CopyProgress, Failure> {
    let bar = progress_bar(options.verify);
    let mut refused: Option<io::Error> = None;
    let done = copy(source, target, options, &mut |progress: CopyProgress| {
        bar.set_length(progress.size);
        bar.set_position(progress.done);
        let Some(path) = args.resume.as_deref().filter(|_| !options.verify) else { return };
        let now = Resume {
            source: source.to_string(),
            target: target.to_string(),
            size: progress.size,
            offset: progress.checkpoint,
        };
        if resumed.as_ref() != Some(&now) && refused.is_none() {
            refused = now.write(path).err();
            resumed = Some(now);
        }
    });
    bar.finish_and_clear();
    if let Some(why) = refused {
        return Err(failed(args, why));
    }
    done.map_err(|why| match (&why, options.verify) {
        (CopyError::Open(..) | CopyError::Table(_), _) => Failure::new("copy", "", why),
        _ => Failure::new("copy", format!("{source} to {target}"), why),
    })
}

fn progress_bar(verify: bool) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(0).with_style(style);
    bar.set_message(if verify { "compare" } else { "copy" });
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
