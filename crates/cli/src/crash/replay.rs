//! `crash replay`: attaches the state of a finding as a device, or checks it again.

use super::base::Base;
use super::checker::Checker;
use super::command::Outcome;
use super::save::Run;
use super::{STOP, read_log, stop_on_signals};
use crate::failure::{Failure, print};
use crash::{Model, View};
use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Time limit of a check that the user gave with `--check`.
const DEADLINE: Duration = Duration::from_secs(24 * 3600);

pub(super) fn replay(id: &str, save: &Path, check: Option<&str>, again: bool) -> Result<ExitCode, Failure> {
    attach(id, save, check, again).map_err(|why| Failure::new("crash replay", "", why))
}

fn attach(id: &str, save: &Path, check: Option<&str>, again: bool) -> Result<ExitCode, String> {
    let (run, options, finding) = Run::find(save, id)?;
    let work =
        tempfile::Builder::new().prefix("blockyard-crash-").tempdir().map_err(|why| why.to_string())?;
    let base = options.base.as_ref().map(|base| run.file(base));
    let base = Base::open(base.as_deref(), options.on.as_deref(), work.path())?;
    let path = run.file(&options.log);
    let log_file = File::open(&path).map_err(|why| format!("{}: {why}", path.display()))?;
    let log = Arc::new(read_log(&log_file)?);
    let variant = options.variant.parse()?;
    let model = Model { variant, atomic: options.atomic, cache: options.cache };
    let view = View::new(log, Arc::new(log_file), base.source(), options.size, model);
    let state = finding.state();
    view.allows(&state).map_err(|why| format!("{id}: {why} (is the log that of the finding?)"))?;
    let mut settings = options.check();
    if let Some(check) = check {
        check.clone_into(&mut settings.command);
        settings.dir = None;
        settings.deadline = DEADLINE;
    }
    let may_mount = rustix::process::geteuid().is_root();
    settings.block = settings.block.filter(|_| may_mount);
    let mut checker = Checker::new(settings, Arc::new(view), &work.path().join("job0"))?;
    if check.is_some() || again {
        let checked = checker.check(&state, id)?;
        print(if checked.output.is_empty() { checker.output() } else { checked.output }.as_str());
        return Ok(match checked.outcome {
            Outcome::Passed => {
                eprintln!("{id}: the check passed");
                ExitCode::SUCCESS
            }
            Outcome::Failed(how) => {
                eprintln!("{id}: the check {how}");
                ExitCode::FAILURE
            }
        });
    }
    stop_on_signals(&STOP)?;
    let device = checker.set(&state)?;
    eprint!("{}", finding.text());
    print(&format!("{id} {}\n", device.display()));
    eprintln!("What is written to it is dropped when it is detached, by Ctrl-C.");
    while !STOP.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(ExitCode::SUCCESS)
}
