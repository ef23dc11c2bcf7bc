//! Tests our client against our server, in memory: every combination of options, in chunks of every size,
//! and then some requests in the negotiated style.

use block::{Bytes, Extent};
use blockyard_proto::nbd::client::{
    self, Goal, HandshakeOptions, Progress, Reply, TlsPolicy, Track, parse_reply,
};
use blockyard_proto::nbd::extents::put_block_status;
use blockyard_proto::nbd::fuzzing::catalogue;
use blockyard_proto::nbd::server::{self, Accepted, Catalogue, Config, Refused, TlsMode, check};
use blockyard_proto::nbd::{Command, CommandFlags, NbdError, Request, Session, Style, request};

/// Results of a handshake.
struct Outcome {
    client: client::Step,
    server: server::Step,
    /// Bytes sent by the client, for byte-exact comparison.
    sent: Vec<u8>,
    /// Bytes sent by the server.
    answered: Vec<u8>,
}

/// Passes bytes between client and server, `piece` at a time, until both have ended.
fn negotiate(
    requested: HandshakeOptions,
    config: Config,
    catalogue: &dyn Catalogue,
    piece: usize,
) -> Outcome {
    let mut client = client::Handshake::new(requested);
    let mut server = server::Handshake::new(config);
    let (mut to_server, mut to_client) = (Vec::new(), Vec::new());
    let (mut sent, mut answered) = (Vec::new(), Vec::new());
    for _ in 0..100_000 {
        sent.extend_from_slice(client.output());
        answered.extend_from_slice(server.output());
        to_server.append(client.output());
        to_client.append(server.output());
        let taken = server.input(&to_server[..to_server.len().min(piece)], catalogue);
        to_server.drain(..taken);
        let taken = client.input(&to_client[..to_client.len().min(piece)]);
        to_client.drain(..taken);
        if client.poll() == client::Step::StartTls && server.poll() == server::Step::StartTls {
            assert!(to_server.is_empty() && to_client.is_empty(), "nothing is in flight across an upgrade");
            client.tls_started();
            server.tls_started();
        }
        // A client that has ended does not wait for the reply to its ABORT.
        let closed = matches!(server.poll(), server::Step::Closed(_));
        let idle = to_server.is_empty() && (to_client.is_empty() || closed);
        let ended = !matches!(client.poll(), client::Step::NeedInput | client::Step::StartTls);
        if ended && idle && client.output().is_empty() && server.output().is_empty() {
            return Outcome { client: client.poll(), server: server.poll(), sent, answered };
        }
    }
    panic!("it never ends: client {:?}, server {:?}", client.poll(), server.poll());
}

fn bools() -> [bool; 2] {
    [false, true]
}

#[test]
fn every_combination_negotiates_the_best_common_options() {
    let mut combinations = 0;
    for tls in [TlsPolicy::Never, TlsPolicy::IfOffered, TlsPolicy::Always] {
        for mode in [TlsMode::Off, TlsMode::Optional, TlsMode::Required] {
            for bits in 0..32u8 {
                let bit = |at: u8| bits >> at & 1 != 0;
                let requested = HandshakeOptions {
                    tls,
                    structured: bit(0),
                    extended: bit(1),
                    allocation: bit(2),
                    ..HandshakeOptions::new("disk")
                };
                let config = Config { tls: mode, list: true, structured: bit(3), extended: bit(4) };
                for piece in [1, 7, usize::MAX] {
                    agree(&requested, config, piece);
                    combinations += 1;
                }
            }
        }
    }
    assert_eq!(combinations, 9 * 32 * 3);
}

/// Checks one combination: client and server negotiate what the protocol document specifies.
fn agree(requested: &HandshakeOptions, config: Config, piece: usize) {
    let encrypted = requested.tls != TlsPolicy::Never && config.tls != TlsMode::Off;
    let impossible = [(TlsPolicy::Always, TlsMode::Off), (TlsPolicy::Never, TlsMode::Required)];
    let possible = !impossible.contains(&(requested.tls, config.tls));
    let outcome = negotiate(requested.clone(), config, &catalogue(), piece);
    if !possible {
        assert!(matches!(outcome.client, client::Step::Failed(_)), "{requested:?} {config:?}");
        assert!(matches!(outcome.server, server::Step::Closed(server::Closed::Aborted)));
        return;
    }
    let (client::Step::Ready(client), server::Step::Ready(server)) = (&outcome.client, &outcome.server)
    else {
        panic!("{requested:?} {config:?} became {:?} and {:?}", outcome.client, outcome.server);
    };
    let style = if requested.extended && config.extended {
        Style::Extended
    } else if requested.structured && config.structured {
        Style::Structured
    } else {
        Style::Simple
    };
    assert_eq!((client.style, client.tls), (style, encrypted), "{requested:?} {config:?}");
    assert_eq!(client.base_allocation.is_some(), requested.allocation && style != Style::Simple);
    assert_eq!((client.size, client.block_sizes.minimum), (1 << 30, 512));
    assert!(client.block_sizes.is_valid(client.size) && client.block_sizes_agreed);
    // Client and server have equal sessions.
    assert_eq!(client, server);
}

#[test]
fn the_client_receives_the_servers_list() {
    for piece in [1, 5, usize::MAX] {
        let requested = HandshakeOptions { goal: Goal::List, ..HandshakeOptions::new("") };
        let outcome = negotiate(requested, Config::default(), &catalogue(), piece);
        let client::Step::Listed(listed) = outcome.client else { panic!("{:?}", outcome.client) };
        let listed: Vec<_> = listed.iter().map(|l| (l.name.as_str(), l.description.as_str())).collect();
        assert_eq!(listed, [("disk", "a disk"), ("rom", "")]);
        assert_eq!(outcome.server, server::Step::Closed(server::Closed::Aborted));
    }
}

#[test]
fn an_unknown_export_is_reported_to_the_client() {
    for bits in bools() {
        let requested =
            HandshakeOptions { extended: bits, structured: bits, ..HandshakeOptions::new("nothing") };
        let outcome = negotiate(requested, Config::default(), &catalogue(), 3);
        let client::Step::Failed(failure) = outcome.client else { panic!("{:?}", outcome.client) };
        assert!(failure.to_string().contains("no export of that name"), "{failure}");
    }
}

/// Parses a hex dump with any white space.
fn hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn the_minimal_negotiation_matches_the_document_byte_for_byte() {
    let requested = HandshakeOptions {
        structured: false,
        extended: false,
        allocation: false,
        ..HandshakeOptions::new("rom")
    };
    let outcome = negotiate(requested, Config::default(), &catalogue(), usize::MAX);
    let sent = "00000003
        49484156454f5054 00000007 0000000b 00000003 726f6d 0001 0003";
    assert_eq!(outcome.sent, hex(sent));
    // Flags 0x050f: has flags, read only, flush, FUA, multi conn, cache.
    let answered = "4e42444d41474943 49484156454f5054 0003
        0003e889045565a9 00000007 00000003 0000000c 0000 0000000000100000 050f
        0003e889045565a9 00000007 00000003 0000000e 0003 00000001 00001000 ffffffff
        0003e889045565a9 00000007 00000001 00000000";
    assert_eq!(outcome.answered, hex(answered));
}

#[test]
fn the_full_negotiation_matches_the_document_byte_for_byte() {
    let outcome = negotiate(HandshakeOptions::new("disk"), Config::default(), &catalogue(), usize::MAX);
    let sent = "00000003
        49484156454f5054 0000000b 00000000
        49484156454f5054 0000000a 0000001f 00000004 6469736b 00000001 0000000f 626173653a616c6c6f636174696f6e
        49484156454f5054 00000007 0000000c 00000004 6469736b 0001 0003";
    assert_eq!(outcome.sent, hex(sent));
    // Flags 0x1ded: everything but read only, rotational and resize.
    let answered = "4e42444d41474943 49484156454f5054 0003
        0003e889045565a9 0000000b 00000001 00000000
        0003e889045565a9 0000000a 00000004 00000013 00000001 626173653a616c6c6f636174696f6e
        0003e889045565a9 0000000a 00000001 00000000
        0003e889045565a9 00000007 00000003 0000000c 0000 0000000040000000 1ded
        0003e889045565a9 00000007 00000003 0000000e 0003 00000200 00001000 02000000
        0003e889045565a9 00000007 00000001 00000000";
    assert_eq!(outcome.answered, hex(answered));
}

/// A server of a disk with a hole of one block between data.
fn serve(session: &Session, request: &Request) -> Vec<u8> {
    let mut out = vec![0; 256];
    let taken = match check(session, request) {
        Ok(Accepted::Submit(order)) if order.op == block::Op::Read => {
            let len = order.len.0 as usize;
            let taken = session.style.put_data_header(&mut out, request, request.offset, len as u32, true);
            out.truncate(taken);
            out.extend(std::iter::repeat_n(0x5a, len));
            return out;
        }
        Ok(Accepted::Status(query)) => {
            let extent = |len, hole| Extent { len: Bytes(len), hole, zero: hole };
            let extents = [extent(512, false), extent(512, true), extent(1 << 20, false)];
            put_block_status(&mut out, session, request, &query, extents).unwrap()
        }
        Ok(_) => session.style.put_end(&mut out, request, None),
        Err(Refused::Reply(error)) => session.style.put_end(&mut out, request, Some(error)),
        Err(Refused::Drop(why)) => panic!("{why}"),
    };
    out.truncate(taken);
    out
}

/// Sends a request and parses its reply: the data, or the error.
fn exchange(session: &Session, request: &Request) -> Result<Vec<u8>, NbdError> {
    let mut header = [0; 32];
    let len = request.put(&mut header, session.extended());
    let (parsed, taken) = request::parse(&header[..len], session.extended()).unwrap().unwrap();
    assert_eq!((taken, parsed.payload_len), (len, request.payload_len));

    let reply = serve(session, &parsed);
    let (message, taken) = parse_reply(&reply, session.style).unwrap().unwrap();
    assert_eq!(message.cookie(), request.cookie);
    if let Reply::Status { descriptors, .. } = message {
        let pairs = descriptors.map(|d| [d.len as u8, (d.len >> 8) as u8, d.state as u8]);
        return Ok(pairs.flatten().collect());
    }
    let mut track = Track::new(*request, session.style, session.base_allocation);
    match track.accept(&message).unwrap() {
        Progress::Ended(None) => Ok(reply[taken..].to_vec()),
        Progress::Ended(Some(error)) => Err(error),
        Progress::More => panic!("one message is all that is sent"),
    }
}

#[test]
fn requests_and_replies_match_in_every_style() {
    for (extended, structured) in [(false, false), (false, true), (true, true)] {
        let requested = HandshakeOptions { extended, structured, ..HandshakeOptions::new("disk") };
        let outcome = negotiate(requested, Config::default(), &catalogue(), 11);
        let client::Step::Ready(session) = outcome.client else { panic!("{:?}", outcome.client) };
        let size = session.size;

        let read = Request::new(Command::Read, 1, 4096, 512);
        assert_eq!(exchange(&session, &read), Ok(vec![0x5a; 512]));
        let write = Request::write(2, 4096, 512).with_flags(CommandFlags::FUA);
        assert_eq!(exchange(&session, &write), Ok(vec![]));
        assert_eq!(exchange(&session, &Request::new(Command::Flush, 3, 0, 0)), Ok(vec![]));
        assert_eq!(exchange(&session, &Request::write(4, size, 512)), Err(NbdError::NoSpace));
        assert_eq!(exchange(&session, &Request::new(Command::Read, 5, size, 512)), Err(NbdError::Invalid));
        let trim = Request::new(Command::Trim, 6, 0, size);
        assert_eq!(exchange(&session, &trim), Ok(vec![]));

        let query = Request::new(Command::BlockStatus, 7, 0, 2048);
        let status = exchange(&session, &query);
        if structured {
            assert_eq!(status, Ok(vec![0, 2, 0, 0, 2, 3, 0, 0, 0]));
        } else {
            assert_eq!(status, Err(NbdError::Invalid));
        }
    }
}
