//! Tests how a connection relates to existing sessions, and refusals of the directory.

use super::*;

/// Returns a session with one connection, CID 0.
fn existing(max_connections: u16) -> Existing {
    Existing { tsih: 5, cids: vec![0], max_connections, exp_cmd_sn: 1000, max_cmd_sn: 1031 }
}

fn portal(max_connections: u16) -> Portal {
    Portal { session: Some(existing(max_connections)), ..Portal::new() }
}

#[test]
fn tsih_0_with_a_known_isid_reinstates_the_session() {
    let (left, right) = log_in(options(), &portal(1));
    assert_eq!(right.join, Join::Reinstate { old_tsih: 5 });
    assert_ne!(left.tsih, 5, "the new session has a handle of its own");
}

#[test]
fn further_connection_joins_with_the_numbers_of_the_session() {
    let join = Options { tsih: 5, cid: 1, cmd_sn: 1000, ..options() };
    let (left, right) = log_in(join, &portal(2));
    assert_eq!((right.join, right.tsih, right.cid), (Join::AddConnection, 5, 1));
    assert_eq!(left.numbers.room(), 32);
}

#[test]
fn known_cid_reinstates_the_connection() {
    let (_, right) = log_in(Options { tsih: 5, cid: 0, cmd_sn: 1000, ..options() }, &portal(1));
    assert_eq!(right.join, Join::ReinstateConnection);
}

#[test]
fn connections_beyond_max_connections_are_refused() {
    let status = refusal(Options { tsih: 5, cid: 1, ..options() }, &portal(1));
    assert_eq!((status, status.code()), (Status::TooManyConnections, 0x0206));
}

#[test]
fn unknown_tsih_is_refused() {
    for portal in [portal(8), Portal::new()] {
        let status = refusal(Options { tsih: 6, ..options() }, &portal);
        assert_eq!((status, status.code()), (Status::NoSession, 0x020a));
    }
}

#[test]
fn discovery_session_cannot_have_a_second_connection() {
    let status = refusal(Options { tsih: 5, target: None, ..options() }, &portal(8));
    assert_eq!(status.code(), 0x0209);
}

#[test]
fn discovery_session_has_no_target() {
    let (left, right) = log_in(Options { target: None, ..options() }, &Portal::new());
    assert_eq!((right.session, right.join, left.portal_group_tag), (SessionType::Discovery, Join::New, None));
}

#[test]
fn unknown_target_is_not_found() {
    for target in ["iqn.2026-11.io.blockyard:other", "a b"] {
        let status = refusal(Options { target: Some(target.to_owned()), ..options() }, &Portal::new());
        assert_eq!((status, status.code()), (Status::NotFound, 0x0203));
    }
}

#[test]
fn names_are_compared_in_normal_form() {
    let initiator = INITIATOR.to_uppercase();
    let target = Some(TARGET.to_uppercase());
    let (_, right) = log_in(Options { initiator, target, ..options() }, &Portal::new());
    assert_eq!(right.initiator, INITIATOR);
}

#[test]
fn refusals_of_the_directory_reach_the_initiator() {
    for (refused, code) in [
        (Status::AuthorisationFailure, 0x0202),
        (Status::TargetRemoved, 0x0204),
        (Status::CannotInclude, 0x0208),
        (Status::TargetError, 0x0300),
        (Status::ServiceUnavailable, 0x0301),
        (Status::OutOfResources, 0x0302),
    ] {
        let portal = Portal { refusal: Some(refused), ..Portal::new() };
        assert_eq!(refusal(options(), &portal).code(), code);
    }
}
