//! `recover` and `upgrade`: another process takes a ublk device over. Also lists and removes devices without a server.

use crate::add;
use crate::args::{Cli, Command, RecoverArgs, ServeArgs, UpgradeArgs};
use crate::failure::{Failure, print};
use crate::launch::Launch;
use crate::listing::{block_on, client_of, died, run_dir};
use crate::page;
use crate::process;
use crate::serving;
use crate::supervise;
use attach::ublk::{self, ForeignDevice, Invocation, Record, RecordError};
use clap::Parser;
use engine::change::Change;
use engine::control::{DeviceInfo, ExportInfo};
use engine::rundir::RunDir;
use engine::spec::{Backing, DeviceName, DiskFileSpec, FileFormat, Format, StackSpec};
use engine::topology::Topology;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time limit for the old server to exit during `upgrade`.
const LEAVING: Duration = Duration::from_secs(30);
/// Interval between polls for the exit of the old server.
const PAUSE: Duration = Duration::from_millis(2);

pub(crate) fn recover(args: &RecoverArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("recover")?;
    if args.list {
        let waits = |record: &Record| record.is_of_this_boot() && is_abandoned(record);
        let names = Record::all(&run).into_iter().filter(waits).map(|record| record.name + "\n");
        print(&names.collect::<String>());
        return Ok(ExitCode::SUCCESS);
    }
    let record = load(&run, "recover", &args.name)?;
    if args.supervise && !args.run.watched && (args.foreground || args.run.detached) {
        return supervise::supervise("recover", args.run.detached);
    }
    if client_of(&run, "recover", &args.name).is_ok() {
        let why = "its server is running (to replace it by this program: blockyard upgrade)";
        return Err(Failure::new("recover", &args.name, why));
    }
    if !args.foreground && !args.run.detached {
        return in_background("recover", &record, args.supervise || record.supervised);
    }
    if args.run.detached {
        process::leave_session("recover")?;
    }
    let fail = |why: &dyn std::fmt::Display| Failure::new("recover", &args.name, why);
    std::env::set_current_dir(&record.folder).map_err(|why| fail(&why))?;
    let topology = topology_of(&record)?;
    let launch = Launch::by_record(&record, args.run.watched);
    let page = page_of(&record);
    serving::start("recover", topology, args.run, false, Vec::new(), page, launch)
}

/// Whether a device has no server and can have another.
fn is_abandoned(record: &Record) -> bool {
    !Path::new(&format!("/proc/{}/exe", record.pid)).exists() && ublk::is_recoverable(record)
}

/// Loads the record of a device that waits for a server, or reports why the device cannot be recovered.
fn load(run: &RunDir, what: &str, name: &str) -> Result<Record, Failure> {
    let fail = |why: &dyn std::fmt::Display| Failure::new(what, name, why);
    if name.parse::<DeviceName>().is_err() {
        return Err(fail(&RecordError::None));
    }
    let record = Record::load(run, name).map_err(|why| match why {
        // Loop and FUSE exports of a dead server have no record: they are added again, not recovered.
        RecordError::None => fail(&died(run, name).unwrap_or_else(|| why.to_string())),
        why => fail(&why),
    })?;
    if !record.is_of_this_boot() {
        record.remove(run);
        return Err(fail(&"its device was removed by a restart of the machine (add it again)"));
    }
    if !ublk::is_recoverable(&record) {
        return Err(fail(
            &"its device was removed when its server died: it was created without recovery (add it again)",
        ));
    }
    Ok(record)
}

/// Returns what to do about a device that waits for a server.
pub(crate) fn waiting(record: &Record) -> String {
    let Record { name, number, .. } = record;
    format!(
        "its server died and /dev/ublkb{number} waits for another (run blockyard recover {name}, or blockyard del {name})"
    )
}

/// Returns why a name cannot be used if the name's device waits for a server. Removes the remains of a device that the
/// kernel removed with its server. The caller must hold the claim of the name.
pub(crate) fn waits_for_a_server(run: &RunDir, name: &DeviceName) -> Option<String> {
    let record = Record::load(run, name.as_str()).ok()?;
    if ublk::is_recoverable(&record) {
        return Some(waiting(&record));
    }
    // The kernel keeps the number of a removed device until the device is deleted.
    let _ = ublk::remove_orphan(run, &record, false);
    None
}

/// Returns the topology of the recorded device alone, with its current file and format.
fn topology_of(record: &Record) -> Result<Topology, Failure> {
    let mut topology = as_described(record)?;
    for device in &mut topology.devices {
        if let Some(text) = &record.stack {
            device.stack = text.parse().map_err(|why| Failure::new("recover", &record.name, why))?;
        }
        let StackSpec::File(file) = &mut device.stack else { continue };
        if let Some(other) = &record.file {
            file.file.path.clone_from(other);
        }
        settle_format(file, record);
    }
    Ok(topology)
}

/// Gives the device the format of its first start: the file's current content must not change it.
fn settle_format(file: &mut DiskFileSpec, record: &Record) {
    let given = |text: &String| Format::ALL.into_iter().find(|format| format.to_string() == *text);
    if file.format == FileFormat::Probe {
        file.format =
            record.format.as_ref().and_then(given).map_or(FileFormat::Unspecified, FileFormat::Given);
        if !file.may_be_image() {
            file.backing = Backing::Beside;
        }
    }
    // The file was accepted as a raw disk at the first start and stays one, even if a client wrote an image header.
    if file.format == FileFormat::Unspecified && file.is_refused_as_raw() {
        file.format = FileFormat::Given(Format::Raw);
    }
}

fn as_described(record: &Record) -> Result<Topology, Failure> {
    let fail = |why: &dyn std::fmt::Display| Failure::new("recover", &record.name, why);
    let name: DeviceName = record.name.parse().map_err(|why| fail(&why))?;
    match &record.invocation {
        Invocation::CommandLine(words) => {
            let mut topology =
                crate::plan::topology("recover", &serve_args(words).map_err(|why| fail(&why))?)?;
            topology.rename(0, &name);
            Ok(topology)
        }
        Invocation::Topology { text, file } => {
            let mut topology = Topology::parse(text, file).map_err(|why| fail(&why))?;
            topology.devices.retain(|device| device.name == name);
            topology.exports.retain(|export| export.device == name);
            if topology.devices.is_empty() {
                return Err(fail(&"its topology does not contain it (remove it: blockyard del)"));
            }
            Ok(topology)
        }
    }
}

fn serve_args(arguments: &[String]) -> Result<ServeArgs, String> {
    let line = std::iter::once("blockyard").chain(arguments.iter().map(String::as_str));
    match Cli::try_parse_from(line).map(|cli| cli.command) {
        Ok(Command::Serve(args) | Command::Add(args)) => Ok(args),
        Ok(_) => Err("its recorded command line is not serve or add (remove it: blockyard del)".to_owned()),
        Err(why) => Err(format!("this version does not accept its recorded command line: {why}")),
    }
}

/// Restores the page that was served with the device. On errors, which are printed, the device is served without it.
fn page_of(record: &Record) -> Option<web::Listening> {
    let page = page::again(record.page.as_ref()?);
    page.map_err(|why| why.report()).ok()
}

fn in_background(what: &str, record: &Record, supervised: bool) -> Result<ExitCode, Failure> {
    let mut arguments = vec![record.name.clone().into()];
    arguments.extend(supervised.then(|| "--supervise".into()));
    let started = add::start_command("recover", arguments);
    add::report(what, &record.name, started.map_err(|why| Failure::new(what, &record.name, why))?)
}

pub(crate) fn upgrade(args: &UpgradeArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("upgrade")?;
    let client = client_of(&run, "upgrade", &args.name)?;
    if matches!(Record::load(&run, &args.name), Err(RecordError::None)) {
        let why = "only a ublk device can be handed to another program while it is served (end its server, and start the device \
                   with this program)";
        return Err(Failure::new("upgrade", &args.name, why));
    }
    let record = load(&run, "upgrade", &args.name)?;
    let left = block_on("upgrade", client.change(&args.name, &Change::HandOver))?;
    left.map_err(|why| Failure::new("upgrade", &args.name, why))?;
    let started = Instant::now();
    // /proc/PID/exe is the last to disappear, after the process has closed its files.
    while Path::new(&format!("/proc/{}/exe", record.pid)).exists() && started.elapsed() < LEAVING {
        std::thread::sleep(PAUSE);
    }
    in_background("upgrade", &record, record.supervised)
}

/// Removes what a dead server left of a device; `None` if nothing of that name is left.
pub(crate) fn clear(run: &RunDir, name: &str, by_force: bool) -> Option<Result<ExitCode, Failure>> {
    let device: DeviceName = name.parse().ok()?;
    let fail = |why: &dyn std::fmt::Display| Failure::new("del", name, why);
    let record = match Record::load(run, name) {
        Ok(record) => record,
        Err(RecordError::None) => return clear_unknown(run, name, by_force),
        Err(why) => return Some(Err(fail(&why))),
    };
    // While the name is claimed, no other process can start to serve the device.
    let claim = match run.claim(&device) {
        Ok(claim) => claim,
        Err(why) => return Some(Err(fail(&why))),
    };
    let cleared = ublk::remove_orphan(run, &record, by_force).map_err(|why| fail(&why));
    drop(claim);
    Some(cleared.map(|()| ExitCode::SUCCESS))
}

/// Removes a dead ublk device without a record in this run directory, which `list` shows by its node (`ublkb0`).
fn clear_unknown(run: &RunDir, name: &str, by_force: bool) -> Option<Result<ExitCode, Failure>> {
    let number = name.strip_prefix("ublkb")?.parse().ok()?;
    if format!("ublkb{number}") != name || !Path::new(&format!("/dev/ublkc{number}")).exists() {
        return None;
    }
    // A device with a record is removed by its name.
    if Record::all(run).iter().any(|record| record.number == number && record.is_of_this_boot()) {
        return None;
    }
    match ublk::remove_unrecorded(number, by_force) {
        Ok(true) => Some(Ok(ExitCode::SUCCESS)),
        Ok(false) => None,
        Err(why) => Some(Err(Failure::new("del", name, why))),
    }
}

/// Returns ublk devices that no process of this run directory serves: waiting for a server, or served by others.
pub(crate) fn unserved(run: &RunDir, served: &[DeviceInfo]) -> Vec<DeviceInfo> {
    let number = |export: &ExportInfo| export.address.strip_prefix("/dev/ublkb")?.parse().ok();
    let ours: Vec<u32> = served.iter().flat_map(|info| &info.exports).filter_map(number).collect();
    let mut records = Record::all(run);
    // The kernel keeps the number of a device that it removed with its server; such records are deleted here.
    records.retain(|record| {
        let served =
            ours.contains(&record.number) || Path::new(&format!("/proc/{}/exe", record.pid)).exists();
        let waits = served || ublk::is_recoverable(record);
        // Under the claim no process can start to serve the name; the record must still be the one read before.
        if !waits
            && let Some(Ok(_claim)) = record.name.parse().ok().map(|name: DeviceName| run.claim(&name))
            && Record::load(run, &record.name).is_ok_and(|now| now == *record)
        {
            let _ = ublk::remove_orphan(run, record, false);
        }
        waits
    });
    let info = |device: ForeignDevice| {
        let record = records.iter().find(|record| record.number == device.number && record.is_of_this_boot());
        info_of(device, record)
    };
    ublk::foreign_devices(&ours).into_iter().map(info).collect()
}

fn info_of(device: ForeignDevice, record: Option<&Record>) -> DeviceInfo {
    let (name, stack) = match record {
        Some(Record { name, .. }) => {
            // A stopped device cannot be recovered.
            let command = if device.state == "dead" { "del" } else { "recover" };
            (name.clone(), format!("({}: blockyard {command} {name})", device.state))
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
            counts: Default::default(),
            sessions: Default::default(),
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
    use engine::spec::NbdExportSpec;
    use engine::topology::ExportKind;

    #[test]
    fn a_loaded_table_keeps_its_base_and_exports_keep_theirs() {
        let line =
            ["serve", "--nbd=unix:d.sock", "--table-text=0 8 linear a.img 0", "--table-base=/elsewhere"];
        let words = Invocation::CommandLine(line.iter().map(|&argument| argument.to_owned()).collect());
        let here = std::env::current_dir().expect("a folder");
        let record = Record::new("disk", here.clone(), words, false);
        let topology = topology_of(&record).expect("the record is valid");
        let StackSpec::Table(table) = &topology.devices[0].stack else { panic!("it is a table") };
        assert_eq!(table.base, Path::new("/elsewhere"));
        let ExportKind::Nbd(NbdExportSpec { address, .. }) = &topology.exports[0].kind else {
            panic!("it is NBD")
        };
        assert_eq!(address.to_string(), format!("unix:{}", here.join("d.sock").display()));
    }

    #[test]
    fn a_recovered_device_keeps_the_format_of_its_first_start() {
        let folder = std::env::temp_dir().join(format!("blockyard-recover-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let disk = folder.join("disk");
        let format = |option: &str, first: Option<&str>| {
            let stack = format!("file:{}{option}", disk.display());
            let words = Invocation::CommandLine(["serve", &stack, "--ublk"].map(str::to_owned).into());
            let mut record = Record::new("disk", "/srv".into(), words, false);
            record.format = first.map(str::to_owned);
            let topology = topology_of(&record).expect("the record is valid");
            let StackSpec::File(file) = &topology.devices[0].stack else { panic!("it is a file") };
            file.format
        };
        std::fs::write(&disk, [0; 512]).expect("a file");
        assert_eq!(format("", None), FileFormat::Unspecified);
        assert_eq!(format(",format=probe", None), FileFormat::Unspecified, "it was raw");
        // A client, or another program, has written a header after the first start.
        std::fs::write(&disk, b"QFI\xfb\0\0\0\x03").expect("a file");
        assert_eq!(format("", None), FileFormat::Given(Format::Raw));
        assert_eq!(format(",ro", None), FileFormat::Given(Format::Raw));
        assert_eq!(format(",format=probe", None), FileFormat::Given(Format::Raw));
        assert_eq!(format(",format=probe", Some("vmdk")), FileFormat::Given(Format::Vmdk));
        assert_eq!(format(",format=qcow2", Some("qcow2")), FileFormat::Given(Format::Qcow2));
        std::fs::remove_dir_all(&folder).expect("it was there");
    }

    #[test]
    fn a_replaced_file_keeps_the_options_of_the_first() {
        let file = "/srv/d.toml".into();
        let text = "[device.disk]\nstack = \"file:a.img,ro,offset=512\"\n[[export]]\ndevice = \"disk\"\nublk = \"\"\n";
        let line = ["serve", "file:a.img,ro,offset=512", "--ublk"].map(str::to_owned);
        for words in
            [Invocation::CommandLine(line.into()), Invocation::Topology { text: text.to_owned(), file }]
        {
            let mut record = Record::new("disk", "/srv".into(), words, false);
            record.file = Some("/other/b.img".into());
            let topology = topology_of(&record).expect("the record is valid");
            assert_eq!(topology.devices[0].stack.to_string(), "file:/other/b.img,offset=512,ro");
        }
    }
}
