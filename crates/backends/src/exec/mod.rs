//! `exec:`, a program of the user as a backend: requests over a socket pair, data in shared memory.
//!
//! Each hardware queue has a connection of its own if the program supports several; otherwise the device has
//! one queue. The control plane starts the program, and passes each node a connection over its
//! [`Line`](crate::nbd::Line), also after a loss.
//!
//! Guarantees across a restart: a request that was not answered is sent again to the next program. A write
//! that was answered but not flushed is as durable as the program made it.
//!
//! Processes, descriptors and the start of a program are not handled here.

mod flight;
mod node;
mod shared;

pub use node::{ExecNode, Memory};
pub use shared::{Exec, ExecError, ExecSpec, SLOT_LEN, SLOTS};
