//! Runs the table: each test in a process of its own, with a time limit and a check for remains.
//!
//! *Invariants:* every selected test is reported once, as passed, failed or skipped with a reason. Remains of
//! a test (a process of ours, a mount, a device) fail it, and are removed before the next one.

use super::{Skip, Test, When};
use crate::tools::until;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Exit status of a child that skips its test. 77 is what other runners use, too.
const SKIPPED: u8 = 77;
/// Prefix of the reason in the child's output.
const REASON: &str = "skipped: ";
/// Limit for a test. Emulated processors are slow, and their host may be busy. Two hanging tests with their
/// clean-up leave time for the others within the limit of `./x guest --suite`.
const LIMIT: Duration = Duration::from_secs(120);
/// The limit for long runs.
const LIMIT_SOAK: Duration = Duration::from_secs(3600);

/// The result of a test.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// Selects the tests of `when` whose names begin with one of `words`; without words all.
pub fn chosen<'a>(tests: &'a [Test], when: &[When], arguments: &[String]) -> Vec<&'a Test> {
    let is_named = |test: &Test| {
        arguments.is_empty() || arguments.iter().any(|word| test.name.starts_with(word.as_str()))
    };
    tests.iter().filter(|test| when.contains(&test.when) && is_named(test)).collect()
}

/// Runs the command line: `--list`, `--one NAME`, or the beginnings of names; after `--long` of long tests, after
/// `--quick` of those that always run.
pub fn main(tests: &[Test], arguments: &[String]) -> ExitCode {
    match arguments {
        [word] if word == "--list" => {
            for Test { name, what, when, .. } in tests {
                let note = match when {
                    When::Always => "",
                    When::Full => " (not with --quick)",
                    When::Soak => " (long)",
                };
                println!("{name:28} {what}{note}");
            }
            ExitCode::SUCCESS
        }
        [word, name] if word == "--one" => match tests.iter().find(|test| test.name == name) {
            Some(test) => one(test),
            None => usage(&format!("no such test: {name}")),
        },
        arguments
            if arguments
                .iter()
                .any(|word| word.starts_with('-') && word != "--long" && word != "--quick") =>
        {
            usage("no such option")
        }
        arguments => {
            if !Path::new("/job").is_dir() {
                return usage("not in a guest, and these tests take every block device that they find");
            }
            let (when, arguments) = match arguments {
                [first, rest @ ..] if first == "--long" => (&[When::Soak][..], rest),
                [first, rest @ ..] if first == "--quick" => (&[When::Always][..], rest),
                arguments => (&[When::Always, When::Full][..], arguments),
            };
            let chosen = chosen(tests, when, arguments);
            if chosen.is_empty() {
                return usage("no test begins so: --list names them");
            }
            all(&chosen)
        }
    }
}

fn usage(why: &str) -> ExitCode {
    eprintln!("guest: {why}\nusage: guest [--list | --one NAME | [--long | --quick] BEGINNING OF NAME...]");
    ExitCode::from(2)
}

/// Runs the test itself, in the child.
fn one(test: &Test) -> ExitCode {
    match (test.run)() {
        Ok(()) => ExitCode::SUCCESS,
        Err(Skip(why)) => {
            println!("{REASON}{why}");
            ExitCode::from(SKIPPED)
        }
    }
}

fn all(tests: &[&Test]) -> ExitCode {
    super::disk::prepare();
    let started = Instant::now();
    let (mut failed, mut skipped) = (Vec::new(), Vec::new());
    for test in tests {
        // Kernel messages then follow the test's name.
        write_kernel_log(&format!("guest runs {}", test.name));
        let begun = Instant::now();
        let outcome = supervise(test);
        let seconds = begun.elapsed().as_secs_f64();
        match outcome {
            Outcome::Passed => println!("{:28} ok {seconds:8.1} s", test.name),
            Outcome::Skipped(why) => {
                println!("{:28} skipped: {why}", test.name);
                skipped.push(test.name);
            }
            Outcome::Failed(why) => {
                println!("{:28} FAILED after {seconds:.1} s: {}", test.name, test.what);
                why.lines().for_each(|line| println!("    {line}"));
                failed.push(test.name);
            }
        }
    }
    let passed = tests.len() - failed.len() - skipped.len();
    println!(
        "\n{:.0} s; skipped: {}; failed: {}",
        started.elapsed().as_secs_f64(),
        names(&skipped),
        names(&failed)
    );
    let word = if failed.is_empty() { "ok" } else { "FAILED" };
    println!("test result: {word}. {passed} passed; {} failed; {} ignored;", failed.len(), skipped.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn names(list: &[&str]) -> String {
    if list.is_empty() { "none".into() } else { list.join(" ") }
}

/// Writes a line to the console, among the kernel's own.
pub fn write_kernel_log(text: &str) {
    let received =
        File::options().write(true).open("/dev/kmsg").and_then(|mut log| writeln!(log, "<1>{text}"));
    if let Err(error) = received {
        eprintln!("/dev/kmsg: {error}");
    }
}

fn supervise(test: &Test) -> Outcome {
    let log = PathBuf::from("/tmp/test.log");
    let outcome = match File::create(&log).and_then(|file| Ok((file.try_clone()?, file))) {
        Ok((stdout, stderr)) => child(test, stdout, stderr, &log),
        Err(error) => Outcome::Failed(format!("{}: {error}", log.display())),
    };
    let left = sweep();
    match (outcome, left.is_empty()) {
        (Outcome::Failed(why), false) => Outcome::Failed(format!("{why}\nleft behind: {}", left.join(", "))),
        (_, false) => Outcome::Failed(format!("left behind: {}", left.join(", "))),
        (outcome, true) => outcome,
    }
}

fn child(test: &Test, stdout: File, stderr: File, log: &Path) -> Outcome {
    let limit = if test.when == When::Soak { LIMIT_SOAK } else { LIMIT };
    let program = std::env::current_exe().unwrap_or_else(|_| "guest".into());
    let mut command = Command::new(program);
    command.args(["--one", test.name]).stdin(Stdio::null()).stdout(stdout).stderr(stderr).process_group(0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Outcome::Failed(format!("starting it failed: {error}")),
    };
    let status = until(limit, || child.try_wait().ok().flatten());
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let Some(status) = status else {
        let stuck = stuck_tasks();
        // Not waited for: a task in uninterruptible sleep does not end.
        let _ = child.kill();
        return Outcome::Failed(format!(
            "{text}\nnot done in {} s; waiting in the kernel:\n{stuck}",
            limit.as_secs()
        ));
    };
    match status.code() {
        Some(0) => Outcome::Passed,
        Some(code) if code == i32::from(SKIPPED) => {
            let reason = text.lines().rev().find_map(|line| line.strip_prefix(REASON));
            Outcome::Skipped(reason.unwrap_or("without a reason").into())
        }
        _ => Outcome::Failed(format!("{text}{status}")),
    }
}

/// Returns the wait channels of all tasks in uninterruptible sleep.
fn stuck_tasks() -> String {
    let mut text = String::new();
    for pid in processes() {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for task in tasks.map(|task| task.path()) {
            let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
            let is_stuck = read("status").lines().any(|line| line.starts_with("State:\tD"));
            if is_stuck {
                text.push_str(&format!("{} ({}):\n{}", task.display(), read("comm").trim(), read("stack")));
            }
        }
    }
    text
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the running processes of programs that only tests start: PID and name.
fn ours() -> Vec<(u32, String)> {
    let named = |pid: u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
        (matches!(name.as_str(), "blockyard" | "fio" | "nbdkit" | "rublk" | "iscsid")
            && crate::server::is_alive(pid))
        .then_some((pid, name))
    };
    processes().filter_map(named).collect()
}

/// Removes the remains of a test, and names them.
fn sweep() -> Vec<String> {
    // A process with a pending signal may be about to end.
    let _ = until(Duration::from_secs(30), || ours().is_empty().then_some(()));
    let mut left = Vec::new();
    for (pid, name) in ours() {
        left.push(format!("process {pid} ({name})"));
        crate::server::signal(pid, rustix::process::Signal::KILL);
    }
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let points =
        mounts.lines().filter(|line| line.starts_with("/dev/")).filter_map(|line| line.split(' ').nth(1));
    for point in points.filter(|point| *point != super::disk::FOLDER) {
        left.push(format!("mount {point}"));
        tool(&["umount", "-l", point]);
    }
    for name in super::disk::attached() {
        left.push(format!("/dev/{name}"));
        if name.starts_with("nbd") {
            tool(&["nbd-client", "-d", &format!("/dev/{name}")]);
        } else if name.starts_with("loop") {
            tool(&["losetup", "-d", &format!("/dev/{name}")]);
        } else if let Some(number) = name.strip_prefix("ublkc").and_then(|number| number.parse().ok()) {
            super::ublk::remove(number);
        }
    }
    for entry in std::fs::read_dir("/dev").into_iter().flatten().flatten() {
        // A regular file in place of a removed device would break the next test.
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            left.push(format!("file {}", entry.path().display()));
            let _ = std::fs::remove_file(entry.path());
        }
    }
    for file in std::fs::read_dir(super::disk::FOLDER).into_iter().flatten().flatten() {
        // The file system's own folders stay.
        let _ = std::fs::remove_file(file.path());
    }
    left
}

/// Runs a tool and ignores errors: the next test reports remains.
fn tool(arguments: &[&str]) {
    let _ = Command::new(arguments[0]).args(&arguments[1..]).stdin(Stdio::null()).output();
}

#[cfg(test)]
mod tests {
    use super::super::{full, soak, test};
    use super::*;

    const TABLE: &[Test] = &[
        test("ublk/null_01", "", || Ok(())),
        test("nbd/one", "", || Ok(())),
        full("ublk/null_02", "", || Ok(())),
        soak("ublk/long", "", || Ok(())),
    ];

    fn names_for(when: &[When], arguments: &[&str]) -> Vec<&'static str> {
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        chosen(TABLE, when, &arguments).iter().map(|test| test.name).collect()
    }

    #[test]
    fn tests_are_selected_by_name_prefix() {
        assert_eq!(names_for(&[When::Always], &[]), ["ublk/null_01", "nbd/one"]);
        assert_eq!(names_for(&[When::Always], &["ublk"]), ["ublk/null_01"]);
        assert_eq!(names_for(&[When::Always], &["null"]), [""; 0]);
        assert_eq!(names_for(&[When::Always, When::Full], &["ublk"]), ["ublk/null_01", "ublk/null_02"]);
    }

    #[test]
    fn long_tests_run_only_on_request() {
        assert_eq!(names_for(&[When::Always], &["ublk/lon"]), [""; 0]);
        assert_eq!(names_for(&[When::Soak], &["ublk/lon", "nbd"]), ["ublk/long"]);
        assert_eq!(names_for(&[When::Soak], &[]), ["ublk/long"]);
    }

    #[test]
    fn names_are_unique_and_have_a_group() {
        let mut names: Vec<_> = super::super::tests().iter().map(|test| test.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(names.iter().all(|name| name.contains('/')), "{names:?}");
    }
}
