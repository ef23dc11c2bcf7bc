//! Traces: what happened to every request, recorded by hardware queues and written down as other tools read it.
//!
//! A [`Tracer`] listens to one queue, on that queue's thread, and puts a [`Record`] of 32 bytes into a [`Lane`]: a
//! ring with one writer and one reader. It never waits: what finds no room is dropped and counted. Another thread
//! empties the lanes into [`wire`] frames, which whoever asked for the trace turns into blktrace files
//! ([`blktrace`]), blkparse's lines ([`lines`]) or a Chrome trace ([`chrome`]).
//!
//! *Invariant:* the records of one lane are in the order of their times.
//! *Invariant:* there is no file, socket or thread here.

#![forbid(unsafe_code)]

pub mod blktrace;
pub mod chrome;
mod filter;
mod lane;
pub mod lines;
mod record;
mod sampler;
mod tracer;
pub mod wire;

pub use filter::{Filter, FilterError, FilterText};
pub use lane::Lane;
pub use record::{Kind, Record};
pub use sampler::{Both, Sampler};
pub use tracer::{Place, Tracer, TracerConfig};
