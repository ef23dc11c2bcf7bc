//! Runs other programs to completion, with their output in error messages.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn finish(command: &mut Command) -> Result<Output, String> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    command.stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("starting '{line}' failed: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("'{line}' failed: {}\n{}", output.status, errors.trim_end()))
}

/// Runs a program without returning its output.
///
/// # Errors
/// The command line, its exit status and its output on stderr.
pub fn quiet(command: &mut Command) -> Result<(), String> {
    finish(command).map(drop)
}

/// Runs a program that downloads something, with retries for temporary network errors.
///
/// # Errors
/// As [`quiet`], from the last attempt.
pub fn fetch(command: &mut Command) -> Result<(), String> {
    const PAUSES: [u64; 2] = [1, 4];
    for pause in PAUSES {
        match quiet(command) {
            Ok(()) => return Ok(()),
            Err(error) => eprintln!("guest: {error}\nguest: once more in {pause} s"),
        }
        std::thread::sleep(Duration::from_secs(pause));
    }
    quiet(command)
}

/// Runs a program and returns its output.
///
/// # Errors
/// As [`quiet`].
pub fn output(command: &mut Command) -> Result<String, String> {
    finish(command).map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
}
