//! Traces: events of every request, recorded by hardware queues and converted to the formats of other tools.
//!
//! A [`Tracer`] is the probe of one queue. It runs on that queue's thread and writes a [`Record`] of 32 bytes
//! per event to a [`Lane`]: a ring buffer with one writer and one reader. It never waits: records that find
//! no space are dropped and counted. Another thread drains the lanes into [`wire`] frames, which the client
//! converts to blktrace files ([`blktrace`]), blkparse's lines ([`lines`]) or a Chrome trace ([`chrome`]).
//!
//! *Invariant:* the records of a lane are ordered by time.
//! *Invariant:* no file, socket or thread is used here.

#![forbid(unsafe_code)]

pub mod blktrace;
pub mod chrome;
pub mod command;
mod filter;
mod lane;
pub mod lines;
mod record;
mod sampler;
mod tracer;
pub mod wire;

pub use filter::{Filter, FilterError, FilterText};
pub use lane::Lane;
pub use record::{Kind, Record, Step};
pub use sampler::{Both, Sampler};
pub use tracer::{NodeRole, Tracer, TracerConfig};
