//! `nbd:`, an export of an NBD server as a backend: the client's side of the protocol over the ring's
//! sockets.
//!
//! Each hardware queue has its own connection if the server supports several (CAN_MULTI_CONN: a flush on one
//! covers all), so queues share nothing on the I/O path. Otherwise the device has only one queue. The control
//! plane does the handshake and passes each node a [`Connected`] over its [`ConnectionChannel`], also after a
//! loss.
//!
//! Guarantees across a loss: a request that was not answered is sent again on the next connection, whose
//! export must be at least as large and as capable. A write that was answered but not flushed is only as
//! durable as the server made it. NBD cannot tell whether a restarted server has lost its cache, for
//! example by a power cut, so a flush after the loss covers earlier writes only as far as the server's host
//! kept them.
//!
//! Not here: names, sockets, TLS, the handshake, and reconnection delays.

mod connection;
mod flight;
mod gaps;
mod link;
mod node;
mod receive;
mod send;
mod shared;
#[cfg(test)]
mod testing;

pub use link::{Connected, ConnectionChannel, Connector, Loss};
pub use node::NbdNode;
pub use shared::{Export, Nbd, NbdError, NbdSpec, ServerTimeouts};
