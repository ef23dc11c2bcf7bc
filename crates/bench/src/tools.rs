//! Programs that a measurement calls and waits for.

use std::process::{Command, Stdio};

use crate::error::{Error, Result};

/// Runs a tool; fails if it does, with what it said.
pub(crate) fn run(words: &[&str]) -> Result<()> {
    output(words).map(drop)
}

/// Runs a tool and returns what it printed.
pub(crate) fn output(words: &[&str]) -> Result<String> {
    let output = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| Error(format!("{}: {error}", words[0])))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Error(format!("{}: {}: {}", words.join(" "), output.status, said.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
