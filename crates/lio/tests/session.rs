//! Sessions of targetcli: the output of command lines, word for word, and what they change.

use blockyard_lio::config::{Change, Config};
use blockyard_lio::memory::Memory;
use blockyard_lio::prefs::Prefs;
use blockyard_lio::run::{Answer, Call, Item, run};
use blockyard_lio::system::{BlockDevice, Connection, Nothing, Session};
use std::path::Path;

struct Shell {
    config: Config,
    system: Memory,
    node: String,
    prefs: Prefs,
    folder: tempfile::TempDir,
    width: usize,
}

impl Shell {
    fn new() -> Shell {
        Shell {
            config: Config::default(),
            system: Memory::default(),
            node: "/".to_owned(),
            prefs: Prefs::default(),
            folder: tempfile::tempdir().expect("a folder"),
            width: 80,
        }
    }

    fn call(&self, line: &str) -> Call {
        Call {
            line: line.to_owned(),
            node: self.node.clone(),
            folder: self.folder.path().to_owned(),
            home: None,
            save_file: self.folder.path().join("saveconfig.json"),
            width: self.width,
            colour: false,
            prefs: self.prefs.clone(),
        }
    }

    fn answer(&mut self, line: &str) -> Answer {
        let call = self.call(line);
        let answer = run(&mut self.config, &mut self.system, &call);
        self.node.clone_from(&answer.node);
        self.prefs = answer.prefs.clone();
        answer
    }

    /// Runs a line; returns its output with the test's folder as `DIR`.
    fn run(&mut self, line: &str) -> String {
        let answer = self.answer(line);
        let mut text = String::new();
        for item in answer.items {
            match item {
                Item::Text(part) => text += &part,
                Item::Info(line) | Item::Warning(line) => text += &format!("{line}\n"),
            }
        }
        if let Some(error) = answer.error {
            text += &format!("error: {error}\n");
        }
        text.replace(self.folder.path().to_str().expect("UTF-8"), "DIR")
    }

    fn all(&mut self, lines: &[&str]) -> String {
        lines.iter().map(|line| self.run(line)).collect()
    }

    /// Runs lines that must succeed.
    #[track_caller]
    fn ok(&mut self, lines: &[&str]) {
        for line in lines {
            let answer = self.answer(line);
            assert_eq!(answer.error, None, "{line}");
        }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("UTF-8").to_owned()
    }
}

/// Configures a target with every kind of object.
fn full() -> Shell {
    let mut shell = Shell::new();
    shell.ok(&[
        "/backstores/fileio create disk1 disk1.img 1M",
        "/backstores/fileio create disk2 disk2.img 2M write_back=false",
        "/backstores/ramdisk create fast 64M",
        "/backstores/user:stack create image file:/x.qcow2,format=qcow2",
        "/iscsi create iqn.2003-01.org.linux-iscsi.host:disk",
        "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1/luns create /backstores/fileio/disk1",
        "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1/luns create /backstores/ramdisk/fast 5",
        "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1/acls create iqn.1993-08.org.debian:01:abc",
        "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1/acls/iqn.1993-08.org.debian:01:abc set auth userid=u password=geheim",
        "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1 set attribute authentication=1",
        "/iscsi set discovery_auth enable=1 userid=du password=dp",
        "/loopback create naa.5001405a1b2c3d4e",
        "/loopback/naa.5001405a1b2c3d4e/luns create /backstores/fileio/disk2",
    ]);
    shell
}

#[test]
fn the_sequence_of_the_text_works_word_for_word() {
    let mut shell = Shell::new();
    std::fs::write(shell.folder.path().join("FILE"), [0; 4096]).expect("a file");
    let output = shell.all(&[
        "cd /backstores/fileio",
        "create name=disk file_or_dev=FILE",
        "cd /loopback",
        "create",
        "cd luns",
        "create /backstores/fileio/disk",
        "pwd",
    ]);
    let expected = "\
Created fileio disk with size 4096
Created target naa.5001405000000000.
Entering /loopback/naa.5001405000000000/luns
Created LUN 0.
Created block device /dev/memory0.
/loopback/naa.5001405000000000/luns
";
    assert_eq!(output, expected);
}

#[test]
fn the_sequence_works_with_auto_cd_after_create_too() {
    let mut shell = Shell::new();
    std::fs::write(shell.folder.path().join("FILE"), [0; 4096]).expect("a file");
    shell.ok(&[
        "set global auto_cd_after_create=true",
        "cd /backstores/fileio",
        "create name=disk file_or_dev=FILE",
        "cd /loopback",
        "create",
        "cd luns",
        "create /backstores/fileio/disk",
    ]);
    assert!(shell.node.ends_with("/luns/lun0"), "{}", shell.node);
}

#[test]
fn a_target_is_created_with_targetclis_messages() {
    let mut shell = Shell::new();
    let output = shell.all(&[
        "/backstores/fileio create disk1 disk1.img 10M",
        "/iscsi create iqn.2003-01.org.linux-iscsi.host:disk",
        "cd /iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1",
        "luns/ create /backstores/fileio/disk1",
        "acls/ create iqn.1993-08.org.debian:01:abc",
        "set attribute generate_node_acls=1",
        "portals/ delete ::0 3260",
        "portals/ create 127.0.0.1",
        "disable",
        "disable",
        "enable",
        "luns/ delete lun0",
        "/iscsi delete iqn.2003-01.org.linux-iscsi.host:disk",
        "/backstores/fileio delete disk1",
    ]);
    let expected = "\
Created fileio disk1 with size 10485760
Created target iqn.2003-01.org.linux-iscsi.host:disk.
Created TPG 1.
Global pref auto_add_default_portal=true
Created default portal listening on all IPs (::0), port 3260.
Created LUN 0.
Created Node ACL for iqn.1993-08.org.debian:01:abc
Created mapped LUN 0.
Parameter generate_node_acls is now '1'.
Deleted network portal ::0:3260
Using default IP port 3260
Created network portal 127.0.0.1:3260.
The TPGT has been disabled.
The TPGT is already disabled.
The TPGT has been enabled.
Deleted LUN 0.
Deleted Target iqn.2003-01.org.linux-iscsi.host:disk.
Deleted storage object disk1.
";
    assert_eq!(output, expected);
    assert!(shell.config.is_empty() && shell.node == "/iscsi", "{}", shell.node);
}

#[test]
fn ls_draws_the_tree_as_configshell_does() {
    let mut shell = full();
    shell.width = 300;
    let tree = shell.run("ls /").replace("DIR/", "");
    let shown: Vec<String> = tree
        .lines()
        .map(|line| {
            let (name, rest) = line.split_once(" .").expect("dots");
            format!("{name} {}", rest.trim_start_matches('.').trim_start())
        })
        .collect();
    let expected = "\
o- / [...]
  o- backstores [...]
  | o- block [Storage Objects: 0]
  | o- fileio [Storage Objects: 2]
  | | o- disk1 [disk1.img (1.0MiB) write-back activated]
  | | | o- alua [ALUA Groups: 1]
  | | |   o- default_tg_pt_gp [ALUA state: Active/optimized]
  | | o- disk2 [disk2.img (2.0MiB) write-thru activated]
  | |   o- alua [ALUA Groups: 1]
  | |     o- default_tg_pt_gp [ALUA state: Active/optimized]
  | o- ramdisk [Storage Objects: 1]
  | | o- fast [(64.0MiB) activated]
  | |   o- alua [ALUA Groups: 1]
  | |     o- default_tg_pt_gp [ALUA state: Active/optimized]
  | o- user:stack [Storage Objects: 1]
  |   o- image [file:/x.qcow2,format=qcow2 (1.0MiB) deactivated]
  |     o- alua [ALUA Groups: 1]
  |       o- default_tg_pt_gp [ALUA state: Active/optimized]
  o- iscsi [1-way disc auth, Targets: 1]
  | o- iqn.2003-01.org.linux-iscsi.host:disk [TPGs: 1]
  |   o- tpg1 [no-gen-acls, auth per-acl]
  |     o- acls [ACLs: 1]
  |     | o- iqn.1993-08.org.debian:01:abc [1-way auth, Mapped LUNs: 2]
  |     |   o- mapped_lun0 [lun0 fileio/disk1 (rw)]
  |     |   o- mapped_lun5 [lun5 ramdisk/fast (rw)]
  |     o- luns [LUNs: 2]
  |     | o- lun0 [fileio/disk1 (disk1.img) (default_tg_pt_gp)]
  |     | o- lun5 [ramdisk/fast (default_tg_pt_gp)]
  |     o- portals [Portals: 1]
  |       o- [::0]:3260 [OK]
  o- loopback [Targets: 1]";
    assert_eq!(shown[..31].join("\n"), expected);
    assert!(shown[31].starts_with("    o- naa.5001405a1b2c3d4e [naa.5001405"), "{shown:#?}");
    assert_eq!(
        shown[32..].join("\n"),
        "      o- luns [LUNs: 1]\n        o- lun0 [fileio/disk2 (disk2.img) (default_tg_pt_gp)]"
    );
    shell.width = 80;
    let plain = shell.run("ls / 1");
    let width: Vec<usize> = plain.lines().map(|line| line.chars().count()).collect();
    assert_eq!(width, [80, 80, 80, 80], "{plain}");
    assert_eq!(plain.lines().next(), Some(format!("o- / {} [...]", ".".repeat(69)).as_str()));
}

#[test]
fn settings_are_shown_and_set_as_in_configshell() {
    let mut shell = full();
    shell.ok(&["cd /backstores/fileio/disk1"]);
    assert_eq!(
        shell.run("get attribute block_size hw_block_size"),
        "block_size=512 \nhw_block_size=512 [ro]\n"
    );
    let refused = shell.run("set attribute block_size=4096");
    assert!(
        refused.starts_with("error: Cannot set attribute block_size: [Errno 22] Invalid argument"),
        "{refused}"
    );
    assert_eq!(
        shell.run("set attribute hw_block_size=512"),
        "error: Parameter hw_block_size is read-only.\n"
    );
    assert_eq!(
        shell.run("set attribute nothing=1"),
        "error: Unknown parameter nothing in group 'attribute'.\n"
    );
    assert_eq!(shell.run("set nothing a=1"), "error: Unknown configuration group: nothing\n");
    assert_eq!(
        shell.run("set attribute emulate_tpu=x"),
        "error: Not setting emulate_tpu! Syntax error, 'x' is not a NUMBER.\n"
    );
    assert_eq!(shell.run("set attribute emulate_tpu=1"), "Parameter emulate_tpu is now '1'.\n");
    assert_eq!(
        shell.run("set"),
        "\nAVAILABLE CONFIGURATION GROUPS\n==============================\nglobal attribute\n"
    );
    let tpg = "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1";
    assert_eq!(shell.run(&format!("{tpg} get parameter MaxBurstLength")), "MaxBurstLength=262144 \n");
    assert_eq!(shell.run(&format!("{tpg} get parameter AuthMethod")), "AuthMethod=CHAP \n");
    assert_eq!(
        shell.run(&format!("{tpg} set parameter InitialR2T=no")),
        "error: Not setting InitialR2T! Syntax error, 'no' is not Yes|No.\n"
    );
    assert!(shell.run(&format!("{tpg} get attribute")).contains("\nlogin_timeout=15\n----------------\n"));
}

#[test]
fn secrets_are_hidden_except_when_asked_for() {
    let mut shell = full();
    let acl = "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1/acls/iqn.1993-08.org.debian:01:abc";
    for line in [
        "ls /",
        "sessions detail",
        &format!("{acl} info"),
        &format!("{acl} status"),
        &format!("{acl} get auth"),
    ] {
        let output = shell.run(line);
        assert!(!output.contains("geheim") && !output.is_empty(), "{line}: {output}");
    }
    assert_eq!(shell.run(&format!("{acl} set auth password=neu")), "Parameter password is now '********'.\n");
    assert_eq!(shell.run(&format!("{acl} get auth password userid")), "password=neu \nuserid=u \n");
    assert_eq!(shell.run(&format!("{acl} set auth password=")), "Parameter password is now ''.\n");
    assert!(!format!("{:?}", full().config).contains("geheim"));
}

#[test]
fn an_existing_file_keeps_its_size_and_a_new_one_needs_one() {
    let mut shell = Shell::new();
    std::fs::write(shell.folder.path().join("old"), [0; 8192]).expect("a file");
    let output = shell.all(&[
        "/backstores/fileio create a old 1G",
        "/backstores/fileio create b old",
        "/backstores/fileio create c new",
        "/backstores/fileio create c new 1x",
        "/backstores/fileio create c .",
        "/backstores/fileio create a/b new 1M",
    ]);
    let expected = "\
DIR/old exists, using its size (8192 bytes) instead
Created fileio a with size 8192
error: storage object for DIR/old already exists: a
error: Attempting to create file for new fileio backstore, need a size
error: Cannot interpret size, wrong format: 1x
error: Path DIR exists but is not a file
error: A storage object's name cannot contain  /, newline or spaces/tabs
";
    assert_eq!(output, expected);
    assert!(!Path::new(&shell.path("new")).exists());
    shell.system.fails = Some("no room".to_owned());
    assert_eq!(shell.run("/backstores/fileio create c new 1M"), "error: no room\n");
    assert!(!Path::new(&shell.path("new")).exists(), "a failed creation leaves no file");
}

#[test]
fn luns_of_files_and_block_devices_get_a_storage_object_first() {
    let mut shell = Shell::new();
    std::fs::write(shell.folder.path().join("image"), [0; 4096]).expect("a file");
    shell.system.block_devices.push(("/dev/x".to_owned(), BlockDevice { read_only: true }));
    shell.ok(&["/iscsi create iqn.2003-01.org.a:b", "cd /iscsi/iqn.2003-01.org.a:b/tpg1/luns"]);
    let output =
        shell.all(&["create image", "create /dev/x 7", "create missing", "create /backstores/fileio/image"]);
    let expected = "\
Created storage object image.
Created LUN 0.
Created storage object x.
Created LUN 7.
error: storage object or path not valid
error: lun for storage object fileio/image already exists
";
    assert_eq!(output, expected);
    assert!(shell.run("/backstores/block/x status").contains("/dev/x (1.0MiB) ro write-back activated"));
}

#[test]
fn acls_with_a_tag_are_changed_together() {
    let mut shell = Shell::new();
    shell.ok(&[
        "/backstores/ramdisk create fast 1M",
        "/iscsi create iqn.2003-01.org.a:b",
        "cd /iscsi/iqn.2003-01.org.a:b/tpg1",
        "luns/ create /backstores/ramdisk/fast",
        "acls/ create iqn.2003-01.org.a:i1",
        "acls/ create iqn.2003-01.org.a:i2 add_mapped_luns=false",
        "acls/ tag iqn.2003-01.org.a:i1 hosts",
        "acls/ tag iqn.2003-01.org.a:i2 hosts",
        "acls/hosts set auth userid=u password=p",
        "acls/hosts set attribute nopin_timeout=30",
    ]);
    assert_eq!(
        shell.run("acls/hosts status"),
        "Status for /iscsi/iqn.2003-01.org.a:b/tpg1/acls/hosts: (group of 2), Mapped LUNs: 1\n"
    );
    assert!(shell.run("acls/hosts info").ends_with("wwns:\niqn.2003-01.org.a:i1\niqn.2003-01.org.a:i2\n"));
    assert_eq!(
        shell.run("acls/hosts create 3 lun0 1"),
        "Warning: TPG LUN 0 already mapped to this NodeACL\nCreated Mapped LUN 3.\n"
    );
    shell.ok(&["acls/ untag hosts"]);
    for wwn in ["iqn.2003-01.org.a:i1", "iqn.2003-01.org.a:i2"] {
        assert_eq!(shell.run(&format!("acls/{wwn} get auth userid")), "userid=u \n");
        assert!(shell.run(&format!("acls/{wwn} ls")).contains("[lun0 ramdisk/fast (ro)]"));
    }
    assert_eq!(shell.run("acls/ tag x a.b"), "error: '.' not permitted in tag names.\n");
}

#[test]
fn alua_groups_are_created_used_and_deleted() {
    let mut shell = full();
    let object = "/backstores/fileio/disk1/alua";
    let lun = "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1/luns/lun0";
    assert_eq!(shell.run(&format!("{object} create second 2")), "Created ALUA TPG second.\n");
    assert_eq!(
        shell.run(&format!("{object}/second set alua alua_access_state=2")),
        "Parameter alua_access_state is now '2'.\n"
    );
    assert!(shell.run(&format!("{object}/second set alua alua_access_state=5")).starts_with("error: "));
    assert!(shell.run(&format!("{object} status")).contains("ALUA Groups: 2"));
    assert!(shell.run(&format!("{object}/second status")).contains("ALUA state: Standby"));
    shell.ok(&[&format!("{lun} set alua alua_tg_pt_gp_name=second")]);
    assert!(shell.run(&format!("{object}/second get alua members")).contains("tpgt_1/lun_0"));
    shell.ok(&[&format!("{object} delete second")]);
    assert_eq!(
        shell.run(&format!("{lun} get alua alua_tg_pt_gp_name")),
        "alua_tg_pt_gp_name=default_tg_pt_gp \n"
    );
    assert_eq!(
        shell.run(&format!("{object} delete default_tg_pt_gp")),
        "error: Can not delete default_tg_pt_gp\n"
    );
    assert!(shell.run(&format!("{object} create third 0")).contains("must be between 1 and 65535"));
}

#[test]
fn cd_travels_through_its_history() {
    let mut shell = full();
    shell.ok(&["cd /iscsi", "cd /backstores", "cd fileio"]);
    assert_eq!(shell.run("cd <"), "Taking you back to /backstores.\n");
    assert_eq!(shell.run("cd <"), "Taking you back to /iscsi.\n");
    assert_eq!(shell.run("cd >"), "Taking you back to /backstores.\n");
    shell.ok(&["cd <", "cd <"]);
    assert_eq!(shell.run("cd <"), "Reached begining of path history.\n");
    assert_eq!(shell.run("cd nowhere"), "error: No such path /nowhere\n");
    assert_eq!(shell.run("nothing"), "error: Command not found nothing\n");
    shell.ok(&["/iscsi"]);
    assert_eq!(shell.node, "/iscsi", "a path alone is entered");
    assert!(shell.run("* status").starts_with("[/iscsi/iqn.2003-01.org.linux-iscsi.host:disk]\nStatus for "));
}

#[test]
fn a_change_that_fails_changes_nothing() {
    let mut shell = full();
    let before = shell.config.clone();
    for line in [
        "/loopback create naa.5001405a1b2c3d4f",
        "/backstores/ramdisk create x 1M",
        "/iscsi create iqn.2003-01.org.x:y",
        "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1/luns delete 0",
        "/backstores/fileio/disk1 set attribute emulate_tpu=1",
    ] {
        shell.system.fails = Some("broken".to_owned());
        let output = shell.run(line);
        assert!(output.contains("broken"), "{line}: {output}");
        assert_eq!(shell.config, before, "{line}");
    }
}

#[test]
fn the_system_receives_each_change_in_order() {
    let shell = full();
    let adds =
        |change: &Change| matches!(change, Change::AddLun(..) | Change::AddMapped(..) | Change::Enable(..));
    let kinds: Vec<String> = shell
        .system
        .changes
        .iter()
        .filter(|change| adds(change))
        .map(|change| format!("{change:?}").split('(').next().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(kinds, ["Enable", "AddLun", "AddLun", "AddMapped", "AddMapped", "AddLun"]);
}

#[test]
fn queries_need_no_host_and_changes_do() {
    let shell = Shell::new();
    let mut config = Config::default();
    for line in [
        "ls",
        "cd /iscsi",
        "help",
        "get global",
        "sessions",
        "saveconfig other.json",
        "clearconfig confirm=True",
    ] {
        let answer = run(&mut config, &mut Nothing, &shell.call(line));
        assert!(!answer.needs_host && answer.error.is_none(), "{line}: {answer:?}");
    }
    for line in ["/iscsi create", "/backstores/fileio create a b 1M", "/iscsi set discovery_auth enable=1"] {
        assert!(run(&mut config, &mut Nothing, &shell.call(line)).needs_host, "{line}");
    }
    assert!(!Path::new(&shell.path("b")).exists());
}

#[test]
fn sessions_are_listed_as_targetcli_does() {
    let mut shell = full();
    assert_eq!(shell.run("sessions"), "(no open sessions)\n");
    let target = shell.config.targets.keys().next().expect("one").clone();
    shell.system.sessions.push(Session {
        id: 3,
        alias: "host".to_owned(),
        initiator: "iqn.1993-08.org.debian:01:abc".to_owned(),
        target,
        tag: 1,
        kind: "Normal".to_owned(),
        state: "LOGGED_IN".to_owned(),
        authenticated: true,
        connections: vec![Connection {
            cid: 0,
            address: "10.0.0.1".to_owned(),
            transport: "TCP".to_owned(),
            state: "LOGGED_IN".to_owned(),
        }],
    });
    let expected = "\
alias: host\tsid: 3 type: Normal session-state: LOGGED_IN
    name: iqn.1993-08.org.debian:01:abc (authenticated)
    mapped-lun: 0 backstore: fileio/disk1 mode: rw
    mapped-lun: 5 backstore: ramdisk/fast mode: rw
    address: 10.0.0.1 (TCP)  cid: 0 connection-state: LOGGED_IN
";
    assert_eq!(shell.run("sessions detail"), expected);
    assert_eq!(shell.run("sessions list 4"), "error: no session found with sid 4\n");
    assert_eq!(shell.run("sessions all"), "error: action must be one of: list, detail\n");
}

#[test]
fn a_saved_configuration_is_restored_as_it_was() {
    let mut shell = full();
    assert_eq!(shell.run("saveconfig"), "Configuration saved to DIR/saveconfig.json\n");
    let saved = std::fs::read_to_string(shell.path("saveconfig.json")).expect("it is read");
    assert_eq!(shell.run("clearconfig"), "error: As a precaution, confirm=True needs to be set\n");
    assert_eq!(shell.run("restoreconfig"), "error: storageobject 'fileio:disk1' exist not restoring\n");
    assert_eq!(shell.run("clearconfig confirm=True"), "All configuration cleared\n");
    assert!(shell.config.is_empty());
    assert_eq!(shell.run("restoreconfig"), "Configuration restored from DIR/saveconfig.json\n");
    shell.ok(&["saveconfig again.json"]);
    assert_eq!(std::fs::read_to_string(shell.path("again.json")).expect("it is read"), saved);
    assert_eq!(
        shell.run("restoreconfig saveconfig.json clear_existing=true"),
        "Configuration restored from DIR/saveconfig.json\n"
    );
    assert_eq!(shell.run("restoreconfig nowhere.json"), "error: Restore file DIR/nowhere.json not found\n");
}

#[test]
fn one_storage_object_is_saved_and_removed_from_the_file() {
    let mut shell = full();
    shell.ok(&["/backstores/fileio/disk1 saveconfig one.json"]);
    let saved = blockyard_lio::store::read(Path::new(&shell.path("one.json"))).expect("it is read");
    assert_eq!(saved["storage_objects"].as_array().map(Vec::len), Some(1));
    assert_eq!(saved["targets"][0]["wwn"], "iqn.2003-01.org.linux-iscsi.host:disk");
    shell.ok(&["saveconfig", "/backstores/ramdisk delete fast save=true"]);
    let saved = blockyard_lio::store::read(Path::new(&shell.path("saveconfig.json"))).expect("it is read");
    assert_eq!(saved["storage_objects"].as_array().map(Vec::len), Some(3));
    let group = &saved["targets"][0]["tpgs"][0];
    assert_eq!(group["luns"].as_array().map(Vec::len), Some(1));
    assert_eq!(group["node_acls"][0]["mapped_luns"].as_array().map(Vec::len), Some(1));
}

#[test]
fn completions_are_commands_paths_and_objects() {
    let shell = full();
    let complete = |line: &str| blockyard_lio::complete::complete(&shell.config, &shell.call(line));
    assert_eq!(complete("cl"), ["clearconfig "]);
    assert_eq!(complete("/back"), ["/backstores/"]);
    assert_eq!(
        complete("cd /backstores/fileio/d"),
        ["/backstores/fileio/disk1/", "/backstores/fileio/disk2/"]
    );
    assert_eq!(complete("/backstores/fileio delete disk1"), ["disk1"]);
    assert_eq!(complete("/backstores/fileio create name=a fi"), ["file_or_dev="]);
    let luns = "/iscsi/iqn.2003-01.org.linux-iscsi.host:disk/tpg1/luns create /backstores/r";
    assert_eq!(complete(luns), ["/backstores/ramdisk/fast"]);
    assert!(complete("/nowhere ").is_empty());
    assert_eq!(complete("cd\u{a0}/back"), ["/backstores/"], "a no-break space is longer than a byte");
}
