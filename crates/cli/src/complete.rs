//! Dynamic completion: devices, kinds and options of stacks, layers and exports, keys of `set`, limits.
//!
//! The shell starts this program for each completion, so only keys of `set` are requested from a server, with a short
//! time limit: devices are the names in the run directory.

use crate::help::topics;
use crate::listing::block_on;
use clap::CommandFactory;
use clap_complete::engine::CompletionCandidate;
use engine::change::limits::QueueLimits;
use engine::control::ControlClient;
use engine::rundir::RunDir;
use engine::spec::{DeviceName, ExportRow, NBD_LIMITS, OptionRow, backend_rows, layer_rows};
use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

/// Time limit of a server's answer, short enough for a key press.
const ANSWER_TIME: Duration = Duration::from_millis(300);

/// The keys of `set` that every device has.
const SET: [&str; 9] = [
    "direct=on",
    "direct=off",
    "direct=auto",
    "file=",
    "badblocks=",
    "scheduler=",
    "slow=",
    "io_timeout=",
    "io_timeout=off",
];

/// Returns the words that start with the typed text.
fn starting(typed: &OsStr, words: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    let typed = typed.to_string_lossy();
    words.into_iter().filter(|word| word.starts_with(&*typed)).map(CompletionCandidate::new).collect()
}

fn owned(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(|word| (*word).to_owned()).collect()
}

/// Returns the completions of options.
fn completions(rows: &[OptionRow]) -> Vec<String> {
    rows.iter().flat_map(OptionRow::completions).collect()
}

/// Returns the typed text up to its last comma, followed by each of `words` that was not given yet.
fn next_item(typed: &str, arguments: &[String]) -> Vec<String> {
    let Some((before, _)) = typed.rsplit_once(',') else { return Vec::new() };
    let key = |word: &str| word.split('=').next().unwrap_or_default().to_owned();
    let given: Vec<String> = before.split(',').map(key).collect();
    let is_new = |word: &&String| !given.contains(&key(word));
    arguments.iter().filter(is_new).map(|word| format!("{before},{word}")).collect()
}

/// Completes the name of a device.
pub(crate) fn device(typed: &OsStr) -> Vec<CompletionCandidate> {
    let names = RunDir::locate().map(|run| names_in(run.path())).unwrap_or_default();
    starting(typed, names)
}

/// Returns the names of the devices of a run directory, sorted.
pub(crate) fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> =
        files.filter_map(|file| file.strip_suffix(".control").map(str::to_owned)).collect();
    names.sort();
    names
}

/// Completes a stack: its kind, a path, an option.
pub(crate) fn stack(typed: &OsStr) -> Vec<CompletionCandidate> {
    let text = typed.to_string_lossy();
    let backend = backend_rows()
        .iter()
        .find(|row| text.starts_with(row.kind) && text[row.kind.len()..].starts_with(':'));
    let words = match backend {
        None => backend_rows().iter().map(|row| format!("{}:", row.kind)).collect(),
        Some(row) if row.kind == "file" && !text.contains(',') => paths(&text["file:".len()..]),
        Some(row) => next_item(&text, &completions(row.options)),
    };
    starting(typed, words)
}

/// Returns the paths in the folder of `typed`, as `file:` stacks.
fn paths(typed: &str) -> Vec<String> {
    let (folder, _) = typed.rsplit_once('/').map_or(("", typed), |(folder, file)| (folder, file));
    let shown = if typed.contains('/') { format!("{folder}/") } else { String::new() };
    let open = if shown.is_empty() { Path::new(".") } else { Path::new(&shown) };
    let entries = std::fs::read_dir(open).into_iter().flatten().flatten();
    let path = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let end = if entry.path().is_dir() { "/" } else { "" };
        Some(format!("file:{shown}{}{end}", name.replace(',', ",,")))
    };
    let mut paths: Vec<String> = entries.filter_map(path).collect();
    paths.sort();
    paths
}

/// Completes a layer: its name, an option.
pub(crate) fn layer(typed: &OsStr) -> Vec<CompletionCandidate> {
    let text = typed.to_string_lossy();
    let rows = layer_rows();
    let words = match text.split_once(',') {
        None => rows.iter().map(|row| row.name.to_owned()).collect(),
        Some((name, _)) => {
            let options = rows.iter().find(|row| row.name == name).map_or(&[][..], |row| row.options);
            let words = if name == "split" { limit_names() } else { completions(options) };
            next_item(&text, &words)
        }
    };
    starting(typed, words)
}

/// Completes the value of an export's flag: its options, behind a number or a path.
pub(crate) fn export(row: &ExportRow, typed: &OsStr) -> Vec<CompletionCandidate> {
    let text = typed.to_string_lossy();
    let words = completions(row.options);
    let may_lead = row.value_optional && !text.contains(',');
    let words = if may_lead { words } else { next_item(&text, &words) };
    starting(typed, words)
}

/// Completes `--nbd-limits`, several limits with commas.
pub(crate) fn nbd_limits(typed: &OsStr) -> Vec<CompletionCandidate> {
    let text = typed.to_string_lossy();
    let words = completions(NBD_LIMITS);
    starting(typed, if text.contains(',') { next_item(&text, &words) } else { words })
}

/// Completes `--limits`, several limits with commas.
pub(crate) fn limits(typed: &OsStr) -> Vec<CompletionCandidate> {
    let text = typed.to_string_lossy();
    let names = limit_names();
    let words = if text.contains(',') { next_item(&text, &names) } else { names };
    starting(typed, words)
}

/// Completes one limit.
pub(crate) fn limit(typed: &OsStr) -> Vec<CompletionCandidate> {
    starting(typed, limit_names())
}

fn limit_names() -> Vec<String> {
    let settable = QueueLimits::FIELDS.into_iter().filter(|field| field.why_fixed().is_none());
    settable.map(|field| format!("{}=", field.name)).collect()
}

pub(crate) fn scheduler(typed: &OsStr) -> Vec<CompletionCandidate> {
    starting(typed, owned(&["none", "mq-deadline", "kyber"]))
}

pub(crate) fn ring(typed: &OsStr) -> Vec<CompletionCandidate> {
    starting(typed, owned(&["auto", "io_uring", "epoll"]))
}

pub(crate) fn tls(typed: &OsStr) -> Vec<CompletionCandidate> {
    starting(typed, owned(&["off", "on", "require"]))
}

/// Completes a key of `set`: of every device, or of a layer of the device that the command line names. Keys of all
/// layers are completed if the device does not answer.
pub(crate) fn set_key(typed: &OsStr) -> Vec<CompletionCandidate> {
    // The shell's script passes the words behind `--`: the program, `set`, the device.
    let words = std::env::args().skip_while(|word| word != "--").filter(|word| !word.starts_with('-'));
    let layers = words.skip(1).skip_while(|word| word != "set").nth(1).and_then(|name| layers_of(&name));
    starting(typed, owned(&SET).into_iter().chain(layer_keys(layers.as_deref())))
}

/// Returns the keys of the layers in `among`, of all layers without it.
fn layer_keys(among: Option<&[String]>) -> Vec<String> {
    let has = |name: &str| among.is_none_or(|layers| layers.iter().any(|layer| layer == name));
    let rows = layer_rows().into_iter().filter(|row| has(row.name));
    let keys = rows.flat_map(|row| {
        let keys = completions(row.options).into_iter();
        keys.map(move |key| format!("{}.{key}", row.name)).collect::<Vec<_>>()
    });
    keys.collect()
}

/// Returns the names of a device's layers; `None` if its server does not answer in time.
fn layers_of(name: &str) -> Option<Vec<String>> {
    // An invalid name could be a path out of the run directory.
    name.parse::<DeviceName>().ok()?;
    let client = ControlClient::new(RunDir::locate().ok()?.control_link(name));
    let asked = async { tokio::time::timeout(ANSWER_TIME, client.device(name)).await };
    let device = block_on("completions", asked).ok()?.ok()?.ok()?;
    let name = |layer: &String| layer.split(',').next().unwrap_or_default().to_owned();
    Some(device.layers.iter().map(name).collect())
}

/// Completes a command or a topic.
pub(crate) fn help(typed: &OsStr) -> Vec<CompletionCandidate> {
    let command = crate::args::Cli::command();
    let commands = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    let commands: Vec<String> = commands.map(|sub| sub.get_name().to_owned()).collect();
    starting(typed, commands.into_iter().chain(topics().into_iter().map(|topic| topic.name.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(of: fn(&OsStr) -> Vec<CompletionCandidate>, typed: &str) -> Vec<String> {
        let candidates = of(OsStr::new(typed));
        candidates.iter().map(|candidate| candidate.get_value().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_stack_is_completed_by_kind_and_option() {
        assert_eq!(words(stack, "r"), ["ram:", "rbd:"]);
        assert_eq!(
            words(stack, "file:a,dir"),
            ["file:a,direct=on", "file:a,direct=off", "file:a,direct=auto"]
        );
        assert_eq!(words(stack, "file:a,direct=on,dir"), [""; 0], "an option is given once");
        assert_eq!(words(stack, "ram:1G,h"), ["ram:1G,hugepages"]);
    }

    #[test]
    fn options_of_an_export_are_completed() {
        let row =
            |kind: &str| engine::spec::export_rows().iter().find(|row| row.kind == kind).expect("an export");
        let words = |kind, typed: &str| {
            let candidates = export(row(kind), OsStr::new(typed));
            candidates.iter().map(|word| word.get_value().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        assert_eq!(words("ublk", "3,batch=y"), ["3,batch=yes"]);
        assert_eq!(words("loop", "p"), ["partscan", "passthrough"]);
        assert_eq!(words("fuse", "/tmp/a,uring=o"), ["/tmp/a,uring=on", "/tmp/a,uring=off"]);
        assert_eq!(words("fuse", "/tmp/"), [""; 0]);
    }

    #[test]
    fn layers_limits_and_keys_are_completed() {
        assert!(words(layer, "d").contains(&"delay".to_owned()));
        assert_eq!(words(layer, "delay,r"), ["delay,read="]);
        assert!(words(limit, "max_sec").contains(&"max_sectors=".to_owned()));
        assert_eq!(words(tls, "r"), ["require"]);
        assert_eq!(words(nbd_limits, "memory=1G,per"), ["memory=1G,per-peer="]);
        assert!(words(set_key, "throttle.i").contains(&"throttle.iops=".to_owned()));
        assert!(words(help, "st").contains(&"stacks".to_owned()));
    }
}
