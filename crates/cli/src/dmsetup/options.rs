//! dmsetup's words: a command, options before, between and behind its arguments, and options of `add` for `create`.

use super::Refusal;

pub(crate) const USAGE: &str = "\
Usage: blockyard dmsetup
  create NAME [--table TABLE | --notable | FILE] [-u UUID] [-r]   [options of add: --nbd, --ublk, --loop, --multipath ...]
  load | reload NAME [--table TABLE | FILE]       into the inactive slot; - or nothing is stdin
  suspend [--noflush] [--nolockfs] NAME...
  resume [--noflush] [--nolockfs] NAME...         puts what was loaded to use
  remove [-f] [--retry] [--deferred] NAME...      remove_all [-f]
  clear NAME...                                   empties the inactive slot
  table [--target KIND] [--inactive] [NAME...]    status [--target KIND] [NAME...]
  message NAME SECTOR MESSAGE...
  info [-c [-o FIELDS] [--noheadings] [--separator S]] [NAME...]
  ls [--target KIND] [--tree]                     deps [NAME...]
  wait NAME [EVENT]
  targets | version | mknodes | help

FIELDS: name, major, minor, attr, open, segments, events, uuid, suspended, readonly, tables_loaded, devno";

/// A command, how many names it takes, and the options that it knows.
const COMMANDS: [(&str, usize, usize, &[&str]); 20] = [
    ("create", 1, 2, &["table", "notable", "uuid", "readonly", "verbose"]),
    ("load", 1, 2, &["table"]),
    ("reload", 1, 2, &["table"]),
    ("suspend", 1, usize::MAX, &["noflush", "nolockfs"]),
    ("resume", 1, usize::MAX, &["noflush", "nolockfs"]),
    ("remove", 1, usize::MAX, &["force", "retry", "deferred"]),
    ("remove_all", 0, 0, &["force", "retry"]),
    ("clear", 1, usize::MAX, &[]),
    ("table", 0, usize::MAX, &["target", "inactive"]),
    ("status", 0, usize::MAX, &["target"]),
    ("message", 3, usize::MAX, &[]),
    ("info", 0, usize::MAX, &["columns", "options", "noheadings", "separator"]),
    ("ls", 0, 0, &["target", "tree"]),
    ("deps", 0, usize::MAX, &[]),
    ("wait", 1, 2, &[]),
    ("mknodes", 0, usize::MAX, &[]),
    ("targets", 0, 0, &[]),
    ("version", 0, 0, &[]),
    ("help", 0, 0, &[]),
    ("-h", 0, 0, &[]),
];
const WITH_VALUE: &[&str] = &["table", "uuid", "target", "options", "separator"];
const SHORT: [(&str, &str); 7] = [
    ("-u", "uuid"),
    ("-r", "readonly"),
    ("-f", "force"),
    ("-c", "columns"),
    ("-C", "columns"),
    ("-o", "options"),
    ("-v", "verbose"),
];
/// Options of `add`, which are for the process that serves.
const FOR_ADD: &[&str] = &[
    "--nbd",
    "--ublk",
    "--loop",
    "--fuse",
    "--nbd-device",
    "--nbd-name",
    "--queues",
    "--depth",
    "--multipath",
    "--ring",
    "--limits",
    "--layer",
];

/// What was asked for.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) command: String,
    pub(super) names: Vec<String>,
    pub(super) for_add: Vec<String>,
    given: Vec<(String, Option<String>)>,
}

impl Options {
    pub(super) fn has(&self, name: &str) -> bool {
        self.given.iter().any(|(given, _)| given == name)
    }

    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.given.iter().rev().find(|(given, _)| given == name)?.1.as_deref()
    }
}

pub(super) fn parse(words: &[String]) -> Result<Options, Refusal> {
    let mut options =
        Options { command: String::new(), names: Vec::new(), for_add: Vec::new(), given: Vec::new() };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let (key, value) = match word.split_once('=') {
            Some((key, value)) if key.starts_with("--") => (key, Some(value.to_owned())),
            _ => (word.as_str(), None),
        };
        if FOR_ADD.contains(&key) {
            options.for_add.push(word.clone());
            // --ublk, --loop and --nbd-device have a value behind = only.
            if value.is_none() && !matches!(key, "--ublk" | "--loop" | "--nbd-device") {
                options.for_add.extend(words.next().cloned());
            }
            continue;
        }
        let name = match SHORT.iter().find(|(short, _)| *short == key) {
            Some((_, name)) => *name,
            None => match key.strip_prefix("--") {
                Some(name) if !name.is_empty() => name,
                _ if options.command.is_empty() => {
                    options.command.clone_from(word);
                    continue;
                }
                _ => {
                    options.names.push(word.clone());
                    continue;
                }
            },
        };
        let value = match (WITH_VALUE.contains(&name), value) {
            (true, None) => {
                let next = words.next().cloned();
                Some(next.ok_or_else(|| usage(format!("option '{word}' requires an argument")))?)
            }
            (_, value) => value,
        };
        options.given.push((name.to_owned(), value));
    }
    check(options)
}

fn usage(why: impl Into<String>) -> Refusal {
    Refusal(vec![why.into(), USAGE.to_owned()])
}

fn check(mut options: Options) -> Result<Options, Refusal> {
    if options.command.is_empty() {
        return Err(usage("Missing command"));
    }
    let Some((name, least, most, known)) = COMMANDS.iter().find(|(name, ..)| *name == options.command) else {
        return Err(usage("Unknown command"));
    };
    if *name == "-h" {
        options.command = "help".to_owned();
    }
    if let Some((given, _)) = options.given.iter().find(|(given, _)| !known.contains(&given.as_str())) {
        return Err(usage(format!("{name}: it has no option --{given}")));
    }
    if *name != "create" && !options.for_add.is_empty() {
        return Err(usage(format!("{name}: {} is for create", options.for_add[0])));
    }
    if options.names.len() < *least || options.names.len() > *most {
        return Err(usage(format!("Incorrect number of arguments for {name}")));
    }
    if options.has("notable") && (options.has("table") || options.names.len() > 1) {
        return Err(usage("--table and --notable are incompatible."));
    }
    Ok(options)
}
