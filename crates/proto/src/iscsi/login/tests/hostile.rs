//! Tests requests that our initiator does not send.

use proptest::prelude::*;

use super::super::super::pdu::{self, BHS_LEN, Bhs, Header, LoginResponse, NopOut, Request, Response};
use super::super::super::stream::{self, Receiver};
use super::*;

/// Returns a request of the security stage that asks for the operational one.
fn first() -> pdu::Login {
    pdu::Login {
        transit: true,
        continues: false,
        csg: 0,
        nsg: 1,
        version_max: 0,
        version_min: 0,
        isid: Isid([0x80, 0, 0, 0, 0, 1]),
        tsih: 0,
        itt: 3,
        cid: 0,
        cmd_sn: 1,
        exp_stat_sn: 50,
    }
}

const NAMES: &str = "InitiatorName=iqn.1993-08.org.debian:01:abc\0TargetName=iqn.2026-11.io.blockyard:disk\0";

fn bytes(pdu: Request, data: &[u8]) -> Vec<u8> {
    let mut bhs = [0; BHS_LEN];
    Header { pdu, immediate: true, ahs_len: 0, data_len: data.len() as u32 }.encode(&mut bhs);
    let mut out = Vec::new();
    stream::put(&mut out, &bhs, &[], data, false, false);
    out
}

/// Sends a request, and returns the response with its text.
fn exchange(
    target: &mut Target,
    portal: &Portal,
    request: pdu::Login,
    text: &str,
) -> (LoginResponse, String) {
    let request = bytes(Request::Login(request), text.as_bytes());
    assert_eq!(target.input(&request, portal), request.len());
    read(target)
}

fn read(target: &mut Target) -> (LoginResponse, String) {
    let mut receiver = Receiver::new(8192);
    let output = std::mem::take(target.output());
    assert_eq!(receiver.input(&output), Ok(output.len()), "a single response");
    let frame = receiver.frame().expect("no digests").expect("a whole response");
    let Ok(Header { pdu: Response::Login(response), .. }) = pdu::parse_response(frame.bhs) else {
        panic!("{frame:?}");
    };
    (response, String::from_utf8_lossy(frame.data).replace('\0', " "))
}

fn code(response: &LoginResponse) -> u16 {
    u16::from_be_bytes([response.status_class, response.status_detail])
}

/// Returns the status with which the first request fails.
fn failure(request: pdu::Login, text: &str) -> u16 {
    let mut target = Target::new([1; NONCE_LEN]);
    let (response, text) = exchange(&mut target, &Portal::new(), request, text);
    let code = code(&response);
    assert!(!response.transit && text.is_empty());
    assert_eq!((target.poll(), code != 0), (Step::Closed(Status::from_code(code)), true));
    assert_eq!(target.input(&[0; 48], &Portal::new()), 0, "a login that ended takes nothing");
    code
}

#[test]
fn missing_names_fail_with_0207() {
    assert_eq!(failure(first(), ""), 0x0207);
    assert_eq!(failure(first(), "TargetName=iqn.a\0"), 0x0207);
    assert_eq!(failure(first(), "InitiatorName=iqn.1993-08.org.debian:01:abc\0"), 0x0207);
}

#[test]
fn versions_above_ours_fail_with_0205() {
    assert_eq!(failure(pdu::Login { version_min: 1, version_max: 2, ..first() }, NAMES), 0x0205);
}

#[test]
fn unknown_session_type_fails_with_0209() {
    assert_eq!(failure(first(), &format!("{NAMES}SessionType=Gossip\0")), 0x0209);
}

#[test]
fn contradictory_stages_and_bits_fail() {
    for request in [
        pdu::Login { csg: 2, ..first() },
        pdu::Login { csg: 3, ..first() },
        pdu::Login { nsg: 0, ..first() },
        pdu::Login { nsg: 2, ..first() },
        pdu::Login { csg: 1, nsg: 1, ..first() },
        pdu::Login { continues: true, ..first() },
    ] {
        assert_eq!(failure(request, NAMES), 0x0200, "{request:?}");
    }
}

#[test]
fn malformed_text_fails() {
    let mut long = NAMES.to_owned();
    (0..70).for_each(|index| long += &format!("X-{index}=1\0"));
    for text in ["garbage\0", "=x\0", "InitiatorName=a b\0", &long, "InitiatorName=a\0InitiatorName=b\0"] {
        assert_eq!(failure(first(), text), 0x0200, "{text:?}");
    }
}

#[test]
fn identifiers_must_not_change_during_a_login() {
    let second = pdu::Login { csg: 1, nsg: 3, ..first() };
    for bad in [
        pdu::Login { isid: Isid([1; 6]), ..second },
        pdu::Login { tsih: 1, ..second },
        pdu::Login { itt: 4, ..second },
        pdu::Login { cid: 1, ..second },
        pdu::Login { csg: 0, nsg: 1, ..second },
    ] {
        let (mut target, portal) = (Target::new([1; NONCE_LEN]), Portal::new());
        assert!(exchange(&mut target, &portal, first(), NAMES).0.transit);
        assert_eq!(code(&exchange(&mut target, &portal, bad, "").0), 0x0200, "{bad:?}");
    }
    let (mut target, portal) = (Target::new([1; NONCE_LEN]), Portal::new());
    exchange(&mut target, &portal, first(), NAMES);
    let (response, _) = exchange(&mut target, &portal, second, "TargetName=iqn.2026-11.io.blockyard:other\0");
    assert_eq!(code(&response), 0x0200);
}

#[test]
fn libiscsi_repeats_names_in_the_operational_stage() {
    let (mut target, portal) = (Target::new([1; NONCE_LEN]), Portal::new());
    exchange(&mut target, &portal, first(), &format!("{NAMES}SessionType=Normal\0AuthMethod=None\0"));
    let second = pdu::Login { csg: 1, nsg: 3, ..first() };
    let (response, text) = exchange(&mut target, &portal, second, &format!("{NAMES}SessionType=Normal\0"));
    assert!(response.transit && response.nsg == 3 && response.tsih != 0);
    assert_eq!(text, "TargetAlias=LIO Target MaxRecvDataSegmentLength=8192 ");
    assert!(matches!(target.poll(), Step::Ready(_)));
}

#[test]
fn status_numbers_start_where_the_initiator_expects_them() {
    let (mut target, portal) = (Target::new([1; NONCE_LEN]), Portal::new());
    let (response, text) = exchange(&mut target, &portal, first(), NAMES);
    assert_eq!((response.numbers.stat_sn, response.tsih), (50, 0));
    assert_eq!((response.numbers.exp_cmd_sn, response.numbers.max_cmd_sn), (1, 64));
    assert_eq!(text, "TargetPortalGroupTag=7 ");
    let (response, _) = exchange(&mut target, &portal, pdu::Login { csg: 1, nsg: 3, ..first() }, "");
    assert_eq!(response.numbers.stat_sn, 51);
}

#[test]
fn owner_may_withdraw_the_final_response() {
    let (mut target, portal) = (Target::new([1; NONCE_LEN]), Portal::new());
    target.withdraw(Status::TargetError);
    assert_eq!(target.poll(), Step::NeedInput, "only a login that is ready can be withdrawn");
    let last = pdu::Login { csg: 1, nsg: 3, ..first() };
    let request = bytes(Request::Login(last), NAMES.as_bytes());
    target.input(&request, &portal);
    assert!(matches!(target.poll(), Step::Ready(_)));
    target.withdraw(Status::OutOfResources);
    assert_eq!(target.poll(), Step::Closed(Status::OutOfResources));
    let (response, _) = read(&mut target);
    assert_eq!((code(&response), response.transit, response.numbers.stat_sn), (0x0302, false, 50));
}

#[test]
fn operational_keys_in_the_security_stage_are_rejected() {
    let (mut target, portal) = (Target::new([1; NONCE_LEN]), Portal::new());
    let text = format!("{NAMES}MaxBurstLength=512\0Nonsense=1\0");
    let (_, text) = exchange(&mut target, &portal, first(), &text);
    assert_eq!(text, "TargetPortalGroupTag=7 MaxBurstLength=Reject Nonsense=NotUnderstood ");
}

#[test]
fn other_pdus_during_a_login_fail_with_020b_and_before_it_get_no_answer() {
    let nop = Request::NopOut(NopOut { lun: 0, itt: 1, ttt: u32::MAX, cmd_sn: 1, exp_stat_sn: 1 });
    let nop = bytes(nop, &[]);
    let (mut target, portal) = (Target::new([1; NONCE_LEN]), Portal::new());
    target.input(&nop, &portal);
    assert_eq!((target.poll(), target.output().len()), (Step::Closed(Status::InvalidDuringLogin), 0));

    let mut target = Target::new([1; NONCE_LEN]);
    exchange(&mut target, &portal, first(), NAMES);
    target.input(&nop, &portal);
    assert_eq!(code(&read(&mut target).0), 0x020b);
}

#[test]
fn chap_out_of_order_fails_with_0201() {
    let secret = Credentials { name: "user".to_owned(), secret: Secret::new("secret") };
    let mut portal = Portal::new();
    portal.policy.authentication = Authentication::Required(Chap { initiator: secret, target: None });
    let stay = pdu::Login { transit: false, nsg: 0, ..first() };
    for (texts, expected) in [
        (&["CHAP_A=5\0"][..], 0x0201),
        (&["AuthMethod=KRB5,SPKM1\0"], 0x0201),
        (&["AuthMethod=CHAP\0", "CHAP_N=user\0CHAP_R=0x00\0"], 0x0201),
        (&["AuthMethod=CHAP\0", "CHAP_A=\0"], 0x0201),
        (&["AuthMethod=CHAP\0", "CHAP_A=56\0"], 0x0201),
        (&["AuthMethod=CHAP\0", "CHAP_A=5\0", "CHAP_N=user\0"], 0x0201),
        (&["AuthMethod=CHAP\0", "CHAP_A=5\0", "CHAP_N=user\0CHAP_R=0x\0"], 0x0201),
        (&["AuthMethod=CHAP\0AuthMethod=None\0"], 0x0200),
    ] {
        let mut target = Target::new([1; NONCE_LEN]);
        let mut last = 0;
        for (index, text) in texts.iter().enumerate() {
            let names = if index == 0 { NAMES } else { "" };
            last = code(&exchange(&mut target, &portal, stay, &format!("{names}{text}")).0);
            assert!(last == 0 || index + 1 == texts.len(), "{texts:?}");
        }
        assert_eq!(last, expected, "{texts:?}");
    }
}

/// An impostor relays the target's own challenge, so that the target computes the response.
#[test]
fn reflected_challenge_is_refused() {
    let credentials =
        |name: &str, secret: &str| Credentials { name: name.to_owned(), secret: Secret::new(secret) };
    let initiator = credentials("user", "one");
    let mut portal = Portal::new();
    portal.policy.authentication = Authentication::Required(Chap {
        initiator: initiator.clone(),
        target: Some(credentials("target", "two")),
    });
    let stay = pdu::Login { transit: false, nsg: 0, ..first() };
    let mut target = Target::new([1; NONCE_LEN]);
    exchange(&mut target, &portal, stay, &format!("{NAMES}AuthMethod=CHAP\0"));
    let (_, text) = exchange(&mut target, &portal, stay, "CHAP_A=5\0");
    let challenge = text.split_once("CHAP_C=").expect("a challenge").1.trim().to_owned();
    let bytes = super::super::super::chap::decode(&challenge).expect("hexadecimal");
    let response = super::super::super::chap::Algorithm::Md5.response(1, &initiator.secret, &bytes);
    let response = super::super::super::chap::encode(&response);
    let text = format!("CHAP_N=user\0CHAP_R={response}\0CHAP_I=9\0CHAP_C={challenge}\0");
    assert_eq!(code(&exchange(&mut target, &portal, stay, &text).0), 0x0201);
}

#[test]
fn endless_logins_and_endless_text_are_ended() {
    let portal = Portal::new();
    let stay = pdu::Login { transit: false, nsg: 0, csg: 1, ..first() };
    let mut target = Target::new([1; NONCE_LEN]);
    let mut requests = 0;
    while target.poll() == Step::NeedInput {
        exchange(&mut target, &portal, stay, if requests == 0 { NAMES } else { "" });
        requests += 1;
    }
    assert_eq!((requests, target.poll()), (MAX_REQUESTS + 1, Step::Closed(Status::InitiatorError)));

    let mut target = Target::new([1; NONCE_LEN]);
    let filler = "x".repeat(8192);
    let mut requests = 0;
    while target.poll() == Step::NeedInput {
        exchange(&mut target, &portal, pdu::Login { continues: true, ..stay }, &filler);
        requests += 1;
    }
    assert_eq!(requests, 3, "two requests fill the 16 KiB that a text may have");
}

#[test]
fn long_data_segments_are_refused_without_being_buffered() {
    let mut target = Target::new([1; NONCE_LEN]);
    let mut bhs: Bhs = [0; BHS_LEN];
    Header { pdu: Request::Login(first()), immediate: true, ahs_len: 0, data_len: 8193 }.encode(&mut bhs);
    target.input(&bhs, &Portal::new());
    assert_eq!(target.poll(), Step::Closed(Status::InitiatorError));
}

#[test]
fn initiator_that_never_reads_gets_one_response() {
    let (mut target, portal) = (Target::new([1; NONCE_LEN]), Portal::new());
    let request = bytes(Request::Login(first()), NAMES.as_bytes());
    assert_eq!(target.input(&request, &portal), request.len());
    assert_eq!(target.input(&request, &portal), 0);
}

proptest! {
    #[test]
    fn arbitrary_text_in_any_stage_never_panics(
        texts in prop::collection::vec(any::<(String, bool)>(), 0..6), csg in 0u8..2,
    ) {
        let (mut target, portal) = (Target::new([1; NONCE_LEN]), Portal::new());
        let mut request = pdu::Login { csg, nsg: 3, ..first() };
        for (index, (text, transit)) in texts.iter().enumerate() {
            request.transit = *transit;
            let names = if index == 0 { NAMES } else { "" };
            let request = bytes(Request::Login(request), format!("{names}{text}").as_bytes());
            target.input(&request, &portal);
            target.output().clear();
        }
    }
}
