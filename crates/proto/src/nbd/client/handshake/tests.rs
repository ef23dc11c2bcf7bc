use super::*;
use crate::nbd::wire::{info, rep};

fn greeting(flags: u16) -> Vec<u8> {
    [&b"NBDMAGICIHAVEOPT"[..], &flags.to_be_bytes()].concat()
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = wire::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn plain(export: &str) -> HandshakeOptions {
    HandshakeOptions {
        structured: false,
        extended: false,
        allocation: false,
        ..HandshakeOptions::new(export)
    }
}

/// Feeds the server's bytes and returns the options that the client sent.
fn options(handshake: &mut Handshake, bytes: &[u8]) -> Vec<u32> {
    let mut sent = Vec::new();
    let mut rest = bytes;
    loop {
        let output = std::mem::take(handshake.output());
        // The client's flags precede its first option.
        let flags = if output.is_empty() || output.starts_with(b"IHAVEOPT") { 0 } else { 4 };
        let mut options = &output[flags..];
        while !options.is_empty() {
            assert!(options.starts_with(b"IHAVEOPT"), "{options:x?}");
            sent.push(wire::u32_at(options, 8).unwrap());
            options = &options[16 + wire::u32_at(options, 12).unwrap() as usize..];
        }
        let taken = handshake.input(rest);
        rest = &rest[taken..];
        if taken == 0 && handshake.output().is_empty() {
            return sent;
        }
    }
}

fn export_info(size: u64) -> Vec<u8> {
    [&info::EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &1u16.to_be_bytes()].concat()
}

fn block_sizes(minimum: u32, preferred: u32, maximum: u32) -> Vec<u8> {
    let sizes = [minimum.to_be_bytes(), preferred.to_be_bytes(), maximum.to_be_bytes()].concat();
    [&info::BLOCK_SIZE.to_be_bytes()[..], &sizes].concat()
}

fn failure(requested: HandshakeOptions, server: &[u8]) -> Failure {
    let mut handshake = Handshake::new(requested);
    options(&mut handshake, server);
    match handshake.poll() {
        Step::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn peers_that_are_no_newstyle_server_are_refused() {
    assert!(matches!(failure(plain("x"), b"SSH-2.0-OpenSSH_9.2\r\n"), Failure::NotNbd(_)));
    let oldstyle = [&b"NBDMAGIC"[..], &wire::OLDSTYLE_MAGIC.to_be_bytes(), &[0; 2]].concat();
    assert_eq!(failure(plain("x"), &oldstyle), Failure::Oldstyle);
    assert!(matches!(failure(plain("x"), b"NBDMAGICwhatever__"), Failure::NotNbd(_)));
}

#[test]
fn without_fixed_newstyle_only_export_name_is_sent() {
    let mut handshake = Handshake::new(HandshakeOptions::new("x"));
    let mut bytes = greeting(0);
    bytes.extend([&5u64.to_be_bytes()[..], &3u16.to_be_bytes(), &[0; 124]].concat());
    assert_eq!(options(&mut handshake, &bytes), [option::EXPORT_NAME]);
    let Step::Ready(session) = handshake.poll() else { panic!("{:?}", handshake.poll()) };
    assert_eq!((session.size, session.flags.bits(), session.style), (5, 3, Style::Simple));
    assert_eq!(session.block_sizes.maximum, wire::PORTABLE_PAYLOAD);
}

#[test]
fn no_zeroes_is_honoured() {
    let mut handshake = Handshake::new(plain("x"));
    let mut bytes = greeting(2);
    bytes.extend([&5u64.to_be_bytes()[..], &3u16.to_be_bytes()].concat());
    options(&mut handshake, &bytes);
    assert!(matches!(handshake.poll(), Step::Ready(_)));
}

#[test]
fn export_name_is_the_fallback_for_go() {
    let mut handshake = Handshake::new(plain("x"));
    let bytes = [greeting(3), reply(option::GO, rep::ERR_UNSUP, b"")].concat();
    assert_eq!(options(&mut handshake, &bytes), [option::GO, option::EXPORT_NAME]);
}

#[test]
fn after_extended_headers_export_name_is_no_fallback() {
    let bytes =
        [greeting(3), reply(option::EXTENDED_HEADERS, rep::ACK, b""), reply(option::GO, rep::ERR_UNSUP, b"")]
            .concat();
    let requested = HandshakeOptions { allocation: false, ..HandshakeOptions::new("x") };
    assert!(matches!(failure(requested, &bytes), Failure::Refused { option: option::GO, .. }));
}

#[test]
fn refused_options_are_left_out() {
    let mut handshake =
        Handshake::new(HandshakeOptions { tls: TlsPolicy::IfOffered, ..HandshakeOptions::new("x") });
    let bytes = [
        greeting(3),
        reply(option::STARTTLS, rep::ERR_POLICY, b""),
        reply(option::EXTENDED_HEADERS, rep::ERR_UNSUP, b""),
        reply(option::STRUCTURED_REPLY, rep::ACK, b""),
        reply(option::SET_META_CONTEXT, rep::META_CONTEXT, b"\0\0\0\x09base:allocation"),
        // An error voids the contexts received before it.
        reply(option::SET_META_CONTEXT, rep::ERR_TOO_BIG, b""),
        reply(option::GO, rep::INFO, &block_sizes(512, 4096, 1 << 20)),
        reply(option::GO, rep::INFO, &[0, 77, 1, 2, 3]),
        reply(option::GO, rep::INFO, &export_info(1 << 30)),
        reply(option::GO, rep::ACK, b""),
    ]
    .concat();
    let sent = options(&mut handshake, &bytes);
    let wanted = [option::STARTTLS, option::EXTENDED_HEADERS, option::STRUCTURED_REPLY];
    assert_eq!(sent, [&wanted[..], &[option::SET_META_CONTEXT, option::GO]].concat());
    let Step::Ready(session) = handshake.poll() else { panic!("{:?}", handshake.poll()) };
    assert_eq!((session.style, session.base_allocation, session.tls), (Style::Structured, None, false));
    assert!(session.block_sizes_agreed && session.block_sizes.minimum == 512);
}

#[test]
fn the_handshake_fails_without_required_tls() {
    let requested = HandshakeOptions { tls: TlsPolicy::Always, ..plain("x") };
    let refused = [greeting(3), reply(option::STARTTLS, rep::ERR_UNSUP, b"never")].concat();
    assert_eq!(failure(requested.clone(), &refused), Failure::NoTls("never".into()));
    assert!(matches!(failure(requested, &greeting(0)), Failure::NoTls(_)));
}

#[test]
fn a_client_that_gives_up_sends_abort() {
    let mut handshake = Handshake::new(plain("x"));
    let bytes = [greeting(3), reply(option::GO, rep::ERR_UNKNOWN, b"no such thing")].concat();
    assert_eq!(options(&mut handshake, &bytes), [option::GO, option::ABORT]);
    let why = "no such thing".to_owned();
    let refused = Failure::Refused { option: option::GO, kind: rep::ERR_UNKNOWN, why };
    assert_eq!(handshake.poll(), Step::Failed(refused));
}

#[test]
fn a_list_ends_the_session() {
    let mut handshake = Handshake::new(HandshakeOptions { goal: Goal::List, ..HandshakeOptions::new("") });
    let bytes = [
        greeting(3),
        reply(option::LIST, rep::SERVER, b"\0\0\0\x01adescribed"),
        reply(option::LIST, rep::SERVER, b"\0\0\0\0"),
        reply(option::LIST, rep::ACK, b""),
    ]
    .concat();
    assert_eq!(options(&mut handshake, &bytes), [option::LIST, option::ABORT]);
    let listed =
        |name: &str, description: &str| Listed { name: name.into(), description: description.into() };
    assert_eq!(handshake.poll(), Step::Listed(vec![listed("a", "described"), listed("", "")]));
}

#[test]
fn protocol_violations_end_the_handshake() {
    let go = |replies: &[Vec<u8>]| [&greeting(3)[..], &replies.concat()].concat();
    let info = |data: &[u8]| reply(option::GO, rep::INFO, data);
    let ack = reply(option::GO, rep::ACK, b"");
    let mut long = reply(option::GO, rep::INFO, &[]);
    long[16..20].copy_from_slice(&(MAX_REPLY_BYTES + 1).to_be_bytes());
    for (what, server) in [
        ("no magic", go(&[vec![0; 20]])),
        ("another option", go(&[reply(option::LIST, rep::ACK, b"")])),
        ("a type of another option", go(&[reply(option::GO, rep::SERVER, b"")])),
        ("too long", go(&[long])),
        ("an ACK with data", go(&[reply(option::GO, rep::ACK, b"x")])),
        ("no export information", go(std::slice::from_ref(&ack))),
        ("an information without type", go(&[info(b"x"), ack.clone()])),
        ("a short export information", go(&[info(&export_info(1)[..11]), ack.clone()])),
        ("long block sizes", go(&[info(&[block_sizes(1, 512, 512), vec![0]].concat()), ack.clone()])),
        ("wrong block sizes", go(&[info(&block_sizes(3, 512, 512)), info(&export_info(9)), ack.clone()])),
        (
            "wrong block sizes before the size",
            go(&[info(&export_info(9)), info(&block_sizes(3, 512, 512)), ack]),
        ),
    ] {
        assert!(matches!(failure(plain("x"), &server), Failure::Broken(_)), "{what}");
    }
    let list = [greeting(3), reply(option::LIST, rep::SERVER, b"\0\0\0\x05abc")].concat();
    let requested = HandshakeOptions { goal: Goal::List, ..plain("") };
    assert!(matches!(failure(requested, &list), Failure::Broken(_)));
}
