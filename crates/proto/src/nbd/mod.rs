//! The Network Block Device protocol, both sides, without I/O.
//!
//! [`wire`] has the constants of the protocol document (`doc/proto.md` of the NBD project, with extended
//! headers), [`request`] and [`reply`] the messages of the transmission phase, [`server`] and [`client`] the
//! state machines and rules of each side, [`export`] the negotiated session, [`uri`] NBD URIs.
//!
//! A server's connection is a [`server::Handshake`] until that is `Ready`, then a loop of [`request::parse`],
//! [`server::check`] and the encoders of a [`reply::Style`].
//!
//! *Invariants:* no byte of a peer causes a panic; memory per connection is bounded
//! ([`server::MAX_OPTION_BYTES`]); nothing on the transmission path allocates. Each check of a MUST or SHOULD
//! of the document names the section.
//!
//! Payloads are not handled here: the owner of the socket moves the data.

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
