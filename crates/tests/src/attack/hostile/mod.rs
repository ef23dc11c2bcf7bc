//! Misbehaving clients and servers, each kind with a name, and their effects on a well-behaved client.

pub mod clients;
mod kinds;
pub mod servers;
