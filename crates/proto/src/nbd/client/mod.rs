//! The client's half: the handshake, and the replies to requests.
//!
//! A [`Handshake`] is fed until it is `Ready` or has `Listed`. Then requests go out by
//! [`Request::put`](super::Request::put), [`parse_reply`] reads what comes back, and a [`Track`] per
//! request in flight holds the server to what the request asked for.

mod handshake;
mod options;
mod replies;
mod track;

pub use handshake::{Failure, Goal, Handshake, Listed, MAX_LISTED, MAX_REPLY_BYTES, Step, TlsWish, Wish};
pub use replies::{Descriptor, Descriptors, MAX_CHUNK_BYTES, Reply, parse_reply};
pub use track::{Progress, Track};
