//! A ring that is served: its memory, its eventfds, and how it is set up and torn down.

use super::{SEGMENTS_MAX, Stopped};
use crate::fronts::Turn;
use block::Region;
use queue::FileId;
use ring::KernelRing;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use virtio::Features;
use virtio::inflight::Inflight;
use virtio::memory::{DirtyLog, GuestMemory, GuestRegion, Mapping, MemoryError};
use virtio::ring::{Chain, Layout, Position, Ring, SetupError};

/// A region of guest memory, not yet registered with a ring.
#[derive(Clone, Debug)]
pub struct GuestRegionSetup {
    /// First guest-physical address.
    pub guest: u64,
    /// First address in the front-end's process.
    pub user: u64,
    /// Length in bytes.
    pub len: u64,
    /// The mapped bytes.
    pub mapping: Arc<Mapping>,
}

/// Everything needed to serve a ring.
pub struct RingSetup {
    /// Features that the driver acknowledged.
    pub features: Features,
    /// Addresses of the parts of the ring.
    pub layout: Layout,
    /// Base at which the ring continues.
    pub base: u32,
    /// Guest memory.
    pub regions: Vec<GuestRegionSetup>,
    /// The log of dirty pages, if writes to guest memory are logged.
    pub log: Option<Arc<DirtyLog>>,
    /// The eventfd of the driver's kicks; `None`: the ring is always polled.
    pub kick: Option<Arc<OwnedFd>>,
    /// The eventfd for interrupts; `None`: the driver polls.
    pub call: Option<Arc<OwnedFd>>,
    /// The eventfd that is notified of errors.
    pub err: Option<Arc<OwnedFd>>,
    /// The record of requests in flight, if the front-end keeps one.
    pub inflight: Option<Inflight>,
}

/// Reasons why a ring cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The device is being removed.
    #[error("the device is being removed")]
    Closed,
    /// A part of the ring is not in guest memory.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The regions of guest memory contradict each other.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The thread's ring cannot refer to guest memory or an eventfd.
    #[error("guest memory or an eventfd cannot be registered: {0}")]
    Register(#[from] io::Error),
}

/// A ring that is being served.
pub(super) struct Active {
    pub(super) ring: Ring,
    pub(super) chain: Chain,
    /// Distinguishes the kick watches of this virtqueue's successive rings.
    pub(super) generation: u32,
    resources: Resources,
    /// Whether requests are still popped.
    pub(super) is_running: bool,
    /// Called when the last request of a stopped ring has completed.
    pub(super) stopped: Option<Stopped>,
}

/// Resources of the thread's ring that a served ring uses.
#[derive(Default)]
struct Resources {
    regions: Vec<Region>,
    kick: Option<FileId>,
    call: Option<FileId>,
    err: Option<FileId>,
}

impl Resources {
    fn release(&mut self, ring: &mut KernelRing) {
        self.regions.drain(..).for_each(|region| ring.remove_region(region));
        for file in [self.kick.take(), self.call.take(), self.err.take()].into_iter().flatten() {
            ring.remove_file(file);
        }
    }

    fn memory(&mut self, setup: &RingSetup, ring: &mut KernelRing) -> Result<Arc<GuestMemory>, StartError> {
        let mut regions = Vec::with_capacity(setup.regions.len());
        for GuestRegionSetup { guest, user, len, mapping } in &setup.regions {
            let region = ring.add_guest_memory(mapping.lend())?;
            self.regions.push(region);
            regions.push(GuestRegion {
                guest: *guest,
                user: *user,
                len: *len,
                mapping: mapping.clone(),
                region,
            });
        }
        Ok(Arc::new(GuestMemory::new(regions, setup.log.clone())?))
    }

    fn set_up(&mut self, mut setup: RingSetup, turn: &mut Turn<'_>) -> Result<Ring, StartError> {
        let memory = self.memory(&setup, turn.ring)?;
        let position = Position::from_base(setup.base, setup.features);
        let mut ring = Ring::new(memory, setup.layout, setup.features, position)?;
        if let Some(record) = setup.inflight.take() {
            // Requests that another process had in flight are popped first.
            ring.track(record)?;
        }
        self.kick = setup.kick.clone().map(|kick| turn.ring.add_file(kick)).transpose()?;
        self.call = setup.call.clone().map(|call| turn.ring.add_event_file(call)).transpose()?;
        self.err = setup.err.clone().map(|err| turn.ring.add_event_file(err)).transpose()?;
        Ok(ring)
    }
}

impl Active {
    pub(super) fn new(setup: RingSetup, generation: u32, turn: &mut Turn<'_>) -> Result<Active, StartError> {
        let mut resources = Resources::default();
        match resources.set_up(setup, turn) {
            Ok(ring) => Ok(Active {
                ring,
                // Header and status are separate spans, and a descriptor may cross the end of a region.
                chain: Chain::new(usize::from(SEGMENTS_MAX) + 8),
                generation,
                resources,
                is_running: true,
                stopped: None,
            }),
            Err(why) => {
                resources.release(turn.ring);
                Err(why)
            }
        }
    }

    /// Returns the file of the driver's kicks.
    pub(super) fn kick(&self) -> Option<FileId> {
        self.resources.kick
    }

    /// Sends an interrupt. Returns whether the driver uses interrupts.
    #[inline]
    pub(super) fn interrupt(&self, ring: &mut KernelRing) -> bool {
        self.resources.call.into_iter().for_each(|call| ring.signal(call));
        self.resources.call.is_some()
    }

    /// Notifies the front-end of an error.
    pub(super) fn report_error(&self, ring: &mut KernelRing) {
        self.resources.err.into_iter().for_each(|err| ring.signal(err));
    }

    pub(super) fn set_call(&mut self, call: Option<Arc<OwnedFd>>, ring: &mut KernelRing) {
        replace(&mut self.resources.call, call, ring);
    }

    pub(super) fn set_err(&mut self, err: Option<Arc<OwnedFd>>, ring: &mut KernelRing) {
        replace(&mut self.resources.err, err, ring);
    }

    /// Tears the ring down. It must have no request in flight.
    pub(super) fn close(mut self, ring: &mut KernelRing) {
        let base = self.ring.position().to_base(self.ring.features());
        self.resources.release(ring);
        if let Some(stopped) = self.stopped {
            stopped(base);
        }
    }
}

/// Replaces an eventfd. One that cannot be registered is left out, so its owner is not notified.
fn replace(file: &mut Option<FileId>, with: Option<Arc<OwnedFd>>, ring: &mut KernelRing) {
    let old = std::mem::replace(file, with.and_then(|fd| ring.add_event_file(fd).ok()));
    old.into_iter().for_each(|old| ring.remove_file(old));
}
