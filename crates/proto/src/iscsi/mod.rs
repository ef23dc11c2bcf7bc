//! iSCSI, both sides, without I/O (RFC 7143; RFC 7144 where initiators use it).
//!
//! [`pdu`] has the headers of both directions, [`stream`] cuts a stream into PDUs, [`digest`] has their checksums,
//! [`lun`] and [`name`] the addresses, [`text`] and [`keys`] the negotiation of [`parameters`], [`chap`] the
//! authentication, [`login`] the login phase of a target, [`sequence`] the numbering of commands and statuses,
//! [`transfer`] the plans of a command's data.
//!
//! *Invariants:* no byte of a peer causes a panic; memory per connection is bounded; nothing in [`pdu`],
//! [`digest`], [`sequence`] and [`transfer`] allocates. Each check of a MUST or SHOULD names the section.
//!
//! Payloads are not handled here: the owner of the socket moves the data.

pub mod chap;
pub mod digest;
pub mod discovery;
pub mod exchange;
pub mod fuzzing;
pub mod initiator;
pub mod keys;
pub mod login;
pub mod lun;
pub mod name;
pub mod parameters;
pub mod pdu;
pub mod sequence;
pub mod stream;
pub mod text;
pub mod transfer;

pub use parameters::{ConnectionParameters, Parameters};
