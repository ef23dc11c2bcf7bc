//! How a command fails: `blockyard: WHAT failed: NAME: why (what to do)`, and with which status.

use clap::error::ErrorKind;
use std::fmt::Display;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// The status of a request that failed.
pub(crate) const FAILED: u8 = 1;
/// The status of a request that made no sense.
pub(crate) const USAGE: u8 = 2;

/// Why a command did not do what it was asked to.
#[derive(Debug)]
pub(crate) struct Failure {
    status: u8,
    lines: Vec<String>,
}

impl Failure {
    /// `what` (a command) failed for `name`, which may be empty when it is about no thing in particular.
    /// `why` also says what to do; when it has several lines, each is an error of its own.
    pub(crate) fn new(what: &str, name: impl Display, why: impl Display) -> Failure {
        let name = name.to_string();
        let name = if name.is_empty() { name } else { format!("{name}: ") };
        let why = why.to_string();
        let lines = why.lines().map(|why| format!("blockyard: {what} failed: {name}{why}")).collect();
        Failure { status: FAILED, lines }
    }

    /// The same, for a request that made no sense.
    pub(crate) fn usage(what: &str, name: impl Display, why: impl Display) -> Failure {
        Failure { status: USAGE, ..Failure::new(what, name, why) }
    }

    /// Another failure of the same command after this one.
    pub(crate) fn and(mut self, other: Failure) -> Failure {
        self.lines.extend(other.lines);
        self.status = self.status.max(other.status);
        self
    }

    /// Why, without what failed.
    pub(crate) fn reason(&self) -> String {
        let whys = self.lines.iter().map(|line| line.splitn(4, ": ").last().unwrap_or_default());
        whys.collect::<Vec<_>>().join("; ")
    }

    /// Tells the user, and is the status to end with.
    pub(crate) fn report(&self) -> ExitCode {
        for line in &self.lines {
            eprintln!("{line}");
        }
        ExitCode::from(self.status)
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.lines.join("\n"))
    }
}

/// What the parser has to say: help and version are answers, the rest is an error.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        print(&error.to_string());
        return once_written(ExitCode::SUCCESS);
    }
    if error.kind() == ErrorKind::InvalidUtf8 {
        return not_utf8();
    }
    let text = error.to_string();
    match text.strip_prefix("error: ") {
        Some(text) => eprint!("blockyard: {text}"),
        None => eprint!("{text}"),
    }
    ExitCode::from(USAGE)
}

/// Paths go through texts (records, JSON, tables) that have no room for other bytes.
fn not_utf8() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let command = words.next().unwrap_or_default();
    let word = words.find(|word| word.to_str().is_none()).unwrap_or_else(|| command.clone());
    let why = format!("{}: it is not UTF-8 (give the file another name, or a link to it)", word.display());
    if command == "losetup" {
        eprintln!("losetup: {why}");
        return ExitCode::from(FAILED);
    }
    Failure::usage(&command.to_string_lossy(), "", why).report()
}

/// Writes an answer to stdout, and tells whether anyone still reads. Whoever closed it does not want the
/// answer: that is no failure.
pub(crate) fn print(text: &str) -> bool {
    print_bytes(text.as_bytes())
}

/// The same, of names that may be any bytes.
pub(crate) fn print_bytes(text: &[u8]) -> bool {
    use std::io::Write;
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text).and_then(|()| stdout.flush());
    if let Err(why) = &written
        && why.kind() != std::io::ErrorKind::BrokenPipe
        && !UNWRITTEN.swap(true, Ordering::Relaxed)
    {
        eprintln!(
            "blockyard: writing the answer failed: {why} (stdout goes where nothing more can be written)"
        );
    }
    written.is_ok()
}

/// Whether an answer, or a part of one, did not get where stdout goes.
static UNWRITTEN: AtomicBool = AtomicBool::new(false);

/// The status to end with: an answer that was not written is no success, whatever was done.
pub(crate) fn once_written(code: ExitCode) -> ExitCode {
    match UNWRITTEN.load(Ordering::Relaxed) && code == ExitCode::SUCCESS {
        true => ExitCode::from(FAILED),
        false => code,
    }
}
