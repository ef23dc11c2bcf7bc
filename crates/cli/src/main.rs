//! The `blockyard` command: words in, engine calls, tables out.
//!
//! One table, [`args`], makes the parser, the help, the man page and the completions. A command ends
//! with status 0, or with a [`Failure`](failure::Failure) that says what failed, of what, why, and what
//! to do: status 1 when the request failed, 2 when it made no sense. Stdout is for answers only.
//!
//! *Invariant:* what a command knows about devices comes through the engine's control API, also in the
//! process that serves them.

#![forbid(unsafe_code)]

mod add;
mod args;
mod attach;
mod change;
mod check;
mod choice;
mod del;
mod dmsetup;
mod failure;
mod inflight;
mod limits;
mod listing;
mod locale;
mod log;
mod losetup;
mod made;
mod page;
mod pages;
mod plan;
mod progress;
mod recover;
mod replay;
mod served;
mod serving;
mod signals;
mod stat;
mod supervise;
mod table;
mod top;
mod trace;

use args::{Cli, Command};
use clap::Parser;
use failure::Failure;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::usage(&error),
    };
    // A server has served, wherever its first line went to.
    let serves = matches!(cli.command, Command::Serve(_) | Command::Up(_));
    let ended = run(cli.command);
    log::finish();
    match ended {
        Ok(code) if serves => code,
        Ok(code) => failure::once_written(code),
        Err(failure) => {
            let code = failure.report();
            attach::let_go_when_stuck();
            code
        }
    }
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Serve(args) => serving::serve(&args),
        Command::Add(args) => add::add(&args),
        Command::Up(args) => serving::up(&args),
        Command::Check(args) => check::check(&args),
        Command::List(args) => listing::list(&args),
        Command::Show(args) => listing::show(&args),
        Command::Del(args) => del::del(&args),
        Command::Recover(args) => recover::recover(&args),
        Command::Upgrade(args) => recover::upgrade(&args),
        Command::Resize(args) => change::resize(&args),
        Command::Commit(args) => change::commit(&args),
        Command::Set(args) => change::set(&args),
        Command::Inflight(args) => inflight::inflight(&args),
        Command::Limits(args) => limits::limits(&args),
        Command::Suspend(args) => change::suspend(&args),
        Command::Resume(args) => change::resume(&args),
        Command::Table(args) => table::table(&args),
        Command::Status(args) => table::status(&args),
        Command::Message(args) => table::message(&args),
        Command::Stat(args) => stat::stat(&args),
        Command::Top(args) => top::top(&args),
        Command::Trace(args) => trace::trace(&args),
        Command::ReplayLog(args) => replay::replay_log(&args),
        Command::Losetup(args) => Ok(losetup::losetup(&args.words)),
        Command::Dmsetup(args) => Ok(dmsetup::dmsetup(&args.words)),
        Command::LoopDevice { words } => Ok(loop_device(&words)),
        Command::Completions { shell } => pages::completions(shell),
        Command::Man => pages::man(),
    }
}

/// The process that the engine starts for what must not wait for itself.
fn loop_device(words: &[String]) -> ExitCode {
    match engine::loop_device::run_helper(words) {
        Ok(answer) => {
            failure::print(&answer);
            ExitCode::SUCCESS
        }
        Err(refusal) => {
            eprintln!("{}", refusal.why);
            ExitCode::from(refusal.status)
        }
    }
}
