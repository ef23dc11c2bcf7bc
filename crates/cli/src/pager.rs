//! Shows long texts in a pager, as git does: `$PAGER`, else less if it is installed.
//!
//! The pager replaces this process: it gets the text as its standard input, and the terminal's signals are its own.

use crate::failure::{coloured, print_styled};
use clap::builder::StyledStr;
use std::io::{IsTerminal, Seek, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Shell script that runs the pager, or prints the text if the pager cannot be executed.
const SCRIPT: &str = "eval \"$1\"; code=$?; case $code in 126 | 127) exec cat ;; esac; exit $code";
/// Default options of less, those of git: quit if one screen is enough, colours, no clearing.
const LESS: &str = "FRX";

/// Prints a text; in a pager if stdout is a terminal with fewer lines than the text has.
pub(crate) fn print_paged(text: &StyledStr) {
    let rows = rustix::termios::tcgetwinsize(std::io::stdout()).map_or(0, |size| usize::from(size.ws_row));
    let plain = text.to_string();
    let get = |name| std::env::var(name).ok();
    let is_long = std::io::stdout().is_terminal() && is_longer(&plain, rows);
    if let Some(pager) = pager(get("PAGER"), get("TERM"), is_installed).filter(|_| is_long) {
        let shown = if coloured() { text.ansi().to_string() } else { plain };
        // This returns only on failure; then the text is printed below.
        let _ = replace_by(&pager, &shown);
    }
    print_styled(text);
}

/// Returns whether a text has more lines than a terminal of `rows` rows shows above its prompt.
fn is_longer(text: &str, rows: usize) -> bool {
    rows > 0 && text.lines().count() >= rows
}

/// Returns the command of the pager; `None`: no pager is installed, or the user disabled it.
fn pager(
    chosen: Option<String>,
    terminal: Option<String>,
    is_installed: impl Fn(&str) -> bool,
) -> Option<String> {
    if terminal.is_none_or(|name| name == "dumb") {
        return None;
    }
    match chosen {
        Some(chosen) => Some(chosen).filter(|chosen| !matches!(chosen.trim(), "" | "cat")),
        None => is_installed("less").then(|| "less".to_owned()),
    }
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

fn replace_by(pager: &str, text: &str) -> std::io::Result<()> {
    let memory = rustix::fs::memfd_create("help", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(memory);
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    let mut command = Command::new("sh");
    command.args(["-c", SCRIPT, "sh", pager]).stdin(file);
    if std::env::var_os("LESS").is_none() {
        command.env("LESS", LESS);
    }
    Err(command.exec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_pager_is_used_else_less_if_it_is_installed() {
        let chosen = |pager: Option<&str>, terminal: Option<&str>, has_less| {
            super::pager(pager.map(str::to_owned), terminal.map(str::to_owned), |_| has_less)
        };
        assert_eq!(chosen(Some("more -d"), Some("xterm"), true).as_deref(), Some("more -d"));
        assert_eq!(chosen(None, Some("xterm"), true).as_deref(), Some("less"));
        for none in [
            chosen(None, Some("xterm"), false),
            chosen(Some(""), Some("xterm"), true),
            chosen(Some("cat"), Some("xterm"), true),
            chosen(Some("less"), Some("dumb"), true),
            chosen(Some("less"), None, true),
        ] {
            assert_eq!(none, None);
        }
    }

    #[test]
    fn only_texts_longer_than_the_terminal_are_paged() {
        assert!(!is_longer("a\nb\n", 3) && is_longer("a\nb\nc\n", 3));
        assert!(!is_longer("a\nb\n", 0), "its size is not known");
    }
}
