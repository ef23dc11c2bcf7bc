//! Tests authentication: every algorithm, encoding and requirement, and what must fail.

use super::super::super::chap::Algorithm;
use super::*;

fn credentials(name: &str, secret: &str) -> Credentials {
    Credentials { name: name.to_owned(), secret: Secret::new(secret) }
}

fn chap(target: Option<Credentials>) -> Chap {
    Chap { initiator: credentials("user", "the initiator's"), target }
}

fn portal(authentication: Authentication) -> Portal {
    let mut portal = Portal::new();
    portal.policy.authentication = authentication;
    portal
}

/// Returns options with the right credentials.
fn known() -> Options {
    Options { credentials: Some(credentials("user", "the initiator's")), ..options() }
}

#[test]
fn chap_admits_with_each_algorithm_and_encoding() {
    let portal = portal(Authentication::Required(chap(None)));
    for algorithm in Algorithm::ALL {
        for base64 in [false, true] {
            let (_, done) = log_in(Options { algorithms: vec![algorithm], base64, ..known() }, &portal);
            assert_eq!(done.user.as_deref(), Some("user"));
        }
    }
}

#[test]
fn mutual_chap_proves_the_target_with_each_algorithm_and_encoding() {
    let own = credentials("target", "the target's");
    let portal = portal(Authentication::Required(chap(Some(own.clone()))));
    for algorithm in Algorithm::ALL {
        for base64 in [false, true] {
            let target_credentials = Some(own.clone());
            log_in(Options { algorithms: vec![algorithm], base64, target_credentials, ..known() }, &portal);
        }
    }
    log_in(known(), &portal);
}

#[test]
fn chap_may_be_followed_by_the_full_feature_phase() {
    let portal = portal(Authentication::Required(chap(None)));
    let (_, done) = log_in(Options { stages: Stages::Security, ..known() }, &portal);
    assert_eq!(done.user.as_deref(), Some("user"));
}

#[test]
fn wrong_secret_or_name_fails_with_0201() {
    let portal = portal(Authentication::Required(chap(None)));
    for wrong in [credentials("user", "guess"), credentials("root", "the initiator's"), credentials("", "")] {
        let status = refusal(Options { credentials: Some(wrong), ..known() }, &portal);
        assert_eq!((status, status.code()), (Status::AuthenticationFailure, 0x0201));
    }
}

#[test]
fn initiator_without_credentials_fails_where_they_are_required() {
    for authentication in [Authentication::Required(chap(None)), Authentication::Impossible] {
        let portal = portal(authentication);
        for stages in [Stages::Both, Stages::Operational, Stages::Security] {
            assert_eq!(refusal(Options { stages, ..options() }, &portal), Status::AuthenticationFailure);
        }
    }
    assert_eq!(refusal(known(), &portal(Authentication::Impossible)), Status::AuthenticationFailure);
}

#[test]
fn optional_authentication_admits_both_but_checks_what_it_gets() {
    let portal = portal(Authentication::Optional(chap(None)));
    assert_eq!(log_in(options(), &portal).1.user, None);
    assert_eq!(log_in(known(), &portal).1.user.as_deref(), Some("user"));
    let wrong = Options { credentials: Some(credentials("user", "guess")), ..options() };
    assert_eq!(refusal(wrong, &portal), Status::AuthenticationFailure);
}

#[test]
fn open_target_chooses_none_of_an_initiator_with_credentials() {
    assert_eq!(log_in(known(), &portal(Authentication::Open)).1.user, None);
}

#[test]
fn initiator_notices_a_target_that_does_not_know_its_secret() {
    let expected = Some(credentials("target", "the target's"));
    let impostor = portal(Authentication::Required(chap(Some(credentials("target", "guess")))));
    let (left, _) =
        run_in_pieces(Options { target_credentials: expected.clone(), ..known() }, &impostor, 4096);
    assert_eq!(left, Err(Failure::TargetNotAuthenticated));
    let open = portal(Authentication::Open);
    let (left, _) = run_in_pieces(Options { target_credentials: expected, ..known() }, &open, 4096);
    assert_eq!(left, Err(Failure::TargetNotAuthenticated));
}

#[test]
fn target_without_a_secret_of_its_own_refuses_mutual_chap() {
    let portal = portal(Authentication::Required(chap(None)));
    let target_credentials = Some(credentials("target", "x"));
    assert_eq!(refusal(Options { target_credentials, ..known() }, &portal), Status::AuthenticationFailure);
}

#[test]
fn one_secret_for_both_directions_is_refused() {
    let portal = portal(Authentication::Required(chap(Some(credentials("target", "the initiator's")))));
    let target_credentials = Some(credentials("target", "the initiator's"));
    assert_eq!(refusal(Options { target_credentials, ..known() }, &portal), Status::AuthenticationFailure);
}

#[test]
fn discovery_sessions_are_authenticated_too() {
    let portal = portal(Authentication::Required(chap(None)));
    let anonymous = Options { target: None, ..options() };
    assert_eq!(refusal(anonymous, &portal), Status::AuthenticationFailure);
    let (_, done) = log_in(Options { target: None, ..known() }, &portal);
    assert_eq!(done.session, SessionType::Discovery);
}
