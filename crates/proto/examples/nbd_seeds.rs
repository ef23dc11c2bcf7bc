//! Writes the seeds of the NBD fuzz corpora: `cargo run -p blockyard-proto --example nbd_seeds`.
//!
//! The seeds are the messages of our own client and server, so each target starts from bytes that reach deep
//! into its parser. Run it again when the protocol code gains a feature; it overwrites its own files only and
//! keeps what a fuzzer has found.

use std::path::{Path, PathBuf};

use block::{Bytes, Extent};
use blockyard_proto::nbd::client::{self, Goal, HandshakeOptions, TlsPolicy};
use blockyard_proto::nbd::extents::{StatusQuery, put_block_status};
use blockyard_proto::nbd::fuzzing::catalogue;
use blockyard_proto::nbd::server::{self, Config, TlsMode};
use blockyard_proto::nbd::{Command, CommandFlags, ExportId, NbdError, Request, Session, Style};

fn main() -> std::io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (name, settings, request, config) in handshakes() {
        let (sent, answered, style) = negotiate(request, config);
        // After a handshake that leads to transmission, the seed continues with requests and replies.
        let seed = |stream: &[u8], then: fn(Style) -> Vec<u8>| {
            let then = style.map(then).unwrap_or_default();
            [&[settings, 63][..], stream, &then].concat()
        };
        write(&root, "nbd_server_handshake", name, &seed(&sent, requests))?;
        write(&root, "nbd_client_handshake", name, &seed(&answered, replies))?;
    }
    for (number, style) in [Style::Simple, Style::Structured, Style::Extended].into_iter().enumerate() {
        let name = ["simple", "structured", "extended"][number];
        let settings = [number as u8];
        write(&root, "nbd_request", name, &[&settings[..], &requests(style)].concat())?;
        write(&root, "nbd_replies", name, &[&settings[..], &replies(style)].concat())?;
    }
    for (name, uri) in [
        ("tcp", "nbd://example.com:10810/disk"),
        ("ipv6", "nbds://user@[::1]/a%20b?tls-certificates=/etc/pki&x-y=1"),
        ("unix", "nbd+unix:///disk?socket=/run/disk.sock"),
        ("abstract", "nbds+unix:///?socket=%00name"),
    ] {
        write(&root, "nbd_uri", name, uri.as_bytes())?;
    }
    Ok(())
}

fn write(root: &Path, target: &str, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let folder: PathBuf = root.join(target);
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join(format!("seed-{name}")), bytes)
}

/// Returns the handshakes: name, settings byte (read by both targets), and configuration of client and
/// server.
fn handshakes() -> [(&'static str, u8, HandshakeOptions, Config); 5] {
    let plain = HandshakeOptions {
        structured: false,
        extended: false,
        allocation: false,
        ..HandshakeOptions::new("disk")
    };
    let tls = Config { tls: TlsMode::Optional, ..Config::default() };
    [
        ("plain", 8 | 16 | 32, plain, Config::default()),
        (
            "structured",
            16,
            HandshakeOptions { extended: false, ..HandshakeOptions::new("disk") },
            Config::default(),
        ),
        ("extended", 0, HandshakeOptions::new("disk"), Config::default()),
        ("tls", 1, HandshakeOptions { tls: TlsPolicy::IfOffered, ..HandshakeOptions::new("disk") }, tls),
        (
            "list",
            4,
            HandshakeOptions { goal: Goal::List, ..HandshakeOptions::new("disk") },
            Config::default(),
        ),
    ]
}

/// Runs a handshake to its end: bytes sent by the client, bytes sent by the server, and the negotiated style,
/// if any.
fn negotiate(request: HandshakeOptions, config: Config) -> (Vec<u8>, Vec<u8>, Option<Style>) {
    let (mut client, mut server) = (client::Handshake::new(request), server::Handshake::new(config));
    let (mut sent, mut answered) = (Vec::new(), Vec::new());
    loop {
        let to_client = std::mem::take(server.output());
        answered.extend_from_slice(&to_client);
        client.input(&to_client);
        let to_server = std::mem::take(client.output());
        sent.extend_from_slice(&to_server);
        let mut rest = &to_server[..];
        while !rest.is_empty() {
            let taken = server.input(rest, &catalogue());
            rest = &rest[taken..];
        }
        if client.poll() == client::Step::StartTls {
            client.tls_started();
            server.tls_started();
        } else if to_client.is_empty() && to_server.is_empty() {
            let style = match client.poll() {
                client::Step::Ready(session) => Some(session.style),
                _ => None,
            };
            return (sent, answered, style);
        }
    }
}

/// Returns one request of each kind, with its payload.
fn requests(style: Style) -> Vec<u8> {
    let extended = style == Style::Extended;
    let all = [
        Request::new(Command::Read, 1, 4096, 8192).with_flags(CommandFlags::DF),
        Request::write(2, 0, 512).with_flags(CommandFlags::FUA),
        Request::new(Command::Flush, 3, 0, 0),
        Request::new(Command::Trim, 4, 0, 4096),
        Request::new(Command::Cache, 5, 0, 4096),
        Request::new(Command::WriteZeroes, 6, 0, 4096).with_flags(CommandFlags::NO_HOLE),
        Request::new(Command::BlockStatus, 7, 0, 1 << 20).with_flags(CommandFlags::REQ_ONE),
        Request::new(Command::Other(99), 8, 0, 0),
        Request::new(Command::Disc, 9, 0, 0),
    ];
    let mut bytes = Vec::new();
    let mut put = |request: &Request, payload: &[u8]| {
        let mut header = [0; 32];
        let len = request.put(&mut header, extended);
        bytes.extend_from_slice(&header[..len]);
        bytes.extend_from_slice(payload);
    };
    let (last, before) = all.split_last().expect("there are some");
    for request in before {
        put(request, &vec![0x5a; request.payload_len as usize]);
    }
    if extended {
        let query = Request { payload_len: 12, len: 12, ..Request::new(Command::BlockStatus, 10, 0, 0) };
        let payload = [&4096u64.to_be_bytes()[..], &1u32.to_be_bytes()].concat();
        put(&query, &payload);
    }
    put(last, &[]);
    bytes
}

/// Returns one reply of each kind; the cookie selects the request that the target checks it against.
fn replies(style: Style) -> Vec<u8> {
    let read = Request::new(Command::Read, 0, 0, 4096);
    let (query, write) = (Request::new(Command::BlockStatus, 1, 0, 1 << 20), Request::write(2, 0, 4096));
    let mut bytes = Vec::new();
    let mut put = |encode: &dyn Fn(&mut [u8]) -> usize| {
        let mut out = [0; 256];
        let len = encode(&mut out);
        bytes.extend_from_slice(&out[..len]);
    };
    put(&|out| style.put_end(out, &write, None));
    put(&|out| style.put_end(out, &write, Some(NbdError::NoSpace)));
    if style == Style::Simple {
        put(&|out| style.put_end(out, &read, None));
        return bytes;
    }
    put(&|out| style.put_hole(out, &read, 0, 2048, false));
    put(&|out| style.put_error(out, &read, NbdError::Io, "no", Some(2048), false));
    put(&|out| style.put_data_header(out, &read, 2048, 16, true) + 16);
    put(&|out| {
        let info = &catalogue()[0].info;
        let session = Session {
            export: ExportId(0),
            name: String::new(),
            size: info.size,
            flags: info.transmission_flags(style, true),
            style,
            block_sizes: info.block_sizes,
            block_sizes_agreed: true,
            base_allocation: Some(1),
            tls: false,
        };
        let extents = [true, false].map(|hole| Extent { len: Bytes(4096), hole, zero: hole });
        let status = StatusQuery::new(1, &query, query.len);
        put_block_status(out, &session, &query, &status, extents).expect("there are extents")
    });
    bytes
}
