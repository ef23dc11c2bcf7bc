//! `crash`: records a workload, explores the states that a power cut could have left, and checks each.
//!
//! The workload's device and the devices of states are files by FUSE, served by threads of this process, with a
//! loop device over a file where it must be mounted. Commands of the user, `mount` and the helper that binds
//! loop devices are processes of their own: no thread waits for a file that it serves.

mod args;
mod base;
mod checker;
mod command;
mod device;
mod export;
mod files;
mod guest;
mod marks;
mod record;
mod recorder;
mod replay;
mod run;
mod save;
mod served;
mod state;
mod written;

pub(crate) use args::CrashArgs;

use crate::failure::{Failure, print};
use args::CrashAction;
use base::Base;
use checker::Check;
use crash::report::Summary;
use crash::{Log, Model, View};
use device::BlockKind;
use run::{Limits, explore};
use save::{Options, Run, mounts, save_options, save_summary};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The default size of an empty device, enough for each file system.
const SIZE_DEFAULT: u64 = 512 << 20;

pub(crate) fn crash(args: &CrashArgs) -> Result<ExitCode, Failure> {
    match &args.action {
        Some(CrashAction::Mark { text }) => return marks::mark(text),
        Some(CrashAction::Replay { id, save, check, again }) => {
            return replay::replay(id, save, check.as_deref(), *again);
        }
        None => {}
    }
    let name = args.log.as_ref().map_or(String::new(), |log| log.display().to_string());
    let usage = |why: &str| Failure::usage("crash", "", why);
    if args.log.is_none() && args.workload.is_none() {
        return Err(usage("neither --workload nor --log is given (record a command, or use a log)"));
    }
    let Some(check) = &args.check else {
        return Err(usage("--check is missing (give a command that fails on a state that is wrong)"));
    };
    laboratory(args, check).map_err(|why| Failure::new("crash", name, why))
}

/// Sets `stop` at SIGINT or SIGTERM, so that the run ends and reports the states so far.
pub(super) fn stop_on_signals(stop: &'static AtomicBool) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|why| why.to_string())?;
    let mut signals =
        runtime.block_on(async { crate::signals::Signals::new() }).map_err(|why| why.to_string())?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            loop {
                signals.next().await;
                stop.store(true, Ordering::Relaxed);
            }
        });
    });
    Ok(())
}

pub(super) static STOP: AtomicBool = AtomicBool::new(false);

fn laboratory(args: &CrashArgs, check: &str) -> Result<ExitCode, String> {
    if let Some(kernel) = &args.guest {
        let (run, summary) = guest::run(args, kernel)?;
        report(args, &run, &summary);
        return Ok(exit_code(&summary));
    }
    let workload = args.workload.as_deref().unwrap_or_default();
    let (mount_workload, mount_check) = mounts(args.mount, args.fs.is_some(), workload, check);
    let is_root = rustix::process::geteuid().is_root();
    if (mount_workload && args.log.is_none() || mount_check) && !is_root {
        let why = "mounting a file system needs root (use $DEV without --fs, or --mount none)";
        return Err(why.to_owned());
    }
    stop_on_signals(&STOP)?;
    let run = Run::create(&args.save)?;
    let work =
        tempfile::Builder::new().prefix("blockyard-crash-").tempdir().map_err(|why| why.to_string())?;
    let base_file = match (&args.fs, &args.base) {
        (Some(fs), _) => Some(base::make_fs(&run, fs, args.size.unwrap_or(SIZE_DEFAULT))?),
        (None, base) => base.clone().map(|base| std::fs::canonicalize(&base).unwrap_or(base)),
    };
    let base = Base::open(base_file.as_deref(), args.on.as_deref(), work.path())?;
    let log_path = match &args.log {
        Some(log) => std::fs::canonicalize(log).map_err(|why| why.to_string())?,
        None => {
            let size = base.size().or(args.size).unwrap_or(SIZE_DEFAULT);
            let block = args.device.or_else(|| mount_workload.then(BlockKind::choose));
            let how = record::How { workload, mounts: mount_workload, fs: args.fs.as_deref(), block };
            record::record(&run, &base, size, &how, work.path())?;
            PathBuf::from("log")
        }
    };
    let log_file = File::open(run.file(&log_path)).map_err(|why| format!("{}: {why}", log_path.display()))?;
    let log = Arc::new(read_log(&log_file)?);
    let size = base.size().or(args.size).unwrap_or(0).max(log.size).next_multiple_of(4096);
    let options = Options {
        log: log_path,
        base: base_file.map(|base| base.strip_prefix(&run.dir).map(Path::to_owned).unwrap_or(base)),
        on: args.on.clone(),
        size,
        fs: args.fs.clone(),
        variant: args.model.to_string(),
        atomic: args.atomic,
        cache: args.cache,
        check: check.to_owned(),
        dir: std::env::current_dir().unwrap_or_default(),
        mounts: mount_check,
        block: mount_check || args.device.is_some(),
        deadline_ms: args.deadline.as_millis() as u64,
    };
    save_options(&run, &options)?;
    let model = Model { variant: args.model, atomic: args.atomic, cache: args.cache };
    let summary = empty_summary(&run, &log, &model, args.seed);
    let view = Arc::new(View::new(log, Arc::new(log_file), base.source(), size, model));
    let mut check = options.check();
    check.block = args.device.or(check.block);
    let jobs = args.jobs.map(usize::from);
    let jobs = jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let limits = Limits { time: args.time, states: args.states, findings: args.findings.max(1), jobs };
    let summary = explore(&view, &run, &check, limits, summary, work.path(), &STOP)?;
    save_summary(&run, &summary)?;
    report(args, &run, &summary);
    Ok(exit_code(&summary))
}

fn exit_code(summary: &Summary) -> ExitCode {
    if summary.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn report(args: &CrashArgs, run: &Run, summary: &Summary) {
    if args.json {
        print(&format!("{}\n", serde_json::json!(summary)));
        return;
    }
    let mut text = summary.table();
    if let Some(first) = summary.findings.first() {
        let save = args.save.display();
        let place = if save.to_string() == "crash" { String::new() } else { format!(" --save {save}") };
        text.push_str(&format!("saved in     {}\n", run.dir.display()));
        text.push_str(&format!("to attach    blockyard crash replay {}{place}\n", first.id));
    }
    print(&text);
}

/// Reads the index of a log.
pub(super) fn read_log(file: &File) -> Result<Log, String> {
    let len = std::io::Seek::seek(&mut &*file, std::io::SeekFrom::End(0)).map_err(|why| why.to_string())?;
    let log = Log::read(file, len).map_err(|why| why.to_string())?;
    if log.truncated {
        eprintln!("blockyard: the log ends within a record; what is before it is used");
    }
    if log.writes.is_empty() {
        return Err("the log has no writes (does the workload write to $DEV or $MNT, and sync?)".to_owned());
    }
    Ok(log)
}

fn empty_summary(run: &Run, log: &Log, model: &Model, seed: u64) -> Summary {
    Summary {
        run: run.name.clone(),
        model: model.variant.to_string(),
        atomic: model.atomic,
        cache: model.cache,
        seed,
        writes: log.writes.len(),
        flushes: log.flushes.len(),
        marks: log.marks.len(),
        generated: 0,
        checked: 0,
        equal: 0,
        unread: 0,
        failed: 0,
        unstable: 0,
        slow: 0,
        minimising: 0,
        seconds: 0.0,
        ended: String::new(),
        findings: Vec::new(),
    }
}

impl Options {
    /// Returns the check of a run.
    fn check(&self) -> Check {
        Check {
            command: self.check.clone(),
            // On another machine it is run where the user is.
            dir: self.dir.is_dir().then(|| self.dir.clone()),
            deadline: std::time::Duration::from_millis(self.deadline_ms),
            mounts: self.mounts,
            fs: self.fs.clone(),
            block: self.block.then(BlockKind::choose),
        }
    }
}
