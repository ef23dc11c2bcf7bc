//! Samples of a device's requests, for a chart of where they go, independent of a trace.
//!
//! A sample belongs to its consumer; a device has one at a time. Each reactor has a small buffer of fixed
//! size, into which its queues put one in every N requests; the consumer drains the buffers and adjusts N.
//! Requests that find a buffer full are dropped. When the sample is dropped, the queues stop.
//!
//! *Invariant:* a sample does not keep its device alive: a device that is removed is closed.

use crate::device::Device;
use crate::host::Host;
use crate::observe::sample::SampleBuffers;
use serde::Serialize;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use trace::TraceBuffer;

/// Records that each buffer holds: 32 KiB.
const RECORDS: usize = 1024;
/// Most records drained from a buffer at once.
const DRAIN_MAX: usize = RECORDS;

/// A sampled request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct SampledRequest {
    /// Arrival, in nanoseconds of the monotonic clock.
    pub time_ns: u64,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// `read`, `write`, …
    pub op: &'static str,
}

/// A running sample of a device.
pub struct Sampling {
    host: Arc<Host>,
    device: Weak<Device>,
    buffers: Arc<SampleBuffers>,
}

impl Sampling {
    /// Returns the requests since the last call, in order of time, and the sampling interval N that applied.
    /// N is adjusted so that about `wanted` are sampled by the next call at the same rate.
    pub fn take(&self, wanted: usize) -> (Vec<SampledRequest>, u32) {
        let mut seen = Vec::new();
        for buffer in &self.buffers.by_reactor {
            buffer.drain_records(DRAIN_MAX, |record| {
                let op = record.op.name();
                seen.push(SampledRequest {
                    time_ns: record.time_ns,
                    offset: record.offset,
                    len: record.len,
                    op,
                });
            });
        }
        seen.sort_by_key(|seen| seen.time_ns);
        let every = self.buffers.every.load(Relaxed).max(1);
        self.buffers.every.store(next_interval(every, seen.len(), wanted.max(1)), Relaxed);
        (seen, every)
    }
}

/// Returns the next interval, after `got` requests were sampled at an interval of `every`.
fn next_interval(every: u32, got: usize, wanted: usize) -> u32 {
    let came = u64::from(every) * got as u64;
    // A full buffer dropped some: rather sample too few next time than only the beginning of each burst.
    let came = if got >= RECORDS { came * 4 } else { came };
    u32::try_from(came.div_ceil(wanted as u64)).unwrap_or(u32::MAX).max(1)
}

impl Drop for Sampling {
    fn drop(&mut self) {
        let Some(device) = self.device.upgrade() else { return };
        device.set_sample(Weak::new());
        self.host.reactors().iter().for_each(|reactor| drop(reactor.refresh(device.clone())));
    }
}

impl Host {
    /// Starts to sample a device. `None`: there is no such device, or it is sampled already.
    pub fn sample(self: &Arc<Self>, name: &str) -> Option<Sampling> {
        let device = self.device(name)?;
        if device.sample().is_some() {
            return None;
        }
        let by_reactor = self.reactors().iter().map(|_| Arc::new(TraceBuffer::new(RECORDS))).collect();
        let buffers = Arc::new(SampleBuffers { by_reactor, every: Arc::new(AtomicU32::new(1)) });
        device.set_sample(Arc::downgrade(&buffers));
        self.reactors().iter().for_each(|reactor| drop(reactor.refresh(device.clone())));
        Some(Sampling { host: self.clone(), device: Arc::downgrade(&device), buffers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_follows_the_rate() {
        assert_eq!(next_interval(1, 100, 500), 1);
        assert_eq!(next_interval(1, 1000, 500), 2);
        assert_eq!(next_interval(2, 500, 500), 2);
        assert_eq!(next_interval(8, 0, 500), 1, "an idle device is sampled completely");
        assert!(next_interval(1, RECORDS, 500) > 4, "a full buffer dropped some");
        assert_eq!(next_interval(u32::MAX, RECORDS, 1), u32::MAX);
    }
}
