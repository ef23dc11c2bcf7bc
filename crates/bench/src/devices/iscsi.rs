//! Disks of the kernel's iSCSI initiator, driven by open-iscsi, on the targets of LIO and tgtd and on ours.
//!
//! All targets have the parameters of [`PARAMETERS`]. iscsid runs only while a subject is measured.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::subjects::{
    Device, LIMIT, Site, await_size, lio_store, make, put, serve, spawn, wait_for, within,
};
use crate::error::{Error, Result};
use crate::tools::run;

const NAME: &str = "iqn.2026-11.io.blockyard:bench";
const PORTAL: &str = "127.0.0.1:3260";
/// The values that our target negotiates, set on LIO as well: LIO's defaults are segments of 8 KiB and an
/// initial R2T.
const PARAMETERS: [(&str, &str); 5] = [
    ("MaxRecvDataSegmentLength", "262144"),
    ("FirstBurstLength", "262144"),
    ("MaxBurstLength", "1048576"),
    ("InitialR2T", "No"),
    ("ImmediateData", "Yes"),
];
/// Settings of the initiator.
const SETTINGS: &str = "\
node.startup = manual
node.session.cmds_max = 128
node.session.queue_depth = 64
node.session.iscsi.InitialR2T = No
node.session.iscsi.ImmediateData = Yes
node.session.iscsi.FirstBurstLength = 262144
node.session.iscsi.MaxBurstLength = 1048576
node.conn[0].iscsi.MaxRecvDataSegmentLength = 262144
";

/// Drivers of the initiator.
pub(super) const INITIATOR: [&str; 2] = ["iscsi_tcp", "sd_mod"];

/// Logs in to a target of LIO over this backstore.
pub(super) fn lio(core: &str, control: &str) -> Result<Device> {
    let (store, hba) = lio_store(core, control)?;
    let target = format!("/sys/kernel/config/target/iscsi/{NAME}");
    let group = format!("{target}/tpgt_1");
    make(&Path::new(&group).join("lun/lun_0"))?;
    run(&["ln", "-s", &store, &format!("{group}/lun/lun_0/p")])?;
    for (attribute, value) in [
        ("authentication", "0"),
        ("generate_node_acls", "1"),
        ("demo_mode_write_protect", "0"),
        ("default_cmdsn_depth", "128"),
    ] {
        put(&Path::new(&group).join("attrib").join(attribute), value)?;
    }
    for (name, value) in PARAMETERS {
        put(&Path::new(&group).join("param").join(name), value)?;
    }
    make(&Path::new(&group).join("np").join(PORTAL))?;
    put(&Path::new(&group).join("enable"), "1")?;
    let mut device = login()?;
    device.also(&[
        &["sh", "-c", &format!("echo 0 >{group}/enable")],
        &["rmdir", &format!("{group}/np/{PORTAL}")],
        &["rm", &format!("{group}/lun/lun_0/p")],
        &["rmdir", &format!("{group}/lun/lun_0")],
        &["rmdir", &group],
        &["rmdir", &target],
        &["rmdir", &store],
        &["rmdir", &hba],
    ]);
    Ok(device)
}

/// Logs in to our target over this stack.
pub(super) fn ours(stack: &str, file: &Path, site: &Site) -> Result<Device> {
    let export = format!("--iscsi=tcp:{PORTAL},target={NAME}");
    let (child, _) = serve(stack, &[&export], file, site)?;
    let pid = child.id();
    let mut device = login()?;
    device.also(&[&["kill", &pid.to_string()]]);
    device.is_served_by(child);
    Ok(device)
}

/// Logs in to tgtd's target over a file, with its pool of threads and buffered I/O.
pub(super) fn tgtd(file: &Path) -> Result<Device> {
    make(Path::new("/var/run/tgtd"))?;
    let mut command = Command::new("tgtd");
    command.args(["--foreground", "--iscsi", &format!("portal={PORTAL}")]);
    let mut child = spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
    let result = tgtd_target(file).and_then(|()| login());
    let mut device = match result {
        Ok(device) => device,
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
    };
    // tgtd ignores SIGTERM; it ends at this command once it has no target.
    let end = ["tgtadm", "--lld", "iscsi", "--op", "delete", "--mode"];
    device.also(&[
        &[&end[..], &["target", "--tid", "1", "--force"]].concat(),
        &[&end[..], &["system"]].concat(),
    ]);
    device.is_served_by(child);
    Ok(device)
}

/// Gives tgtd its target with a unit over `file`.
fn tgtd_target(file: &Path) -> Result<()> {
    let admin = |arguments: &[&str]| run(&[&["tgtadm", "--lld", "iscsi"], arguments].concat());
    let target = ["--mode", "target", "--tid", "1"];
    within(LIMIT, || admin(&["--op", "show", "--mode", "target"]).ok())
        .ok_or_else(|| Error("tgtd does not get ready".into()))?;
    admin(&[&["--op", "new"], &target[..], &["-T", NAME]].concat())?;
    for (name, value) in PARAMETERS {
        admin(&[&["--op", "update"], &target[..], &["--name", name, "--value", value]].concat())?;
    }
    let unit = ["--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", "1", "--bstype", "rdwr"];
    admin(&[&unit[..], &["--backing-store", &file.to_string_lossy()]].concat())?;
    admin(&[&["--op", "bind"], &target[..], &["--initiator-address", "ALL"]].concat())
}

fn login() -> Result<Device> {
    for folder in ["/etc/iscsi", "/run/lock/iscsi"] {
        make(Path::new(folder))?;
    }
    let write = |name: &str, text: &str| {
        let path = Path::new("/etc/iscsi").join(name);
        fs::write(&path, text).map_err(Error::at(&path))
    };
    write("initiatorname.iscsi", "InitiatorName=iqn.2026-11.io.blockyard.bench:one\n")?;
    write("iscsid.conf", SETTINGS)?;
    let mut daemon = spawn(Command::new("iscsid").arg("-f").stdout(Stdio::null()).stderr(Stdio::null()))?;
    let pid = daemon.id().to_string();
    let node = ["iscsiadm", "-m", "node", "-T", NAME, "-p", PORTAL];
    let command = |arguments: &[&str]| run(&[&node[..], arguments].concat());
    // iscsiadm succeeds once iscsid is ready.
    let logged_in = within(LIMIT, || command(&["-o", "new"]).ok())
        .ok_or_else(|| Error("iscsid does not answer".into()))
        .and_then(|()| command(&["--login"]))
        .and_then(|()| wait_for(&["/dev/sda"]))
        .and_then(|found| await_size("sda").map(|()| found));
    let found = match logged_in {
        Ok(found) => found,
        Err(error) => {
            let _ = daemon.kill();
            let _ = daemon.wait();
            return Err(error);
        }
    };
    let mut device = Device::new(&found, &[&[&node[..], &["--logout"]].concat(), &["kill", "-9", &pid]]);
    device.has_helper(daemon);
    Ok(device)
}
