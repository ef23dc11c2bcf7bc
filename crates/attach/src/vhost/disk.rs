//! The device of an export as its front-ends see it, and the events that other tasks send to a connection.

use super::choice;
use super::virtqueue::{VirtqueueHandle, VirtqueueProperties};
use engine::device::Device;
use engine::host::{Host, HostError};
use exports::vhost::{Broken, REQUEST_MAX, SEGMENTS_MAX};
use proto::vhost_user::Offer;
use proto::vhost_user::wire::protocol;
use spec::{Bytes, VhostUserSpec};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{Notify, watch};
use virtio::Features;
use virtio::blk::{Config, ID_LEN, Shape};
use virtio::memory::REGIONS_MAX;

/// Largest virtqueue, QEMU's limit (`VIRTQUEUE_MAX_SIZE`).
const QUEUE_SIZE_MAX: u16 = 1024;
/// Features of virtqueues, of which [`Features::RING_PACKED`] may be withheld.
const RING_FEATURES: Features = Features::VERSION_1
    .union(Features::INDIRECT_DESC)
    .union(Features::EVENT_IDX)
    .union(Features::RING_PACKED)
    .union(Features::RING_RESET);

/// The description of the connection for `show`.
#[derive(Clone, Default, Debug)]
pub(super) struct Described {
    pub(super) is_connected: bool,
    pub(super) peer: Option<i32>,
    pub(super) rings: usize,
    pub(super) kind: &'static str,
    pub(super) memory: u64,
    pub(super) is_informed: bool,
}

/// The virtio block device that an export offers.
pub(super) struct Disk {
    device: Arc<Device>,
    virtqueues: Vec<VirtqueueHandle>,
    ring_features: Features,
    config: Mutex<Config>,
    described: Mutex<Described>,
    config_changed: Notify,
    broken: Arc<Notify>,
    closing: watch::Sender<bool>,
}

impl Disk {
    /// Creates the virtqueues.
    pub(super) async fn open(
        host: &Arc<Host>,
        device: &Arc<Device>,
        spec: &VhostUserSpec,
    ) -> Result<Arc<Disk>, HostError> {
        let limits = device.limits();
        let threads = if host.reactor_of(device).is_some() { 1 } else { host.reactors().len() };
        let queues = spec.queues.unwrap_or(threads as u16);
        let shape = Shape {
            queues,
            segments_max: limits.max_segments.min(SEGMENTS_MAX).into(),
            segment_len_max: (REQUEST_MAX / u64::from(SEGMENTS_MAX)) as u32,
            ranges_max: 1,
            is_read_only: device.read_only() || spec.read_only,
        };
        let config = Config::new(&limits, device.size(), shape);
        let mut id = [0; ID_LEN as usize];
        let serial = spec.serial.clone().unwrap_or_else(|| device.name().to_string());
        id.iter_mut().zip(serial.bytes()).for_each(|(byte, of_serial)| *byte = of_serial);
        let broken = Arc::new(Notify::new());
        let (name, notified) = (device.name(), broken.clone());
        let alarm = Arc::new(move |why: Broken| {
            tracing::warn!(device = %name, "a virtual machine's driver needs a reset: {why}");
            notified.notify_one();
        });
        let properties = VirtqueueProperties { config, id, alarm };
        let mut virtqueues = Vec::new();
        for reactor in choice::reactors(host, spec, queues).await? {
            virtqueues.push(VirtqueueHandle::open(host, device, reactor, &properties).await?);
        }
        let packed = if spec.packed { Features::RING_PACKED } else { Features::empty() };
        Ok(Arc::new(Disk {
            device: device.clone(),
            virtqueues,
            ring_features: RING_FEATURES.difference(Features::RING_PACKED).union(packed),
            config: Mutex::new(config),
            described: Mutex::default(),
            config_changed: Notify::new(),
            broken,
            closing: watch::channel(false).0,
        }))
    }

    /// The device's name.
    pub(super) fn name(&self) -> spec::DeviceName {
        self.device.name()
    }

    /// The virtqueues, by number.
    pub(super) fn virtqueues(&self) -> &[VirtqueueHandle] {
        &self.virtqueues
    }

    /// Returns the features and queues that front-ends are offered.
    pub(super) fn offer(&self) -> Offer {
        Offer {
            features: (self.config().features() | self.ring_features).bits(),
            protocol: protocol::ALL,
            queues: self.virtqueues.len() as u16,
            queue_size_max: QUEUE_SIZE_MAX,
            regions_max: REGIONS_MAX as u16,
        }
    }

    /// The configuration space.
    pub(super) fn config(&self) -> Config {
        *self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn change_config(&self, change: impl FnOnce(&mut Config)) {
        let config = {
            let mut config = self.config.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut config);
            *config
        };
        for virtqueue in &self.virtqueues {
            virtqueue.set_config(config).await;
        }
    }

    /// Applies the driver's choice of write-back or write-through.
    pub(super) async fn set_write_back(&self, on: bool) {
        self.change_config(|config| config.set_write_back(on)).await;
    }

    /// Adopts a new size of the device.
    pub(super) async fn resized(&self, size: Bytes) {
        self.change_config(|config| config.set_capacity(size)).await;
        self.config_changed.notify_one();
    }

    /// Resolves when the driver must be notified that the configuration space has changed.
    pub(super) async fn config_changed(&self) {
        self.config_changed.notified().await;
    }

    /// Resolves when a driver has violated the specification.
    pub(super) async fn broken(&self) {
        self.broken.notified().await;
    }

    /// Resolves when the export is closed.
    pub(super) async fn closing(&self) {
        // An error means that the export does not exist any more.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }

    /// Closes the connection, and prevents new ones.
    pub(super) fn close(&self) {
        self.closing.send_replace(true);
    }

    fn described_mut(&self) -> std::sync::MutexGuard<'_, Described> {
        self.described.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a front-end has connected (`Some` with its process ID, if known), or that it has
    /// disconnected (`None`).
    pub(super) fn connected(&self, peer: Option<Option<i32>>) {
        *self.described_mut() =
            Described { is_connected: peer.is_some(), peer: peer.flatten(), ..Described::default() };
    }

    /// Updates the description of the connection.
    pub(super) fn describe(&self, rings: usize, kind: &'static str, memory: u64, is_informed: bool) {
        let mut described = self.described_mut();
        (described.rings, described.kind, described.memory) = (rings, kind, memory);
        described.is_informed = is_informed;
    }

    /// State of the connection.
    pub(super) fn described(&self) -> Described {
        self.described_mut().clone()
    }

    /// Numbers for the metrics: kicks, interrupts, and requests whose data was copied.
    pub(super) fn counts(&self) -> [(&'static str, u64); 3] {
        let sum = |of: fn(&exports::vhost::VirtqueueShared) -> u64| {
            self.virtqueues.iter().map(|virtqueue| of(&virtqueue.shared)).sum()
        };
        [
            ("kicks", sum(|virtqueue| virtqueue.kicks.load(Relaxed))),
            ("interrupts", sum(|virtqueue| virtqueue.interrupts.load(Relaxed))),
            ("copied", sum(|virtqueue| virtqueue.copied.load(Relaxed))),
        ]
    }
}
