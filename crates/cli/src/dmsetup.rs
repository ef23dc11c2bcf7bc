//! `blockyard dmsetup`: the commands, output and exit statuses of dmsetup(8) for devices created from tables.
//!
//! `create` starts a process that serves the device, with the exports that `add` uses by default or that
//! options of `add` specify; `remove` ends it. Errors have dmsetup's text with the errno of the kernel's
//! driver, followed by the reason that the kernel would write to its log.
//!
//! The mapped devices of the kernel are not covered.

mod concise;
mod grid;
mod lvm;
mod options;
mod report;
mod select;
mod tree;

use crate::add;
use crate::failure::{FAILED, print};
use crate::listing::{block_on, client_of, devices, run_dir};
use crate::table::lines;
use engine::change::Change;
use engine::control::{ClientError, ControlClient, ControlError, DeviceInfo};
use engine::spec::{DeviceName, TableSpec};
use engine::tables::{TableAnswer, TableCall, TargetAnswer};
use options::Options;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

pub(crate) use options::USAGE;

/// How often `remove --retry` tries again, and the pause between attempts.
const RETRIES: u32 = 25;
const RETRY_PAUSE: Duration = Duration::from_millis(200);
const ENXIO: i32 = 6;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;

/// The error output of a command: lines for stderr, and whether `Command failed.` follows.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) Vec<String>, pub(super) bool);

impl Refusal {
    fn of(line: impl Into<String>) -> Refusal {
        Refusal(vec![line.into()], true)
    }

    /// An error without the line `Command failed.`.
    fn without_footer(lines: Vec<String>) -> Refusal {
        Refusal(lines, false)
    }

    /// A failed ioctl in libdevmapper's format, followed by the reason.
    fn ioctl(verb: &str, name: &str, errno: i32, why: &str) -> Refusal {
        Refusal::ioctl_on(verb, &format!("{name} "), errno, &format!("{name}: {why}"), why.is_empty())
    }

    fn ioctl_on(verb: &str, device: &str, errno: i32, why: &str, is_plain: bool) -> Refusal {
        let text = std::io::Error::from_raw_os_error(errno).to_string();
        let text = text.split(" (os error").next().unwrap_or_default();
        let mut lines = vec![format!("device-mapper: {verb} ioctl on {device} failed: {text}")];
        if !is_plain {
            lines.push(format!("blockyard: {why}"));
        }
        Refusal(lines, true)
    }

    fn client(verb: &str, name: &str, error: &ClientError) -> Refusal {
        match error {
            ClientError::Refused(ControlError::NotFound) | ClientError::Connect { .. } => {
                Refusal::ioctl(verb, name, ENXIO, "")
            }
            ClientError::Refused(ControlError::Refused { errno, why }) => {
                Refusal::ioctl(verb, name, *errno, why)
            }
            ClientError::Refused(ControlError::Busy(why) | ControlError::Failed(why)) => {
                Refusal::ioctl(verb, name, EBUSY, why)
            }
            other => Refusal::ioctl(verb, name, EINVAL, &other.to_string()),
        }
    }
}

impl From<crate::failure::Failure> for Refusal {
    fn from(failure: crate::failure::Failure) -> Refusal {
        Refusal::of(failure.to_string())
    }
}

pub(crate) fn dmsetup(args: &[String]) -> ExitCode {
    match options::parse(args).and_then(|mut options| {
        by_uuid(&mut options)?;
        by_field(&mut options)?;
        run(&options)
    }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Refusal(lines, failed)) => {
            lines.iter().for_each(|line| eprintln!("{line}"));
            if failed {
                eprintln!("Command failed.");
            }
            ExitCode::from(FAILED)
        }
    }
}

fn run(options: &Options) -> Result<(), Refusal> {
    match options.command.as_str() {
        "create" if options.has("concise") => create_concise(options),
        "create" => create(options),
        "load" | "reload" => load(options),
        "suspend" => {
            each(options, |name| {
                change("suspend", name, &Change::Suspend { flush: !options.has("noflush") })
            })?;
            show_verbose(options)
        }
        "resume" => {
            each(options, |name| resume(options, name))?;
            show_verbose(options)
        }
        "rename" => rename(options),
        "wipe_table" => each(options, fail_all),
        "remove" => each(options, |name| remove(options, name)),
        "remove_all" => named(options)?.iter().try_for_each(|(_, info)| remove(options, &info.name)),
        "clear" => each(options, |name| table_call("clear", name, &TableCall::Clear).map(drop)),
        "table" if options.has("concise") => show_concise(options),
        "table" => show(options, |inactive| TableCall::Table { inactive }),
        "status" => show(options, |_| TableCall::Status),
        "message" => message(options),
        "info" => report::info(options, named(options)?),
        "ls" => report::ls(options, named(options)?),
        "deps" => report::deps(options, named(options)?),
        "wait" => wait(options),
        // Device nodes are created and removed by exports.
        "mknodes" => Ok(()),
        "targets" => {
            report::targets();
            Ok(())
        }
        "target-version" => report::target_versions(&options.names),
        "version" => {
            print(&format!("Library version:   blockyard {}\n", env!("CARGO_PKG_VERSION")));
            // The version of the device-mapper interface that these commands belong to.
            print("Driver version:    4.50.0\n");
            Ok(())
        }
        "help" => {
            print(&format!("{USAGE}\n"));
            Ok(())
        }
        // `options::parse` rejects all other commands.
        other => Err(Refusal::of(format!("Unknown command: {other}"))),
    }
}

/// Returns a device's name without the folder of device nodes.
fn plain(name: &str) -> &str {
    name.strip_prefix("/dev/mapper/").unwrap_or(name)
}

/// Replaces `--uuid` by the name of the device, as the first name.
fn by_uuid(options: &mut Options) -> Result<(), Refusal> {
    let Some(uuid) = options.value("uuid").filter(|_| options.command != "create") else { return Ok(()) };
    let found = all()?.into_iter().find(|(answer, _)| answer.info.uuid == uuid);
    let Some((_, info)) = found else {
        let verb = match options.command.as_str() {
            "info" | "status" | "ls" => return Err(Refusal::of("Device does not exist.")),
            "load" => "reload",
            "wait" => "waitevent",
            other => other,
        };
        return Err(Refusal::ioctl_on(verb, &format!(" {uuid}"), ENXIO, "", true));
    };
    options.names.insert(0, info.name);
    Ok(())
}

/// Replaces the names by those of devices that match `-S`; if names were given, only by matching ones among
/// them.
fn by_field(options: &mut Options) -> Result<(), Refusal> {
    if !options.selects() {
        return Ok(());
    }
    let all = all()?;
    let known: Vec<String> = all.iter().map(|(_, info)| info.name.clone()).collect();
    let found: Vec<String> = report::selected(options, all)?.into_iter().map(|(_, info)| info.name).collect();
    let named = options.names.len();
    options.names = chosen(std::mem::take(&mut options.names), &known, found);
    // A single named device is shown as without a selection.
    options.is_list = named != 1 || options.names.is_empty();
    Ok(())
}

/// Returns the named devices that were found, or all found ones if none were named. Unknown names stay, so
/// that the command reports them.
fn chosen(named: Vec<String>, known: &[String], found: Vec<String>) -> Vec<String> {
    if named.is_empty() {
        return found;
    }
    let is_selected = |name: &String| {
        let is = |other: &String| other == plain(name);
        found.iter().any(is) || !known.iter().any(is)
    };
    named.into_iter().filter(is_selected).collect()
}

/// Shows the state of the devices after the command, if `--verbose` is set.
fn show_verbose(options: &Options) -> Result<(), Refusal> {
    if options.has("verbose") { report::info(options, named(options)?) } else { Ok(()) }
}

fn each(options: &Options, mut act: impl FnMut(&str) -> Result<(), Refusal>) -> Result<(), Refusal> {
    options.names.iter().try_for_each(|name| act(plain(name)))
}

fn client(verb: &str, name: &str) -> Result<ControlClient, Refusal> {
    let run = run_dir("dmsetup")?;
    client_of(&run, "dmsetup", name).map_err(|_| Refusal::ioctl(verb, name, ENXIO, ""))
}

fn table_call(verb: &str, name: &str, call: &TableCall) -> Result<TableAnswer, Refusal> {
    let client = client(verb, name)?;
    block_on("dmsetup", client.table(name, call))?.map_err(|error| Refusal::client(verb, name, &error))
}

fn change(verb: &str, name: &str, change: &Change) -> Result<(), Refusal> {
    let client = client(verb, name)?;
    block_on("dmsetup", client.change(name, change))?.map_err(|error| Refusal::client(verb, name, &error))
}

/// A device with the state of its table.
pub(super) type TableDevice = (TableAnswer, DeviceInfo);

/// Returns all devices created from tables.
fn all() -> Result<Vec<TableDevice>, Refusal> {
    let run = run_dir("dmsetup")?;
    let all = block_on("dmsetup", devices(&run))?.map_err(|why| Refusal::of(why.to_string()))?;
    let mut found = Vec::new();
    for (client, info) in all.into_iter().filter(|(_, info)| info.stack.starts_with("table:")) {
        let call = TableCall::Table { inactive: false };
        // A device that was removed meanwhile is skipped.
        if let Ok(answer) = block_on("dmsetup", client.table(&info.name, &call))? {
            found.push((answer, info));
        }
    }
    Ok(found)
}

/// Returns the named devices, or all devices created from tables.
fn named(options: &Options) -> Result<Vec<TableDevice>, Refusal> {
    let mut found = all()?;
    if options.names.is_empty() && options.is_list {
        return Ok(Vec::new());
    }
    if options.names.is_empty() {
        return Ok(found);
    }
    let names: Vec<&str> = options.names.iter().map(|name| plain(name)).collect();
    for name in &names {
        if !found.iter().any(|(_, info)| info.name == *name) {
            return Err(match options.command.as_str() {
                "deps" | "table" => Refusal::ioctl(&options.command, name, ENXIO, ""),
                _ => Refusal::of("Device does not exist."),
            });
        }
    }
    found.retain(|(_, info)| names.contains(&info.name.as_str()));
    found.sort_by_key(|(_, info)| names.iter().position(|name| *name == info.name));
    Ok(found)
}

fn create(options: &Options) -> Result<(), Refusal> {
    let name = options.names.first().ok_or(Refusal::of("Please provide a name for the new device."))?;
    let table = if options.has("notable") { None } else { Some(table_text(options)?) };
    let uuid = options.value("uuid").unwrap_or_default();
    create_one(options, plain(name), uuid, table.as_deref(), options.has("readonly"))
}

fn create_concise(options: &Options) -> Result<(), Refusal> {
    let text = match options.names.first() {
        Some(text) => text.clone(),
        None => std::io::read_to_string(std::io::stdin().lock())
            .map_err(|why| Refusal::of(format!("Failed to fill buffer: {why}")))?,
    };
    let devices = concise::parse(&text)?;
    devices
        .iter()
        .try_for_each(|one| create_one(options, &one.name, &one.uuid, Some(&one.table), one.read_only))
}

/// Starts a process that serves a device. `table`: `None` creates the device without a table.
fn create_one(
    options: &Options,
    name: &str,
    uuid: &str,
    table: Option<&str>,
    read_only: bool,
) -> Result<(), Refusal> {
    check_name(name)?;
    let busy = |why| Refusal::ioctl_on("create", &format!("{name} {uuid}"), EBUSY, why, false);
    let run = run_dir("dmsetup")?;
    if client_of(&run, "dmsetup", name).is_ok() {
        return Err(busy(&format!("{name}: a device with this name exists")));
    }
    if !uuid.is_empty() && all()?.iter().any(|(answer, _)| answer.info.uuid == uuid) {
        return Err(busy(&format!("{name}: a device with this uuid exists")));
    }
    let mut args: Vec<OsString> = vec!["--name".into(), name.into()];
    match table {
        None => args.push("--no-table".into()),
        Some(table) => args.push(format!("--table-text={table}").into()),
    }
    if read_only {
        args.push("--table-read-only".into());
    }
    if !uuid.is_empty() {
        args.push(format!("--table-uuid={uuid}").into());
    }
    args.extend(options.for_add.iter().map(OsString::from));
    let started = add::start(args).map_err(|why| Refusal::of(format!("device-mapper: {why}")))?;
    if started.ended.is_none() {
        if options.has("verbose") {
            print(&started.ready);
        }
        return Ok(());
    }
    let text = format!("device-mapper: reload ioctl on {name} (0:0) failed: Invalid argument");
    Err(Refusal(std::iter::once(text).chain(started.stderr.lines().map(str::to_owned)).collect(), true))
}

fn check_name(name: &str) -> Result<(), Refusal> {
    if name.contains('/') {
        return Err(Refusal::of(format!("Name \"{name}\" invalid. It contains \"/\".")));
    }
    let named = name.parse::<DeviceName>();
    named.map(drop).map_err(|why| Refusal::of(format!("Name \"{name}\" invalid. {why}")))
}

/// Changes the name of a device, or sets its UUID.
fn rename(options: &Options) -> Result<(), Refusal> {
    let [name, to] = options.names.as_slice() else { return Err(Refusal::of("No device specified.")) };
    let name = plain(name);
    if options.has("setuuid") {
        // As in the kernel, the new UUID must not be in use, not even by the device itself.
        let has_it = |info: &engine::tables::TableInfo| !to.is_empty() && info.uuid == *to;
        if let Some((_, other)) = all()?.iter().find(|(answer, _)| has_it(&answer.info)) {
            let why = format!("{} has this uuid", other.name);
            return Err(Refusal::ioctl("rename", name, EBUSY, &why));
        }
        return table_call("rename", name, &TableCall::SetUuid { uuid: to.clone() }).map(drop);
    }
    let to = plain(to);
    check_name(to)?;
    table_call("rename", name, &TableCall::Rename { to: to.to_owned() }).map(drop)
}

/// Returns the table of `--table`, the named file, or stdin.
fn table_text(options: &Options) -> Result<String, Refusal> {
    if let Some(text) = options.value("table") {
        // Not every shell has $'…', so \n separates lines, too.
        return checked(text.replace("\\n", "\n"), "");
    }
    let read = match options.names.get(1).map(String::as_str) {
        None | Some("-") => std::io::read_to_string(std::io::stdin().lock()),
        Some(file) => std::fs::read_to_string(file),
    };
    let file = options.names.get(1).map_or("stdin", String::as_str);
    let text = read.map_err(|_| Refusal::of(format!("Couldn't open '{file}' for reading.")))?;
    checked(text, if matches!(file, "stdin" | "-") { "on stdin" } else { file })
}

/// Rejects text that does not consist of table lines before it reaches the device.
fn checked(text: String, file: &str) -> Result<String, Refusal> {
    let wrong = text.parse::<TableSpec>().err().map(|error| error.why);
    match wrong.as_deref().and_then(|why| why.strip_suffix(" of the table")) {
        Some(why) if why.starts_with("Invalid format on line ") => {
            Err(Refusal::of(format!("{why} of table {file}.")))
        }
        // The device reports all other errors.
        _ => Ok(text),
    }
}

fn load(options: &Options) -> Result<(), Refusal> {
    let name = plain(options.names.first().ok_or(Refusal::of("Please specify device."))?);
    let text = table_text(options)?;
    let base = std::env::current_dir().map_err(|why| Refusal::of(why.to_string()))?;
    table_call("reload", name, &TableCall::Load { text, base }).map(drop)
}

/// As in the kernel, loading a table into a running device suspends it first, with or without a flush.
fn resume(options: &Options, name: &str) -> Result<(), Refusal> {
    let info = table_call("resume", name, &TableCall::Info)?.info;
    if info.inactive && !info.suspended && !options.has("noflush") && info.active {
        change("resume", name, &Change::Suspend { flush: true })?;
    }
    change("resume", name, &Change::Resume)
}

fn remove(options: &Options, name: &str) -> Result<(), Refusal> {
    if options.has("force")
        && let Err(Refusal(lines, _)) = fail_all(name)
    {
        // As in dmsetup, the device is removed anyway, if possible.
        lines.iter().for_each(|line| eprintln!("{line}"));
    }
    let client = client("remove", name)?;
    let mut left = if options.has("retry") { RETRIES } else { 0 };
    loop {
        let removed = block_on("dmsetup", client.delete(name))?;
        match removed {
            Ok(()) => return Ok(()),
            // The device was removed, but its last flush failed. The kernel does not report that.
            Err(ClientError::Refused(ControlError::Failed(why))) if is_removed(&client, name)? => {
                eprintln!("blockyard: {name}: {why}");
                return Ok(());
            }
            Err(_) if left > 0 => {
                left -= 1;
                std::thread::sleep(RETRY_PAUSE);
            }
            Err(_) if options.has("deferred") => {
                return table_call("remove", name, &TableCall::RemoveLater).map(drop);
            }
            Err(error) => return Err(Refusal::client("remove", name, &error)),
        }
    }
}

/// Returns whether the process no longer serves the device, or has ended.
fn is_removed(client: &ControlClient, name: &str) -> Result<bool, Refusal> {
    let answer = block_on("dmsetup", client.table(name, &TableCall::Info))?;
    Ok(matches!(answer, Err(ClientError::Refused(ControlError::NotFound) | ClientError::Connect { .. })))
}

/// Replaces the table by an error table without waiting for requests (`--force`, `wipe_table`).
fn fail_all(name: &str) -> Result<(), Refusal> {
    let info = table_call("table", name, &TableCall::Info).map_err(|mut refusal| {
        refusal.0.extend(refusal.0.first().map(|line| line.replacen("table ioctl", "reload ioctl", 1)));
        refusal
    })?;
    let info = info.info;
    if info.size == 0 {
        return Ok(());
    }
    let text = format!("0 {} error", info.size / 512);
    table_call("reload", name, &TableCall::Load { text, base: "/".into() })?;
    change("suspend", name, &Change::Suspend { flush: false })?;
    change("resume", name, &Change::Resume)
}

/// Returns the targets of one kind, or all targets.
pub(super) fn targets_of_kind(targets: Vec<TargetAnswer>, kind: Option<&str>) -> Vec<TargetAnswer> {
    targets.into_iter().filter(|target| kind.is_none_or(|kind| target.kind == kind)).collect()
}

fn show(options: &Options, call: impl Fn(bool) -> TableCall) -> Result<(), Refusal> {
    let found = named(options)?;
    if found.is_empty() && !options.is_list {
        print("No devices found\n");
    }
    let kind = options.value("target");
    for (known, info) in found {
        let answer = table_call("table", &info.name, &call(options.has("inactive")))?;
        let prefix = match options.names.as_slice() {
            [_] if !options.is_list => String::new(),
            _ => format!("{}: ", info.name),
        };
        if options.has("verbose") {
            print(&report::facts(&known, &info));
        }
        let targets = targets_of_kind(answer.targets, kind);
        if targets.is_empty() && kind.is_none() {
            print(&format!("{prefix}\n"));
        }
        print(&lines(&targets, &prefix));
    }
    Ok(())
}

fn show_concise(options: &Options) -> Result<(), Refusal> {
    let found = named(options)?;
    if found.is_empty() {
        print("No devices found\n");
        return Ok(());
    }
    let numbered = found.into_iter().map(|named| {
        let (_, minor) = report::numbers(&named.1, &named.0.info);
        (named, minor)
    });
    print(&format!("{}\n", concise::text(&numbered.collect::<Vec<_>>())));
    Ok(())
}

fn message(options: &Options) -> Result<(), Refusal> {
    let [name, sector, args @ ..] = options.names.as_slice() else {
        return Err(Refusal::of("Incorrect number of arguments."));
    };
    let sector = sector.parse().map_err(|_| Refusal::of("Invalid sector."))?;
    if args.is_empty() {
        let known = table_call("message", plain(name), &TableCall::Info);
        let Refusal(lines, failed) =
            known.err().unwrap_or_else(|| Refusal::ioctl("message", plain(name), EINVAL, ""));
        let first = std::iter::once("No message supplied.".to_owned());
        return Err(Refusal(first.chain(lines).collect(), failed));
    }
    // The kernel splits the message at spaces, however it was passed.
    let args: Vec<String> = args.join(" ").split_whitespace().map(str::to_owned).collect();
    let answer = table_call("message", plain(name), &TableCall::Message { sector, arguments: args })?;
    if let Some(text) = answer.text {
        print(&format!("{}\n", text.trim_end_matches('\n')));
    }
    Ok(())
}

fn wait(options: &Options) -> Result<(), Refusal> {
    let name = plain(&options.names[0]);
    let event = match options.names.get(1) {
        Some(number) => number.parse().map_err(|_| Refusal::of("invalid event number"))?,
        None => table_call("waitevent", name, &TableCall::Info)?.info.events,
    };
    table_call("waitevent", name, &TableCall::Wait { event })?;
    if options.has("verbose") {
        let (answer, info) = all()?
            .into_iter()
            .find(|(_, info)| info.name == name)
            .ok_or(Refusal::of("Device does not exist."))?;
        return report::info(options, vec![(answer, info)]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_filters_named_devices() {
        let args = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        for (named, found, wanted) in [
            ("", "one two", "one two"),
            ("", "", ""),
            ("one", "two", ""),
            ("one", "", ""),
            ("two one", "one two", "two one"),
            ("/dev/mapper/one two", "one", "/dev/mapper/one"),
            ("nosuch one", "two", "nosuch"),
        ] {
            assert_eq!(chosen(args(named), &args("one two"), args(found)), args(wanted), "{named}");
        }
    }
}
