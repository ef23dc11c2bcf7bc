//! The rows of `blockyard crash` in the table of commands.

use super::device::BlockKind;
use clap::{Args, Subcommand, ValueEnum};
use crash::Variant;
use engine::spec::Bytes;
use std::path::PathBuf;
use std::time::Duration;

/// Parses a size in bytes, or with a suffix.
fn size(text: &str) -> Result<u64, String> {
    text.parse::<Bytes>().map(|bytes| bytes.0).map_err(|why| why.to_string())
}

fn time(text: &str) -> Result<Duration, String> {
    let bare = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let text = if bare { format!("{text}s") } else { text.to_owned() };
    if let Some(minutes) = text.strip_suffix('m').and_then(|minutes| minutes.parse::<u64>().ok()) {
        return minutes.checked_mul(60).map(Duration::from_secs).ok_or_else(|| "it is too long".to_owned());
    }
    options::parse_time(&text).map_err(|why| why.to_string())
}

fn atomic(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    if bytes.is_power_of_two() && (512..=1 << 20).contains(&bytes) {
        return Ok(bytes);
    }
    Err("write a power of two from 512 to 1M".to_owned())
}

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
The workload and the check are commands of the shell with DEV, the device, and MNT, where it is mounted, in their \
environment; the check also gets CRASH_STATE, CRASH_MARKS and CRASH_MARK. A check that does not end with status 0 \
has found a bug. Exit status: 0 nothing was found, 1 something was found.")]
pub(crate) struct CrashArgs {
    #[command(subcommand)]
    pub(crate) action: Option<CrashAction>,
    /// Create this file system on an empty device, and mount it
    #[arg(long, value_name = "TYPE", conflicts_with_all = ["on", "log"])]
    pub(crate) fs: Option<String>,
    /// Record on top of this stack, which is only read
    #[arg(long, value_name = "STACK", conflicts_with = "log")]
    pub(crate) on: Option<String>,
    /// Use this log, of blockyard crash or of dm-log-writes
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    pub(crate) log: Option<PathBuf>,
    /// The device before the first entry of the log; without it zeroes
    #[arg(long, value_name = "FILE", requires = "log")]
    pub(crate) base: Option<PathBuf>,
    /// Size of an empty device, or of the device of the log
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) size: Option<u64>,
    /// Record this command
    #[arg(long, value_name = "COMMAND")]
    pub(crate) workload: Option<String>,
    /// Run this command on each state
    #[arg(long, value_name = "COMMAND")]
    pub(crate) check: Option<String>,
    /// Which device is mounted for its command [default: as the commands need]
    #[arg(long, value_name = "WHICH")]
    pub(crate) mount: Option<MountFor>,
    /// The block device, where a command needs one [default: ublk if the kernel has it, else loop]
    #[arg(long, value_name = "KIND")]
    pub(crate) device: Option<BlockKind>,
    /// Run everything on another kernel, in a guest: newest, older, or the beginning of a version, such as 6.1
    #[arg(long, value_name = "KERNEL", conflicts_with_all = ["on", "log"])]
    pub(crate) guest: Option<String>,
    /// Add this file to the guest: a program to PATH, anything else to /job (repeatable)
    #[arg(long, value_name = "FILE", requires = "guest")]
    pub(crate) with: Vec<PathBuf>,
    /// What a power cut loses: the last writes (prefix), any writes (subset), parts of writes (torn)
    #[arg(long, value_name = "MODEL", default_value = "torn", value_parser = |text: &str| text.parse::<Variant>())]
    pub(crate) model: Variant,
    /// The device's atomic write
    #[arg(long, value_name = "SIZE", default_value = "4096", value_parser = atomic)]
    pub(crate) atomic: u64,
    /// The device's volatile cache; older writes are durable [default: unbounded]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) cache: Option<u64>,
    /// Seed of the random subsets
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Longest time to explore
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub(crate) time: Duration,
    /// Most states to generate
    #[arg(long, value_name = "N")]
    pub(crate) states: Option<u64>,
    /// Checks that run at once [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) jobs: Option<u16>,
    /// Longest time of one check
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time)]
    pub(crate) deadline: Duration,
    /// End after this many findings
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) findings: usize,
    /// Directory for the logs and findings
    #[arg(long, value_name = "DIR", default_value = "crash")]
    pub(crate) save: PathBuf,
    /// Print the summary as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which commands get a mounted device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum MountFor {
    /// None.
    None,
    /// The workload.
    Workload,
    /// The check.
    Check,
    /// The workload and the check.
    Both,
}

#[derive(Subcommand, Debug)]
pub(crate) enum CrashAction {
    /// Add a mark to the log, from within a workload
    Mark {
        /// What has happened, such as "txn 17 acknowledged"
        text: String,
    },
    /// Attach the state of a finding as a device, or check it again
    Replay {
        /// The finding, such as 7f3a-12
        id: String,
        /// The directory given with --save
        #[arg(long, value_name = "DIR", default_value = "crash")]
        save: PathBuf,
        /// Run this command on the state, and end with its status
        #[arg(long, value_name = "COMMAND", conflicts_with = "again")]
        check: Option<String>,
        /// Run the check that found it
        #[arg(long)]
        again: bool,
    },
}
