//! `check`: reports all errors of a topology file at once.

use crate::args::CheckArgs;
use crate::failure::{FAILED, Failure, print};
use engine::topology::{Problem, TopologyError, check_files};
use serde_json::{Value, json};
use std::process::ExitCode;

pub(crate) fn check(args: &CheckArgs) -> Result<ExitCode, Failure> {
    let loaded = engine::topology::load(&args.file);
    let (counts, problems) = match &loaded {
        Ok(topology) => ((topology.devices.len(), topology.exports.len()), check_files(topology)),
        Err(error) => ((0, 0), error.problems.clone()),
    };
    if args.output.json {
        let listed: Vec<Value> = problems.iter().map(as_json).collect();
        let answer = json!({ "ok": problems.is_empty(), "problems": listed });
        print(&format!("{answer}\n"));
        return Ok(ExitCode::from(if problems.is_empty() { 0 } else { FAILED }));
    }
    if problems.is_empty() {
        let count = |n, word| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
        let (devices, exports) = (count(counts.0, "device"), count(counts.1, "export"));
        print(&format!("{}: {devices}, {exports}\n", args.file.display()));
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::new("check", "", TopologyError { file: args.file.clone(), problems }))
}

fn as_json(problem: &Problem) -> Value {
    json!({ "line": problem.line, "key": problem.key, "why": problem.why })
}
