//! `rbd:`, an image of a Ceph cluster as a backend, through librbd.
//!
//! librbd is loaded when the first image is opened ([`Library`]), so neither the build nor the start of a
//! program depends on it. An image is opened once and has one hardware queue: two handles on one image would
//! take its exclusive lock from each other. Requests are started on the reactor by librbd's asynchronous
//! calls, with the addresses of the requests' own memory; librbd's threads carry them out and write to an
//! eventfd, which the reactor's ring watches, and the node then collects completions without waiting.
//!
//! librbd has no asynchronous call for the list of allocated extents, so a thread of this crate, started by
//! the first such request, asks for it.
//!
//! *Invariant:* memory of a request is not released before librbd has completed it: a request cannot be
//! cancelled, and a node that is dropped early waits.
//! *Invariant:* only `sys/` contains `unsafe` code.

#![deny(unsafe_code)]

mod device;
mod extents;
mod node;
mod shared;
mod state;
mod sys;

pub use device::{Cache, Rbd, RbdError, RbdSpec};
pub use node::RbdNode;
pub use sys::{Declaration, Library, LibraryError, declarations, values, wait_until_closed};
