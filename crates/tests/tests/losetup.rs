//! `blockyard losetup` compared with the system's: equal arguments, columns, exit statuses.
//!
//! Loop devices of other programs appear and disappear meanwhile, so only a file or a device of the test's
//! own is compared.

use blockyard_tests::server::{Sandbox, missing_root};
use blockyard_tests::tools::{Outcome, PATIENCE, command, missing, run, skip, until};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const MIB: u64 = 1 << 20;

/// A loop device of the kernel's own, created by the system's losetup; detached when dropped.
struct Kernels(String);

impl Kernels {
    fn new(arguments: &[&str]) -> Option<Kernels> {
        if missing(&["losetup"]) || missing_root() {
            return None;
        }
        let made = run(&mut command(&[&["losetup", "--find", "--show"], arguments].concat()));
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

fn both(sandbox: &Sandbox, arguments: &[&str]) -> (Outcome, Outcome) {
    let theirs = run(command(&["losetup"]).args(arguments).current_dir(sandbox.path("")));
    let ours = sandbox.run(&[&["losetup"], arguments].concat());
    (theirs, ours)
}

/// Checks that both print the same, and end with the same status.
#[track_caller]
fn assert_same(sandbox: &Sandbox, arguments: &[&str]) {
    let (theirs, ours) = both(sandbox, arguments);
    assert_eq!(ours.stdout, theirs.stdout, "{arguments:?}: {ours}");
    assert_eq!(ours.status.code(), theirs.status.code(), "{arguments:?}: {theirs}{ours}");
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
    // The kernel's own device is detached by the system's losetup.
    sandbox.run(&["losetup", "-d", node]).ok();
    // A process that opens it at that moment, as udev does, keeps it until then.
    let backing = format!("/sys/block/{}/loop/backing_file", &node["/dev/".len()..]);
    let is_there = || std::fs::read_to_string(&backing).is_ok_and(|file| file.contains(image));
    until(PATIENCE, || (!is_there()).then_some(())).expect("it is detached");
    // The number may belong to another device by now.
    std::mem::forget(device);
}

#[test]
fn names_with_control_characters_are_shown_as_losetup_shows_them() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("od\u{1b}[1md\n\\x20.img", MIB);
    let Some(device) = Kernels::new(&[image.to_str().unwrap()]) else { return };
    let node = device.0.as_str();
    let bytes = image.with_file_name(OsStr::from_bytes(b"lat\xe9 in.img"));
    for named in [&image, &bytes] {
        std::fs::rename(&image, named).unwrap();
        assert_same(&sandbox, &["-l", node]);
        assert_same(&sandbox, &["-l", "--raw", node]);
        // Invalid UTF-8 is replaced in JSON.
        if named.to_str().is_some() {
            assert_same(&sandbox, &["-l", "-J", node]);
            assert_same(&sandbox, &[node]);
        }
    }
}

/// Command lines with identical results. `DEV` is a device, `IMG` the file behind it.
const ALIKE: &str = "
DEV | -l DEV | --list DEV | -n DEV | -ln DEV | --noheadings -l DEV | --raw DEV | --raw -l DEV | -J DEV | -Jl DEV
-O NAME DEV | -O NAME,NAME -l DEV | -l -ONAME DEV | -l -O name,ro DEV | -l -O +RO DEV | -l --output=NAME DEV
-l -O NAME --output-all DEV | -l --output-all -O NAME DEV | -J --output-all DEV | --output-all DEV | -v -l DEV
-j IMG | -j IMG -l | -j IMG -l -O NAME | -j IMG -O +MAJ:MIN | -j IMG --raw | -j IMG -J | -j IMG -n | -j IMG x
-j IMG -o 4096 | -j IMG -o 4K -l | -j IMG --offset=0 | -j IMG --offset 4096 -J -l | -j absent -l | -j absent -J -l
-j IMG -j absent | -j . | -l -- DEV | -- DEV | DEV -l | DEV -l -n -O NAME,RO | -j IMG -l -O MAJ:MIN,BACK-INO,PARTSCAN
-L DEV | -v DEV | --direct-io=off -l DEV | -l -O NAME, DEV | -l -O ,NAME DEV | -l -O NAME,BAD,RO DEV | -l -O + DEV
-c DEV -l | -d DEV -a | -D -d DEV | -D -a | -f -j IMG | -f -a | -fa | -cf | -dc | -lf | -Jl --raw | -f -l
-k | -kl | -lk | -k -h | -e 5 DEV | -p 3 | --bad | --bad=3 | --raw=1 | --all=1 | --s | --d | --o | --no | --outp NAME
-c | -d | -o | -O | -j | --offset | --detach-a=3 | --set absent | --sec 512 absent | --fi=3
DEV absent | absent | loop999999 | -l /dev/loop999999 | -l /dev/null | -d absent | -d /dev/null | -d /dev/loop-control
-c /dev/null | -c absent | -b 4096 | -b 4096 absent | -b x DEV | -b 1000 DEV | --direct-io | --direct-io=off absent
--direct-io=ON DEV | --direct-io= DEV | --direct-io=1 DEV | --direct-io=off -P DEV | --direct-io=off -o 5 DEV
--direct-io on DEV | -f --direct-io | -f --direct-io=on | -l --direct-io | -f --show | -f -r | -f -P | -f -o 5
-f --sizelimit 5 | -f a b | -f absent | -f . | -f -r absent | -f --show -o 1x IMG | -f --show -o -1 IMG | DEV IMG
-f --show -o 8E IMG | -f --show -o 16E IMG | -f --show --sizelimit 9E IMG | -f --show --sizelimit -5 IMG
-f --show -b 0x IMG | absent IMG | /dev/null IMG | -P DEV | -r DEV | --show DEV | --show | -o 5 DEV | -o 5
--sizelimit 5 DEV | --sizelimit 5 | -n | -n -J | --raw -n | -L | -v | -l -r | -l -P | -l --sizelimit 3 | -l -o 5
-O BAD | -l -O BAD | -l -O BAD,NAME | -l -O +BAD | -
";

#[test]
fn command_lines_end_as_with_losetup() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("a disk.img", 8 * MIB);
    let image = image.to_str().unwrap();
    let Some(device) = Kernels::new(&["-o", "4096", "--sizelimit", "1M", "-r", image]) else { return };
    let forms = ALIKE.lines().flat_map(|line| line.split(" | ")).filter(|form| !form.is_empty());
    for form in forms {
        let words: Vec<&str> = form
            .split(' ')
            .map(|word| match word {
                "DEV" => device.0.as_str(),
                "IMG" => image,
                other => other,
            })
            .collect();
        let (theirs, ours) = both(&sandbox, &words);
        assert_eq!(ours.stdout, theirs.stdout, "{form}: {ours}");
        assert_eq!(ours.status.code(), theirs.status.code(), "{form}: {theirs}{ours}");
        // getopt names the program as it was called.
        let stderr = theirs.stderr.lines().map(|line| &line[line.find("losetup: ").unwrap_or(0)..]);
        assert_eq!(ours.stderr.lines().collect::<Vec<_>>(), stderr.collect::<Vec<_>>(), "{form}");
    }
}

/// Errors with the same reason, about which our message has more detail.
#[test]
fn invalid_block_sizes_are_refused_as_losetup_refuses_them() {
    if missing(&["losetup"]) || missing_root() {
        return;
    }
    let sandbox = Sandbox::default();
    sandbox.image("disk.img", MIB);
    for block in ["1000", "256", "1M", "3K", "5G"] {
        let (theirs, ours) = both(&sandbox, &["-f", "--show", "-b", block, "disk.img"]);
        assert_eq!((ours.status.code(), theirs.status.code()), (Some(1), Some(1)), "{block}: {theirs}");
        let printed = "losetup: disk.img: failed to set up loop device: Invalid argument";
        assert_eq!(theirs.stderr.trim(), printed);
        assert!(ours.stderr.starts_with(printed) && ours.stderr.contains("use 512, 1K"), "{ours}");
    }
}

/// A device of ours, detached when dropped.
struct Ours<'a>(&'a Sandbox, String);

impl Drop for Ours<'_> {
    fn drop(&mut self) {
        let _ = self.0.run(&["losetup", "-d", &self.1]);
    }
}

#[test]
fn devices_are_set_up_as_losetup_sets_them_up() {
    if missing(&["losetup"]) || missing_root() || !Path::new("/dev/fuse").exists() {
        return;
    }
    let sandbox = Sandbox::default();
    const COLUMNS: &str = "SIZELIMIT,OFFSET,AUTOCLEAR,RO,DIO,LOG-SEC,PARTSCAN,BACK-MAJ:MIN";
    for (len, words) in [
        (MIB, &[][..]),
        (MIB, &["-P", "-r"]),
        (MIB, &["-rPo", "64K", "--sizelimit=512KiB"]),
        (MIB, &["--direct-io"]),
        (MIB, &["--direct-io=on", "-b", "4096", "--offset", "8192"]),
        (MIB, &["--direct-io=off", "--sector-size=2K", "-L"]),
        (MIB, &["--nooverlap", "--sizelimit", "0"]),
        (100, &["-r"]),
        (4096 + 100, &[]),
        (4096, &["-o", "1M"]),
    ] {
        let (theirs_file, ours_file) = (sandbox.image("theirs.img", len), sandbox.image("ours.img", len));
        let all = [&["--show", "-f"], words].concat();
        let made = run(command(&["losetup"]).args(&all).arg(&theirs_file));
        let printed = made.stderr.clone();
        let theirs = Kernels(made.ok().trim().to_owned());
        let path = ours_file.to_str().unwrap();
        let made = sandbox.run(&[&["losetup"], &all[..], &[path]].concat());
        let warned = made.stderr.clone();
        let ours = Ours(&sandbox, made.ok().trim().to_owned());
        // losetup gives no warning for a file that ends before its offset.
        if words != ["-o", "1M"] {
            assert_eq!(warned, printed.replace("theirs.img", "ours.img"), "{words:?}");
        }
        let row = |node: &str| {
            let listed = ["losetup", "-l", "--raw", "-n", "-O", COLUMNS, node];
            match node == ours.1 {
                true => sandbox.run(&listed).ok(),
                false => run(&mut command(&listed)).ok(),
            }
        };
        assert_eq!(row(&ours.1), row(&theirs.0), "{words:?}");
        let fact = |node: &str, name: &str| {
            let disk = node.strip_prefix("/dev/").unwrap_or(node);
            std::fs::read_to_string(format!("/sys/block/{disk}/{name}")).unwrap_or_default()
        };
        for name in ["size", "ro", "queue/logical_block_size", "queue/physical_block_size", "loop/partscan"] {
            assert_eq!(fact(&ours.1, name), fact(&theirs.0, name), "{words:?}: {name}");
        }
    }
}

#[test]
fn unused_loop_devices_are_removed() {
    if missing(&["losetup"]) || missing_root() || !Path::new("/dev/loop-control").exists() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let Some(busy) = Kernels::new(&[image.to_str().unwrap()]) else { return };
    // A name that no concurrent run uses.
    let name = format!("loop{}", 7000 + std::process::id() % 6000);
    let free = &*format!("/dev/{name}");
    let made = run(&mut command(&["losetup", free, sandbox.image("other.img", MIB).to_str().unwrap()]));
    if !made.status.success() {
        return skip(made.stderr.trim());
    }
    let why = sandbox.run(&["losetup", "--remove", free]).failed_with(1);
    assert_eq!(why, format!("losetup: {free}: remove failed: Device or resource busy\n"));
    run(&mut command(&["losetup", "-d", free])).ok();
    let busy_said = format!("losetup: {}: remove failed: Device or resource busy\n", busy.0);
    let wanted = format!("{busy_said}losetup: /dev/null: remove failed: No such device\n");
    let mut why = String::new();
    // A process that opens it at that moment, as udev does, keeps it until then.
    until(PATIENCE, || {
        why = sandbox.run(&["losetup", "--remove", &busy.0, free, "/dev/null"]).failed_with(1);
        (why == wanted).then_some(())
    });
    assert_eq!(why, wanted);
    assert!(!Path::new("/sys/block").join(&name).exists(), "it was free");
    let why = sandbox.run(&["losetup", "--remove", free]).failed_with(1);
    assert_eq!(why, format!("losetup: {free}: remove failed: No such device\n"));
}

#[test]
fn our_devices_without_a_node_are_shown_by_name() {
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
    assert!(server.wait().success(), "a missing device does not keep the others");
}

#[test]
fn a_path_that_is_not_utf_8_is_refused() {
    let sandbox = Sandbox::default();
    let word = OsStr::from_bytes(b"\xff\xfe.img");
    let run_with = |arguments: &[&str]| run(sandbox.blockyard(arguments).arg(word));
    let printed = run_with(&["losetup", "-f"]).failed_with(1);
    assert!(printed.starts_with("losetup: ") && printed.contains(".img: it is not UTF-8 (give"), "{printed}");
    let printed = run_with(&["add"]).failed_with(2);
    assert!(
        printed.starts_with("blockyard: add failed: ") && printed.contains(".img: it is not UTF-8"),
        "{printed}"
    );
}

#[test]
fn find_names_the_loop_device_that_losetup_would_take() {
    if missing(&["losetup"]) || missing_root() {
        return;
    }
    let sandbox = Sandbox::default();
    let (theirs, ours) = both(&sandbox, &["-f"]);
    assert_eq!(ours.status.code(), theirs.status.code(), "{theirs}{ours}");
    // Other programs may have used or freed one in between.
    assert_eq!(
        ours.stdout.starts_with("/dev/loop"),
        theirs.stdout.starts_with("/dev/loop"),
        "{theirs}{ours}"
    );
}
