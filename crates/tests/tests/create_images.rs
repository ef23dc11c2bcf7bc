//! Images created by `create,format=qcow2`: as QEMU would create them, whole or not at all, and never over
//! another file.

use blockyard_tests::peer::Peer;
use blockyard_tests::remote::Foreign;
use blockyard_tests::server::{Sandbox, noise};
use blockyard_tests::tools::{command, missing, run};
use proto::nbd::CommandFlags;
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;

const MIB: u64 = 1 << 20;
const LEN: u64 = 8 * MIB;

fn qemu_img(sandbox: &Sandbox, arguments: &[&str]) -> String {
    run(&mut sandbox.tool(&[&["qemu-img"], arguments].concat())).ok()
}

fn assert_sound(sandbox: &Sandbox, name: &str) {
    let checked = run(command(&["qemu-img", "check", "-f", "qcow2"]).arg(sandbox.path(name)));
    assert_eq!(checked.status.code(), Some(0), "{name}: {checked}");
}

/// Returns QEMU's information about an image, except fields that depend on its name and its content.
fn info(sandbox: &Sandbox, name: &str) -> Value {
    let text = qemu_img(sandbox, &["info", "-U", "-f", "qcow2", "--output=json", name]);
    let mut info: Value = serde_json::from_str(&text).expect("JSON");
    for key in ["filename", "actual-size", "dirty-flag"] {
        info.as_object_mut().expect("an object").remove(key);
    }
    info
}

fn stack(name: &str, more: &str) -> String {
    format!("file:{name},size=8M,create,format=qcow2{more}")
}

/// Sends requests of all kinds but reads that are not aligned to clusters; updates `model`.
fn change(peer: &mut Peer, model: &mut [u8]) {
    for number in 0..60u64 {
        let random = noise(number, 16);
        let word = |at: usize| u64::from_le_bytes(random[at..at + 8].try_into().expect("eight"));
        let offset = word(0) % (LEN / 512) * 512;
        let len = ((word(8) % 200 + 1) * 512).min(LEN - offset);
        let range = offset as usize..(offset + len) as usize;
        if number % 4 == 3 {
            peer.zero(offset, len, CommandFlags::empty()).expect("zeroes");
            model[range].fill(0);
        } else {
            let data = noise(number + 1000, len as usize);
            peer.write(offset, &data, CommandFlags::empty()).expect("a write");
            model[range].copy_from_slice(&data);
        }
    }
    peer.flush().expect("a flush");
}

#[test]
fn a_created_image_equals_one_of_qemu_img() {
    if missing(&["qemu-img", "qemu-nbd"]) {
        return;
    }
    for (ours, theirs) in [
        ("", &[][..]),
        (",cluster_size=512", &["-o", "cluster_size=512"]),
        (
            ",cluster_size=2M,backing_file=base.raw,backing_fmt=raw",
            &["-o", "cluster_size=2M", "-b", "base.raw", "-F", "raw"],
        ),
        (
            ",cluster_size=16K,backing_file=base.qcow2,backing_fmt=qcow2",
            &["-o", "cluster_size=16K", "-b", "base.qcow2", "-F", "qcow2"],
        ),
    ] {
        let sandbox = Sandbox::default();
        let base = std::fs::read(sandbox.noise("base.raw", 3 * MIB as usize)).expect("a base");
        qemu_img(&sandbox, &["convert", "-f", "raw", "-O", "qcow2", "base.raw", "base.qcow2"]);
        qemu_img(&sandbox, &[&["create", "-q", "-f", "qcow2"], theirs, &["theirs", "8M"]].concat());
        let mut model = vec![0; LEN as usize];
        if ours.contains("backing") {
            model[..base.len()].copy_from_slice(&base);
        }
        let before = model.clone();
        let mut server = sandbox.serve(&stack("ours", ours), &["--name", "disk"]);
        assert_eq!(info(&sandbox, "ours"), info(&sandbox, "theirs"), "{ours}");
        let mut peer = Peer::connect(&server.socket(), "disk");
        assert!(peer.read(0, LEN).expect("a read") == model, "{ours}: a new one");
        change(&mut peer, &mut model);
        peer.disconnect();
        server.terminate();
        assert_sound(&sandbox, "ours");
        {
            let theirs = Foreign::qemu_nbd(&sandbox, &sandbox.path("theirs"), &["-f", "qcow2"]);
            let mut peer = Peer::connect(&sandbox.path("foreign.sock"), "disk");
            change(&mut peer, &mut before.clone());
            peer.disconnect();
            drop(theirs);
        }
        qemu_img(&sandbox, &["compare", "-q", "-f", "qcow2", "-F", "qcow2", "ours", "theirs"]);
        // An equal command finds the image the next time, and keeps its content.
        let mut server = sandbox.serve(&stack("ours", ours), &["--name", "disk"]);
        let mut peer = Peer::connect(&server.socket(), "disk");
        assert!(peer.read(0, LEN).expect("a read") == model, "{ours}: the next time");
        peer.disconnect();
        server.terminate();
    }
}

#[test]
fn an_existing_file_is_opened_or_refused_and_never_overwritten() {
    let sandbox = Sandbox::default();
    let refused = |stack: &str| sandbox.run(&["serve", stack, "--nbd", "unix:s"]).failed_with(1);
    sandbox.noise("base", 65536);
    sandbox.serve(&stack("disk", ",backing_file=base,backing_fmt=raw"), &[]).terminate();
    let before = std::fs::read(sandbox.path("disk")).expect("an image");
    for (stack, expected) in [
        ("file:disk,size=9M,create,format=qcow2", "disk: it exists, and its size is 8M, not 9M (omit create"),
        (&stack("disk", ",cluster_size=4K"), "its cluster size is 64K, not 4K"),
        (
            &stack("disk", ",backing_file=other,backing_fmt=raw"),
            "its backing file is base (raw), not other (raw)",
        ),
        (&stack("disk", ",backing_file=base,backing_fmt=qcow2"), "is base (raw), not base (qcow2)"),
        (&stack("base", ""), "base is not a qcow2 image: its header is missing"),
    ] {
        let printed = refused(stack);
        assert!(printed.contains(expected), "{stack}: {printed}");
    }
    assert!(std::fs::read(sandbox.path("disk")).expect("an image") == before);
    assert!(std::fs::read(sandbox.path("base")).expect("a file") == noise(65536, 65536));
}

#[test]
fn a_failed_creation_reports_the_reason_and_leaves_no_file() {
    let sandbox = Sandbox::default();
    std::fs::create_dir(sandbox.path("images")).expect("a folder");
    std::fs::create_dir(sandbox.path("elsewhere")).expect("a folder");
    std::fs::write(sandbox.path("elsewhere/base"), [7; 4096]).expect("a file");
    std::os::unix::fs::symlink("nowhere", sandbox.path("link")).expect("a link");
    let image = |more: &str| stack("images/disk", more);
    for (stack, expected) in [
        (
            stack("nowhere/disk", ""),
            "nowhere/disk failed: No such file or directory (os error 2) (create its directory first)",
        ),
        (stack("link", ""), "File exists (os error 17) (remove it, or omit create)"),
        (image(",backing_file=absent,backing_fmt=raw"), "images/absent: No such file or directory"),
        (
            image(",backing_file=../elsewhere/base,backing_fmt=raw"),
            "is not a relative name within the image's directory",
        ),
        (image(",backing=elsewhere,backing_file=../elsewhere/base,backing_fmt=qcow2"), "its backing file"),
    ] {
        let printed = sandbox.run(&["serve", &stack, "--nbd", "unix:s"]).failed_with(1);
        assert!(printed.contains("creating ") && printed.contains(expected), "{stack}: {printed}");
        assert_eq!(std::fs::read_dir(sandbox.path("images")).expect("a folder").count(), 0, "{stack}");
    }
    let allowed = image(",backing=elsewhere,backing_file=../elsewhere/base,backing_fmt=raw");
    let server = sandbox.serve(&allowed, &["--name", "disk"]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert_eq!(peer.read(0, 8192).expect("a read"), [[7; 4096], [0; 4096]].concat());
}

/// Serves a new image in a program whose calls are changed as `inject` says; returns its result.
fn traced(sandbox: &Sandbox, inject: &[&str]) -> blockyard_tests::tools::Outcome {
    let mut traced = sandbox.tool(&["strace", "-f", "-o", "/dev/null"]);
    for one in inject {
        traced.arg("-e").arg(format!("inject={one}"));
    }
    let program = sandbox.blockyard(&["serve", &stack("images/disk", ""), "--nbd", "unix:s"]);
    traced.arg(program.get_program()).args(program.get_args());
    run(&mut traced)
}

#[test]
fn a_kill_or_a_full_disk_during_creation_leaves_no_partial_image() {
    if missing(&["strace", "qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = sandbox.path("images");
    std::fs::create_dir(&folder).expect("a folder");
    let is_empty = || std::fs::read_dir(&folder).expect("a folder").count() == 0;
    let steps = [("pwrite64", 4), ("fdatasync", 2), ("linkat", 1)];
    for (call, when) in steps.into_iter().flat_map(|(call, last)| (1..=last).map(move |when| (call, when))) {
        let killed = traced(&sandbox, &[&format!("{call}:signal=SIGKILL:when={when}")]);
        assert_eq!(killed.status.signal(), Some(9), "{call} {when}: {killed}");
        assert!(is_empty(), "killed at {call} {when}");
        if call != "linkat" {
            let printed = traced(&sandbox, &[&format!("{call}:error=ENOSPC:when={when}")]).failed_with(1);
            assert!(printed.contains("No space left on device (os error 28) (free some space)"), "{printed}");
            assert!(is_empty(), "no room at {call} {when}");
        }
    }
    // On a file system without links it has its name from the beginning, and is no valid image before it is
    // complete.
    for when in 5..=8 {
        let kill = format!("pwrite64:signal=SIGKILL:when={when}");
        let killed = traced(&sandbox, &["linkat:error=EPERM", &kill]);
        assert_eq!(killed.status.signal(), Some(9), "{when}: {killed}");
        assert!(!std::fs::read(folder.join("disk")).expect("a file").starts_with(b"QFI"), "{when}");
        sandbox.run(&["serve", &stack("images/disk", ""), "--nbd", "unix:s"]).failed_with(1);
        std::fs::remove_file(folder.join("disk")).expect("a file");
    }
    // An image that has its name is complete.
    let killed = traced(&sandbox, &["fsync:signal=SIGKILL:when=1"]);
    assert_eq!(killed.status.signal(), Some(9), "{killed}");
    assert_sound(&sandbox, "images/disk");
    sandbox.serve(&stack("images/disk", ""), &[]).terminate();
}

#[test]
fn a_topology_with_an_image_to_create_is_checked_without_creating_it() {
    let sandbox = Sandbox::default();
    let check = |options: &str| {
        let stack = stack("disk.qcow2", options);
        let text = format!("[device.disk]\nstack = \"{stack}\"\n[[export]]\ndevice = \"disk\"\n");
        sandbox.run(&["check", sandbox.text("t.toml", &text).to_str().expect("a path")])
    };
    check("").ok();
    let printed = check(",backing_file=base,backing_fmt=raw").failed_with(1);
    assert!(printed.contains("its backing file") && printed.contains("No such file"), "{printed}");
    sandbox.image("base", MIB);
    check(",backing_file=base,backing_fmt=raw").ok();
    let printed = check(",cluster_size=3000").failed_with(1);
    assert!(printed.contains("a cluster cannot be 3000 bytes"), "{printed}");
    assert!(!sandbox.path("disk.qcow2").exists());
    // A table with `create` is checked, and the file created when it is served.
    let line = "0 8192 linear file:disk.qcow2,size=8M,create,format=qcow2 0";
    let text = format!("[device.disk]\ntable = \"{line}\"\n[[export]]\ndevice = \"disk\"\n");
    sandbox.run(&["check", sandbox.text("t.toml", &text).to_str().expect("a path")]).ok();
    assert!(!sandbox.path("disk.qcow2").exists());
    sandbox.text("table", line);
    let server = sandbox.start(&mut sandbox.blockyard(&["serve", "--table", "table", "--name", "disk"]), 1);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(4096, &[5; 512], CommandFlags::FUA).expect("a write");
    assert_eq!(peer.read(4096, 512).expect("a read"), [5; 512]);
}

#[test]
fn discard_granularity_is_the_cluster_size_and_partial_clusters_keep_their_content() {
    let sandbox = Sandbox::default();
    for cluster in [4096u64, 65536, 2 << 20] {
        let name = format!("disk-{cluster}");
        let stack = format!("file:{name},size=8M,create,format=qcow2,cluster_size={cluster}");
        let server = sandbox.serve(&stack, &["--name", "disk"]);
        let shown: Value =
            serde_json::from_str(&sandbox.run(&["show", "disk", "--json"]).ok()).expect("JSON");
        assert_eq!(shown["limits"]["discard_granularity"], cluster, "{shown}");
        let mut peer = Peer::connect(&server.socket(), "disk");
        let data = noise(3, 6 << 20);
        peer.write(0, &data, CommandFlags::empty()).expect("a write");
        // All but the first sector of one cluster, one whole, and the first sector of the third.
        peer.trim(512, 2 * cluster).expect("a discard");
        let mut model = data.clone();
        model[cluster as usize..2 * cluster as usize].fill(0);
        assert!(peer.read(0, 6 << 20).expect("a read") == model, "{cluster}");
        // Writing zeroes to parts of clusters takes effect.
        peer.zero(512, 1024, CommandFlags::empty()).expect("zeroes");
        model[512..1536].fill(0);
        assert!(peer.read(0, 6 << 20).expect("a read") == model, "{cluster}");
    }
}
