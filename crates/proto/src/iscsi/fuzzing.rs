//! Bodies of the fuzz targets: no input may panic, unless it reveals a bug.
//!
//! Besides the absence of panics each checks that no more bytes are consumed than were given, that memory
//! stays bounded, and that our parsers accept what our encoders write. The targets under `fuzz/` only call
//! these functions; `tests/corpus.rs` replays the corpora.
//!
//! The input of the state machines starts with two bytes: the settings, and the size of the chunks in which
//! the rest is fed.

use super::chap::NONCE_LEN;
use super::discovery::{Record, SendTargets, put_record, records};
use super::exchange::{Exchange, MAX_ANSWER};
use super::initiator::{self, Options, Stages};
use super::login::{
    Admission, Authentication, Chap, Credentials, Directory, Existing, LoginDone, Policy, Secret,
    SessionType, Status, Step, Target,
};
use super::parameters::{ConnectionParameters, DigestOffer, Offer};
use super::pdu::{self, Ahs, BHS_LEN, Bhs, Header, Isid, RESERVED_TAG, Request, Response};
use super::sequence::{Arrival, CommandWindow};
use super::stream::Receiver;
use super::text;
use super::transfer::WritePlan;

const INITIATOR: &str = "iqn.1993-08.org.debian:01:abc";
const TARGET: &str = "iqn.2026-11.io.blockyard:disk";

/// A portal with one target, whose policy is decoded from a settings byte.
#[derive(Debug)]
pub struct Portal(pub u8);

impl Portal {
    fn credentials(name: &str) -> Credentials {
        Credentials { name: name.to_owned(), secret: Secret::new(format!("secret of {name}")) }
    }

    fn chap() -> Chap {
        Chap { initiator: Portal::credentials("user"), target: Some(Portal::credentials("target")) }
    }
}

impl Directory for Portal {
    fn admit(&self, admission: &Admission<'_>) -> Result<Policy, Status> {
        match admission.session {
            SessionType::Normal { target } if target != TARGET => return Err(Status::NotFound),
            _ => {}
        }
        let authentication = match self.0 & 3 {
            0 => Authentication::Open,
            1 => Authentication::Optional(Portal::chap()),
            2 => Authentication::Required(Portal::chap()),
            _ => Authentication::Impossible,
        };
        let header_digest = if self.0 & 4 == 0 { DigestOffer::Crc32cOrNone } else { DigestOffer::Crc32c };
        let offer = Offer { header_digest, max_connections: 4, initial_r2t: false, ..Offer::default() };
        Ok(Policy { portal_group_tag: 1, authentication, offer, window: 64 })
    }

    fn session(&self, _: &str, _: Isid, _: &str, _: u16) -> Option<Existing> {
        let session = Existing { tsih: 1, cids: vec![0], max_connections: 2, exp_cmd_sn: 7, max_cmd_sn: 70 };
        (self.0 & 8 != 0).then_some(session)
    }

    fn new_tsih(&self) -> u16 {
        2
    }
}

/// Splits the input into settings, chunk size, and stream.
fn split(data: &[u8]) -> Option<(u8, usize, &[u8])> {
    let (&[settings, piece], stream) = data.split_first_chunk()?;
    Some((settings, usize::from(piece) + 1, stream))
}

/// Parses headers in both directions, 48 bytes each, and the rest as additional headers. Valid headers must
/// survive re-encoding. Requests go through the command window, and writes through their plan.
pub fn headers(data: &[u8]) {
    let mut window = CommandWindow::new(0, 8);
    let mut plan = None;
    let (headers, rest) = data.as_chunks::<BHS_LEN>();
    for bhs in headers {
        if let Ok(header) = pdu::parse(bhs) {
            let mut again: Bhs = [0; BHS_LEN];
            header.encode(&mut again);
            assert_eq!(pdu::parse(&again), Ok(header), "requests survive encoding");
            follow(&header, &mut window, &mut plan);
        }
        if let Ok(header) = pdu::parse_response(bhs) {
            let mut again: Bhs = [0; BHS_LEN];
            header.encode(&mut again);
            assert!(pdu::parse_response(&again).is_ok(), "responses survive encoding");
        }
    }
    let _ = Ahs::parse(rest);
}

/// Passes a request to the command window and to the plan of a write.
fn follow(header: &Header<Request>, window: &mut CommandWindow, plan: &mut Option<WritePlan>) {
    let before = window.max().wrapping_sub(window.expected());
    if let (Some(cmd_sn), false) = (header.pdu.cmd_sn(), header.immediate)
        && window.receive(cmd_sn) == Arrival::InOrder
    {
        while window.take_held().is_some() {}
        assert!(window.max().wrapping_sub(window.expected()) < before.max(8), "the window narrows");
        window.complete();
    }
    match header.pdu {
        Request::ScsiCommand(command) if command.write => {
            let rules = super::Parameters { initial_r2t: false, ..Default::default() }.write_rules();
            let wanted = command.expected_len / 2;
            let begun =
                WritePlan::begin(&rules, command.expected_len, wanted, header.data_len, command.is_final);
            *plan = begun.ok().map(|(plan, _)| plan);
        }
        Request::DataOut(data) => {
            if let Some(plan) = plan {
                while plan.next_r2t(1).is_some() {}
                if let Ok(placement) = plan.data_out(&data, header.data_len) {
                    assert_eq!(placement.keep + placement.discard, header.data_len);
                }
            }
        }
        _ => {}
    }
}

/// Feeds an initiator's bytes to a target: the login, then text requests.
pub fn login(data: &[u8]) {
    let Some((settings, piece, mut stream)) = split(data) else { return };
    let portal = Portal(settings);
    let mut target = Target::new(std::array::from_fn(|index| index as u8));
    loop {
        assert!(target.output().len() <= BHS_LEN + 8192, "a response fits in a login PDU");
        target.output().clear();
        match target.poll() {
            Step::NeedInput if stream.is_empty() => return,
            Step::NeedInput => {
                let fed = &stream[..stream.len().min(piece)];
                let taken = target.input(fed, &portal);
                assert!(taken <= fed.len() && taken > 0, "a login that waits for input takes it");
                stream = &stream[taken..];
            }
            Step::Ready(done) => {
                assert_ne!(settings & 3, 3, "nobody gets in without being able to authenticate");
                assert!(settings & 3 != 2 || done.user.is_some(), "authentication is required");
                assert!(settings & 4 == 0 || done.connection.header_digest, "a digest is required");
                return texts(&done, stream);
            }
            Step::Closed(status) => return assert_ne!(status, Status::Success),
        }
    }
}

/// Answers text requests of a connection until the bytes end.
fn texts(done: &LoginDone, mut stream: &[u8]) {
    let mut connection = done.connection;
    // A fuzzer cannot guess digests, so they are off.
    let mut receiver = Receiver::new(connection.max_receive_segment);
    let mut exchange = Exchange::new(connection.send_segment_limit);
    while !stream.is_empty() {
        let Ok(taken) = receiver.input(stream) else { return };
        stream = &stream[taken..];
        let Ok(Some(frame)) = receiver.frame() else { return };
        let Ok(Header { pdu: Request::Text(request), .. }) = pdu::parse(frame.bhs) else { continue };
        let reply = exchange.request(&request, frame.data, &mut connection.max_send_segment, &|value| {
            answer(&SendTargets::parse(std::str::from_utf8(value).ok()?, &done.session)?)
        });
        if let Ok(reply) = reply {
            assert!(reply.text.len() <= connection.max_send_segment as usize);
            assert_eq!(reply.ttt == RESERVED_TAG, reply.is_final);
        }
    }
}

/// Returns the text of one target's record, once or many times.
fn answer(wanted: &SendTargets) -> Option<Vec<u8>> {
    let portals = vec![(([192, 0, 2, 1], 3260).into(), 1)];
    let record = Record { target: TARGET.to_owned(), portals };
    let count = match wanted {
        SendTargets::All => 50,
        SendTargets::One(name) => usize::from(*name == record.target),
    };
    let mut out = Vec::new();
    (0..count).for_each(|_| put_record(&mut out, &record));
    Some(out)
}

/// Decodes the initiator's options from a settings byte, the one that the fuzz inputs carry.
pub fn options(settings: u8) -> Options {
    let target = (settings & 1 == 0).then_some(TARGET);
    Options {
        stages: match settings >> 1 & 3 {
            0 | 3 => Stages::Both,
            1 => Stages::Operational,
            _ => Stages::Security,
        },
        credentials: (settings & 8 != 0).then(|| Portal::credentials("user")),
        target_credentials: (settings & 16 != 0).then(|| Portal::credentials("target")),
        ..Options::new(INITIATOR, target)
    }
}

/// Feeds a target's bytes to an initiator: the login, then any responses.
pub fn initiator(data: &[u8]) {
    let Some((settings, piece, mut stream)) = split(data) else { return };
    let mut login = initiator::Login::new(options(settings), [7; NONCE_LEN]);
    loop {
        assert!(login.output().len() <= 2 * (BHS_LEN + 8192), "output is bounded");
        login.output().clear();
        match login.poll() {
            initiator::Step::NeedInput if stream.is_empty() => return,
            initiator::Step::NeedInput => {
                let fed = &stream[..stream.len().min(piece)];
                let taken = login.input(fed);
                assert!(taken <= fed.len() && taken > 0, "a login that waits for input takes it");
                stream = &stream[taken..];
            }
            initiator::Step::Ready(done) => return responses(&done.connection, done.numbers, stream),
            initiator::Step::Failed(_) => return,
        }
    }
}

/// Follows a target's PDUs until the bytes end.
fn responses(connection: &ConnectionParameters, mut numbers: initiator::CommandNumbers, mut stream: &[u8]) {
    let mut receiver = Receiver::new(connection.max_receive_segment.min(MAX_ANSWER as u32));
    while !stream.is_empty() {
        let Ok(taken) = receiver.input(stream) else { return };
        stream = &stream[taken..];
        let Ok(Some(frame)) = receiver.frame() else { return };
        let Ok(header) = pdu::parse_response(frame.bhs) else { return };
        numbers.received(&header.pdu);
        numbers.take();
        if let (Response::Text(_), Ok(pairs)) = (header.pdu, text::pairs(frame.data)) {
            records(&pairs);
        }
    }
}
