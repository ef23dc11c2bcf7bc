//! `./x bench compare A.json B.json`: which figures of two reports differ by more than their noise.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use super::results::Results;
use super::statistics::{holm, mann_whitney};
use crate::error::{Error, Result};
use crate::figures::median;
use crate::options::command;

/// Probability of one or more false finds.
const LEVEL: f64 = 0.05;
/// Columns that are compared, and whether more is better.
const COLUMNS: [(&str, bool); 5] =
    [("iops", true), ("bytes", true), ("p99_us", false), ("server_us", false), ("cpu_us", false)];

const USAGE: &str = "\
usage: ./x bench compare A.json B.json
  Two reports of ./x bench report. Lists the figures that changed beyond the noise: the rounds of both are compared by
  Mann and Whitney's exact test, and all comparisons together have a chance of 5 % of a false find (Holm's method).
  Exit status 0: no figure is worse, 1: some are, 2: the reports cannot be compared.
";

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    let mut worse = false;
    let compare = |paths: &(String, String)| {
        let (text, is_worse) = report(&read(&paths.0)?, &read(&paths.1)?)?;
        print!("{text}");
        worse = is_worse;
        Ok(())
    };
    let status = command("compare", USAGE, arguments, parse, compare);
    match (status == ExitCode::SUCCESS, worse) {
        (true, true) => ExitCode::FAILURE,
        (true, false) => ExitCode::SUCCESS,
        (false, _) => ExitCode::from(2),
    }
}

fn parse(arguments: &[String]) -> Result<(String, String)> {
    match arguments {
        [first, second] => Ok((first.clone(), second.clone())),
        _ => Err(Error("two reports are needed".into())),
    }
}

fn read(path: &str) -> Result<Results> {
    let text = std::fs::read_to_string(path).map_err(Error::at(Path::new(path)))?;
    Results::from_json(&text).map_err(|error| Error(format!("{path}: {}", error.0)))
}

struct Change {
    name: String,
    medians: (f64, f64),
    rounds: (usize, usize),
    probability: f64,
    is_better: bool,
}

/// Returns the text of the comparison, and whether a figure is worse.
fn report(old: &Results, new: &Results) -> Result<(String, bool)> {
    let mut changes = Vec::new();
    for figure in &old.figures {
        let Some(other) = new.find(&figure.part, &figure.subject, &figure.job) else { continue };
        for (column, more_is_better) in COLUMNS {
            let (before, after) = (figure.values(column), other.values(column));
            if before.is_empty() || after.is_empty() {
                continue;
            }
            let medians = (median(&before), median(&after));
            changes.push(Change {
                name: format!("{}: {}, {} ({column})", figure.part, figure.subject, figure.job),
                medians,
                rounds: (before.len(), after.len()),
                probability: mann_whitney(&before, &after),
                is_better: (medians.1 > medians.0) == more_is_better,
            });
        }
    }
    if changes.is_empty() {
        return Err(Error("the reports have no figure in common".into()));
    }
    let found = holm(&changes.iter().map(|change| change.probability).collect::<Vec<_>>(), LEVEL);
    let mut text = String::new();
    for name in old.machine.keys().filter(|name| old.machine.get(*name) != new.machine.get(*name)) {
        let of = |results: &Results| results.machine.get(name).cloned().unwrap_or_default();
        let _ = writeln!(text, "{name} differs: {} and {}", of(old), of(new));
    }
    let mut is_worse = false;
    for (change, _) in changes.iter().zip(&found).filter(|(_, found)| **found) {
        let word = if change.is_better { "better" } else { "worse" };
        is_worse |= !change.is_better;
        let _ = writeln!(
            text,
            "{word:6}  {:.2} x  {}: {:.1} to {:.1}, p = {:.4}",
            change.medians.1 / change.medians.0,
            change.name,
            change.medians.0,
            change.medians.1,
            change.probability
        );
    }
    for one in [(old, new), (new, old)].iter().flat_map(|(has, lacks)| lost(has, lacks)) {
        text += &one;
    }
    let count = found.iter().filter(|found| **found).count();
    let _ = writeln!(text, "{count} of {} figures changed beyond the noise", changes.len());
    // The smallest probability that this number of rounds can reach.
    let least = changes.iter().map(|change| 2.0 / ways(change.rounds)).fold(1.0, f64::min);
    if least > LEVEL / changes.len() as f64 {
        text += "too few rounds: with these no difference could be significant (a full report has more than --quick; \
                 --parts compares fewer figures)\n";
    }
    Ok((text, is_worse))
}

/// Returns a line for each subject that the report `lacks` left out although `has` measured it.
fn lost(has: &Results, lacks: &Results) -> Vec<String> {
    let measured = |part: &str, subject: &str| {
        has.figures.iter().any(|figure| figure.part == part && figure.subject == subject)
    };
    let lost = lacks.left_out.iter().filter(|one| measured(&one.part, &one.subject));
    lost.map(|one| format!("not compared: {}: {}: {}\n", one.part, one.subject, one.why)).collect()
}

/// Returns the number of ways to divide all rounds between the two reports.
fn ways((first, second): (usize, usize)) -> f64 {
    (1..=first).map(|at| (second + at) as f64 / at as f64).product()
}

#[cfg(test)]
mod tests {
    use super::super::results::{Figure, parse_csv};
    use super::*;

    fn results(values: &[f64]) -> Results {
        let lines = values.iter().enumerate().map(|(round, value)| format!("a,b,{round},{value}\n"));
        let figures: Vec<Figure> =
            parse_csv(&format!("subject,job,round,iops\n{}", lines.collect::<String>())).unwrap();
        let mut results = Results::default();
        results.add("part", figures, Vec::new());
        results
    }

    #[test]
    fn a_change_beyond_the_noise_is_listed() {
        let (old, new) = (results(&[10.0, 11.0, 12.0, 10.5, 11.5]), results(&[5.0, 5.5, 6.0, 5.2, 5.8]));
        let (text, is_worse) = report(&old, &new).unwrap();
        assert!(is_worse && text.contains("worse   0.50 x  part: a, b (iops): 11.0 to 5.5"), "{text}");
        let (text, is_worse) = report(&new, &old).unwrap();
        assert!(!is_worse && text.starts_with("better"), "{text}");
    }

    #[test]
    fn noise_is_not_listed() {
        let (text, is_worse) =
            report(&results(&[10.0, 11.0, 12.0, 9.0, 8.0]), &results(&[9.5, 11.5, 10.2, 8.5, 12.5])).unwrap();
        assert!(!is_worse && text == "0 of 1 figures changed beyond the noise\n", "{text}");
    }

    #[test]
    fn a_subject_that_one_report_left_out_is_named() {
        let old = results(&[10.0, 11.0]);
        let mut new = Results::default();
        new.add("part", parse_csv("subject,job,round,iops\nc,b,0,1\n").unwrap(), Vec::new());
        new.figures
            .extend(old.figures.iter().cloned().map(|figure| Figure { subject: "d".into(), ..figure }));
        let mut old_with_d = old.clone();
        old_with_d.figures.extend(new.figures.iter().skip(1).cloned());
        new.add("part", Vec::new(), vec![("a".into(), "tgtd is not installed".into())]);
        for (first, second) in [(&old_with_d, &new), (&new, &old_with_d)] {
            let (text, _) = report(first, second).unwrap();
            assert!(text.contains("not compared: part: a: tgtd is not installed\n"), "{text}");
        }
    }

    #[test]
    fn too_few_rounds_and_foreign_reports_are_reported() {
        let (text, _) = report(&results(&[10.0, 11.0]), &results(&[5.0, 6.0])).unwrap();
        assert!(text.contains("too few rounds"), "{text}");
        assert!(report(&results(&[1.0]), &Results::default()).is_err());
    }
}
