//! Block drivers in a few lines of Rust.
//!
//! Implement [`Driver`] (a size, `read` and `write`), and serve it with [`Server`]: over NBD to any client, and as
//! `/dev/ublkbN` to this machine. This crate handles queues, tags, limits, unaligned requests, flushes and
//! the final drain. A driver over a driver is a layer: see `examples/xor.rs`.
//!
//! ```no_run
//! # use blockyard_driver::{Driver, Server};
//! struct Zeroes(u64);
//!
//! impl Driver for Zeroes {
//!     fn size(&self) -> u64 { self.0 }
//!     fn read(&self, _: u64, data: &mut [u8]) -> std::io::Result<()> { data.fill(0); Ok(()) }
//!     fn write(&self, _: u64, _: &[u8]) -> std::io::Result<()> { Ok(()) }
//! }
//!
//! fn main() -> Result<(), blockyard_driver::Error> {
//!     Server::new("zeroes", Zeroes(1 << 30)).nbd("unix:/tmp/zeroes.sock").run()
//! }
//! ```
//!
//! The stability policy is in docs/driver-crate.md. Drivers in other languages: docs/exec.md.

#![forbid(unsafe_code)]
#![deny(rustdoc::private_intra_doc_links)]

mod server;

pub use backends::Driver;
pub use server::{Error, Running, Server};
