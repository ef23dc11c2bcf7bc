//! The `blockyard` command: parses arguments, calls the engine or a server, prints tables.
//!
//! The parser, the help, the manual page and the completions come from one table, [`args`]. A command exits with
//! status 0, or with a [`Failure`] that names the operation, the object, the reason and a fix: status
//! 1 if the request failed, 2 if the arguments are invalid. Stdout is for answers only.
//!
//! *Invariant:* commands get information on devices through the engine's control API only, also in the process that
//! serves them.

#![forbid(unsafe_code)]

mod add;
mod apply;
mod args;
mod change;
mod check;
mod complete;
mod copy;
mod crash;
mod del;
mod dmsetup;
mod exec_test;
mod export_args;
mod exporter;
mod failure;
mod help;
mod holder;
mod inflight;
mod launch;
mod limits;
mod listing;
mod locale;
mod log;
mod losetup;
mod move_device;
mod page;
mod pager;
mod pages;
mod plan;
mod process;
mod progress;
mod recover;
mod registry;
mod replay;
mod save;
mod served;
mod serving;
mod signals;
mod stat;
mod supervise;
mod table;
mod targetcli;
mod top;
mod trace;

use args::{Cli, Command, UpArgs};
use clap::FromArgMatches;
use failure::Failure;
use std::process::ExitCode;

fn main() -> ExitCode {
    clap_complete::CompleteEnv::with_factory(Cli::command_for_pages).var(pages::COMPLETE).complete();
    let parsed = help::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return failure::usage(&error),
    };
    // A server does not fail if its answer could not be written.
    let serves = matches!(
        &cli.command,
        Command::Serve(_) | Command::TargetcliHost(_) | Command::Up(UpArgs { reload: false, .. })
    );
    let ended = run(cli.command);
    process::wait_for_clusters();
    log::finish();
    match ended {
        Ok(code) if serves => code,
        Ok(code) => failure::once_written(code),
        Err(failure) => {
            let code = failure.report();
            process::let_go_when_stuck();
            code
        }
    }
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Serve(args) => serving::serve(&args),
        Command::Add(args) => add::add(&args),
        Command::Up(args) => serving::up(&args),
        Command::Apply(args) => apply::apply(&args),
        Command::Save(args) => save::save(&args),
        Command::Check(args) => check::check(&args),
        Command::ExecTest(args) => exec_test::run(&args),
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
        Command::Crash(args) => crash::crash(&args),
        Command::Copy(args) => copy::copy_stacks(&args),
        Command::Move(args) => move_device::move_device(&args),
        Command::ReplayLog(args) => replay::replay_log(&args),
        Command::Losetup(args) => Ok(losetup::losetup(&args.arguments)),
        Command::Dmsetup(args) => Ok(dmsetup::dmsetup(&args.arguments)),
        Command::Targetcli(args) => targetcli::targetcli(&args.arguments),
        Command::TargetcliHost(args) => targetcli::serve(args.run),
        Command::LoopDevice { arguments } => Ok(loop_device(&arguments)),
        Command::Completions { shell } => pages::completions(shell),
        Command::Man(args) => pages::man(&args),
        Command::Reference(args) => help::reference::write(&args),
        Command::Help { arguments } => help::help(&arguments),
    }
}

/// Runs the helper process that the engine starts for operations on a loop device that could block on the device.
fn loop_device(arguments: &[String]) -> ExitCode {
    match attach::loop_device::run_helper(arguments) {
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
