//! dmsetup's commands with the real binary, without a kernel to compare with: renaming, the concise form,
//! reports. `dm/dmsetup` in the guest compares the output with the real dmsetup.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::Sandbox;
use blockyard_tests::tools::{Outcome, run};
use proto::nbd::CommandFlags;

fn dmsetup(sandbox: &Sandbox, arguments: &[&str]) -> Outcome {
    let mut command = sandbox.blockyard(&[&["dmsetup"], arguments].concat());
    run(command.env("BLOCKYARD_EXPORT", "nbd"))
}

#[test]
fn rename_moves_the_sockets_and_frees_the_old_name() {
    let sandbox = Sandbox::default();
    sandbox.image("a.img", 1 << 20);
    dmsetup(&sandbox, &["create", "one", "--table", "0 2048 linear a.img 0"]).ok();
    let mut before = Peer::connect(&sandbox.run_dir().join("one.sock"), "one");
    dmsetup(&sandbox, &["rename", "one", "uno"]).ok();
    before.write(0, &[7; 512], CommandFlags::empty()).expect("connections stay");
    before.disconnect();
    let mut after = Peer::connect(&sandbox.run_dir().join("uno.sock"), "one");
    assert_eq!(after.read(0, 512).unwrap(), [7; 512]);
    after.disconnect();
    let printed = dmsetup(&sandbox, &["status", "one"]).failed_with(1);
    assert!(printed.starts_with("Device does not exist.\n"), "{printed}");
    assert_eq!(dmsetup(&sandbox, &["info", "-c", "-o", "name,events", "--noheadings"]).ok(), "uno:1\n");
    assert!(sandbox.run(&["list"]).ok().contains("uno.sock"));
    dmsetup(&sandbox, &["create", "one", "--table", "0 8 zero"]).ok();
    let printed = dmsetup(&sandbox, &["rename", "uno", "one"]).failed_with(1);
    assert!(
        printed.starts_with("device-mapper: rename ioctl on uno  failed: Device or resource busy\n"),
        "{printed}"
    );
    assert_eq!(dmsetup(&sandbox, &["table", "uno"]).ok(), "0 2048 linear a.img 0\n", "it is what it was");
    dmsetup(&sandbox, &["rename", "uno", "--setuuid", "U-1"]).ok();
    dmsetup(&sandbox, &["rename", "uno", "--setuuid", "U-2"]).failed_with(1);
    let printed = dmsetup(&sandbox, &["rename", "--setuuid", "one", "U-1"]).failed_with(1);
    assert!(
        printed.starts_with("device-mapper: rename ioctl on one  failed: Device or resource busy\n"),
        "{printed}"
    );
    assert_eq!(dmsetup(&sandbox, &["info", "--noheadings", "-coname,uuid"]).ok(), "one:\nuno:U-1\n");
    dmsetup(&sandbox, &["remove", "-uU-1"]).ok();
    assert_eq!(dmsetup(&sandbox, &["ls"]).ok(), "one\t(0:0)\n");
    dmsetup(&sandbox, &["remove_all"]).ok();
    assert_eq!(sandbox.left_behind(), Vec::<String>::new(), "nothing is left of either name");
}

#[test]
fn concise_output_recreates_the_devices() {
    let sandbox = Sandbox::default();
    let line = "c1,CU1,0,rw,0 8 zero ,8 8 error ;c2,,0,ro,0 8 zero ";
    dmsetup(&sandbox, &["create", "--concise", line]).ok();
    assert_eq!(dmsetup(&sandbox, &["table", "--concise"]).ok(), format!("{line}\n"));
    let printed = dmsetup(&sandbox, &["create", "--concise", "c3,CU1,,,0 8 zero"]).failed_with(1);
    assert!(
        printed.starts_with("device-mapper: create ioctl on c3 CU1 failed: Device or resource busy"),
        "{printed}"
    );
    let printed = dmsetup(&sandbox, &["create", "--concise", "c3,,"]).failed_with(1);
    assert!(printed.starts_with("Incomplete entry: five comma-separated fields"), "{printed}");
    dmsetup(&sandbox, &["remove_all"]).ok();
}

#[test]
fn a_topology_is_shown_as_a_tree() {
    let sandbox = Sandbox::default();
    sandbox.image("a.img", 1 << 20);
    let topology = format!(
        "[device.up]\ntable = \"0 1024 linear low 0\"\n\
         [device.low]\ntable = \"\"\"\n0 1024 linear a.img 0\n1024 1024 linear ram:1M 0\n\"\"\"\n\
         [[export]]\ndevice = \"up\"\nnbd = \"unix:{}\"\n",
        sandbox.path("s.sock").display()
    );
    let server = sandbox.up(&topology, 1);
    let tree = dmsetup(&sandbox, &["ls", "--tree", "-o", "ascii,nodevice,active"]).ok();
    assert_eq!(tree, "up [ACTIVE]\n `-low [ACTIVE]\n    |- (ram:1M)\n    `- (a.img)\n");
    let reports = ["info", "-c", "-o", "name,device_count,names_using_dev,devs_used", "--noheadings"];
    assert_eq!(dmsetup(&sandbox, &reports).ok(), "low:2:up:\nup:1::low\n");
    let printed = dmsetup(&sandbox, &["rename", "low", "other"]).failed_with(1);
    assert!(printed.contains("up uses it"), "{printed}");
    drop(server);
}

#[test]
fn devices_are_selected_by_their_fields() {
    let sandbox = Sandbox::default();
    for (name, uuid) in [("vg-one", "LVM-1"), ("other", "")] {
        dmsetup(&sandbox, &["create", name, "-u", uuid, "--addnodeoncreate", "--table", "0 8 zero"]).ok();
    }
    let fields = ["info", "-c", "-o", "name,lv_name", "--noheadings", "-S"];
    let chosen = |selection| dmsetup(&sandbox, &[&fields[..], &[selection]].concat()).ok();
    assert_eq!(chosen("name=~^vg && open=0"), "vg-one:one\n");
    assert_eq!(chosen("!(subsystem=LVM)"), "other:\n");
    assert_eq!(dmsetup(&sandbox, &["table", "-S", "uuid=\"\""]).ok(), "other: 0 8 zero \n");
    let printed = dmsetup(&sandbox, &["create", "x", "--mode", "0600", "--table", "0 8 zero"]).failed_with(1);
    assert!(printed.contains("create has no --mode"), "{printed}");
    let printed = dmsetup(&sandbox, &["stats", "list"]).failed_with(1);
    assert!(printed.contains("blockyard stat"), "{printed}");
    dmsetup(&sandbox, &["remove", "-S", "name=other"]).ok();
    assert_eq!(dmsetup(&sandbox, &["ls"]).ok(), "vg-one\t(0:0)\n");
    dmsetup(&sandbox, &["remove_all"]).ok();
}

#[test]
fn selections_restrict_a_command_or_are_refused() {
    let sandbox = Sandbox::default();
    for name in ["one", "two"] {
        dmsetup(&sandbox, &["create", name, "-u", &format!("U-{name}"), "--table", "0 8 zero"]).ok();
    }
    let both = "one:Active\ntwo:Active\n";
    let state = || dmsetup(&sandbox, &["info", "-c", "-o", "name,suspended", "--noheadings"]).ok();
    for words in [
        &["remove", "one", "-S", "name=two"][..],
        &["remove", "-u", "U-one", "-S", "name=two"],
        &["suspend", "one", "-S", "name=two"],
        &["wipe_table", "one", "-S", "uuid=U-two"],
        &["suspend", "one", "two", "-S", "name=three"],
    ] {
        dmsetup(&sandbox, words).ok();
        assert_eq!(state(), both, "{words:?}");
    }
    assert_eq!(dmsetup(&sandbox, &["table", "one", "-S", "name=two"]).ok(), "");
    assert_eq!(dmsetup(&sandbox, &["table", "one", "-S", "name=one"]).ok(), "0 8 zero \n");
    assert!(dmsetup(&sandbox, &["info", "-S", "name=two"]).ok().starts_with("Name:              two\n"));
    for words in [
        &["remove_all", "-S", "name=two"][..],
        &["remove", "-j", "0", "-m", "0"],
        &["suspend", "one", "-m", "0"],
        &["load", "-r", "one", "--table", "0 8 error"],
        &["wipe_table", "-r", "one"],
        &["remove", "one", "--target", "linear"],
    ] {
        let printed = dmsetup(&sandbox, words).failed_with(1);
        assert!(printed.contains(" has no --"), "{words:?}: {printed}");
        assert_eq!(state(), both, "{words:?}");
    }
    assert_eq!(dmsetup(&sandbox, &["table", "--inactive"]).ok(), "one: \ntwo: \n", "nothing was loaded");
    for (words, wanted) in [
        (
            &["udevcreatecookie"][..],
            "blockyard: udevcreatecookie is not supported: these commands do not wait for udev",
        ),
        (
            &["splitname", "vg-lv"],
            "blockyard: splitname is not supported: use info -c -o vg_name,lv_name,lv_layer",
        ),
        (&["mangle", "one"], "blockyard: mangle is not supported: create and rename accept only names"),
    ] {
        let printed = dmsetup(&sandbox, words).failed_with(1);
        assert!(printed.starts_with(wanted), "{words:?}: {printed}");
    }
    let printed = dmsetup(&sandbox, &["info", "-c", "-O", "nosuch"]).failed_with(1);
    assert!(printed.contains("Unrecognised field: nosuch"), "{printed}");
    dmsetup(&sandbox, &["remove", "one", "two", "-S", "name=one"]).ok();
    assert_eq!(state(), "two:Active\n");
    dmsetup(&sandbox, &["remove_all"]).ok();
}
