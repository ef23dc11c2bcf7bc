use super::*;

const COMPACT_WRITE: [u8; 28] =
    [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0];

#[test]
fn a_compact_write_has_a_payload() {
    let (request, len) = parse(&COMPACT_WRITE, false).unwrap().unwrap();
    assert_eq!(len, 28);
    let expected = Request::write(0x0102_0304_0506_0708, 4096, 512).with_flags(CommandFlags::FUA);
    assert_eq!(request, expected);
}

#[test]
fn an_incomplete_header_is_not_parsed() {
    for len in 0..COMPACT_WRITE.len() {
        assert_eq!(parse(&COMPACT_WRITE[..len], false), Ok(None), "{len} bytes");
    }
}

#[test]
fn a_wrong_magic_is_fatal_at_its_fourth_byte() {
    assert_eq!(parse(b"GET", false), Ok(None));
    assert!(matches!(parse(b"GET ", false), Err(Fatal::BadMagic { found: 0x4745_5420, .. })));
    // A magic of the other style is an error as well.
    assert!(parse(&COMPACT_WRITE, true).is_err());
}

#[test]
fn the_payload_flag_is_ignored_in_a_compact_header() {
    let mut bytes = [0; 28];
    Request::new(Command::Read, 1, 0, 512).with_flags(CommandFlags::PAYLOAD_LEN).put(&mut bytes, false);
    assert_eq!(parse(&bytes, false).unwrap().unwrap().0.payload_len, 0);
}

#[test]
fn an_extended_length_is_a_payload_only_with_the_flag() {
    let mut bytes = [0; 32];
    Request::new(Command::Trim, 1, 0, 1 << 40).put(&mut bytes, true);
    let (trim, len) = parse(&bytes, true).unwrap().unwrap();
    assert_eq!((trim.len, trim.payload_len, len), (1 << 40, 0, 32));

    Request::write(1, 0, 512).put(&mut bytes, true);
    let (write, _) = parse(&bytes, true).unwrap().unwrap();
    assert_eq!((write.len, write.payload_len), (512, 512));
    assert!(write.flags.contains(CommandFlags::PAYLOAD_LEN));
}

#[test]
fn commands_keep_their_numbers() {
    for code in 0..=u16::MAX {
        assert_eq!(Command::from_code(code).code(), code);
    }
    assert_eq!(Command::from_code(8), Command::Other(8));
}

proptest::proptest! {
    #[test]
    fn an_encoded_request_parses_to_an_equal_one(
        code in 0..12u16, flags in 0..32u16, cookie: u64, offset: u64, len: u32, extended: bool,
    ) {
        let command = Command::from_code(code);
        let payload_len = if command == Command::Write { len.into() } else { 0 };
        let flags = CommandFlags::from_bits_retain(flags);
        let request = Request { command, flags, cookie, offset, len: len.into(), payload_len };
        let mut bytes = [0; 40];
        let put = request.put(&mut bytes, extended);
        proptest::prop_assert_eq!(put, header_len(extended));
        let (back, taken) = parse(&bytes, extended).unwrap().unwrap();
        let expected = if extended && command == Command::Write {
            request.with_flags(CommandFlags::PAYLOAD_LEN)
        } else {
            request
        };
        proptest::prop_assert_eq!((back, taken), (expected, put));
    }

    #[test]
    fn no_bytes_make_the_parser_panic(bytes: Vec<u8>, extended: bool) {
        if let Ok(Some((_, taken))) = parse(&bytes, extended) {
            proptest::prop_assert!(taken <= bytes.len());
        }
    }
}
