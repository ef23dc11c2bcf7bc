//! `nbd:`, an export of an NBD server as a backend: the client's half of the protocol over the ring's sockets.
//!
//! Each hardware queue has a connection of its own where the server allows several (CAN_MULTI_CONN: a flush on one
//! covers all), so queues share nothing on the I/O path. Where it does not, the device has one queue. The handshake
//! happens in the control plane, which brings each node a [`Connected`] over its [`Line`], also after a loss.
//!
//! What is promised across a loss: a request that was not answered is sent again on the next connection, which must be
//! to an export that is no smaller and can do no less. A write that was answered and not flushed is where the server put
//! it: NBD has no way to ask whether a server that is back has lost its cache, as by a power cut, so a flush after
//! the loss covers earlier writes only as far as the server's host kept them, as it does when the server's process dies.
//!
//! Not here: names, sockets, TLS, the handshake, back-off.

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

pub use link::{Connected, Connector, Line, Loss, Nudge};
pub use node::NbdNode;
pub use shared::{Export, Nbd, NbdError, NbdSpec, Patience};
