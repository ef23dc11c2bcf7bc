//! One partition of an image as a device: tables written by sfdisk, every way to select a partition, and the
//! error when it is missing.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server};
use blockyard_tests::tools::{PATIENCE, missing, until};
use proto::nbd::CommandFlags;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

const MIB: u64 = 1 << 20;
const GPT: &str = "label: gpt
label-id: 11111111-2222-3333-4444-555555555555
start=2048, size=2048, name=boot, uuid=AAAAAAAA-0000-0000-0000-000000000001
start=8192, size=4096, name=\"my root\", uuid=AAAAAAAA-0000-0000-0000-000000000002
";
const MBR: &str = "label: dos
label-id: 0xcafef00d
start=2048, size=2048, type=83
start=4096, size=28672, type=5
start=6144, size=2048, type=83
start=10240, size=4096, type=83
";

/// Creates an image of 16 MiB in which every MiB begins with its number, partitioned by sfdisk.
fn partitioned(sandbox: &Sandbox, name: &str, script: &str) -> PathBuf {
    partitioned_with(sandbox, name, &["sfdisk", "--quiet", "--wipe=never"], script)
}

fn partitioned_with(sandbox: &Sandbox, name: &str, tool: &[&str], script: &str) -> PathBuf {
    let path = sandbox.image(name, 16 * MIB);
    let file = std::fs::File::options().write(true).open(&path).expect("an image");
    for number in 1..16u64 {
        file.write_all_at(&[number as u8; 512], number * MIB).expect("a write");
    }
    let mut tool = sandbox.tool(tool);
    tool.arg(&path).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = tool.spawn().expect("it starts");
    child.stdin.take().expect("its input").write_all(script.as_bytes()).expect("it reads");
    assert!(child.wait().expect("it ends").success());
    path
}

fn serve(sandbox: &Sandbox, path: &Path, options: &str) -> (Server, Peer) {
    let server = sandbox.serve(&format!("file:{}{options}", path.display()), &[]);
    let peer = Peer::connect(&server.socket(), "disk");
    (server, peer)
}

#[test]
fn a_gpt_partition_is_served_by_number_name_and_uuid() {
    if missing(&["sfdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let path = partitioned(&sandbox, "gpt.img", GPT);
    for part in [
        "2",
        "LABEL=my root",
        "my root",
        "PARTUUID=aaaaaaaa-0000-0000-0000-000000000002",
        "PARTLABEL=my root",
    ] {
        let (mut server, mut peer) = serve(&sandbox, &path, &format!(",part={part}"));
        // 8192 sectors are 4 MiB.
        assert_eq!(peer.read(0, 512).expect("a read"), [4; 512], "{part}");
        assert_eq!(peer.read(MIB, 512).expect("a read"), [5; 512], "{part}");
        assert!(peer.read(2 * MIB - 512, 1024).is_err(), "past the end of {part}");
        peer.disconnect();
        server.terminate();
    }
}

#[test]
fn writes_stay_within_their_partition() {
    if missing(&["sfdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let path = partitioned(&sandbox, "gpt.img", GPT);
    let before = std::fs::read(&path).expect("an image");
    let (mut server, mut peer) = serve(&sandbox, &path, ",part=1");
    peer.write(0, &[0xaa; 1024], CommandFlags::empty()).expect("a write");
    peer.write(MIB - 512, &[0xbb; 512], CommandFlags::empty()).expect("a write");
    assert!(peer.write(MIB - 512, &[0xcc; 1024], CommandFlags::empty()).is_err());
    peer.trim(4096, 4096).expect("a trim");
    peer.flush().expect("a flush");
    peer.disconnect();
    server.terminate();
    let after = std::fs::read(&path).expect("an image");
    let part = MIB as usize..2 * MIB as usize;
    assert_eq!(after[..part.start], before[..part.start]);
    assert_eq!(after[part.end..], before[part.end..]);
    assert_eq!(after[part.start..part.start + 1024], [0xaa; 1024]);
    assert_eq!(after[part.end - 512..part.end], [0xbb; 512]);
}

#[test]
fn logical_partitions_are_numbered_from_five() {
    if missing(&["sfdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let path = partitioned(&sandbox, "mbr.img", MBR);
    for (part, number) in [("1", 1), ("5", 3), ("6", 5), ("PARTUUID=cafef00d-06", 5)] {
        let (_server, mut peer) = serve(&sandbox, &path, &format!(",part={part}"));
        assert_eq!(peer.read(0, 512).expect("a read"), [number; 512], "{part}");
    }
}

#[test]
fn a_layer_takes_a_partition_of_any_stack_and_show_lists_the_table() {
    if missing(&["sfdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let path = partitioned(&sandbox, "gpt.img", GPT);
    let stack = format!("file:{},ro", path.display());
    let server =
        sandbox.serve(&stack, &["--layer", "split,max_sectors=8", "--layer", "part,2", "--name", "root"]);
    let mut peer = Peer::connect(&server.socket(), "root");
    assert_eq!(peer.read(MIB, 512).expect("a read"), [5; 512]);
    let shown = sandbox.run(&["show", "root"]).ok();
    for words in ["part,2", "1 \"boot\" (1M), 2 \"my root\" (2M)", "aaaaaaaa-0000-0000-0000-000000000002"] {
        assert!(shown.contains(words), "no {words} in:\n{shown}");
    }
}

/// Returns the output of `show` for the device `disk`. On a busy processor its table may not be read within
/// the limit: then it is called again.
fn shown(sandbox: &Sandbox, more: &[&str]) -> String {
    until(PATIENCE, || {
        let text = sandbox.run(&[&["show", "disk"], more].concat()).ok();
        (!text.contains("the device does not answer")).then_some(text)
    })
    .expect("the device answers")
}

#[test]
fn show_lists_the_table_of_any_device_that_has_one() {
    if missing(&["sfdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (gpt, mbr) = (partitioned(&sandbox, "gpt.img", GPT), partitioned(&sandbox, "mbr.img", MBR));
    let empty = sandbox.image("empty.img", 16 * MIB);
    let listed = |path: &Path, options: &str, layers: &[&str]| {
        let _server = sandbox.serve(&format!("file:{}{options}", path.display()), layers);
        let shown: serde_json::Value =
            serde_json::from_str(&shown(&sandbox, &["--json"])).expect("it is JSON");
        let fact = |name: &str| shown["backend"][name].as_str().unwrap_or_default().to_owned();
        (fact("partition table"), fact("partitions"))
    };
    let of_gpt = (
        "gpt, blocks of 512, id 11111111-2222-3333-4444-555555555555".to_owned(),
        "1 \"boot\" (1M), 2 \"my root\" (2M)".to_owned(),
    );
    let overlay = format!("cow,file={},create", sandbox.path("overlay.img").display());
    assert_eq!(listed(&gpt, "", &[]), of_gpt);
    assert_eq!(listed(&gpt, ",block=4096", &[]), of_gpt);
    assert_eq!(listed(&gpt, "", &["--layer", "split,max_sectors=8", "--layer", &overlay]), of_gpt);
    assert_eq!(listed(&gpt, ",part=2", &[]), of_gpt, "the one that it is in");
    let (table, partitions) = listed(&mbr, "", &[]);
    assert_eq!(
        (table.as_str(), partitions.as_str()),
        ("mbr, blocks of 512, id cafef00d", "1 (1M), 2 (14M, extended), 5 (1M), 6 (2M)")
    );
    assert_eq!(listed(&empty, "", &[]), Default::default());
    // The present table, and not that of the time of opening.
    let _server = sandbox.serve(&format!("file:{}", empty.display()), &[]);
    let head = std::fs::read(&mbr).expect("an image")[..512].to_vec();
    let file = std::fs::File::options().write(true).open(&empty).expect("an image");
    file.write_all_at(&head, 0).expect("a write");
    assert!(shown(&sandbox, &[]).contains("mbr, blocks of 512"));
    // A suspended device is not read.
    sandbox.run(&["suspend", "disk"]).ok();
    assert!(!sandbox.run(&["show", "disk"]).ok().contains("partition table"));
}

#[test]
fn a_hanging_device_is_shown_without_its_partition_table() {
    let sandbox = Sandbox::default();
    let mut hung = sandbox.serve("null:1M,irqmode=timer,completion=1000s", &["--name", "disk"]);
    for _ in 0..2 {
        let shown = sandbox.run(&["show", "disk"]).ok();
        assert!(shown.contains("not known: the device does not answer"), "{shown}");
    }
    hung.kill();
}

#[test]
fn a_missing_partition_is_refused_with_the_list_of_partitions() {
    if missing(&["sfdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let gpt = partitioned(&sandbox, "gpt.img", GPT);
    let mbr = partitioned(&sandbox, "mbr.img", MBR);
    let empty = sandbox.image("empty.img", MIB);
    let none = sandbox.image("none.img", 0);
    let there = "there are 1 \"boot\" (1M), 2 \"my root\" (2M)";
    for (path, part, words) in [
        (&gpt, "3", there),
        (&gpt, "LABEL=swap", there),
        (&mbr, "2", "partition 2 is an extended partition"),
        (&mbr, "7", "5 (1M), 6 (2M)"),
        (&empty, "1", "no partition table"),
        (&none, "1", "no partition table"),
    ] {
        let stack = format!("file:{},part={part}", path.display());
        let printed = sandbox.run(&["serve", &stack, "--nbd", "unix:s"]).failed_with(1);
        assert!(printed.contains(words), "{part}: {printed}");
    }
    for bad in ["part=", "part=0", "part"] {
        sandbox.run(&["serve", &format!("file:{},{bad}", gpt.display()), "--nbd", "unix:s"]).failed_with(2);
    }
}

#[test]
fn partition_tables_of_4096_byte_blocks_are_read_at_any_block_size() {
    if missing(&["fdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    // Of the two only fdisk has an option for the block size of a file.
    let script = "g\nn\n1\n256\n+255\nn\n2\n1024\n+511\nw\n";
    let path = partitioned_with(&sandbox, "4k.img", &["fdisk", "-b", "4096", "-w", "never"], script);
    for options in [",part=2", ",part=2,block=4096"] {
        let (_server, mut peer) = serve(&sandbox, &path, options);
        assert_eq!(peer.read(0, 4096).expect("a read")[..512], [4; 512], "{options}");
    }
}
