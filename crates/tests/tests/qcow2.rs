//! qcow2 images of every kind, written by us and by QEMU: equal requests leave equal disks, and `qemu-img
//! check` finds nothing.

use blockyard_tests::peer::Peer;
use blockyard_tests::remote::Foreign;
use blockyard_tests::server::{Sandbox, Server, noise};
use blockyard_tests::tools::{command, missing, run};
use proto::nbd::CommandFlags;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MIB: u64 = 1 << 20;
const LEN: u64 = 8 * MIB;

fn qemu_img(sandbox: &Sandbox, arguments: &[&str]) -> String {
    run(&mut sandbox.tool(&[&["qemu-img"], arguments].concat())).ok()
}

fn serve(sandbox: &Sandbox, path: &Path) -> Server {
    sandbox.serve(&format!("file:{},format=qcow2", path.display()), &[])
}

/// Creates a file of noise and holes of 4 KiB each, in random order.
fn mixed(sandbox: &Sandbox, len: u64) -> Vec<u8> {
    let mut content = noise(11, len as usize);
    let choice = noise(12, (len / 4096) as usize);
    let file = File::create(sandbox.path("mixed.raw")).expect("a file");
    file.set_len(len).expect("a length");
    for (block, choice) in choice.iter().enumerate() {
        let range = block * 4096..(block + 1) * 4096;
        if choice % 2 == 0 {
            content[range].fill(0);
        } else {
            file.write_all_at(&content[range.clone()], range.start as u64).expect("a write");
        }
    }
    content
}

fn content(sandbox: &Sandbox, name: &str) -> Vec<u8> {
    qemu_img(sandbox, &["convert", "-f", "qcow2", "-O", "raw", name, "out.raw"]);
    std::fs::read(sandbox.path("out.raw")).expect("a file")
}

fn assert_sound(sandbox: &Sandbox, name: &str) {
    let checked = run(command(&["qemu-img", "check", "-f", "qcow2"]).arg(sandbox.path(name)));
    assert_eq!(checked.status.code(), Some(0), "{name}: {checked}");
}

fn wrong_blocks(have: &[u8], want: &[u8]) -> usize {
    assert_eq!(have.len(), want.len());
    have.chunks(4096).zip(want.chunks(4096)).filter(|(have, want)| have != want).count()
}

#[test]
fn data_and_holes_within_one_cluster_are_written() {
    if missing(&["qemu-img", "qemu-nbd", "nbdcopy"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let model = mixed(&sandbox, 48 * MIB);
    let copy = |uri: &str| {
        let source = sandbox.path("mixed.raw");
        run(sandbox.tool(&["nbdcopy", "--flush", "--connections=4", "--requests=64"]).arg(&source).arg(uri))
            .ok();
    };
    qemu_img(&sandbox, &["create", "-q", "-f", "qcow2", "ours.qcow2", "48M"]);
    let mut server = serve(&sandbox, &sandbox.path("ours.qcow2"));
    copy(server.uri());
    server.terminate();
    assert_eq!(wrong_blocks(&content(&sandbox, "ours.qcow2"), &model), 0, "of {}", model.len() / 4096);
    assert_sound(&sandbox, "ours.qcow2");
    // QEMU's result of the same requests.
    qemu_img(&sandbox, &["create", "-q", "-f", "qcow2", "theirs.qcow2", "48M"]);
    {
        let options = ["--shared=8", "-f", "qcow2"];
        let foreign = Foreign::qemu_nbd(&sandbox, &sandbox.path("theirs.qcow2"), &options);
        copy(&foreign.uri("disk"));
    }
    qemu_img(&sandbox, &["compare", "-q", "-U", "-f", "qcow2", "-F", "qcow2", "ours.qcow2", "theirs.qcow2"]);
}

/// Sends requests of every kind that are not aligned to clusters.
fn change(peer: &mut Peer, model: &mut [u8]) {
    for number in 0..120u64 {
        let random = noise(number, 16);
        let word = |at: usize| u64::from_le_bytes(random[at..at + 8].try_into().expect("eight"));
        let offset = word(0) % (LEN / 512) * 512;
        let len = ((word(8) % if number % 3 == 0 { 600 } else { 20 } + 1) * 512).min(LEN - offset);
        let range = offset as usize..(offset + len) as usize;
        match number % 7 {
            0..4 => {
                let data = noise(number + 1000, len as usize);
                let flags = if number % 5 == 0 { CommandFlags::FUA } else { CommandFlags::empty() };
                peer.write(offset, &data, flags).expect("a write");
                model[range].copy_from_slice(&data);
            }
            4 | 5 => {
                peer.zero(offset, len, CommandFlags::empty()).expect("zeroes");
                model[range].fill(0);
            }
            _ => peer.flush().expect("a flush"),
        }
    }
}

/// Every kind of image that QEMU creates.
const KINDS: [&[&str]; 13] = [
    &[],
    &["-o", "compat=0.10"],
    &["-o", "cluster_size=512"],
    &["-o", "cluster_size=4K,refcount_bits=1"],
    &["-o", "cluster_size=2M"],
    &["-o", "refcount_bits=8"],
    &["-o", "refcount_bits=64"],
    &["-o", "lazy_refcounts=on"],
    &["-o", "preallocation=metadata"],
    &["-c"],
    &["-c", "-o", "compression_type=zstd"],
    &["-o", "extended_l2=on"],
    &["-c", "-o", "cluster_size=512"],
];

#[test]
fn images_of_every_kind_that_qemu_makes_are_written() {
    if missing(&["qemu-img"]) {
        return;
    }
    for options in KINDS {
        let sandbox = Sandbox::default();
        let mut model = mixed(&sandbox, LEN);
        let words =
            [&["convert", "-f", "raw", "-O", "qcow2", "mixed.raw"][..], options, &["disk.qcow2"]].concat();
        qemu_img(&sandbox, &words);
        let mut server = serve(&sandbox, &sandbox.path("disk.qcow2"));
        let mut peer = Peer::connect(&server.socket(), "disk");
        assert!(peer.read(0, LEN).expect("a read") == model, "{options:?}");
        change(&mut peer, &mut model);
        assert!(peer.read(0, LEN).expect("a read") == model, "{options:?}");
        peer.disconnect();
        server.terminate();
        assert_sound(&sandbox, "disk.qcow2");
        assert_eq!(wrong_blocks(&content(&sandbox, "disk.qcow2"), &model), 0, "{options:?}");
    }
}

#[test]
fn internal_snapshots_keep_their_content_and_bitmaps_are_dropped() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let before = mixed(&sandbox, LEN);
    let mut model = before.clone();
    qemu_img(&sandbox, &["convert", "-f", "raw", "-O", "qcow2", "mixed.raw", "disk.qcow2"]);
    qemu_img(&sandbox, &["snapshot", "-c", "one", "disk.qcow2"]);
    qemu_img(&sandbox, &["bitmap", "-f", "qcow2", "--add", "disk.qcow2", "changes"]);
    let mut server = serve(&sandbox, &sandbox.path("disk.qcow2"));
    let mut peer = Peer::connect(&server.socket(), "disk");
    change(&mut peer, &mut model);
    peer.disconnect();
    server.terminate();
    let checked = run(command(&["qemu-img", "check", "-f", "qcow2"]).arg(sandbox.path("disk.qcow2")));
    // Status 3: the bitmap's clusters, which QEMU no longer treats as one.
    assert!(matches!(checked.status.code(), Some(0 | 3)), "{checked}");
    assert!(content(&sandbox, "disk.qcow2") == model);
    qemu_img(&sandbox, &["convert", "-f", "qcow2", "-l", "one", "-O", "raw", "disk.qcow2", "snapshot.raw"]);
    assert!(std::fs::read(sandbox.path("snapshot.raw")).expect("a file") == before);
}

#[test]
fn zeroes_in_an_image_hide_its_backing_file() {
    if missing(&["qemu-img"]) {
        return;
    }
    for version in ["1.1", "0.10"] {
        let sandbox = Sandbox::default();
        let mut model = mixed(&sandbox, LEN);
        let compat = format!("compat={version}");
        qemu_img(
            &sandbox,
            &["create", "-q", "-f", "qcow2", "-o", &compat, "-b", "mixed.raw", "-F", "raw", "disk.qcow2"],
        );
        let mut server = serve(&sandbox, &sandbox.path("disk.qcow2"));
        let mut peer = Peer::connect(&server.socket(), "disk");
        change(&mut peer, &mut model);
        peer.disconnect();
        server.terminate();
        assert_sound(&sandbox, "disk.qcow2");
        assert_eq!(wrong_blocks(&content(&sandbox, "disk.qcow2"), &model), 0, "{version}");
    }
}

#[test]
fn a_clean_end_stores_unflushed_writes() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    qemu_img(&sandbox, &["create", "-q", "-f", "qcow2", "disk.qcow2", "8M"]);
    let mut server = serve(&sandbox, &sandbox.path("disk.qcow2"));
    let mut peer = Peer::connect(&server.socket(), "disk");
    let data = noise(1, LEN as usize);
    peer.write(0, &data, CommandFlags::empty()).expect("a write");
    drop(peer);
    server.terminate();
    assert_sound(&sandbox, "disk.qcow2");
    assert!(content(&sandbox, "disk.qcow2") == data);
}

#[test]
fn an_internal_snapshot_is_served_by_its_name_or_id() {
    if missing(&["qemu-img", "qemu-io"]) {
        return;
    }
    for options in [&[][..], &["-o", "compat=0.10"], &["-o", "extended_l2=on"], &["-o", "cluster_size=512"]] {
        let sandbox = Sandbox::default();
        qemu_img(&sandbox, &[&["create", "-f", "qcow2"], options, &["disk.qcow2", "1M"]].concat());
        let write = |value: &str| {
            let order = format!("write -P {value} 64k 128k");
            run(&mut sandbox.tool(&["qemu-io", "-f", "qcow2", "-c", &order, "disk.qcow2"])).ok();
        };
        write("1");
        qemu_img(&sandbox, &["snapshot", "-c", "first, of two", "disk.qcow2"]);
        write("2");
        qemu_img(&sandbox, &["snapshot", "-c", "twice", "disk.qcow2"]);
        write("3");
        qemu_img(&sandbox, &["snapshot", "-c", "twice", "disk.qcow2"]);
        if options.is_empty() {
            qemu_img(&sandbox, &["resize", "-f", "qcow2", "disk.qcow2", "2M"]);
        }
        write("4");
        let before = std::fs::read(sandbox.path("disk.qcow2")).expect("an image");
        for (snapshot, value) in [("first,, of two", 1), ("1", 1), ("2", 2), ("3", 3)] {
            let stack =
                format!("file:{},format=qcow2,snapshot={snapshot}", sandbox.path("disk.qcow2").display());
            let mut server = sandbox.serve(&stack, &[]);
            let mut peer = Peer::connect(&server.socket(), "disk");
            let content = peer.read(0, 1 << 20).expect("a read");
            let is_as_then = |(at, &byte): (usize, &u8)| {
                byte == if (64 << 10..192 << 10).contains(&at) { value } else { 0 }
            };
            assert!(content.iter().enumerate().all(is_as_then), "{options:?}, {snapshot}");
            assert!(peer.write(0, &[0; 512], CommandFlags::empty()).is_err());
            assert!(peer.read(1 << 20, 512).is_err(), "the disk was 1 MiB then");
            server.terminate();
        }
        for (snapshot, why) in [
            ("fourth", "it has no snapshot \"fourth\"; there is 1 (first, of two), 2 (twice), 3 (twice)"),
            ("twice", "several of its snapshots are called \"twice\": use the id"),
        ] {
            let stack =
                format!("file:{},format=qcow2,snapshot={snapshot}", sandbox.path("disk.qcow2").display());
            let refused = sandbox.run(&["serve", &stack, "--nbd", "unix:s"]);
            assert!(!refused.status.success() && refused.stderr.contains(why), "{refused}");
        }
        assert!(
            std::fs::read(sandbox.path("disk.qcow2")).expect("an image") == before,
            "nothing was written"
        );
    }
    let sandbox = Sandbox::default();
    let raw = sandbox.run(&["serve", "file:disk.img,snapshot=1", "--nbd", "unix:s"]);
    assert!(!raw.status.success() && raw.stderr.contains("this is a raw disk"), "{raw}");
}
