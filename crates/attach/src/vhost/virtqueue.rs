//! The virtqueues of an export on the reactors, as the control plane uses them.

use engine::device::Device;
use engine::host::{Host, HostError, HostErrorKind};
use engine::reactor::OwnQueue;
use exports::vhost::{Alarm, RingSetup, SEGMENTS_MAX, VirtqueueConfig, VirtqueueShared};
use queue::QueueId;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::sync::oneshot;
use virtio::blk::Config;

/// A virtqueue of the export: a hardware queue on one reactor.
pub(super) struct VirtqueueHandle {
    host: Arc<Host>,
    reactor: usize,
    queue: QueueId,
    pub(super) shared: Arc<VirtqueueShared>,
}

/// Properties that all virtqueues of an export have.
pub(super) struct VirtqueueProperties {
    pub(super) config: Config,
    pub(super) id: [u8; virtio::blk::ID_LEN as usize],
    pub(super) alarm: Alarm,
}

impl VirtqueueHandle {
    /// Creates a virtqueue on a reactor: number `reactor`, or the only one that may serve the device.
    pub(super) async fn open(
        host: &Arc<Host>,
        device: &Arc<Device>,
        reactor: usize,
        properties: &VirtqueueProperties,
    ) -> Result<VirtqueueHandle, HostError> {
        let reactors = host.reactors();
        let reactor = host.reactor_of(device).unwrap_or(reactor);
        let limits = device.limits();
        let abilities = device.abilities();
        let shared = Arc::new(VirtqueueShared::default());
        let depth = device.depth();
        let (sender, opened) = oneshot::channel();
        let (config, id, alarm) = (properties.config, properties.id, properties.alarm.clone());
        let (queue_shared, poll_ns) = (shared.clone(), host.poll_ns());
        reactors[reactor].attach_alone(
            device.clone(),
            OwnQueue { tags: depth, segments_per_tag: SEGMENTS_MAX },
            Box::new(move |at, fronts, _| {
                fronts.vhost.add_queue(VirtqueueConfig {
                    queue: at.queue,
                    depth,
                    facts: at.facts,
                    fua: abilities.fua,
                    has_write_cache: limits.features.contains(block::Features::WRITE_CACHE),
                    alignment_mask: limits.dma_alignment.max(limits.logical_block_size.0 - 1),
                    config,
                    id,
                    poll_ns,
                    shared: queue_shared,
                    alarm,
                });
                let _ = sender.send(at.queue);
            }),
        );
        let queue = opened.await.map_err(|_| {
            HostError::new(HostErrorKind::Failed, "an I/O thread has no queue for it (see the log)")
        })?;
        Ok(VirtqueueHandle { host: host.clone(), reactor, queue, shared })
    }

    /// Number of the reactor.
    pub(super) fn reactor(&self) -> usize {
        self.reactor
    }

    /// Serves a ring.
    pub(super) async fn start(&self, setup: RingSetup) -> Result<(), String> {
        let (sender, started) = oneshot::channel();
        let queue = self.queue;
        self.host.reactors()[self.reactor].run(Box::new(move |fronts, turn| {
            let result = fronts.vhost.start(queue, setup, turn);
            let _ = sender.send(result.map_err(|why| why.to_string()));
        }));
        started.await.unwrap_or_else(|_| Err("the I/O thread has ended".to_owned()))
    }

    /// Stops the ring, and waits until its requests have completed. Returns the index at which it
    /// continues; `None`: it was not being served.
    pub(super) async fn stop(&self) -> Option<u32> {
        let (sender, stopped) = oneshot::channel();
        let queue = self.queue;
        self.host.reactors()[self.reactor].run(Box::new(move |fronts, turn| {
            fronts.vhost.stop(queue, Box::new(move |base| _ = sender.send(base)), turn);
        }));
        stopped.await.ok()
    }

    /// Replaces the eventfd of interrupts.
    pub(super) fn set_call(&self, call: Option<Arc<OwnedFd>>) {
        let queue = self.queue;
        let work = move |fronts: &mut exports::Fronts, turn: &mut exports::Turn<'_>| {
            fronts.vhost.set_call(queue, call, turn);
        };
        self.host.reactors()[self.reactor].run(Box::new(work));
    }

    /// Replaces the eventfd of errors.
    pub(super) fn set_err(&self, err: Option<Arc<OwnedFd>>) {
        let queue = self.queue;
        let work = move |fronts: &mut exports::Fronts, turn: &mut exports::Turn<'_>| {
            fronts.vhost.set_err(queue, err, turn);
        };
        self.host.reactors()[self.reactor].run(Box::new(work));
    }

    /// Replaces the configuration space. Resolves when requests are checked against it.
    pub(super) async fn set_config(&self, config: Config) {
        let (sender, set) = oneshot::channel();
        let queue = self.queue;
        self.host.reactors()[self.reactor].run(Box::new(move |fronts, _| {
            fronts.vhost.set_config(queue, config);
            let _ = sender.send(());
        }));
        // A reactor that has ended handles no requests.
        let _ = set.await;
    }
}
