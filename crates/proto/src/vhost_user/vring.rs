//! Settings of a virtqueue, as the front-end configured it.

use super::message::{VringAddress, VringFile};

/// Settings of a virtqueue.
///
/// A ring starts when its size, addresses and kick are known; it is processed while it is started and enabled.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Vring {
    /// Number of descriptors, or 0 if not set.
    pub size: u16,
    /// Addresses of the ring's parts; `None` if not set.
    pub address: Option<VringAddress>,
    /// Position at which the ring continues: the next available index, and for a packed virtqueue the wrap
    /// counters and the next used index, as in the specification's *vring state description*.
    pub base: u32,
    /// Source of kicks; `None` while the ring is stopped.
    pub kick: Option<VringFile>,
    /// `VHOST_USER_SET_VRING_ENABLE`.
    pub enabled: bool,
}

impl Vring {
    /// Returns whether all settings that the ring needs to start are known.
    pub fn is_started(&self) -> bool {
        self.size > 0 && self.address.is_some() && self.kick.is_some()
    }

    /// Returns whether the ring's requests are to be processed.
    pub fn is_active(&self) -> bool {
        self.is_started() && self.enabled
    }
}
