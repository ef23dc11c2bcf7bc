//! `nbd:` devices over real servers: our own, nbdkit and qemu-nbd, on Unix sockets and TCP.
//!
//! Data written through such a device is checked behind the server, and its properties are compared with the
//! server's.

use blockyard_tests::certificates::certificates;
use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::remote::{Foreign, fio_verify, over, serve_as};
use blockyard_tests::server::{Engine, Sandbox, noise};
use blockyard_tests::tools::{PATIENCE, command, missing, run, until};
use proto::nbd::{CommandFlags, NbdError};
use serde_json::Value;

const MIB: u64 = 1 << 20;

on_both_engines!(
    fio_verifies_over_our_own_server,
    fio_verifies_over_nbdkit,
    fio_verifies_over_qemu_nbd_which_takes_one_connection,
    large_and_unaligned_requests_return_the_written_data,
    tls_transfers_unchanged_bytes_and_ends_with_its_server,
);

fn reported(server: &blockyard_tests::server::Server) -> Value {
    let text = run(&mut command(&["nbdinfo", "--json", server.uri()])).ok();
    let reported: Value = serde_json::from_str(&text).unwrap();
    reported["exports"][0].clone()
}

fn fio_verifies_over_our_own_server(engine: Engine) {
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("image", 64 * MIB);
    let back = serve_as(&sandbox, "back", &format!("file:{}", image.display()), &[]);
    let front = over(&sandbox, back.uri(), &[]);
    fio_verify(&front, "--size=32M --bs=512-256k --iodepth=16");
    fio_verify(&front, "--size=16M --bs=4k --iodepth=32 --numjobs=2 --offset_increment=16M");
}

fn fio_verifies_over_nbdkit(engine: Engine) {
    if missing(&["fio", "nbdkit"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let back = Foreign::nbdkit(&sandbox, &["memory", "64M"]);
    let front = over(&sandbox, &back.uri("disk"), &[]);
    fio_verify(&front, "--size=32M --bs=512-256k --iodepth=16");
}

fn fio_verifies_over_qemu_nbd_which_takes_one_connection(engine: Engine) {
    if missing(&["fio", "qemu-nbd"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("image", 64 * MIB);
    let back = Foreign::qemu_nbd(&sandbox, &image, &[]);
    let front = over(&sandbox, &back.uri("disk"), &["--queues", "2"]);
    fio_verify(&front, "--size=24M --bs=4k-256k --iodepth=8 --numjobs=2 --offset_increment=24M");
    let shown = sandbox.run(&["show", "front"]).ok();
    assert!(
        shown.lines().any(|line| line.starts_with("multi-conn") && line.contains("one queue")),
        "{shown}"
    );
}

fn large_and_unaligned_requests_return_the_written_data(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let back = serve_as(&sandbox, "back", "ram:128M", &[]);
    let front = over(&sandbox, back.uri(), &[]);
    let mut peer = Peer::connect(&front.socket(), "front");
    for (offset, len) in [(0, 1), (3, 511), (4095, 2), (777, 100_000), (12_345, 3 << 20), (1, 20 << 20)] {
        let data = noise(offset + len as u64, len);
        peer.write(offset, &data, CommandFlags::empty()).unwrap();
        assert!(peer.read(offset, len as u64).unwrap() == data, "{len} bytes at {offset}");
    }
    peer.flush().unwrap();
    peer.zero(MIB, 2 * MIB, CommandFlags::empty()).unwrap();
    peer.trim(8 * MIB, MIB).unwrap();
    let mut behind = Peer::connect(&back.socket(), "back");
    assert!(behind.read(MIB, 2 << 20).unwrap().iter().all(|&byte| byte == 0));
    assert!(behind.read(8 * MIB, 1 << 20).unwrap().iter().all(|&byte| byte == 0));
    [peer, behind].into_iter().for_each(Peer::disconnect);
}

#[test]
fn a_devices_properties_are_its_servers() {
    if missing(&["nbdkit", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let policy = ["--filter=blocksize-policy", "memory", "64M"];
    let options = ["blocksize-minimum=4096", "blocksize-preferred=64k", "blocksize-maximum=1M"];
    let back = Foreign::nbdkit(&sandbox, &[&policy[..], &options].concat());
    let front = over(&sandbox, &back.uri("disk"), &[]);
    let export = reported(&front);
    assert_eq!(export["block_size_minimum"], 4096, "{export}");
    assert_eq!(export["block_size_preferred"], 65536, "{export}");
    let shown: Value = serde_json::from_str(&sandbox.run(&["show", "front", "--json"]).ok()).unwrap();
    assert_eq!(shown["limits"]["max_sectors"], 2048, "{shown}");
    // A request beyond the server's maximum is split.
    let mut peer = Peer::connect(&front.socket(), "front");
    let data = noise(5, 5 << 20);
    peer.write(4096, &data, CommandFlags::FUA).unwrap();
    assert!(peer.read(4096, 5 << 20).unwrap() == data);
    peer.disconnect();
}

#[test]
fn a_read_only_export_is_a_read_only_device() {
    if missing(&["nbdkit", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let back = Foreign::nbdkit(&sandbox, &["-r", "pattern", "1M"]);
    let front = over(&sandbox, &back.uri("disk"), &[]);
    let export = reported(&front);
    assert_eq!(export["is_read_only"], true, "{export}");
    let mut peer = Peer::connect(&front.socket(), "front");
    let bytes = peer.read(65536, 16).unwrap();
    assert_eq!(u64::from_be_bytes(bytes[8..16].try_into().unwrap()), 65544, "the pattern plugin's content");
    peer.disconnect();
}

#[test]
fn holes_are_reported_through_the_device() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 4 * MIB);
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &noise(1, MIB as usize), MIB).unwrap();
    let back = serve_as(&sandbox, "back", &format!("file:{}", image.display()), &[]);
    let front = over(&sandbox, back.uri(), &[]);
    if missing(&["nbdinfo"]) {
        return;
    }
    let map = |uri: &str| run(&mut command(&["nbdinfo", "--map", uri])).ok();
    assert_eq!(map(front.uri()), map(back.uri()));
    assert!(map(front.uri()).contains("hole,zero"));
}

#[test]
fn errors_of_the_server_reach_the_client() {
    if missing(&["nbdkit"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let words =
        ["--filter=error", "memory", "16M", "error-pread=EIO", "error-pwrite=ENOSPC", "error-rate=100%"];
    let back = Foreign::nbdkit(&sandbox, &words);
    let front = over(&sandbox, &back.uri("disk"), &[]);
    let mut peer = Peer::connect(&front.socket(), "front");
    for _ in 0..3 {
        assert_eq!(peer.read(0, 4096), Err(NbdError::Io));
        assert_eq!(peer.write(0, &[1; 4096], CommandFlags::empty()), Err(NbdError::NoSpace));
    }
    peer.disconnect();
}

#[test]
fn a_missing_server_is_reported_at_once() {
    let sandbox = Sandbox::default();
    let stack = format!("nbd:nbd+unix:///disk?socket={}", sandbox.path("none.sock").display());
    let printed = sandbox.run(&["serve", &stack, "--nbd", "tcp:127.0.0.1:0"]).failed_with(1);
    assert!(printed.contains("none.sock") && printed.contains("(does the server run?)"), "{printed}");
    let back = serve_as(&sandbox, "back", "ram:1M", &[]);
    let stack = format!("nbd:{}", back.uri().replace("/back?", "/other?"));
    let printed = sandbox.run(&["serve", &stack, "--nbd", "tcp:127.0.0.1:0"]).failed_with(1);
    assert!(printed.contains("refused"), "{printed}");
}

fn tls_transfers_unchanged_bytes_and_ends_with_its_server(engine: Engine) {
    if missing(&["openssl", "fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let folder = certificates(&sandbox, "pki");
    let folder = folder.to_string_lossy();
    let tls = ["--tls", "require", "--tls-certificates", &folder, "--tls-verify-peer"];
    let image = sandbox.image("image", 32 * MIB);
    let stack = format!("file:{},share", image.display());
    let mut back = serve_as(&sandbox, "back", &stack, &tls);
    let uri = format!("{}&tls-certificates={folder}", back.uri());
    assert!(uri.starts_with("nbds+unix:"), "{uri}");
    let front = over(&sandbox, &uri, &[]);
    fio_verify(&front, "--size=16M --bs=512-512k --iodepth=8");
    let shown = sandbox.run(&["show", "front"]).ok();
    assert!(shown.lines().any(|line| line.starts_with("tls ") && line.ends_with("yes")), "{shown}");
    // The relay ends with the connection, and the next connection has another one.
    let mut peer = Peer::connect(&front.socket(), "front");
    peer.write(0, &[7; 65536], CommandFlags::FUA).unwrap();
    back.kill();
    back = serve_as(&sandbox, "back", &stack, &tls);
    assert_eq!(peer.read(0, 65536).unwrap(), [7; 65536]);
    peer.disconnect();
    drop(front);
    let alone =
        until(PATIENCE, || (sandbox.run(&["show", "back"]).ok().contains("(0 clients")).then_some(()));
    assert!(alone.is_some(), "a removed device leaves nobody at its server");
    drop(back);
}

#[test]
fn tls_with_an_untrusted_certificate_is_refused() {
    if missing(&["openssl"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (folder, other) = (certificates(&sandbox, "pki"), certificates(&sandbox, "other"));
    let tls = ["--tls", "on", "--tls-certificates", &folder.to_string_lossy()];
    let back = serve_as(&sandbox, "back", "ram:1M", &tls);
    let plain = serve_as(&sandbox, "plain", "ram:1M", &[]);
    let fails = |uri: &str, with: &str, printed: &str| {
        let stack = format!("nbd:{}{with}", uri.replacen("nbd+", "nbds+", 1));
        let error = sandbox.run(&["serve", &stack, "--nbd", "tcp:127.0.0.1:0"]).failed_with(1);
        assert!(error.contains(printed), "{error}");
    };
    let (ours, theirs) = (folder.display(), other.display());
    fails(back.uri(), "", "TLS needs a directory with ca-cert.pem");
    fails(back.uri(), &format!("&tls-certificates={theirs}"), "invalid peer certificate");
    fails(back.uri(), &format!("&tls-certificates={ours}&tls-hostname=example.org"), "not valid for name");
    fails(back.uri(), "&tls-certificates=/nowhere", "/nowhere/ca-cert.pem");
    fails(back.uri(), &format!("&tls-certificates={ours}&tls-verify-peer=false"), "is not supported");
    fails(plain.uri(), &format!("&tls-certificates={ours}"), "does not offer TLS");
}

#[test]
fn tcp_works_as_well_as_unix_sockets() {
    let sandbox = Sandbox::default();
    let back = sandbox.start(
        &mut sandbox.blockyard(&["serve", "ram:16M", "--name", "back", "--nbd", "tcp:127.0.0.1:0"]),
        1,
    );
    let front = over(&sandbox, back.uri(), &[]);
    let mut peer = Peer::connect(&front.socket(), "front");
    let data = noise(1, 1 << 20);
    peer.write(4096, &data, CommandFlags::empty()).unwrap();
    assert!(peer.read(4096, 1 << 20).unwrap() == data);
    peer.disconnect();
}
