//! The subjects of the comparison: each kind of block device, how it is created and removed.
//!
//! Kernel drivers are set up like their own tools do it, LIO through configfs. Each subject with a file has
//! its own file in memory, so that all copy equal bytes. A subject whose driver or program is missing is
//! listed in the report as left out, with the reason.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{iscsi, multipath, spdk};
use crate::error::{Error, Result};
use crate::tools::{not_started, output, run};

/// How a subject creates its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Setup {
    /// The kernel's null_blk: the upper bound for servers.
    NullBlk,
    /// null_blk that stores data, with at most this number of sectors a request; 0: its own default.
    Memory { max_sectors: u32 },
    /// The kernel's dm-multipath with this selector over null_blk devices, with this number of queues instead
    /// of the usual one.
    Multipath { selector: &'static str, queues: Option<u32> },
    /// blockyard's multipath with this selector over four null devices, as a ublk device.
    OwnMultipath { selector: &'static str, queues: Option<u32> },
    /// The kernel's loop over a file, direct or buffered.
    Loop { direct: bool },
    /// LIO through tcm_loop, over a file or its own memory.
    Lio { file: bool },
    /// LIO through its iSCSI target and the kernel's initiator.
    LioIscsi { file: bool },
    /// tgtd over a file, through the kernel's initiator.
    Tgtd,
    /// blockyard's iSCSI target over this stack, through the kernel's initiator.
    Iscsi { stack: &'static str },
    /// The kernel's NBD client on nbdkit's memory.
    Nbdkit,
    /// The kernel's NBD client on qemu-nbd over a file.
    QemuNbd,
    /// SPDK's ublk target over its memory.
    Spdk,
    /// rublk with these arguments.
    Rublk { arguments: &'static [&'static str], file: bool },
    /// blockyard over this stack (`{file}` and `{size}` are replaced) with these arguments.
    Ours { stack: &'static str, arguments: &'static [&'static str] },
}

impl Setup {
    /// Returns the kernel modules that the subject needs.
    fn modules(self) -> &'static [&'static str] {
        match self {
            Setup::NullBlk | Setup::Memory { .. } => &["null_blk"],
            Setup::Multipath { .. } => &["null_blk", "dm_mod", "dm_multipath"],
            Setup::Loop { .. } => &["loop"],
            Setup::Lio { .. } => &["target_core_mod", "target_core_file", "tcm_loop", "sd_mod"],
            Setup::LioIscsi { .. } => &["target_core_mod", "target_core_file", "iscsi_target_mod"],
            Setup::Iscsi { .. } | Setup::Tgtd => &[],
            Setup::Nbdkit | Setup::QemuNbd => &["nbd"],
            Setup::Ours { arguments, .. } if arguments.contains(&"--nbd-device") => &["nbd"],
            Setup::Rublk { .. } | Setup::Spdk | Setup::Ours { .. } | Setup::OwnMultipath { .. } => {
                &["ublk_drv"]
            }
        }
    }
}

/// One row of the comparison.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject {
    /// Name in tables and on the command line.
    pub(super) name: &'static str,
    /// The row that it is compared with.
    pub(super) peer: Option<&'static str>,
    /// Whether written data can be read back, so that a file system is possible.
    pub(super) keeps: bool,
    setup: Setup,
}

const fn row(name: &'static str, peer: Option<&'static str>, keeps: bool, setup: Setup) -> Subject {
    Subject { name, peer, keeps, setup }
}

const fn ours(
    name: &'static str,
    peer: &'static str,
    keeps: bool,
    stack: &'static str,
    arguments: &'static [&'static str],
) -> Subject {
    row(name, Some(peer), keeps, Setup::Ours { stack, arguments })
}

const fn kernel_multipath(name: &'static str, selector: &'static str, queues: Option<u32>) -> Subject {
    row(name, Some("null_blk"), false, Setup::Multipath { selector, queues })
}

const fn own_multipath(
    name: &'static str,
    peer: &'static str,
    selector: &'static str,
    queues: Option<u32>,
) -> Subject {
    row(name, Some(peer), false, Setup::OwnMultipath { selector, queues })
}

const FILE: &str = "file:{file}";
const RAM: &str = "ram:{size}";

/// All rows, in the order of the tables.
pub(super) const SUBJECTS: &[Subject] = &[
    row("null_blk", None, false, Setup::NullBlk),
    row("loop-buffered", None, true, Setup::Loop { direct: false }),
    row("loop-direct", None, true, Setup::Loop { direct: true }),
    row("lio-fileio", None, true, Setup::Lio { file: true }),
    row("lio-ramdisk", None, true, Setup::Lio { file: false }),
    row("lio-iscsi-file", None, true, Setup::LioIscsi { file: true }),
    row("lio-iscsi-ram", None, true, Setup::LioIscsi { file: false }),
    row("tgtd-file", Some("lio-iscsi-file"), true, Setup::Tgtd),
    row("iscsi-file", Some("lio-iscsi-file"), true, Setup::Iscsi { stack: FILE }),
    row("iscsi-ram", Some("lio-iscsi-ram"), true, Setup::Iscsi { stack: RAM }),
    row("memory-no-limits", None, true, Setup::Memory { max_sectors: 0 }),
    row("memory-255", Some("memory-no-limits"), true, Setup::Memory { max_sectors: 255 }),
    kernel_multipath("dm-service-time", "service-time", None),
    kernel_multipath("dm-queue-length", "queue-length", None),
    kernel_multipath("dm-round-robin", "round-robin", None),
    kernel_multipath("dm-historical-service-time", "historical-service-time", None),
    kernel_multipath("dm-io-affinity", "io-affinity", None),
    kernel_multipath("queues-dm-1", "round-robin", Some(1)),
    row("nbd-nbdkit", None, true, Setup::Nbdkit),
    row("nbd-qemu", Some("nbd-nbdkit"), true, Setup::QemuNbd),
    ours("nbd-ram", "nbd-nbdkit", true, RAM, &["--nbd-device"]),
    row("rublk-null", None, false, Setup::Rublk { arguments: &["add", "null"], file: false }),
    row("rublk-null-zc", None, false, Setup::Rublk { arguments: &["add", "null", "-z"], file: false }),
    row("rublk-loop", None, true, Setup::Rublk { arguments: &["add", "loop"], file: true }),
    row("rublk-loop-zc", None, true, Setup::Rublk { arguments: &["add", "loop", "-z"], file: true }),
    ours("null", "rublk-null", false, "null:{size}", &["--ublk"]),
    ours("null-copy", "rublk-null", false, "null:{size}", &["--ublk=mode=copy"]),
    ours("null-batch", "rublk-null", false, "null:{size}", &["--ublk=batch=yes"]),
    row("spdk-ram", Some("rublk-loop"), true, Setup::Spdk),
    own_multipath("multipath-service-time", "dm-service-time", "service-time", None),
    own_multipath("multipath-queue-length", "dm-queue-length", "queue-length", None),
    own_multipath("multipath-round-robin", "dm-round-robin", "round-robin", None),
    own_multipath(
        "multipath-historical-service-time",
        "dm-historical-service-time",
        "historical-service-time",
        None,
    ),
    own_multipath("multipath-io-affinity", "dm-io-affinity", "io-affinity", None),
    own_multipath("queues-ours-1", "queues-dm-1", "round-robin", Some(1)),
    ours("ram", "rublk-loop", true, RAM, &["--ublk"]),
    ours("ram-no-limits", "memory-no-limits", true, RAM, &["--ublk", "--limits", "max_sectors=2048"]),
    ours("ram-255", "memory-255", true, RAM, &["--ublk", "--limits", "max_sectors=255,max_segments=128"]),
    ours("file", "rublk-loop", true, FILE, &["--ublk"]),
    ours("file-copy", "rublk-loop", true, FILE, &["--ublk=mode=copy"]),
    ours("file-user-copy", "rublk-loop", true, FILE, &["--ublk=mode=user-copy"]),
    ours("file-batch", "rublk-loop", true, FILE, &["--ublk=batch=yes"]),
    ours("file-zero-copy", "rublk-loop-zc", true, FILE, &["--ublk=mode=auto-zero-copy"]),
];

/// Folder, size and queues of the devices.
pub(super) struct Site {
    /// A folder in memory.
    pub(super) folder: PathBuf,
    /// Bytes of each device.
    pub(super) size: u64,
    /// Queues of a server.
    pub(super) queues: u32,
}

/// An attached block device.
pub(super) struct Device {
    /// Path of the device node.
    pub(super) node: PathBuf,
    /// Process ID of the server, if there is one.
    pub(super) server: Option<u32>,
    /// Time from the first command to a node that can be opened.
    pub(super) attach: Duration,
    child: Option<Child>,
    /// A program that the device needs, and that is killed at the end.
    helper: Option<Child>,
    undo: Vec<Vec<String>>,
}

/// Longest time of an attach or a detach.
pub(super) const LIMIT: Duration = Duration::from_secs(20);

impl Subject {
    /// Creates the subject's device.
    pub(super) fn start(&self, site: &Site) -> Result<Device> {
        let needs_file = match self.setup {
            Setup::Loop { .. } | Setup::Tgtd | Setup::QemuNbd => true,
            Setup::Lio { file } | Setup::LioIscsi { file } | Setup::Rublk { file, .. } => file,
            Setup::Ours { stack, .. } | Setup::Iscsi { stack } => stack == FILE,
            Setup::NullBlk
            | Setup::Memory { .. }
            | Setup::Multipath { .. }
            | Setup::OwnMultipath { .. }
            | Setup::Spdk
            | Setup::Nbdkit => false,
        };
        let file = site.folder.join("disk.img");
        if needs_file {
            // The file is written, not sparse, so that no row pays for allocating pages during the
            // measurement.
            fill(&file, site.size)?;
        }
        let initiator: &[&str] = match self.setup {
            Setup::LioIscsi { .. } | Setup::Tgtd | Setup::Iscsi { .. } => &iscsi::INITIATOR,
            _ => &[],
        };
        let on_file = format!("fd_dev_name={},fd_dev_size={}", file.display(), site.size);
        let in_memory = format!("rd_pages={}", site.size / 4096);
        let size = site.size.to_string();
        for module in self.setup.modules().iter().chain(initiator) {
            run(&["modprobe", module])?;
        }
        let started = Instant::now();
        let mut device = match self.setup {
            Setup::NullBlk => null_blk(NULL, 2, &[("size", "1024")]),
            Setup::Memory { max_sectors } => memory(max_sectors, site),
            Setup::Multipath { selector, queues } => {
                multipath::kernel(selector, queues.unwrap_or(site.queues))
            }
            Setup::OwnMultipath { selector, queues } => {
                let queues = queues.unwrap_or(site.queues);
                multipath::ours(selector, &Site { queues, folder: site.folder.clone(), ..*site })
            }
            Setup::Loop { direct } => kernel_loop(&file, direct),
            Setup::Lio { file: true } => lio("fileio_0", &on_file),
            Setup::Lio { file: false } => lio("rd_mcp_0", &in_memory),
            Setup::LioIscsi { file: true } => iscsi::lio("fileio_0", &on_file),
            Setup::LioIscsi { file: false } => iscsi::lio("rd_mcp_0", &in_memory),
            Setup::Iscsi { stack } => iscsi::ours(stack, &file, site),
            Setup::Tgtd => iscsi::tgtd(&file),
            Setup::Nbdkit => nbd_server("nbdkit", &["--foreground", "memory", &size, "--unix"], site),
            Setup::QemuNbd => {
                let flags =
                    ["--persistent", "--shared=0", "--format=raw", "--aio=threads", "--cache=writeback"];
                let image = file.to_string_lossy();
                nbd_server("qemu-nbd", &[&flags[..], &[image.as_ref(), "--socket"]].concat(), site)
            }
            Setup::Spdk => spdk::ublk(site),
            Setup::Rublk { arguments, file: true } => rublk(arguments, Some(&file), site),
            Setup::Rublk { arguments, file: false } => rublk(arguments, None, site),
            Setup::Ours { stack, arguments } => blockyard(stack, arguments, &file, site),
        }?;
        device.attach = started.elapsed();
        Ok(device)
    }
}

impl Device {
    /// Describes a device that the commands `undo` remove.
    pub(super) fn new(node: &str, undo: &[&[&str]]) -> Device {
        let (child, helper) = (None, None);
        let mut device = Device {
            node: node.into(),
            server: None,
            attach: Duration::ZERO,
            child,
            helper,
            undo: Vec::new(),
        };
        device.also(undo);
        device
    }

    /// Adds commands that remove the device.
    pub(super) fn also(&mut self, undo: &[&[&str]]) {
        let arguments = |arguments: &&[&str]| arguments.iter().map(|word| (*word).to_owned()).collect();
        self.undo.extend(undo.iter().map(arguments));
    }

    /// Sets the process that serves the device, and that exits when the device is removed.
    pub(super) fn is_served_by(&mut self, child: Child) {
        self.server = Some(child.id());
        self.child = Some(child);
    }

    /// Sets a program that the device needs, which is killed when the device is removed.
    pub(super) fn has_helper(&mut self, helper: Child) {
        self.helper = Some(helper);
    }

    /// Adds a device that this one uses, which is removed after it.
    pub(super) fn below(&mut self, mut path: Device) {
        self.undo.append(&mut path.undo);
    }

    /// Returns the name of the device in sysfs.
    pub(super) fn name(&self) -> String {
        self.node.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Removes the device and returns the time that this took.
    pub(super) fn stop(mut self) -> Result<Duration> {
        let started = Instant::now();
        for arguments in std::mem::take(&mut self.undo) {
            run(&arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        if let Some(mut helper) = self.helper.take() {
            let _ = helper.wait();
        }
        if let Some(mut child) = self.child.take() {
            await_end(&mut child)?;
        }
        Ok(started.elapsed())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Only reached after a failure; the guest is shut down soon.
        for child in self.child.iter_mut().chain(&mut self.helper) {
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
    let Some(status) = ended else {
        // A server that stays would hold the address of the next one.
        let _ = child.kill();
        let _ = child.wait();
        return Err(Error("the server does not end".into()));
    };
    if status.success() { Ok(()) } else { Err(Error(format!("the server ended with {status}"))) }
}

/// The null_blk device to create; `nullb0` is the module's own.
const NULL: &str = "nullb7";

/// Creates a null_blk device with this number of queues and these attributes.
pub(super) fn null_blk(name: &str, queues: u32, attributes: &[(&str, &str)]) -> Result<Device> {
    let folder = format!("/sys/kernel/config/nullb/{name}");
    let queues = queues.to_string();
    make(Path::new(&folder))?;
    for (attribute, value) in
        [("submit_queues", queues.as_str())].iter().chain(attributes).chain(&[("power", "1")])
    {
        put(&Path::new(&folder).join(attribute), value)?;
    }
    let node = wait_for(&[&format!("/dev/{name}")])?;
    let off = format!("echo 0 >{folder}/power");
    Ok(Device::new(&node, &[&["sh", "-c", &off], &["rmdir", &folder]]))
}

fn memory(max_sectors: u32, site: &Site) -> Result<Device> {
    let (size, most) = ((site.size >> 20).to_string(), max_sectors.to_string());
    let mut attributes = vec![("size", size.as_str()), ("memory_backed", "1"), ("blocksize", "512")];
    if max_sectors > 0 {
        attributes.push(("max_sectors", &most));
    }
    null_blk(NULL, 2, &attributes)
}

fn kernel_loop(file: &Path, direct: bool) -> Result<Device> {
    let direct = if direct { "--direct-io=on" } else { "--direct-io=off" };
    let node = output(&["losetup", "--find", "--show", direct, &file.to_string_lossy()])?;
    let node = node.trim();
    Ok(Device::new(node, &[&["losetup", "-d", node]]))
}

/// Creates a backstore of LIO; returns its folder and that of its HBA.
pub(super) fn lio_store(core: &str, control: &str) -> Result<(String, String)> {
    let hba = format!("/sys/kernel/config/target/core/{core}");
    let store = format!("{hba}/bench");
    make(Path::new(&store))?;
    put(&Path::new(&store).join("control"), control)?;
    put(&Path::new(&store).join("enable"), "1")?;
    Ok((store, hba))
}

/// Creates a LUN of tcm_loop, as targetcli would. Source: Documentation/target/tcm_mod_builder.rst and the
/// configfs tree itself.
fn lio(core: &str, control: &str) -> Result<Device> {
    let root = "/sys/kernel/config/target";
    let port = format!("{root}/loopback/naa.5001405000000001/tpgt_1");
    let (store, hba) = lio_store(core, control)?;
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
            &["rmdir", &hba],
        ],
    ))
}

/// Starts an NBD server and the kernel's client; the socket follows the server's arguments.
fn nbd_server(program: &str, arguments: &[&str], site: &Site) -> Result<Device> {
    let socket = site.folder.join(format!("{program}.sock"));
    // An earlier round may have left a socket.
    let _ = fs::remove_file(&socket);
    let child = spawn(Command::new(program).args(arguments).arg(&socket).stderr(Stdio::null()))?;
    let pid = child.id();
    within(LIMIT, || socket.exists().then_some(()))
        .ok_or_else(|| Error(format!("{program} does not listen")))?;
    let queues = site.queues.to_string();
    run(&["nbd-client", "-unix", &socket.to_string_lossy(), "/dev/nbd0", "-C", &queues])?;
    await_size("nbd0")?;
    let mut device =
        Device::new("/dev/nbd0", &[&["nbd-client", "-d", "/dev/nbd0"], &["kill", &pid.to_string()]]);
    device.server = Some(pid);
    device.child = Some(child);
    Ok(device)
}

fn rublk(arguments: &[&str], file: Option<&Path>, site: &Site) -> Result<Device> {
    let mut command = Command::new("rublk");
    command.args(arguments).args(["-n", "7", "-d", "128", "-q", &site.queues.to_string()]);
    if let Some(file) = file {
        command.arg("-f").arg(file);
    }
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let status = status.map_err(|error| not_started("rublk", &error))?;
    if !status.success() {
        return Err(Error(format!("rublk {} failed: {status}", arguments.join(" "))));
    }
    let node = wait_for(&["/dev/ublkb7"])?;
    await_size("ublkb7")?;
    // On one processor the program sometimes fails after it has done its work.
    let again =
        "for i in 1 2 3 4 5; do rublk del -n 7; [ -e /dev/ublkb7 ] || exit 0; sleep 0.1; done; exit 1";
    let mut device = Device::new(&node, &[&["sh", "-c", again]]);
    device.server = process_named("rublk");
    Ok(device)
}

fn blockyard(stack: &str, arguments: &[&str], file: &Path, site: &Site) -> Result<Device> {
    let (child, node) = serve(stack, arguments, file, site)?;
    let pid = child.id();
    wait_for(&[&node])?;
    let mut device = Device::new(&node, &[&["kill", &pid.to_string()]]);
    await_size(&device.name())?;
    device.is_served_by(child);
    Ok(device)
}

/// Starts our server; returns it with the address in its ready line.
pub(super) fn serve(stack: &str, arguments: &[&str], file: &Path, site: &Site) -> Result<(Child, String)> {
    let stack = stack.replace("{file}", &file.to_string_lossy()).replace("{size}", &site.size.to_string());
    let mut command = Command::new("blockyard");
    // A table is given with `--table` instead.
    let stack = Some(&stack).filter(|stack| !stack.is_empty());
    command
        .arg("serve")
        .args(stack)
        .args(["--name", "bench", "--queues", &site.queues.to_string()])
        .args(arguments);
    command.stdout(Stdio::piped());
    let log = site.folder.join("blockyard.log");
    let stderr = File::create(&log).map_err(|error| Error(format!("{}: {error}", log.display())))?;
    let mut child = spawn(command.stderr(stderr))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        let read = BufReader::new(stdout).read_line(&mut line);
        read.map_err(|error| Error(format!("blockyard: {error}")))?;
    }
    let Some(address) = line.split_whitespace().nth(2) else {
        let _ = child.wait();
        return Err(Error(fs::read_to_string(&log).unwrap_or_default().trim().into()));
    };
    Ok((child, address.to_owned()))
}

pub(super) fn spawn(command: &mut Command) -> Result<Child> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).spawn().map_err(|error| not_started(&name, &error))
}

fn process_named(name: &str) -> Option<u32> {
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // The server is the youngest process: its parent has exited or is about to.
    pids.filter(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name))
        .max()
}

pub(super) fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|error| Error(format!("{}: {error}", folder.display())))
}

pub(super) fn put(path: &Path, text: &str) -> Result<()> {
    let write = |mut file: File| std::io::Write::write_all(&mut file, text.as_bytes());
    File::options()
        .write(true)
        .open(path)
        .and_then(write)
        .map_err(|error| Error(format!("{}: {error}", path.display())))
}

pub(super) fn wait_for(nodes: &[&str]) -> Result<String> {
    let found = within(LIMIT, || nodes.iter().find(|node| Path::new(node).exists()));
    found.map(|node| (*node).to_owned()).ok_or_else(|| Error(format!("{}: does not come", nodes[0])))
}

pub(super) fn await_size(name: &str) -> Result<()> {
    let path = format!("/sys/block/{name}/size");
    let has = || fs::read_to_string(&path).ok().filter(|size| size.trim() != "0").map(drop);
    within(LIMIT, has).ok_or_else(|| Error(format!("{path}: stays empty")))
}

pub(super) fn within<T>(limit: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
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
    fn every_peer_is_an_earlier_row() {
        for (index, subject) in SUBJECTS.iter().enumerate() {
            if let Some(peer) = subject.peer {
                assert!(SUBJECTS[..index].iter().any(|other| other.name == peer), "{}: {peer}", subject.name);
            }
        }
    }

    #[test]
    fn a_failed_tool_is_named_with_its_output() {
        let error = output(&["sh", "-c", "echo no >&2; exit 3"]).expect_err("it fails");
        assert!(error.0.contains("exit status: 3: no"), "{}", error.0);
    }
}
