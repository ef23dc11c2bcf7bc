//! Body of the fuzz target `vhost_user`, whose front-end sends arbitrary messages.
//!
//! The input is a sequence of messages. A byte before each gives the number of file descriptors sent with
//! it. Every message goes through the parser and the session; replies are parsed back.

use super::message::{Header, Request};
use super::session::{Action, Offer, Session};
use super::wire::{HEADER_LEN, feature, protocol};

const OFFER: Offer = Offer {
    features: 1 << 32 | 1 << 28,
    protocol: protocol::ALL,
    queues: 4,
    queue_size_max: 1024,
    regions_max: 32,
};

/// Runs a session over `data`.
pub fn session(mut data: &[u8]) {
    let mut session = Session::new(OFFER);
    while let Some((&fds, rest)) = data.split_first() {
        let Some((head, rest)) = rest.split_first_chunk::<HEADER_LEN>() else { return };
        let Ok(header) = Header::parse(head) else { return };
        let Some((payload, rest)) = rest.split_at_checked(header.len as usize) else { return };
        data = rest;
        let Ok(request) = Request::parse(&header, payload, usize::from(fds)) else { return };
        assert_eq!(request.number(), header.request);
        check_encoding(&request);
        let before = session.regions().len();
        let result = session.receive(&request);
        match &result {
            Ok(Action::RemoveMemory(position)) => assert!(*position < before),
            Ok(Action::AddMemory) => assert_eq!(session.regions().len(), before + 1),
            Ok(Action::Ring(index) | Action::StopRing(index)) => {
                assert!(*index < OFFER.queues, "the ring exists");
            }
            _ => {}
        }
        assert!(session.regions().len() <= usize::from(OFFER.regions_max).max(8));
        let accepted = OFFER.features | feature::PROTOCOL_FEATURES | feature::LOG_ALL;
        assert_eq!(session.features() & !accepted, 0, "only what was offered is accepted");
        let Ok(reply) = session.acknowledge(&header, result.map(drop)) else { return };
        if let Some(reply) = reply {
            let head: &[u8; HEADER_LEN] = reply.first_chunk().expect("a reply has a header");
            let head = Header::parse(head).expect("a reply is well-formed");
            assert!(head.is_reply() && reply.len() == HEADER_LEN + head.len as usize);
        }
    }
}

/// Checks that the encoding of a request parses as the request.
fn check_encoding(request: &Request<'_>) {
    if matches!(request, Request::Unknown(_)) {
        return;
    }
    let bytes = request.encode(true);
    let (head, payload) = bytes.split_first_chunk::<HEADER_LEN>().expect("a request has a header");
    let header = Header::parse(head).expect("the header parses");
    assert_eq!(Request::parse(&header, payload, request.fds()).as_ref(), Ok(request));
}
