//! Command line of dmsetup: a command, options before, between and after its arguments, and options of `add`
//! for `create`.

use super::Refusal;

pub(crate) const USAGE: &str = "\
Usage: blockyard dmsetup
  create NAME [--table TABLE | --notable | FILE] [-u UUID] [-r]
      also the options of add: --nbd, --ublk, --loop, --multipath, ...
  create --concise [NAME,UUID,MINOR,FLAGS,TABLE[,TABLE...][;...]]
      the output of table --concise; default: stdin
  load | reload NAME [--table TABLE | FILE]
      into the inactive slot; -, or no FILE: stdin
  suspend [--noflush] [--nolockfs] NAME...
  resume [--noflush] [--nolockfs] NAME...    activates the loaded table
  remove [-f] [--retry] [--deferred] NAME...
  remove_all [-f] [--retry] [--deferred]
  rename NAME NEW | rename --setuuid NAME UUID
  wipe_table NAME...
  clear NAME...                              empties the inactive slot
  table [--target KIND] [--inactive] [--concise] [NAME...]
  status [--target KIND] [NAME...]
  message NAME SECTOR MESSAGE...
  info [-c [-o [+]FIELDS] [-O [-]FIELDS] [-S SELECTION] [--rows] [--noheadings]
       [--separator S] [--nameprefixes] [--unquoted]] [NAME...]
  ls [--target KIND] [-o devno|devname|blkdevname]
     [--tree [-o ascii|utf|[no]device|active|rw|open|uuid|inverted]]
  deps [-o devno|devname|blkdevname] [NAME...]
  wait NAME [EVENT]
  targets | target-version KIND... | version | mknodes | help

In place of NAME: -u UUID. With remove, suspend, resume, clear, wipe_table,
table, status, deps, info and mknodes also -S SELECTION, such as
name=~'^vg-' && open=0, of all devices or the named ones. FIELDS: name, uuid,
read_ahead, blkdevname, attr, tables_loaded, suspended, readonly, devno, major,
minor, open, segments, events, device_count, devs_used, devnos_used,
blkdevs_used, device_ref_count, names_using_dev, devnos_using_dev, subsystem,
vg_name, lv_name, lv_layer";

const COOKIES: &str = "these commands do not wait for udev, so there are no cookies; leave this command out";
/// Commands of dmsetup that are refused, each with the reason and what to use instead.
const REFUSED_COMMANDS: [(&str, &str); 11] = [
    ("setgeometry", "devices here have no geometry"),
    ("stats", "use blockyard stat NAME and blockyard trace NAME"),
    ("measure", "devices are not measured for the kernel's integrity subsystem"),
    ("udevflags", "these devices have no udev rules"),
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
const NUMBERS: &str = "a device has the device numbers of its export";
const OWNER: &str = "the export sets owner and mode: blockyard add --help";
const SLOT: &str = "table --inactive shows the inactive slot";
const NAMED: &str = "device numbers are not unique here; use NAME or -u UUID";
const AGAIN: &str = "use blockyard stat NAME INTERVAL";
/// Rejected options with the reason, for the listed commands. An empty list: for all commands that do not
/// define the option. These options select devices or repetitions, so ignoring them would do more than was
/// requested.
const REFUSED: [(&str, &[&str], &str); 16] = [
    ("major", &["create"], NUMBERS),
    ("minor", &["create"], NUMBERS),
    ("major", &[], NAMED),
    ("minor", &[], NAMED),
    ("select", &[], "it does not select devices; blockyard dmsetup help lists the commands that do"),
    ("target", &[], "only ls, table and status select devices by target"),
    (
        "readonly",
        &["load", "reload", "wipe_table"],
        "a device is read-only or writable from its creation on: create -r",
    ),
    ("notable", &["load", "reload"], "only create can omit the table"),
    ("uid", &["create"], OWNER),
    ("gid", &["create"], OWNER),
    ("mode", &["create"], OWNER),
    (
        "readahead",
        &["create", "resume"],
        "the kernel sets read-ahead on the exported device: blockdev --setra",
    ),
    ("exec", &["ls", "table", "status"], "there is no /dev/mapper/NAME to run it on"),
    ("inactive", &["info", "status", "deps", "ls"], SLOT),
    ("interval", &[], AGAIN),
    ("count", &[], AGAIN),
];
/// Options that cannot be combined with `--concise`, by command, and the reason.
const NOT_CONCISE: [(&str, &[&str], &str); 2] = [
    ("create", &["table", "notable", "uuid", "readonly"], "each device's entry specifies that"),
    ("table", &["target", "inactive"], "an entry holds the whole active table"),
];
/// Options of dmsetup that are accepted and ignored for every command that does not define or reject them, as
/// dmsetup does. Most of them disable something that does not exist here: waiting for udev, its rules, device
/// nodes.
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

/// Commands: name, least and largest number of arguments, and options.
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
/// Options of every command.
const COMMON: [&str; 2] = ["verbose", "uuid"];
/// Commands that select devices with `-S`.
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
/// Options of `add`, which are passed to the process that serves the device.
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

/// A parsed command line.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) command: String,
    pub(super) names: Vec<String>,
    pub(super) for_add: Vec<String>,
    given: Vec<(String, Option<String>)>,
    /// Whether the names are a list, which is shown with a name in each line even if it has one element.
    pub(super) is_list: bool,
}

impl Options {
    pub(super) fn has(&self, name: &str) -> bool {
        self.given.iter().any(|(given, _)| given == name)
    }

    /// Returns whether `-S` selects the devices.
    pub(super) fn selects(&self) -> bool {
        self.has("select") && SELECTED.contains(&self.command.as_str())
    }

    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.given.iter().rev().find(|(given, _)| given == name)?.1.as_deref()
    }

    /// Parses a group of short options. An option with a value matches the rest of the group, or `next`.
    fn take_letters(
        &mut self,
        letters: &str,
        mut next: impl FnMut() -> Option<String>,
    ) -> Result<(), Refusal> {
        let mut rest = letters.chars();
        while let Some(letter) = rest.next() {
            let known = SHORT.iter().find(|(short, _)| *short == letter);
            let (_, name) = known.ok_or_else(|| invalid(format!("dmsetup: invalid option -- '{letter}'")))?;
            let mut value = None;
            if WITH_VALUE.contains(name) {
                let own = std::mem::replace(&mut rest, "".chars()).as_str();
                let missing = || invalid(format!("dmsetup: option requires an argument -- '{letter}'"));
                value = Some(if own.is_empty() { next().ok_or_else(missing)? } else { own.to_owned() });
            }
            self.given.push(((*name).to_owned(), value));
        }
        Ok(())
    }
}

/// Returns the letters of a group of short options; `None` for `-` (stdin) and `-h` (help).
fn letters(arg: &str) -> Option<&str> {
    let letters = arg.strip_prefix('-').filter(|letters| !letters.is_empty() && !letters.starts_with('-'));
    letters.filter(|letters| *letters != "h")
}

pub(super) fn parse(args: &[String]) -> Result<Options, Refusal> {
    let mut options = Options {
        command: String::new(),
        names: Vec::new(),
        for_add: Vec::new(),
        given: Vec::new(),
        is_list: false,
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--" {
            // The rest is a command and names, even if they start with a hyphen.
            options.names.extend(args.cloned());
            if options.command.is_empty() && !options.names.is_empty() {
                options.command = options.names.remove(0);
            }
            break;
        }
        let (key, value) = match arg.split_once('=') {
            Some((key, value)) if key.starts_with("--") => (key, Some(value.to_owned())),
            _ => (arg.as_str(), None),
        };
        if FOR_ADD.contains(&key) {
            options.for_add.push(arg.clone());
            // --ublk, --loop and --nbd-device take a value only after `=`.
            if value.is_none() && !matches!(key, "--ublk" | "--loop" | "--nbd-device") {
                options.for_add.extend(args.next().cloned());
            }
            continue;
        }
        if let Some(letters) = letters(arg) {
            options.take_letters(letters, || args.next().cloned())?;
            continue;
        }
        let name = match key.strip_prefix("--") {
            Some(name) if !name.is_empty() => name,
            _ if options.command.is_empty() => {
                options.command.clone_from(arg);
                continue;
            }
            _ => {
                options.names.push(arg.clone());
                continue;
            }
        };
        // As in dmsetup, --help wins over everything else.
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
                let next = args.next().cloned();
                Some(next.ok_or_else(|| invalid(format!("dmsetup: option '{arg}' requires an argument")))?)
            }
            (_, value) => value,
        };
        options.given.push((name.to_owned(), value));
    }
    check(options)
}

fn usage(why: impl Into<String>) -> Refusal {
    Refusal::without_footer(vec![why.into(), USAGE.to_owned()])
}

/// An error for arguments that dmsetup does not have.
fn invalid(why: impl Into<String>) -> Refusal {
    Refusal::without_footer(vec![why.into(), "Couldn't process command line.".to_owned()])
}

fn check(mut options: Options) -> Result<Options, Refusal> {
    if options.command.is_empty() {
        return Err(Refusal::without_footer(vec![USAGE.to_owned()]));
    }
    if let Some((name, why)) = REFUSED_COMMANDS.iter().find(|(name, _)| *name == options.command) {
        return Err(Refusal::of(format!("blockyard: {name} is not supported: {why}")));
    }
    let Some((name, least, most, known)) = COMMANDS.iter().find(|(name, ..)| *name == options.command) else {
        let names = COMMANDS.iter().map(|(name, ..)| *name);
        let near = options::did_you_mean(&options.command, names);
        let near = if near.is_empty() { near } else { format!(" ({})", near.trim_end()) };
        return Err(usage(format!("Unknown command{near}.")));
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
            let text = options.value("options").unwrap_or_default();
            return Err(invalid(format!("Option not recognised: {text}.")));
        }
        if !is_own && !IGNORED.contains(&given) {
            return Err(invalid(format!("dmsetup: unrecognized option '--{given}'")));
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
    // A UUID replaces the name of one device.
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
        return Err(Refusal::without_footer(vec![
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
    fn short_options_combine_with_each_other_and_their_values() {
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
        assert_eq!(parsed("message x 0 -- -f --force").expect("args").names, ["x", "0", "-f", "--force"]);
        assert_eq!(parsed("-v -- info x").expect("args").command, "info");
        for line in ["--help", "ls --help", "--help info x", "create -r --help x"] {
            assert_eq!(parsed(line).expect(line).command, "help", "{line}");
        }
        let error = |line| parsed(line).expect_err(line).0[0].clone();
        assert_eq!(error("info -cx"), "dmsetup: invalid option -- 'x'");
        assert_eq!(error("info -co"), "dmsetup: option requires an argument -- 'o'");
        assert_eq!(error("ls --bogus"), "dmsetup: unrecognized option '--bogus'");
    }

    #[test]
    fn options_without_effect_are_accepted_and_unsupported_ones_rejected() {
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
        let error = |line| parsed(line).expect_err(line).0.join(" ");
        for line in
            ["create -j 252 -m 9 x", "create --mode 0600 x", "ls --exec true", "resume --readahead auto x"]
        {
            assert!(error(line).contains(" has no --"), "{line}: {}", error(line));
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
            assert!(error(line).contains(" has no --"), "{line}: {}", error(line));
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
            let wanted = format!("blockyard: {command} is not supported: ");
            assert!(error(line).starts_with(&wanted), "{line}: {}", error(line));
        }
        assert_eq!(error("remove"), "No device specified.");
    }

    #[test]
    fn setuuid_is_a_switch_at_any_position() {
        for line in ["rename --setuuid x U-1", "rename x --setuuid U-1", "--setuuid rename x U-1"] {
            let options = parsed(line).expect(line);
            assert!(options.has("setuuid"), "{line}");
            assert_eq!(options.names, ["x", "U-1"], "{line}");
        }
    }
}
