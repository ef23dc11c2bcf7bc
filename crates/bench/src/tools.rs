//! Runs programs to completion for a measurement.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use crate::error::{Error, Result};

/// Runs a tool. If the tool fails, the error contains its output.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    output(arguments).map(drop)
}

/// Returns the error of a program that could not be started.
pub(crate) fn not_started(program: &str, error: &std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => Error(format!("{program} is not installed")),
        _ => Error(format!("{program}: {error}")),
    }
}

/// Runs a tool and returns its output.
pub(crate) fn output(arguments: &[&str]) -> Result<String> {
    let output = Command::new(arguments[0]).args(&arguments[1..]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| not_started(arguments[0], &error))?;
    if !output.status.success() {
        let printed = String::from_utf8_lossy(&output.stderr);
        return Err(Error(format!("{}: {}: {}", arguments.join(" "), output.status, printed.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
