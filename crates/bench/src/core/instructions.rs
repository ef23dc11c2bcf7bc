//! `instructions`: the instructions of a request, counted by callgrind and compared with the figures in
//! `instructions.toml`.
//!
//! The program runs itself under valgrind with two numbers of requests: the difference excludes the start-up.

use super::export::ExportRig;
use super::rig::{Harness, Mix, Rig, Stacking};
use super::virtqueue::VirtqueueRig;
use super::{LAYERS, PIECES, usage_error};
use crate::multipath::{Selector, Subject};
use std::path::Path;
use std::process::{Command, ExitCode};

const USAGE: &str = "usage: blockyard-bench instructions [--write]";
/// The record of expected counts, beside the manifest: one `name = count` a line.
const EXPECTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/instructions.toml");
/// Largest deviation of a count from the expected one, in percent.
const SLACK_PERCENT: f64 = 2.0;
/// The permitted deviation, and excess over a goal, in percent, with another compiler than that of the
/// record, whose code differs.
const SLACK_PERCENT_ELSEWHERE: f64 = 10.0;
/// Prefix of the compiler's version in the record.
const COMPILER: &str = "# Compiled by ";
/// Prefix of the processor's architecture, after the version.
const PROCESSOR: &str = " for ";
/// Numbers of requests of the shorter and of the longer run: whole turns, and enough to touch all memory
/// before the counts differ.
const COUNTS: [u64; 2] = [3200, 19_200];

/// The source of requests.
#[derive(Clone, Copy)]
enum Case {
    /// The harness's own front-end, over a queue with this stack.
    Queue(Stacking),
    /// The model of the ublk driver, with the export between it and the queue, or with manual commands.
    Ublk { with_export: bool },
    /// Both sides of a virtqueue, without a device behind it.
    Virtqueue { is_packed: bool },
    /// The front-end alone.
    Harness,
}

const fn over(selector: Selector, paths: u8) -> Case {
    Case::Queue(Stacking::Multipath(Subject::Free(selector, paths)))
}

/// Programs that run under valgrind.
const CASES: [(&str, Case); 18] = [
    ("harness", Case::Harness),
    ("null", Case::Queue(Stacking::Null { layers: 0 })),
    ("layers", Case::Queue(Stacking::Null { layers: LAYERS })),
    ("whole", Case::Queue(Stacking::Split { whole: true })),
    ("long", Case::Queue(Stacking::Long)),
    ("split", Case::Queue(Stacking::Split { whole: false })),
    ("ublk", Case::Ublk { with_export: true }),
    ("model", Case::Ublk { with_export: false }),
    ("rest", Case::Queue(Stacking::Held { layers: 0 })),
    ("rest-layers", Case::Queue(Stacking::Held { layers: LAYERS })),
    ("deadline", Case::Queue(Stacking::Deadline { follow: false })),
    ("merged", Case::Queue(Stacking::Deadline { follow: true })),
    ("round-robin-1", over(Selector::RoundRobin, 1)),
    ("round-robin", over(Selector::RoundRobin, 4)),
    ("service-time", over(Selector::ServiceTime, 4)),
    ("queue-length", over(Selector::QueueLength, 4)),
    ("historical", over(Selector::Historical, 4)),
    ("io-affinity", over(Selector::Affinity, 4)),
];

/// Virtqueue cases, of which only the device's side is counted.
const VIRTQUEUES: [(&str, Case); 2] = [
    ("virtqueue-split", Case::Virtqueue { is_packed: false }),
    ("virtqueue-packed", Case::Virtqueue { is_packed: true }),
];
/// The function of the device's side of a virtqueue, as a pattern for callgrind.
const DEVICE: &str = "*serve_virtqueue*";

/// The function that counts completed requests. In the cases that measure statistics, only its instructions
/// are counted.
const STATISTICS: &str = "*statistics_of_a_turn*";
/// Instructions that count a request's entry into a node: a load, an addition and a store.
const ENTERED: f64 = 3.0;

/// Reported figures: the name, and the largest permitted count, if there is a goal.
const GOALS: [(&str, Option<f64>); ROWS] = [
    ("null_request", Some(300.0)),
    ("held_request", Some(300.0)),
    ("layer", Some(80.0)),
    ("split_nothing_to_cut", Some(80.0)),
    ("split_child", Some(400.0)),
    ("ublk_request", None),
    // The goal is 90, plus the usual slack.
    ("multipath_round_robin_1", Some(92.0)),
    ("multipath_round_robin_4", Some(92.0)),
    ("multipath_service_time_4", None),
    ("multipath_queue_length_4", None),
    ("multipath_historical_4", None),
    ("multipath_io_affinity_4", None),
    ("statistics_request", Some(25.0)),
    ("statistics_layer", Some(25.0)),
    ("statistics_layer_held", Some(25.0)),
    ("mq_deadline", None),
    ("mq_deadline_merged", None),
    ("virtqueue_split", None),
    ("virtqueue_packed", None),
];
const ROWS: usize = 19;

/// Returns the instructions per request of a case; with `within`, only those in that function.
fn count(program: &Path, case: &str, within: Option<&str>) -> Result<f64, String> {
    let mut totals = [0u64; 2];
    for (total, requests) in totals.iter_mut().zip(COUNTS) {
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .args(within.map(|function| format!("--toggle-collect={function}")))
            .arg(program)
            .args(["instructions", "--child", case, &requests.to_string()])
            .output()
            .map_err(|error| format!("starting valgrind failed: {error}"))?;
        let text = String::from_utf8_lossy(&output.stderr);
        *total = text
            .lines()
            .find_map(|line| line.split("Collected :").nth(1)?.trim().parse().ok())
            .filter(|_| output.status.success())
            .ok_or_else(|| format!("valgrind did not count {case}: {text}"))?;
    }
    Ok((totals[1] as f64 - totals[0] as f64) / (COUNTS[1] - COUNTS[0]) as f64)
}

fn measure(program: &Path) -> Result<[f64; ROWS], String> {
    let mut counts = [0.0; CASES.len()];
    for (count_of, (case, _)) in counts.iter_mut().zip(CASES) {
        *count_of = count(program, case, None)?;
    }
    let [
        harness,
        null,
        layers,
        whole,
        long,
        split,
        ublk,
        model,
        rest,
        rest_layers,
        deadline,
        merged,
        multipath @ ..,
    ] = counts;
    let layer = (layers - null) / f64::from(LAYERS);
    let [counted, counted_layers] = ["null", "layers"].map(|case| count(program, case, Some(STATISTICS)));
    let (counted, counted_layers) = (counted?, counted_layers?);
    if counted < 1.0 {
        return Err(format!("{STATISTICS} was not seen"));
    }
    let of_a_layer = (counted_layers - counted) / f64::from(LAYERS) + ENTERED;
    // Holding a request makes every node above record that, and again when the request is resumed. The
    // additional cost of a layer under a held request is attributed to this.
    let at_rest = of_a_layer + (rest_layers - rest) / f64::from(LAYERS) - layer;
    let statistics = [counted + ENTERED, of_a_layer, at_rest];
    let [one, round_robin, service_time, queue_length, historical, affinity] =
        multipath.map(|counted| counted - null);
    let split_child = (split - long) / PIECES as f64;
    let queue = [null, rest - harness, layer, whole - null, split_child, ublk - model];
    let multipath = [one, round_robin, service_time, queue_length, historical, affinity];
    let mut virtqueues = [0.0; VIRTQUEUES.len()];
    for (count_of, (case, _)) in virtqueues.iter_mut().zip(VIRTQUEUES) {
        *count_of = count(program, case, Some(DEVICE))?;
    }
    if virtqueues.iter().any(|&count| count < 1.0) {
        return Err(format!("{DEVICE} was not seen"));
    }
    let mut all = [0.0; ROWS];
    all.iter_mut()
        .zip(
            queue
                .into_iter()
                .chain(multipath)
                .chain(statistics)
                .chain([deadline - null, merged - null])
                .chain(virtqueues),
        )
        .for_each(|(row, count)| *row = count);
    Ok(all)
}

/// Parses the expected counts: lines `name = count`, `#` begins a comment.
fn parse_expected(text: &str) -> Result<Vec<(String, f64)>, String> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines
        .filter(|line| !line.is_empty())
        .map(|line| {
            let (name, value) =
                line.split_once('=').ok_or_else(|| format!("\"{line}\" is not name = count"))?;
            let value = value.trim().parse().map_err(|_| format!("\"{line}\": the count is not a number"))?;
            Ok((name.trim().to_owned(), value))
        })
        .collect()
}

/// Compares a count with the expected one; returns `Err` when it is too high.
fn judge(
    count: f64,
    expected: Option<f64>,
    goal: Option<f64>,
    slack_percent: f64,
) -> Result<&'static str, &'static str> {
    let beyond = (slack_percent - SLACK_PERCENT) / 100.0;
    if goal.is_some_and(|goal| count > goal * (1.0 + beyond)) {
        return Err("above the goal");
    }
    let Some(expected) = expected else {
        return Err("not in instructions.toml: add it with --write");
    };
    let percent = (count / expected - 1.0) * 100.0;
    if percent > slack_percent {
        Err("more than expected: find out why, or record it with --write")
    } else if percent < -slack_percent {
        Ok("improved: record it with --write")
    } else {
        Ok("as expected")
    }
}

/// Returns the version of the compiler, and the processor architecture of this program; `None` if they are
/// unknown.
fn compiler() -> Option<String> {
    let printed = Command::new("rustc").arg("--version").output().ok()?;
    Some(format!("{}{PROCESSOR}{}", String::from_utf8_lossy(&printed.stdout).trim(), std::env::consts::ARCH))
}

/// Returns the processor architecture of a record if it differs from this one, on which the same work takes
/// another number of instructions.
fn foreign_processor(record: &str) -> Option<&str> {
    let recorded = record.lines().find_map(|line| line.strip_prefix(COMPILER)?.split_once(PROCESSOR));
    recorded.map(|(_, processor)| processor).filter(|processor| *processor != std::env::consts::ARCH)
}

/// Returns the slack in percent for a record: it is wider for another compiler.
fn slack(record: &str, compiler: Option<&str>) -> f64 {
    let recorded = record.lines().find_map(|line| line.strip_prefix(COMPILER));
    if recorded.is_some() && recorded == compiler { SLACK_PERCENT } else { SLACK_PERCENT_ELSEWHERE }
}

fn write_expected(counts: &[f64; ROWS]) -> std::io::Result<()> {
    let mut text = format!(
        "# Instructions per request, statistics and histograms on, as `blockyard-bench instructions` counts\n\
         # them. Checked with 2 % slack, of another compiler with 10 %; recorded anew with --write.\n{COMPILER}{}\n",
        compiler().unwrap_or_default()
    );
    for ((name, _), count) in GOALS.iter().zip(counts) {
        text += &format!("{name} = {count:.1}\n");
    }
    std::fs::write(EXPECTED, text)
}

fn check(counts: &[f64; ROWS]) -> Result<ExitCode, String> {
    let text =
        std::fs::read_to_string(EXPECTED).map_err(|error| format!("reading {EXPECTED} failed: {error}"))?;
    let expected = parse_expected(&text)?;
    let slack_percent = slack(&text, compiler().as_deref());
    println!("slack: {slack_percent} %");
    let mut code = ExitCode::SUCCESS;
    println!("{:<24}{:>12}{:>12}{:>8}", "", "counted", "expected", "goal");
    for ((name, goal), &count) in GOALS.into_iter().zip(counts) {
        let expected = expected.iter().find(|row| row.0 == name).map(|row| row.1);
        let show = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
        let judgement = judge(count, expected, goal, slack_percent).unwrap_or_else(|why| {
            code = ExitCode::FAILURE;
            why
        });
        println!("{name:<24}{count:>12.1}{:>12}{:>8}   {judgement}", show(expected), show(goal));
    }
    Ok(code)
}

/// Runs the measured part; this process is the one under valgrind.
fn child(case: &str, requests: &str) -> ExitCode {
    let case = CASES.into_iter().chain(VIRTQUEUES).find(|row| row.0 == case).map(|row| row.1);
    match (case, requests.parse()) {
        (Some(Case::Queue(stacking)), Ok(requests)) => Rig::new(stacking).run(Mix::Half, requests),
        (Some(Case::Ublk { with_export }), Ok(requests)) => {
            ExportRig::new(with_export).run(Mix::Half, requests);
        }
        (Some(Case::Virtqueue { is_packed }), Ok(requests)) => VirtqueueRig::new(is_packed).run(requests),
        (Some(Case::Harness), Ok(requests)) => Harness::new().run(Mix::Half, requests),
        _ => return usage_error("--child takes a case and a number of requests", USAGE),
    }
    ExitCode::SUCCESS
}

/// Runs `instructions [--write]`.
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let write = match words[..] {
        ["--child", case, requests] => return child(case, requests),
        ["--write"] => true,
        [] => false,
        _ => return usage_error("what follows is not known", USAGE),
    };
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: valgrind is not installed (apt install valgrind)");
        return ExitCode::SUCCESS;
    }
    let record = std::fs::read_to_string(EXPECTED).unwrap_or_default();
    if let Some(processor) = foreign_processor(&record).filter(|_| !write) {
        println!("skipped: the record is of {processor} (instructions --write makes one of this processor)");
        return ExitCode::SUCCESS;
    }
    let outcome = std::env::current_exe()
        .map_err(|error| format!("finding this program failed: {error}"))
        .and_then(|program| measure(&program))
        .and_then(|counts| {
            if write {
                write_expected(&counts).map_err(|error| format!("writing {EXPECTED} failed: {error}"))?;
            }
            crate::multipath::check_stores().map_err(|error| format!("stores: {error}"))?;
            check(&counts)
        });
    outcome.unwrap_or_else(|why| {
        eprintln!("blockyard-bench: counting failed: {why}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_compared_with_goal_and_record() {
        assert!(judge(301.0, Some(301.0), Some(300.0), SLACK_PERCENT).is_err());
        assert!(judge(103.0, Some(100.0), None, SLACK_PERCENT).is_err());
        assert!(judge(100.0, None, None, SLACK_PERCENT).is_err());
        assert_eq!(judge(101.0, Some(100.0), Some(300.0), SLACK_PERCENT), Ok("as expected"));
        assert!(judge(90.0, Some(100.0), None, SLACK_PERCENT).is_ok_and(|what| what.contains("improved")));
    }

    #[test]
    fn another_compiler_has_more_slack() {
        let record = format!("# x\n{COMPILER}rustc 1.2.3\na = 1\n");
        assert_eq!(slack(&record, Some("rustc 1.2.3")), SLACK_PERCENT);
        assert_eq!(slack(&record, Some("rustc 1.2.4")), SLACK_PERCENT_ELSEWHERE);
        assert_eq!(slack("a = 1\n", None), SLACK_PERCENT_ELSEWHERE);
        assert!(judge(320.0, Some(301.0), Some(300.0), SLACK_PERCENT_ELSEWHERE).is_ok());
        assert!(judge(340.0, Some(320.0), Some(300.0), SLACK_PERCENT_ELSEWHERE).is_err());
    }

    #[test]
    fn a_record_of_another_processor_is_ignored() {
        let record = |processor: &str| format!("# x\n{COMPILER}rustc 1.2.3{PROCESSOR}{processor}\na = 1\n");
        assert_eq!(foreign_processor(&record("pdp11")), Some("pdp11"));
        assert_eq!(foreign_processor(&record(std::env::consts::ARCH)), None);
        assert_eq!(foreign_processor("a = 1\n"), None);
    }

    #[test]
    fn the_record_is_parsed() {
        assert_eq!(
            parse_expected("# x\na = 1.5\n\nb=2 # y\n"),
            Ok(vec![("a".into(), 1.5), ("b".into(), 2.0)])
        );
        assert!(parse_expected("a 1").is_err() && parse_expected("a = x").is_err());
        let recorded = parse_expected(&std::fs::read_to_string(EXPECTED).expect("a record")).expect("lines");
        assert!(GOALS.iter().all(|goal| recorded.iter().any(|row| row.0 == goal.0)));
    }
}
