//! Runs iscsi-test-cu, and reads what it prints.
//!
//! CUnit counts a test that skips itself as passed; only the text `[SKIPPED]` shows it. So every test is read
//! from the verbose output, and the summary's counts must agree with it. The exit status is not used: it is 0
//! also when tests failed.

use crate::tools::run_within;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Names `iscsi-test-cu` instead of the one that `./x conformance` fetches.
pub const PROGRAM: &str = "BLOCKYARD_ISCSI_TEST";

/// Limit of a suite or test. One sleeps for a minute, a few for seconds.
const LIMIT: Duration = Duration::from_secs(180);

/// Lines of a failed test that are shown: some repeat an assertion thousands of times.
const LINES: usize = 12;

/// The two initiators.
const INITIATORS: [&str; 2] = ["iqn.2026-11.io.blockyard.test:one", "iqn.2026-11.io.blockyard.test:two"];

/// Returns the program: that of the environment, else the one that `./x` has fetched.
pub fn program() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(PROGRAM) {
        return Some(named.into());
    }
    // This program is target/PROFILE/deps/NAME.
    let own = std::env::current_exe().ok()?;
    let target = own.ancestors().nth(3)?;
    let program = target.join("foreign/iscsi-test/iscsi-test-cu");
    program.is_file().then_some(program)
}

/// Result of a test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// All of its assertions held.
    Passed,
    /// It skipped itself or a part of itself, with its message.
    Skipped(String),
    /// It failed, with what it printed.
    Failed(String),
}

/// A test of a suite.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Result {
    /// `SUITE.TEST`.
    pub name: String,
    /// Its result.
    pub verdict: Verdict,
}

/// A suite that has run.
#[derive(Clone, PartialEq, Debug)]
pub struct Suite {
    /// `FAMILY.SUITE`.
    pub name: String,
    /// Its tests.
    pub tests: Vec<Result>,
    /// The number of assertions that were evaluated.
    pub asserts: u64,
    /// Run time.
    pub took: Duration,
}

/// Returns the suites of the families and prefixes in `chosen`, as `FAMILY.SUITE` or as `FAMILY.SUITE.TEST`
/// for a single test.
///
/// # Panics
/// If the program cannot list them, or lists nothing of `chosen`.
#[track_caller]
pub fn suites(program: &Path, chosen: &[&str]) -> Vec<String> {
    let list = run_within(Command::new(program).arg("--list"), LIMIT).ok();
    let mut suites = Vec::new();
    for word in chosen {
        let depth = word.matches('.').count().max(1);
        let prefix = format!("{word}.");
        let is_chosen =
            |name: &&str| name.matches('.').count() == depth && (name == word || name.starts_with(&prefix));
        let before = suites.len();
        suites.extend(list.lines().map(str::trim).filter(is_chosen).map(str::to_owned));
        assert!(suites.len() > before, "{word}: no such family or suite:\n{list}");
    }
    suites
}

/// Returns the tests of a suite, as `FAMILY.SUITE.TEST`.
///
/// # Panics
/// If the program cannot list them.
#[track_caller]
pub fn tests(program: &Path, suite: &str) -> Vec<String> {
    let list = run_within(Command::new(program).arg("--list"), LIMIT).ok();
    let prefix = format!("{suite}.");
    list.lines().map(str::trim).filter(|name| name.starts_with(&prefix)).map(str::to_owned).collect()
}

/// Joins the results of suites whose tests have run one by one: their names become `FAMILY.SUITE`.
pub fn joined(results: Vec<Suite>) -> Vec<Suite> {
    let mut joined: Vec<Suite> = Vec::new();
    for mut suite in results {
        suite.name = suite.name.split('.').take(2).collect::<Vec<_>>().join(".");
        match joined.iter_mut().find(|known| known.name == suite.name) {
            Some(known) => {
                known.tests.append(&mut suite.tests);
                known.asserts += suite.asserts;
                known.took += suite.took;
            }
            None => joined.push(suite),
        }
    }
    joined
}

/// Runs one suite, or one test, as a process of its own, with data loss and sanitize allowed.
///
/// # Errors
/// The program did not print a summary that agrees with its tests; the message has what it printed.
///
/// # Panics
/// If it cannot be started or hangs.
#[track_caller]
pub fn run(program: &Path, suite: &str, urls: &[&str]) -> std::result::Result<Suite, String> {
    let started = Instant::now();
    let mut command = Command::new(program);
    command.args(["--dataloss", "--allow-sanitize", "--verbose"]);
    command.arg(format!("--initiator-name={}", INITIATORS[0]));
    command.arg(format!("--initiator-name-2={}", INITIATORS[1]));
    command.arg(format!("--test={suite}")).args(urls);
    let outcome = run_within(&mut command, LIMIT);
    let parsed = parse(&outcome.stdout).filter(|_| outcome.status.code().is_some());
    let (tests, asserts) = parsed.ok_or_else(|| outcome.to_string())?;
    Ok(Suite { name: suite.to_owned(), tests, asserts, took: started.elapsed() })
}

/// Reads the verbose output of CUnit: the tests, and the number of assertions. `None` if it has no summary,
/// or one that counts other tests or failures.
pub fn parse(text: &str) -> Option<(Vec<Result>, u64)> {
    let (body, summary) = text.split_once("Run Summary:")?;
    let count = |row: &str, column: usize| -> Option<u64> {
        let line = summary.lines().find(|line| line.trim_start().starts_with(row))?;
        line.split_whitespace().nth(column)?.parse().ok()
    };
    let mut tests = Vec::new();
    let mut suite = "";
    for chunk in body.split("\n  Test: ").flat_map(|chunk| {
        // The next suite's headline is at the end of the chunk of its predecessor's last test.
        let at = chunk.find("\nSuite: ").unwrap_or(chunk.len());
        [&chunk[..at], &chunk[at..]]
    }) {
        if let Some(rest) = chunk.strip_prefix("\nSuite: ") {
            suite = rest.lines().next()?.trim();
        } else if let Some((test, output)) = chunk.split_once(" ...") {
            tests.push(Result { name: format!("{suite}.{test}"), verdict: verdict(output) });
        }
    }
    let failed = tests.iter().filter(|test| matches!(test.verdict, Verdict::Failed(_))).count();
    let agrees = count("tests", 2)? == tests.len() as u64
        && count("tests", 4)? == failed as u64
        && !tests.is_empty()
        && count("tests", 5)? == 0;
    agrees.then_some((tests, count("asserts", 2)?))
}

fn verdict(output: &str) -> Verdict {
    // CUnit prints its verdict after the test's output; output of the suite's clean-up may follow.
    let is_passed =
        output.lines().any(|line| line.trim_end().ends_with("passed") || line.starts_with("passed"));
    let is_failed = output.lines().any(|line| line.trim_end() == "FAILED" || line.trim() == "...FAILED");
    if is_failed || !is_passed {
        let lines: Vec<&str> = output.trim().lines().take(LINES).collect();
        return Verdict::Failed(lines.join("\n"));
    }
    match output.lines().find_map(|line| line.split_once("[SKIPPED] ")) {
        Some((_, reason)) => Verdict::Skipped(reason.trim().to_owned()),
        None => Verdict::Passed,
    }
}

/// A test that is expected to skip itself.
#[derive(Clone, Copy, Debug)]
pub struct Skip {
    /// `SUITE.TEST`.
    pub test: &'static str,
    /// The stores on which it does; empty: all.
    pub stores: &'static [&'static str],
    /// Why it cannot run here.
    pub reason: &'static str,
}

/// Returns what is wrong with the results of a store: failed tests, skipped tests that `expected` does not
/// list, and listed ones that were not skipped. `all`: whether all suites have run.
pub fn faults(store: &str, suites: &[Suite], expected: &[Skip], all: bool) -> Vec<String> {
    let mut faults = Vec::new();
    let listed = |name: &str| {
        expected
            .iter()
            .any(|skip| skip.test == name && (skip.stores.is_empty() || skip.stores.contains(&store)))
    };
    let mut skipped = Vec::new();
    for suite in suites {
        let family = suite.name.split('.').next().unwrap_or_default();
        for test in &suite.tests {
            match &test.verdict {
                Verdict::Passed => {}
                Verdict::Skipped(_) if listed(&test.name) => skipped.push(test.name.as_str()),
                Verdict::Skipped(why) => {
                    faults.push(format!(
                        "{store}: {family}.{}: skipped without a listed reason: {why}",
                        test.name
                    ));
                }
                Verdict::Failed(output) => {
                    faults.push(format!(
                        "{store}: {family}.{} FAILED\n    {}",
                        test.name,
                        output.replace('\n', "\n    ")
                    ));
                }
            }
        }
    }
    for skip in expected.iter().filter(|skip| all && listed(skip.test) && !skipped.contains(&skip.test)) {
        if skip.stores.is_empty() || skip.stores.contains(&store) {
            faults.push(format!("{store}: {}: listed as skipped, but it ran", skip.test));
        }
    }
    faults
}

/// Returns a table with a line for each family of a store.
pub fn table(store: &str, suites: &[Suite], families: &[&str]) -> String {
    let mut text = format!(
        "{:10} {:8} {:>6} {:>6} {:>7} {:>7} {:>8} {:>9} {:>8}\n",
        "store", "family", "suites", "tests", "passed", "failed", "skipped", "asserts", "seconds"
    );
    for family in families {
        let prefix = format!("{family}.");
        let of: Vec<&Suite> = suites.iter().filter(|suite| suite.name.starts_with(&prefix)).collect();
        if of.is_empty() {
            continue;
        }
        let tests = || of.iter().flat_map(|suite| &suite.tests);
        let count = |which: fn(&Verdict) -> bool| tests().filter(|test| which(&test.verdict)).count();
        let asserts: u64 = of.iter().map(|suite| suite.asserts).sum();
        let seconds: f64 = of.iter().map(|suite| suite.took.as_secs_f64()).sum();
        let _ = writeln!(
            text,
            "{store:10} {family:8} {:>6} {:>6} {:>7} {:>7} {:>8} {asserts:>9} {seconds:>8.1}",
            of.len(),
            tests().count(),
            count(|verdict| *verdict == Verdict::Passed),
            count(|verdict| matches!(verdict, Verdict::Failed(_))),
            count(|verdict| matches!(verdict, Verdict::Skipped(_))),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
Suite: CompareAndWrite
  Test: Simple ...passed
  Test: Unwritten ...    [SKIPPED] COMPAREANDWRITE is not implemented.
passed
  Test: Eol ...    [FAILED] GET_LBA_STATUS successful
FAILED
    1. test.c:45  - CU_ASSERT_EQUAL(1,2)
Suite: Read6
  Test: Residuals ...passed    [FAILED] PRIN command: unit attention

Run Summary:    Type  Total    Ran Passed Failed Inactive
              suites      2      2    n/a      0        0
               tests      4      4      3      1        0
             asserts     12     12     11      1      n/a
";

    #[test]
    fn a_test_is_passed_skipped_or_failed() {
        let (tests, asserts) = parse(TEXT).expect("a summary");
        assert_eq!(asserts, 12);
        let names: Vec<&str> = tests.iter().map(|test| test.name.as_str()).collect();
        assert_eq!(
            names,
            ["CompareAndWrite.Simple", "CompareAndWrite.Unwritten", "CompareAndWrite.Eol", "Read6.Residuals"]
        );
        assert_eq!(tests[0].verdict, Verdict::Passed);
        assert_eq!(tests[1].verdict, Verdict::Skipped("COMPAREANDWRITE is not implemented.".into()));
        assert!(matches!(&tests[2].verdict, Verdict::Failed(why) if why.contains("CU_ASSERT_EQUAL")));
        assert_eq!(tests[3].verdict, Verdict::Passed);
    }

    #[test]
    fn output_without_a_summary_or_with_another_count_is_an_error() {
        assert_eq!(parse("\nSuite: A\n  Test: B ...passed\n"), None);
        assert_eq!(parse(&TEXT.replace("  3      1  ", "  4      0  ")), None);
        assert_eq!(parse(&TEXT.replace("tests      4      4", "tests      4      5")), None);
    }

    #[test]
    fn results_of_a_suite_whose_tests_have_run_one_by_one_are_joined() {
        let (tests, asserts) = parse(TEXT).expect("a summary");
        let one = |name: &str| Suite { name: name.into(), tests: tests.clone(), asserts, took: LIMIT };
        let joined = joined(vec![one("ALL.A.Reset"), one("ALL.B"), one("ALL.A.Other"), one("SCSI.A.Reset")]);
        let counts: Vec<_> =
            joined.iter().map(|suite| (&*suite.name, suite.tests.len(), suite.asserts)).collect();
        assert_eq!(counts, [("ALL.A", 8, 24), ("ALL.B", 4, 12), ("SCSI.A", 4, 12)]);
        assert_eq!(joined[0].took, 2 * LIMIT);
    }

    #[test]
    fn failures_and_unlisted_skips_are_faults() {
        let (tests, asserts) = parse(TEXT).expect("a summary");
        let suite = Suite { name: "ALL.X".into(), tests, asserts, took: Duration::ZERO };
        let skip = |test, stores| Skip { test, stores, reason: "" };
        let of = |expected: &[Skip]| faults("ram", std::slice::from_ref(&suite), expected, true).len();
        assert_eq!(of(&[]), 2);
        assert_eq!(of(&[skip("CompareAndWrite.Unwritten", &[])]), 1);
        assert_eq!(of(&[skip("CompareAndWrite.Unwritten", &["file"])]), 2, "listed for another store");
        assert_eq!(of(&[skip("CompareAndWrite.Unwritten", &[]), skip("Read6.Residuals", &[])]), 2, "it ran");
    }
}
