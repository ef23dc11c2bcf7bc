//! `apply` and `up --reload`: apply a changed topology file to the process that serves it.
//!
//! The command reads the file, finds the process and reports; the process plans and executes ([`carry_out`]).

pub(crate) mod carry_out;

use crate::args::{ApplyArgs, UpArgs};
use crate::failure::{FAILED, Failure, print};
use crate::listing::{block_on, run_dir};
use crate::progress::shown;
use engine::apply::{ActionReport, ApplyAnswer, ApplyRequest, Outcome, TopologyText};
use engine::control::ControlClient;
use engine::rundir::RunDir;
use engine::topology::Topology;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(crate) fn apply(args: &ApplyArgs) -> Result<ExitCode, Failure> {
    run("apply", &args.file, args.dry_run, args.output.json)
}

/// `up --reload`.
pub(crate) fn reload(args: &UpArgs) -> Result<ExitCode, Failure> {
    run("up", &args.file, args.dry_run, args.run.json)
}

fn run(what: &'static str, file: &Path, dry_run: bool, json: bool) -> Result<ExitCode, Failure> {
    let fail = |why: &dyn std::fmt::Display| Failure::new(what, file.display(), why);
    let text = engine::topology::read(file).map_err(|why| Failure::new(what, "", why))?;
    // Problems are reported with the path that was given.
    let topology = Topology::parse(&text, file).map_err(|why| Failure::new(what, "", why))?;
    let path = std::path::absolute(file).map_err(|why| fail(&why))?;
    let request = ApplyRequest { text, file: path, dry_run };
    let run = run_dir(what)?;
    let answer = block_on(what, async {
        let client = server_of(&run, file, &topology).await.map_err(|why| fail(&why))?;
        shown("applying", client.apply(&request)).await.map_err(|why| fail(&why))
    })??;
    report(what, file, &answer, dry_run, json)
}

/// Finds the process that was started with a topology file.
async fn server_of(run: &RunDir, file: &Path, topology: &Topology) -> Result<ControlClient, String> {
    let is_this = |other: &Path| match (other.canonicalize(), file.canonicalize()) {
        (Ok(other), Ok(file)) => other == file,
        _ => false,
    };
    let all = texts(run).await;
    let mut found: Vec<_> =
        all.iter().filter(|(_, text)| text.file.as_deref().is_some_and(is_this)).collect();
    let start = format!("start it with: blockyard up {}", file.display());
    match (found.pop(), found.pop()) {
        (Some((client, _)), None) => Ok(client.clone()),
        (Some((_, one)), Some((_, other))) => {
            Err(format!("processes {} and {} both serve it (end one of them)", one.pid, other.pid))
        }
        (None, _) => {
            let named = |name: &str| topology.devices.iter().any(|device| device.name.as_str() == name);
            let taken = all.iter().find_map(|(_, text)| {
                let device = text.devices.iter().find(|device| named(&device.name))?;
                Some((text.pid, &device.name))
            });
            Err(match taken {
                None => format!("no process serves it ({start})"),
                Some((pid, name)) => format!(
                    "process {pid}, which serves {name}, was not started with this file (blockyard del {name}, then {start})"
                ),
            })
        }
    }
}

/// Returns the served topology of every process. Processes that do not answer, or whose version has no topologies, are
/// left out.
pub(crate) async fn texts(run: &RunDir) -> Vec<(ControlClient, TopologyText)> {
    let mut asked = tokio::task::JoinSet::new();
    for socket in run.processes() {
        let client = ControlClient::new(socket);
        asked.spawn(async move { client.topology().await.ok().map(|text| (client, text)) });
    }
    let mut texts: Vec<_> = asked.join_all().await.into_iter().flatten().collect();
    texts.sort_by_key(|(_, text)| text.pid);
    texts
}

fn report(
    what: &str,
    file: &Path,
    answer: &ApplyAnswer,
    dry_run: bool,
    json: bool,
) -> Result<ExitCode, Failure> {
    let failed = answer.actions.iter().find(|action| action.outcome == Outcome::Failed);
    let is_done = answer.refused.is_empty() && failed.is_none();
    if json {
        let answer = serde_json::json!({
            "ok": is_done,
            "dry_run": dry_run,
            "actions": answer.actions,
            "refused": answer.refused,
        });
        print(&format!("{answer}\n"));
        return Ok(ExitCode::from(if is_done { 0 } else { FAILED }));
    }
    let is_shown = |action: &&ActionReport| dry_run || action.outcome == Outcome::Done;
    let lines: String = answer.actions.iter().filter(is_shown).map(line).collect();
    if is_done && answer.actions.is_empty() {
        print(&format!("{}: nothing to change\n", file.display()));
    } else {
        print(&lines);
    }
    let refused =
        answer.refused.iter().map(|why| Failure::new(what, "", format!("{why}; nothing was changed")));
    let failures = failed
        .iter()
        .map(|action| Failure::new(what, &action.device, action.why.as_deref().unwrap_or("it failed")));
    let skipped = answer.actions.iter().filter(|action| action.outcome == Outcome::NotDone);
    let skipped = skipped.map(|action| Failure::new(what, "not done", &action.text));
    let all = refused.chain(failures).chain(skipped);
    all.reduce(Failure::and).map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Formats an action with the addresses of the exports that it added.
fn line(action: &ActionReport) -> String {
    match action.addresses.is_empty() {
        true => format!("{}\n", action.text),
        false => format!("{} -> {}\n", action.text, action.addresses.join(" ")),
    }
}

/// Returns the absolute path of a topology file, as `up` registers it.
pub(crate) fn registered(file: &Path) -> PathBuf {
    std::path::absolute(file).unwrap_or_else(|_| file.to_owned())
}
