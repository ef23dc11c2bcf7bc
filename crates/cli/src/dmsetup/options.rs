//! dmsetup's words: a command, options before, between and behind its arguments, and options of `add` for `create`.

use super::Refusal;

pub(crate) const USAGE: &str = "\
Usage: blockyard dmsetup
  create NAME [--table TABLE | --notable | FILE] [-u UUID] [-r]   [options of add: --nbd, --ublk, --loop, --multipath ...]
  create --concise [NAME,UUID,MINOR,FLAGS,TABLE[,TABLE...][;...]]  what table --concise says; nothing is stdin
  load | reload NAME [--table TABLE | FILE]       into the inactive slot; - or nothing is stdin
  suspend [--noflush] [--nolockfs] NAME...
  resume [--noflush] [--nolockfs] NAME...         puts what was loaded to use
  remove [-f] [--retry] [--deferred] NAME...      remove_all [-f] [--retry] [--deferred]
  rename NAME NEW | rename --setuuid NAME UUID    wipe_table NAME...
  clear NAME...                                   empties the inactive slot
  table [--target KIND] [--inactive] [--concise] [NAME...]    status [--target KIND] [NAME...]
  message NAME SECTOR MESSAGE...
  info [-c [-o [+]FIELDS] [-O [-]FIELDS] [-S SELECTION] [--rows] [--noheadings] [--separator S] [--nameprefixes]
       [--unquoted]] [NAME...]
  ls [--target KIND] [-o devno|devname|blkdevname] [--tree [-o ascii|utf|[no]device|active|rw|open|uuid|inverted]]
  deps [-o devno|devname|blkdevname] [NAME...]    wait NAME [EVENT]
  targets | target-version KIND... | version | mknodes | help

NAME may be -u UUID, or -S SELECTION: name=~'^vg-' && open=0, of all or of those named, for remove, suspend, resume,
clear, wipe_table, table, status, deps, info and mknodes. FIELDS: name, uuid, read_ahead, blkdevname, attr,
tables_loaded, suspended, readonly, devno, major, minor, open, segments, events, device_count, devs_used, devnos_used,
blkdevs_used, device_ref_count, names_using_dev, devnos_using_dev, subsystem, vg_name, lv_name, lv_layer";

const COOKIES: &str = "no command here waits for udev, so there are no cookies; leave this command out";
/// Commands of dmsetup that are refused, each with the reason and what to use instead.
const REFUSED_COMMANDS: [(&str, &str); 11] = [
    ("setgeometry", "devices here have no geometry"),
    ("stats", "blockyard stat NAME and blockyard trace NAME say what becomes of requests"),
    ("measure", "nothing here is measured for the kernel's integrity subsystem"),
    ("udevflags", "no rules of udev are told anything by these devices"),
    ("udevcreatecookie", COOKIES),
    ("udevreleasecookie", COOKIES),
    ("udevcomplete", COOKIES),
    ("udevcomplete_all", COOKIES),
    ("udevcookies", COOKIES),
    (
        "splitname",
        "use info -c -o vg_name,lv_name,lv_layer NAME for a device, or dmsetup splitname for any name",
    ),
    ("mangle", "create and rename accept only names that need no mangling"),
];
const NUMBERS: &str = "a device has the numbers of the kernel's device that shows it";
const OWNER: &str = "who may use a device is said by the export that shows it: blockyard add --help";
const SLOT: &str = "the inactive slot is shown by table --inactive";
const NAMED: &str = "several devices may have the same numbers here, so a device is told by NAME or -u UUID";
const AGAIN: &str = "blockyard stat NAME tells again and again";
/// The same of options, with the commands for which they would mean something. Where there are none, all that do not
/// have it of their own: it says which devices are meant, or how often, and without it more would happen than was asked.
const REFUSED: [(&str, &[&str], &str); 16] = [
    ("major", &["create"], NUMBERS),
    ("minor", &["create"], NUMBERS),
    ("major", &[], NAMED),
    ("minor", &[], NAMED),
    ("select", &[], "its devices are not told by their fields; blockyard dmsetup help says whose are"),
    ("target", &[], "ls, table and status tell devices by the kind of their targets"),
    (
        "readonly",
        &["load", "reload", "wipe_table"],
        "whether a device can be written is said once, when it is made: create -r",
    ),
    ("notable", &["load", "reload"], "only what create makes can be without a table"),
    ("uid", &["create"], OWNER),
    ("gid", &["create"], OWNER),
    ("mode", &["create"], OWNER),
    (
        "readahead",
        &["create", "resume"],
        "read ahead is the kernel's, for the device that shows this one: blockdev --setra",
    ),
    ("exec", &["ls", "table", "status"], "there is no /dev/mapper/NAME to run it on"),
    ("inactive", &["info", "status", "deps", "ls"], SLOT),
    ("interval", &[], AGAIN),
    ("count", &[], AGAIN),
];
/// Options of one command that cannot be together with `--concise`, and why.
const NOT_CONCISE: [(&str, &[&str], &str); 2] = [
    ("create", &["table", "notable", "uuid", "readonly"], "the line itself says that of each device"),
    ("table", &["target", "inactive"], "a line holds the whole of the table in use"),
];
/// Options of dmsetup that change nothing where they are not refused and not a command's own: it takes all of them for
/// every command, too. Most ask for something to be left out that there is not: waiting for udev, its rules, nodes.
const IGNORED: &[&str] = &[
    "addnodeoncreate",
    "addnodeonresume",
    "checks",
    "columns",
    "concise",
    "deferred",
    "force",
    "inactive",
    "manglename",
    "nameprefixes",
    "noflush",
    "noheadings",
    "nolockfs",
    "noopencount",
    "notable",
    "noudevrules",
    "noudevsync",
    "readahead",
    "readonly",
    "retry",
    "rows",
    "separator",
    "setuuid",
    "showkeys",
    "sort",
    "tree",
    "udevcookie",
    "unquoted",
    "verifyudev",
    "yes",
    "uid",
    "gid",
    "mode",
    "exec",
];

const REPORT: &[&str] =
    &["columns", "options", "sort", "select", "noheadings", "separator", "nameprefixes", "unquoted", "rows"];

/// A command, how many names it takes, and the options that it knows.
const COMMANDS: [(&str, usize, usize, &[&str]); 23] = [
    ("create", 0, 2, &["table", "notable", "uuid", "readonly", "concise"]),
    ("load", 0, 2, &["table"]),
    ("reload", 0, 2, &["table"]),
    ("suspend", 1, usize::MAX, &["noflush", "nolockfs"]),
    ("resume", 1, usize::MAX, &["noflush", "nolockfs"]),
    ("remove", 1, usize::MAX, &["force", "retry", "deferred"]),
    ("remove_all", 0, 0, &["force", "retry", "deferred"]),
    ("rename", 1, 2, &["setuuid"]),
    ("wipe_table", 1, usize::MAX, &["force", "noflush", "nolockfs"]),
    ("clear", 1, usize::MAX, &[]),
    ("table", 0, usize::MAX, &["target", "inactive", "concise", "showkeys"]),
    ("status", 0, usize::MAX, &["target", "noflush"]),
    ("message", 2, usize::MAX, &[]),
    ("info", 0, usize::MAX, REPORT),
    ("ls", 0, 0, &["target", "tree", "options"]),
    ("deps", 0, usize::MAX, &["options"]),
    ("wait", 1, 2, &["noflush"]),
    ("mknodes", 0, usize::MAX, &[]),
    ("targets", 0, 0, &[]),
    ("target-version", 1, usize::MAX, &[]),
    ("version", 0, 0, &[]),
    ("help", 0, 0, &[]),
    ("-h", 0, 0, &[]),
];
/// What every command takes.
const COMMON: [&str; 2] = ["verbose", "uuid"];
/// Those that can be told by their fields.
const SELECTED: &[&str] =
    &["table", "status", "deps", "remove", "suspend", "resume", "clear", "wipe_table", "mknodes"];
const WITH_VALUE: &[&str] = &[
    "table",
    "uuid",
    "target",
    "options",
    "separator",
    "sort",
    "select",
    "major",
    "minor",
    "uid",
    "gid",
    "mode",
    "readahead",
    "exec",
    "interval",
    "count",
    "udevcookie",
    "manglename",
];
const SHORT: [(char, &str); 16] = [
    ('j', "major"),
    ('m', "minor"),
    ('U', "uid"),
    ('G', "gid"),
    ('M', "mode"),
    ('S', "select"),
    ('y', "yes"),
    ('u', "uuid"),
    ('r', "readonly"),
    ('f', "force"),
    ('c', "columns"),
    ('C', "columns"),
    ('o', "options"),
    ('O', "sort"),
    ('n', "notable"),
    ('v', "verbose"),
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
    /// The names are those of any number of devices, though there be one or none.
    pub(super) is_list: bool,
}

impl Options {
    pub(super) fn has(&self, name: &str) -> bool {
        self.given.iter().any(|(given, _)| given == name)
    }

    /// Whether devices are told by their fields.
    pub(super) fn selects(&self) -> bool {
        self.has("select") && SELECTED.contains(&self.command.as_str())
    }

    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.given.iter().rev().find(|(given, _)| given == name)?.1.as_deref()
    }

    /// Options of a letter, any number of them. One that has a value has the rest of the word for it, or `next`.
    fn take_letters(
        &mut self,
        letters: &str,
        mut next: impl FnMut() -> Option<String>,
    ) -> Result<(), Refusal> {
        let mut rest = letters.chars();
        while let Some(letter) = rest.next() {
            let known = SHORT.iter().find(|(short, _)| *short == letter);
            let (_, name) =
                known.ok_or_else(|| unusable(format!("dmsetup: invalid option -- '{letter}'")))?;
            let mut value = None;
            if WITH_VALUE.contains(name) {
                let own = std::mem::replace(&mut rest, "".chars()).as_str();
                let missing = || unusable(format!("dmsetup: option requires an argument -- '{letter}'"));
                value = Some(if own.is_empty() { next().ok_or_else(missing)? } else { own.to_owned() });
            }
            self.given.push(((*name).to_owned(), value));
        }
        Ok(())
    }
}

/// What stands behind the `-` of a word of letters: `-` alone is stdin, and `-h` asks for help.
fn letters(word: &str) -> Option<&str> {
    let letters = word.strip_prefix('-').filter(|letters| !letters.is_empty() && !letters.starts_with('-'));
    letters.filter(|letters| *letters != "h")
}

pub(super) fn parse(words: &[String]) -> Result<Options, Refusal> {
    let mut options = Options {
        command: String::new(),
        names: Vec::new(),
        for_add: Vec::new(),
        given: Vec::new(),
        is_list: false,
    };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "--" {
            // What follows are a command and names, whatever they look like.
            options.names.extend(words.cloned());
            if options.command.is_empty() && !options.names.is_empty() {
                options.command = options.names.remove(0);
            }
            break;
        }
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
        if let Some(letters) = letters(word) {
            options.take_letters(letters, || words.next().cloned())?;
            continue;
        }
        let name = match key.strip_prefix("--") {
            Some(name) if !name.is_empty() => name,
            _ if options.command.is_empty() => {
                options.command.clone_from(word);
                continue;
            }
            _ => {
                options.names.push(word.clone());
                continue;
            }
        };
        // Whatever else is said, as dmsetup has it.
        if name == "help" {
            options.command = "help".to_owned();
            options.names.clear();
            options.given.clear();
            return Ok(options);
        }
        if name == "version" && options.command.is_empty() {
            options.command = "version".to_owned();
            continue;
        }
        let value = match (WITH_VALUE.contains(&name), value) {
            (true, None) => {
                let next = words.next().cloned();
                Some(next.ok_or_else(|| unusable(format!("dmsetup: option '{word}' requires an argument")))?)
            }
            (_, value) => value,
        };
        options.given.push((name.to_owned(), value));
    }
    check(options)
}

fn usage(why: impl Into<String>) -> Refusal {
    Refusal::told(vec![why.into(), USAGE.to_owned()])
}

/// What no word of dmsetup's is.
fn unusable(why: impl Into<String>) -> Refusal {
    Refusal::told(vec![why.into(), "Couldn't process command line.".to_owned()])
}

fn check(mut options: Options) -> Result<Options, Refusal> {
    if options.command.is_empty() {
        return Err(Refusal::told(vec![USAGE.to_owned()]));
    }
    if let Some((name, why)) = REFUSED_COMMANDS.iter().find(|(name, _)| *name == options.command) {
        return Err(Refusal::of(format!("blockyard: there is no {name}: {why}")));
    }
    let Some((name, least, most, known)) = COMMANDS.iter().find(|(name, ..)| *name == options.command) else {
        return Err(usage("Unknown command."));
    };
    if *name == "-h" {
        options.command = "help".to_owned();
    }
    for (given, _) in &options.given {
        let given = given.as_str();
        let is_selected = given == "select" && SELECTED.contains(name);
        let is_own = is_selected || known.contains(&given) || COMMON.contains(&given);
        let is_refused = |of: &[&str]| of.contains(name) || of.is_empty() && !is_own;
        if let Some((_, _, why)) = REFUSED.iter().find(|(no, of, _)| *no == given && is_refused(of)) {
            return Err(Refusal::of(format!("blockyard: {name} has no --{given}: {why}")));
        }
        if !is_own && given == "options" {
            let said = options.value("options").unwrap_or_default();
            return Err(unusable(format!("Option not recognised: {said}.")));
        }
        if !is_own && !IGNORED.contains(&given) {
            return Err(unusable(format!("dmsetup: unrecognized option '--{given}'")));
        }
    }
    for (_, others, why) in NOT_CONCISE.iter().filter(|(of, ..)| of == name && options.has("concise")) {
        if let Some(other) = others.iter().find(|other| options.has(other)) {
            return Err(Refusal::of(format!("blockyard: {name} --concise has no --{other}: {why}")));
        }
    }
    if *name != "create" && !options.for_add.is_empty() {
        return Err(usage(format!("{name}: {} is for create", options.for_add[0])));
    }
    // A uuid stands for the name of one device.
    let by_uuid = usize::from(*name != "create" && options.has("uuid"));
    let by_field = usize::from(options.selects() && options.names.is_empty());
    if options.names.len().saturating_add(by_uuid) > *most {
        return Err(usage("Incorrect number of arguments."));
    }
    if options.names.len() + by_uuid + by_field < *least {
        let one_each = *most == usize::MAX && !matches!(*name, "message" | "target-version");
        return Err(if one_each {
            Refusal::of("No device specified.")
        } else {
            usage("Incorrect number of arguments.")
        });
    }
    if options.has("notable") && (options.has("table") || options.names.len() > 1) {
        return Err(Refusal::told(vec![
            "--table and --notable are incompatible.".to_owned(),
            "Couldn't process command line.".to_owned(),
        ]));
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, Refusal> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn letters_are_joined_with_each_other_and_with_their_values() {
        for line in
            ["info -c -o name,uuid x", "info -co name,uuid x", "info x -coname,uuid", "-coname,uuid info x"]
        {
            let options = parsed(line).expect(line);
            assert_eq!((options.command.as_str(), options.names.as_slice()), ("info", &["x".to_owned()][..]));
            assert!(options.has("columns"), "{line}");
            assert_eq!(options.value("options"), Some("name,uuid"), "{line}");
        }
        let options = parsed("create -rnuU-1 x").expect("it is known");
        assert!(options.has("readonly") && options.has("notable"));
        assert_eq!(options.value("uuid"), Some("U-1"));
        assert_eq!(parsed("info -c -O-name").expect("known").value("sort"), Some("-name"));
        assert_eq!(parsed("load x -").expect("stdin").names, ["x", "-"]);
        assert_eq!(parsed("message x 0 -- -f --force").expect("words").names, ["x", "0", "-f", "--force"]);
        assert_eq!(parsed("-v -- info x").expect("words").command, "info");
        for line in ["--help", "ls --help", "--help info x", "create -r --help x"] {
            assert_eq!(parsed(line).expect(line).command, "help", "{line}");
        }
        let said = |line| parsed(line).expect_err(line).0[0].clone();
        assert_eq!(said("info -cx"), "dmsetup: invalid option -- 'x'");
        assert_eq!(said("info -co"), "dmsetup: option requires an argument -- 'o'");
        assert_eq!(said("ls --bogus"), "dmsetup: unrecognized option '--bogus'");
    }

    #[test]
    fn what_changes_nothing_is_taken_and_what_cannot_be_is_refused() {
        for line in [
            "create --addnodeoncreate --noudevsync --verifyudev x --notable",
            "remove --udevcookie 0x1 x",
            "info --nolockfs x",
            "ls -f",
            "--version",
            "remove --noudevrules --noudevsync -y x",
            "table -S name=x",
            "remove -S name=x",
            "remove x -S name=x",
            "remove_all --deferred",
            "info -S name=x",
            "create --manglename none x --notable",
        ] {
            parsed(line).expect(line);
        }
        let said = |line| parsed(line).expect_err(line).0.join(" ");
        for line in
            ["create -j 252 -m 9 x", "create --mode 0600 x", "ls --exec true", "resume --readahead auto x"]
        {
            assert!(said(line).contains(" has no --"), "{line}: {}", said(line));
        }
        for line in [
            "remove -j 252 -m 9",
            "table --major 252 --minor 9",
            "suspend -m 9 x",
            "load -r x --table 0",
            "reload x --readonly",
            "wipe_table -r x",
            "load -n x",
            "remove_all -S name=x",
            "load x -S name=y",
            "rename x y -S name=z",
            "message x 0 y -S name=z",
            "ls -S name=x",
            "remove x --target linear",
            "remove_all --target linear",
            "ls --inactive",
            "status --interval 1",
            "table --concise --target linear",
            "table --concise --inactive",
            "create --concise -r x,,,,0",
            "create --concise -u U x,,,,0",
        ] {
            assert!(said(line).contains(" has no --"), "{line}: {}", said(line));
        }
        for line in [
            "setgeometry x 1 2 3 4",
            "stats list",
            "measure",
            "udevflags 1",
            "udevcreatecookie",
            "udevreleasecookie 1",
            "udevcomplete 1",
            "udevcomplete_all -y",
            "udevcookies",
            "splitname vg-lv",
            "mangle x",
        ] {
            let command = line.split(' ').next().expect("a command");
            let wanted = format!("blockyard: there is no {command}: ");
            assert!(said(line).starts_with(&wanted), "{line}: {}", said(line));
        }
        assert_eq!(said("remove"), "No device specified.");
    }

    #[test]
    fn setuuid_is_a_switch_wherever_it_stands() {
        for line in ["rename --setuuid x U-1", "rename x --setuuid U-1", "--setuuid rename x U-1"] {
            let options = parsed(line).expect(line);
            assert!(options.has("setuuid"), "{line}");
            assert_eq!(options.names, ["x", "U-1"], "{line}");
        }
    }
}
