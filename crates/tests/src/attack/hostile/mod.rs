//! Clients and servers that misbehave, each in a way that has a name, and what a client that behaves notices.

pub mod clients;
pub mod servers;
mod ways;
