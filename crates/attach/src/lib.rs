//! The control plane of exports: how devices of a [`Host`](engine::host::Host) are offered to hosts and
//! clients.
//!
//! Each export has a module of its own and implements [`Export`](engine::host::Export), through which the
//! engine asks for its users, reports changes and closes it. The data path of an export is in the crate
//! `exports`, on the reactors' threads. Nothing here touches data, except to encrypt it for TLS connections.

#![forbid(unsafe_code)]

mod default_export;
mod exports_of_host;
pub mod fuse;
mod handshakes;
mod helper;
pub mod iscsi;
pub mod loop_device;
pub mod nbd;
pub mod nbd_device;
pub mod ublk;
mod vhost;

pub use default_export::block_export;
pub(crate) use exports_of_host::Exported;
pub use exports_of_host::{Exports, Shown, UblkLife};
pub use loopdev::remove as remove_loop;
