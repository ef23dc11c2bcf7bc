//! `table`, `status`, `message`: show and load tables, show targets' status, and send messages to targets.

use crate::args::{MessageArgs, StatusArgs, TableArgs};
use crate::failure::{Failure, print};
use crate::listing::{block_on, client_of, run_dir};
use crate::plan::read_table;
use engine::tables::{TableAnswer, TableCall, TargetAnswer};
use std::fmt::Write as _;
use std::process::ExitCode;

pub(crate) fn table(args: &TableArgs) -> Result<ExitCode, Failure> {
    let Some(file) = &args.load else {
        let answer = ask("table", &args.name, &TableCall::Table { inactive: args.inactive })?;
        return show(&answer.targets, args.output.json);
    };
    let text = read_table("table", file)?;
    let base = std::env::current_dir().map_err(|why| Failure::new("table", "the current directory", why))?;
    ask("table", &args.name, &TableCall::Load { text, base })?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn status(args: &StatusArgs) -> Result<ExitCode, Failure> {
    let answer = ask("status", &args.name, &TableCall::Status)?;
    show(&answer.targets, args.output.json)
}

pub(crate) fn message(args: &MessageArgs) -> Result<ExitCode, Failure> {
    let call = TableCall::Message { sector: args.sector, arguments: args.arguments.clone() };
    if let Some(text) = ask("message", &args.name, &call)?.text {
        print(&format!("{}\n", text.trim_end_matches('\n')));
    }
    Ok(ExitCode::SUCCESS)
}

/// Sends a table request to the process that serves a device.
fn ask(what: &str, name: &str, call: &TableCall) -> Result<TableAnswer, Failure> {
    let run = run_dir(what)?;
    let client = client_of(&run, what, name)?;
    let answer = block_on(what, client.table(name, call))?;
    answer.map_err(|why| Failure::new(what, name, why))
}

fn show(targets: &[TargetAnswer], json: bool) -> Result<ExitCode, Failure> {
    if json {
        let text = serde_json::to_string(targets).map_err(|why| Failure::new("table", "", why))?;
        print(&format!("{}\n", text.trim_end_matches('\n')));
    } else {
        print(&lines(targets, ""));
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats targets as dmsetup prints them; `name` is the prefix of each line.
pub(crate) fn lines(targets: &[TargetAnswer], name: &str) -> String {
    let mut text = String::new();
    for TargetAnswer { start, len, kind, params } in targets {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name}{start} {len} {kind} {params}");
    }
    text
}
