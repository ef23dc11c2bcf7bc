//! Samples of a device's requests: the buffers that its reactors share with the sampler.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use trace::{Lane, Sampler};

/// Sample buffers, one per reactor, and the sampling interval.
#[derive(Debug)]
pub(crate) struct SampleLanes {
    pub(crate) by_reactor: Vec<Arc<Lane>>,
    pub(crate) every: Arc<AtomicU32>,
}

impl SampleLanes {
    /// Returns the probe of a queue of a reactor.
    pub(crate) fn sampler(&self, reactor: usize) -> Option<Sampler> {
        let lane = self.by_reactor.get(reactor)?;
        Some(Sampler::new(lane.clone(), self.every.clone()))
    }
}
