//! TLS with real clients: offered, required, refused; certificates of both sides verified; data unchanged.
//!
//! openssl creates the certificates for each test; they are valid for a day.

use blockyard_tests::certificates::certificates;
use blockyard_tests::peer::Peer;
use blockyard_tests::raw::{Raw, go_data, option_error};
use blockyard_tests::server::{Sandbox, Server};
use blockyard_tests::tools::{Outcome, command, missing, missing_libnbd, python, run};
use proto::nbd::client::{Failure, HandshakeOptions, TlsPolicy};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const STARTTLS: u32 = 5;
const GO: u32 = 7;
const EXPORT_NAME: u32 = 1;

/// Returns a folder with the authority's certificate alone: a client without one of its own.
fn authority_only(sandbox: &Sandbox, from: &Path) -> PathBuf {
    let path = sandbox.path("authority-only");
    std::fs::create_dir(&path).unwrap();
    std::fs::copy(from.join("ca-cert.pem"), path.join("ca-cert.pem")).unwrap();
    path
}

/// Serves on TCP and on a Unix socket.
fn serve(sandbox: &Sandbox, certificates: &Path, more: &[&str]) -> Server {
    let unix = format!("unix:{}", sandbox.path("disk.sock").display());
    let folder = certificates.to_string_lossy();
    let mut serve = sandbox.blockyard(&["serve", "ram:16M", "--name", "disk", "--nbd", "tcp:127.0.0.1:0"]);
    serve.args(["--nbd", &unix, "--tls-certificates", &folder]).args(more);
    sandbox.start(&mut serve, 2)
}

/// Returns the address with the scheme for clients with or without TLS.
fn with_scheme(uri: &str, scheme: &str) -> String {
    let rest = uri.split_once(':').expect("a URI").1;
    let is_unix = uri.split_once(':').is_some_and(|(scheme, _)| scheme.ends_with("+unix"));
    format!("{scheme}{}:{rest}", if is_unix { "+unix" } else { "" })
}

fn size_over_tls(uri: &str, certificates: &Path) -> Outcome {
    let mut uri = with_scheme(uri, "nbds");
    uri += if uri.contains('?') { "&" } else { "?" };
    uri += &format!("tls-certificates={}", certificates.display());
    run(&mut command(&["nbdinfo", "--size", &uri]))
}

fn size_in_the_clear(uri: &str) -> Outcome {
    run(&mut command(&["nbdinfo", "--size", &with_scheme(uri, "nbd")]))
}

#[test]
fn required_tls_refuses_plaintext_clients() {
    if missing(&["openssl", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let server = serve(&sandbox, &folder, &["--tls", "require"]);
    for number in 0..2 {
        let uri = server.uri_of(number);
        assert!(uri.starts_with("nbds"), "{uri}");
        assert_eq!(size_over_tls(uri, &folder).ok().trim(), "16777216");
        size_in_the_clear(uri).failed();
    }
    let refused = Peer::with(&sandbox.path("disk.sock"), HandshakeOptions::new("disk")).err();
    assert!(matches!(refused, Some(Failure::Refused { kind, .. }) if kind == option_error(5)), "{refused:?}");
    // The refusal does not reveal the exports.
    let mut raw = Raw::greeted(&sandbox.path("disk.sock"));
    for option in [3, 6, GO, 8, 9, 10, 11, 77] {
        raw.option(option, &go_data("disk"));
        assert_eq!(raw.option_reply().1, option_error(5), "option {option}");
    }
    raw.option(EXPORT_NAME, b"disk");
    raw.expect_closed(0);
}

#[test]
fn offered_tls_may_be_used() {
    if missing(&["openssl", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let server = serve(&sandbox, &folder, &["--tls", "on"]);
    for number in 0..2 {
        let uri = server.uri_of(number);
        assert!(!uri.starts_with("nbds"), "{uri}");
        assert_eq!(size_over_tls(uri, &folder).ok().trim(), "16777216");
        assert_eq!(size_in_the_clear(uri).ok().trim(), "16777216");
    }
}

#[test]
fn tls_options_imply_required_tls() {
    if missing(&["openssl", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let nobody = authority_only(&sandbox, &folder);
    // Certificates alone imply TLS for every client; with --tls-verify-peer a client also needs a
    // certificate.
    for (more, anonymous) in [(&[][..], true), (&["--tls-verify-peer"], false)] {
        let mut server = serve(&sandbox, &folder, more);
        for number in 0..2 {
            let uri = server.uri_of(number);
            assert!(uri.starts_with("nbds"), "{uri}");
            size_in_the_clear(uri).failed();
            assert_eq!(size_over_tls(uri, &folder).ok().trim(), "16777216");
            let outcome = size_over_tls(uri, &nobody);
            if anonymous { drop(outcome.ok()) } else { drop(outcome.failed()) }
        }
        server.terminate();
    }
    let topology = format!(
        "[device.disk]\nstack = \"ram:16M\"\n[[export]]\ndevice = \"disk\"\nnbd = \"tcp:127.0.0.1:0\"\n\
         tls-certificates = \"{}\"\ntls-verify-peer = true\n",
        folder.display()
    );
    let server = sandbox.up(&topology, 1);
    size_in_the_clear(server.uri()).failed();
    size_over_tls(server.uri(), &nobody).failed();
    assert_eq!(size_over_tls(server.uri(), &folder).ok().trim(), "16777216");
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let sandbox = Sandbox::default();
    let serve = |more: &[&str]| {
        let base = ["serve", "ram:1M", "--name", "disk", "--tls-certificates", "pki"];
        sandbox.run(&[&base[..], more].concat()).failed_with(2)
    };
    let nbd = ["--nbd", "tcp:127.0.0.1:0"];
    for mode in ["on", "off"] {
        let stderr = serve(&[&nbd[..], &["--tls", mode, "--tls-verify-peer"]].concat());
        assert!(stderr.contains("would let clients in that show no certificate"), "{stderr}");
    }
    let stderr = serve(&[&nbd[..], &["--tls", "off"]].concat());
    assert!(stderr.contains("tls-certificates is given, and TLS is off"), "{stderr}");
    let stderr = serve(&["--fuse", "file"]);
    assert!(stderr.contains("TLS is for NBD, but no --nbd is given"), "{stderr}");
}

#[test]
fn a_private_key_that_others_can_read_is_refused() {
    if missing(&["openssl"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let key = folder.join("server-key.pem");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let topology = "[device.disk]\nstack = \"ram:1M\"\n[[export]]\ndevice = \"disk\"\nnbd = \"tcp:127.0.0.1:0\"\n\
                    tls-certificates = \"pki\"\n";
    let topology = sandbox.text("t.toml", topology);
    let serve =
        ["serve", "ram:1M", "--name", "disk", "--nbd", "tcp:127.0.0.1:0", "--tls-certificates", "pki"];
    for arguments in [&serve[..], &["check", &topology.to_string_lossy()]] {
        let outcome = sandbox.run(arguments);
        let printed = outcome.failed();
        assert!(printed.contains("server-key.pem: every user has access to this secret file"), "{printed}");
        assert!(printed.contains("0644 (chmod 600 it"), "{printed}");
    }
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    sandbox.run(&["check", &topology.to_string_lossy()]).ok();
}

#[test]
fn a_server_without_tls_refuses_starttls() {
    if missing(&["openssl", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let server = sandbox.serve("ram:16M", &[]);
    size_over_tls(server.uri(), &folder).failed();
    let requested = HandshakeOptions { tls: TlsPolicy::Always, ..HandshakeOptions::new("disk") };
    let refused = Peer::with(&server.socket(), requested).err();
    assert!(matches!(refused, Some(Failure::NoTls(_))), "{refused:?}");
}

#[test]
fn clients_need_a_certificate_with_verify_peer() {
    if missing(&["openssl", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let stranger = certificates(&sandbox, "stranger");
    // A foreign certificate, with our authority: so that only the server has a reason to refuse.
    std::fs::copy(folder.join("ca-cert.pem"), stranger.join("ca-cert.pem")).unwrap();
    let nobody = authority_only(&sandbox, &folder);
    let mut server = serve(&sandbox, &folder, &["--tls", "require", "--tls-verify-peer"]);
    let uri = server.uri().to_owned();
    assert_eq!(size_over_tls(&uri, &folder).ok().trim(), "16777216");
    size_over_tls(&uri, &nobody).failed();
    size_over_tls(&uri, &stranger).failed();
    assert_eq!(size_over_tls(&uri, &folder).ok().trim(), "16777216");
    server.terminate();
    // Without that option a client needs none.
    let server = serve(&sandbox, &folder, &["--tls", "require"]);
    assert_eq!(size_over_tls(server.uri(), &nobody).ok().trim(), "16777216");
}

#[test]
fn a_client_with_another_authority_refuses_the_server() {
    if missing(&["openssl", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let other = certificates(&sandbox, "other");
    let server = serve(&sandbox, &folder, &["--tls", "require"]);
    size_over_tls(server.uri(), &other).failed();
    assert_eq!(size_over_tls(server.uri(), &folder).ok().trim(), "16777216");
}

#[test]
fn data_goes_through_tls_unchanged() {
    if missing(&["openssl", "nbdcopy", "qemu-img", "cmp"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let server = serve(&sandbox, &folder, &["--tls", "require"]);
    let source = sandbox.noise("source", 16 << 20);
    let (source, copy) = (source.to_string_lossy(), sandbox.path("copy"));
    let copy = copy.to_string_lossy();
    let uri = format!("{}?tls-certificates={}", server.uri(), folder.display());
    run(&mut command(&["nbdcopy", &source, &uri])).ok();
    run(&mut command(&["nbdcopy", "--connections=4", &uri, &copy])).ok();
    run(&mut command(&["cmp", &source, &copy])).ok();
    let address = server.uri().strip_prefix("nbds://").and_then(|rest| rest.split_once('/'));
    let (host, port) = address.and_then(|(address, _)| address.rsplit_once(':')).expect("host and port");
    let credentials = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", folder.display());
    let options = format!("driver=nbd,host={host},port={port},export=disk,tls-creds=tls0");
    let compare = ["qemu-img", "compare", "--object", &credentials, "--image-opts"];
    let source = format!("driver=raw,file.driver=file,file.filename={source}");
    run(&mut command(&[&compare[..], &[&source, &options]].concat())).ok();
}

#[test]
fn libnbd_speaks_all_of_the_protocol_through_tls() {
    if missing(&["openssl"]) || missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let server = serve(&sandbox, &folder, &["--tls", "on"]);
    let program = "
def connect(tls):
    h = nbd.NBD()
    h.set_tls(tls)
    h.set_tls_certificates('FOLDER')
    h.set_export_name('disk')
    h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    h.connect_tcp('127.0.0.1', uri.split(':')[2].split('/')[0])
    return h

secret, plain = connect(nbd.TLS_REQUIRE), connect(nbd.TLS_DISABLE)
assert secret.get_tls_negotiated() and not plain.get_tls_negotiated()
assert secret.get_structured_replies_negotiated()
one = bytes(i * 13 & 255 for i in range(1 << 20))
secret.pwrite(one, 1 << 20, nbd.CMD_FLAG_FUA)
assert plain.pread(1 << 20, 1 << 20) == one
plain.zero(4096, 1 << 20)
plain.flush()
assert secret.pread(8192, 1 << 20) == bytes(4096) + one[4096:8192]
assert extents(secret, 16 << 20, 0)[0] == ((1 << 20) + 4096, nbd.STATE_HOLE | nbd.STATE_ZERO)
assert secret.pread(16 << 20, 0) == plain.pread(16 << 20, 0)
secret.set_strict_mode(0)
fails(errno.ENOSPC, secret.pwrite, bytes(512), 16 << 20)
secret.shutdown()
plain.shutdown()
";
    python(server.uri(), &program.replace("FOLDER", &folder.to_string_lossy()));
}

#[test]
fn bad_tls_handshakes_end_only_their_connection() {
    if missing(&["openssl", "nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let folder = certificates(&sandbox, "pki");
    let server = serve(&sandbox, &folder, &["--tls", "require"]);
    let socket = sandbox.path("disk.sock");
    let starttls = || {
        let mut raw = Raw::greeted(&socket);
        raw.option(STARTTLS, &[]);
        assert_eq!(raw.option_reply(), (STARTTLS, 1, Vec::new()));
        raw
    };
    // Handshakes that stop half-way.
    let half_way: Vec<Raw> = (0..50).map(|_| starttls()).collect();
    for garbage in [&[0; 600][..], b"GET / HTTP/1.1\r\n\r\n", &[0x16, 3, 1, 0xff, 0xff, 1]] {
        let mut raw = starttls();
        raw.send(garbage);
        raw.stream.shutdown(std::net::Shutdown::Write).ok();
        raw.expect_closed(4096);
    }
    // STARTTLS has no data; and plaintext after it is not accepted as the client's.
    let mut raw = Raw::greeted(&socket);
    raw.option(STARTTLS, b"x");
    assert_eq!(raw.option_reply().1, option_error(3));
    let mut early = blockyard_tests::raw::option_bytes(STARTTLS, &[]);
    early.extend(blockyard_tests::raw::option_bytes(GO, &go_data("disk")));
    raw.send(&early);
    raw.expect_closed(4096);
    assert_eq!(size_over_tls(server.uri(), &folder).ok().trim(), "16777216");
    drop(half_way);
}

#[test]
fn missing_certificates_are_named() {
    let sandbox = Sandbox::default();
    std::fs::create_dir(sandbox.path("empty")).unwrap();
    let serve =
        ["serve", "ram:1M", "--name", "disk", "--nbd", "tcp:127.0.0.1:0", "--tls-certificates", "empty"];
    let stderr = sandbox.run(&serve).failed_with(1);
    assert!(
        stderr.starts_with("blockyard: serve failed: disk: ") && stderr.contains("server-cert.pem"),
        "{stderr}"
    );
}
