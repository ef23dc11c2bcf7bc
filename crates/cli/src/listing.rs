//! `list` and `show`; also finds devices for other commands by asking every server in the run directory.

use crate::args::{ListArgs, ShowArgs};
use crate::failure::{Failure, print};
use crate::recover;
use attach::loop_device::orphaned_files;
use attach::ublk::{self, Record};
use engine::change::limits::QueueLimits;
use engine::control::{ClientError, ControlClient, ControlError, DeviceInfo};
use engine::rundir::{RunDir, RunDirError};
use engine::spec::Bytes;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Number of further requests to a process that closed the connection within its answer, and the pause
/// between them.
const ATTEMPTS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(20);

/// Runs a command's requests on this thread.
pub(crate) fn block_on<F: Future>(what: &str, work: F) -> Result<F::Output, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    Ok(runtime.map_err(|why| Failure::new(what, "", why))?.block_on(work))
}

pub(crate) fn run_dir(what: &str) -> Result<RunDir, Failure> {
    let fail = |why: RunDirError| Failure::new(what, "", why);
    let run = RunDir::locate().map_err(fail)?;
    run.check().map_err(fail)?;
    run.check_readable().map_err(fail)?;
    Ok(run)
}

/// Root's run directory.
const ROOTS: &str = "/run/blockyard";

/// Returns a hint that root may have devices, for a user without devices who cannot read root's run directory.
fn roots_hint(run: &RunDir, is_root: bool, was_given: bool, roots: &Path) -> Option<String> {
    let may_miss = !is_root && !was_given && run.path() != roots && roots.is_dir();
    may_miss.then(|| {
        format!(
            "you have no devices; root has {} and may have some (run: sudo blockyard list)",
            roots.display()
        )
    })
}

/// Returns all devices with the client of the process that serves each. A process that exits meanwhile has none.
pub(crate) async fn devices(run: &RunDir) -> Result<Vec<(ControlClient, DeviceInfo)>, ClientError> {
    let (all, mute) = devices_and_failure(run).await;
    mute.map_or(Ok(all), Err)
}

/// Returns the devices of all processes that answer, and the error of one that does not. Processes are asked in
/// parallel, so a stopped process does not delay the answers of the others.
async fn devices_and_failure(run: &RunDir) -> (Vec<(ControlClient, DeviceInfo)>, Option<ClientError>) {
    let mut asked = tokio::task::JoinSet::new();
    for socket in run.processes() {
        let client = ControlClient::new(socket);
        asked.spawn(async move { (devices_of(&client).await, client) });
    }
    let (mut all, mut mute) = (Vec::new(), None);
    for (answer, client) in asked.join_all().await {
        match answer {
            Ok(devices) => all.extend(devices.into_iter().map(|device| (client.clone(), device))),
            Err(why) => mute = Some(why),
        }
    }
    all.sort_by(|a, b| a.1.name.cmp(&b.1.name));
    (all, mute)
}

async fn devices_of(client: &ControlClient) -> Result<Vec<DeviceInfo>, ClientError> {
    let mut attempts = 0..ATTEMPTS;
    loop {
        match client.devices().await {
            Err(ClientError::Connect { .. }) => return Ok(Vec::new()),
            // If the process is exiting, connecting fails soon. Otherwise its version is incompatible.
            Err(ClientError::Answer { .. }) if attempts.next().is_some() => tokio::time::sleep(PAUSE).await,
            answer => return answer,
        }
    }
}

/// Returns a client of the process that serves the device `name`.
pub(crate) fn client_of(run: &RunDir, what: &str, name: &str) -> Result<ControlClient, Failure> {
    let missing = || Failure::new(what, name, ControlError::NotFound);
    // An invalid name could be a path out of the run directory.
    if name.parse::<engine::spec::DeviceName>().is_err() {
        return Err(missing());
    }
    let link = run.control_link(name);
    if std::os::unix::net::UnixStream::connect(&link).is_err() {
        // Removes the sockets of dead processes.
        run.processes();
        return Err(died(run, name).map_or_else(
            || {
                let near = near_device(name, &crate::complete::names_in(run.path()));
                Failure::new(what, name, format!("{}{near}", ControlError::NotFound))
            },
            |why| Failure::new(what, name, why),
        ));
    }
    Ok(ControlClient::new(link))
}

/// Returns a hint at the device whose name is nearest to `name`; empty if none is similar.
fn near_device(name: &str, names: &[String]) -> String {
    let near = options::did_you_mean(name, names.iter().map(String::as_str));
    if near.is_empty() { near } else { format!("; {}", near.trim_end()) }
}

/// Returns what to do about the device `name`, whose server died; `None` if nothing of such a device is left.
pub(crate) fn died(run: &RunDir, name: &str) -> Option<String> {
    if let Some(record) = Record::load(run, name).ok().filter(ublk::is_recoverable) {
        return Some(recover::waiting(&record));
    }
    let left = !orphaned_files(run, name).is_empty();
    left.then(|| {
        format!("its server died (add it again, or remove what is left of it: blockyard del {name})")
    })
}

pub(crate) fn list(args: &ListArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("list")?;
    let (found, mute) = block_on("list", devices_and_failure(&run))?;
    let mut infos: Vec<DeviceInfo> = found.into_iter().map(|(_, info)| info).collect();
    infos.extend(recover::unserved(&run, &infos));
    if args.output.json {
        print(&json(&infos));
    } else if !infos.is_empty() {
        print(&table(&infos));
    } else if mute.is_none() {
        let was_given = std::env::var_os("BLOCKYARD_RUN").is_some_and(|path| !path.is_empty());
        let hint = roots_hint(&run, rustix::process::geteuid().is_root(), was_given, Path::new(ROOTS));
        hint.inspect(|hint| eprintln!("blockyard: {hint}"));
    }
    // The devices of the other processes are listed before the error.
    mute.map_or(Ok(ExitCode::SUCCESS), |why| Err(Failure::new("list", "", why)))
}

pub(crate) fn show(args: &ShowArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("show")?;
    let client = match client_of(&run, "show", &args.name) {
        Ok(client) => client,
        Err(missing) => {
            let mut others = recover::unserved(&run, &[]).into_iter();
            let info = others.find(|info| info.name == args.name).ok_or(missing)?;
            print(&if args.output.json { json(&info) } else { page(&info) });
            return Ok(ExitCode::SUCCESS);
        }
    };
    let info = block_on("show", client.device(&args.name))?;
    let info = info.map_err(|why| Failure::new("show", &args.name, why))?;
    print(&if args.output.json { json(&info) } else { page(&info) });
    Ok(ExitCode::SUCCESS)
}

fn json<T: serde::Serialize>(value: &T) -> String {
    // Serialization cannot fail: the structures have only text as keys.
    format!("{}\n", serde_json::to_string_pretty(value).unwrap_or_default())
}

/// Formats a device's stack and its layers, from the lowest up: `file:/a.img + delay,read=1ms`. A table is shown by
/// the types of its targets.
pub(crate) fn stacked(info: &DeviceInfo) -> String {
    let stack = match info.stack.strip_prefix("table: ") {
        None => info.stack.clone(),
        Some(lines) => {
            let lines: Vec<&str> = lines.split("; ").collect();
            let mut kinds: Vec<&str> = lines.iter().filter_map(|line| line.split(' ').nth(2)).collect();
            kinds.dedup();
            let count = if lines.len() == 1 { "1 line".to_owned() } else { format!("{} lines", lines.len()) };
            format!("table: {} ({count})", kinds.join(", "))
        }
    };
    std::iter::once(&stack).chain(&info.layers).map(String::as_str).collect::<Vec<_>>().join(" + ")
}

/// Formats devices as columns as wide as their widest entry, with two spaces between, like losetup(8).
fn table(infos: &[DeviceInfo]) -> String {
    let head = ["NAME", "SIZE", "BLOCK", "RO", "CLIENTS", "PID", "STACK", "ADDRESS"].map(str::to_owned);
    let rows = infos.iter().map(|info| {
        let addresses: Vec<&str> = info.exports.iter().map(|export| export.address.as_str()).collect();
        let clients: u64 = info.exports.iter().map(|export| export.connections).sum();
        // Requests to a suspended device hang; `list` is where users search for the reason.
        let held = if info.backend.contains_key("suspended") { " (suspended)" } else { "" };
        let deleted = if info.backend.contains_key("deleted") { " (deleted)" } else { "" };
        [
            info.name.clone(),
            Bytes(info.size).to_string(),
            info.logical_block_size.to_string(),
            u8::from(info.read_only).to_string(),
            clients.to_string(),
            info.pid.to_string(),
            format!("{}{held}{deleted}", stacked(info)),
            addresses.join(" "),
        ]
    });
    let rows: Vec<_> = std::iter::once(head).chain(rows).collect();
    let widths: [usize; 8] =
        std::array::from_fn(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0));
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (i, (cell, width)) in row.iter().zip(widths).enumerate() {
            // Numbers are aligned to the right.
            let _ = if (1..=5).contains(&i) {
                write!(line, "{cell:>width$}  ")
            } else {
                write!(line, "{cell:<width$}  ")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn page(info: &DeviceInfo) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: &str| {
        let _ = writeln!(text, "{key:<32} {value}");
    };
    line("name", &info.name);
    line("stack", &info.stack);
    for layer in &info.layers {
        line("layer", layer);
    }
    line("size", &format!("{} ({} bytes)", Bytes(info.size), info.size));
    line("read-only", if info.read_only { "yes" } else { "no" });
    line("logical block", &info.logical_block_size.to_string());
    line("process", &format!("{}, up {}", info.pid, seconds(info.uptime_ms)));
    for export in &info.exports {
        let clients = if export.connections == 1 { "client" } else { "clients" };
        let tls = if export.tls == "off" { String::new() } else { format!(", TLS {}", export.tls) };
        line(&export.kind, &format!("{} ({} {clients}{tls})", export.address, export.connections));
        for (key, value) in &export.details {
            line(&format!("{} {key}", export.kind), value);
        }
    }
    for (key, value) in info.backend.iter().filter(|(key, _)| *key != "size") {
        match key.as_str() {
            // Shown by the device's own line.
            "read-only" if info.read_only => {}
            // A device with an overlay is writable above a read-only backend.
            "read-only" => line("backend read-only", value),
            _ => line(key, value),
        }
    }
    for (number, queue) in info.queues.iter().enumerate() {
        let why = queue.why.as_ref().map(|why| format!(", {why}")).unwrap_or_default();
        let value = format!(
            "reactor {}, {}{why}, depth {}, {} in flight",
            queue.reactor, queue.engine, queue.depth, queue.in_flight
        );
        line(&format!("queue {number}"), &value);
    }
    // Limits that limit nothing are left out: `limits` shows them.
    for (key, value) in info.limits.iter().filter(|(key, value)| !is_unlimited(key, **value)) {
        line(&format!("limit {key}"), &value.to_string());
    }
    text
}

/// Returns whether a limit has no effect: it is 0 (none, or the device lacks the feature), or the largest
/// number of its field.
fn is_unlimited(name: &str, value: u64) -> bool {
    let field_max = [u64::from(u16::MAX), u64::from(u32::MAX), u64::MAX].contains(&value);
    let is_default = QueueLimits::default().value(name) == Some(value);
    value == 0 || field_max && (is_default || value != u64::from(u16::MAX))
}

fn seconds(milliseconds: u64) -> String {
    format!("{}.{} s", milliseconds / 1000, milliseconds % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_similar_device_is_named() {
        let names = ["disk".to_owned(), "other".to_owned()];
        assert_eq!(near_device("dsik", &names), "; did you mean disk?");
        assert_eq!(near_device("tape", &names), "");
    }

    fn device(stack: &str, layers: &[&str]) -> DeviceInfo {
        DeviceInfo {
            name: "disk".into(),
            stack: stack.into(),
            layers: layers.iter().map(|&layer| layer.to_owned()).collect(),
            size: 1 << 20,
            logical_block_size: 512,
            read_only: false,
            limits: [("max_sectors".to_owned(), 8), ("chunk_sectors".to_owned(), 0)].into(),
            exports: Vec::new(),
            backend: [("read-only".to_owned(), "yes: it has an overlay".to_owned())].into(),
            queues: Vec::new(),
            pid: 1,
            uptime_ms: 0,
        }
    }

    #[test]
    fn unlimited_limits_are_left_out() {
        assert!(is_unlimited("max_discard_sectors", 0) && is_unlimited("max_segment_size", u32::MAX.into()));
        assert!(is_unlimited("seg_boundary_mask", u32::MAX.into()));
        assert!(!is_unlimited("max_sectors", 65535) && !is_unlimited("logical_block_size", 512));
    }

    #[test]
    fn the_stack_is_listed_with_its_layers_and_a_table_by_its_kinds() {
        let over = device("file:/a.img", &["cow,file=/o.img", "split,max_sectors=8"]);
        assert_eq!(stacked(&over), "file:/a.img + cow,file=/o.img + split,max_sectors=8");
        let table = device("table: 0 8 linear /a 0; 8 8 linear /b 0; 16 8 zero", &["kyber"]);
        assert_eq!(stacked(&table), "table: linear, zero (3 lines) + kyber");
        assert_eq!(stacked(&device("table: 0 8 zero", &[])), "table: zero (1 line)");
        assert!(super::table(&[over]).contains("STACK"));
    }

    #[test]
    fn show_has_read_only_once_and_no_limit_that_is_zero() {
        let mut over = device("file:/a.img", &["cow,file=/o.img"]);
        let lines = |info: &DeviceInfo, key: &str| {
            page(info).lines().filter(|line| line.split("  ").next() == Some(key)).count()
        };
        assert_eq!((lines(&over, "read-only"), lines(&over, "backend read-only")), (1, 1));
        over.read_only = true;
        assert_eq!((lines(&over, "read-only"), lines(&over, "backend read-only")), (1, 0));
        assert_eq!((lines(&over, "limit max_sectors"), lines(&over, "limit chunk_sectors")), (1, 0));
    }

    #[test]
    fn a_user_without_devices_gets_a_hint_at_roots_devices() {
        let folder = tempfile::tempdir().expect("a folder");
        let (own, roots) = (RunDir::at(folder.path().join("own")), folder.path().join("root"));
        assert_eq!(roots_hint(&own, false, false, &roots), None, "root has no run directory");
        std::fs::create_dir(&roots).expect("a folder");
        let hint = roots_hint(&own, false, false, &roots).expect("a hint");
        assert!(hint.contains("run: sudo blockyard list"), "{hint}");
        assert_eq!(roots_hint(&own, true, false, &roots), None, "root sees them");
        assert_eq!(roots_hint(&own, false, true, &roots), None, "the user chose the run directory");
        assert_eq!(roots_hint(&RunDir::at(&roots), false, false, &roots), None);
    }
}
