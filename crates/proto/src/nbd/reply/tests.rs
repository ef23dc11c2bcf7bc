use super::*;

const READ: Request = Request::new(Command::Read, 0x0102_0304_0506_0708, 0x1000, 0x200);
const WRITE: Request = Request::write(9, 0, 512);

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let value = |digit: u8| char::from(digit).to_digit(16).unwrap() as u8;
    digits.chunks(2).map(|pair| value(pair[0]) << 4 | value(pair[1])).collect()
}

fn written(encode: impl FnOnce(&mut [u8]) -> usize) -> Vec<u8> {
    let mut out = [0xaa; 128];
    let len = encode(&mut out);
    out[..len].to_vec()
}

#[test]
fn a_data_header_has_the_documented_layout() {
    for (style, bytes) in [
        (Style::Simple, "67446698 00000000 0102030405060708"),
        (Style::Structured, "668e33ef 0001 0001 0102030405060708 00000208 0000000000001000"),
        (
            Style::Extended,
            "6e8a278c 0001 0001 0102030405060708 0000000000001000 0000000000000208 0000000000001000",
        ),
    ] {
        let out = written(|out| style.put_data_header(out, &READ, 0x1000, 0x200, true));
        assert_eq!(out, hex(bytes), "{style:?}");
        assert_eq!(out.len(), style.data_header_len());
    }
}

#[test]
fn done_marks_the_last_chunk_only() {
    let out = written(|out| Style::Structured.put_data_header(out, &READ, 0x1100, 0x100, false));
    assert_eq!(out, hex("668e33ef 0000 0001 0102030405060708 00000108 0000000000001100"));
}

#[test]
fn a_hole_has_the_documented_layout() {
    let out = written(|out| Style::Structured.put_hole(out, &READ, 0x1000, 0x200, true));
    assert_eq!(out, hex("668e33ef 0001 0002 0102030405060708 0000000c 0000000000001000 00000200"));
    let out = written(|out| Style::Extended.put_hole(out, &READ, 0x1000, 0x200, true));
    assert_eq!(out.len(), 44);
    assert!(out.len() <= MAX_FIXED);
}

#[test]
fn a_write_is_answered_in_the_shortest_form_its_style_allows() {
    let ok = "67446698 00000000 0000000000000009";
    for (style, bytes) in [
        (Style::Simple, ok),
        (Style::Structured, ok),
        (Style::Extended, "6e8a278c 0001 0000 0000000000000009 0000000000000000 0000000000000000"),
    ] {
        assert_eq!(written(|out| style.put_end(out, &WRITE, None)), hex(bytes), "{style:?}");
    }
}

#[test]
fn a_failed_read_is_an_error_chunk_where_there_are_chunks() {
    let error = Some(NbdError::Io);
    for (style, bytes) in [
        (Style::Simple, "67446698 00000005 0102030405060708"),
        (Style::Structured, "668e33ef 0001 8001 0102030405060708 00000006 00000005 0000"),
        (
            Style::Extended,
            "6e8a278c 0001 8001 0102030405060708 0000000000001000 0000000000000006 00000005 0000",
        ),
    ] {
        assert_eq!(written(|out| style.put_end(out, &READ, error)), hex(bytes), "{style:?}");
    }
}

#[test]
fn an_error_at_an_offset_has_its_message_before_the_offset() {
    let out = written(|out| {
        Style::Structured.put_error(out, &READ, NbdError::NoSpace, "full", Some(0x1180), false)
    });
    let bytes = "668e33ef 0000 8002 0102030405060708 00000012 0000001c 0004 66756c6c 0000000000001180";
    assert_eq!(out, hex(bytes));
}

#[test]
fn a_message_is_truncated_to_whole_characters_and_to_the_space() {
    let mut out = [0; wire::CHUNK_LEN + 6 + 3];
    let len = Style::Structured.put_error(&mut out, &READ, NbdError::Io, "aüü", None, true);
    assert_eq!(len, wire::CHUNK_LEN + 6 + 3);
    let mut out = [0; wire::CHUNK_LEN + 6 + 2];
    let len = Style::Structured.put_error(&mut out, &READ, NbdError::Io, "aüü", None, true);
    assert_eq!((len, &out[24..]), (wire::CHUNK_LEN + 6 + 1, &[0, 1, b'a', 0][..]));
    let mut out = vec![0; 10_000];
    let len = Style::Extended.put_error(&mut out, &READ, NbdError::Io, &"x".repeat(9000), None, true);
    assert_eq!(len, wire::EXTENDED_CHUNK_LEN + 6 + wire::MAX_STRING);
}

#[test]
fn every_fixed_header_fits_max_fixed() {
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let mut out = [0; MAX_FIXED];
        style.put_end(&mut out, &READ, Some(NbdError::Io));
        style.put_data_header(&mut out, &READ, READ.offset, READ.len as u32, true);
        style.put_error(&mut out, &READ, NbdError::Io, "", Some(0), true);
        if style != Style::Simple {
            style.put_hole(&mut out, &READ, 0, 1, true);
        }
    }
}
