//! Logins of our initiator to our target, in memory.

mod authentication;
mod hostile;
mod sessions;

use std::cell::Cell;

use super::super::chap::NONCE_LEN;
use super::super::initiator::{self, Failure, LoggedIn, Options, Stages};
use super::super::keys::Key;
use super::super::parameters::{DigestOffer, Offer};
use super::*;

pub(super) const INITIATOR: &str = "iqn.1993-08.org.debian:01:abc";
pub(super) const TARGET: &str = "iqn.2026-11.io.blockyard:disk";

/// A portal with one target and at most one session.
pub(super) struct Portal {
    pub(super) policy: Policy,
    pub(super) session: Option<Existing>,
    pub(super) refusal: Option<Status>,
    next: Cell<u16>,
}

impl Portal {
    pub(super) fn new() -> Portal {
        let policy = Policy {
            portal_group_tag: 7,
            authentication: Authentication::Open,
            offer: Offer::default(),
            window: 64,
        };
        Portal { policy, session: None, refusal: None, next: Cell::new(100) }
    }
}

impl Directory for Portal {
    fn admit(&self, admission: &Admission<'_>) -> Result<Policy, Status> {
        assert_eq!(admission.initiator, INITIATOR, "names are in normal form");
        if let SessionType::Normal { target } = admission.session
            && target != TARGET
        {
            return Err(Status::NotFound);
        }
        self.refusal.map_or_else(|| Ok(self.policy.clone()), Err)
    }

    fn session(&self, initiator: &str, _: Isid, target: &str, portal_group_tag: u16) -> Option<Existing> {
        assert_eq!((initiator, target, portal_group_tag), (INITIATOR, TARGET, 7));
        self.session.clone()
    }

    fn new_tsih(&self) -> u16 {
        self.next.replace(self.next.get() + 1)
    }
}

/// Results of both sides.
pub(super) type Both = (Result<LoggedIn, Failure>, Result<LoginDone, Status>);

/// Runs a login, with the bytes of both directions in chunks of `piece` bytes.
pub(super) fn run_in_pieces(options: Options, portal: &Portal, piece: usize) -> Both {
    let mut initiator = initiator::Login::new(options, [9; NONCE_LEN]);
    let nonce = std::array::from_fn(|index| index as u8 + 40);
    let mut target = Target::new(nonce);
    for _ in 0..10_000 {
        let sent = std::mem::take(initiator.output());
        for mut piece in sent.chunks(piece) {
            while !piece.is_empty() {
                let taken = target.input(piece, portal);
                assert!(taken > 0, "input is taken while nothing is pending");
                piece = &piece[taken..];
            }
        }
        let answer = std::mem::take(target.output());
        let mut answer = answer.as_slice();
        while !answer.is_empty() {
            let taken = initiator.input(&answer[..answer.len().min(piece)]);
            assert!(taken > 0, "an initiator takes what it waits for");
            answer = &answer[taken..];
        }
        let left = match initiator.poll() {
            initiator::Step::NeedInput if target.poll() == Step::NeedInput => continue,
            initiator::Step::NeedInput => Err(Failure::Protocol("no answer")),
            initiator::Step::Ready(done) => Ok(*done),
            initiator::Step::Failed(failure) => Err(failure),
        };
        let right = match target.poll() {
            Step::NeedInput => Err(Status::TargetError),
            Step::Ready(done) => Ok(*done),
            Step::Closed(status) => Err(status),
        };
        return (left, right);
    }
    panic!("the login does not end");
}

/// Runs a login that both sides agree on.
pub(super) fn log_in(options: Options, portal: &Portal) -> (LoggedIn, LoginDone) {
    match run_in_pieces(options, portal, usize::MAX) {
        (Ok(left), Ok(right)) => {
            assert_eq!(left.tsih, right.tsih);
            assert_eq!(left.numbers.exp_stat_sn(), right.stat_sn);
            assert_eq!(left.numbers.immediate(), right.cmd_sn);
            (left, right)
        }
        other => panic!("{other:?}"),
    }
}

/// Runs a login that the target refuses, and returns the status.
pub(super) fn refusal(options: Options, portal: &Portal) -> Status {
    match run_in_pieces(options, portal, usize::MAX) {
        (Err(Failure::Refused(left)), Err(right)) => {
            assert_eq!(left, right, "the initiator gets the status");
            left
        }
        other => panic!("{other:?}"),
    }
}

pub(super) fn options() -> Options {
    Options::new(INITIATOR, Some(TARGET))
}

#[test]
fn both_sides_agree_on_parameters_and_identities() {
    let portal = Portal::new();
    for stages in [Stages::Both, Stages::Operational] {
        let (left, right) = log_in(Options { stages, cmd_sn: 77, ..options() }, &portal);
        assert_eq!(left.parameters, right.parameters);
        assert_eq!(left.portal_group_tag, Some(7));
        assert_eq!(
            (right.initiator.as_str(), right.cid, right.isid),
            (INITIATOR, 0, Isid([0x80, 0, 0, 0, 0, 1]))
        );
        assert_eq!(right.session, SessionType::Normal { target: TARGET.to_owned() });
        assert_eq!((right.join, right.user, right.window), (Join::New, None, 64));
        assert_eq!((right.cmd_sn, left.numbers.room()), (77, 64));
        let (ours, theirs) = (left.connection, right.connection);
        assert!(ours.header_digest && ours.data_digest && theirs.header_digest && theirs.data_digest);
        assert_eq!((ours.max_send_segment, ours.max_receive_segment), (8192, 262_144));
        assert_eq!((theirs.max_send_segment, theirs.max_receive_segment), (262_144, 8192));
    }
}

#[test]
fn security_stage_alone_leaves_defaults() {
    let (left, right) = log_in(Options { stages: Stages::Security, ..options() }, &Portal::new());
    assert_eq!((left.parameters, right.parameters), Default::default());
    assert!(!right.connection.header_digest);
    assert_eq!(right.connection.max_receive_segment, 8192);
}

#[test]
fn every_combination_of_digests_ends_alike_on_both_sides() {
    use DigestOffer::{Crc32c, Crc32cOrNone, None, NoneOrCrc32c};
    let all = [None, NoneOrCrc32c, Crc32cOrNone, Crc32c];
    for (theirs, ours) in all.iter().flat_map(|theirs| all.iter().map(move |ours| (*theirs, *ours))) {
        let mut portal = Portal::new();
        portal.policy.offer.header_digest = ours;
        portal.policy.offer.data_digest = Crc32cOrNone;
        let mut options = options();
        options.offer.header_digest = theirs;
        options.offer.data_digest = NoneOrCrc32c;
        let possible = theirs.allows_crc32c() && ours.allows_crc32c();
        let without = theirs.allows_none() && ours.allows_none();
        if !possible && !without {
            let (left, _) = run_in_pieces(options, &portal, usize::MAX);
            assert!(left.is_err(), "{theirs:?} {ours:?}");
            continue;
        }
        let (left, right) = log_in(options, &portal);
        // The initiator's preference decides, as the target answers with a value from its list.
        let expected = possible && (theirs != NoneOrCrc32c || !ours.allows_none());
        assert_eq!((left.connection.header_digest, left.connection.data_digest), (expected, false));
        assert_eq!((right.connection.header_digest, right.connection.data_digest), (expected, false));
    }
}

#[test]
fn target_asks_a_silent_initiator_for_the_digests_it_requires() {
    let mut portal = Portal::new();
    portal.policy.offer.header_digest = DigestOffer::Crc32c;
    let omitted = vec![Key::HeaderDigest];
    let (left, right) = log_in(Options { omitted: omitted.clone(), ..options() }, &portal);
    assert!(left.connection.header_digest && right.connection.header_digest);
    let security_only = Options { stages: Stages::Security, ..options() };
    assert_eq!(refusal(security_only, &portal), Status::InitiatorError);
}

#[test]
fn login_survives_any_cut_of_the_stream_and_of_the_text() {
    let portal = Portal::new();
    for (piece, text_max) in [(1, 8192), (7, 8192), (49, 100), (1000, 1), (3, 13)] {
        let further = vec![("X-com.example.filler".to_owned(), "x".repeat(50))];
        // With one byte of text per request, the login would need too many requests.
        let text_max = if text_max == 1 { 60 } else { text_max.max(60) };
        let (left, right) = run_in_pieces(Options { text_max, further, ..options() }, &portal, piece);
        assert_eq!(left.expect("a login").parameters, right.expect("a login").parameters);
    }
}

#[test]
fn unknown_and_private_keys_are_not_understood_and_do_no_harm() {
    let further = [("X-com.example.key", "1"), ("X#NodeArchitecture", "vax"), ("Unknown", "x"), ("Z-9", "")];
    let further = further.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
    log_in(Options { further, ..options() }, &Portal::new());
}

#[test]
fn window_is_bounded() {
    let mut portal = Portal::new();
    for (configured, expected) in [(0, 1), (1, 1), (512, 512), (100_000, 512)] {
        portal.policy.window = configured;
        let (left, right) = log_in(options(), &portal);
        assert_eq!((left.numbers.room(), right.window), (expected, expected));
    }
}
