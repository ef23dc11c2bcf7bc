//! The kernel's iSCSI initiator, driven by open-iscsi, on our target.
//!
//! [`Initiator`] is iscsid with its files in `/etc/iscsi`; [`Session`] a login, with the disk that it brings.

mod commands;
mod recovery;
mod units;
mod zones;

use super::disk::{Disk, module, tool};
use super::{Done, Skip, Test, test};
use crate::iscsi::{NAME, Target, chap_file, file_stack};
use crate::server::Sandbox;
use crate::tools::{Outcome, PATIENCE, find, until};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [TESTS, commands::TESTS, recovery::TESTS, units::TESTS, zones::TESTS].concat()
}

const TESTS: &[Test] = &[
    test(
        "iscsi/login",
        "discovery, login, ext4, fstrim and a verifying load on the kernel's initiator",
        login,
    ),
    test("iscsi/chap", "only the right secret logs in, in one direction and in both", chap),
    test("iscsi/digests", "a verifying load with header and data digests", digests),
    test("iscsi/resize", "a new size is seen after a rescan, with data intact", resize),
];

/// The portal of servers in the guest.
const PORTAL: &str = "127.0.0.1:3260";
/// Its port.
const PORTAL_PORT: u16 = 3260;
/// The initiator's name.
const INITIATOR: &str = "iqn.2026-11.io.blockyard.test:one";
/// Folder of iscsid's and iscsiadm's files, which is compiled into them.
const FOLDER: &str = "/etc/iscsi";

/// Settings of new nodes. Reconnects are not delayed, and a dead connection is found within two seconds.
const SETTINGS: &str = "\
node.startup = manual
node.session.timeo.replacement_timeout = 120
node.conn[0].timeo.login_timeout = 15
node.conn[0].timeo.logout_timeout = 15
node.conn[0].timeo.noop_out_interval = 1
node.conn[0].timeo.noop_out_timeout = 5
node.session.err_timeo.abort_timeout = 15
node.session.err_timeo.lu_reset_timeout = 15
node.session.initial_login_retry_max = 1
node.session.cmds_max = 128
node.session.queue_depth = 32
node.session.iscsi.InitialR2T = No
node.session.iscsi.ImmediateData = Yes
node.session.iscsi.FirstBurstLength = 262144
node.session.iscsi.MaxBurstLength = 1048576
node.session.iscsi.DefaultTime2Wait = 0
node.conn[0].iscsi.MaxRecvDataSegmentLength = 262144
discovery.sendtargets.iscsi.MaxRecvDataSegmentLength = 32768
";

/// A running iscsid. When dropped, all of its sessions are logged out, and it ends.
struct Initiator {
    daemon: Child,
}

impl Initiator {
    fn start() -> Result<Initiator, Skip> {
        for name in ["iscsi_tcp", "sd_mod", "sg"] {
            module(&[name])?;
        }
        if find("iscsid").is_none() {
            return Err(Skip("iscsid is not installed".into()));
        }
        // Removes files that an earlier test left.
        let _ = std::fs::remove_dir_all(FOLDER);
        for folder in [FOLDER, "/run/lock/iscsi"] {
            std::fs::create_dir_all(folder).expect("root may");
        }
        let name = format!("InitiatorName={INITIATOR}\n");
        std::fs::write(Path::new(FOLDER).join("initiatorname.iscsi"), name).expect("root may");
        std::fs::write(Path::new(FOLDER).join("iscsid.conf"), SETTINGS).expect("root may");
        let mut daemon = Command::new(find("iscsid").unwrap_or_default());
        daemon.arg("-f").stdin(Stdio::null()).stdout(Stdio::null());
        let daemon = daemon.spawn().expect("it is installed");
        let initiator = Initiator { daemon };
        // It answers when it can list the sessions: 21 is "no sessions".
        let is_ready = || matches!(iscsiadm(&["-m", "session"]).status.code(), Some(0 | 21));
        until(PATIENCE, || is_ready().then_some(())).expect("iscsid answers");
        Ok(initiator)
    }

    /// Adds a second initiator name, for `-I two`.
    fn second_name(&self, name: &str) {
        iscsiadm(&["-m", "iface", "-I", "two", "-o", "new"]).ok();
        iscsiadm(&["-m", "iface", "-I", "two", "-o", "update", "-n", "iface.initiatorname", "-v", name]).ok();
    }

    /// Creates a node record, without discovery, and changes its settings. `interface`: `default` or `two`.
    fn node(&self, portal: &str, interface: &str, settings: &[(&str, &str)]) -> Node {
        let node = Node { portal: portal.to_owned(), interface: interface.to_owned() };
        node.record(&["-o", "new"]).ok();
        for (key, value) in settings {
            node.set(key, value);
        }
        node
    }

    /// Logs in at the portal under the usual name.
    #[track_caller]
    fn login(&self) -> Session {
        self.node(PORTAL, "default", &[]).login()
    }
}

impl Drop for Initiator {
    fn drop(&mut self) {
        if !sessions().is_empty() {
            let outcome = iscsiadm(&["-m", "node", "-u"]);
            if !std::thread::panicking() {
                outcome.ok();
                until(PATIENCE, || sessions().is_empty().then_some(())).expect("the sessions end");
            }
        }
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn iscsiadm(arguments: &[&str]) -> Outcome {
    tool(&[&["iscsiadm"], arguments].concat())
}

/// A target at a portal, as open-iscsi records it.
struct Node {
    portal: String,
    interface: String,
}

impl Node {
    fn record(&self, arguments: &[&str]) -> Outcome {
        let node = ["-m", "node", "-T", NAME, "-p", &self.portal, "-I", &self.interface];
        iscsiadm(&[&node[..], arguments].concat())
    }

    #[track_caller]
    fn set(&self, key: &str, value: &str) {
        self.record(&["-o", "update", "-n", key, "-v", value]).ok();
    }

    /// Logs in, and waits for the disk.
    #[track_caller]
    fn login(&self) -> Session {
        let before = sessions();
        self.record(&["--login"]).ok();
        let path = sessions().into_iter().find(|session| !before.contains(session)).expect("a new session");
        keep_awake(&path);
        let disk = until(PATIENCE, || disk_of(&path)).expect("the session has a disk");
        let session = Session { path, disk: Disk::at(disk) };
        until(PATIENCE, || (!session.disk.is_empty()).then_some(())).expect("it has a size");
        // The node exists before the driver lets anyone open it.
        until(PATIENCE, || std::fs::File::open(&session.disk.node).ok()).expect("it can be opened");
        session
    }
}

/// Returns the sessions' folders in sysfs.
fn sessions() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/sys/class/iscsi_session").into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Disables runtime power management of a session's target. Linux 7.3 warns about its own work queues
/// (`iscsi_ctrl` is flushing `pm_runtime_work`) if that has work left when the initiator logs out.
fn keep_awake(session: &Path) {
    let control = |target: &PathBuf| target.join("power/control");
    let target = until(PATIENCE, || targets_of(session).into_iter().find(|target| control(target).exists()));
    std::fs::write(control(&target.expect("the session has a target")), "on").expect("root may");
}

/// Returns the folders of a session's SCSI targets.
fn targets_of(session: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(session.join("device")).into_iter().flatten().flatten();
    let targets = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("target"));
    targets.map(|target| target.path()).collect()
}

/// Returns the state of a session, by its folder in sysfs.
fn state_of(session: &Path) -> String {
    std::fs::read_to_string(session.join("state")).unwrap_or_default().trim().to_owned()
}

/// Returns the node of a session's first disk.
fn disk_of(session: &Path) -> Option<PathBuf> {
    disks_of(session).into_iter().next()
}

/// Returns the nodes of a session's disks.
fn disks_of(session: &Path) -> Vec<PathBuf> {
    let entries = |path: PathBuf| std::fs::read_dir(path).into_iter().flatten().flatten();
    let units = targets_of(session).into_iter().flat_map(entries);
    let disks = units.flat_map(|unit| entries(unit.path().join("block")));
    // The class's link to a disk appears later.
    let known = disks.filter(|disk| Path::new("/sys/block").join(disk.file_name()).join("size").exists());
    known.map(|disk| Path::new("/dev").join(disk.file_name())).collect()
}

/// A logged-in session with one disk.
struct Session {
    path: PathBuf,
    disk: Disk,
}

impl Session {
    /// Returns its state: `LOGGED_IN`, `FAILED`, `FREE`.
    fn state(&self) -> String {
        state_of(&self.path)
    }

    /// Returns a connection parameter of sysfs.
    #[track_caller]
    fn connection(&self, name: &str) -> String {
        let number = self.path.file_name().and_then(|name| name.to_str()?.strip_prefix("session"));
        let folder = format!("/sys/class/iscsi_connection/connection{}:0", number.unwrap_or_default());
        let path = Path::new(&folder).join(name);
        std::fs::read_to_string(&path)
            .unwrap_or_else(|why| panic!("{}: {why}", path.display()))
            .trim()
            .to_owned()
    }
}

/// Serves a file of this size at [`PORTAL`], with further options of `--iscsi`.
fn serve(sandbox: &Sandbox, len: u64, options: &str) -> Result<Target, Skip> {
    needs()?;
    let image = sandbox.image("disk.img", len);
    Ok(Target::serve_at(sandbox, PORTAL_PORT, &file_stack(&image), options, &[]))
}

/// Returns an error if the binary under test has no `--iscsi`.
fn needs() -> Result<(), Skip> {
    if crate::iscsi::lacks_export() { Err(Skip("this blockyard has no --iscsi".into())) } else { Ok(()) }
}

fn login() -> Done {
    use std::os::unix::fs::MetadataExt;
    let sandbox = Sandbox::default();
    let _target = serve(&sandbox, 64 << 20, "")?;
    let initiator = Initiator::start()?;
    let found = iscsiadm(&["-m", "discovery", "-t", "sendtargets", "-p", PORTAL]).ok();
    assert_eq!(found.trim(), format!("{PORTAL},1 {NAME}"));
    // The record that discovery made has a group tag, which ours has not.
    iscsiadm(&["-m", "node", "-o", "delete"]).ok();
    let session = initiator.login();
    let disk = &session.disk;
    assert_eq!(disk.len(), 64 << 20);
    assert_eq!(session.state(), "LOGGED_IN");
    disk.verify(&["--size=8M", "--bsrange=4k-64k"]);
    disk.format("ext4");
    let mounted = disk.mount(&sandbox.path("mnt"));
    let file = mounted.at.join("file");
    std::fs::write(&file, crate::server::noise(3, 8 << 20)).expect("room for it");
    tool(&["sync"]).ok();
    std::fs::remove_file(&file).expect("it exists");
    tool(&["sync"]).ok();
    let used = || std::fs::metadata(sandbox.path("disk.img")).expect("it exists").blocks() * 512;
    let before = used();
    tool(&["fstrim", "-v", &mounted.at.to_string_lossy()]).ok();
    assert!(used() + (4 << 20) < before, "{before} bytes before fstrim, {} after it", used());
    mounted.unmount();
    disk.check("ext4");
    Ok(())
}

fn chap() -> Done {
    let sandbox = Sandbox::default();
    let file = chap_file(&sandbox, "one", "0123456789abcdef");
    let text = "one:0123456789abcdef\nmutual target:fedcba9876543210\n";
    std::fs::write(&file, text).expect("it is ours");
    let _target = serve(&sandbox, 16 << 20, &format!(",chap={file}"))?;
    let initiator = Initiator::start()?;
    let node = initiator.node(PORTAL, "default", &[]);
    let refused = |why: &str| {
        let outcome = node.record(&["--login"]);
        assert!(!outcome.status.success(), "{why}: {outcome}");
        assert!(sessions().is_empty(), "{why}");
    };
    refused("without authentication");
    node.set("node.session.auth.authmethod", "CHAP");
    node.set("node.session.auth.username", "one");
    node.set("node.session.auth.password", "0123456789abcdeX");
    refused("another secret");
    node.set("node.session.auth.password", "0123456789abcdef");
    node.set("node.session.auth.username_in", "target");
    node.set("node.session.auth.password_in", "fedcba987654321X");
    refused("the target has another secret");
    node.set("node.session.auth.password_in", "fedcba9876543210");
    let session = node.login();
    session.disk.verify(&["--size=2M"]);
    Ok(())
}

fn digests() -> Done {
    let sandbox = Sandbox::default();
    let _target = serve(&sandbox, 16 << 20, "")?;
    let initiator = Initiator::start()?;
    let digest = "CRC32C";
    let settings = [("node.conn[0].iscsi.HeaderDigest", digest), ("node.conn[0].iscsi.DataDigest", digest)];
    let session = initiator.node(PORTAL, "default", &settings).login();
    assert_eq!(session.connection("header_digest"), "1");
    assert_eq!(session.connection("data_digest"), "1");
    session.disk.verify(&["--size=4M", "--bsrange=4k-256k"]);
    Ok(())
}

fn resize() -> Done {
    let sandbox = Sandbox::default();
    let _target = serve(&sandbox, 32 << 20, "")?;
    let initiator = Initiator::start()?;
    let session = initiator.login();
    let disk = &session.disk;
    disk.format("ext4");
    let mounted = disk.mount(&sandbox.path("mnt"));
    let noise = crate::server::noise(9, 2 << 20);
    std::fs::write(mounted.at.join("file"), &noise).expect("room for it");
    sandbox.run(&["resize", "disk", "64M"]).ok();
    iscsiadm(&["-m", "session", "--rescan"]).ok();
    let grown = until(Duration::from_secs(30), || (disk.len() == 64 << 20).then_some(()));
    assert!(grown.is_some(), "{} bytes after the rescan", disk.len());
    tool(&["resize2fs", disk.path()]).ok();
    std::fs::write(mounted.at.join("more"), crate::server::noise(1, 40 << 20)).expect("room for it");
    assert!(std::fs::read(mounted.at.join("file")).expect("the file") == noise, "it reads back otherwise");
    mounted.unmount();
    disk.check("ext4");
    Ok(())
}
