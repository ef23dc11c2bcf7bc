//! What is measured: each way to a block device, started and ended.
//!
//! Kernel drivers are set up as their own tools do it, LIO through configfs by hand. Whoever needs a file gets one of
//! its own in memory, so that all of them move the same bytes. A subject that cannot be had here, because its driver
//! or program is missing, says why and is left out of the report by name.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::tools::{output, run};

/// How a subject makes its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// The kernel's null_blk: what no server can beat.
    NullBlk,
    /// The kernel's loop over a file, past the page cache or not.
    Loop { direct: bool },
    /// LIO through tcm_loop, over a file or its own memory.
    Lio { file: bool },
    /// The kernel's NBD client on nbdkit's memory.
    Nbdkit,
    /// rublk with these words.
    Rublk { words: &'static [&'static str], file: bool },
    /// blockyard over this stack (`{file}` and `{size}` are put in) with these words.
    Ours { stack: &'static str, words: &'static [&'static str] },
}

impl Way {
    /// The drivers that it needs.
    fn modules(self) -> &'static [&'static str] {
        match self {
            Way::NullBlk => &["null_blk"],
            Way::Loop { .. } => &["loop"],
            Way::Lio { .. } => &["target_core_mod", "target_core_file", "tcm_loop", "sd_mod"],
            Way::Nbdkit => &["nbd"],
            Way::Ours { words, .. } if words.contains(&"--nbd-device") => &["nbd"],
            Way::Rublk { .. } | Way::Ours { .. } => &["ublk_drv"],
        }
    }
}

/// One row of the comparison.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject {
    /// Its name in tables and on the command line.
    pub(super) name: &'static str,
    /// The row it is set against.
    pub(super) peer: Option<&'static str>,
    /// Whether what is written reads back, so that a file system can be on it.
    pub(super) keeps: bool,
    way: Way,
}

const fn row(name: &'static str, peer: Option<&'static str>, keeps: bool, way: Way) -> Subject {
    Subject { name, peer, keeps, way }
}

const fn ours(
    name: &'static str,
    peer: &'static str,
    keeps: bool,
    stack: &'static str,
    words: &'static [&'static str],
) -> Subject {
    row(name, Some(peer), keeps, Way::Ours { stack, words })
}

const FILE: &str = "file:{file}";
const RAM: &str = "ram:{size}";

/// All rows, in the order of the tables.
pub(super) const SUBJECTS: &[Subject] = &[
    row("null_blk", None, false, Way::NullBlk),
    row("loop-buffered", None, true, Way::Loop { direct: false }),
    row("loop-direct", None, true, Way::Loop { direct: true }),
    row("lio-fileio", None, true, Way::Lio { file: true }),
    row("lio-ramdisk", None, true, Way::Lio { file: false }),
    row("nbd-nbdkit", None, true, Way::Nbdkit),
    ours("nbd-ram", "nbd-nbdkit", true, RAM, &["--nbd-device"]),
    row("rublk-null", None, false, Way::Rublk { words: &["add", "null"], file: false }),
    row("rublk-null-zc", None, false, Way::Rublk { words: &["add", "null", "-z"], file: false }),
    row("rublk-loop", None, true, Way::Rublk { words: &["add", "loop"], file: true }),
    row("rublk-loop-zc", None, true, Way::Rublk { words: &["add", "loop", "-z"], file: true }),
    ours("null", "rublk-null", false, "null:{size}", &["--ublk"]),
    ours("null-copy", "rublk-null", false, "null:{size}", &["--ublk=mode=copy"]),
    ours("null-batch", "rublk-null", false, "null:{size}", &["--ublk=batch=yes"]),
    ours("ram", "rublk-loop", true, RAM, &["--ublk"]),
    ours("file", "rublk-loop", true, FILE, &["--ublk"]),
    ours("file-copy", "rublk-loop", true, FILE, &["--ublk=mode=copy"]),
    ours("file-user-copy", "rublk-loop", true, FILE, &["--ublk=mode=user-copy"]),
    ours("file-batch", "rublk-loop", true, FILE, &["--ublk=batch=yes"]),
    ours("file-zero-copy", "rublk-loop-zc", true, FILE, &["--ublk=mode=auto-zero-copy"]),
];

/// Where things lie and how large they are.
pub(super) struct Site {
    /// In memory.
    pub(super) folder: PathBuf,
    /// Bytes of each device.
    pub(super) size: u64,
    /// Queues of a server.
    pub(super) queues: u32,
}

/// A device that is there.
pub(super) struct Device {
    /// Its node.
    pub(super) node: PathBuf,
    /// The process behind it, where there is one.
    pub(super) server: Option<u32>,
    /// From the first command to a node that can be opened.
    pub(super) attach: Duration,
    child: Option<Child>,
    undo: Vec<Vec<String>>,
}

/// How long a device may take to come or to go.
const LIMIT: Duration = Duration::from_secs(20);

impl Subject {
    /// Makes its device.
    pub(super) fn start(&self, site: &Site) -> Result<Device> {
        let needs_file = match self.way {
            Way::Loop { .. } => true,
            Way::Lio { file } | Way::Rublk { file, .. } => file,
            Way::Ours { stack, .. } => stack == FILE,
            Way::NullBlk | Way::Nbdkit => false,
        };
        let file = site.folder.join("disk.img");
        if needs_file {
            // Written, not sparse: no row pays for getting its pages while it is measured.
            fill(&file, site.size)?;
        }
        for module in self.way.modules() {
            run(&["modprobe", module])?;
        }
        let started = Instant::now();
        let mut device = match self.way {
            Way::NullBlk => null_blk(),
            Way::Loop { direct } => kernel_loop(&file, direct),
            Way::Lio { file: true } => {
                lio("fileio_0", &format!("fd_dev_name={},fd_dev_size={}", file.display(), site.size))
            }
            Way::Lio { file: false } => lio("rd_mcp_0", &format!("rd_pages={}", site.size / 4096)),
            Way::Nbdkit => nbdkit(site),
            Way::Rublk { words, file: true } => rublk(words, Some(&file), site),
            Way::Rublk { words, file: false } => rublk(words, None, site),
            Way::Ours { stack, words } => blockyard(stack, words, &file, site),
        }?;
        device.attach = started.elapsed();
        Ok(device)
    }
}

impl Device {
    fn new(node: &str, undo: &[&[&str]]) -> Device {
        let words = |words: &&[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let undo = undo.iter().map(words).collect();
        Device { node: node.into(), server: None, attach: Duration::ZERO, child: None, undo }
    }

    /// Its name in sysfs.
    pub(super) fn name(&self) -> String {
        self.node.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Removes it; the answer is how long that took.
    pub(super) fn stop(mut self) -> Result<Duration> {
        let started = Instant::now();
        for words in std::mem::take(&mut self.undo) {
            run(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        if let Some(mut child) = self.child.take() {
            await_end(&mut child)?;
        }
        Ok(started.elapsed())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // After a failure; the guest ends soon.
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn fill(path: &Path, size: u64) -> Result<()> {
    let size = format!("count={}", size >> 20);
    run(&["dd", "if=/dev/zero", &format!("of={}", path.display()), "bs=1M", &size])
}

fn await_end(child: &mut Child) -> Result<()> {
    let ended = within(LIMIT, || child.try_wait().ok().flatten());
    let status = ended.ok_or_else(|| Error("the server does not end".into()))?;
    if status.success() { Ok(()) } else { Err(Error(format!("the server ended with {status}"))) }
}

fn null_blk() -> Result<Device> {
    // The module's own device is another, `nullb0`.
    let folder = Path::new("/sys/kernel/config/nullb/nullb7");
    make(folder)?;
    put(&folder.join("size"), "1024")?;
    put(&folder.join("submit_queues"), "2")?;
    put(&folder.join("power"), "1")?;
    let node = wait_for(&["/dev/nullb7"])?;
    Ok(Device::new(
        &node,
        &[
            &["sh", "-c", "echo 0 >/sys/kernel/config/nullb/nullb7/power"],
            &["rmdir", "/sys/kernel/config/nullb/nullb7"],
        ],
    ))
}

fn kernel_loop(file: &Path, direct: bool) -> Result<Device> {
    let direct = if direct { "--direct-io=on" } else { "--direct-io=off" };
    let node = output(&["losetup", "--find", "--show", direct, &file.to_string_lossy()])?;
    let node = node.trim();
    Ok(Device::new(node, &[&["losetup", "-d", node]]))
}

/// A LUN of tcm_loop by hand, as targetcli would write it. Source: Documentation/target/tcm_mod_builder.rst and the
/// configfs tree itself.
fn lio(core: &str, control: &str) -> Result<Device> {
    let root = "/sys/kernel/config/target";
    let store = format!("{root}/core/{core}/bench");
    let port = format!("{root}/loopback/naa.5001405000000001/tpgt_1");
    make(Path::new(&store))?;
    put(&Path::new(&store).join("control"), control)?;
    put(&Path::new(&store).join("enable"), "1")?;
    make(&Path::new(&port).join("lun/lun_0"))?;
    put(&Path::new(&port).join("nexus"), "naa.5001405000000002")?;
    run(&["ln", "-s", &store, &format!("{port}/lun/lun_0/p")])?;
    let node = wait_for(&["/dev/sda"])?;
    Ok(Device::new(
        &node,
        &[
            &["sh", "-c", "echo 1 >/sys/block/sda/device/delete"],
            &["rm", &format!("{port}/lun/lun_0/p")],
            &["rmdir", &format!("{port}/lun/lun_0")],
            &["rmdir", &port],
            &["rmdir", &format!("{root}/loopback/naa.5001405000000001")],
            &["rmdir", &store],
            &["rmdir", &format!("{root}/core/{core}")],
        ],
    ))
}

fn nbdkit(site: &Site) -> Result<Device> {
    let socket = site.folder.join("nbdkit.sock");
    // One that an earlier round left.
    let _ = fs::remove_file(&socket);
    let mut command = Command::new("nbdkit");
    command
        .args(["--foreground", "--unix"])
        .arg(&socket)
        .args(["memory", &site.size.to_string()])
        .stderr(Stdio::null());
    let child = spawn(&mut command)?;
    let pid = child.id();
    within(LIMIT, || socket.exists().then_some(())).ok_or_else(|| Error("nbdkit does not listen".into()))?;
    let queues = site.queues.to_string();
    run(&["nbd-client", "-unix", &socket.to_string_lossy(), "/dev/nbd0", "-C", &queues])?;
    await_size("nbd0")?;
    let mut device =
        Device::new("/dev/nbd0", &[&["nbd-client", "-d", "/dev/nbd0"], &["kill", &pid.to_string()]]);
    device.server = Some(pid);
    device.child = Some(child);
    Ok(device)
}

fn rublk(words: &[&str], file: Option<&Path>, site: &Site) -> Result<Device> {
    let mut command = Command::new("rublk");
    command.args(words).args(["-n", "7", "-d", "128", "-q", &site.queues.to_string()]);
    if let Some(file) = file {
        command.arg("-f").arg(file);
    }
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let status = status.map_err(|error| Error(format!("rublk: {error}")))?;
    if !status.success() {
        return Err(Error(format!("rublk {} failed: {status}", words.join(" "))));
    }
    let node = wait_for(&["/dev/ublkb7"])?;
    await_size("ublkb7")?;
    // On one processor it fails now and then after it has done what it was to do.
    let again =
        "for i in 1 2 3 4 5; do rublk del -n 7; [ -e /dev/ublkb7 ] || exit 0; sleep 0.1; done; exit 1";
    let mut device = Device::new(&node, &[&["sh", "-c", again]]);
    device.server = process_named("rublk");
    Ok(device)
}

fn blockyard(stack: &str, words: &[&str], file: &Path, site: &Site) -> Result<Device> {
    let stack = stack.replace("{file}", &file.to_string_lossy()).replace("{size}", &site.size.to_string());
    let mut command = Command::new("blockyard");
    command.args(["serve", &stack, "--name", "bench", "--queues", &site.queues.to_string()]).args(words);
    command.stdout(Stdio::piped());
    let log = site.folder.join("blockyard.log");
    let stderr = File::create(&log).map_err(|error| Error(format!("{}: {error}", log.display())))?;
    let mut child = spawn(command.stderr(stderr))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        let read = BufReader::new(stdout).read_line(&mut line);
        read.map_err(|error| Error(format!("blockyard: {error}")))?;
    }
    let pid = child.id();
    let Some(node) = line.split_whitespace().nth(2) else {
        let _ = child.wait();
        return Err(Error(fs::read_to_string(&log).unwrap_or_default().trim().into()));
    };
    wait_for(&[node])?;
    let mut device = Device::new(node, &[&["kill", &pid.to_string()]]);
    await_size(&device.name())?;
    device.server = Some(pid);
    device.child = Some(child);
    Ok(device)
}

fn spawn(command: &mut Command) -> Result<Child> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).spawn().map_err(|error| Error(format!("{name}: {error}")))
}

fn process_named(name: &str) -> Option<u32> {
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // The one that serves is the youngest: what started it has ended or is about to.
    pids.filter(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name))
        .max()
}

fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|error| Error(format!("{}: {error}", folder.display())))
}

fn put(path: &Path, text: &str) -> Result<()> {
    let write = |mut file: File| std::io::Write::write_all(&mut file, text.as_bytes());
    File::options()
        .write(true)
        .open(path)
        .and_then(write)
        .map_err(|error| Error(format!("{}: {error}", path.display())))
}

fn wait_for(nodes: &[&str]) -> Result<String> {
    let found = within(LIMIT, || nodes.iter().find(|node| Path::new(node).exists()));
    found.map(|node| (*node).to_owned()).ok_or_else(|| Error(format!("{}: does not come", nodes[0])))
}

fn await_size(name: &str) -> Result<()> {
    let path = format!("/sys/block/{name}/size");
    let has = || fs::read_to_string(&path).ok().filter(|size| size.trim() != "0").map(drop);
    within(LIMIT, has).ok_or_else(|| Error(format!("{path}: stays empty")))
}

fn within<T>(limit: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let started = Instant::now();
    loop {
        match probe() {
            None if started.elapsed() < limit => std::thread::sleep(Duration::from_micros(500)),
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_peer_is_a_row_that_comes_before() {
        for (index, subject) in SUBJECTS.iter().enumerate() {
            if let Some(peer) = subject.peer {
                assert!(SUBJECTS[..index].iter().any(|other| other.name == peer), "{}: {peer}", subject.name);
            }
        }
    }

    #[test]
    fn a_tool_that_fails_is_named_with_what_it_said() {
        let error = output(&["sh", "-c", "echo no >&2; exit 3"]).expect_err("it fails");
        assert!(error.0.contains("exit status: 3: no"), "{}", error.0);
    }
}
