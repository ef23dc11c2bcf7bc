//! Traces: events of every request, recorded by hardware queues and converted to the formats of other tools.
//!
//! A [`Tracer`] is the probe of one queue. It runs on that queue's thread and writes a [`Record`] of 32 bytes
//! per event to a [`TraceBuffer`]: a ring buffer with one writer and one reader. It never waits: records that
//! find no space are dropped and counted. Another thread drains the buffers into [`wire`] frames, which the
//! client converts to blktrace files ([`blktrace`]), blkparse's lines ([`lines`]) or a Chrome trace
//! ([`chrome`]).
//!
//! *Invariant:* the records of a buffer are ordered by time.
//! *Invariant:* no file, socket or thread is used here.

#![forbid(unsafe_code)]

pub mod blktrace;
mod buffer;
pub mod chrome;
pub mod command;
mod filter;
pub mod lines;
mod record;
mod sampler;
mod tracer;
pub mod wire;

pub use buffer::TraceBuffer;
pub use filter::{Filter, FilterError, FilterText};
pub use record::{Kind, Record, Step};
pub use sampler::{Both, Sampler};
pub use tracer::{NodeRole, Tracer, TracerConfig};
