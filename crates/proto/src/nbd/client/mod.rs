//! The client's side: the handshake, and the replies to requests.
//!
//! A [`Handshake`] is fed with bytes until it is `Ready` or has `Listed` the exports. Then
//! [`Request::put`](super::Request::put) encodes requests, [`parse_reply`] parses replies, and a [`Track`]
//! per request in flight checks that replies match their request.

mod handshake;
mod options;
mod replies;
mod track;

pub use handshake::{
    Failure, Goal, Handshake, HandshakeOptions, Listed, MAX_LISTED, MAX_REPLY_BYTES, Step, TlsPolicy,
};
pub use replies::{Descriptor, Descriptors, MAX_CHUNK_BYTES, Reply, parse_reply};
pub use track::{Progress, Track};
