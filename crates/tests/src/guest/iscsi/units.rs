//! Logical units that come and go under a session of the kernel's initiator, by `blockyard targetcli`.

use super::{Initiator, disks_of, iscsiadm, needs};
use crate::guest::disk::{Disk, tool};
use crate::guest::{Done, Test, test};
use crate::iscsi::NAME;
use crate::server::Sandbox;
use crate::tools::{PATIENCE, run, until};
use std::fs::File;
use std::path::PathBuf;

pub(super) const TESTS: &[Test] =
    &[test("iscsi/units", "targetcli adds and removes a LUN under a session; a rescan finds it", units)];

/// targetcli with a tree of its own, which is cleared when dropped.
struct Targetcli<'a>(&'a Sandbox);

impl Targetcli<'_> {
    fn command(&self, line: &str) -> std::process::Command {
        let words: Vec<&str> = std::iter::once("targetcli").chain(line.split(' ')).collect();
        let mut command = self.0.blockyard(&words);
        command
            .env("BLOCKYARD_SAVECONFIG", self.0.path("etc/saveconfig.json"))
            .env("TARGETCLI_HOME", self.0.path("home"));
        command
    }

    #[track_caller]
    fn run(&self, line: &str) -> String {
        run(&mut self.command(line)).ok()
    }
}

impl Drop for Targetcli<'_> {
    fn drop(&mut self) {
        let _ = self.command("clearconfig confirm=True").output();
    }
}

fn units() -> Done {
    needs()?;
    let sandbox = Sandbox::default();
    let targetcli = Targetcli(&sandbox);
    let group = format!("/iscsi/{NAME}/tpg1");
    for line in [
        "/backstores/fileio create one one.img 8M",
        "/backstores/fileio create two two.img 16M",
        &format!("/iscsi create {NAME}"),
        &format!("{group} set attribute generate_node_acls=1 demo_mode_write_protect=0 authentication=0"),
        &format!("{group}/luns create /backstores/fileio/one"),
    ] {
        targetcli.run(line);
    }
    let initiator = Initiator::start()?;
    let session = initiator.login();
    assert_eq!(session.disk.len(), 8 << 20);
    session.disk.verify(&["--size=1M"]);

    targetcli.run(&format!("{group}/luns create /backstores/fileio/two"));
    iscsiadm(&["-m", "session", "--rescan"]).ok();
    let is_new = |node: &PathBuf| node != &session.disk.node;
    let added = until(PATIENCE, || disks_of(&session.path).into_iter().find(is_new));
    let added = Disk::at(added.expect("the rescan finds the second LUN"));
    until(PATIENCE, || File::open(&added.node).ok()).expect("it can be opened");
    assert_eq!(added.len(), 16 << 20);
    added.verify(&["--size=1M"]);

    targetcli.run(&format!("{group}/luns delete lun1"));
    // The first command reports the unit attention; the list contains it.
    let luns = || tool(&["sg_luns", session.disk.path()]);
    let _ = luns();
    let listed = luns().ok();
    assert!(listed.contains("Lun list length = 8"), "{listed}");
    assert!(!tool(&["sg_turs", added.path()]).status.success(), "a removed unit answers");
    let delete = format!("/sys/block/{}/device/delete", added.name());
    std::fs::write(&delete, "1").expect("root may");
    session.disk.verify(&["--size=1M"]);
    Ok(())
}
