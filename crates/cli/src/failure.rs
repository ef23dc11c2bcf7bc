//! Errors of commands: the form `blockyard: WHAT failed: NAME: why (what to do)`, and exit statuses.

use clap::builder::StyledStr;
use clap::error::ErrorKind;
use std::fmt::Display;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit status of a command that failed.
pub(crate) const FAILED: u8 = 1;
/// Exit status of a command with invalid arguments.
pub(crate) const USAGE: u8 = 2;

/// The errors of a failed command, and its exit status.
#[derive(Debug)]
pub(crate) struct Failure {
    status: u8,
    lines: Vec<String>,
}

impl Failure {
    /// Describes a failure of the command `what` on the object `name`, which is empty if no object is concerned.
    /// `why` includes what to do about it; each of its lines becomes a separate error.
    pub(crate) fn new(what: &str, name: impl Display, why: impl Display) -> Failure {
        let name = name.to_string();
        let name = if name.is_empty() { name } else { format!("{name}: ") };
        let why = why.to_string();
        let lines = why.lines().map(|why| format!("blockyard: {what} failed: {name}{why}")).collect();
        Failure { status: FAILED, lines }
    }

    /// Describes invalid arguments: like [`Failure::new`], with the status [`USAGE`].
    pub(crate) fn usage(what: &str, name: impl Display, why: impl Display) -> Failure {
        Failure { status: USAGE, ..Failure::new(what, name, why) }
    }

    /// Appends another failure of this command; the higher status wins.
    pub(crate) fn and(mut self, other: Failure) -> Failure {
        self.lines.extend(other.lines);
        self.status = self.status.max(other.status);
        self
    }

    /// Returns the reasons without the command and the object that failed.
    pub(crate) fn reason(&self) -> String {
        let whys = self.lines.iter().map(|line| line.splitn(4, ": ").last().unwrap_or_default());
        whys.collect::<Vec<_>>().join("; ")
    }

    /// Prints the errors on stderr and returns the exit status.
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

/// Prints the parser's output, and returns the exit status: help and version are answers, the rest are errors.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        print_styled(&error.render());
        return once_written(ExitCode::SUCCESS);
    }
    if error.kind() == ErrorKind::InvalidUtf8 {
        return not_utf8();
    }
    let text = error.render().to_string();
    match text.strip_prefix("error: ") {
        Some(text) => eprint!("blockyard: {text}"),
        None => eprint!("{text}"),
    }
    ExitCode::from(USAGE)
}

/// Reports an argument that is not UTF-8: paths are stored in records, JSON and tables, which hold UTF-8 only.
fn not_utf8() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let command = arguments.next().unwrap_or_default();
    let bad = arguments.find(|argument| argument.to_str().is_none()).unwrap_or_else(|| command.clone());
    let why = format!("{}: it is not UTF-8 (give the file another name, or a link to it)", bad.display());
    if command == "losetup" {
        eprintln!("losetup: {why}");
        return ExitCode::from(FAILED);
    }
    Failure::usage(&command.to_string_lossy(), "", why).report()
}

/// Writes an answer to stdout; returns whether it was written. A closed pipe does not count as a failure.
pub(crate) fn print(text: &str) -> bool {
    print_bytes(text.as_bytes())
}

/// Returns whether stdout shows colours.
pub(crate) fn coloured() -> bool {
    anstream::AutoStream::choice(&std::io::stdout()) != anstream::ColorChoice::Never
}

/// Writes an answer with headings to stdout, in colours if stdout is a terminal that has them and `NO_COLOR` is unset.
pub(crate) fn print_styled(text: &StyledStr) -> bool {
    if coloured() { print(&text.ansi().to_string()) } else { print(&text.to_string()) }
}

/// Writes an answer whose names may contain any bytes to stdout, like [`print()`].
pub(crate) fn print_bytes(text: &[u8]) -> bool {
    use std::io::Write;
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text).and_then(|()| stdout.flush());
    if let Err(why) = &written
        && why.kind() != std::io::ErrorKind::BrokenPipe
        && !UNWRITTEN.swap(true, Ordering::Relaxed)
    {
        eprintln!("blockyard: writing the answer failed: {why} (check where stdout is redirected)");
    }
    written.is_ok()
}

/// Set when writing an answer, or a part of one, to stdout has failed.
static UNWRITTEN: AtomicBool = AtomicBool::new(false);

/// Turns success into failure if an answer could not be written.
pub(crate) fn once_written(code: ExitCode) -> ExitCode {
    match UNWRITTEN.load(Ordering::Relaxed) && code == ExitCode::SUCCESS {
        true => ExitCode::from(FAILED),
        false => code,
    }
}
