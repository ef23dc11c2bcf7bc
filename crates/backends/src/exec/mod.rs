//! `exec:`, a user's program as a backend: requests over a socket pair, data in shared memory.
//!
//! Each hardware queue has its own connection if the program supports several; otherwise the device has
//! only one queue. The control plane starts the program, and passes each node a connection over its
//! [`ConnectionChannel`](crate::nbd::ConnectionChannel), also after a loss.
//!
//! Guarantees across a restart: a request that was not answered is sent again to the restarted program. A
//! write that was answered but not flushed is only as durable as the program made it.
//!
//! Not here: processes, descriptors, and the start of a program.

mod flight;
mod node;
mod shared;

pub use node::{ExecNode, Memory};
pub use shared::{Exec, ExecError, ExecSpec, SLOT_LEN, SLOTS};
