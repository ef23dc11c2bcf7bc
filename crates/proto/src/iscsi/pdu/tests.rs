use proptest::prelude::*;

use super::*;

/// Generates headers, most of them with a known opcode of the direction.
fn headers(opcodes: &'static [u8]) -> impl Strategy<Value = Bhs> {
    (any::<[[u8; 16]; 3]>(), proptest::option::of(proptest::sample::select(opcodes))).prop_map(
        |(parts, opcode)| {
            let mut bhs = [0; BHS_LEN];
            bhs.iter_mut().zip(parts.as_flattened()).for_each(|(to, from)| *to = *from);
            if let Some(opcode) = opcode {
                bhs[0] = bhs[0] & 0x40 | opcode;
            }
            bhs
        },
    )
}

const REQUESTS: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 0x10];
const RESPONSES: [u8; 10] = [0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x31, 0x32, 0x3f];

proptest! {
    #[test]
    fn requests_survive_encoding(bhs in headers(&REQUESTS)) {
        if let Ok(header) = parse(&bhs) {
            let mut again = [0; BHS_LEN];
            header.encode(&mut again);
            prop_assert_eq!(parse(&again), Ok(header));
        }
    }

    #[test]
    fn responses_survive_encoding(bhs in headers(&RESPONSES)) {
        if let Ok(mut header) = parse_response(&bhs) {
            // A target sends no additional headers, and the length of some PDUs is fixed.
            header.ahs_len = 0;
            match &mut header.pdu {
                Response::TaskManagement(_) | Response::Logout(_) | Response::R2t(_) => header.data_len = 0,
                Response::Reject(_) => header.data_len = 48,
                // StatSN is reserved without a status, and a status ends the sequence.
                Response::DataIn(pdu) if pdu.status.is_none() => pdu.numbers.stat_sn = 0,
                Response::DataIn(pdu) => pdu.is_final = true,
                Response::AsyncMessage(pdu) => {
                    if let AsyncEvent::Other(code) = pdu.event {
                        prop_assert!(code > 5);
                    }
                }
                _ => {}
            }
            if let Response::ScsiResponse(ScsiResponse { residual: Residual::None, .. }) = header.pdu {
                header.data_len &= 0xff;
            }
            let mut again = [0; BHS_LEN];
            header.encode(&mut again);
            prop_assert_eq!(parse_response(&again), Ok(header));
        }
    }

    #[test]
    fn additional_headers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..1024)) {
        let _ = Ahs::parse(&bytes);
    }

    #[test]
    fn extended_cdbs_survive_encoding(words in proptest::collection::vec(any::<[u8; 4]>(), 1..60)) {
        let mut out = Vec::new();
        Ahs::put_extended_cdb(&mut out, words.as_flattened());
        prop_assert_eq!(out.len() % 4, 0);
        prop_assert_eq!(Ahs::parse(&out).map(|ahs| ahs.extended_cdb), Ok(Some(words.as_flattened())));
    }

    #[test]
    fn padding_completes_a_word(len in 0..=MAX_DATA_SEGMENT) {
        prop_assert_eq!(len + padding(len), padded(len));
        prop_assert_eq!(padded(len) % 4, 0);
        prop_assert!(padding(len) < 4);
    }
}

/// The header of a WRITE(10) of 8 blocks, as libiscsi sends it.
#[test]
fn scsi_command_has_the_layout_of_section_11_3() {
    let mut bhs = [0; BHS_LEN];
    bhs[0] = 0x01;
    bhs[1] = 0xa1;
    bhs[4..8].copy_from_slice(&[0, 0, 0x10, 0]);
    bhs[9] = 2;
    bhs[16..20].copy_from_slice(&[1, 2, 3, 4]);
    bhs[20..24].copy_from_slice(&[0, 0, 0x10, 0]);
    bhs[24..28].copy_from_slice(&[0, 0, 0, 9]);
    bhs[28..32].copy_from_slice(&[0, 0, 0, 7]);
    bhs[32] = 0x2a;
    let header = parse(&bhs).expect("a valid command");
    let Request::ScsiCommand(command) = header.pdu else { panic!("{header:?}") };
    assert_eq!((header.data_len, header.ahs_len, header.immediate), (4096, 0, false));
    assert!(command.write && !command.read && command.is_final);
    assert_eq!(command.attribute, TaskAttribute::Simple);
    assert_eq!(command.lun, 0x0002_0000_0000_0000);
    assert_eq!((command.itt, command.expected_len), (0x0102_0304, 4096));
    assert_eq!((command.cmd_sn, command.exp_stat_sn, command.cdb[0]), (9, 7, 0x2a));
}

#[test]
fn final_data_in_with_status_has_the_layout_of_section_11_7() {
    let mut bhs = [0xff; BHS_LEN];
    let pdu = DataIn {
        is_final: true,
        acknowledge: false,
        status: Some(0),
        residual: Residual::Underflow(512),
        lun: 0,
        itt: 0x0a0b_0c0d,
        ttt: RESERVED_TAG,
        numbers: Numbers { stat_sn: 1, exp_cmd_sn: 2, max_cmd_sn: 3 },
        data_sn: 4,
        offset: 0x0001_0000,
    };
    pdu.encode(&mut bhs, 513);
    let expected = [
        [0x25, 0x83, 0, 0, 0, 0, 2, 1],
        [0; 8],
        [0x0a, 0x0b, 0x0c, 0x0d, 0xff, 0xff, 0xff, 0xff],
        [0, 0, 0, 1, 0, 0, 0, 2],
        [0, 0, 0, 3, 0, 0, 0, 4],
        [0, 1, 0, 0, 0, 0, 2, 0],
    ];
    assert_eq!(bhs, expected.as_flattened());
}

#[test]
fn unknown_opcodes_and_reserved_attributes_are_refused() {
    let mut bhs = [0; BHS_LEN];
    bhs[0] = 0x07;
    assert_eq!(parse(&bhs), Err(PduError::UnknownOpcode(7)));
    assert_eq!(PduError::UnknownOpcode(7).reject_reason(), RejectReason::CommandNotSupported);
    bhs[0] = 0x25;
    assert_eq!(parse(&bhs), Err(PduError::UnknownOpcode(0x25)), "an initiator sends no Data-In");
    bhs[..2].copy_from_slice(&[1, 0x85]);
    assert_eq!(parse(&bhs), Err(PduError::InvalidField("ATTR")));
    bhs[..2].copy_from_slice(&[0x21, 0x86]);
    assert!(parse_response(&bhs).is_err(), "overflow and underflow exclude each other");
}

#[test]
fn additional_headers_that_are_cut_off_repeated_or_unknown_are_refused() {
    let bidirectional = [0, 5, 2, 0, 0, 0, 2, 0];
    assert_eq!(Ahs::parse(&bidirectional).map(|ahs| ahs.bidirectional_read_len), Ok(Some(512)));
    for bad in [
        &[0, 5, 2, 0][..],
        &[0, 5],
        &[0, 5, 2, 0, 0, 0, 2, 0, 0, 5, 2, 0, 0, 0, 2, 0],
        &[0, 1, 9, 0],
        &[0, 1, 1, 0],
        &[0xff, 0xff, 1, 0],
    ] {
        assert!(Ahs::parse(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn residual_counts_what_was_missing_or_too_much() {
    assert_eq!(Residual::of(512, 512), Residual::None);
    assert_eq!(Residual::of(1024, 512), Residual::Underflow(512));
    assert_eq!(Residual::of(512, 1024), Residual::Overflow(512));
    assert_eq!(Residual::of(0, u64::MAX), Residual::Overflow(u32::MAX));
}

#[test]
fn wire_length_counts_padding_and_digests() {
    let mut bhs = [0; BHS_LEN];
    bhs[7] = 5;
    let header = parse(&bhs).expect("a NOP-Out");
    assert_eq!(header.wire_len(false, false), 48 + 8);
    assert_eq!(header.wire_len(true, true), 48 + 4 + 8 + 4);
    bhs[7] = 0;
    let header = parse(&bhs).expect("a NOP-Out");
    assert_eq!(header.wire_len(true, true), 52, "an empty data segment has no digest");
}
