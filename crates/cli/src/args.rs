//! The table of commands and options, from which the parser, help, the man page, completions and the reference are
//! generated.

// Doc comments are help texts here, in which brackets are defaults and options.
#![allow(rustdoc::broken_intra_doc_links)]

use crate::complete;
use crate::crash::CrashArgs;
use crate::export_args::ExportArgs;
use crate::log::LogSpec;
use crate::page::WebArgs;
use clap::builder::Styles;
use clap::builder::styling::{AnsiColor, Effects};
use clap::{ArgAction, Args, Parser, Subcommand};
use clap_complete::{ArgValueCompleter, Shell};
use std::path::PathBuf;

/// Serve virtual block devices from user space.
///
/// A device is a stack: a backend that holds blocks (a file, memory, nothing at all) with layers above it
/// that change I/O on its way. It is reached through exports, such as an NBD server. Every command takes
/// --help.
#[derive(Parser, Debug)]
#[command(name = "blockyard", version, max_term_width = 100, styles = STYLES)]
#[command(disable_help_subcommand = true, disable_help_flag = true)]
pub(crate) struct Cli {
    /// Print help
    #[arg(short, long, global = true, action = ArgAction::HelpShort)]
    help: Option<bool>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Serve a device in the foreground, until SIGINT or SIGTERM
    Serve(ServeArgs),
    /// Serve a device in the background, and return when it is ready
    Add(ServeArgs),
    /// Serve all devices of a topology file in the foreground
    Up(UpArgs),
    /// Apply a topology file to the process that serves it
    Apply(ApplyArgs),
    /// Write the served devices as a topology file
    Save(SaveArgs),
    /// Check a topology file without starting anything
    Check(CheckArgs),
    /// Check a driver for exec: against the protocol
    ExecTest(ExecTestArgs),
    /// List the devices of all processes
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show everything about one device
    Show(ShowArgs),
    /// Drain, flush and remove devices
    #[command(visible_alias = "rm")]
    Del(DelArgs),
    /// Take over a ublk device whose server died
    Recover(RecoverArgs),
    /// Replace the program that serves a ublk device by this one
    Upgrade(UpgradeArgs),
    /// Change the size of a device while it is served
    Resize(ResizeArgs),
    /// Change an option of a device while it is served
    Set(SetArgs),
    /// Show the requests of a device that are in flight
    Inflight(InflightArgs),
    /// Show or change the queue limits of a device
    Limits(LimitsArgs),
    /// Merge an overlay into the device below it
    Commit(CommitArgs),
    /// Hold back the requests of a device until it is resumed
    Suspend(SuspendArgs),
    /// Resume a suspended device
    Resume(ResumeArgs),
    /// Show or load the table of a device (dmsetup table, load)
    Table(TableArgs),
    /// Show target status (dmsetup status)
    Status(StatusArgs),
    /// Send a message to a target (dmsetup message)
    Message(MessageArgs),
    /// Report I/O statistics, in iostat's columns
    Stat(StatArgs),
    /// Watch all devices, live in the terminal
    Top(TopArgs),
    /// Trace the requests of a device, as blktrace does
    Trace(TraceArgs),
    /// Replay a log of writes onto a device or a file
    ReplayLog(ReplayLogArgs),
    /// Check which states a power cut could have left
    Crash(Box<CrashArgs>),
    /// Copy the contents of one stack to another
    Copy(CopyArgs),
    /// Move the contents of a device to another stack, while it is served
    Move(MoveArgs),
    /// Set up loop devices with losetup's options and output
    #[command(disable_help_flag = true)]
    Losetup(LosetupArgs),
    /// Create devices from tables with dmsetup's commands and output
    #[command(disable_help_flag = true)]
    Dmsetup(DmsetupArgs),
    /// Configure targets with targetcli's commands and LIO's saveconfig.json
    #[command(disable_help_flag = true)]
    Targetcli(TargetcliArgs),
    #[command(hide = true, name = "targetcli-host")]
    TargetcliHost(TargetcliHostArgs),
    /// Write docs/reference
    #[command(hide = true)]
    Reference(ReferenceArgs),
    #[command(hide = true, name = "loop-device")]
    LoopDevice { arguments: Vec<String> },
    /// Print the completion script of a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page
    Man(ManArgs),
    /// Print the help of a command or a topic
    Help {
        /// The command or topic
        #[arg(value_name = "COMMAND|TOPIC", add = ArgValueCompleter::new(complete::help))]
        arguments: Vec<String>,
    },
}

/// The styles of help on a terminal, as cargo and rustup have them.
pub(crate) const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().effects(Effects::BOLD))
    .usage(AnsiColor::Green.on_default().effects(Effects::BOLD))
    .literal(AnsiColor::Cyan.on_default().effects(Effects::BOLD))
    .placeholder(AnsiColor::Cyan.on_default());

/// A value that is `yes` or `no`.
fn yes_or_no(text: &str) -> Result<bool, &'static str> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("write yes or no"),
    }
}

impl Cli {
    /// The command table for generated pages.
    pub(crate) fn command_for_pages() -> clap::Command {
        <Cli as clap::CommandFactory>::command().version(env!("CARGO_PKG_VERSION"))
    }
}

#[derive(Args, Debug)]
#[command(after_help = "STACK, layers, exports and tables: blockyard help stacks, layers, exports, tables.")]
pub(crate) struct ServeArgs {
    /// The backend: kind:what[,key=value...]
    #[arg(add = ArgValueCompleter::new(complete::stack))]
    pub(crate) stack: Option<String>,
    /// A device-mapper table in place of a stack; -: stdin
    #[arg(long, value_name = "FILE", conflicts_with = "stack")]
    pub(crate) table: Option<PathBuf>,
    /// Passed on by `dmsetup create --uuid`, `--readonly` and `--notable`
    #[arg(long, hide = true, default_value = "")]
    pub(crate) table_uuid: String,
    #[arg(long, hide = true)]
    pub(crate) table_read_only: bool,
    #[arg(long, hide = true, conflicts_with_all = ["stack", "table"])]
    pub(crate) no_table: bool,
    /// How multipath paths are tested (help tables)
    #[arg(long, value_name = "OPTIONS", conflicts_with = "stack")]
    pub(crate) multipath: Option<String>,
    /// The text of such a file, passed on by `add`
    #[arg(long, hide = true, conflicts_with_all = ["stack", "table"])]
    pub(crate) table_text: Option<String>,
    /// The folder of relative paths in that text, if it is not the current directory
    #[arg(long, hide = true, requires = "table_text", value_name = "FOLDER")]
    pub(crate) table_base: Option<PathBuf>,
    /// The device's name [default: derived from the stack]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// A layer, delay,read=5ms; several stack upwards
    #[arg(long = "layer", value_name = "LAYER", add = ArgValueCompleter::new(complete::layer))]
    pub(crate) layers: Vec<String>,
    /// Queue limits, max_sectors=255,... (help limits)
    #[arg(long, value_name = "LIMITS", add = ArgValueCompleter::new(complete::limits))]
    pub(crate) limits: Option<String>,
    /// The I/O scheduler: none, mq-deadline or kyber
    #[arg(long, value_name = "NAME", add = ArgValueCompleter::new(complete::scheduler))]
    pub(crate) scheduler: Option<String>,
    /// Requests in flight on each hardware queue [128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) depth: Option<u16>,
    /// Log requests that take longer, and where
    #[arg(long, value_name = "TIME")]
    pub(crate) slow: Option<String>,
    /// Cancel requests that take longer
    #[arg(long, value_name = "TIME")]
    pub(crate) io_timeout: Option<String>,
    /// I/O threads, each with a hardware queue [up to 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) queues: Option<u16>,
    /// Poll up to 100 us before sleeping
    #[arg(long)]
    pub(crate) poll: bool,
    /// The I/O interface: auto, io_uring or epoll
    #[arg(long, value_name = "RING", default_value = "auto", add = ArgValueCompleter::new(complete::ring))]
    pub(crate) ring: String,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    #[command(flatten)]
    pub(crate) exports: ExportArgs,
    /// Restart the server of a ublk device if it dies
    #[arg(long, help_heading = "Exports")]
    pub(crate) supervise: bool,
    /// The NBD export name [the device's]
    #[arg(long, value_name = "NAME", help_heading = "Exports")]
    pub(crate) nbd_name: Option<String>,
    /// TLS for NBD: off, on or require
    #[arg(long, value_name = "MODE", help_heading = "Exports", add = ArgValueCompleter::new(complete::tls))]
    pub(crate) tls: Option<String>,
    /// server-cert.pem, server-key.pem, ca-cert.pem
    #[arg(long, value_name = "DIR", help_heading = "Exports")]
    pub(crate) tls_certificates: Option<PathBuf>,
    /// Accept only clients that ca-cert.pem signed
    #[arg(long, help_heading = "Exports")]
    pub(crate) tls_verify_peer: bool,
    /// Limits of NBD clients (help exports)
    #[arg(long, value_name = "LIMITS", help_heading = "Exports")]
    #[arg(add = ArgValueCompleter::new(complete::nbd_limits))]
    pub(crate) nbd_limits: Option<String>,
    #[command(flatten)]
    pub(crate) page: WebArgs,
}

/// The behaviour of a process that serves.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct RunArgs {
    /// Print the ready lines as JSON, an object a line
    #[arg(long)]
    pub(crate) json: bool,
    /// Print the choices that were made, and why
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// text, kv or json[,level=LEVEL][,to=stderr|journal]
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub(crate) log: LogSpec,
    /// Leave the terminal once ready; `add` starts the serving process with it
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
    /// A supervisor process restarts this one
    #[arg(long, hide = true)]
    pub(crate) watched: bool,
}

#[derive(Args, Debug)]
pub(crate) struct UpArgs {
    /// The topology file (TOML)
    #[arg(value_hint = clap::ValueHint::FilePath, value_name = "TOPOLOGY.toml")]
    pub(crate) file: PathBuf,
    /// Apply the file to the process that serves it, as `apply` does
    #[arg(long, conflicts_with_all = ["web", "web_token", "web_allow"])]
    pub(crate) reload: bool,
    /// With --reload: print the actions and change nothing
    #[arg(long, requires = "reload")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    #[command(flatten)]
    pub(crate) page: WebArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Devices and exports are added, removed and changed in the order of their dependencies; options that can change
while a device is served are changed without interruption. If an action is impossible, such as the removal of a
device in use, nothing is changed. The first action that fails ends the run.")]
pub(crate) struct ApplyArgs {
    /// The topology file (TOML) that `up` was started with
    #[arg(value_hint = clap::ValueHint::FilePath, value_name = "TOPOLOGY.toml")]
    pub(crate) file: PathBuf,
    /// Print the actions and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Settings that a topology cannot express are listed in comments and on stderr. Paths are absolute. A file with the paths of
private keys has mode 0600.")]
pub(crate) struct SaveArgs {
    /// The devices [all of all processes]
    #[arg(value_name = "NAME", add = ArgValueCompleter::new(complete::device))]
    pub(crate) names: Vec<String>,
    /// The file, replaced in one step [stdout]
    #[arg(short, long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Write a page for each command and topic into this folder instead
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
    pub(crate) folder: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// The topology file (TOML)
    #[arg(value_hint = clap::ValueHint::FilePath, value_name = "TOPOLOGY.toml")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct ExecTestArgs {
    /// The driver and its options, as after exec:
    #[arg(value_name = "COMMAND")]
    pub(crate) command: String,
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
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct DelArgs {
    /// The devices
    #[arg(value_name = "NAME", required_unless_present = "all", add = ArgValueCompleter::new(complete::device))]
    pub(crate) names: Vec<String>,
    /// Remove all devices of all processes
    #[arg(long, conflicts_with = "names")]
    pub(crate) all: bool,
    /// Also while in use: users get errors, and unwritten data is lost
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
The device is served again with the arguments that created it, from the same folder; waiting requests continue.
Devices with recovery=none, and memory, whose contents died with the server, cannot be recovered.")]
pub(crate) struct RecoverArgs {
    /// The device
    #[arg(required_unless_present = "list", default_value = "", hide_default_value = true)]
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    /// Print the names of the devices that wait for a server
    #[arg(long, conflicts_with_all = ["name", "foreground", "supervise"])]
    pub(crate) list: bool,
    /// Serve it in the foreground, until SIGINT or SIGTERM
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Restart its server when it dies again
    #[arg(long)]
    pub(crate) supervise: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "\
The server of the device ends when no request is in flight, and this program takes over; file systems on the
device stay mounted. The kernel must be able to quiesce it (Linux 6.16), or its recovery must be reissue.")]
pub(crate) struct UpgradeArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
}

#[derive(Args, Debug)]
#[command(after_help = "\
The overlay is empty afterwards and can still be used. Other overlays over the same origin must not be used any more.
A commit may be interrupted at any moment: the overlay then still holds all data, and is committed again.")]
pub(crate) struct CommitArgs {
    /// The device; or, for an overlay that is not served, the stack below it
    #[arg(value_name = "NAME|STACK")]
    pub(crate) what: String,
    /// The layers of that stack; the uppermost overlay is committed
    #[arg(long = "layer", value_name = "LAYER", add = ArgValueCompleter::new(complete::layer))]
    pub(crate) layers: Vec<String>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Clients of kernel devices see the new size at once, NBD clients when they connect again.")]
pub(crate) struct ResizeArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    /// Its new size; its file is resized, too [default: the file's size]
    pub(crate) size: Option<String>,
    /// Allow a smaller size: data beyond the new end is lost
    #[arg(long)]
    pub(crate) shrink: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
A serving process that receives SIGUSR1 writes the same list for all its devices to its log.")]
pub(crate) struct InflightArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Names are those of the kernel's struct queue_limits (max_sectors=255) or of /sys/block/NAME/queue, in the units of
either (max_sectors_kb=127). No limit can exceed that of the device below; max_sectors is max_hw_sectors at most, and 0
resets it. Requests in flight complete first; requests that arrive meanwhile wait. A kernel block device gets the
limits that its sysfs files can set; requests that are too large for the others are split here.")]
pub(crate) struct LimitsArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    /// Limits to set
    #[arg(value_name = "LIMIT=VALUE", add = ArgValueCompleter::new(complete::limit))]
    pub(crate) set: Vec<String>,
    /// Remove the limits that were set before
    #[arg(long)]
    pub(crate) reset: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
#[command(after_help = "Keys:
  direct=on|off|auto               bypass the page cache, or use it
  file=PATH                        another file of the same size; with ro only
  badblocks=+FIRST-LAST            mark sectors of null: as bad
  badblocks=-FIRST-LAST            mark sectors of null: as good
  scheduler=NAME[,PARAMETER=VALUE] none, mq-deadline or kyber
  PARAMETER=VALUE                  of the scheduler in use: read_expire=100
  LAYER.OPTION=VALUE               of a layer: delay.read=5ms
  slow=TIME, slow=off              log requests that take longer
  io_timeout=TIME, io_timeout=off  cancel requests that take longer; they fail

Requests in flight complete first; requests that arrive meanwhile wait.")]
pub(crate) struct SetArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    /// The option to change
    #[arg(value_name = "KEY=VALUE", add = ArgValueCompleter::new(complete::set_key))]
    pub(crate) change: String,
}

#[derive(Args, Debug)]
#[command(after_help = "\
The log is one of the target log-writes or of --layer log, written by blockyard or the kernel. Without --replay the
entries are only listed. Replay ends before a mark, but after a flush or a FUA write.")]
pub(crate) struct ReplayLogArgs {
    /// The log: a device or a file
    #[arg(long, value_name = "FILE")]
    pub(crate) log: PathBuf,
    /// The target: a device or an existing file
    #[arg(long, value_name = "FILE")]
    pub(crate) replay: Option<PathBuf>,
    /// The first entry, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) start_entry: u64,
    /// Start after this mark
    #[arg(long, value_name = "MARK")]
    pub(crate) start_mark: Option<String>,
    /// At most N entries
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<u64>,
    /// End at this mark
    #[arg(long, value_name = "MARK")]
    pub(crate) end_mark: Option<String>,
    /// End with the next flush
    #[arg(long)]
    pub(crate) next_flush: bool,
    /// End with the next FUA write
    #[arg(long)]
    pub(crate) next_fua: bool,
    /// Skip discards
    #[arg(long)]
    pub(crate) no_discard: bool,
    /// Print only the number of entries
    #[arg(long)]
    pub(crate) num_entries: bool,
    /// List what is replayed
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Holes of the source are not read, and are zeroed in the target. Neither stack may be written by another process: to
copy a device that is served, copy nbd:URI of its export.")]
pub(crate) struct CopyArgs {
    /// The stack to read
    #[arg(add = ArgValueCompleter::new(complete::stack))]
    pub(crate) source: String,
    /// The stack to write, at least as large
    #[arg(add = ArgValueCompleter::new(complete::stack))]
    pub(crate) target: String,
    /// Compare both afterwards
    #[arg(long)]
    pub(crate) verify: bool,
    /// Record what is on stable storage in FILE, or continue there
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// Copy at most SIZE of data per second
    #[arg(long, value_name = "SIZE")]
    pub(crate) rate: Option<String>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
The device is served throughout. Its source keeps every write until the end: if the move fails, is cancelled, or the
server is killed, the device has its previous contents, and the destination is incomplete. A move continues if this
command is interrupted; --cancel ends it, and show reports its progress.")]
pub(crate) struct MoveArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    /// The stack to move to, of the device's size
    #[arg(value_name = "STACK", add = ArgValueCompleter::new(complete::stack))]
    pub(crate) target: Option<String>,
    /// Copy at most SIZE per second
    #[arg(long, value_name = "SIZE")]
    pub(crate) rate: Option<String>,
    /// Cancel the move: the device keeps its previous contents
    #[arg(long, conflicts_with_all = ["target", "rate"])]
    pub(crate) cancel: bool,
}

#[derive(Args, Debug)]
pub(crate) struct SuspendArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    /// Neither wait for requests in flight nor flush
    #[arg(long)]
    pub(crate) noflush: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
A loaded table takes effect when the device is resumed: requests in flight complete first, and later requests
go to the new table. Lines and answers are device-mapper's.")]
pub(crate) struct TableArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    /// Load the table in this file; - is stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) load: Option<PathBuf>,
    /// Show the loaded (inactive) table
    #[arg(long, conflicts_with = "load")]
    pub(crate) inactive: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct MessageArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    /// A sector of the target
    pub(crate) sector: u64,
    /// The message
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct ResumeArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
}

#[derive(Args, Debug)]
#[command(
    override_usage = "blockyard losetup [options] [DEVICE]\n       blockyard losetup [options] -f | DEVICE FILE"
)]
#[command(after_help = format!("Options of losetup:\n{}", crate::losetup::OPTIONS))]
pub(crate) struct LosetupArgs {
    /// losetup's options and arguments: blockyard losetup --help lists them
    #[arg(value_name = "ARGUMENTS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<String>,
}

#[derive(Args, Debug)]
#[command(override_usage = "blockyard dmsetup COMMAND [options] [NAME] ...")]
#[command(after_help = crate::dmsetup::USAGE.replacen("Usage: blockyard dmsetup\n", "Commands:\n", 1))]
pub(crate) struct DmsetupArgs {
    /// dmsetup's command, options and arguments: blockyard dmsetup help lists them
    #[arg(value_name = "ARGUMENTS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<String>,
}

#[derive(Args, Debug)]
#[command(override_usage = "blockyard targetcli [[PATH] COMMAND [VALUE | KEY=VALUE]...]")]
#[command(after_help = "\
Without arguments, a shell with completion and history reads commands; commands can come from a pipe, too.
The first command that changes something starts a process in the background, which serves all storage objects
and targets until the configuration is cleared. saveconfig and restoreconfig take LIO's files.")]
pub(crate) struct TargetcliArgs {
    /// A command of targetcli: blockyard targetcli help lists them
    #[arg(value_name = "ARGUMENTS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct TargetcliHostArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Args, Debug)]
#[command(override_usage = "blockyard stat [-xmtzy] [-q] [-l|-p] [--json] [NAME] [INTERVAL [COUNT]]")]
#[command(after_help = "\
The first report covers the time since a device was added, each later one the interval before it.
INTERVAL is in seconds, at least 0.1.
With --json, each report is one line; with -o JSON, all reports form one document, as iostat's do.
With S_TIME_FORMAT=ISO in the environment, dates and times have the format of ISO 8601.

A layer's await is the time that a request spent in it and below; the difference to the next layer's await
is the time that the layer adds. The clock is read once in each turn of a queue's thread, so the figures
include the time that a layer waits, but not the time that it computes.")]
pub(crate) struct StatArgs {
    /// Extended statistics
    #[arg(short = 'x')]
    pub(crate) extended: bool,
    /// Megabytes instead of kilobytes
    #[arg(short = 'm')]
    pub(crate) megabytes: bool,
    /// Print the time with each report
    #[arg(short = 't')]
    pub(crate) timestamps: bool,
    /// Leave out devices that were idle in the interval
    #[arg(short = 'z')]
    pub(crate) active: bool,
    /// Skip the first report, since the device was added
    #[arg(short = 'y')]
    pub(crate) omit_first: bool,
    /// Report each hardware queue, too: NAME.0, NAME.1, ...
    #[arg(short = 'q', long)]
    pub(crate) queues: bool,
    /// Report each layer of the stack
    #[arg(short = 'l', long)]
    pub(crate) layers: bool,
    /// Report each path: the backends at the bottom
    #[arg(short = 'p', long, conflicts_with = "layers")]
    pub(crate) paths: bool,
    /// Print iostat's JSON document
    #[arg(short = 'o', value_name = "JSON", value_parser = ["JSON"], conflicts_with = "json")]
    #[arg(hide_possible_values = true)]
    pub(crate) format: Option<String>,
    /// One device [all], seconds between reports [one report], number of reports
    #[arg(value_names = ["NAME", "INTERVAL", "COUNT"], num_args = 0..=3)]
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) arguments: Vec<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Key h lists the keys. Enter shows a device: its operations, paths, layers with their part of the time, queues, exports
and limits; there f fails a path and r reinstates it, after asking. NO_COLOR in the environment turns colours off.

With -b, a page of text for each interval is printed instead.")]
pub(crate) struct TopArgs {
    /// Batch mode: print a page of text each interval
    #[arg(short = 'b', long)]
    pub(crate) batch: bool,
    /// With -b: end after N pages
    #[arg(short = 'n', long, value_name = "N", requires = "batch")]
    pub(crate) count: Option<u64>,
    /// Seconds between updates
    #[arg(short = 'd', long, value_name = "SECONDS", default_value_t = 1.0)]
    pub(crate) delay: f64,
    /// Only these devices
    #[arg(value_name = "NAME", add = ArgValueCompleter::new(complete::device))]
    pub(crate) names: Vec<String>,
}

#[derive(Args, Debug)]
#[command(override_usage = "blockyard trace NAME [-o PREFIX] [-w SECONDS] [OPTIONS]\n       \
                            blockyard trace NAME start|stop|end|filter [OPTIONS]")]
#[command(after_help = "\
With -o, one file for each hardware queue: PREFIX.blktrace.0, .1, ... for blkparse -i PREFIX, btt, iowatcher -t
PREFIX and fio --read_iolog. Without it, blkparse's lines as events happen. --format perfetto writes a Chrome trace
(JSON), PREFIX.json. The trace runs until it is interrupted, or for -w SECONDS.

While a trace runs, stop pauses it until start, filter changes its filter, and end ends it.

Actions: Q queued, X split, A remapped, G got, M and F merged behind and before another, P plugged, U unplugged, I
inserted, D issued, C completed, R requeued, m SCSI commands, or the names queue, split, remap, get, merge,
front-merge, plug, unplug, insert, issue, complete, requeue, notify. Operations: read, write, flush, discard,
write-zeroes, prefetch, zone-append.
Sectors have 512 bytes. --queue-children traces a Q event for each child of a split, which btt needs; it is the
default for blktrace files.

blkparse shows a queue as a CPU, its thread as the process.
Events that arrive faster than they are read are dropped and counted; I/O never waits for a trace.")]
pub(crate) struct TraceArgs {
    /// The device
    #[arg(add = ArgValueCompleter::new(complete::device))]
    pub(crate) name: String,
    /// For a running trace: start, stop, end or filter
    #[arg(value_name = "ACTION")]
    pub(crate) action: Option<String>,
    /// Prefix of the output files; - is stdout
    #[arg(short = 'o', long, value_name = "PREFIX")]
    pub(crate) output: Option<String>,
    /// End after this many seconds
    #[arg(short = 'w', long = "stopwatch", value_name = "SECONDS")]
    pub(crate) seconds: Option<f64>,
    /// Only these actions: Q,D,C
    #[arg(short = 'a', long, value_name = "ACTIONS")]
    pub(crate) actions: Option<String>,
    /// Only these operations: read,write,...
    #[arg(long, value_name = "OPERATIONS")]
    pub(crate) ops: Option<String>,
    /// Only sectors START-END, START- or -END
    #[arg(long, value_name = "RANGE")]
    pub(crate) sectors: Option<String>,
    /// Trace the children of splits, too
    #[arg(long, value_name = "YES|NO", num_args = 0..=1, require_equals = true, default_missing_value = "yes")]
    #[arg(value_parser = yes_or_no)]
    pub(crate) queue_children: Option<bool>,
    /// One timestamp for each turn of a thread
    #[arg(long)]
    pub(crate) coarse: bool,
    /// Buffer of each queue [default: 1M]
    #[arg(short = 'b', long, value_name = "SIZE")]
    pub(crate) buffer: Option<String>,
    /// text, blktrace [with -o] or perfetto
    #[arg(long, value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) format: Option<TraceFormat>,
}

/// The output format of a trace.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TraceFormat {
    /// blktrace's files, version 7
    Blktrace,
    /// blkparse's lines
    Text,
    /// A Chrome trace (JSON) for Perfetto, PREFIX.json
    Perfetto,
}

#[derive(Args, Debug)]
pub(crate) struct ReferenceArgs {
    /// The folder to write the pages to
    pub(crate) folder: PathBuf,
}

/// The output format of answers.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Answer in JSON
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) json: bool,
}
