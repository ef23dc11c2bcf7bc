//! Extended headers end to end, which no client of present distributions has: our own client half against the
//! real server.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Engine, Sandbox, noise};
use proto::nbd::client::{Descriptor, HandshakeOptions};
use proto::nbd::{Command, CommandFlags, NbdError, Request, Style, TransmissionFlags};

on_both_engines!(
    ranges_of_more_than_4_gib_take_one_request,
    reads_and_writes_transfer_their_data,
    a_block_status_payload_selects_contexts,
    block_status_is_equal_in_both_reply_styles,
);

const GIB: u64 = 1 << 30;
/// A size beyond 32 bits.
const SIZE: u64 = 12 * GIB;
const HOLE: u64 = 3;

/// Runs a test on a sparse file and on memory, both of [`SIZE`].
fn on_each(engine: Engine, test: impl Fn(&std::path::Path)) {
    let sandbox = Sandbox::new(engine);
    for stack in [format!("file:{}", sandbox.image("image", SIZE).display()), "ram:12G".into()] {
        let server = sandbox.serve(&stack, &[]);
        test(&server.socket());
    }
}

fn extended(socket: &std::path::Path) -> Peer {
    let peer = Peer::connect(socket, "disk");
    assert_eq!(peer.session.style, Style::Extended);
    assert!(peer.session.base_allocation.is_some());
    assert!(peer.session.flags.contains(TransmissionFlags::BLOCK_STATUS_PAYLOAD));
    peer
}

fn total(descriptors: &[Descriptor]) -> u64 {
    descriptors.iter().map(|descriptor| descriptor.len).sum()
}

fn ranges_of_more_than_4_gib_take_one_request(engine: Engine) {
    on_each(engine, |socket| {
        let mut peer = extended(socket);
        assert_eq!(peer.session.size, SIZE);
        let data = noise(1, 65536);
        for offset in [0, 5 * GIB, SIZE - 65536] {
            peer.write(offset, &data, CommandFlags::empty()).unwrap();
        }
        let found = peer.status(0, SIZE, CommandFlags::empty()).unwrap();
        let states: Vec<u64> = found.iter().map(|descriptor| descriptor.state).collect();
        assert_eq!(total(&found), SIZE);
        assert_eq!(states, [0, HOLE, 0, HOLE, 0]);
        assert_eq!(found[1].len, 5 * GIB - 65536, "one descriptor for more than 32 bits");

        peer.zero(65536, 6 * GIB, CommandFlags::empty()).unwrap();
        assert!(peer.read(5 * GIB, 65536).unwrap() == vec![0; 65536]);
        assert!(peer.read(0, 65536).unwrap() == data);
        peer.trim(0, SIZE - 65536).unwrap();
        assert!(peer.read(0, 65536).unwrap() == vec![0; 65536]);
        assert!(peer.read(SIZE - 65536, 65536).unwrap() == data);
        let one = peer.status(0, SIZE, CommandFlags::REQ_ONE).unwrap();
        assert_eq!(one, [Descriptor { len: SIZE - 65536, state: HOLE }]);
        let cache = peer.ask(Request::new(Command::Cache, 0, 0, SIZE), &[]);
        assert_eq!(cache.error, None);
        peer.disconnect();
    });
}

fn reads_and_writes_transfer_their_data(engine: Engine) {
    on_each(engine, |socket| {
        let mut peer = extended(socket);
        let data = noise(2, 3 << 20);
        peer.write(7 * GIB + 512, &data, CommandFlags::FUA).unwrap();
        peer.flush().unwrap();
        assert!(peer.read(7 * GIB + 512, 3 << 20).unwrap() == data);
        // A read across the edge of a hole gets a hole chunk, unless it must not be fragmented.
        let read = Request::new(Command::Read, 0, 7 * GIB - (1 << 20), 2 << 20);
        let split = peer.ask(read, &[]);
        assert_eq!(split.error, None);
        assert!(split.holes >= (1 << 20) - 65536, "{} bytes came as holes", split.holes);
        let whole = peer.ask(read.with_flags(CommandFlags::DF), &[]);
        assert_eq!((whole.error, whole.holes), (None, 0));
        assert!(split.data == whole.data);

        // Errors are the protocol's, payloads of refused requests are skipped.
        assert_eq!(peer.write(SIZE - 512, &[0; 1024], CommandFlags::empty()), Err(NbdError::NoSpace));
        assert_eq!(peer.zero(1, u64::MAX, CommandFlags::empty()), Err(NbdError::NoSpace));
        assert_eq!(peer.trim(SIZE, 512), Err(NbdError::NoSpace));
        assert_eq!(peer.read(SIZE - 512, 1024), Err(NbdError::Invalid));
        let most = u64::from(peer.session.block_sizes.maximum);
        assert_eq!(peer.read(0, most + 512), Err(NbdError::Invalid));
        let unfragmented = Request::new(Command::Read, 0, 0, most + 512).with_flags(CommandFlags::DF);
        assert_eq!(peer.ask(unfragmented, &[]).error, Some(NbdError::Overflow));
        let unknown = Request::new(Command::Other(77), 0, 0, 8);
        assert_eq!(peer.ask(unknown, &[1; 8]).error, Some(NbdError::Invalid));
        assert!(peer.read(7 * GIB + 512, 3 << 20).unwrap() == data);
        peer.disconnect();
    });
}

/// Returns the payload of a block status request: the length of the range, and the contexts.
fn status_payload(len: u64, contexts: &[u32]) -> Vec<u8> {
    let mut payload = len.to_be_bytes().to_vec();
    contexts.iter().for_each(|context| payload.extend(context.to_be_bytes()));
    payload
}

fn a_block_status_payload_selects_contexts(engine: Engine) {
    on_each(engine, |socket| {
        let mut peer = extended(socket);
        let context = peer.session.base_allocation.unwrap();
        peer.write(GIB, &noise(3, 65536), CommandFlags::empty()).unwrap();
        let ask = |peer: &mut Peer, payload: Vec<u8>| {
            peer.ask(Request::new(Command::BlockStatus, 0, 0, payload.len() as u64), &payload)
        };
        let answer = ask(&mut peer, status_payload(5 * GIB, &[context]));
        assert_eq!(answer.error, None);
        assert_eq!(total(&answer.descriptors), 5 * GIB);
        assert_eq!(answer.descriptors[0], Descriptor { len: GIB, state: HOLE });
        // Another context, a duplicate context, none at all, a truncated payload.
        for payload in [
            status_payload(GIB, &[context + 1]),
            status_payload(GIB, &[context, context]),
            status_payload(GIB, &[]),
            status_payload(GIB, &[context])[..10].to_vec(),
            status_payload(0, &[context]),
            status_payload(SIZE + 512, &[context]),
        ] {
            assert_eq!(ask(&mut peer, payload.clone()).error, Some(NbdError::Invalid), "{payload:?}");
        }
        let answer = ask(&mut peer, status_payload(512, &[context]));
        assert_eq!(answer.descriptors, [Descriptor { len: 512, state: HOLE }]);
        peer.disconnect();
    });
}

fn block_status_is_equal_in_both_reply_styles(engine: Engine) {
    on_each(engine, |socket| {
        let mut wide = extended(socket);
        let mut narrow =
            Peer::with(socket, HandshakeOptions { extended: false, ..HandshakeOptions::new("disk") })
                .unwrap();
        assert_eq!(narrow.session.style, Style::Structured);
        for offset in [0, 3 << 20, 9 << 20] {
            wide.write(offset, &noise(4, 1 << 20), CommandFlags::empty()).unwrap();
        }
        let one = wide.status(0, 16 << 20, CommandFlags::empty()).unwrap();
        assert_eq!(one, narrow.status(0, 16 << 20, CommandFlags::empty()).unwrap());
        assert_eq!(total(&one), 16 << 20);
        let mut simple = HandshakeOptions::new("disk");
        (simple.extended, simple.structured, simple.allocation) = (false, false, false);
        let mut simple = Peer::with(socket, simple).unwrap();
        assert_eq!(simple.session.style, Style::Simple);
        assert!(simple.read(0, 16 << 20).unwrap() == wide.read(0, 16 << 20).unwrap());
        [wide, narrow, simple].into_iter().for_each(Peer::disconnect);
    });
}
