//! `blockyard dmsetup`: dmsetup's own commands, output and exit statuses, on our devices that are made from tables.
//!
//! A device is served by a process of its own, made by `create` and gone with `remove`; it is shown as `add` shows what
//! is not told how, or as options of `add` say. What fails is said as dmsetup says it, with the errno that the
//! kernel's driver has for it, and once more with what the kernel would have written into its log.
//!
//! Not here: the kernel's own mapped devices.

mod options;
mod report;

use crate::add;
use crate::failure::{FAILED, print};
use crate::listing::{block_on, client_of, devices, run_dir};
use crate::table::lines;
use engine::change::Change;
use engine::control::{ClientError, ControlClient, ControlError, DeviceInfo};
use engine::tables::{TableAnswer, TableCall, TargetAnswer};
use options::Options;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

pub(crate) use options::USAGE;

/// How often, and after which pause, `remove --retry` tries again.
const RETRIES: u32 = 25;
const RETRY_PAUSE: Duration = Duration::from_millis(200);
const ENXIO: i32 = 6;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;

/// What dmsetup says when a command fails: lines for stderr, before its last words.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) Vec<String>);

impl Refusal {
    fn of(line: impl Into<String>) -> Refusal {
        Refusal(vec![line.into()])
    }

    /// An ioctl that failed: how libdevmapper says it, and why.
    fn ioctl(verb: &str, name: &str, errno: i32, why: &str) -> Refusal {
        if errno == ENXIO {
            return Refusal::of(format!("Device {name} not found"));
        }
        let said = std::io::Error::from_raw_os_error(errno).to_string();
        let said = said.split(" (os error").next().unwrap_or_default();
        let line = format!("device-mapper: {verb} ioctl on {name} failed: {said}");
        Refusal(vec![line, format!("blockyard: {name}: {why}")])
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

pub(crate) fn dmsetup(words: &[String]) -> ExitCode {
    match options::parse(words).and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Refusal(lines)) => {
            lines.iter().for_each(|line| eprintln!("{line}"));
            eprintln!("Command failed.");
            ExitCode::from(FAILED)
        }
    }
}

fn run(options: &Options) -> Result<(), Refusal> {
    match options.command.as_str() {
        "create" => create(options),
        "load" | "reload" => load(options),
        "suspend" => {
            each(options, |name| change("suspend", name, &Change::Suspend { flush: !options.has("noflush") }))
        }
        "resume" => each(options, |name| resume(options, name)),
        "remove" => each(options, |name| remove(options, name)),
        "remove_all" => named(options)?.iter().try_for_each(|(_, info)| remove(options, &info.name)),
        "clear" => each(options, |name| ask("clear", name, &TableCall::Clear).map(drop)),
        "table" => show(options, |inactive| TableCall::Table { inactive }),
        "status" => show(options, |_| TableCall::Status),
        "message" => message(options),
        "info" => report::info(options, named(options)?),
        "ls" => report::ls(options, named(options)?),
        "deps" => report::deps(options, named(options)?),
        "wait" => wait(options),
        "mknodes" => {
            eprintln!("blockyard: nodes of devices come and go with their exports");
            Ok(())
        }
        "targets" => {
            report::targets();
            Ok(())
        }
        "version" => {
            print(&format!("Library version:   blockyard {}\n", env!("CARGO_PKG_VERSION")));
            // The version of device-mapper's interface whose commands these are.
            print("Driver version:    4.50.0\n");
            Ok(())
        }
        "help" => {
            print(&format!("{USAGE}\n"));
            Ok(())
        }
        // `options::parse` knows these and no others.
        other => Err(Refusal::of(format!("Unknown command: {other}"))),
    }
}

/// A device's name, of which paths are made.
fn plain(name: &str) -> &str {
    name.strip_prefix("/dev/mapper/").unwrap_or(name)
}

fn each(options: &Options, mut act: impl FnMut(&str) -> Result<(), Refusal>) -> Result<(), Refusal> {
    options.names.iter().try_for_each(|name| act(plain(name)))
}

fn client(verb: &str, name: &str) -> Result<ControlClient, Refusal> {
    let run = run_dir("dmsetup")?;
    client_of(&run, "dmsetup", name).map_err(|_| Refusal::ioctl(verb, name, ENXIO, ""))
}

fn ask(verb: &str, name: &str, call: &TableCall) -> Result<TableAnswer, Refusal> {
    let client = client(verb, name)?;
    block_on("dmsetup", client.table(name, call))?.map_err(|error| Refusal::client(verb, name, &error))
}

fn change(verb: &str, name: &str, change: &Change) -> Result<(), Refusal> {
    let client = client(verb, name)?;
    block_on("dmsetup", client.change(name, change))?.map_err(|error| Refusal::client(verb, name, &error))
}

/// A device with what its table's side says of it.
pub(super) type Named = (TableAnswer, DeviceInfo);

/// The devices that were named, or else all that are made from tables.
fn named(options: &Options) -> Result<Vec<Named>, Refusal> {
    let run = run_dir("dmsetup")?;
    let all = block_on("dmsetup", devices(&run))?.map_err(|why| Refusal::of(why.to_string()))?;
    let mut found = Vec::new();
    for (client, info) in all {
        let wanted = options.names.is_empty() || options.names.iter().any(|name| plain(name) == info.name);
        if !wanted || !info.stack.starts_with("table:") {
            continue;
        }
        // One that goes meanwhile is not there.
        if let Ok(answer) =
            block_on("dmsetup", client.table(&info.name, &TableCall::Table { inactive: false }))?
        {
            found.push((answer, info));
        }
    }
    for name in options.names.iter().map(|name| plain(name)) {
        if !found.iter().any(|(_, info)| info.name == name) {
            return Err(Refusal::of(format!("Device {name} not found")));
        }
    }
    Ok(found)
}

fn create(options: &Options) -> Result<(), Refusal> {
    let name = plain(&options.names[0]);
    let run = run_dir("dmsetup")?;
    if client_of(&run, "dmsetup", name).is_ok() {
        return Err(Refusal::ioctl("create", name, EBUSY, "there is a device of that name"));
    }
    let mut words: Vec<OsString> = vec!["--name".into(), name.into()];
    if options.has("notable") {
        words.push("--no-table".into());
    } else {
        words.push(format!("--table-text={}", table_text(options)?).into());
    }
    if options.has("readonly") {
        words.push("--table-read-only".into());
    }
    if let Some(uuid) = options.value("uuid") {
        words.push(format!("--table-uuid={uuid}").into());
    }
    words.extend(options.for_add.iter().map(OsString::from));
    let started = add::start(words).map_err(|why| Refusal::of(format!("device-mapper: {why}")))?;
    if started.ended.is_none() {
        if options.has("verbose") {
            print(&started.ready);
        }
        return Ok(());
    }
    let said = format!("device-mapper: reload ioctl on {name} failed: Invalid argument");
    Err(Refusal(std::iter::once(said).chain(started.said.lines().map(str::to_owned)).collect()))
}

/// `--table`, the file that was named, or stdin.
fn table_text(options: &Options) -> Result<String, Refusal> {
    if let Some(text) = options.value("table") {
        // A shell's $'…' is not everyone's: a backslash and n end a line, too.
        return Ok(text.replace("\\n", "\n"));
    }
    let read = match options.names.get(1).map(String::as_str) {
        None | Some("-") => std::io::read_to_string(std::io::stdin().lock()),
        Some(file) => std::fs::read_to_string(file),
    };
    let file = options.names.get(1).map_or("stdin", String::as_str);
    read.map_err(|why| Refusal::of(format!("Couldn't open '{file}' for reading: {why}")))
}

fn load(options: &Options) -> Result<(), Refusal> {
    let name = plain(&options.names[0]);
    let text = table_text(options)?;
    let base = std::env::current_dir().map_err(|why| Refusal::of(why.to_string()))?;
    ask("reload", name, &TableCall::Load { text, base }).map(drop)
}

/// The kernel suspends a device whose table is to be replaced as it was told to here: with a flush, or not.
fn resume(options: &Options, name: &str) -> Result<(), Refusal> {
    let info = ask("resume", name, &TableCall::Info)?.info;
    if info.inactive && !info.suspended && !options.has("noflush") && info.active {
        change("resume", name, &Change::Suspend { flush: true })?;
    }
    change("resume", name, &Change::Resume)
}

fn remove(options: &Options, name: &str) -> Result<(), Refusal> {
    let client = client("remove", name)?;
    if options.has("force") {
        fail_all(name)?;
    }
    let mut left = if options.has("retry") { RETRIES } else { 0 };
    loop {
        let removed = block_on("dmsetup", client.delete(name))?;
        match removed {
            Ok(()) => return Ok(()),
            Err(_) if left > 0 => {
                left -= 1;
                std::thread::sleep(RETRY_PAUSE);
            }
            Err(_) if options.has("deferred") => {
                return ask("remove", name, &TableCall::RemoveLater).map(drop);
            }
            Err(error) => return Err(Refusal::client("remove", name, &error)),
        }
    }
}

/// What `--force` does first: an error table in the place of the one there is, and nothing waited for.
fn fail_all(name: &str) -> Result<(), Refusal> {
    let info = ask("remove", name, &TableCall::Info)?.info;
    if info.size == 0 {
        return Ok(());
    }
    let text = format!("0 {} error", info.size / 512);
    ask("reload", name, &TableCall::Load { text, base: "/".into() })?;
    change("suspend", name, &Change::Suspend { flush: false })?;
    change("resume", name, &Change::Resume)
}

/// The lines of targets of one kind, or of all.
pub(super) fn of_kind(targets: Vec<TargetAnswer>, kind: Option<&str>) -> Vec<TargetAnswer> {
    targets.into_iter().filter(|target| kind.is_none_or(|kind| target.kind == kind)).collect()
}

fn show(options: &Options, call: impl Fn(bool) -> TableCall) -> Result<(), Refusal> {
    let all = options.names.is_empty();
    let names: Vec<String> = if all {
        named(options)?.into_iter().map(|(_, info)| info.name).collect()
    } else {
        options.names.iter().map(|name| plain(name).to_owned()).collect()
    };
    if names.is_empty() {
        print("No devices found\n");
    }
    for name in names {
        let answer = ask("table", &name, &call(options.has("inactive")))?;
        let targets = of_kind(answer.targets, options.value("target"));
        print(&lines(&targets, &if all { format!("{name}: ") } else { String::new() }));
    }
    Ok(())
}

fn message(options: &Options) -> Result<(), Refusal> {
    let [name, sector, words @ ..] = options.names.as_slice() else {
        return Err(Refusal::of("message: NAME SECTOR MESSAGE are missing"));
    };
    let sector = sector.parse().map_err(|_| Refusal::of("invalid sector"))?;
    // The kernel cuts one text into words, however it was given.
    let words: Vec<String> = words.join(" ").split_whitespace().map(str::to_owned).collect();
    if words.is_empty() {
        return Err(Refusal::of("message: there is none"));
    }
    let answer = ask("message", plain(name), &TableCall::Message { sector, words })?;
    if let Some(text) = answer.text {
        print(&format!("{text}\n"));
    }
    Ok(())
}

fn wait(options: &Options) -> Result<(), Refusal> {
    let name = plain(&options.names[0]);
    let event = match options.names.get(1) {
        Some(number) => number.parse().map_err(|_| Refusal::of("invalid event number"))?,
        None => ask("waitevent", name, &TableCall::Info)?.info.events,
    };
    ask("waitevent", name, &TableCall::Wait { event }).map(drop)
}
