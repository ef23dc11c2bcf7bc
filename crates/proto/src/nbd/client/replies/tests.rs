use super::*;

fn chunk(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = wire::STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(7u64.to_be_bytes());
    bytes.extend((body.len() as u32).to_be_bytes());
    bytes.extend(body);
    bytes
}

fn extended(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = wire::EXTENDED_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend(1u16.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(7u64.to_be_bytes());
    bytes.extend(0u64.to_be_bytes());
    bytes.extend((body.len() as u64).to_be_bytes());
    bytes.extend(body);
    bytes
}

#[track_caller]
fn fails(bytes: &[u8], style: Style) -> Fatal {
    parse_reply(bytes, style).expect_err("it is malformed")
}

#[test]
fn an_incomplete_message_is_not_parsed() {
    let bytes = chunk(chunk::ERROR, 1, &[0, 0, 0, 5, 0, 2, b'n', b'o']);
    for len in 0..bytes.len() {
        assert_eq!(parse_reply(&bytes[..len], Style::Structured), Ok(None), "{len} bytes");
    }
    let (reply, taken) = parse_reply(&bytes, Style::Structured).unwrap().unwrap();
    assert_eq!(taken, bytes.len());
    let message = b"no";
    assert_eq!(reply, Reply::Error { cookie: 7, error: NbdError::Io, message, offset: None, done: true });
}

#[test]
fn each_style_has_its_magic() {
    let messages = [
        [&wire::SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &[0; 12]].concat(),
        chunk(chunk::NONE, 1, &[]),
        extended(chunk::NONE, &[]),
    ];
    let right = [[true, false, false], [true, true, false], [false, false, true]];
    for (style, right) in [Style::Simple, Style::Structured, Style::Extended].into_iter().zip(right) {
        for (message, right) in messages.iter().zip(right) {
            let parsed = parse_reply(message, style);
            assert_eq!(parsed.is_ok(), right, "{style:?} {message:x?}");
            if !right {
                assert!(matches!(parsed, Err(Fatal::BadMagic { .. })));
            }
        }
    }
}

#[test]
fn data_is_left_to_the_caller() {
    let mut bytes = chunk(chunk::OFFSET_DATA, 0, &[0; 8 + 100]);
    bytes.truncate(28);
    let (reply, taken) = parse_reply(&bytes, Style::Structured).unwrap().unwrap();
    assert_eq!((reply, taken), (Reply::Data { cookie: 7, offset: 0, len: 100, done: false }, 28));
}

#[test]
fn a_length_that_does_not_fit_its_type_is_fatal() {
    for (kind, len) in [
        (chunk::NONE, 1),
        (chunk::OFFSET_DATA, 8),
        (chunk::OFFSET_HOLE, 11),
        (chunk::OFFSET_HOLE, 13),
        (chunk::BLOCK_STATUS, 4),
        (chunk::BLOCK_STATUS, 13),
        (chunk::ERROR, 5),
        (chunk::ERROR_OFFSET, 13),
        (chunk::ERR | 77, 5),
    ] {
        let bytes = chunk(kind, 1, &vec![0; len]);
        assert!(matches!(fails(&bytes, Style::Structured), Fatal::ChunkLength { .. }), "{kind:#x} {len}");
    }
    for len in [8, 16, 23, 25] {
        let bytes = extended(chunk::BLOCK_STATUS_EXT, &vec![1; len]);
        assert!(matches!(fails(&bytes, Style::Extended), Fatal::ChunkLength { .. }), "{len}");
    }
}

#[test]
fn an_unknown_type_is_fatal_unless_it_is_an_error() {
    for kind in [3, 4, 7, 0x7fff] {
        assert_eq!(fails(&chunk(kind, 1, &[]), Style::Structured), Fatal::UnexpectedChunk { kind });
    }
    let bytes = chunk(chunk::ERR | 77, 1, &[0, 0, 0, 28, 0, 0, 9, 9]);
    let (reply, taken) = parse_reply(&bytes, Style::Structured).unwrap().unwrap();
    assert!(matches!(reply, Reply::Error { error: NbdError::NoSpace, offset: None, done: true, .. }));
    assert_eq!(taken, bytes.len());
}

#[test]
fn an_extended_status_needs_extended_headers() {
    let kind = chunk::BLOCK_STATUS_EXT;
    assert_eq!(fails(&chunk(kind, 1, &[1; 24]), Style::Structured), Fatal::UnexpectedChunk { kind });
}

#[test]
fn the_count_of_descriptors_is_zero_or_correct() {
    let body = |count: u32| {
        [&1u32.to_be_bytes()[..], &count.to_be_bytes(), &9u64.to_be_bytes(), &2u64.to_be_bytes()].concat()
    };
    for count in [0, 1] {
        let bytes = extended(chunk::BLOCK_STATUS_EXT, &body(count));
        let (reply, _) = parse_reply(&bytes, Style::Extended).unwrap().unwrap();
        let Reply::Status { descriptors, .. } = reply else { panic!("{reply:?}") };
        assert_eq!(descriptors.collect::<Vec<_>>(), [Descriptor { len: 9, state: 2 }]);
    }
    let bytes = extended(chunk::BLOCK_STATUS_EXT, &body(2));
    assert!(matches!(fails(&bytes, Style::Extended), Fatal::ChunkLength { .. }));
}

#[test]
fn holes_and_descriptors_of_length_zero_are_refused() {
    fails(&chunk(chunk::OFFSET_HOLE, 1, &[0; 12]), Style::Structured);
    fails(&chunk(chunk::BLOCK_STATUS, 1, &[0; 12]), Style::Structured);
}

#[test]
fn a_none_chunk_that_is_not_the_last_is_fatal() {
    assert_eq!(fails(&chunk(chunk::NONE, 0, &[]), Style::Structured), Fatal::UnexpectedChunk { kind: 0 });
}

#[test]
fn a_message_longer_than_its_chunk_is_fatal() {
    for kind in [chunk::ERROR, chunk::ERR | 77] {
        let bytes = chunk(kind, 1, &[0, 0, 0, 5, 0, 3, b'n', b'o']);
        assert!(matches!(fails(&bytes, Style::Structured), Fatal::ChunkLength { .. }));
    }
    // The chunk must have space for the offset as well.
    let bytes = chunk(chunk::ERROR_OFFSET, 1, &[0, 0, 0, 5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(matches!(fails(&bytes, Style::Structured), Fatal::ChunkLength { .. }));
}

#[test]
fn flags_that_are_not_known_are_ignored() {
    let bytes = chunk(chunk::NONE, 0xffff, &[]);
    assert!(matches!(parse_reply(&bytes, Style::Structured), Ok(Some((Reply::End { cookie: 7 }, 20)))));
}

#[test]
fn a_chunk_that_is_too_long_is_refused_by_its_header() {
    let mut bytes = extended(chunk::ERROR, &[0; 6]);
    bytes[24..32].copy_from_slice(&(MAX_CHUNK_BYTES + 1).to_be_bytes());
    assert!(matches!(fails(&bytes, Style::Extended), Fatal::PayloadTooLong { .. }));
}
