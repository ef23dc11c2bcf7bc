use super::*;
use crate::nbd::client::parse_reply;
use crate::nbd::reply::Style;

const READ: Request = Request::new(Command::Read, 1, 1000, 100);
const MORE: Result<Progress, Fatal> = Ok(Progress::More);
const WELL: Result<Progress, Fatal> = Ok(Progress::Ended(None));

fn data(offset: u64, len: u64, done: bool) -> Reply<'static> {
    Reply::Data { cookie: 1, offset, len, done }
}

fn error(offset: Option<u64>, done: bool) -> Reply<'static> {
    Reply::Error { cookie: 1, error: NbdError::Io, message: b"", offset, done }
}

fn status(context: u32, bytes: &[u8]) -> Reply<'_> {
    let (reply, _) = parse_reply(bytes, Style::Structured).unwrap().unwrap();
    match reply {
        Reply::Status { cookie, descriptors, done, .. } => {
            Reply::Status { cookie, context, descriptors, done }
        }
        other => panic!("{other:?}"),
    }
}

fn track(request: Request) -> Track {
    Track::new(request, Style::Structured, Some(1))
}

#[test]
fn chunks_in_any_order_make_a_read_whole() {
    let mut track = track(READ);
    assert_eq!(track.accept(&data(1050, 50, false)), MORE);
    assert_eq!(track.accept(&Reply::Hole { cookie: 1, offset: 1000, len: 50, done: false }), MORE);
    assert_eq!(track.accept(&Reply::End { cookie: 1 }), WELL);
}

#[test]
fn content_outside_the_request_or_too_much_of_it_is_refused() {
    for (offset, len) in [(999, 10), (1091, 10), (1100, 1), (u64::MAX, 2), (0, 1)] {
        assert!(track(READ).accept(&data(offset, len, true)).is_err(), "{offset} {len}");
    }
    let mut twice = track(READ);
    assert_eq!(twice.accept(&data(1000, 100, false)), MORE);
    assert!(twice.accept(&data(1000, 1, false)).is_err());
}

#[test]
fn success_without_all_of_the_data_is_refused() {
    assert!(track(READ).accept(&data(1000, 99, true)).is_err());
    assert!(track(READ).accept(&Reply::End { cookie: 1 }).is_err());
}

#[test]
fn an_error_excuses_missing_data_and_the_first_one_counts() {
    let mut track = track(READ);
    assert_eq!(track.accept(&error(Some(1010), false)), MORE);
    let other = Reply::Error { cookie: 1, error: NbdError::NoMem, message: b"", offset: None, done: false };
    assert_eq!(track.accept(&other), MORE);
    assert_eq!(track.accept(&Reply::End { cookie: 1 }), Ok(Progress::Ended(Some(NbdError::Io))));
}

#[test]
fn an_error_outside_the_request_is_refused() {
    assert!(track(READ).accept(&error(Some(1100), true)).is_err());
    assert!(track(READ).accept(&error(Some(999), true)).is_err());
}

#[test]
fn fragments_are_refused_with_df() {
    let mut track = track(READ.with_flags(CommandFlags::DF));
    assert_eq!(track.accept(&data(1000, 50, false)), MORE);
    assert!(track.accept(&data(1050, 50, true)).is_err());
}

#[test]
fn a_simple_reply_to_a_read_is_only_right_in_the_simple_style() {
    let reply = Reply::Simple { cookie: 1, error: None };
    assert!(track(READ).accept(&reply).is_err());
    assert_eq!(Track::new(READ, Style::Simple, None).accept(&reply), WELL);
    assert_eq!(track(Request::write(1, 0, 1)).accept(&reply), WELL);
}

#[test]
fn data_for_other_commands_is_refused() {
    assert!(track(Request::write(1, 1000, 100)).accept(&data(1000, 100, true)).is_err());
}

#[test]
fn a_status_comes_once_for_its_context() {
    let mut bytes = [0; 128];
    let query = Request::new(Command::BlockStatus, 1, 0, 100);
    let len = Style::Structured.put_chunk_header(&mut bytes, &query, false, 5, 20);
    bytes[len + 7] = 1;
    bytes[len + 15] = 1;
    let chunk = &bytes[..len + 20];

    let mut whole = track(query);
    assert_eq!(whole.accept(&status(1, chunk)), MORE);
    assert!(whole.accept(&status(1, chunk)).is_err(), "twice");
    assert!(track(query).accept(&status(2, chunk)).is_err(), "another context");
    assert!(track(READ).accept(&status(1, chunk)).is_err(), "to a read");
    assert!(track(query.with_flags(CommandFlags::REQ_ONE)).accept(&status(1, chunk)).is_err(), "two of one");
    assert!(track(query).accept(&Reply::End { cookie: 1 }).is_err(), "none at all");
}
