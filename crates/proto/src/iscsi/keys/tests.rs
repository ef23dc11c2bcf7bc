use proptest::prelude::*;

use super::super::text::pairs;
use super::*;

fn responder(offer: Offer) -> Responder {
    Responder::new(offer, true, false)
}

/// Answers a text, without the declaration of MaxRecvDataSegmentLength.
fn answers(responder: &mut Responder, offers: &[(&str, &str)]) -> Result<Vec<(String, String)>, Status> {
    let mut out = Vec::new();
    responder.answer(offers, &mut out)?;
    let pairs = pairs(&out).expect("answers are well-formed");
    let pairs = pairs.into_iter().filter(|pair| pair.0 != "MaxRecvDataSegmentLength");
    Ok(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
}

/// Returns the answer to a single offer.
fn answer(offer: &Offer, key: &str, value: &str) -> String {
    let answers = answers(&mut responder(offer.clone()), &[(key, value)]).expect("the login continues");
    let [(name, value)] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(name, key);
    value.clone()
}

#[test]
fn table_is_in_the_order_of_the_keys() {
    for (index, rule) in RULES.iter().enumerate() {
        assert_eq!((rule.key as usize, rule_of(rule.key)), (index, rule));
    }
}

/// Offers of an initiator and the answers of a target with LIO's defaults (inventory 2.8).
#[test]
fn answers_of_a_target_with_default_parameters() {
    let offer = Offer::default();
    for (key, value, expected) in [
        ("HeaderDigest", "None", "None"),
        ("HeaderDigest", "CRC32C", "CRC32C"),
        ("HeaderDigest", "None,CRC32C", "None"),
        ("HeaderDigest", "CRC32C,None", "CRC32C"),
        ("HeaderDigest", "CRC64,CRC32C", "CRC32C"),
        ("HeaderDigest", "CRC64", "Reject"),
        ("DataDigest", "CRC32C,None", "CRC32C"),
        ("MaxConnections", "1", "1"),
        ("MaxConnections", "65535", "1"),
        ("MaxConnections", "0", "Reject"),
        ("MaxConnections", "65536", "Reject"),
        ("InitialR2T", "No", "Yes"),
        ("InitialR2T", "Yes", "Yes"),
        ("InitialR2T", "yes", "Reject"),
        ("ImmediateData", "Yes", "Yes"),
        ("ImmediateData", "No", "No"),
        ("MaxBurstLength", "16776192", "262144"),
        ("MaxBurstLength", "0x2000", "8192"),
        ("MaxBurstLength", "512", "512"),
        ("MaxBurstLength", "511", "Reject"),
        ("MaxBurstLength", "16777216", "Reject"),
        ("FirstBurstLength", "262144", "65536"),
        ("FirstBurstLength", "1024", "1024"),
        ("DefaultTime2Wait", "0", "2"),
        ("DefaultTime2Wait", "30", "30"),
        ("DefaultTime2Wait", "3601", "Reject"),
        ("DefaultTime2Retain", "0", "0"),
        ("DefaultTime2Retain", "60", "20"),
        ("MaxOutstandingR2T", "16", "1"),
        ("DataPDUInOrder", "No", "Yes"),
        ("DataSequenceInOrder", "No", "Yes"),
        ("ErrorRecoveryLevel", "2", "0"),
        ("ErrorRecoveryLevel", "3", "Reject"),
        ("TaskReporting", "FastAbort,ResponseFence,RFC3720", "RFC3720"),
        ("TaskReporting", "FastAbort", "Reject"),
        ("iSCSIProtocolLevel", "3", "2"),
        ("iSCSIProtocolLevel", "1", "1"),
        ("iSCSIProtocolLevel", "0", "0"),
        ("OFMarker", "No", "No"),
        ("IFMarker", "Yes", "No"),
        ("OFMarkInt", "2048~8192", "Reject"),
        ("IFMarkInt", "1", "Reject"),
        ("X-com.example.key", "1", "NotUnderstood"),
        ("X#NodeArchitecture", "x86", "NotUnderstood"),
        ("maxburstlength", "512", "NotUnderstood"),
        ("AuthMethod", "CHAP,None", "Reject"),
        ("CHAP_A", "5", "Reject"),
    ] {
        assert_eq!(answer(&offer, key, value), expected, "{key}={value}");
    }
}

#[test]
fn answers_follow_the_configured_offer() {
    let offer = Offer {
        header_digest: DigestOffer::None,
        max_connections: 4,
        initial_r2t: false,
        immediate_data: false,
        max_outstanding_r2t: 8,
        max_burst_length: 32_768,
        protocol_level: 1,
        ..Offer::default()
    };
    for (key, value, expected) in [
        ("HeaderDigest", "CRC32C,None", "None"),
        ("MaxConnections", "2", "2"),
        ("InitialR2T", "No", "No"),
        ("ImmediateData", "Yes", "No"),
        ("MaxOutstandingR2T", "100", "8"),
        ("FirstBurstLength", "262144", "32768"),
        ("iSCSIProtocolLevel", "3", "1"),
    ] {
        assert_eq!(answer(&offer, key, value), expected, "{key}={value}");
    }
}

#[test]
fn results_are_stored() {
    let mut responder = responder(Offer { initial_r2t: false, max_connections: 9, ..Offer::default() });
    let offers = [
        ("FirstBurstLength", "65536"),
        ("MaxBurstLength", "16384"),
        ("InitialR2T", "No"),
        ("ImmediateData", "No"),
        ("MaxConnections", "3"),
        ("DefaultTime2Wait", "5"),
        ("DefaultTime2Retain", "7"),
        ("DataDigest", "CRC32C"),
        ("MaxRecvDataSegmentLength", "524288"),
    ];
    answers(&mut responder, &offers).expect("acceptable offers");
    let expected = Parameters {
        max_connections: 3,
        initial_r2t: false,
        immediate_data: false,
        max_burst_length: 16_384,
        // FirstBurstLength must not exceed MaxBurstLength, which came later.
        first_burst_length: 16_384,
        default_time2wait: 5,
        default_time2retain: 7,
        ..Parameters::default()
    };
    assert_eq!(responder.parameters, expected);
    assert!(responder.connection.data_digest && !responder.connection.header_digest);
    assert_eq!(responder.connection.max_send_segment, 262_144, "MaxXmitDataSegmentLength bounds it");
}

#[test]
fn segment_length_is_declared_once_by_each_side() {
    let mut responder = responder(Offer { max_recv_data_segment_length: 65_536, ..Offer::default() });
    let mut out = Vec::new();
    responder.answer(&[("MaxRecvDataSegmentLength", "1024")], &mut out).expect("in range");
    assert_eq!(out, b"MaxRecvDataSegmentLength=65536\0");
    assert_eq!(responder.connection.max_send_segment, 1024);
    assert_eq!(responder.connection.max_receive_segment, 65_536);
    out.clear();
    responder.answer(&[("MaxRecvDataSegmentLength", "2048")], &mut out).expect("may be repeated");
    assert_eq!((out.len(), responder.connection.max_send_segment), (0, 2048));
    let bad = responder.answer(&[("MaxRecvDataSegmentLength", "511")], &mut out);
    assert_eq!(bad, Err(Status::InitiatorError));
}

#[test]
fn key_offered_twice_is_an_error() {
    let mut responder = responder(Offer::default());
    answers(&mut responder, &[("ImmediateData", "Yes")]).expect("the first offer");
    let again = answers(&mut responder, &[("ImmediateData", "No")]);
    assert_eq!(again, Err(Status::InitiatorError));
}

#[test]
fn keys_of_normal_sessions_are_irrelevant_in_discovery_sessions() {
    let mut responder = Responder::new(Offer::default(), true, true);
    let offers = [("MaxConnections", "1"), ("InitialR2T", "Yes"), ("DefaultTime2Wait", "3")];
    let answers = answers(&mut responder, &offers).expect("no error");
    let values: Vec<_> = answers.iter().map(|pair| pair.1.as_str()).collect();
    assert_eq!(values, ["Irrelevant", "Irrelevant", "3"]);
}

#[test]
fn keys_of_the_session_are_irrelevant_on_further_connections() {
    let mut responder = Responder::new(Offer::default(), false, false);
    let offers = [("MaxBurstLength", "512"), ("HeaderDigest", "CRC32C")];
    let answers = answers(&mut responder, &offers).expect("no error");
    let values: Vec<_> = answers.iter().map(|pair| pair.1.as_str()).collect();
    assert_eq!(values, ["Irrelevant", "CRC32C"]);
    assert_eq!(responder.parameters, Parameters::default());
}

#[test]
fn required_digest_is_asked_for_if_the_initiator_is_silent() {
    let offer = Offer { header_digest: DigestOffer::Crc32c, ..Offer::default() };
    let mut negotiation = responder(offer.clone());
    let mut out = Vec::new();
    assert_eq!(negotiation.settle(&mut out), Ok(false));
    assert_eq!(out, b"HeaderDigest=CRC32C\0");
    assert_eq!(negotiation.clone().settle(&mut out), Err(Status::InitiatorError), "it has to answer");
    assert_eq!(answers(&mut negotiation, &[("HeaderDigest", "CRC32C")]), Ok(Vec::new()));
    assert_eq!(negotiation.settle(&mut out), Ok(true));
    assert!(negotiation.connection.header_digest);

    let refusal = answers(&mut responder(offer), &[("HeaderDigest", "None")]);
    assert_eq!(refusal, Err(Status::InitiatorError));
}

#[test]
fn initiator_takes_answers_in_range_only() {
    let (mut parameters, mut connection) = (Parameters::default(), ConnectionParameters::default());
    let mut take = |key: &str, value: &str| {
        let rule = find(key).expect("a known key");
        accept(&mut parameters, &mut connection, rule, value).is_ok()
    };
    assert!(take("MaxBurstLength", "1024") && take("InitialR2T", "No") && take("HeaderDigest", "CRC32C"));
    assert!(take("MaxConnections", "Irrelevant") && take("OFMarker", "No") && take("OFMarkInt", "Reject"));
    assert!(take("MaxRecvDataSegmentLength", "4096"));
    assert!(!take("MaxBurstLength", "Reject") && !take("ImmediateData", "1") && !take("DataDigest", "MD5"));
    assert!(!take("MaxRecvDataSegmentLength", "1"));
    assert_eq!((parameters.max_burst_length, parameters.initial_r2t), (1024, false));
    assert_eq!((connection.max_send_segment, connection.header_digest), (4096, true));
}

proptest! {
    #[test]
    fn numbers_within_range_give_the_minimum_or_maximum(offered: u32, which in 0..RULES.len()) {
        let rule = &RULES[which];
        prop_assume!(matches!(rule.function, Function::Minimum | Function::Maximum));
        let offered = rule.min + offered % (rule.max - rule.min + 1);
        let own = own_number(&Offer::default(), rule.key);
        let expected = if rule.function == Function::Minimum { offered.min(own) } else { offered.max(own) };
        prop_assert_eq!(answer(&Offer::default(), rule.name, &offered.to_string()), expected.to_string());
    }

    #[test]
    fn arbitrary_values_never_panic_and_answers_are_acceptable(which in 0..RULES.len(), value in "[ -~]{0,40}") {
        let rule = &RULES[which];
        if let Ok(answers) = answers(&mut responder(Offer::default()), &[(rule.name, &value)]) {
            for (_, answer) in answers.iter().filter(|pair| pair.1 != REJECT) {
                let (mut parameters, mut connection) = Default::default();
                prop_assert_eq!(accept(&mut parameters, &mut connection, rule, answer), Ok(()));
            }
        }
    }
}
