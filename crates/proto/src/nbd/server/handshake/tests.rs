use super::*;
use crate::nbd::fuzzing::catalogue;
use crate::nbd::reply::Style;
use crate::nbd::wire::{TransmissionFlags, info};

/// A reply to an option, as a client parses it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Answer {
    option: u32,
    kind: u32,
    data: Vec<u8>,
}

/// A client that sends exactly the given bytes.
struct Peer(Handshake);

impl Peer {
    fn new(config: Config) -> Peer {
        Peer::with_flags(config, ClientFlags::FIXED_NEWSTYLE.union(ClientFlags::NO_ZEROES))
    }

    fn with_flags(config: Config, flags: ClientFlags) -> Peer {
        let mut peer = Peer(Handshake::new(config));
        assert_eq!(peer.0.output().len(), wire::GREETING_LEN);
        peer.0.output().clear();
        assert_eq!(peer.send(&flags.bits().to_be_bytes()), []);
        peer
    }

    /// Sends bytes and returns the raw replies.
    fn send(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut back = std::mem::take(self.0.output());
        while !bytes.is_empty() {
            let taken = self.0.input(bytes, &catalogue());
            back.append(self.0.output());
            if taken == 0 {
                break;
            }
            bytes = &bytes[taken..];
        }
        back
    }

    fn ask(&mut self, option: u32, data: &[u8]) -> Vec<Answer> {
        let back = self.send(&message(option, data));
        answers(&back)
    }

    /// Returns the types of the replies to an option.
    fn kinds(&mut self, option: u32, data: &[u8]) -> Vec<u32> {
        self.ask(option, data).iter().map(|answer| answer.kind).collect()
    }

    fn session(&self) -> Session {
        match self.0.poll() {
            Step::Ready(session) => session,
            other => panic!("{other:?}"),
        }
    }

    fn closed(&self) -> Closed {
        match self.0.poll() {
            Step::Closed(why) => why,
            other => panic!("{other:?}"),
        }
    }
}

fn message(option: u32, data: &[u8]) -> Vec<u8> {
    let head = [&wire::OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes()].concat();
    [&head[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

fn answers(mut bytes: &[u8]) -> Vec<Answer> {
    let mut answers = Vec::new();
    while !bytes.is_empty() {
        assert_eq!(wire::u64_at(bytes, 0), Some(wire::OPTION_REPLY_MAGIC));
        let len = wire::u32_at(bytes, 16).unwrap() as usize;
        let (option, kind) = (wire::u32_at(bytes, 8).unwrap(), wire::u32_at(bytes, 12).unwrap());
        answers.push(Answer { option, kind, data: bytes[20..20 + len].to_vec() });
        bytes = &bytes[20 + len..];
    }
    answers
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn go(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((infos.len() as u16).to_be_bytes());
    infos.iter().for_each(|info| data.extend(info.to_be_bytes()));
    data
}

fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(string(query)));
    data
}

const PLAIN: Config = Config { tls: TlsMode::Off, list: true, structured: true, extended: true };
const OPTIONAL: Config = Config { tls: TlsMode::Optional, ..PLAIN };
const REQUIRED: Config = Config { tls: TlsMode::Required, ..PLAIN };

#[test]
fn the_greeting_has_the_documented_layout() {
    let mut handshake = Handshake::new(PLAIN);
    assert_eq!(handshake.output(), b"NBDMAGICIHAVEOPT\x00\x03");
}

#[test]
fn client_flags_that_are_unknown_close() {
    let peer = Peer::with_flags(PLAIN, ClientFlags::from_bits_retain(4));
    assert_eq!(peer.closed(), Closed::UnknownClientFlags(4));
}

#[test]
fn an_option_without_its_magic_closes() {
    let mut peer = Peer::new(PLAIN);
    assert_eq!(peer.send(b"GET / HTTP/1.1\r\n"), []);
    assert!(matches!(peer.closed(), Closed::BadMagic(_)));
}

#[test]
fn export_name_gets_zeroes_unless_no_zeroes_is_set() {
    let info = &catalogue()[0].info;
    for (flags, len) in
        [(ClientFlags::FIXED_NEWSTYLE, 134), (ClientFlags::all(), 10), (ClientFlags::empty(), 134)]
    {
        let mut peer = Peer::with_flags(PLAIN, flags);
        let back = peer.send(&message(option::EXPORT_NAME, b"disk"));
        assert_eq!(back.len(), len, "{flags:?}");
        assert_eq!(wire::u64_at(&back, 0), Some(info.size));
        assert_eq!(wire::u16_at(&back, 8), Some(info.transmission_flags(Style::Simple, false).bits()));
        assert!(back[10..].iter().all(|&byte| byte == 0));
        assert_eq!(peer.session().style, Style::Simple);
        assert!(!peer.session().block_sizes_agreed);
    }
}

#[test]
fn a_refused_export_name_closes_without_a_reply() {
    for name in [&b"nothing"[..], b"", b"\xff", b"a\0b"] {
        let mut peer = Peer::new(PLAIN);
        assert_eq!(peer.send(&message(option::EXPORT_NAME, name)), []);
        assert!(matches!(peer.closed(), Closed::Refused { .. }), "{name:?}");
    }
    let mut peer = Peer::new(REQUIRED);
    assert_eq!(peer.send(&message(option::EXPORT_NAME, b"disk")), []);
    assert!(matches!(peer.closed(), Closed::Refused { why: "TLS is required", .. }));
}

#[test]
fn export_name_after_extended_headers_closes() {
    let mut peer = Peer::new(PLAIN);
    peer.ask(option::EXTENDED_HEADERS, &[]);
    assert_eq!(peer.send(&message(option::EXPORT_NAME, b"disk")), []);
    assert!(matches!(peer.closed(), Closed::Refused { .. }));
}

#[test]
fn a_list_names_and_describes_every_export() {
    let mut peer = Peer::new(PLAIN);
    let answers = peer.ask(option::LIST, &[]);
    let data: Vec<_> = answers.iter().map(|answer| (answer.kind, answer.data.clone())).collect();
    let disk = [string("disk"), b"a disk".to_vec()].concat();
    assert_eq!(data, [(rep::SERVER, disk), (rep::SERVER, string("rom")), (rep::ACK, vec![])]);
    assert!(answers.iter().all(|answer| answer.option == option::LIST));
}

#[test]
fn a_list_is_refused_with_data_or_by_policy() {
    assert_eq!(Peer::new(PLAIN).kinds(option::LIST, b"x"), [rep::ERR_INVALID]);
    let unlisted = Config { list: false, ..PLAIN };
    assert_eq!(Peer::new(unlisted).kinds(option::LIST, &[]), [rep::ERR_POLICY]);
}

#[test]
fn info_continues_the_handshake_and_go_starts_transmission() {
    let mut peer = Peer::new(PLAIN);
    let wanted = go("disk", &[info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 99]);
    let answers = peer.ask(option::INFO, &wanted);
    assert_eq!(peer.0.poll(), Step::NeedInput);
    let gone = peer.ask(option::GO, &wanted);
    // "MUST reply with the same set of information".
    let strip = |answers: &[Answer]| answers.iter().map(|a| (a.kind, a.data.clone())).collect::<Vec<_>>();
    assert_eq!(strip(&answers), strip(&gone));
    let types: Vec<_> = gone.iter().filter_map(|answer| wire::u16_at(&answer.data, 0)).collect();
    assert_eq!(types, [info::EXPORT, info::NAME, info::DESCRIPTION, info::BLOCK_SIZE]);
    assert_eq!(gone[0].data.len(), 12);
    assert_eq!(&gone[1].data[2..], b"disk");
    assert_eq!(&gone[2].data[2..], b"a disk");
    assert_eq!(gone[3].data, [0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]);
    assert_eq!(gone[4].kind, rep::ACK);
    let session = peer.session();
    assert!(session.block_sizes_agreed);
    assert_eq!((session.name.as_str(), session.size), ("disk", 1 << 30));
}

#[test]
fn only_block_sizes_are_sent_without_being_requested() {
    let mut peer = Peer::new(PLAIN);
    let answers = peer.ask(option::GO, &go("rom", &[]));
    let types: Vec<_> = answers.iter().filter_map(|answer| wire::u16_at(&answer.data, 0)).collect();
    assert_eq!(types, [info::EXPORT, info::BLOCK_SIZE]);
    assert!(!peer.session().block_sizes_agreed);
    assert!(peer.session().flags.contains(TransmissionFlags::READ_ONLY));
}

#[test]
fn an_unknown_export_is_an_error_reply_without_information() {
    for option in [option::INFO, option::GO] {
        assert_eq!(Peer::new(PLAIN).kinds(option, &go("nothing", &[3])), [rep::ERR_UNKNOWN]);
    }
}

#[test]
fn the_empty_name_is_the_only_export_or_the_one_of_that_name() {
    let mut two = Peer::new(PLAIN);
    assert_eq!(two.kinds(option::GO, &go("", &[])), [rep::ERR_UNKNOWN]);

    let only = vec![catalogue().remove(0)];
    let empty = vec![Found { name: String::new(), ..catalogue().remove(1) }, catalogue().remove(0)];
    for (catalogue, size) in [(only, 1 << 30), (empty, 1 << 20)] {
        let found = catalogue.resolve("").unwrap();
        assert_eq!(found.info.size, size);
    }
}

#[test]
fn malformed_data_is_err_invalid_and_the_handshake_continues() {
    let mut peer = Peer::new(PLAIN);
    let whole = go("disk", &[3]);
    for option in [option::INFO, option::GO] {
        for len in 0..whole.len() {
            assert_eq!(peer.kinds(option, &whole[..len]), [rep::ERR_INVALID], "{len} bytes");
        }
        let longer = [&whole[..], &[0]].concat();
        assert_eq!(peer.kinds(option, &longer), [rep::ERR_INVALID]);
        for name in ["a\0b", &"x".repeat(4097)] {
            assert_eq!(peer.kinds(option, &go(name, &[])), [rep::ERR_INVALID]);
        }
    }
    peer.ask(option::STRUCTURED_REPLY, &[]);
    let whole = meta("disk", &["base:allocation"]);
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        for len in 0..whole.len() {
            assert_eq!(peer.kinds(option, &whole[..len]), [rep::ERR_INVALID], "{len} bytes");
        }
    }
    for option in [option::STRUCTURED_REPLY, option::EXTENDED_HEADERS] {
        assert_eq!(peer.kinds(option, b"x"), [rep::ERR_INVALID]);
    }
    assert_eq!(peer.0.poll(), Step::NeedInput);
}

#[test]
fn unknown_and_disabled_options_are_err_unsup() {
    let mut peer = Peer::new(Config { structured: false, extended: false, ..PLAIN });
    for option in [0, 4, 8, 9, 10, 11, 12, u32::MAX] {
        assert_eq!(peer.kinds(option, b"whatever"), [rep::ERR_UNSUP], "{option}");
    }
}

#[test]
fn abort_is_acknowledged_and_closes() {
    for config in [PLAIN, REQUIRED] {
        let mut peer = Peer::new(config);
        assert_eq!(peer.kinds(option::ABORT, &[]), [rep::ACK]);
        assert_eq!(peer.closed(), Closed::Aborted);
    }
}

#[test]
fn extended_headers_replace_structured_replies_for_good() {
    let mut peer = Peer::new(PLAIN);
    assert_eq!(peer.kinds(option::STRUCTURED_REPLY, &[]), [rep::ACK]);
    assert_eq!(peer.kinds(option::STRUCTURED_REPLY, &[]), [rep::ERR_INVALID]);
    assert_eq!(peer.kinds(option::EXTENDED_HEADERS, &[]), [rep::ACK]);
    assert_eq!(peer.kinds(option::EXTENDED_HEADERS, &[]), [rep::ERR_INVALID]);
    assert_eq!(peer.kinds(option::STRUCTURED_REPLY, &[]), [rep::ERR_EXT_HEADER_REQD]);
    peer.ask(option::GO, &go("disk", &[]));
    assert_eq!(peer.session().style, Style::Extended);
}

#[test]
fn contexts_need_chunked_replies() {
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        let data = meta("disk", &["base:allocation"]);
        let mut peer = Peer::new(PLAIN);
        assert_eq!(peer.kinds(option, &data), [rep::ERR_INVALID]);
        peer.ask(option::EXTENDED_HEADERS, &[]);
        assert_eq!(peer.kinds(option, &data), [rep::META_CONTEXT, rep::ACK]);
    }
}

#[test]
fn context_queries_follow_the_document() {
    let (yes, no) = (&[rep::META_CONTEXT, rep::ACK][..], &[rep::ACK][..]);
    let invalid = &[rep::ERR_INVALID][..];
    for (queries, listed, set) in [
        (&[][..], yes, no),
        (&["base:"][..], yes, no),
        (&["base:allocation"], yes, yes),
        (&["base:allocation", "base:allocation", "base:"], yes, yes),
        (&["base:nothing"], no, no),
        (&["qemu:dirty-bitmap:x", "x-y:"], no, no),
        (&["x-y:", "base:allocation"], yes, yes),
        (&["base"], invalid, invalid),
    ] {
        let mut peer = Peer::new(PLAIN);
        peer.ask(option::STRUCTURED_REPLY, &[]);
        let data = meta("disk", queries);
        assert_eq!(peer.kinds(option::LIST_META_CONTEXT, &data), listed, "list {queries:?}");
        assert_eq!(peer.kinds(option::SET_META_CONTEXT, &data), set, "set {queries:?}");
    }
}

#[test]
fn only_a_selected_context_has_an_id() {
    let mut peer = Peer::new(PLAIN);
    peer.ask(option::STRUCTURED_REPLY, &[]);
    let data = meta("disk", &["base:allocation"]);
    let context = |id: u32| [&id.to_be_bytes()[..], b"base:allocation"].concat();
    assert_eq!(peer.ask(option::LIST_META_CONTEXT, &data)[0].data, context(0));
    assert_eq!(peer.ask(option::SET_META_CONTEXT, &data)[0].data, context(1));
}

#[test]
fn a_selection_lasts_until_the_next_even_a_failed_one() {
    let selected = |then: &[(u32, Vec<u8>)], name: &str| {
        let mut peer = Peer::new(PLAIN);
        peer.ask(option::STRUCTURED_REPLY, &[]);
        peer.ask(option::SET_META_CONTEXT, &meta("disk", &["base:allocation"]));
        then.iter().for_each(|(option, data)| drop(peer.ask(*option, data)));
        peer.ask(option::GO, &go(name, &[]));
        peer.session().base_allocation
    };
    assert_eq!(selected(&[], "disk"), Some(1));
    assert_eq!(selected(&[], "rom"), None);
    assert_eq!(selected(&[(option::LIST_META_CONTEXT, meta("rom", &[]))], "disk"), Some(1));
    assert_eq!(selected(&[(option::EXTENDED_HEADERS, vec![])], "disk"), Some(1));
    assert_eq!(selected(&[(option::SET_META_CONTEXT, meta("disk", &[]))], "disk"), None);
    assert_eq!(selected(&[(option::SET_META_CONTEXT, meta("nothing", &["base:allocation"]))], "disk"), None);
    assert_eq!(selected(&[(option::SET_META_CONTEXT, b"junk".to_vec())], "disk"), None);
}

#[test]
fn contexts_of_an_unknown_export_are_err_unknown() {
    let mut peer = Peer::new(PLAIN);
    peer.ask(option::STRUCTURED_REPLY, &[]);
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        assert_eq!(peer.kinds(option, &meta("nothing", &[])), [rep::ERR_UNKNOWN]);
    }
}

#[test]
fn starttls_is_refused_without_tls_twice_and_with_data() {
    assert_eq!(Peer::new(PLAIN).kinds(option::STARTTLS, &[]), [rep::ERR_POLICY]);
    let mut peer = Peer::new(OPTIONAL);
    assert_eq!(peer.kinds(option::STARTTLS, b"x"), [rep::ERR_INVALID]);
    assert_eq!(peer.kinds(option::STARTTLS, &[]), [rep::ACK]);
    assert_eq!(peer.0.poll(), Step::StartTls);
    peer.0.tls_started();
    assert_eq!(peer.kinds(option::STARTTLS, &[]), [rep::ERR_INVALID]);
}

#[test]
fn nothing_is_consumed_between_starttls_and_tls() {
    let mut peer = Peer::new(OPTIONAL);
    let injected = [message(option::STARTTLS, &[]), message(option::LIST, &[])].concat();
    assert_eq!(answers(&peer.send(&injected)).len(), 1);
    assert_eq!(peer.0.input(&message(option::LIST, &[]), &catalogue()), 0);
    assert_eq!(peer.0.poll(), Step::StartTls);
}

#[test]
fn options_negotiated_before_tls_are_void() {
    let mut peer = Peer::new(OPTIONAL);
    peer.ask(option::STRUCTURED_REPLY, &[]);
    peer.ask(option::SET_META_CONTEXT, &meta("disk", &["base:allocation"]));
    peer.ask(option::EXTENDED_HEADERS, &[]);
    peer.ask(option::STARTTLS, &[]);
    peer.0.tls_started();
    let data = meta("disk", &["base:allocation"]);
    assert_eq!(peer.kinds(option::LIST_META_CONTEXT, &data), [rep::ERR_INVALID]);
    assert_eq!(peer.kinds(option::STRUCTURED_REPLY, &[]), [rep::ACK]);
    peer.ask(option::GO, &go("disk", &[]));
    let session = peer.session();
    assert_eq!((session.style, session.base_allocation, session.tls), (Style::Structured, None, true));
}

#[test]
fn without_required_tls_all_but_abort_is_refused() {
    let mut peer = Peer::new(REQUIRED);
    for option in [option::LIST, option::INFO, option::GO, 8, 9, 10, 11, 4, 99] {
        assert_eq!(peer.kinds(option, b"junk"), [rep::ERR_TLS_REQD], "{option}");
    }
    assert_eq!(peer.kinds(99, &vec![0; 70_000]), [rep::ERR_TLS_REQD]);
    assert_eq!(peer.kinds(option::STARTTLS, &[]), [rep::ACK]);
    peer.0.tls_started();
    assert_eq!(peer.kinds(option::GO, &go("disk", &[])).last(), Some(&rep::ACK));
    assert!(peer.session().tls);
}

#[test]
fn an_option_that_is_too_long_is_skipped_without_buffering() {
    let mut peer = Peer::new(PLAIN);
    assert_eq!(peer.kinds(option::GO, &vec![0; MAX_OPTION_BYTES as usize + 1]), [rep::ERR_TOO_BIG]);
    assert!(peer.0.buffer.capacity() <= MAX_OPTION_BYTES as usize);
    assert_eq!(peer.kinds(option::LIST, &[]).last(), Some(&rep::ACK));
    let header = &mut message(99, &[])[..];
    header[12..16].copy_from_slice(&(MAX_SKIPPED_BYTES + 1).to_be_bytes());
    peer.send(header);
    assert!(matches!(peer.closed(), Closed::OptionTooLong { option: 99, .. }));
}

#[test]
fn a_name_that_is_too_long_for_export_name_closes_at_once() {
    let mut peer = Peer::new(PLAIN);
    let mut header = message(option::EXPORT_NAME, &[]);
    header[12..16].copy_from_slice(&(MAX_OPTION_BYTES + 1).to_be_bytes());
    peer.send(&header);
    assert!(matches!(peer.closed(), Closed::OptionTooLong { .. }));
}

#[test]
fn too_many_options_close() {
    let mut peer = Peer::new(PLAIN);
    for _ in 0..MAX_OPTIONS {
        assert_eq!(peer.kinds(99, &[]), [rep::ERR_UNSUP]);
    }
    assert_eq!(peer.send(&message(99, &[])), []);
    assert_eq!(peer.closed(), Closed::TooMuch);
}

#[test]
fn too_many_bytes_close() {
    let mut peer = Peer::new(PLAIN);
    let long = message(99, &vec![0; MAX_SKIPPED_BYTES as usize]);
    let mut rounds = 0;
    while peer.0.poll() == Step::NeedInput {
        peer.send(&long);
        rounds += 1;
        assert!(rounds <= MAX_HANDSHAKE_BYTES / u64::from(MAX_SKIPPED_BYTES));
    }
    assert_eq!(peer.closed(), Closed::TooMuch);
}

#[test]
fn a_client_that_does_not_read_gets_a_single_reply() {
    let mut handshake = Handshake::new(PLAIN);
    assert_eq!(handshake.input(&[0, 0, 0, 3], &catalogue()), 0, "the greeting waits");
    handshake.output().clear();
    let lists = [vec![0, 0, 0, 3], message(option::LIST, &[]), message(option::LIST, &[])].concat();
    assert_eq!(handshake.input(&lists, &catalogue()), 20);
    assert_eq!(handshake.input(&lists[20..], &catalogue()), 0);
    assert_eq!(answers(handshake.output()).len(), 3);
}

#[test]
fn requests_sent_along_with_go_are_left_to_the_caller() {
    let mut handshake = Handshake::new(PLAIN);
    handshake.output().clear();
    let option = [vec![0, 0, 0, 3], message(option::GO, &go("disk", &[]))].concat();
    let both = [&option[..], &wire::REQUEST_MAGIC.to_be_bytes()].concat();
    assert_eq!(handshake.input(&both, &catalogue()), option.len());
    assert!(matches!(handshake.poll(), Step::Ready(_)));
}

#[test]
fn a_server_that_shuts_down_refuses_all_but_abort() {
    let mut peer = Peer::new(PLAIN);
    peer.0.shut_down();
    for option in [option::LIST, option::GO, option::STARTTLS, 99] {
        assert_eq!(peer.kinds(option, &[]), [rep::ERR_SHUTDOWN]);
    }
    assert_eq!(peer.kinds(option::ABORT, &[]), [rep::ACK]);
    let mut peer = Peer::new(PLAIN);
    peer.0.shut_down();
    peer.send(&message(option::EXPORT_NAME, b"disk"));
    assert!(matches!(peer.closed(), Closed::Refused { .. }));
}
