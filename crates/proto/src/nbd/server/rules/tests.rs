use super::*;
use crate::nbd::export::{BlockSizes, ExportId, ExportInfo};
use crate::nbd::reply::Style;

const MIB: u64 = 1 << 20;
const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

/// Returns a session on an export of 16 MiB with blocks of 512 bytes and payloads of at most 1 MiB.
fn session(style: Style, change: impl FnOnce(&mut ExportInfo)) -> Session {
    let mut info = ExportInfo {
        block_sizes: BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 20 },
        ..ExportInfo::new(16 * MIB)
    };
    change(&mut info);
    Session {
        export: ExportId(0),
        name: String::new(),
        size: info.size,
        flags: info.transmission_flags(style, style != Style::Simple),
        style,
        block_sizes: info.block_sizes,
        block_sizes_agreed: true,
        base_allocation: (style != Style::Simple).then_some(7),
        tls: false,
    }
}

/// Returns a write as the parser would: with extended headers it has `PAYLOAD_LEN`.
fn write(style: Style, offset: u64, len: u64) -> Request {
    let request = Request::write(1, offset, len);
    if style == Style::Extended { request.with_flags(CommandFlags::PAYLOAD_LEN) } else { request }
}

fn request(style: Style, command: Command, offset: u64, len: u64) -> Request {
    match command {
        Command::Write => write(style, offset, len),
        _ => Request::new(command, 1, offset, len),
    }
}

#[track_caller]
fn refused(session: &Session, request: Request, error: NbdError) {
    assert_eq!(check(session, &request), Err(Refused::Reply(error)), "{:?} {request:?}", session.style);
}

#[track_caller]
fn submitted(session: &Session, request: Request) -> Submission {
    match check(session, &request) {
        Ok(Accepted::Submit(order)) => order,
        other => panic!("{:?} {request:?} became {other:?}", session.style),
    }
}

const RANGED: [(Command, Op, NbdError); 5] = [
    (Command::Read, Op::Read, NbdError::Invalid),
    (Command::Write, Op::Write, NbdError::NoSpace),
    (Command::Trim, Op::Discard, NbdError::NoSpace),
    (Command::Cache, Op::Prefetch, NbdError::Invalid),
    (Command::WriteZeroes, Op::WriteZeroes, NbdError::NoSpace),
];

#[test]
fn a_command_in_bounds_becomes_its_operation() {
    for style in STYLES {
        let session = session(style, |_| {});
        for (command, op, _) in RANGED {
            let order = submitted(&session, request(style, command, 16 * MIB - 4096, 4096));
            let (offset, len) = (Bytes(16 * MIB - 4096), Bytes(4096));
            assert_eq!(order, Submission { op, flags: Flags::empty(), offset, len });
        }
    }
}

#[test]
fn past_the_end_is_enospc_for_writes_and_einval_for_others() {
    for style in STYLES {
        let session = session(style, |_| {});
        for (command, _, error) in RANGED {
            for (offset, len) in
                [(16 * MIB - 512, 1024), (16 * MIB, 512), (u64::MAX - 511, 512), (1 << 63, 512)]
            {
                refused(&session, request(style, command, offset, len), error);
            }
        }
    }
    let query = Request::new(Command::BlockStatus, 1, 16 * MIB - 512, 1024);
    refused(&session(Style::Structured, |_| {}), query, NbdError::Invalid);
}

#[test]
fn an_unaligned_request_is_einval() {
    for style in STYLES {
        let session = session(style, |_| {});
        for (command, ..) in RANGED {
            refused(&session, request(style, command, 1, 512), NbdError::Invalid);
            refused(&session, request(style, command, 0, 513), NbdError::Invalid);
        }
    }
}

#[test]
fn a_request_of_length_zero_succeeds() {
    for style in STYLES {
        let session = session(style, |_| {});
        for (command, ..) in RANGED {
            let empty = check(&session, &request(style, command, 16 * MIB, 0));
            assert_eq!(empty, Ok(Accepted::Empty), "{style:?} {command:?}");
        }
    }
}

#[test]
fn a_write_to_a_read_only_export_is_eperm() {
    for style in STYLES {
        let session = session(style, |info| info.read_only = true);
        for command in [Command::Write, Command::Trim, Command::WriteZeroes] {
            refused(&session, request(style, command, 0, 512), NbdError::Perm);
        }
        submitted(&session, request(style, Command::Read, 0, 512));
        submitted(&session, Request::new(Command::Flush, 1, 0, 0));
    }
}

#[test]
fn data_above_the_maximum_is_einval_but_other_ranges_may_be_longer() {
    for style in STYLES {
        let session = session(style, |_| {});
        refused(&session, request(style, Command::Read, 0, MIB + 512), NbdError::Invalid);
        for command in [Command::Trim, Command::Cache, Command::WriteZeroes] {
            assert_eq!(submitted(&session, request(style, command, 0, 16 * MIB)).len, Bytes(16 * MIB));
        }
    }
}

#[test]
fn an_unfragmented_read_above_the_maximum_is_eoverflow() {
    for style in [Style::Structured, Style::Extended] {
        let session = session(style, |_| {});
        let read = Request::new(Command::Read, 1, 0, MIB + 512).with_flags(CommandFlags::DF);
        refused(&session, read, NbdError::Overflow);
        // DF MUST be supported for reads of up to 64 KiB.
        submitted(&session, Request::new(Command::Read, 1, 0, 65536).with_flags(CommandFlags::DF));
    }
}

#[test]
fn a_long_write_is_refused_but_accepted_up_to_the_portable_length() {
    let compact = session(Style::Structured, |_| {});
    refused(&compact, write(Style::Structured, 0, MIB + 512), NbdError::Invalid);
    refused(&compact, write(Style::Structured, 0, 1 << 25), NbdError::NoSpace);
    let too_long = check(&compact, &write(Style::Structured, 0, (1 << 25) + 1));
    assert!(matches!(too_long, Err(Refused::Drop(Fatal::PayloadTooLong { .. }))));
}

#[test]
fn an_extended_payload_above_the_maximum_ends_the_connection() {
    let extended = session(Style::Extended, |_| {});
    for command in [Command::Write, Command::Read, Command::Disc, Command::Other(99)] {
        let payload_len = MIB + 1;
        let request = Request { payload_len, len: payload_len, ..Request::new(command, 1, 0, 0) }
            .with_flags(CommandFlags::PAYLOAD_LEN);
        assert!(matches!(check(&extended, &request), Err(Refused::Drop(_))), "{command:?}");
    }
    let last = write(Style::Extended, 0, MIB);
    assert_eq!(submitted(&extended, last).len, Bytes(MIB));
}

#[test]
fn an_extended_write_without_the_payload_flag_is_einval() {
    let extended = session(Style::Extended, |_| {});
    refused(&extended, Request::new(Command::Write, 1, 0, 512), NbdError::Invalid);
}

#[test]
fn the_payload_flag_is_einval_where_no_payload_belongs() {
    let payload = CommandFlags::PAYLOAD_LEN;
    for command in [Command::Read, Command::Trim, Command::Cache, Command::WriteZeroes, Command::Flush] {
        for style in STYLES {
            refused(
                &session(style, |_| {}),
                Request::new(command, 1, 0, 0).with_flags(payload),
                NbdError::Invalid,
            );
        }
    }
    // Compact writes must not have `PAYLOAD_LEN`.
    refused(
        &session(Style::Simple, |_| {}),
        Request::write(1, 0, 512).with_flags(payload),
        NbdError::Invalid,
    );
}

#[test]
fn a_flag_is_only_valid_where_documented() {
    use CommandFlags as F;
    let specific = [
        (F::NO_HOLE, Command::WriteZeroes),
        (F::FAST_ZERO, Command::WriteZeroes),
        (F::DF, Command::Read),
        (F::REQ_ONE, Command::BlockStatus),
    ];
    let commands = [
        Command::Read,
        Command::Write,
        Command::Trim,
        Command::Cache,
        Command::WriteZeroes,
        Command::BlockStatus,
    ];
    let session = session(Style::Structured, |_| {});
    for (flag, owner) in specific {
        for command in commands {
            let request = request(Style::Structured, command, 0, 512).with_flags(flag);
            if command == owner {
                assert!(check(&session, &request).is_ok(), "{flag:?} {command:?}");
            } else {
                refused(&session, request, NbdError::Invalid);
            }
        }
    }
}

#[test]
fn a_flag_that_is_unknown_is_einval_with_every_command() {
    let session = session(Style::Extended, |_| {});
    for code in [0, 1, 3, 4, 5, 6, 7, 8] {
        for bit in 6..16 {
            let request = request(Style::Extended, Command::from_code(code), 0, 0);
            refused(
                &session,
                request.with_flags(CommandFlags::from_bits_retain(1 << bit)),
                NbdError::Invalid,
            );
        }
    }
}

#[test]
fn fua_is_valid_with_every_command_and_affects_writes() {
    for style in STYLES {
        let session = session(style, |_| {});
        for (command, op, _) in RANGED {
            let order = submitted(&session, request(style, command, 0, 512).with_flags(CommandFlags::FUA));
            assert_eq!(order.flags.contains(Flags::FUA), op.is_write(), "{command:?}");
        }
        let flush = Request::new(Command::Flush, 1, 0, 0).with_flags(CommandFlags::FUA);
        assert_eq!(submitted(&session, flush).op, Op::Flush);
    }
}

#[test]
fn commands_that_were_not_advertised_are_einval() {
    let style = Style::Structured;
    let read_df = Request::new(Command::Read, 1, 0, 512).with_flags(CommandFlags::DF);
    let fast = Request::new(Command::WriteZeroes, 1, 0, 512).with_flags(CommandFlags::FAST_ZERO);
    let fua = Request::write(1, 0, 512).with_flags(CommandFlags::FUA);
    let plain = |command| Request::new(command, 1, 0, 512);
    type Change = fn(&mut ExportInfo);
    let table: [(Change, Request); 7] = [
        (|info| info.can_flush = false, Request::new(Command::Flush, 1, 0, 0)),
        (|info| info.can_fua = false, fua),
        (|info| info.can_trim = false, plain(Command::Trim)),
        (|info| info.can_zeroes = false, plain(Command::WriteZeroes)),
        (|info| info.can_fast_zero = false, fast),
        (|info| info.can_cache = false, plain(Command::Cache)),
        (|info| info.can_df = false, read_df),
    ];
    for (change, request) in table {
        assert!(check(&session(style, |_| {}), &request).is_ok(), "{request:?}");
        refused(&session(style, change), request, NbdError::Invalid);
    }
    refused(&session(Style::Simple, |_| {}), read_df, NbdError::Invalid);
}

#[test]
fn write_zeroes_flags_are_translated() {
    let flags = CommandFlags::NO_HOLE.union(CommandFlags::FAST_ZERO);
    let zeroes = Request::new(Command::WriteZeroes, 1, 0, 512).with_flags(flags);
    let order = submitted(&session(Style::Simple, |_| {}), zeroes);
    assert_eq!(order.flags, Flags::NO_UNMAP.union(Flags::FAST_ZERO));
}

#[test]
fn a_flush_with_a_range_is_einval() {
    let session = session(Style::Simple, |_| {});
    refused(&session, Request::new(Command::Flush, 1, 512, 0), NbdError::Invalid);
    refused(&session, Request::new(Command::Flush, 1, 0, 512), NbdError::Invalid);
}

#[test]
fn an_unknown_command_is_einval() {
    for style in STYLES {
        refused(&session(style, |_| {}), Request::new(Command::Other(8), 1, 0, 0), NbdError::Invalid);
    }
}

#[test]
fn a_disconnect_is_accepted_with_any_arguments() {
    let request = Request::new(Command::Disc, 1, 5, 5).with_flags(CommandFlags::from_bits_retain(0xffff));
    assert_eq!(check(&session(Style::Simple, |_| {}), &request), Ok(Accepted::Disconnect));
}

#[test]
fn a_status_query_needs_a_context_and_a_length() {
    let query = Request::new(Command::BlockStatus, 1, 0, 4096);
    refused(&session(Style::Simple, |_| {}), query, NbdError::Invalid);
    let session = session(Style::Structured, |_| {});
    refused(&session, Request::new(Command::BlockStatus, 1, 0, 0), NbdError::Invalid);
    let expected = StatusQuery { context: 7, offset: 0, len: 4096, one: false };
    assert_eq!(check(&session, &query), Ok(Accepted::Status(expected)));
    let one = query.with_flags(CommandFlags::REQ_ONE);
    assert_eq!(check(&session, &one), Ok(Accepted::Status(StatusQuery { one: true, ..expected })));
}

#[test]
fn a_status_payload_has_one_context() {
    let session = session(Style::Extended, |_| {});
    let with_payload = |payload_len| {
        Request { payload_len, len: payload_len, ..Request::new(Command::BlockStatus, 1, 512, 0) }
            .with_flags(CommandFlags::PAYLOAD_LEN)
    };
    let request = with_payload(12);
    assert_eq!(check(&session, &request), Ok(Accepted::StatusPayload));
    let payload = |len: u64, context: u32| [&len.to_be_bytes()[..], &context.to_be_bytes()].concat();
    let expected = StatusQuery { context: 7, offset: 512, len: 4096, one: false };
    assert_eq!(status_query(&session, &request, &payload(4096, 7)), Ok(expected));

    for (len, context) in [(4096, 8), (0, 7), (17 * MIB, 7), (513, 7), (u64::MAX, 7)] {
        let query = status_query(&session, &request, &payload(len, context));
        assert_eq!(query, Err(NbdError::Invalid), "{len} {context}");
    }
    // These lengths mean no context, an incomplete one, a duplicate, and no payload.
    for payload_len in [8, 11, 16, 4, 0] {
        refused(&session, with_payload(payload_len), NbdError::Invalid);
    }
}
