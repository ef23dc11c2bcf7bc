//! Finds the device or the process that uses a file or an address which is in use.
//!
//! Files are locked by open file description (`F_OFD_SETLK`), for which the kernel reports no owner. So
//! every server in the run directory is asked for its devices; then `/proc` is searched for processes that
//! have the file open. The tables in `/proc/net` list listening sockets with their inodes, by which
//! `/proc/PID/fd` names them.

use engine::control::{ControlClient, DeviceInfo};
use engine::rundir::RunDir;
use engine::spec::{LayerSpec, StackSpec};
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The text after the path in the error of a file that is in use.
const IN_USE: &str = " is in use: ";

/// Appends the device or process that uses the file of an "in use" error to its text, if it is found.
pub(crate) async fn with_holder(run: &RunDir, why: String) -> String {
    let Some(Ok(file)) = path_in_use(&why).map(Path::metadata) else { return why };
    if let Some((name, pid)) = holder(run, &file).await {
        return format!("{why}: it is the file of device {name}, process {pid} (blockyard show {name})");
    }
    let processes = processes_with(&file);
    if processes.is_empty() { why } else { with_processes(&why, &processes) }
}

/// Names the processes of other programs in an error. Only devices of blockyard have the option `share`:
/// with it this device admits other writers, but cannot open a file that another program has locked.
fn with_processes(why: &str, processes: &[(String, u32)]) -> String {
    let may_share = why.contains("another program writes to it");
    let fix = if may_share { "(stop it, or add share)" } else { "(stop it)" };
    let listed: Vec<String> = processes.iter().map(|(name, pid)| format!("{name} ({pid})")).collect();
    let why = why.replace("(stop it, or add share to both)", fix);
    format!("{why}: it is open in {}", listed.join(", "))
}

/// Returns the names and numbers of other processes that have a file open, as far as `/proc` may be read.
fn processes_with(file: &Metadata) -> Vec<(String, u32)> {
    processes_that_hold(|descriptor| is(descriptor, file))
}

/// Returns the names and numbers of other processes with a descriptor (`/proc/PID/fd/N`) that `is_searched`
/// accepts.
fn processes_that_hold(is_searched: impl Fn(&Path) -> bool) -> Vec<(String, u32)> {
    let mut found = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let mut open = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        if pid != std::process::id() && open.any(|descriptor| is_searched(&descriptor.path())) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            found.push((name.trim_end().to_owned(), pid));
        }
    }
    found.sort_by_key(|(_, pid)| *pid);
    found
}

/// An address that an export or the page listens on.
#[derive(Debug, PartialEq, Eq)]
enum Taken {
    Port(u16),
    Unix(PathBuf),
}

/// Returns the address in an error of a listener: the word before the reason, or before ": " and the reason.
fn address_in_use(why: &str) -> Option<Taken> {
    let (before, _) = ["Address already in use", "the address is taken"]
        .iter()
        .find_map(|reason| why.split_once(reason))?;
    let before = before.trim_end_matches(": ");
    if let Some((_, path)) = before.rsplit_once("unix:") {
        return Some(Taken::Unix(path.into()));
    }
    let (_, port) = before.rsplit_once(':')?;
    port.parse().ok().map(Taken::Port)
}

/// Returns the other processes that listen on an address. The tables list the sockets of this network namespace.
fn listeners(address: &Taken) -> Vec<(String, u32)> {
    let table = |name: &str| std::fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default();
    let inodes: Vec<String> = match address {
        Taken::Port(port) => {
            let tables = table("tcp") + &table("tcp6");
            tables.lines().filter_map(|line| listening_inode(line, *port)).map(socket_name).collect()
        }
        Taken::Unix(path) => {
            table("unix").lines().filter_map(|line| unix_inode(line, path)).map(socket_name).collect()
        }
    };
    processes_that_hold(|descriptor| {
        std::fs::read_link(descriptor).is_ok_and(|link| inodes.iter().any(|inode| link == Path::new(inode)))
    })
}

/// Returns the target of the link `/proc/PID/fd/N` for a socket.
fn socket_name(inode: &str) -> String {
    format!("socket:[{inode}]")
}

/// Returns the inode of a line of `/proc/net/tcp` or `tcp6`, if it is a socket that listens on the port.
fn listening_inode(line: &str, port: u16) -> Option<&str> {
    // sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode …
    let words: Vec<&str> = line.split_ascii_whitespace().take(10).collect();
    let [_, local, _, "0A", .., inode] = words[..] else { return None };
    let (_, of_line) = local.rsplit_once(':')?;
    (u16::from_str_radix(of_line, 16) == Ok(port)).then_some(inode)
}

/// Returns the inode of a line of `/proc/net/unix`, if it is a listening socket at the path.
fn unix_inode<'a>(line: &'a str, path: &Path) -> Option<&'a str> {
    // Num: RefCount Protocol Flags Type St Inode Path
    let (words, of_line) = line.split_once(" /")?;
    let words: Vec<&str> = words.split_ascii_whitespace().collect();
    let [_, _, _, "00010000", _, _, inode] = words[..] else { return None };
    (Path::new("/").join(of_line) == path).then_some(inode)
}

/// Names the processes that listen on the address of an "address in use" error in its advice, if they are found.
pub(crate) fn with_listener(why: String) -> String {
    match address_in_use(&why).map(|address| listeners(&address)) {
        Some(processes) if !processes.is_empty() => with_listeners(&why, &processes),
        _ => why,
    }
}

fn with_listeners(why: &str, processes: &[(String, u32)]) -> String {
    let listed: Vec<String> = processes.iter().map(|(name, pid)| format!("{name} ({pid})")).collect();
    let listed = listed.join(", ");
    let Some((why, advice)) = why.rsplit_once(" (") else { return format!("{why} ({listed} listens there)") };
    let advice = advice.rsplit_once("listens there: ").map_or(advice, |(_, advice)| advice);
    format!("{why} ({listed} listens there: {advice}")
}

fn path_in_use(why: &str) -> Option<&Path> {
    let (before, _) = why.split_once(IN_USE)?;
    Some(Path::new(before.rsplit_once(": ").map_or(before, |(_, path)| path)))
}

/// Finds the device of another process that uses a file; returns its name and process.
async fn holder(run: &RunDir, file: &Metadata) -> Option<(String, u32)> {
    // This process is skipped, as it may not be able to answer yet.
    let own = format!("control.{}", std::process::id());
    for socket in run.processes().into_iter().filter(|socket| !socket.ends_with(&own)) {
        let devices = ControlClient::new(socket).devices().await.unwrap_or_default();
        if let Some(device) =
            devices.into_iter().find(|device| files(device).iter().any(|path| is(path, file)))
        {
            return Some((device.name, device.pid));
        }
    }
    None
}

fn is(path: &Path, file: &Metadata) -> bool {
    let Ok(other) = path.metadata() else { return false };
    match other.file_type().is_block_device() && file.file_type().is_block_device() {
        true => other.rdev() == file.rdev(),
        false => (other.dev(), other.ino()) == (file.dev(), file.ino()),
    }
}

/// Returns the files that a device uses, as its description names them.
fn files(device: &DeviceInfo) -> Vec<PathBuf> {
    let of_stack = |text: &str| match text.parse() {
        Ok(StackSpec::File(file)) => Some(file.file.path),
        _ => None,
    };
    let of_layer = |text: &String| match text.parse() {
        Ok(LayerSpec::Cow(cow)) => Some(cow.file),
        _ => None,
    };
    let mut files: Vec<PathBuf> = match device.stack.strip_prefix("table: ") {
        Some(lines) => lines
            .split_whitespace()
            .filter_map(|word| of_stack(word).or_else(|| word.starts_with('/').then(|| word.into())))
            .collect(),
        None => of_stack(&device.stack).into_iter().collect(),
    };
    files.extend(device.layers.iter().filter_map(of_layer));
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_programs_are_named_and_not_advised_to_share() {
        let by = [("qemu-nbd".to_owned(), 7), ("fio".to_owned(), 12)];
        let both = "/a is in use: another program writes to it (stop it, or add share to both)";
        assert_eq!(
            with_processes(both, &by[..1]),
            "/a is in use: another program writes to it (stop it, or add share): it is open in qemu-nbd (7)"
        );
        let locked = "/a is in use: another program uses it and locked it against changes (stop it, or add share to both)";
        assert!(
            with_processes(locked, &by).ends_with("changes (stop it): it is open in qemu-nbd (7), fio (12)")
        );
    }

    #[test]
    fn processes_with_an_open_file_are_found() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut other = std::process::Command::new("sleep")
            .arg("60")
            .stdin(file.reopen().expect("it opens"))
            .spawn()
            .expect("sleep starts");
        // The child has its own name only after it executed sleep.
        let found = || processes_with(&file.path().metadata().expect("it exists"));
        assert!(found().iter().any(|(_, pid)| *pid == other.id()));
        other.kill().and_then(|()| other.wait()).expect("it ends");
        assert_eq!(found(), []);
    }

    #[test]
    fn the_address_is_found_in_errors_of_listeners() {
        let port = |why| address_in_use(why) == Some(Taken::Port(10809));
        assert!(port(
            "tcp:127.0.0.1:10809: Address already in use (os error 98) (another server listens there)"
        ));
        assert!(port("cannot listen on tcp:[::]:10809: Address already in use"));
        assert_eq!(
            address_in_use("disk: unix:/run/a b.sock: the address is taken (another server listens there)"),
            Some(Taken::Unix("/run/a b.sock".into()))
        );
        assert_eq!(address_in_use("/a.img is in use: another program writes to it"), None);
    }

    #[test]
    fn the_listeners_are_named_in_the_advice() {
        let by = [("nginx".to_owned(), 7)];
        assert_eq!(
            with_listeners("tcp::80: in use (another server listens there: stop it)", &by),
            "tcp::80: in use (nginx (7) listens there: stop it)"
        );
        assert_eq!(
            with_listeners("tcp::80: in use (os error 98) (choose another)", &by),
            "tcp::80: in use (os error 98) (nginx (7) listens there: choose another)"
        );
        assert_eq!(with_listeners("tcp::80: in use", &by), "tcp::80: in use (nginx (7) listens there)");
    }

    #[test]
    fn sockets_are_found_in_the_kernels_tables() {
        let four = "   0: 0100007F:2A39 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 3350 1 0 100 0 0 10 0";
        assert_eq!(listening_inode(four, 10809), Some("3350"));
        assert_eq!(listening_inode(four, 10810), None);
        let connected = four.replace(" 0A ", " 01 ");
        assert_eq!(listening_inode(&connected, 10809), None, "a connection listens on nothing");
        let unix = "0000000000000000: 00000002 00000000 00010000 0001 01 18612 /run/a b.sock";
        assert_eq!(unix_inode(unix, Path::new("/run/a b.sock")), Some("18612"));
        assert_eq!(unix_inode(unix, Path::new("/run/b.sock")), None);
        assert_eq!(unix_inode(&unix.replace("00010000", "00000000"), Path::new("/run/a b.sock")), None);
    }

    #[test]
    fn the_path_is_found_in_nested_errors() {
        for (why, path) in [
            ("/a b.img is in use: another program writes to it (stop it)", Some("/a b.img")),
            ("disk: layer cow: /o.img is in use: it is mounted", Some("/o.img")),
            ("/a.img: No such file", None),
        ] {
            assert_eq!(path_in_use(why), path.map(Path::new), "{why}");
        }
    }

    #[test]
    fn files_are_found_in_stacks_tables_and_overlays() {
        let device = |stack: &str, layers: &[&str]| DeviceInfo {
            name: "disk".into(),
            stack: stack.into(),
            layers: layers.iter().map(|&layer| layer.to_owned()).collect(),
            size: 0,
            logical_block_size: 512,
            read_only: false,
            limits: Default::default(),
            exports: Vec::new(),
            backend: Default::default(),
            queues: Vec::new(),
            pid: 1,
            uptime_ms: 0,
        };
        let paths = |stack: &str, layers: &[&str]| -> Vec<String> {
            files(&device(stack, layers)).iter().map(|path| path.display().to_string()).collect()
        };
        assert_eq!(paths("file:/a.img,ro", &["delay,read=1ms", "cow,file=/o.img"]), ["/a.img", "/o.img"]);
        assert_eq!(
            paths("table: 0 8 linear file:/a.img 0; 8 8 linear /dev/sda 0", &[]),
            ["/a.img", "/dev/sda"]
        );
        assert!(paths("ram:1M", &[]).is_empty());
    }
}
