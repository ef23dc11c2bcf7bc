//! `blockyard targetcli`: commands, shells from a pipe, restoring after a restart, private files.

use blockyard_tests::iscsi::free_port;
use blockyard_tests::server::Sandbox;
use blockyard_tests::tools::{Outcome, PATIENCE, run, until};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

const TARGET: &str = "iqn.2003-01.org.linux-iscsi.host:disk";
const INITIATOR: &str = "iqn.1993-08.org.debian:01:abc";

/// A sandbox with a user's own targetcli, which ends with it.
#[derive(Default)]
struct Lio(Sandbox);

impl Lio {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.0.blockyard(&[&["targetcli"], arguments].concat());
        command
            .env("BLOCKYARD_SAVECONFIG", self.0.path("etc/saveconfig.json"))
            .env("TARGETCLI_HOME", self.0.path("home"));
        command
    }

    #[track_caller]
    fn run(&self, line: &str) -> Outcome {
        run(&mut self.command(&line.split(' ').collect::<Vec<_>>()))
    }

    /// Runs lines as a pipe gives them.
    #[track_caller]
    fn pipe(&self, lines: &str) -> (bool, String) {
        let mut command = self.command(&[]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        child.stdin.take().expect("a pipe").write_all(lines.as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).expect("UTF-8"))
    }

    fn list(&self) -> String {
        self.0.run(&["list"]).ok()
    }

    /// Returns the process that serves the tree.
    fn pid(&self) -> Option<rustix::process::Pid> {
        let target = std::fs::read_link(self.0.run_dir().join("targetcli.control")).ok()?;
        let number = target.to_str()?.strip_prefix("control.")?.parse().ok()?;
        rustix::process::Pid::from_raw(number)
    }
}

impl Drop for Lio {
    fn drop(&mut self) {
        let _ = self.command(&["clearconfig", "confirm=True"]).output();
    }
}

#[test]
fn queries_start_no_process_and_the_last_removal_ends_it() {
    let lio = Lio::default();
    assert!(lio.run("ls /").ok().contains("o- user:stack"));
    assert!(lio.pid().is_none());
    let created = lio.run("/backstores/fileio create disk1 disk1.img 10M").ok();
    assert_eq!(created, "Created fileio disk1 with size 10485760\n");
    assert!(lio.list().contains("fileio-disk1"), "{}", lio.list());
    assert_eq!(std::fs::metadata(lio.0.path("disk1.img")).expect("a file").len(), 10 << 20);
    assert!(lio.pid().is_some());
    assert_eq!(lio.run("/backstores/fileio delete disk1").ok(), "Deleted storage object disk1.\n");
    assert!(until(PATIENCE, || lio.pid().is_none().then_some(())).is_some(), "the process ends");
    assert_eq!(std::fs::metadata(lio.0.path("disk1.img")).expect("the file stays").len(), 10 << 20);
    // A command right after that starts another process.
    lio.run("/backstores/ramdisk create fast 1M").ok();
    lio.run("/backstores/ramdisk delete fast").ok();
    lio.run("/backstores/ramdisk create fast 1M").ok();
}

#[test]
fn the_texts_sequence_gives_a_device() {
    let lio = Lio::default();
    lio.0.noise("FILE", 1 << 20);
    let (succeeded, output) = lio.pipe(
        "cd /backstores/fileio\ncreate name=disk file_or_dev=FILE\ncd /loopback\ncreate\ncd luns\n\
         create /backstores/fileio/disk\n",
    );
    assert!(succeeded && output.contains("Created fileio disk with size 1048576\n"), "{output}");
    assert!(output.contains("Created LUN 0.\n"), "{output}");
    let list = lio.list();
    let line = list.lines().find(|line| line.starts_with("fileio-disk ")).expect("it is listed");
    assert!(line.contains("nbd+unix:"), "the sandbox has no other local export: {line}");
    assert!(output.contains("Configuration saved to "), "{output}");
    let luns = lio.run("ls /loopback").ok();
    assert!(luns.contains("lun0") && luns.contains("(default_tg_pt_gp)"), "{luns}");
}

#[test]
fn a_failed_line_of_a_pipe_does_not_stop_the_others() {
    let lio = Lio::default();
    let (succeeded, output) = lio.pipe("# a comment\nnothing\n/backstores/ramdisk create fast 1M\n");
    assert!(!succeeded && output.contains("Command not found nothing"), "{output}");
    assert!(output.contains("Created ramdisk fast with size 1M."), "{output}");
    assert_eq!(
        lio.run("/backstores/ramdisk create fast 1M").failed_with(1),
        "Storage object ramdisk/fast exists\n"
    );
}

#[test]
fn a_configuration_survives_its_process_and_keeps_its_secrets() {
    let lio = Lio::default();
    let acl = format!("/iscsi/{TARGET}/tpg1/acls/{INITIATOR}");
    for line in [
        "set global auto_add_default_portal=false",
        "/backstores/fileio create disk1 disk1.img 1M write_back=false",
        &format!("/iscsi create {TARGET}"),
        &format!("/iscsi/{TARGET}/tpg1/luns create /backstores/fileio/disk1"),
        &format!("/iscsi/{TARGET}/tpg1/acls create {INITIATOR}"),
        &format!("{acl} set auth userid=user password=geheimeswort"),
        "/loopback create naa.5001405a1b2c3d4e",
        "saveconfig",
    ] {
        lio.run(line).ok();
    }
    assert!(lio.list().contains(",sync"), "write-through: {}", lio.list());
    let file = lio.0.path("etc/saveconfig.json");
    let saved = std::fs::read_to_string(&file).expect("it is saved");
    assert!(saved.contains("\"chap_password\": \"geheimeswort\""));
    assert_eq!(std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
    let pid = lio.pid().expect("a process");
    let arguments =
        std::fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).expect("arguments");
    assert!(arguments.contains("targetcli-host") && !arguments.contains("geheimeswort"));

    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is killed");
    assert!(until(PATIENCE, || (!lio.list().contains("fileio-disk1")).then_some(())).is_some());
    let restored = lio.run("restoreconfig").ok();
    assert_eq!(restored, format!("Configuration restored from {}\n", file.display()));
    lio.run("saveconfig again.json").ok();
    assert_eq!(std::fs::read_to_string(lio.0.path("again.json")).expect("it is saved"), saved);
    assert_eq!(lio.run(&format!("{acl} get auth password")).ok(), "password=geheimeswort \n");

    // No other file has the secret, and no output that did not ask for it.
    for entry in std::fs::read_dir(lio.0.run_dir()).expect("entries").flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let text = std::fs::read(entry.path()).expect("it is read");
            assert!(!String::from_utf8_lossy(&text).contains("geheimeswort"), "{:?}", entry.path());
        }
    }
    for line in ["ls /", &format!("{acl} info"), &format!("{acl} get auth")] {
        assert!(!lio.run(line).ok().contains("geheimeswort"), "{line}");
    }
}

#[test]
fn a_file_of_lio_is_restored_and_what_cannot_be_is_reported() {
    let lio = Lio::default();
    let disk = lio.0.image("disk1.img", 1 << 20);
    let port = free_port();
    let text = format!(
        r#"{{"fabric_modules": [], "storage_objects": [
            {{"name": "disk1", "plugin": "fileio", "dev": "{}", "size": 1048576, "write_back": true, "aio": false,
              "wwn": "30f2b2d1-2a4b-4d6e-8d8e-0123456789ab",
              "attributes": {{"block_size": 512, "emulate_tpu": 1, "queue_depth": 128, "optimal_sectors": 16384}},
              "alua_tpgs": [{{"name": "default_tg_pt_gp", "tg_pt_gp_id": 0, "alua_access_state": 0}}]}},
            {{"name": "gone", "plugin": "fileio", "dev": "/nonexistent/gone.img", "size": 4096, "wwn": "w2"}}],
          "targets": [{{"fabric": "iscsi", "wwn": "{TARGET}", "tpgs": [{{"tag": 1, "enable": true,
              "attributes": {{"authentication": 0, "netif_timeout": 2}}, "parameters": {{"InitialR2T": "No"}},
              "luns": [{{"index": 3, "storage_object": "/backstores/fileio/disk1", "alias": "0a1b2c3d4e"}}],
              "portals": [{{"ip_address": "127.0.0.1", "port": {port}, "iser": false}}],
              "node_acls": [{{"node_wwn": "{INITIATOR}", "userid": "bare", "password": "spelling12345",
                  "mapped_luns": [{{"index": 0, "tpg_lun": 3, "write_protect": true}}], "later": 1}}]}}]}}],
          "unknown": {{"kept": true}}}}"#,
        disk.display()
    );
    lio.0.text("lio.json", &text);
    let outcome = lio.run("restoreconfig lio.json");
    let report = outcome.failed_with(1);
    assert!(report.contains("Configuration restored, 1 recoverable errors:\n"), "{report}");
    assert!(report.contains("Could not create StorageObject gone: /nonexistent/gone.img"), "{report}");
    let tree = lio.run("ls /iscsi").ok();
    assert!(tree.contains("lun3 fileio/disk1 (ro)"), "{tree}");
    let acl = format!("/iscsi/{TARGET}/tpg1/acls/{INITIATOR}");
    assert_eq!(lio.run(&format!("{acl} get auth userid")).ok(), "userid=bare \n");
    lio.run("saveconfig again.json").ok();
    let again = std::fs::read_to_string(lio.0.path("again.json")).expect("it is saved");
    for kept in
        ["\"kept\": true", "\"later\": 1", "\"chap_password\": \"spelling12345\"", "\"InitialR2T\": \"No\""]
    {
        assert!(again.contains(kept), "{kept} in {again}");
    }
    assert!(lio.run("restoreconfig again.json").failed_with(1).contains("exist not restoring"));
    lio.run("restoreconfig again.json clear_existing=true").ok();
}
