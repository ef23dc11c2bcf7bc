//! The Network Block Device protocol, both halves, without I/O.
//!
//! [`wire`] holds the numbers of the protocol document (`doc/proto.md` of the NBD project, with its
//! extended headers), [`request`] and [`reply`] the messages of the transmission phase, [`server`]
//! and [`client`] the state machines and rules of either side, [`export`] what is agreed between
//! them, [`uri`] the names that people give to exports.
//!
//! A server's connection is a [`server::Handshake`] until that says `Ready`, then a loop of
//! [`request::parse`], [`server::check`] and a [`reply::Style`]'s encoders.
//!
//! *Invariants:* nothing here panics on a peer's bytes; memory per connection is bounded
//! ([`server::MAX_OPTION_BYTES`]); nothing on the transmission path allocates. Where the document
//! says MUST or SHOULD, the check that keeps it names the section.
//!
//! It does not hold payloads: whoever owns the socket moves the data.

pub mod client;
pub mod error;
pub mod export;
pub mod extents;
pub mod fuzzing;
pub mod reply;
pub mod request;
pub mod server;
pub mod uri;
pub mod wire;

pub use error::{Fatal, NbdError, error_of, status_of};
pub use export::{BlockSizes, ExportId, ExportInfo, Session};
pub use reply::Style;
pub use request::{Command, Request};
pub use uri::Uri;
pub use wire::{CommandFlags, ReplyFlags, TransmissionFlags};
