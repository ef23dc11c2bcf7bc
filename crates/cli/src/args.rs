//! The one table: commands, options and what they mean. The parser, the help, the man page and the
//! completions are all made from it.

use crate::log::LogSpec;
use crate::page::WebArgs;
use clap::{ArgAction, Args, Parser, Subcommand};
use clap_complete::Shell;
use std::path::PathBuf;

/// Serve virtual block devices from user space.
///
/// A device is a stack: a backend that holds blocks (a file, memory, nothing at all) with layers above it
/// that change I/O on its way. It is reached through exports, such as an NBD server. Every command takes
/// --help.
#[derive(Parser, Debug)]
#[command(name = "blockyard", version, max_term_width = 100)]
#[command(after_long_help = FILES)]
pub(crate) struct Cli {
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
    /// Check a topology file without starting anything
    Check(CheckArgs),
    /// List the devices of all processes
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show all about one device
    Show(ShowArgs),
    /// Drain, flush and remove devices
    #[command(visible_alias = "rm")]
    Del(DelArgs),
    /// Take over a ublk device whose server died
    Recover(RecoverArgs),
    /// Let this program take a ublk device over from the one that serves it, under whatever uses it
    Upgrade(UpgradeArgs),
    /// Change the size of a device while it is served
    Resize(ResizeArgs),
    /// Change how a device is served while it is
    Set(SetArgs),
    /// Show the requests of a device that are under way
    Inflight(InflightArgs),
    /// Show the queue limits of a device, or change them while it is served
    Limits(LimitsArgs),
    /// Write an overlay down into what it stands over
    Commit(CommitArgs),
    /// Hold back a device's requests until it is resumed
    Suspend(SuspendArgs),
    /// Carry out what a suspended device held back, and go on
    Resume(ResumeArgs),
    /// Show the table of a device, or load another one for the next resume
    Table(TableArgs),
    /// Show how the targets of a device's table are
    Status(StatusArgs),
    /// Tell a target of a device's table something
    Message(MessageArgs),
    /// Report I/O statistics, in iostat's columns
    Stat(StatArgs),
    /// Watch all devices, live in the terminal
    Top(TopArgs),
    /// Record what happens to a device's requests, as blktrace does
    Trace(TraceArgs),
    /// Replay a log of writes, up to a mark or a flush, onto a device or a file
    ReplayLog(ReplayLogArgs),
    /// Set up and control loop devices, with losetup's own options and output
    #[command(disable_help_flag = true)]
    Losetup(LosetupArgs),
    /// Make and control devices from tables, with dmsetup's own commands and output
    #[command(disable_help_flag = true)]
    Dmsetup(DmsetupArgs),
    #[command(hide = true, name = "loop-device")]
    LoopDevice { words: Vec<String> },
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
  BLOCKYARD_RUN   the run directory; else /run/blockyard as root, else $XDG_RUNTIME_DIR/blockyard
  BLOCKYARD_EXPORT  ublk, loop or nbd: how a device is shown when no export is named; else the best there is
  BLOCKYARD_RING  io_uring or epoll: what --ring auto means; else io_uring where it is allowed

Files in the run directory:
  NAME.control  the control socket of the process that serves NAME: HTTP with JSON, and /metrics
                (curl --unix-socket NAME.control http://localhost/devices/NAME)
  NAME.sock     the device's NBD socket, when no export is named
  NAME.fuse     the device as a file, under its loop device
  NAME.log      what the process behind `blockyard add` had to say";

/// The topics that follow the options of `serve` and `add`.
fn stacks() -> String {
    let layers: String = engine::spec::layer_rows()
        .iter()
        .map(|row| format!("  {}\n      {}; for example {}\n", row.usage, row.about, row.example))
        .collect();
    format!("{STACKS}Layers (--layer, from below upwards):\n{layers}\n{SCHEDULERS}")
}

const STACKS: &str = "\
Stacks:
  file:PATH[,direct=on|off|auto][,offset=SIZE][,sizelimit=SIZE][,block=512..65536][,ro][,share]
           [,size=SIZE,create][,format=raw|qcow2|vmdk|probe][,snapshot=ID|NAME]
           [,cluster_size=512..2M][,backing_file=NAME,backing_fmt=raw|qcow2]   (of a qcow2 image that is created)
           [,backing=allow|none|PATH[:PATH...]][,part=N|LABEL=NAME|PARTUUID=UUID][,autosize][,autoclear][,partscan]
  ram:SIZE[,hugepages][,integrity=t10|ip|nvme|BYTES]
  null:[SIZE][,irqmode=none|softirq|timer][,completion=TIME][,memory_backed[,discard][,cache_size=SIZE[,fua=off]]]
       [,blocksize=512..4096][,max_sectors=N][,virt_boundary][,rotational][,blocking][,mbps=N]
       [,hw_queue_depth=N][,shared_tags][,shared_tag_bitmap][,badblocks=FIRST-LAST[+FIRST-LAST...]]
       [,badblocks_once][,badblocks_partial_io][,timeout=FAULT][,requeue=FAULT][,init_hctx=FAULT]
       [,zoned[,zone_size=SIZE][,zone_capacity=SIZE][,zone_nr_conv=N][,zone_max_open=N][,zone_max_active=N]
        [,zone_append_max_sectors=N][,zone_full][,zone_readonly=SECTOR[+SECTOR...]][,zone_offline=...]]
  zero:[SIZE]
  error:[SIZE]
  nbd:URI[,timeout=TIME][,reconnect=TIME][,ro]

  A SIZE is in bytes or has a binary suffix K M G T: 10G, 10GB, 10Gb and 10GiB are 10 x 2^30 bytes.
  A TIME has ns, us, ms or s; a FAULT of null: is
  INTERVAL:PROBABILITY:SPACE:TIMES, as in the kernel's fault injection. A comma within a path is
  written twice. What has no SIZE has 250G.

  An nbd: URI is nbd+unix:///EXPORT?socket=PATH or nbd://HOST[:PORT]/EXPORT; nbds+unix and nbds with TLS, for
  which it has a parameter tls-certificates=DIR (ca-cert.pem; client-cert.pem and client-key.pem if the server wants
  them) and may have tls-hostname=NAME. A server that leaves requests unanswered and says nothing for the
  timeout (30s; 0: never) is given up. What was not answered on a connection that was lost is sent again on
  the next one; requests wait for that as long as reconnect says (30s; 0: they fail at once) and then fail,
  until the server is back. The first connection of a queue is waited for for 10s at least. What a server that can
  be connected to never answers fails, too, once it was tried for as long as both together.

Tables (--table FILE, or table = \"...\" in a topology):
  START LENGTH KIND ARGUMENTS...   a line for each target, in sectors, as for dmsetup; blockyard dmsetup targets
                                   lists the kinds. A device in a line is a stack as above, a device of this
                                   process by its name, MAJOR:MINOR, or a path. The same words mean the same
                                   opened device. A multipath's nbd: path may be away; what it does not answer
                                   goes to another path at once, unless it has reconnect=TIME.

";

const SCHEDULERS: &str = "\
Schedulers (--scheduler, or scheduler = \"...\" in a topology; see docs/schedulers.md):
  none                             requests go down as they come [default]
  mq-deadline[,read_expire=500][,write_expire=5000][,writes_starved=2][,fifo_batch=16][,front_merges=1]
  kyber[,read_lat_nsec=2000000][,write_lat_nsec=10000000]
                                   and for both: queue_depth=32, how many requests a queue has below at once,
                                   async_depth=N, how many writes are in hand, and nomerges=0|1|2

Exports:
  --fuse FILE                      the device as one file, by FUSE: as root, or with fusermount3 for others.
                                   What is flushed there is flushed to the backend; holes and zeroes are
                                   passed on; nothing is cached. With passthrough the kernel reads and writes
                                   the file behind the device itself, and nothing is counted. uring=auto|on|off
                                   says whether requests come through io_uring: where the kernel offers it
                                   (6.14, fuse.enable_uring=Y) and we are root, unless told otherwise.
  --nbd-device[=[N][,connections=N][,timeout=TIME][,dead_conn_timeout=TIME][,block=SIZE]]
                                   /dev/nbdN of the kernel's nbd driver, or any that is free. One that a
                                   server of a device of this name left when it died is taken over.
  --loop[=N]                       a loop device over such a file: a real block device on any kernel. Options
                                   follow behind commas: --loop=7,partscan
  --ublk[=N][,KEY=VALUE...]        a kernel block device, /dev/ublkbN:
      recovery=none|requeue|reissue|fail-io   what happens when the server dies: the device goes; it waits for
                                   blockyard recover, with requests under way failed, or issued again; or it
                                   waits and requests fail [default: reissue, for what outlives its process]
      mode=auto|copy|get-data|user-copy|zero-copy|auto-zero-copy   the way of data
      queues=N, depth=N, io=SIZE   hardware queues, tags of each, the largest request
      batch=yes|no                 one command to the driver for many requests, or for each [default: no]
      shmem=FILE                   a file in memory that clients have mapped, too: requests in it are served in place
      unprivileged, per-io-daemon, no-part-scan
  --nbd unix:PATH | tcp:HOST:PORT  may be given several times; sockets that systemd passes are served
                                   too.
  With none of them it gets the best there is: ublk where the kernel has it and you may use it, else as root
  a loop device, else an NBD socket in the run directory. -v says which and why. Exports of a topology
  without an address are on systemd's sockets, if there are any.

  When all is ready, a line `NAME EXPORT ADDRESS` for each export is printed. SIGINT, SIGTERM and SIGHUP
  drain and flush, then the status is 0; a second one ends the process at once.";

#[derive(Args, Debug)]
#[command(after_help = stacks())]
pub(crate) struct ServeArgs {
    /// What holds the device's blocks: kind:what[,key=value...]
    pub(crate) stack: Option<String>,
    /// A file of device-mapper's lines, START LENGTH KIND ARGUMENTS..., in place of a stack; - is stdin
    #[arg(long, value_name = "FILE", conflicts_with = "stack")]
    pub(crate) table: Option<PathBuf>,
    /// As `dmsetup create --uuid`, `--readonly` and `--notable` hand it on
    #[arg(long, hide = true, default_value = "")]
    pub(crate) table_uuid: String,
    #[arg(long, hide = true)]
    pub(crate) table_read_only: bool,
    #[arg(long, hide = true, conflicts_with_all = ["stack", "table"])]
    pub(crate) no_table: bool,
    /// How a multipath table's paths are looked after: checker=on|off|TIME, checker_max=TIME,
    /// failback=manual|immediate|TIME, no_path_timeout=TIME
    #[arg(long, value_name = "KEY=VALUE,...", conflicts_with = "stack")]
    pub(crate) multipath: Option<String>,
    /// The text of such a file, as `add` hands it on
    #[arg(long, hide = true, conflicts_with_all = ["stack", "table"])]
    pub(crate) table_text: Option<String>,
    /// Where the paths in that text begin, if that is not where the process does
    #[arg(long, hide = true, requires = "table_text", value_name = "FOLDER")]
    pub(crate) table_base: Option<PathBuf>,
    /// The device's name [default: derived from the stack]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// A layer above the stack, such as split,max_sectors=255; several are stacked upwards
    #[arg(long = "layer", value_name = "KIND,KEY=VALUE...")]
    pub(crate) layers: Vec<String>,
    /// Queue limits for the device, under the kernel's names: see `blockyard limits`
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) limits: Option<String>,
    /// What orders and merges its requests: none, mq-deadline or kyber, with its parameters under the kernel's names
    #[arg(long, value_name = "NAME,KEY=VALUE...")]
    pub(crate) scheduler: Option<String>,
    /// Requests in flight on each hardware queue, at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) depth: Option<u16>,
    /// Tell in the log of each request that takes so long, and where it was meanwhile
    #[arg(long, value_name = "TIME")]
    pub(crate) slow: Option<String>,
    /// Cancel requests that take longer, as the block layer does by queue/io_timeout
    #[arg(long, value_name = "TIME")]
    pub(crate) io_timeout: Option<String>,
    /// I/O threads, and so hardware queues of a device
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) queues: Option<u16>,
    /// Spin for a while before sleeping: less latency, more CPU
    #[arg(long)]
    pub(crate) poll: bool,
    /// How threads talk to the kernel: auto, io_uring or epoll
    #[arg(long, value_name = "RING", default_value = "auto")]
    pub(crate) ring: String,
    /// Export it as the kernel block device /dev/ublkbN, by ublk
    #[arg(long, value_name = "N,KEY=VALUE...", num_args = 0..=1, require_equals = true, help_heading = "Exports")]
    #[arg(default_missing_value = "")]
    pub(crate) ublk: Option<String>,
    /// Export it with NBD at unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS", help_heading = "Exports")]
    pub(crate) nbd: Vec<String>,
    /// Bring its server back when it dies: for ublk devices that wait for another
    #[arg(long, help_heading = "Exports")]
    pub(crate) supervise: bool,
    /// The name NBD clients ask for [default: the device's]
    #[arg(long, value_name = "NAME", help_heading = "Exports")]
    pub(crate) nbd_name: Option<String>,
    /// TLS for NBD: off, require, or on (clients in plaintext are served, too) [default: require with
    /// --tls-certificates, else off]
    #[arg(long, value_name = "MODE", help_heading = "Exports")]
    pub(crate) tls: Option<String>,
    /// The directory of server-cert.pem, server-key.pem and ca-cert.pem; implies --tls require. The key must be readable
    /// by its owner only (root's key by its group, too)
    #[arg(long, value_name = "DIR", help_heading = "Exports")]
    pub(crate) tls_certificates: Option<PathBuf>,
    /// What NBD clients may take: connections=1024 to an export, per-peer=512, stall=60s for half a request (0: for ever),
    /// memory=1G for payloads and data of all of them
    #[arg(long, value_name = "KEY=VALUE,...", help_heading = "Exports")]
    pub(crate) nbd_limits: Option<String>,
    /// Attach it to the kernel's nbd driver as /dev/nbdN; needs CAP_SYS_ADMIN
    #[arg(long, value_name = "N,KEY=VALUE...", help_heading = "Exports")]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub(crate) nbd_device: Vec<String>,
    /// Let in only clients whose certificate ca-cert.pem signed; implies --tls require
    #[arg(long, help_heading = "Exports")]
    pub(crate) tls_verify_peer: bool,
    /// Show it as a file: mount it on FILE, which is empty or not there yet
    #[arg(long, value_name = "FILE[,passthrough,uring=auto|on|off]", help_heading = "Exports")]
    pub(crate) fuse: Vec<String>,
    /// Show it as a loop device of the kernel, with direct I/O to it: any that is free, or /dev/loopN. As root
    #[arg(
        long = "loop",
        value_name = "N,partscan,passthrough,uring=auto|on|off",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        help_heading = "Exports"
    )]
    pub(crate) loop_device: Option<String>,
    #[command(flatten)]
    pub(crate) page: WebArgs,
    #[command(flatten)]
    pub(crate) absent: Absent,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// What the command line is to have and this build does not: recognised, so that the refusal can say
/// what there is instead.
#[derive(Args, Debug)]
pub(crate) struct Absent {
    #[arg(long, hide = true, value_name = "ADDRESS")]
    iscsi: Option<String>,
    #[arg(long, hide = true, value_name = "PATH")]
    vhost_user: Option<String>,
}

impl Absent {
    /// The first of them that was asked for.
    pub(crate) fn wanted(&self) -> Option<&'static str> {
        [(self.iscsi.is_some(), "--iscsi"), (self.vhost_user.is_some(), "--vhost-user")]
            .into_iter()
            .find_map(|(wanted, name)| wanted.then_some(name))
    }
}

/// How a process that serves behaves.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct RunArgs {
    /// Print what is ready in JSON, an object a line
    #[arg(long)]
    pub(crate) json: bool,
    /// Say on stderr what was chosen and why
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// How the log is written, and where to: text, kv or json, level=error|warn|info|debug, to=auto|stderr|journal
    #[arg(long, value_name = "FORMAT,KEY=VALUE...", default_value = "text")]
    pub(crate) log: LogSpec,
    /// Leave the terminal once ready: how `add` starts the process that serves
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
    /// Another process of ours watches over this one
    #[arg(long, hide = true)]
    pub(crate) watched: bool,
}

#[derive(Args, Debug)]
pub(crate) struct UpArgs {
    /// The topology file (TOML)
    #[arg(value_name = "TOPOLOGY.toml")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) page: WebArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

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
    /// The devices
    #[arg(value_name = "NAME", required_unless_present = "all")]
    pub(crate) names: Vec<String>,
    /// Remove all devices of all processes
    #[arg(long, conflicts_with = "names")]
    pub(crate) all: bool,
    /// Also while somebody uses them, who is left with errors: what is not written yet is lost
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
The device is served again by the words that made it, from the same folder; requests that waited go on. Not
for devices with recovery=none, and not for memory, which died with its server.")]
pub(crate) struct RecoverArgs {
    /// The device
    pub(crate) name: String,
    /// Serve it in the foreground, until SIGINT or SIGTERM
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Bring its server back when it dies again
    #[arg(long)]
    pub(crate) supervise: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "\
The server of the device ends when no request is under way, and this program takes over; file systems on the
device stay mounted. The kernel must be able to quiesce it (Linux 6.16), or its recovery must be reissue.")]
pub(crate) struct UpgradeArgs {
    /// The device
    pub(crate) name: String,
}

#[derive(Args, Debug)]
#[command(after_help = "\
The overlay is empty afterwards, and may go on to be used. Whatever else has an overlay over the same must not be used
any more. It may be cut short at any moment: the overlay then still holds all of it, and is committed again.

  blockyard commit vm7                                            while it is served
  blockyard commit file:base.img --layer cow,file=vm7.cow         while it is not")]
pub(crate) struct CommitArgs {
    /// The device; or, of an overlay that is not served, what it stands over
    #[arg(value_name = "NAME|STACK")]
    pub(crate) what: String,
    /// The layers of a stack that is not served; the uppermost overlay is committed
    #[arg(long = "layer", value_name = "KIND,KEY=VALUE...")]
    pub(crate) layers: Vec<String>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Clients of kernel devices see the new size at once, NBD clients when they connect again.")]
pub(crate) struct ResizeArgs {
    /// The device
    pub(crate) name: String,
    /// Its new size; its file is made to fit [default: what the file holds now]
    pub(crate) size: Option<String>,
    /// Let it become smaller: what lies behind the new end is lost
    #[arg(long)]
    pub(crate) shrink: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
A process that serves says the same of all its devices in its log when it gets SIGUSR1.")]
pub(crate) struct InflightArgs {
    /// The device
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Names are those of the kernel's struct queue_limits (max_sectors=255) or of /sys/block/NAME/queue, in the units of
either (max_sectors_kb=127). Nothing can be promised beyond what stands below; max_sectors comes to max_hw_sectors at
most, and 0 takes it back. Requests that are under way end first; those that come meanwhile wait. A kernel that has the
device is told what it has files for; whatever else is too large is cut here.

  blockyard limits disk
  blockyard limits disk max_sectors=255 max_segments=128
  blockyard limits disk --reset")]
pub(crate) struct LimitsArgs {
    /// The device
    pub(crate) name: String,
    /// Limits to set
    #[arg(value_name = "LIMIT=VALUE")]
    pub(crate) set: Vec<String>,
    /// Take back what was set before
    #[arg(long)]
    pub(crate) reset: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
#[command(after_help = "\
  direct=on|off|auto  read and write past the page cache, or through it
  file=PATH           another file of the same size, behind a device with ro
  badblocks=+FIRST-LAST, badblocks=-FIRST-LAST   sectors of a null: that become bad, or good
  scheduler=none|mq-deadline|kyber[,PARAMETER=VALUE...]   what orders and merges requests
  PARAMETER=VALUE     of the scheduler in use, such as read_expire=100 or write_lat_nsec=5ms; at once
  LAYER.OPTION=VALUE  of one of its layers, such as delay.read=5ms
  slow=TIME, slow=off  tell in the log of each request that takes so long
  io_timeout=TIME, io_timeout=off   cancel requests that take longer; they fail

Requests that are under way end first; those that come meanwhile wait.")]
pub(crate) struct SetArgs {
    /// The device
    pub(crate) name: String,
    /// What to change: direct, file, badblocks, slow, io_timeout, scheduler, a parameter of the scheduler, or an option of a layer
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) change: String,
}

#[derive(Args, Debug)]
#[command(after_help = "\
The log is that of the target log-writes or of --layer log, ours or the kernel's. Without --replay the entries are
only listed. An end at a mark is before it, one at a flush or a FUA write behind it.")]
pub(crate) struct ReplayLogArgs {
    /// The log: a device or a file
    #[arg(long, value_name = "FILE")]
    pub(crate) log: PathBuf,
    /// Where to: a device, or a file that is there
    #[arg(long, value_name = "FILE")]
    pub(crate) replay: Option<PathBuf>,
    /// The first entry, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) start_entry: u64,
    /// Begin behind this mark
    #[arg(long, value_name = "MARK")]
    pub(crate) start_mark: Option<String>,
    /// So many entries at most
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
    /// Leave discards out
    #[arg(long)]
    pub(crate) no_discard: bool,
    /// Print how many entries there are, and nothing else
    #[arg(long)]
    pub(crate) num_entries: bool,
    /// List what is replayed
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

#[derive(Args, Debug)]
pub(crate) struct SuspendArgs {
    /// The device
    pub(crate) name: String,
    /// Neither wait for requests that are under way nor flush
    #[arg(long)]
    pub(crate) noflush: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
A table that was loaded waits until the device is resumed: requests that are under way end first, those that
come meanwhile are carried out by the new table. Lines and answers are device-mapper's.")]
pub(crate) struct TableArgs {
    /// The device
    pub(crate) name: String,
    /// Load the table in this file; - is stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) load: Option<PathBuf>,
    /// Show the one that is loaded
    #[arg(long, conflicts_with = "load")]
    pub(crate) inactive: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    /// The device
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct MessageArgs {
    /// The device
    pub(crate) name: String,
    /// A sector of the target that is meant
    pub(crate) sector: u64,
    /// The message
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct ResumeArgs {
    /// The device
    pub(crate) name: String,
}

#[derive(Args, Debug)]
#[command(
    override_usage = "blockyard losetup [options] [DEVICE]\n       blockyard losetup [options] -f | DEVICE FILE"
)]
#[command(after_help = crate::losetup::OPTIONS)]
pub(crate) struct LosetupArgs {
    /// losetup's options and arguments: blockyard losetup --help lists them
    #[arg(value_name = "WORDS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<String>,
}

#[derive(Args, Debug)]
#[command(override_usage = "blockyard dmsetup COMMAND [options] [NAME] ...")]
#[command(after_help = crate::dmsetup::USAGE)]
pub(crate) struct DmsetupArgs {
    /// dmsetup's command, options and arguments: blockyard dmsetup help lists them
    #[arg(value_name = "WORDS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<String>,
}

#[derive(Args, Debug)]
#[command(
    override_usage = "blockyard stat [-xmtzy] [-q] [-l|-p] [--json | -o JSON] [NAME] [INTERVAL [COUNT]]"
)]
#[command(after_help = "\
The first report covers the time since a device was added, each one after it the interval before.
INTERVAL is in seconds, from 0.1 on: 0.5 is half a second.
With --json, each report is one line; with -o JSON, all of them are iostat's one document.
S_TIME_FORMAT=ISO in the environment has days and times written as ISO 8601 has them.

A layer's await is the time that a request spent in it and below, so what a layer adds is its own
less that of the next. Time is looked at once a turn of a queue's thread: what a layer waits for
shows, what it computes not.")]
pub(crate) struct StatArgs {
    /// Extended statistics
    #[arg(short = 'x')]
    pub(crate) extended: bool,
    /// Megabytes where else it is kilobytes
    #[arg(short = 'm')]
    pub(crate) megabytes: bool,
    /// When it was, with each report
    #[arg(short = 't')]
    pub(crate) timestamps: bool,
    /// Leave out what did nothing in the interval
    #[arg(short = 'z')]
    pub(crate) active: bool,
    /// Begin with the first interval, and not with what was before it
    #[arg(short = 'y')]
    pub(crate) omit_first: bool,
    /// Each hardware queue, too: NAME.0, NAME.1, ...
    #[arg(short = 'q', long)]
    pub(crate) queues: bool,
    /// What each layer of the stack did
    #[arg(short = 'l', long)]
    pub(crate) layers: bool,
    /// What each path did: the backends that stand below
    #[arg(short = 'p', long, conflicts_with = "layers")]
    pub(crate) paths: bool,
    /// Like iostat's option: JSON
    #[arg(short = 'o', value_name = "JSON", value_parser = ["JSON"], conflicts_with = "json")]
    pub(crate) format: Option<String>,
    /// One device (else all), seconds between reports (else one report), and how many reports (else
    /// until interrupted)
    #[arg(value_names = ["NAME", "INTERVAL", "COUNT"], num_args = 0..=3)]
    pub(crate) words: Vec<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Keys: h shows them all. Enter shows a device: its operations, paths, layers with their part of the time, queues, exports
and limits; there f fails a path and r reinstates it, after asking. Without colours where NO_COLOR is set.

With -b there is no screen: a page of text each interval, of what happened in it.")]
pub(crate) struct TopArgs {
    /// Print text, a page each interval, and no screen
    #[arg(short = 'b', long)]
    pub(crate) batch: bool,
    /// With -b: end after so many pages
    #[arg(short = 'n', long, value_name = "N", requires = "batch")]
    pub(crate) count: Option<u64>,
    /// Seconds between looks
    #[arg(short = 'd', long, value_name = "SECONDS", default_value_t = 1.0)]
    pub(crate) delay: f64,
    /// Only these devices
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
}

#[derive(Args, Debug)]
#[command(override_usage = "blockyard trace NAME [-o PREFIX] [-w SECONDS] [OPTIONS]\n       \
                            blockyard trace NAME start|stop|end|filter [OPTIONS]")]
#[command(after_help = "\
With -o, one file for each hardware queue: PREFIX.blktrace.0, .1, ... for blkparse -i PREFIX, btt, iowatcher -t
PREFIX and fio --read_iolog. Without it, blkparse's lines as things happen. Until interrupted, or for -w SECONDS.

While a trace runs, stop has it tell nothing until start, filter gives it another filter, and end ends it.

Actions: Q queued, X split, A remapped, G got, M and F merged behind and before another, P plugged, U unplugged, I
inserted, D issued, C completed, R requeued, or the names queue, split, remap, get, merge, front-merge, plug, unplug,
insert, issue, complete, requeue. blkparse shows a queue as a CPU, its thread as the process.
What comes faster than it is taken is dropped and counted; I/O never waits for a trace.")]
pub(crate) struct TraceArgs {
    /// The device
    pub(crate) name: String,
    /// What to do with a trace that runs: start, stop, end or filter
    #[arg(value_name = "ACTION")]
    pub(crate) action: Option<String>,
    /// Where it goes: the beginning of the files' names, or - for stdout
    #[arg(short = 'o', long, value_name = "PREFIX")]
    pub(crate) output: Option<String>,
    /// End after so many seconds
    #[arg(short = 'w', long = "stopwatch", value_name = "SECONDS")]
    pub(crate) seconds: Option<f64>,
    /// Only these, with commas: Q,D,C
    #[arg(short = 'a', long, value_name = "ACTIONS")]
    pub(crate) actions: Option<String>,
    /// Only these operations, with commas: read,write,flush,discard,write-zeroes,prefetch,zone-append
    #[arg(long, value_name = "OPERATIONS")]
    pub(crate) ops: Option<String>,
    /// Only what touches these sectors of 512 bytes: START-END, START- or -END
    #[arg(long, value_name = "RANGE")]
    pub(crate) sectors: Option<String>,
    /// Tell of each piece of a split request that it was queued, so that btt, which does not know splits, times them
    #[arg(long)]
    pub(crate) queue_children: bool,
    /// One time for all that happens in one turn of a queue's thread: cheaper
    #[arg(long)]
    pub(crate) coarse: bool,
    /// Memory for each queue's events that were not taken yet [default: 1M]
    #[arg(short = 'b', long, value_name = "SIZE")]
    pub(crate) buffer: Option<String>,
    /// What is written [default: text, with -o blktrace]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<TraceFormat>,
}

/// What a trace is written as.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TraceFormat {
    /// blktrace's files, version 7
    Blktrace,
    /// blkparse's lines
    Text,
    /// A Chrome trace (JSON) for Perfetto, PREFIX.json
    Perfetto,
}

/// How answers are written.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Answer in JSON
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) json: bool,
}
