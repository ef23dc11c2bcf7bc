use block::Bytes;

use super::*;
use crate::nbd::client::{Descriptor, Reply, parse_reply};
use crate::nbd::export::{BlockSizes, ExportId, ExportInfo};
use crate::nbd::request::Command;

const GIB: u64 = 1 << 30;

fn session(style: Style, minimum: u32, size: u64) -> Session {
    let info = ExportInfo::new(size);
    Session {
        export: ExportId(0),
        name: String::new(),
        size,
        flags: info.transmission_flags(style, true),
        style,
        block_sizes: BlockSizes { minimum, ..info.block_sizes },
        block_sizes_agreed: true,
        base_allocation: Some(1),
        tls: false,
    }
}

fn data(len: u64) -> Extent {
    Extent { len: Bytes(len), hole: false, zero: false }
}

fn hole(len: u64) -> Extent {
    Extent { len: Bytes(len), hole: true, zero: true }
}

fn zero(len: u64) -> Extent {
    Extent { len: Bytes(len), hole: false, zero: true }
}

/// Parses the reply for `extents` as a client does; the reply buffer has space for `room` descriptors.
fn parsed(session: &Session, one: bool, len: u64, room: usize, extents: &[Extent]) -> Vec<(u64, u64)> {
    let flags = CommandFlags::empty().with_if(one, CommandFlags::REQ_ONE);
    let request = Request::new(Command::BlockStatus, 3, 0, len).with_flags(flags);
    let query = StatusQuery::new(1, &request, len);
    let mut out = vec![0; reply_len(session.style, room)];
    let taken = put_block_status(&mut out, session, &request, &query, extents.iter().copied()).unwrap();
    let (reply, parsed) = parse_reply(&out[..taken], session.style).unwrap().unwrap();
    assert_eq!(parsed, taken);
    match reply {
        Reply::Status { cookie: 3, context: 1, descriptors, done: true } => {
            descriptors.map(|Descriptor { len, state }| (len, state)).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn equal_neighbours_become_one_descriptor() {
    for style in [Style::Structured, Style::Extended] {
        let session = session(style, 1, GIB);
        let extents = [data(10), data(20), hole(5), hole(5), zero(24)];
        assert_eq!(parsed(&session, false, 64, 9, &extents), [(30, 0), (10, 3), (24, 2)]);
    }
}

#[test]
fn one_descriptor_ends_with_the_range() {
    let session = session(Style::Structured, 1, GIB);
    assert_eq!(parsed(&session, true, 64, 9, &[hole(4096)]), [(64, 3)]);
    assert_eq!(parsed(&session, true, 64, 9, &[hole(16), data(48)]), [(16, 3)]);
    assert_eq!(parsed(&session, true, 64, 9, &[hole(16), hole(16), data(48)]), [(32, 3)]);
}

#[test]
fn only_the_last_descriptor_goes_past_the_range_and_never_past_the_export() {
    let session = session(Style::Structured, 1, 100);
    assert_eq!(parsed(&session, false, 64, 9, &[data(10), hole(80), data(10)]), [(10, 0), (80, 3)]);
    assert_eq!(parsed(&session, false, 64, 9, &[data(64), hole(10)]), [(64, 0)]);
    assert_eq!(parsed(&session, false, 64, 9, &[data(10), hole(1 << 40)]), [(10, 0), (90, 3)]);
}

#[test]
fn descriptors_stop_where_there_is_no_more_room() {
    let session = session(Style::Extended, 1, GIB);
    let extents = [data(1), hole(1), data(1), hole(61)];
    assert_eq!(parsed(&session, false, 64, 2, &extents), [(1, 0), (1, 3)]);
    assert_eq!(parsed(&session, false, 64, 1, &extents), [(1, 0)]);
}

#[test]
fn a_compact_length_stays_within_32_bits_and_an_extended_one_need_not() {
    let size = 3 << 40;
    let compact = session(Style::Structured, 1, size);
    let range = u64::from(u32::MAX);
    assert_eq!(parsed(&compact, false, range, 9, &[hole(size)]), [(COMPACT_MAX, 3), (COMPACT_MAX, 3)]);
    assert_eq!(parsed(&compact, true, range, 9, &[hole(size)]), [(COMPACT_MAX, 3)]);
    assert_eq!(parsed(&compact, false, 512, 9, &[hole(size)]), [(COMPACT_MAX, 3)]);
    assert_eq!(parsed(&session(Style::Extended, 1, size), false, 512, 9, &[hole(size)]), [(size, 3)]);
}

#[test]
fn a_block_of_several_states_gets_what_holds_for_all_of_it() {
    let session = session(Style::Structured, 512, GIB);
    // 100 bytes of data, then a hole: the first block is plain data.
    assert_eq!(parsed(&session, false, 2048, 9, &[data(100), hole(1948)]), [(512, 0), (1536, 3)]);
    // A hole and allocated zeroes share a block, which reads as zeroes.
    let extents = [hole(600), zero(424), data(1024)];
    assert_eq!(parsed(&session, false, 2048, 9, &extents), [(512, 3), (512, 2), (1024, 0)]);
    // Short extents fill one block together.
    let extents = [hole(200), zero(200), hole(112), data(512)];
    assert_eq!(parsed(&session, false, 1024, 9, &extents), [(512, 2), (512, 0)]);
}

#[test]
fn a_block_that_is_only_partly_known_is_plain_data() {
    let session = session(Style::Structured, 4096, GIB);
    assert_eq!(parsed(&session, false, 4096, 9, &[hole(100)]), [(4096, 0)]);
    // The extents end within a block that follows a complete descriptor: that block is left for the next
    // query.
    assert_eq!(parsed(&session, false, 8192, 9, &[hole(4196)]), [(4096, 3)]);
}

#[test]
fn no_extents_make_no_reply() {
    let session = session(Style::Structured, 1, GIB);
    let request = Request::new(Command::BlockStatus, 3, 0, 64);
    let query = StatusQuery::new(1, &request, 64);
    assert_eq!(put_block_status(&mut [0; 64], &session, &request, &query, []), None);
}

proptest::proptest! {
    /// The protocol's rules, checked on random extents against a map of bytes.
    #[test]
    fn descriptors_follow_the_protocol(
        extents in proptest::collection::vec((1..3000u64, 0..4u8), 1..20),
        len in 1..16u64, one: bool, room in 1..9usize, unit in proptest::sample::select(vec![1u64, 512, 1024]),
        extended: bool,
    ) {
        let style = if extended { Style::Extended } else { Style::Structured };
        let (len, size) = (len * unit, 64 << 10);
        let extents: Vec<_> = extents.iter()
            .map(|&(len, state)| Extent { len: Bytes(len), hole: state & 1 != 0, zero: state & 2 != 0 })
            .collect();
        let map: Vec<u32> = extents.iter()
            .flat_map(|extent| std::iter::repeat_n(allocation_state(extent), extent.len.0 as usize))
            .collect();
        let parsed = parsed(&session(style, unit as u32, size), one, len, room, &extents);

        let most = if one { 1 } else { room };
        proptest::prop_assert!(!parsed.is_empty() && parsed.len() <= most);
        let (mut at, mut before) = (0, None);
        for &(length, state) in &parsed {
            proptest::prop_assert!(length > 0 && length % unit == 0);
            proptest::prop_assert!(at < len, "only the last descriptor goes past the range");
            proptest::prop_assert_ne!(before.replace(state), Some(state), "neighbours differ");
            for byte in at..at + length {
                let real = map.get(byte as usize).copied().unwrap_or(0);
                proptest::prop_assert_eq!(state as u32 & !real, 0, "a flag is never claimed falsely");
            }
            at += length;
        }
        proptest::prop_assert!(at <= size && (!one || at <= len));
    }
}
