//! `recover` and `upgrade`: another process takes a ublk device over, and what there is of devices without a server.

use crate::add;
use crate::args::{Cli, Command, RecoverArgs, ServeArgs, UpgradeArgs};
use crate::attach;
use crate::failure::Failure;
use crate::listing::{block_on, client_of, died, run_dir};
use crate::made::Made;
use crate::page;
use crate::serving;
use crate::supervise;
use clap::Parser;
use engine::change::Change;
use engine::control::{DeviceInfo, ExportInfo};
use engine::rundir::RunDir;
use engine::spec::{Backing, DeviceName, FileFormat, FileSpec, Format, StackSpec};
use engine::topology::Topology;
use engine::ublk::{self, Foreign, Record, RecordError, Words};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How long a server that was asked to leave may take to end.
const LEAVING: Duration = Duration::from_secs(30);
/// How long to sleep before looking again.
const PAUSE: Duration = Duration::from_millis(2);

pub(crate) fn recover(args: &RecoverArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("recover")?;
    let record = load(&run, "recover", &args.name)?;
    if args.supervise && !args.run.watched && (args.foreground || args.run.detached) {
        return supervise::supervise("recover", args.run.detached);
    }
    if client_of(&run, "recover", &args.name).is_ok() {
        let why = "its server is there (to put this program in its place: blockyard upgrade)";
        return Err(Failure::new("recover", &args.name, why));
    }
    if !args.foreground && !args.run.detached {
        return in_background("recover", &record, args.supervise || record.supervised);
    }
    if args.run.detached {
        attach::leave_session("recover")?;
    }
    let fail = |why: &dyn std::fmt::Display| Failure::new("recover", &args.name, why);
    std::env::set_current_dir(&record.folder).map_err(|why| fail(&why))?;
    let topology = topology_of(&record)?;
    let made = Made::by_record(&record, args.run.watched);
    let page = page_of(&record);
    serving::start("recover", topology, args.run, false, Vec::new(), page, made)
}

/// The record of a device that waits for a server, or why there is none.
fn load(run: &RunDir, what: &str, name: &str) -> Result<Record, Failure> {
    let fail = |why: &dyn std::fmt::Display| Failure::new(what, name, why);
    if name.parse::<DeviceName>().is_err() {
        return Err(fail(&RecordError::None));
    }
    let record = Record::load(run, name).map_err(|why| match why {
        // One that was shown by a loop device or as a file is served anew by other words.
        RecordError::None => fail(&died(run, name).unwrap_or_else(|| why.to_string())),
        why => fail(&why),
    })?;
    if !record.is_of_this_boot() {
        record.remove(run);
        return Err(fail(&"its device went when the machine was restarted (add it again)"));
    }
    if !ublk::waits(&record) {
        return Err(fail(&"its device went with its server: it was made without recovery (add it again)"));
    }
    Ok(record)
}

/// What there is to do about a device that waits for a server.
pub(crate) fn waiting(record: &Record) -> String {
    let Record { name, number, .. } = record;
    format!(
        "its server died and /dev/ublkb{number} waits for another (run blockyard recover {name}, or blockyard del {name})"
    )
}

/// What made the device, as a topology of it alone.
fn topology_of(record: &Record) -> Result<Topology, Failure> {
    let mut topology = as_described(record)?;
    for device in &mut topology.devices {
        let StackSpec::File(file) = &mut device.stack else { continue };
        if let Some(other) = &record.file {
            file.path.clone_from(other);
        }
        settle_format(file, record);
    }
    Ok(topology)
}

/// A device keeps the format that it was started with: what its file begins with by now does not decide.
fn settle_format(file: &mut FileSpec, record: &Record) {
    let given = |text: &String| Format::ALL.into_iter().find(|format| format.to_string() == *text);
    if file.format == FileFormat::Probe {
        file.format =
            record.format.as_ref().and_then(given).map_or(FileFormat::Unspecified, FileFormat::Given);
        if !file.may_be_image() {
            file.backing = Backing::Beside;
        }
    }
    // It was accepted as a raw disk when it was first served, and still is one, whatever was written to it since.
    if file.format == FileFormat::Unspecified && file.is_refused_as_raw() {
        file.format = FileFormat::Given(Format::Raw);
    }
}

fn as_described(record: &Record) -> Result<Topology, Failure> {
    let fail = |why: &dyn std::fmt::Display| Failure::new("recover", &record.name, why);
    let name: DeviceName = record.name.parse().map_err(|why| fail(&why))?;
    match &record.words {
        Words::Line(words) => {
            let mut topology =
                crate::plan::topology("recover", &serve_args(words).map_err(|why| fail(&why))?)?;
            topology.rename(0, &name);
            Ok(topology)
        }
        Words::Topology { text, file } => {
            let mut topology = Topology::parse(text, file).map_err(|why| fail(&why))?;
            topology.devices.retain(|device| device.name == name);
            topology.exports.retain(|export| export.device == name);
            if topology.devices.is_empty() {
                return Err(fail(&"the topology that made it does not have it (del it)"));
            }
            Ok(topology)
        }
    }
}

fn serve_args(words: &[String]) -> Result<ServeArgs, String> {
    let line = std::iter::once("blockyard").chain(words.iter().map(String::as_str));
    match Cli::try_parse_from(line).map(|cli| cli.command) {
        Ok(Command::Serve(args) | Command::Add(args)) => Ok(args),
        Ok(_) => Err("the words that made it serve nothing (del it)".to_owned()),
        Err(why) => Err(format!("this version does not take the words that made it: {why}")),
    }
}

/// The page that was served with it, if it still can be: a device that waits does not wait for that.
fn page_of(record: &Record) -> Option<web::Listening> {
    let page = page::again(record.page.as_ref()?);
    page.map_err(|why| why.report()).ok()
}

fn in_background(what: &str, record: &Record, supervised: bool) -> Result<ExitCode, Failure> {
    let mut words = vec![record.name.clone().into()];
    words.extend(supervised.then(|| "--supervise".into()));
    let started = add::start_command("recover", words);
    add::tell(what, &record.name, started.map_err(|why| Failure::new(what, &record.name, why))?)
}

pub(crate) fn upgrade(args: &UpgradeArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("upgrade")?;
    let client = client_of(&run, "upgrade", &args.name)?;
    let record = load(&run, "upgrade", &args.name)?;
    let left = block_on("upgrade", client.change(&args.name, &Change::Leave))?;
    left.map_err(|why| Failure::new("upgrade", &args.name, why))?;
    let started = Instant::now();
    // Whoever ends goes away last.
    while Path::new(&format!("/proc/{}/exe", record.pid)).exists() && started.elapsed() < LEAVING {
        std::thread::sleep(PAUSE);
    }
    in_background("upgrade", &record, record.supervised)
}

/// Take away what a dead server left of a device. `None`: there is nothing of that name.
pub(crate) fn clear(run: &RunDir, name: &str, by_force: bool) -> Option<Result<ExitCode, Failure>> {
    let device: DeviceName = name.parse().ok()?;
    let fail = |why: &dyn std::fmt::Display| Failure::new("del", name, why);
    let record = match Record::load(run, name) {
        Ok(record) => record,
        Err(RecordError::None) => return clear_unknown(run, name, by_force),
        Err(why) => return Some(Err(fail(&why))),
    };
    // While we hold its name nobody else can begin to serve it.
    let claim = match run.claim(&device) {
        Ok(claim) => claim,
        Err(why) => return Some(Err(fail(&why))),
    };
    let cleared = ublk::clear(run, &record, by_force).map_err(|why| fail(&why));
    drop(claim);
    Some(cleared.map(|()| ExitCode::SUCCESS))
}

/// The same for what `list` calls by its node, as nothing here tells of it: the record is lost, or elsewhere.
fn clear_unknown(run: &RunDir, name: &str, by_force: bool) -> Option<Result<ExitCode, Failure>> {
    let number = name.strip_prefix("ublkb")?.parse().ok()?;
    if format!("ublkb{number}") != name || !Path::new(&format!("/dev/ublkc{number}")).exists() {
        return None;
    }
    // One that has a name is taken away by that.
    if Record::all(run).iter().any(|record| record.number == number && record.is_of_this_boot()) {
        return None;
    }
    match ublk::clear_unknown(number, by_force) {
        Ok(true) => Some(Ok(ExitCode::SUCCESS)),
        Ok(false) => None,
        Err(why) => Some(Err(Failure::new("del", name, why))),
    }
}

/// ublk devices that no process of this run directory serves: those that wait for a server, and those of others.
pub(crate) fn unserved(run: &RunDir, served: &[DeviceInfo]) -> Vec<DeviceInfo> {
    let number = |export: &ExportInfo| export.address.strip_prefix("/dev/ublkb")?.parse().ok();
    let ours: Vec<u32> = served.iter().flat_map(|info| &info.exports).filter_map(number).collect();
    let mut records = Record::all(run);
    // What went with its server leaves a number behind, which nobody wants to see.
    records.retain(|record| {
        let served =
            ours.contains(&record.number) || Path::new(&format!("/proc/{}/exe", record.pid)).exists();
        let waits = served || ublk::waits(record);
        // Nobody may begin to serve a device of that name meanwhile, nor have begun to since the record was read.
        if !waits
            && let Some(Ok(_claim)) = record.name.parse().ok().map(|name: DeviceName| run.claim(&name))
            && Record::load(run, &record.name).is_ok_and(|now| now == *record)
        {
            let _ = ublk::clear(run, record, false);
        }
        waits
    });
    let info = |device: Foreign| {
        let record = records.iter().find(|record| record.number == device.number && record.is_of_this_boot());
        info_of(device, record)
    };
    ublk::foreign(&ours).into_iter().map(info).collect()
}

fn info_of(device: Foreign, record: Option<&Record>) -> DeviceInfo {
    let (name, stack) = match record {
        Some(Record { name, .. }) => {
            // One that was stopped has nothing more to be taken over.
            let word = if device.state == "dead" { "del" } else { "recover" };
            (name.clone(), format!("({}: blockyard {word} {name})", device.state))
        }
        None => (format!("ublkb{}", device.number), "(another server's)".to_owned()),
    };
    let (queues, depth) = device.queues;
    let details = BTreeMap::from([
        ("state".to_owned(), device.state),
        ("queues".to_owned(), format!("{queues} of depth {depth}")),
        ("features".to_owned(), device.features),
    ]);
    DeviceInfo {
        name,
        stack,
        layers: Vec::new(),
        size: device.size.0,
        logical_block_size: device.logical_block_size,
        read_only: device.read_only,
        limits: BTreeMap::new(),
        exports: vec![ExportInfo {
            kind: "ublk".to_owned(),
            address: device.path,
            connections: ublk::users_of(device.number),
            tls: "off".to_owned(),
            details,
        }],
        backend: BTreeMap::new(),
        queues: Vec::new(),
        pid: device.pid,
        uptime_ms: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::topology::ExportKind;

    #[test]
    fn a_table_that_was_loaded_elsewhere_has_its_folder_and_the_rest_has_its_own() {
        let words =
            ["serve", "--nbd=unix:d.sock", "--table-text=0 8 linear a.img 0", "--table-base=/elsewhere"];
        let words = Words::Line(words.iter().map(|&word| word.to_owned()).collect());
        let here = std::env::current_dir().expect("a folder");
        let record = Record::new("disk", here.clone(), words, false);
        let topology = topology_of(&record).expect("it makes sense");
        let StackSpec::Table(table) = &topology.devices[0].stack else { panic!("it is a table") };
        assert_eq!(table.base, Path::new("/elsewhere"));
        let ExportKind::Nbd { address, .. } = &topology.exports[0].kind else { panic!("it is NBD") };
        assert_eq!(address.to_string(), format!("unix:{}", here.join("d.sock").display()));
    }

    #[test]
    fn a_device_keeps_the_format_of_its_first_start_whatever_its_file_begins_with_now() {
        let folder = std::env::temp_dir().join(format!("blockyard-recover-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let disk = folder.join("disk");
        let format = |option: &str, first: Option<&str>| {
            let stack = format!("file:{}{option}", disk.display());
            let words = Words::Line(["serve", &stack, "--ublk"].map(str::to_owned).into());
            let mut record = Record::new("disk", "/srv".into(), words, false);
            record.format = first.map(str::to_owned);
            let topology = topology_of(&record).expect("it makes sense");
            let StackSpec::File(file) = &topology.devices[0].stack else { panic!("it is a file") };
            file.format
        };
        std::fs::write(&disk, [0; 512]).expect("a file");
        assert_eq!(format("", None), FileFormat::Unspecified);
        assert_eq!(format(",format=probe", None), FileFormat::Unspecified, "it was raw");
        // A client, or another program, has written a header since.
        std::fs::write(&disk, b"QFI\xfb\0\0\0\x03").expect("a file");
        assert_eq!(format("", None), FileFormat::Given(Format::Raw));
        assert_eq!(format(",ro", None), FileFormat::Given(Format::Raw));
        assert_eq!(format(",format=probe", None), FileFormat::Given(Format::Raw));
        assert_eq!(format(",format=probe", Some("vmdk")), FileFormat::Given(Format::Vmdk));
        assert_eq!(format(",format=qcow2", Some("qcow2")), FileFormat::Given(Format::Qcow2));
        std::fs::remove_dir_all(&folder).expect("it was there");
    }

    #[test]
    fn a_file_that_took_the_place_of_the_first_is_served_with_all_that_was_said_of_that() {
        let file = "/srv/d.toml".into();
        let text = "[device.disk]\nstack = \"file:a.img,ro,offset=512\"\n[[export]]\ndevice = \"disk\"\nublk = \"\"\n";
        let line = ["serve", "file:a.img,ro,offset=512", "--ublk"].map(str::to_owned);
        for words in [Words::Line(line.into()), Words::Topology { text: text.to_owned(), file }] {
            let mut record = Record::new("disk", "/srv".into(), words, false);
            record.file = Some("/other/b.img".into());
            let topology = topology_of(&record).expect("it makes sense");
            assert_eq!(topology.devices[0].stack.to_string(), "file:/other/b.img,offset=512,ro");
        }
    }
}
