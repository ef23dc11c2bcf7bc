//! The texts of `blockyard help TOPIC`.

use super::{Block, Topic};
use engine::change::limits::{QueueLimits, Unit};
use engine::spec::{
    MULTIPATH_OPTIONS, NBD_EXPORT_KEYS, NBD_LIMITS, OptionRow, Policy, backend_rows, export_rows, layer_rows,
};
use engine::tables::{TargetRow, target_rows};

fn text(content: &str) -> Block {
    Block::Text(content.to_owned())
}

fn lines(content: &str) -> Block {
    Block::Lines(content.to_owned())
}

fn heading(content: &str) -> Block {
    Block::Heading(content.to_owned())
}

fn terms(terms: &[(&str, &str)]) -> Block {
    Block::Terms(terms.iter().map(|(term, about)| ((*term).to_owned(), (*about).to_owned())).collect())
}

/// Lists the options of a driver as a block.
fn options(rows: &[OptionRow]) -> Block {
    Block::Options(rows.to_vec())
}

/// All topics, in the order of the list.
pub(crate) fn all() -> Vec<Topic> {
    vec![stacks(), layers(), exports(), tables(), topology(), schedulers(), limits(), crash(), environment()]
}

/// The URI of `nbd:`.
const NBD_URI: &str = "The URI is nbd+unix:///EXPORT?socket=PATH or nbd://HOST[:PORT]/EXPORT. With TLS it is nbds+unix or nbds \
                       and needs the parameter tls-certificates=DIR (ca-cert.pem; client-cert.pem and client-key.pem if \
                       the server wants them); tls-hostname=NAME replaces the name that the certificate must have.";

fn stacks() -> Topic {
    let rows = backend_rows();
    let mut blocks = vec![
        text("A stack is kind:what[,option...]: the backend of a device. Layers (--layer) stand on it."),
        Block::Terms(rows.iter().map(|row| (row.usage.to_owned(), row.about.to_owned())).collect()),
        text(
            "A SIZE is in bytes or has a binary suffix K M G T P E: 10G, 10Gi, 10GB and 10GiB are 10 x 2^30 \
             bytes. A \
             TIME has ns, us, ms, s, m or h. A comma within a path is written twice. Without a SIZE, null:, zero: and error: \
             have 250G.",
        ),
    ];
    for row in rows.iter().filter(|row| !row.options.is_empty()) {
        blocks.push(heading(&format!("Options of {}:", row.kind)));
        if row.kind == "nbd" {
            blocks.push(text(NBD_URI));
        }
        blocks.push(options(row.options));
    }
    Topic { name: "stacks", about: "backends: file:, ram:, null:, nbd:, ... with options", blocks }
}

fn layers() -> Topic {
    let rows = layer_rows();
    let of_row = |about: &str, example: &str| format!("{about}; for example {example}");
    let mut blocks = vec![
        text(
            "A layer changes requests on their way to the device below. --layer may be given several \
             times: the first stands on the backend, each further one on the one before.",
        ),
        Block::Terms(rows.iter().map(|row| (row.usage.to_owned(), of_row(row.about, row.example))).collect()),
    ];
    let is_scheduler = |name: &str| Policy::ALL.iter().any(|policy| policy.name() == name);
    for row in rows.iter().filter(|row| !row.options.is_empty() && !is_scheduler(row.name)) {
        blocks.push(heading(&format!("Options of {}", row.name)));
        blocks.push(options(row.options));
    }
    blocks.extend([
        text(
            "The options of split are queue limits (blockyard help limits); those of mq-deadline and kyber are \
             the parameters of these schedulers (blockyard help schedulers).",
        ),
        text("Options of a layer are changed while it is served by blockyard set NAME LAYER.OPTION=VALUE."),
    ]);
    Topic { name: "layers", about: "layers that change I/O: delay, split, cow, throttle, ...", blocks }
}

fn exports() -> Topic {
    let rows = export_rows();
    let mut blocks = vec![
        text(
            "An export is a way to reach a device. Several may be given. Without one a device gets the \
             best one: ublk where the kernel has it and you may use it, else as root a loop device, \
             else an NBD socket in the run directory; -v prints which and why. For each export one line \
             `NAME EXPORT ADDRESS` is printed when all are ready.",
        ),
        Block::Terms(rows.iter().map(|row| (row.usage.to_owned(), row.about.to_owned())).collect()),
    ];
    let with_options = rows.iter().filter(|row| !row.options.is_empty());
    blocks.extend(
        with_options.flat_map(|row| [heading(&format!("Options of --{}", row.kind)), options(row.options)]),
    );
    blocks.extend([
        heading("Options of NBD exports"),
        text("On a command line they are --nbd-name, --tls, --tls-certificates and --tls-verify-peer; in a topology \
              they are keys of the export."),
        options(NBD_EXPORT_KEYS),
        heading("Limits of NBD clients (--nbd-limits)"),
        options(NBD_LIMITS),
        text(
            "SIGINT, SIGTERM and SIGHUP complete the requests of clients, flush, and end with status 0; a \
             second one ends the process at once.",
        ),
    ]);
    Topic {
        name: "exports",
        about: "how a device is reached: NBD, ublk, loop, iSCSI, vhost-user, ...",
        blocks,
    }
}

fn tables() -> Topic {
    let rows = target_rows();
    let terms_of = |row: &TargetRow| -> Vec<(String, String)> {
        let about = format!("{}; for example {}", row.about, row.example);
        row.usage.lines().map(|form| (form.to_owned(), about.clone())).collect()
    };
    let blocks = vec![
        text(
            "A table is device-mapper's: a line for each target, in sectors of 512 bytes, from 0 on \
             without gaps.",
        ),
        lines("START LENGTH KIND ARGUMENTS..."),
        heading("A line after START and LENGTH is"),
        Block::Terms(rows.iter().flat_map(terms_of).collect()),
        text(
            "A <device> is given as below; numbers are sectors unless docs/targets, which describes each \
             target, says otherwise. blockyard dmsetup targets lists the versions.",
        ),
        heading("A device in a line is"),
        terms(&[
            ("kind:what[,option...]", "a stack (blockyard help stacks); equal texts are one opened device"),
            ("NAME", "another device of this process"),
            ("MAJOR:MINOR, PATH", "a block device or a raw file"),
        ]),
        heading("Examples"),
        lines(
            "0 2097152 linear file:disk.img 0\n0 8192 multipath 0 0 1 1 round-robin 0 2 1 nbd:nbd://a/d 1 \
             nbd:nbd://b/d 1",
        ),
        text(
            "--table FILE takes a table in place of a stack, - is stdin; blockyard table, status, message \
             and resume are dmsetup's. Paths of multipath are tested and activated as the options of \
             --multipath specify. A path whose server does not answer fails over at once, unless its nbd: \
             stack has reconnect=TIME.",
        ),
        heading("Options of --multipath"),
        options(MULTIPATH_OPTIONS),
    ];
    Topic { name: "tables", about: "device-mapper's tables, for --table and blockyard dmsetup", blocks }
}

fn topology() -> Topic {
    let kinds: Vec<&str> = export_rows().iter().map(|row| row.kind).collect();
    let blocks = vec![
        text(
            "A topology is a TOML file of devices and exports for one process: blockyard check FILE \
             validates it, blockyard up FILE serves it, blockyard apply FILE applies it to the \
             process that serves it, and blockyard save writes the served devices as such a file.",
        ),
        lines(
            "queues = 2                    # I/O threads; also poll, ring, \
             nbd-limits\n\n[device.disk]\nstack = \"file:disk.img,direct=on\"\n\n[device.slow]\nstack = \
             \"ram:1G\"             # or table = \"\"\"...\"\"\"\nlayers = \
             [\"delay,read=5ms\"]\n\n[[export]]\ndevice = \"disk\"\nublk = true\n\n[[export]]\ndevice = \
             \"slow\"\nnbd = \"tcp::10809\"",
        ),
        heading("Keys of a device"),
        terms(&[
            ("stack, table", "the backend, or a table (blockyard help stacks, tables)"),
            ("layers", "a list, the lowest first (blockyard help layers)"),
            (
                "limits, scheduler, depth, slow, io_timeout, multipath",
                "as the options of serve of these names",
            ),
            ("table-base", "the folder of relative paths in a table [the file's]"),
        ]),
        heading("Keys of an export"),
        Block::Terms(vec![
            ("device".to_owned(), "the name of the device".to_owned()),
            (
                kinds.join(", "),
                "the export, with the value of its flag (blockyard help exports); true or a number where the flag's value \
                 is optional; none of them: the default export"
                    .to_owned(),
            ),
        ]),
        heading("Keys of an NBD export"),
        options(NBD_EXPORT_KEYS),
        text("Relative paths begin at the file's own folder."),
    ];
    Topic { name: "topology", about: "many devices in one process, from a file", blocks }
}

fn schedulers() -> Topic {
    let mut blocks = vec![
        text(
            "A scheduler orders and merges the requests of a device: --scheduler \
             NAME[,PARAMETER=VALUE...]. Names, parameters and units are the kernel's.",
        ),
        Block::Terms(vec![(
            "none".to_owned(),
            "requests are issued in the order of arrival [default]".to_owned(),
        )]),
    ];
    for policy in Policy::ALL {
        blocks.push(heading(policy.name()));
        blocks.push(Block::Text(format!("{}.", sentence(policy.about()))));
        blocks.push(options(policy.options()));
    }
    blocks.push(text(
        "blockyard set NAME scheduler=..., or PARAMETER=VALUE, changes it while the device is served.",
    ));
    Topic { name: "schedulers", about: "none, mq-deadline, kyber and their parameters", blocks }
}

fn limits() -> Topic {
    let fields = QueueLimits::FIELDS.into_iter();
    let rows: Vec<OptionRow> = fields
        .filter(|field| field.why_fixed().is_none())
        .map(|field| OptionRow::value(field.name, form_of(field.unit), "", field.about))
        .collect();
    let blocks = vec![
        text(
            "Queue limits are the kernel's struct queue_limits: the requests that a device accepts. A \
             larger request is split. Set them with --limits, in a topology, or while a \
             device is served with blockyard limits NAME LIMIT=VALUE.",
        ),
        Block::Options(rows),
        text(
            "Values are in the unit of the field; names and units of /sys/block/NAME/queue are taken, too \
             (max_sectors_kb=127). No limit may exceed that of the device below.",
        ),
    ];
    Topic { name: "limits", about: "queue limits: their names and rules", blocks }
}

/// Returns the placeholder of a limit's value.
fn form_of(unit: Unit) -> &'static str {
    match unit {
        Unit::Bytes => "BYTES",
        Unit::Sectors => "SECTORS",
        Unit::Mask => "MASK",
        Unit::Count => "N",
    }
}

/// Capitalizes the first letter of a text.
fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect()
}

fn crash() -> Topic {
    let blocks = vec![
        text(
            "blockyard crash records a workload and checks the states that a power cut could have left. Both commands are \
             given to the shell, with these variables:",
        ),
        terms(&[
            ("DEV", "the device: of the workload, or in the state to check"),
            ("MNT", "where it is mounted: with --fs, or if the command contains MNT"),
            ("CRASH_FD", "the workload's descriptor for marks, one a line; it is 3"),
            ("CRASH_MARK", "for the check: the last mark before the power cut"),
            ("CRASH_MARKS", "for the check: all marks before it, one a line, at most the last 64 KiB"),
            ("CRASH_MARKS_FILE", "for the check: a file with all of them"),
            ("CRASH_STATE", "for the check: a name of the state"),
        ]),
        heading("Models:"),
        terms(&[
            ("prefix", "the last writes are lost: the device never reorders"),
            ("subset", "any writes that no flush covered are lost, each whole"),
            ("torn", "any atomic units (--atomic) of such writes are lost"),
        ]),
        text(
            "A FUA write is present once it completed; a flush covers what completed before it was submitted.",
        ),
    ];
    Topic { name: "crash", about: "the crash laboratory: variables and models", blocks }
}

fn environment() -> Topic {
    let blocks = vec![
        heading("Exit status"),
        terms(&[
            ("0", "done"),
            ("1", "the request failed"),
            ("2", "bad usage"),
            ("130, 143", "ended at once by a second SIGINT or SIGTERM"),
        ]),
        heading("Environment"),
        terms(&[
            (
                "BLOCKYARD_RUN",
                "the run directory; else /run/blockyard as root, else $XDG_RUNTIME_DIR/blockyard",
            ),
            (
                "BLOCKYARD_STATE",
                "the directory of persistent reservations of --iscsi; else /var/lib/blockyard as root, else \
                 $XDG_STATE_HOME/blockyard or ~/.local/state/blockyard",
            ),
            (
                "BLOCKYARD_EXPORT",
                "ublk, loop or nbd: the export of a device that names none; else the best one",
            ),
            ("BLOCKYARD_RING", "io_uring or epoll, for --ring auto; else io_uring where it is allowed"),
            ("NO_COLOR", "no colours"),
            ("PAGER", "shows help that is longer than the terminal; else less. Empty or cat: none"),
        ]),
        heading("Files in the run directory"),
        terms(&[
            (
                "NAME.control",
                "the control socket: HTTP with JSON, and /metrics for Prometheus (curl --unix-socket \
                 NAME.control http://localhost/devices/NAME)",
            ),
            ("NAME.sock", "the device's NBD socket, when no export is named"),
            ("NAME.fuse", "the device as a file, under its loop device"),
            ("NAME.log", "the log of the process behind blockyard add"),
        ]),
    ];
    Topic { name: "environment", about: "exit status, environment variables, files", blocks }
}
