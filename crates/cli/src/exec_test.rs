//! `exec-test`: checks a program against the exec protocol.

use crate::args::ExecTestArgs;
use crate::failure::{FAILED, Failure, print};
use engine::programs::{Checked, Verdict, exec_test};
use engine::spec::StackSpec;
use serde_json::{Value, json};
use std::process::ExitCode;

pub(crate) fn run(args: &ExecTestArgs) -> Result<ExitCode, Failure> {
    let command = args.command.strip_prefix("exec:").unwrap_or(&args.command);
    let stack: StackSpec =
        format!("exec:{command}").parse().map_err(|why| Failure::new("exec-test", command, why))?;
    let StackSpec::Exec(spec) = stack else {
        return Err(Failure::new("exec-test", command, "it is not an exec: backend"));
    };
    let mut listed = Vec::new();
    let passed = exec_test(&spec, |checked| {
        if args.output.json {
            listed.push(as_json(checked));
        } else {
            print(&as_line(checked));
        }
    });
    if args.output.json {
        print(&format!("{}\n", json!({ "ok": passed, "checks": listed })));
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn as_line(checked: &Checked) -> String {
    match &checked.verdict {
        Verdict::Passed => format!("ok       {}\n", checked.name),
        Verdict::Skipped(why) => format!("skipped  {} ({why})\n", checked.name),
        Verdict::Failed(why) => format!("FAILED   {}: {why}\n", checked.name),
    }
}

fn as_json(checked: &Checked) -> Value {
    let (result, why) = match &checked.verdict {
        Verdict::Passed => ("ok", None),
        Verdict::Skipped(why) => ("skipped", Some(*why)),
        Verdict::Failed(why) => ("failed", Some(why.as_str())),
    };
    json!({ "check": checked.name, "result": result, "why": why })
}
