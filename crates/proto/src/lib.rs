//! Protocols as codecs and sessions without I/O or clock.
//!
//! Every protocol is a module of its own: bytes in, meaning out, and back. Nothing here opens a
//! socket, reads a clock, starts a thread or waits; whoever owns the connection feeds bytes in and
//! carries bytes out. No byte that a peer can send makes anything here panic.

#![forbid(unsafe_code)]

pub mod fuse;
pub mod nbd;
