//! The manual page and the completions, from the one table.

use crate::args::Cli;
use crate::failure::{Failure, print};
use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;
use std::process::ExitCode;

pub(crate) fn completions(shell: Shell) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    let mut command = visible(&Cli::command()).version(env!("CARGO_PKG_VERSION"));
    clap_complete::generate(shell, &mut command, "blockyard", &mut script);
    print(&String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}

/// The command without what its help hides: the script for bash would offer that.
fn visible(command: &clap::Command) -> clap::Command {
    clap::Command::new(command.get_name().to_owned())
        .about(command.get_about().cloned().unwrap_or_default())
        .args(command.get_arguments().filter(|arg| !arg.is_hide_set()).cloned())
        .subcommands(command.get_subcommands().map(visible))
}

pub(crate) fn man() -> Result<ExitCode, Failure> {
    let page = man_page().map_err(|why| Failure::new("man", "", why))?;
    print(&page);
    Ok(ExitCode::SUCCESS)
}

/// One page with a section for each command.
fn man_page() -> std::io::Result<String> {
    let mut command = Cli::command();
    command.build();
    let page = Man::new(command.clone())
        .manual("Blockyard")
        .source(format!("blockyard {}", env!("CARGO_PKG_VERSION")));
    let mut out = Vec::new();
    page.render_title(&mut out)?;
    page.render_name_section(&mut out)?;
    page.render_synopsis_section(&mut out)?;
    page.render_description_section(&mut out)?;
    out.extend_from_slice(b".SH COMMANDS\n");
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        out.extend_from_slice(command_section(sub)?.as_bytes());
    }
    page.render_extra_section(&mut out)?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// A command's synopsis, description, options and notes as one subsection.
fn command_section(command: &clap::Command) -> std::io::Result<String> {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").replace('-', "\\-");
    let man = Man::new(command.clone());
    let mut out = format!(".SS \"{usage}\"\n").into_bytes();
    man.render_description_section(&mut out)?;
    man.render_options_section(&mut out)?;
    man.render_extra_section(&mut out)?;
    let body = String::from_utf8_lossy(&out).into_owned();
    Ok(body.lines().filter(|line| !line.starts_with(".SH ")).map(|line| format!("{line}\n")).collect())
}
