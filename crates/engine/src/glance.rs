//! Glances at a device: a sample of where its requests go, for a picture of it, beside whatever trace is made of it.
//!
//! A glance belongs to whoever asked for it, and there is one of a device at a time. Each reactor has a small lane of
//! fixed size in it, into which its queues put one of every so many requests; whoever holds the glance takes them out
//! and so says how many are passed over. What finds no room is left out. When it is dropped the queues are left alone.
//!
//! *Invariant:* a glance holds no device: one that is removed is closed, whoever looks at it.

use crate::device::Device;
use crate::host::Host;
use serde::Serialize;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use trace::{Lane, Sampler};

/// Requests that each reactor may have waiting: 32 KiB.
const RECORDS: usize = 1024;
/// How many are taken from each lane at once.
const TAKEN_MAX: usize = RECORDS;

/// What reactors and whoever looks share.
#[derive(Debug)]
pub(crate) struct Lanes {
    by_reactor: Vec<Arc<Lane>>,
    every: Arc<AtomicU32>,
}

impl Lanes {
    /// The listener of a queue of that reactor.
    pub(crate) fn sampler(&self, reactor: usize) -> Option<Sampler> {
        let lane = self.by_reactor.get(reactor)?;
        Some(Sampler::new(lane.clone(), self.every.clone()))
    }
}

/// A request that was seen to come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Seen {
    /// When, in nanoseconds of the monotonic clock.
    pub time_ns: u64,
    /// Where, in bytes.
    pub offset: u64,
    /// How long, in bytes.
    pub len: u32,
    /// `read`, `write`, …
    pub op: &'static str,
}

/// Somebody looks at a device.
pub struct Glance {
    host: Arc<Host>,
    device: Weak<Device>,
    lanes: Arc<Lanes>,
}

impl Glance {
    /// What came since the last time, in the order of time, and how it is thinned out: about `wanted` of them are to
    /// be there the next time, if as many come.
    pub fn take(&self, wanted: usize) -> (Vec<Seen>, u32) {
        let mut seen = Vec::new();
        for lane in &self.lanes.by_reactor {
            lane.drain_records(TAKEN_MAX, |record| {
                let op = record.op.name();
                seen.push(Seen { time_ns: record.time_ns, offset: record.offset, len: record.len, op });
            });
        }
        seen.sort_by_key(|seen| seen.time_ns);
        let every = self.lanes.every.load(Relaxed).max(1);
        self.lanes.every.store(thinner(every, seen.len(), wanted.max(1)), Relaxed);
        (seen, every)
    }
}

/// One of how many is wanted from now on, after `got` at one of `every`.
fn thinner(every: u32, got: usize, wanted: usize) -> u32 {
    let came = u64::from(every) * got as u64;
    // A lane that was full lost some: rather too few for one look than the first of each burst only.
    let came = if got >= RECORDS { came * 4 } else { came };
    u32::try_from(came.div_ceil(wanted as u64)).unwrap_or(u32::MAX).max(1)
}

impl Drop for Glance {
    fn drop(&mut self) {
        let Some(device) = self.device.upgrade() else { return };
        device.set_glance(Weak::new());
        self.host.reactors().iter().for_each(|reactor| drop(reactor.listen(device.clone())));
    }
}

impl Host {
    /// Look at a device from now on. `None`: there is no such device, or somebody looks already.
    pub fn glance(self: &Arc<Self>, name: &str) -> Option<Glance> {
        let device = self.device(name)?;
        if device.glance().is_some() {
            return None;
        }
        let by_reactor = self.reactors().iter().map(|_| Arc::new(Lane::new(RECORDS))).collect();
        let lanes = Arc::new(Lanes { by_reactor, every: Arc::new(AtomicU32::new(1)) });
        device.set_glance(Arc::downgrade(&lanes));
        self.reactors().iter().for_each(|reactor| drop(reactor.listen(device.clone())));
        Some(Glance { host: self.clone(), device: Arc::downgrade(&device), lanes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_passed_over_follows_what_comes() {
        assert_eq!(thinner(1, 100, 500), 1);
        assert_eq!(thinner(1, 1000, 500), 2);
        assert_eq!(thinner(2, 500, 500), 2);
        assert_eq!(thinner(8, 0, 500), 1, "an idle device is told whole");
        assert!(thinner(1, RECORDS, 500) > 4, "a full lane lost some");
        assert_eq!(thinner(u32::MAX, RECORDS, 1), u32::MAX);
    }
}
