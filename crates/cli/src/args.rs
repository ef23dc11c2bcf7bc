//! The one table: commands, options and what they mean. The parser, the help, the man page and the
//! completions are all made from it.

use clap::{ArgAction, Args, Parser, Subcommand};
use clap_complete::Shell;
use std::path::PathBuf;

/// Serve virtual block devices from user space.
///
/// A device is a stack: a backend that holds blocks (a file, memory, nothing at all) with layers above it
/// that change I/O on its way. It is reached through exports, such as an NBD server. Every command takes
/// --help.
#[derive(Parser, Debug)]
#[command(name = "blockyard", version, max_term_width = 100, disable_help_subcommand = true)]
#[command(after_long_help = FILES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Check a topology file without starting anything
    Check(CheckArgs),
    /// List the devices of all processes
    List(ListArgs),
    /// Show all about one device
    Show(ShowArgs),
    /// Drain, flush and remove devices
    Del(DelArgs),
    /// Report I/O statistics, in iostat's columns
    Stat(StatArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page
    Man,
}

const FILES: &str = "\
Exit status:
  0  done
  1  the request failed
  2  bad usage
  130, 143  ended at once by a second SIGINT or SIGTERM

Environment:
  BLOCKYARD_RUN  the run directory; else /run/blockyard as root, else $XDG_RUNTIME_DIR/blockyard

Files in the run directory:
  NAME.control  the control socket of the process that serves NAME: HTTP with JSON, and /metrics
                (curl --unix-socket NAME.control http://localhost/devices/NAME)
  NAME.sock     the device's NBD socket, when no export is named
  NAME.log      what the process behind `blockyard add` had to say";

#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// The topology file (TOML)
    #[arg(value_name = "TOPOLOGY.toml")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct ShowArgs {
    /// The device
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct DelArgs {
    /// The device
    #[arg(required_unless_present = "all")]
    pub(crate) name: Option<String>,
    /// Remove all devices of all processes
    #[arg(long, conflicts_with = "name")]
    pub(crate) all: bool,
}

#[derive(Args, Debug)]
#[command(override_usage = "blockyard stat [-x] [--json] [NAME] [INTERVAL [COUNT]]")]
#[command(after_help = "\
The first report covers the time since a device was added, each one after it the interval before. With
--json, each report is one line.")]
pub(crate) struct StatArgs {
    /// Extended statistics
    #[arg(short = 'x')]
    pub(crate) extended: bool,
    /// One device (else all), seconds between reports (else one report), and how many reports (else
    /// until interrupted)
    #[arg(value_names = ["NAME", "INTERVAL", "COUNT"], num_args = 0..=3)]
    pub(crate) words: Vec<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// How answers are written.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Answer in JSON
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) json: bool,
}
