//! Images in qcow2 and vmdk: we read QEMU's images, QEMU finds ours valid, and untrusted ones are refused.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server, noise};
use blockyard_tests::tools::{command, missing, run};
use proto::nbd::CommandFlags;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
const LEN: usize = 8 << 20;

fn qemu_img(sandbox: &Sandbox, arguments: &[&str]) -> String {
    run(&mut sandbox.tool(&[&["qemu-img"], arguments].concat())).ok()
}

/// Creates an image by QEMU of content that repeats nowhere, with a hole in the middle.
fn image(sandbox: &Sandbox, name: &str, options: &[&str]) -> (PathBuf, Vec<u8>) {
    let raw = sandbox.noise("content.raw", LEN);
    let mut content = std::fs::read(&raw).expect("noise");
    content[2 << 20..4 << 20].fill(0);
    std::fs::write(&raw, &content).expect("a file");
    qemu_img(sandbox, &[&["convert", "-f", "raw", "content.raw"], options, &[name]].concat());
    (sandbox.path(name), content)
}

/// Returns the stack of an image, whose name ends in its format.
fn stack(path: &Path, options: &str) -> String {
    let format = path.extension().and_then(|format| format.to_str()).expect("a name with a format");
    format!("file:{},format={format}{options}", path.display())
}

fn serve(sandbox: &Sandbox, path: &Path, options: &str) -> (Server, Peer) {
    let server = sandbox.serve(&stack(path, options), &[]);
    let peer = Peer::connect(&server.socket(), "disk");
    (server, peer)
}

/// Returns the content that QEMU reads from an image.
fn content(sandbox: &Sandbox, format: &str, name: &str) -> Vec<u8> {
    qemu_img(sandbox, &["convert", "-f", format, "-O", "raw", name, "out.raw"]);
    std::fs::read(sandbox.path("out.raw")).expect("a file")
}

#[test]
fn qcow2_images_of_every_kind_are_read() {
    if missing(&["qemu-img"]) {
        return;
    }
    for options in [
        &["-O", "qcow2"][..],
        &["-O", "qcow2", "-c"],
        &["-O", "qcow2", "-o", "compat=0.10"],
        &["-O", "qcow2", "-o", "cluster_size=4K"],
        &["-O", "qcow2", "-o", "cluster_size=2M,preallocation=metadata"],
        &["-O", "qcow2", "-o", "cluster_size=512,refcount_bits=64"],
        &["-O", "qcow2", "-c", "-o", "compression_type=zstd"],
        &["-O", "qcow2", "-o", "extended_l2=on"],
    ] {
        let sandbox = Sandbox::default();
        let (path, content) = image(&sandbox, "disk.qcow2", options);
        let (_server, mut peer) = serve(&sandbox, &path, ",ro");
        assert!(peer.read(0, LEN as u64).expect("a read") == content, "{options:?}");
        assert!(peer.write(0, &[0; 512], CommandFlags::empty()).is_err());
    }
}

#[test]
fn qemu_reads_our_writes_and_its_check_is_clean() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (path, mut model) = image(&sandbox, "disk.qcow2", &["-O", "qcow2"]);
    let (mut server, mut peer) = serve(&sandbox, &path, "");
    for (number, (at, len)) in
        [(0, 512), (2 << 20, 4096), (3 << 20, 1 << 20), (5 * 512, 700 * 512), (LEN - 1024, 1024)]
            .into_iter()
            .enumerate()
    {
        let data = noise(number as u64, len);
        let flags = if number == 1 { CommandFlags::FUA } else { CommandFlags::empty() };
        peer.write(at as u64, &data, flags).expect("a write");
        model[at..at + len].copy_from_slice(&data);
    }
    peer.zero(6 * MIB, MIB + 512, CommandFlags::empty()).expect("zeroes");
    model[6 << 20..(7 << 20) + 512].fill(0);
    peer.trim(5 * MIB, MIB).expect("a discard");
    model[5 << 20..6 << 20].fill(0);
    assert!(peer.read(0, LEN as u64).expect("a read") == model);
    peer.flush().expect("a flush");
    peer.disconnect();
    server.terminate();
    qemu_img(&sandbox, &["check", "-f", "qcow2", "disk.qcow2"]);
    assert!(content(&sandbox, "qcow2", "disk.qcow2") == model);
}

#[test]
fn flushed_data_survives_a_killed_server() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (path, mut model) = image(&sandbox, "disk.qcow2", &["-O", "qcow2"]);
    let (mut server, mut peer) = serve(&sandbox, &path, "");
    let data = noise(1, 1 << 20);
    peer.write(2 * MIB, &data, CommandFlags::empty()).expect("a write");
    model[2 << 20..3 << 20].copy_from_slice(&data);
    peer.flush().expect("a flush");
    server.kill();
    let (_server, mut peer) = serve(&sandbox, &path, ",ro");
    assert!(peer.read(0, LEN as u64).expect("a read") == model);
}

#[test]
fn an_image_is_repaired_after_its_server_was_killed() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let path = sandbox.path("disk.qcow2");
    qemu_img(&sandbox, &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4096", "disk.qcow2", "64M"]);
    let mut flushed: Vec<(u64, Vec<u8>)> = Vec::new();
    for round in 0..6u64 {
        let (mut server, mut peer) = serve(&sandbox, &path, "");
        for (at, data) in &flushed {
            assert!(peer.read(*at, data.len() as u64).expect("a read") == *data, "round {round}: {at}");
        }
        let mut written = Vec::new();
        for number in 0..60u64 {
            // Each round has places of its own, so that flushed data is not overwritten.
            let at = (number * 6 + round) * (64 << 20) / 360 / 512 * 512;
            let data = noise(round * 100 + number, 512 * (1 + number as usize % 50));
            peer.write(at, &data, CommandFlags::empty()).expect("a write");
            written.push((at, data));
            if number == 40 {
                peer.flush().expect("a flush");
                flushed.append(&mut written);
            }
        }
        peer.zero(round * MIB, 65536 + 512, CommandFlags::empty()).expect("zeroes");
        flushed.retain(|(at, data)| *at >= (round + 1) * MIB || at + data.len() as u64 <= round * MIB);
        server.kill();
        let (mut server, peer) = serve(&sandbox, &path, "");
        peer.disconnect();
        server.terminate();
        let checked = run(command(&["qemu-img", "check", "-f", "qcow2"]).arg(&path));
        // Status 3: leaked clusters, which cost space and no data.
        assert!(matches!(checked.status.code(), Some(0 | 3)), "round {round}: {checked}");
    }
}

#[test]
fn a_backing_file_is_read_and_never_written() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (base, mut model) = image(&sandbox, "base.qcow2", &["-O", "qcow2"]);
    let before = std::fs::read(&base).expect("the base");
    qemu_img(&sandbox, &["create", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "mid.qcow2"]);
    qemu_img(&sandbox, &["create", "-f", "qcow2", "-b", "mid.qcow2", "-F", "qcow2", "top.qcow2"]);
    let top = sandbox.path("top.qcow2");
    {
        let (mut server, mut peer) = serve(&sandbox, &top, "");
        assert!(peer.read(0, LEN as u64).expect("a read") == model);
        peer.write(512, &[7; 512], CommandFlags::empty()).expect("a write");
        model[512..1024].fill(7);
        let shown = sandbox.run(&["show", "disk"]).ok();
        assert!(shown.contains("base.qcow2") && shown.contains("mid.qcow2"), "{shown}");
        peer.disconnect();
        server.terminate();
    }
    assert!(content(&sandbox, "qcow2", "top.qcow2") == model);
    assert!(std::fs::read(&base).expect("the base") == before);
    std::fs::remove_file(sandbox.path("mid.qcow2")).expect("it was there");
    let printed = sandbox.run(&["serve", &stack(&top, ""), "--nbd", "unix:s"]).failed_with(1);
    assert!(printed.contains("mid.qcow2") && printed.contains("provide the files"), "{printed}");
}

#[test]
fn holes_of_an_image_are_reported() {
    if missing(&["qemu-img", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (path, _) = image(&sandbox, "disk.qcow2", &["-O", "qcow2"]);
    let (server, _peer) = serve(&sandbox, &path, "");
    let map = run(&mut sandbox.tool(&["nbdinfo", "--map", server.uri()])).ok();
    let rows: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    assert_eq!(rows, [["0", "2097152", "0"], ["2097152", "2097152", "3"], ["4194304", "4194304", "0"]]);
}

#[test]
fn an_image_is_locked_against_other_writers() {
    if missing(&["qemu-img", "qemu-io"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (path, _) = image(&sandbox, "disk.qcow2", &["-O", "qcow2"]);
    let (_server, _peer) = serve(&sandbox, &path, "");
    let printed = sandbox.run(&["serve", &stack(&path, ""), "--nbd", "unix:s"]).failed_with(1);
    assert!(printed.contains("in use"), "{printed}");
    let mut qemu_io = sandbox.tool(&["qemu-io", "-f", "qcow2", "-c", "write 0 512", "disk.qcow2"]);
    let printed = run(&mut qemu_io).failed();
    assert!(printed.contains("lock"), "{printed}");
}

#[test]
fn vmdk_images_are_read_and_unsupported_kinds_are_refused() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    for kind in ["monolithicFlat", "monolithicSparse", "streamOptimized"] {
        let options = ["-O", "vmdk", "-o", &format!("subformat={kind}")];
        let (path, model) = image(&sandbox, &format!("{kind}.vmdk"), &options);
        let (server, mut peer) = serve(&sandbox, &path, "");
        assert!(peer.read(0, LEN as u64).expect("a read") == model, "{kind}");
        assert!(
            peer.read(MIB - 512, 66048).expect("a read") == model[MIB as usize - 512..][..66048],
            "{kind}"
        );
        assert!(peer.write(0, &[0; 512], CommandFlags::empty()).is_err(), "it can only be read");
        if kind != "monolithicFlat" && !missing(&["nbdinfo"]) {
            let map = run(&mut sandbox.tool(&["nbdinfo", "--map", server.uri()])).ok();
            let hole = map.lines().any(|line| line.contains("2097152") && line.contains("hole,zero"));
            assert!(hole, "{kind}: the hole in its middle is not shown:\n{map}");
        }
    }
    let options = ["-O", "vmdk", "-o", "subformat=twoGbMaxExtentSparse"];
    let (path, _) = image(&sandbox, "many.vmdk", &options);
    for path in [path, sandbox.path("many-s001.vmdk")] {
        let printed = sandbox.run(&["serve", &stack(&path, ""), "--nbd", "unix:s"]).failed_with(1);
        assert!(printed.contains("convert it with qemu-img"), "{printed}");
    }
    let (extents, model) = image(&sandbox, "two.vmdk", &["-O", "vmdk", "-o", "subformat=twoGbMaxExtentFlat"]);
    let (_server, mut peer) = serve(&sandbox, &extents, "");
    assert!(peer.read(0, LEN as u64).expect("a read") == model);
}

#[test]
fn an_image_cannot_open_forbidden_files() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let serve = |name: &str| {
        sandbox.run(&["serve", &stack(&sandbox.path(name), ""), "--nbd", "unix:s"]).failed_with(1)
    };
    qemu_img(
        &sandbox,
        &["create", "-f", "qcow2", "-o", "data_file=data.raw,data_file_raw=on", "d.qcow2", "1M"],
    );
    assert!(serve("d.qcow2").contains("is not opened"));
    for (name, under) in [("l.qcow2", "m.qcow2"), ("m.qcow2", "l.qcow2")] {
        qemu_img(&sandbox, &["create", "-u", "-f", "qcow2", "-b", under, "-F", "qcow2", name, "1M"]);
    }
    assert!(serve("l.qcow2").contains("more than 16 backing files"));
    let descriptor = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
                      createType=\"monolithicFlat\"\nRW 2 FLAT \"/etc/hostname\" 0\n";
    sandbox.text("v.vmdk", descriptor);
    assert!(
        serve("v.vmdk").contains("/etc/hostname, which is not a relative name within the image's directory")
    );
    sandbox.text("w.vmdk", &descriptor.replace("/etc/hostname", "../../etc/hostname"));
    assert!(serve("w.vmdk").contains("is not a relative name within the image's directory"));
}

#[test]
fn unsupported_images_are_refused() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    for (at, bytes, expected) in [
        // The method of encryption: creating a LUKS image takes long.
        (32, [0, 0, 0, 2], "it is encrypted with LUKS"),
        // An undefined incompatible feature.
        (76, [0, 0, 1, 0], "needs unsupported features: bit 8"),
        (4, [0, 0, 0, 4], "version 4"),
    ] {
        qemu_img(&sandbox, &["create", "-q", "-f", "qcow2", "image.qcow2", "1M"]);
        let image = std::fs::File::options().write(true).open(sandbox.path("image.qcow2"));
        image.and_then(|image| image.write_all_at(&bytes, at)).expect("a header");
        let stack = format!("file:{},format=qcow2", sandbox.path("image.qcow2").display());
        let printed = sandbox.run(&["serve", &stack, "--nbd", "unix:s"]).failed_with(1);
        assert!(printed.contains(expected), "{printed}");
        // It is not accepted as a backing file either.
        qemu_img(
            &sandbox,
            &["create", "-q", "-u", "-f", "qcow2", "-b", "image.qcow2", "-F", "qcow2", "top.qcow2", "1M"],
        );
        let stack = format!("file:{},format=qcow2", sandbox.path("top.qcow2").display());
        let printed = sandbox.run(&["serve", &stack, "--nbd", "unix:s"]).failed_with(1);
        assert!(printed.contains(expected) && printed.contains("image.qcow2"), "{printed}");
    }
}

#[test]
fn an_overlay_works_over_an_image() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (path, mut model) = image(&sandbox, "disk.qcow2", &["-O", "qcow2"]);
    let before = std::fs::read(&path).expect("the image");
    let layer = format!("cow,file={},create", sandbox.path("overlay.img").display());
    let server = sandbox.serve(&stack(&path, ""), &["--layer", &layer]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(1024, &[3; 512], CommandFlags::empty()).expect("a write");
    model[1024..1536].fill(3);
    assert!(peer.read(0, LEN as u64).expect("a read") == model);
    assert!(std::fs::read(&path).expect("the image") == before);
}

#[test]
fn an_image_keeps_its_path_when_the_overlay_over_it_is_changed() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    qemu_img(&sandbox, &["create", "-q", "-f", "qcow2", "disk.qcow2", "8M"]);
    let layer = ["--layer", "cow,file=mine.cow,create", "--name", "disk"];
    let _server = sandbox.serve(&stack(&sandbox.path("disk.qcow2"), ""), &layer);
    sandbox.run(&["set", "disk", "direct=off"]).ok();
    let shown = sandbox.run(&["show", "disk"]).ok();
    let line = |name: &str| {
        shown.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}: {shown}"))
    };
    assert!(line("stack").contains("disk.qcow2,format=qcow2"), "{shown}");
    assert!(line("layer").contains("mine.cow,direct=off"), "{shown}");
}

#[test]
fn a_damaged_image_fails_requests_but_not_the_server() {
    if missing(&["qemu-img"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (path, _) = image(&sandbox, "disk.qcow2", &["-O", "qcow2"]);
    // The first L2 table has clusters far past the end of the file, and unaligned ones.
    let file = std::fs::File::options().read(true).write(true).open(&path).expect("the image");
    let mut head = [0; 64];
    file.read_exact_at(&mut head, 0).expect("a header");
    let l1 = u64::from_be_bytes(head[40..48].try_into().expect("eight"));
    let mut entry = [0; 8];
    file.read_exact_at(&mut entry, l1).expect("an entry");
    let l2 = u64::from_be_bytes(entry) & 0x00ff_ffff_ffff_fe00;
    file.write_all_at(&[0x80, 0x70, 0, 0, 0, 0, 0, 0], l2).expect("damage");
    file.write_all_at(&[0x80, 0, 0, 0, 0, 5, 2, 0], l2 + 8).expect("damage");
    let stack = format!("file:{},format=qcow2", path.display());
    let printed = sandbox.run(&["serve", &stack, "--nbd", "unix:s"]).failed_with(1);
    assert!(
        printed.contains("refers past the end") && printed.contains("ro serves what can be read"),
        "{printed}"
    );
    let (mut server, mut peer) = serve(&sandbox, &path, ",ro");
    let _ = peer.read(0, 65536);
    assert!(peer.read(65536, 65536).is_err(), "a cluster that is not aligned");
    assert!(peer.read(5 << 20, 65536).is_ok(), "one that is sound");
    drop(Peer::connect(&server.socket(), "disk"));
    assert!(server.is_running(), "{}", server.log());
    peer.disconnect();
    server.terminate();
}
