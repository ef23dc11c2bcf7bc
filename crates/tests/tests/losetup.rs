//! `blockyard losetup` beside the system's: the same words, the same columns, the same exit statuses.
//!
//! Loop devices of other programs come and go meanwhile, so what is compared is asked about a file or a device of
//! the test's own.

use blockyard_tests::server::{Sandbox, missing_root};
use blockyard_tests::tools::{Outcome, command, missing, run, skip};
use std::path::Path;

const MIB: u64 = 1 << 20;

/// A loop device of the kernel's own, set up by the system's losetup; detached when it is dropped.
struct Kernels(String);

impl Kernels {
    fn new(words: &[&str]) -> Option<Kernels> {
        if missing(&["losetup"]) || missing_root() {
            return None;
        }
        let made = run(&mut command(&[&["losetup", "--find", "--show"], words].concat()));
        if !made.status.success() {
            skip(made.stderr.trim());
            return None;
        }
        Some(Kernels(made.stdout.trim().to_owned()))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = command(&["losetup", "--detach", &self.0]).output();
    }
}

fn both(sandbox: &Sandbox, words: &[&str]) -> (Outcome, Outcome) {
    let theirs = run(command(&["losetup"]).args(words).current_dir(sandbox.path("")));
    let ours = sandbox.run(&[&["losetup"], words].concat());
    (theirs, ours)
}

/// Both print the same, and end the same.
#[track_caller]
fn assert_same(sandbox: &Sandbox, words: &[&str]) {
    let (theirs, ours) = both(sandbox, words);
    assert_eq!(ours.stdout, theirs.stdout, "{words:?}: {ours}");
    assert_eq!(ours.status.code(), theirs.status.code(), "{words:?}: {theirs}{ours}");
}

#[test]
fn the_kernels_own_loop_devices_are_shown_as_losetup_shows_them() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("a disk.img", 8 * MIB);
    let image = image.to_str().unwrap();
    let words = ["--offset", "4096", "--sizelimit", "1M", "--read-only", "--partscan", image];
    let Some(device) = Kernels::new(&words) else { return };
    let node = device.0.as_str();
    let columns =
        "NAME,AUTOCLEAR,BACK-FILE,BACK-INO,BACK-MAJ:MIN,MAJ:MIN,OFFSET,PARTSCAN,RO,SIZELIMIT,DIO,LOG-SEC";
    for words in [
        &[node][..],
        &["-l", node],
        &["-j", image],
        &["-l", "-j", image],
        &["--list", "--associated", image, "--raw"],
        &["-J", "-l", "-j", image],
        &["-l", "-n", "-j", image],
        &["-l", "-O", columns, node],
        &["-l", "-O", columns, "--raw", node],
        &["-l", "-O", columns, "-J", node],
        &["-l", "-O", "+maj:min", node],
        &["-j", image, "-o", "4096"],
        &["-j", image, "-o", "1"],
        &["-l", "-J", "-j", "absent"],
        &["-j", "absent"],
    ] {
        assert_same(&sandbox, words);
    }
    let all = sandbox.run(&["losetup", "--raw", "--noheadings", "-l", "-O", "NAME"]).ok();
    assert!(all.lines().any(|line| line == node), "{all}");
    std::fs::remove_file(image).unwrap();
    assert_same(&sandbox, &["-l", node]);
    assert_same(&sandbox, &["-c", node]);
    // What is the kernel's own is detached by the system's losetup.
    sandbox.run(&["losetup", "-d", node]).ok();
    assert!(!Path::new(&format!("/sys/block/{}/loop/backing_file", &node["/dev/".len()..])).exists());
}

#[test]
fn bad_words_end_with_losetups_status_and_message() {
    if missing(&["losetup"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let image = image.to_str().unwrap();
    for words in [
        &["--bad"][..],
        &["-k"],
        &["-j"],
        &["--offset"],
        &["-a", "-f"],
        &["-J", "--raw", "-l"],
        &["-l", "-O", "BAD,NAME"],
        &["-n"],
        &["-r"],
        &["-f", "--show"],
        &["-f", "a", "b"],
        &["-f", "-o", "x", image],
        &["-f", "--sizelimit", "x", image],
        &["--direct-io=maybe", "/dev/loop0"],
        &["-o", "5", "/dev/loop0"],
        &["-d", "/dev/null"],
        &["/dev/null"],
        &["/dev/loop999999"],
        &["-f", "absent"],
    ] {
        let (theirs, ours) = both(&sandbox, words);
        assert_eq!(ours.status.code(), theirs.status.code(), "{words:?}: {theirs}{ours}");
        // getopt names the program as it was called.
        let stderr = theirs.stderr.lines().map(|line| &line[line.find("losetup: ").unwrap_or(0)..]);
        assert_eq!(ours.stderr.lines().collect::<Vec<_>>(), stderr.collect::<Vec<_>>(), "{words:?}");
        assert_eq!(ours.stdout, "");
    }
}

#[test]
fn our_devices_are_shown_by_name_where_they_have_no_node() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 2 * MIB);
    let path = image.canonicalize().unwrap();
    let _server = sandbox.serve(&format!("file:{},offset=1M,ro,block=4096", image.display()), &[]);
    let line = sandbox.run(&["losetup", "-l", "-n", "disk"]).ok();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words, ["disk", "0", "1048576", "0", "1", path.to_str().unwrap(), "0", "4096"]);
    let found = sandbox.run(&["losetup", "-j", image.to_str().unwrap()]).ok();
    assert!(found.starts_with("disk: [") && found.ends_with("), offset 1048576\n"), "{found}");
    let json = sandbox.run(&["losetup", "-J", "-l", "disk"]).ok();
    let json: serde_json::Value = serde_json::from_str(&json).expect("it is JSON");
    assert_eq!(json["loopdevices"][0]["ro"], true);
}

#[test]
fn our_devices_are_changed_and_detached_with_losetups_options() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let mut server = sandbox.serve(&format!("file:{}", image.display()), &[]);
    std::fs::File::options().write(true).open(&image).unwrap().set_len(3 * MIB).unwrap();
    sandbox.run(&["losetup", "-c", "disk"]).ok();
    let shown = sandbox.run(&["show", "disk", "--json"]).ok();
    assert!(shown.contains(&format!("\"size\": {}", 3 * MIB)), "{shown}");
    let dio = || sandbox.run(&["losetup", "-l", "-n", "-O", "DIO", "disk"]).ok().trim().to_owned();
    if sandbox.run(&["losetup", "--direct-io=on", "disk"]).status.success() {
        assert_eq!(dio(), "1");
    } else {
        skip("direct I/O cannot be had here");
    }
    sandbox.run(&["losetup", "--direct-io=off", "disk"]).ok();
    assert_eq!(dio(), "0");
    sandbox.run(&["losetup", "-b", "512", "disk"]).ok();
    let why = sandbox.run(&["losetup", "-b", "4096", "disk"]).failed_with(1);
    assert!(why.starts_with("losetup: disk: set logical block size failed: "), "{why}");
    let why = sandbox.run(&["losetup", "-d", "disk", "absent"]).failed_with(1);
    assert_eq!(why, "losetup: absent: failed to use device: No such device\n");
    assert!(server.wait().success(), "one that is not there does not keep the others");
}

#[test]
fn find_names_the_loop_device_that_losetup_would_take() {
    if missing(&["losetup"]) || missing_root() {
        return;
    }
    let sandbox = Sandbox::default();
    let (theirs, ours) = both(&sandbox, &["-f"]);
    assert_eq!(ours.status.code(), theirs.status.code(), "{theirs}{ours}");
    // Others may have taken or left one in between.
    assert_eq!(
        ours.stdout.starts_with("/dev/loop"),
        theirs.stdout.starts_with("/dev/loop"),
        "{theirs}{ours}"
    );
}
