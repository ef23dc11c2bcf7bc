//! Samples of a device's requests: the buffers that its reactors share with the sampler.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use trace::{Sampler, TraceBuffer};

/// Sample buffers, one per reactor, and the sampling interval.
#[derive(Debug)]
pub(crate) struct SampleBuffers {
    pub(crate) by_reactor: Vec<Arc<TraceBuffer>>,
    pub(crate) every: Arc<AtomicU32>,
}

impl SampleBuffers {
    /// Returns the probe of a queue of a reactor.
    pub(crate) fn sampler(&self, reactor: usize) -> Option<Sampler> {
        let buffer = self.by_reactor.get(reactor)?;
        Some(Sampler::new(buffer.clone(), self.every.clone()))
    }
}
