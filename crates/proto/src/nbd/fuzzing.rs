//! Bodies of the fuzz targets: no input may panic, unless it reveals a bug.
//!
//! Besides the absence of panics each checks that no more bytes are consumed than were given, that memory
//! stays bounded, and that our parsers accept what our encoders write. The targets under `fuzz/` only call
//! these functions; `tests/corpus.rs` replays the corpora.
//!
//! The input of the state machines starts with two bytes: the settings, and the size of the chunks in which
//! the rest is fed.

use block::{Bytes, Extent};

use super::client::{self, Goal, HandshakeOptions, TlsPolicy, Track};
use super::export::{BlockSizes, ExportId, ExportInfo, Session};
use super::extents::put_block_status;
use super::reply::{MAX_FIXED, Style};
use super::request::{self, Request};
use super::server::{self, Accepted, Found, Refused, TlsMode};
use super::uri::Uri;

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

/// Returns the catalogue for handshakes: two exports that differ in all relevant properties.
pub fn catalogue() -> Vec<Found> {
    let disk = ExportInfo {
        description: "a disk".to_owned(),
        block_sizes: BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 25 },
        ..ExportInfo::new(1 << 30)
    };
    let rom = ExportInfo { read_only: true, ..ExportInfo::new(1 << 20) };
    vec![
        Found { id: ExportId(0), name: "disk".to_owned(), info: disk },
        Found { id: ExportId(1), name: "rom".to_owned(), info: rom },
    ]
}

/// Decodes a server's configuration from a settings byte.
fn config(bits: u8) -> server::Config {
    let tls = match bits & 3 {
        0 => TlsMode::Off,
        1 => TlsMode::Optional,
        _ => TlsMode::Required,
    };
    server::Config { tls, list: bits & 4 == 0, structured: bits & 8 == 0, extended: bits & 16 == 0 }
}

/// Decodes a client's request from a settings byte.
fn requested(bits: u8) -> HandshakeOptions {
    let tls = match bits & 3 {
        0 => TlsPolicy::Never,
        1 => TlsPolicy::IfOffered,
        _ => TlsPolicy::Always,
    };
    HandshakeOptions {
        export: "disk".to_owned(),
        goal: if bits & 4 == 0 { Goal::Go } else { Goal::List },
        tls,
        structured: bits & 8 == 0,
        extended: bits & 16 == 0,
        allocation: bits & 32 == 0,
    }
}

/// Splits the input into settings, chunk size, and stream.
fn split(data: &[u8]) -> Option<(u8, usize, &[u8])> {
    let (&[settings, piece], stream) = data.split_first_chunk()?;
    Some((settings, usize::from(piece) + 1, stream))
}

/// Feeds a client's bytes to a server: the handshake, then requests.
pub fn server_handshake(data: &[u8]) {
    let Some((settings, piece, mut stream)) = split(data) else { return };
    let catalogue = catalogue();
    let mut handshake = server::Handshake::new(config(settings));
    loop {
        assert!(handshake.output().len() <= 1 << 20, "output is bounded");
        handshake.output().clear();
        match handshake.poll() {
            server::Step::NeedInput if stream.is_empty() => return,
            server::Step::NeedInput => {
                let fed = &stream[..stream.len().min(piece)];
                let taken = handshake.input(fed, &catalogue);
                assert!(taken <= fed.len() && taken > 0, "a handshake that waits for input takes it");
                stream = &stream[taken..];
            }
            server::Step::StartTls => handshake.tls_started(),
            server::Step::Ready(session) => return requests(&session, stream),
            server::Step::Closed(_) => return,
        }
    }
}

/// Feeds a client's requests to a server, in the style of the first byte.
pub fn request(data: &[u8]) {
    let Some((&settings, stream)) = data.split_first() else { return };
    let style = STYLES[usize::from(settings & 3) % 3];
    let found = &catalogue()[usize::from(settings >> 2 & 1)];
    let has_context = settings & 8 == 0 && style != Style::Simple;
    requests(
        &Session {
            export: found.id,
            name: found.name.clone(),
            size: found.info.size,
            flags: found.info.transmission_flags(style, has_context),
            style,
            block_sizes: found.info.block_sizes,
            block_sizes_agreed: true,
            base_allocation: has_context.then_some(1),
            tls: false,
        },
        stream,
    );
}

/// Parses requests until the bytes end, and answers each.
fn requests(session: &Session, mut stream: &[u8]) {
    while let Ok(Some((request, taken))) = request::parse(stream, session.extended()) {
        assert_eq!(taken, request::header_len(session.extended()));
        let payload = &stream[taken..];
        let payload_len = usize::try_from(request.payload_len).unwrap_or(usize::MAX);
        let Some((payload, rest)) = payload.split_at_checked(payload_len) else { return };
        stream = rest;
        match server::check(session, &request) {
            Err(Refused::Drop(_)) | Ok(Accepted::Disconnect) => return,
            Ok(accepted) => answer(session, &request, accepted, payload),
            Err(Refused::Reply(error)) => {
                let mut out = [0; MAX_FIXED];
                let len = session.style.put_end(&mut out, &request, Some(error));
                read_back(session, &request, &out[..len]);
            }
        }
    }
}

/// Answers a request as a server would, and parses the answer as a client does.
fn answer(session: &Session, request: &Request, accepted: Accepted, payload: &[u8]) {
    let mut out = [0; 256];
    let query = match accepted {
        Accepted::Submit(order) => {
            assert!(order.offset.0 + order.len.0 <= session.size, "a request lies within the export");
            if order.op == block::Op::Read {
                let len = order.len.0 as u32;
                let taken = session.style.put_data_header(&mut out, request, request.offset, len, true);
                return read_back(session, request, &out[..taken]);
            }
            None
        }
        Accepted::Status(query) => Some(query),
        Accepted::StatusPayload => server::status_query(session, request, payload).ok(),
        Accepted::Empty | Accepted::Disconnect => None,
    };
    let len = match query {
        Some(query) => {
            assert!(query.len > 0 && query.offset + query.len <= session.size);
            let extent = |len, hole| Extent { len: Bytes(len), hole, zero: hole };
            let extents = [extent(query.len.div_ceil(2), true), extent(u64::from(u32::MAX), false)];
            put_block_status(&mut out, session, request, &query, extents).expect("there are extents")
        }
        None if accepted == Accepted::StatusPayload => {
            session.style.put_end(&mut out, request, Some(super::NbdError::Invalid))
        }
        None => session.style.put_end(&mut out, request, None),
    };
    read_back(session, request, &out[..len]);
}

/// Checks that our client accepts our server's reply.
fn read_back(session: &Session, request: &Request, bytes: &[u8]) {
    let (reply, taken) = client::parse_reply(bytes, session.style)
        .expect("our replies are well-formed")
        .expect("our replies are whole");
    assert_eq!((taken, reply.cookie()), (bytes.len(), request.cookie));
    let mut track = Track::new(*request, session.style, session.base_allocation);
    track.accept(&reply).expect("our replies fit their requests");
}

/// Feeds a server's bytes to a client: the handshake, then replies.
pub fn client_handshake(data: &[u8]) {
    let Some((settings, piece, mut stream)) = split(data) else { return };
    let mut handshake = client::Handshake::new(requested(settings));
    loop {
        assert!(handshake.output().len() <= 1 << 13, "output is bounded");
        handshake.output().clear();
        match handshake.poll() {
            client::Step::NeedInput if stream.is_empty() => return,
            client::Step::NeedInput => {
                let fed = &stream[..stream.len().min(piece)];
                let taken = handshake.input(fed);
                assert!(taken <= fed.len() && taken > 0, "a handshake that waits for input takes it");
                stream = &stream[taken..];
            }
            client::Step::StartTls => handshake.tls_started(),
            client::Step::Ready(session) => {
                return replies_of(session.style, session.base_allocation, stream);
            }
            client::Step::Listed(_) | client::Step::Failed(_) => return,
        }
    }
}

/// Feeds a server's replies to a client, in the style of the first byte.
pub fn replies(data: &[u8]) {
    let Some((&settings, stream)) = data.split_first() else { return };
    replies_of(STYLES[usize::from(settings) % 3], Some(1), stream);
}

fn replies_of(style: Style, context: Option<u32>, mut stream: &[u8]) {
    use super::request::Command;
    let read = Track::new(Request::new(Command::Read, 0, 0, 4096), style, context);
    let status = Track::new(Request::new(Command::BlockStatus, 0, 0, 1 << 20), style, context);
    let write = Track::new(Request::write(0, 0, 4096), style, context);
    let mut tracks = [read, status, write];
    while let Ok(Some((reply, taken))) = client::parse_reply(stream, style) {
        assert!(taken > 0 && taken <= stream.len());
        let mut data = 0;
        if let client::Reply::Data { len, .. } = reply {
            assert!(len > 0);
            data = usize::try_from(len).unwrap_or(usize::MAX);
        }
        if let client::Reply::Status { descriptors, .. } = reply {
            assert!(descriptors.count() > 0);
        }
        let _ = tracks[(reply.cookie() % 3) as usize].accept(&reply);
        let Some(rest) = stream[taken..].get(data..) else { return };
        stream = rest;
    }
}

/// Parses a URI. A valid one prints as text that parses to an equal URI.
pub fn uri(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(uri) = text.parse::<Uri>() {
        assert_eq!(uri.to_string().parse(), Ok(uri));
    }
}
