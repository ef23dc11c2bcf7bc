//! `list` and `show`, and how commands find devices: every process in the run directory is asked.

use crate::args::{ListArgs, ShowArgs};
use crate::failure::{Failure, print};
use crate::recover;
use engine::control::{ClientError, ControlClient, ControlError, DeviceInfo};
use engine::loop_device::dead_files;
use engine::rundir::{RunDir, RunDirError};
use engine::spec::Bytes;
use engine::ublk::{self, Record};
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// How often a process is asked again that broke off its answer, and after how long.
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

/// Where root's devices are.
const ROOTS: &str = "/run/blockyard";

/// Says that root may have devices, to a user who has none and cannot see those of root.
fn roots_hint(run: &RunDir, is_root: bool, was_given: bool, roots: &Path) -> Option<String> {
    let may_miss = !is_root && !was_given && run.path() != roots && roots.is_dir();
    may_miss.then(|| {
        format!(
            "you have no devices; root has {} and may have some (run: sudo blockyard list)",
            roots.display()
        )
    })
}

/// All devices, with the process that has each. A process that ends while it is asked has none.
pub(crate) async fn devices(run: &RunDir) -> Result<Vec<(ControlClient, DeviceInfo)>, ClientError> {
    let (all, mute) = devices_told(run).await;
    mute.map_or(Ok(all), Err)
}

/// Those of the processes that tell theirs, and why one did not. All are asked at once: one that has stopped keeps nobody
/// waiting for the others as well.
async fn devices_told(run: &RunDir) -> (Vec<(ControlClient, DeviceInfo)>, Option<ClientError>) {
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
            // Is it ending, or does it speak another language? One that ends soon does not answer at all.
            Err(ClientError::Answer { .. }) if attempts.next().is_some() => tokio::time::sleep(PAUSE).await,
            answer => return answer,
        }
    }
}

/// The process that has the device of that name.
pub(crate) fn client_of(run: &RunDir, what: &str, name: &str) -> Result<ControlClient, Failure> {
    let missing = || Failure::new(what, name, ControlError::NotFound);
    // A name that cannot be one leads nowhere in the run directory.
    if name.parse::<engine::spec::DeviceName>().is_err() {
        return Err(missing());
    }
    let link = run.control_link(name);
    if std::os::unix::net::UnixStream::connect(&link).is_err() {
        // Clears away what a dead process left.
        run.processes();
        return Err(died(run, name).map_or_else(missing, |why| Failure::new(what, name, why)));
    }
    Ok(ControlClient::new(link))
}

/// What to do about a device of that name whose server died. `None`: there is nothing left of one.
pub(crate) fn died(run: &RunDir, name: &str) -> Option<String> {
    if let Some(record) = Record::load(run, name).ok().filter(ublk::waits) {
        return Some(recover::waiting(&record));
    }
    let left = !dead_files(run, name).is_empty();
    left.then(|| {
        format!("its server died (add it again, or take away what is left of it: blockyard del {name})")
    })
}

pub(crate) fn list(args: &ListArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("list")?;
    let (found, mute) = block_on("list", devices_told(&run))?;
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
    // What the others have is told all the same.
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
    // These are plain structures with text for keys, which always have a JSON form.
    format!("{}\n", serde_json::to_string_pretty(value).unwrap_or_default())
}

/// Columns as wide as their widest entry, two blanks between them, as losetup has it.
fn table(infos: &[DeviceInfo]) -> String {
    let head = ["NAME", "SIZE", "BLOCK", "RO", "CLIENTS", "PID", "STACK", "ADDRESS"].map(str::to_owned);
    let rows = infos.iter().map(|info| {
        let addresses: Vec<&str> = info.exports.iter().map(|export| export.address.as_str()).collect();
        let clients: u64 = info.exports.iter().map(|export| export.connections).sum();
        // Whoever waits for such a device looks here first.
        let held = if info.backend.contains_key("suspended") { " (suspended)" } else { "" };
        let deleted = if info.backend.contains_key("deleted") { " (deleted)" } else { "" };
        [
            info.name.clone(),
            Bytes(info.size).to_string(),
            info.logical_block_size.to_string(),
            u8::from(info.read_only).to_string(),
            clients.to_string(),
            info.pid.to_string(),
            format!("{}{held}{deleted}", info.stack),
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
            // Numbers stand right.
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
            // The line of the device says so.
            "read-only" if info.read_only => {}
            // An overlay can be written to, and what is under it cannot.
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
    // A limit of 0 says that there is none, or that the device has no such thing: `limits` shows them.
    for (key, value) in info.limits.iter().filter(|(_, value)| **value != 0) {
        line(&format!("limit {key}"), &value.to_string());
    }
    text
}

fn seconds(milliseconds: u64) -> String {
    format!("{}.{} s", milliseconds / 1000, milliseconds % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_without_devices_is_told_of_roots() {
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
