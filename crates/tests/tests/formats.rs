//! The format of a file is the user's choice, and never that of a client's data.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, missing, run, until};
use proto::nbd::{CommandFlags, NbdError};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

const LEN: u64 = 1 << 20;
const SECRET: &[u8; 512] = &[0x5e; 512];

fn qemu_img(sandbox: &Sandbox, arguments: &[&str]) -> String {
    run(&mut sandbox.tool(&[&["qemu-img"], arguments].concat())).ok()
}

/// Creates a folder with a raw disk, a secret file beside it, and the bytes of an image over that file.
fn site() -> (Sandbox, Vec<u8>) {
    let sandbox = Sandbox::default();
    sandbox.image("disk.img", LEN);
    let secret: Vec<u8> = SECRET.iter().copied().cycle().take(LEN as usize).collect();
    std::fs::write(sandbox.path("secret"), secret).expect("a file");
    qemu_img(&sandbox, &["create", "-q", "-f", "qcow2", "-b", "secret", "-F", "raw", "evil.qcow2", "1M"]);
    let image = std::fs::read(sandbox.path("evil.qcow2")).expect("an image");
    (sandbox, image)
}

fn serve(sandbox: &Sandbox, stack: &str) -> (Server, Peer) {
    let server = sandbox.serve(stack, &["--name", "disk"]);
    let peer = Peer::connect(&server.socket(), "disk");
    (server, peer)
}

fn refused(sandbox: &Sandbox, arguments: &[&str]) -> String {
    sandbox.run(arguments).failed_with(1)
}

fn put(path: &Path, at: u64, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(path).expect("a file");
    file.write_all_at(bytes, at).expect("bytes");
}

#[test]
fn a_client_cannot_make_the_server_read_host_files() {
    if missing(&["qemu-img"]) {
        return;
    }
    let (sandbox, image) = site();
    for _ in 0..2 {
        let (mut server, mut peer) = serve(&sandbox, "file:disk.img");
        // All at once, the first sector, and byte by byte.
        assert_eq!(peer.write(0, &image, CommandFlags::empty()), Err(NbdError::Perm));
        assert_eq!(peer.write(0, &image[..512], CommandFlags::FUA), Err(NbdError::Perm));
        for at in 0..3 {
            peer.write(at as u64, &image[at..=at], CommandFlags::empty()).expect("a byte");
        }
        assert_eq!(peer.write(3, &image[3..4], CommandFlags::empty()), Err(NbdError::Perm));
        peer.write(512, &image[512..], CommandFlags::empty()).expect("the rest is the client's");
        assert_ne!(peer.read(4096, 512).expect("a read"), SECRET, "it is raw, now and later");
        let shown = sandbox.run(&["show", "disk"]).ok();
        assert!(shown.contains("raw, because none was given") && shown.contains("qcow2 image"), "{shown}");
        peer.disconnect();
        server.terminate();
    }
    // `format=raw` allows any content.
    let (mut server, mut peer) = serve(&sandbox, "file:disk.img,format=raw");
    peer.write(0, &image, CommandFlags::empty()).expect("a write");
    assert_ne!(peer.read(4096, 512).expect("a read"), SECRET);
    peer.disconnect();
    server.terminate();
    let (_server, mut peer) = serve(&sandbox, "file:disk.img,format=raw");
    assert_eq!(peer.read(0, 512).expect("a read"), image[..512], "and keeps it");
}

#[test]
fn a_file_with_an_image_header_needs_an_explicit_format() {
    if missing(&["qemu-img"]) {
        return;
    }
    let (sandbox, _) = site();
    let printed = refused(&sandbox, &["serve", "file:evil.qcow2", "--nbd", "unix:s"]);
    let expected = "evil.qcow2: it begins as a qcow2 image (add format=qcow2 to serve what is in it, or add \
                    format=raw to serve the file as it is)";
    assert!(printed.contains(expected), "{printed}");
    for more in [",ro", ",offset=4096", ",part=1"] {
        let printed = refused(&sandbox, &["serve", &format!("file:evil.qcow2{more}"), "--nbd", "unix:s"]);
        assert!(printed.contains("it begins as a qcow2 image"), "{more}: {printed}");
    }
    let overlay = ["serve", "file:evil.qcow2", "--layer", "cow,file=new.cow,create", "--nbd", "unix:s"];
    assert!(refused(&sandbox, &overlay).contains("it begins as a qcow2 image"));
    let printed =
        refused(&sandbox, &["serve", "file:evil.qcow2,format=qcow2,offset=4096", "--nbd", "unix:s"]);
    assert!(printed.contains("offset does not apply to a qcow2 image"), "{printed}");
    let printed = refused(&sandbox, &["serve", "file:evil.qcow2,format=vmdk", "--nbd", "unix:s"]);
    let expected = "evil.qcow2 is not a vmdk image: it begins as a qcow2 image (add format=qcow2";
    assert!(printed.contains(expected), "{printed}");
    sandbox.run(&["serve", "file:evil.qcow2,format=vdi", "--nbd", "unix:s"]).failed_with(2);
    sandbox.run(&["serve", "file:evil.qcow2,format=raw,backing=allow", "--nbd", "unix:s"]).failed_with(2);
    qemu_img(&sandbox, &["create", "-q", "-f", "vhdx", "other", "1M"]);
    let printed = refused(&sandbox, &["serve", "file:other,format=probe", "--nbd", "unix:s"]);
    assert!(printed.contains("it begins as a vhdx image (convert it with qemu-img"), "{printed}");
    for format in ["qcow2", "probe"] {
        let (_server, mut peer) = serve(&sandbox, &format!("file:evil.qcow2,format={format}"));
        assert_eq!(peer.read(4096, 512).expect("a read"), SECRET, "{format}");
        let shown = sandbox.run(&["show", "disk"]).ok();
        let how =
            if format == "probe" { "qcow2 (detected, as format=probe asks)" } else { "qcow2 (as given)" };
        assert!(shown.contains(how) && shown.contains("format=qcow2"), "{shown}");
    }
    // A format that probing did not find must not appear later.
    let (_server, mut peer) = serve(&sandbox, "file:disk.img,format=probe");
    assert_eq!(peer.write(0, b"QFI\xfb", CommandFlags::empty()), Err(NbdError::Perm));
}

#[test]
fn a_file_without_the_header_of_its_format_is_refused() {
    let sandbox = Sandbox::default();
    sandbox.image("zeroes", LEN);
    std::fs::write(sandbox.path("noise"), noise(3, 70_000)).expect("a file");
    std::fs::write(sandbox.path("empty"), b"").expect("a file");
    std::fs::write(sandbox.path("short"), b"QF").expect("a file");
    std::fs::write(sandbox.path("image.qcow2.xz"), b"\xfd7zXZ\0\0\x04and so on").expect("a file");
    for format in ["qcow2", "vmdk"] {
        for name in ["zeroes", "noise", "empty", "short"] {
            let printed =
                refused(&sandbox, &["serve", &format!("file:{name},format={format}"), "--nbd", "unix:s"]);
            let expected = format!("{name} is not a {format} image: its header is missing (");
            assert!(printed.contains(&expected) && !printed.contains("qemu-img check"), "{printed}");
        }
        let words = ["serve", &format!("file:image.qcow2.xz,format={format}"), "--nbd", "unix:s"];
        let printed = refused(&sandbox, &words);
        let expected = format!("is not a {format} image: it is compressed with xz (unpack it first");
        assert!(printed.contains(&expected), "{printed}");
    }
}

#[test]
fn a_compressed_file_is_refused_unless_format_raw_is_given() {
    let sandbox = Sandbox::default();
    let gzip = [b"\x1f\x8b\x08", &noise(4, 4096)[3..]].concat();
    std::fs::write(sandbox.path("disk.img.gz"), &gzip).expect("a file");
    std::fs::write(sandbox.path("disk.img"), &gzip).expect("a file");
    std::fs::write(sandbox.path("odd"), &gzip[..4095]).expect("a file");
    for name in ["disk.img.gz", "odd"] {
        for more in ["", ",ro", ",format=probe"] {
            let printed = refused(&sandbox, &["serve", &format!("file:{name}{more}"), "--nbd", "unix:s"]);
            let expected =
                "it is compressed with gzip (unpack it first, or add format=raw to serve the file as it is)";
            assert!(printed.contains(expected), "{printed}");
        }
        let topology = format!("[device.disk]\nstack = \"file:{name}\"\n[[export]]\ndevice = \"disk\"\n");
        let checked = sandbox.run(&["check", sandbox.text("t.toml", &topology).to_str().expect("a path")]);
        assert!(checked.failed_with(1).contains("it is compressed with gzip"));
        let (_server, mut peer) = serve(&sandbox, &format!("file:{name},format=raw"));
        peer.write(0, &gzip[..512], CommandFlags::empty()).expect("a write");
    }
    // A client may have written the archive to the disk; the owner must still be able to serve it.
    let (server, mut peer) = serve(&sandbox, "file:disk.img");
    peer.write(0, &gzip[..512], CommandFlags::empty()).expect("a write");
    let log =
        until(PATIENCE, || Some(server.log()).filter(|log| log.contains("compressed"))).expect("a warning");
    assert!(log.contains("disk.img begins with data compressed with gzip"), "{log}");
}

#[test]
fn a_path_in_a_table_is_a_raw_disk_whatever_its_content() {
    if missing(&["qemu-img"]) {
        return;
    }
    let (sandbox, image) = site();
    put(&sandbox.path("disk.img"), 0, &image);
    let serve_line = |line: &str| {
        sandbox.text("table", line);
        sandbox.blockyard(&["serve", "--table", "table", "--name", "disk"])
    };
    let server = sandbox.start(&mut serve_line("0 2048 linear disk.img 0"), 1);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert_eq!(peer.read(0, 512).expect("a read"), image[..512]);
    assert_ne!(peer.read(4096, 512).expect("a read"), SECRET);
    drop((server, peer));
    for (line, why) in [
        ("0 2048 linear file:disk.img,share 0", "it begins as a qcow2 image"),
        ("0 2048 linear file:disk.img,share,format=probe 0", "a table does not detect formats"),
    ] {
        let printed = run(&mut serve_line(line)).failed_with(1);
        assert!(printed.contains(why), "{printed}");
        // `check` refuses it for the same reason.
        let topology = format!("[device.disk]\ntable = \"{line}\"\n[[export]]\ndevice = \"disk\"\n");
        let checked = sandbox.run(&["check", sandbox.text("t.toml", &topology).to_str().expect("a path")]);
        let printed = checked.failed_with(1);
        assert!(printed.contains(why), "{printed}");
    }
}

#[test]
fn a_commit_refuses_to_write_an_image_header_to_a_raw_disk() {
    if missing(&["qemu-img"]) {
        return;
    }
    let (sandbox, image) = site();
    let layer = ["--layer", "cow,file=over.cow,create", "--name", "disk"];
    let server = sandbox.serve("file:disk.img", &layer);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(0, &image[..4096], CommandFlags::empty()).expect("the overlay holds anything");
    let printed = refused(&sandbox, &["commit", "disk"]);
    assert!(printed.contains("serve it with format=raw, then commit again"), "{printed}");
    assert_eq!(peer.read(0, 4096).expect("a read"), image[..4096], "the overlay still has it");
    assert!(!std::fs::read(sandbox.path("disk.img")).expect("a file").starts_with(b"QFI"));
    drop((server, peer));
    let words = ["commit", "file:disk.img,format=raw", "--layer", "cow,file=over.cow"];
    sandbox.run(&words).ok();
    assert!(std::fs::read(sandbox.path("disk.img")).expect("a file").starts_with(&image[..4096]));
}

#[test]
fn a_replacement_file_with_an_image_header_is_refused() {
    if missing(&["qemu-img"]) {
        return;
    }
    let (sandbox, image) = site();
    sandbox.image("next.img", LEN);
    put(&sandbox.path("next.img"), 0, &image[..4096]);
    let (_server, mut peer) = serve(&sandbox, "file:disk.img,ro");
    let printed = refused(&sandbox, &["set", "disk", "file=next.img"]);
    assert!(printed.contains("it begins as a qcow2 image"), "{printed}");
    assert_ne!(peer.read(4096, 512).expect("a read"), SECRET);
}

#[test]
fn an_image_opens_files_outside_its_folder_only_if_allowed() {
    if missing(&["qemu-img"]) {
        return;
    }
    let (sandbox, _) = site();
    for folder in ["images", "elsewhere"] {
        std::fs::create_dir(sandbox.path(folder)).expect("a folder");
    }
    std::fs::rename(sandbox.path("secret"), sandbox.path("elsewhere/secret")).expect("a file");
    std::fs::copy(sandbox.path("elsewhere/secret"), sandbox.path("images/own")).expect("a file");
    symlink("../elsewhere/secret", sandbox.path("images/link")).expect("a link");
    let absolute = sandbox.path("elsewhere/secret").display().to_string();
    let make = |under: &str, format: &[&str]| {
        let words =
            [&["create", "-q", "-u", "-f", "qcow2", "-b", under][..], format, &["images/disk.qcow2", "1M"]];
        qemu_img(&sandbox, &words.concat());
    };
    let stack = |more: &str| format!("file:images/disk.qcow2,format=qcow2{more}");
    let reads = |more: &str| {
        let (_server, mut peer) = serve(&sandbox, &stack(more));
        assert_eq!(peer.read(4096, 512).expect("a read"), SECRET, "{more}");
    };
    for under in [&absolute, "../elsewhere/secret", "link"] {
        make(under, &["-F", "raw"]);
        let printed = refused(&sandbox, &["serve", &stack(""), "--nbd", "unix:s"]);
        assert!(
            printed.contains("is not a relative name within the image's directory")
                && printed.contains("add backing="),
            "{printed}"
        );
        reads(",backing=allow");
        reads(",backing=elsewhere");
        reads(",backing=images:elsewhere/secret");
        let printed = refused(&sandbox, &["serve", &stack(",backing=images"), "--nbd", "unix:s"]);
        assert!(printed.contains("nor listed in backing="), "{printed}");
    }
    for under in ["nbd://localhost/x", "json:{\"driver\":\"null-co\"}"] {
        make(under, &["-F", "raw"]);
        let printed = refused(&sandbox, &["serve", &stack(",backing=allow"), "--nbd", "unix:s"]);
        assert!(printed.contains("only files are supported"), "{printed}");
    }
    make("own", &["-F", "raw"]);
    reads("");
    let printed = refused(&sandbox, &["serve", &stack(",backing=none"), "--nbd", "unix:s"]);
    assert!(printed.contains("backing=none allows no other file"), "{printed}");
    // A header without the format: QEMU creates none any more, so the extension with the format is removed.
    let path = sandbox.path("images/disk.qcow2");
    let mut image = std::fs::read(&path).expect("an image");
    let at = image.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]).expect("an extension");
    image[at..at + 4].copy_from_slice(&[0x12, 0x34, 0x56, 0x78]);
    std::fs::write(&path, image).expect("an image");
    reads("");
    put(&sandbox.path("images/own"), 0, b"QFI\xfb\0\0\0\x03");
    let printed = refused(&sandbox, &["serve", &stack(""), "--nbd", "unix:s"]);
    assert!(
        printed.contains("as its backing file without a format") && printed.contains("-F qcow2"),
        "{printed}"
    );
}
