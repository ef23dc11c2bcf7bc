//! Protocol codecs and sessions without I/O or clock.
//!
//! Every protocol has a module that parses and encodes its messages. Nothing here opens a socket, reads a
//! clock, starts a thread or waits; the owner of the connection moves the bytes. No byte that a peer can send
//! causes a panic.

#![forbid(unsafe_code)]

pub mod exec;
pub mod fuse;
pub mod iscsi;
pub mod nbd;
pub mod vhost_user;
