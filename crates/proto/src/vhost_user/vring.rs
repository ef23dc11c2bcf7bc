//! The state of a virtqueue that the front-end has set.

use super::message::{VringAddress, VringFile};

/// A virtqueue as the front-end configured it.
///
/// A ring starts when its size, addresses and kick are known; it is processed while it is started and enabled.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Vring {
    /// Number of descriptors; 0: not set.
    pub size: u16,
    /// Addresses of its parts. `None`: not set.
    pub address: Option<VringAddress>,
    /// Where it continues: the next available index, and for a packed virtqueue the wrap counters and the
    /// next used index, as in the specification's *vring state description*.
    pub base: u32,
    /// How kicks arrive. `None`: the ring is stopped.
    pub kick: Option<VringFile>,
    /// `VHOST_USER_SET_VRING_ENABLE`.
    pub enabled: bool,
}

impl Vring {
    /// Whether everything that the ring needs to start is known.
    pub fn is_started(&self) -> bool {
        self.size > 0 && self.address.is_some() && self.kick.is_some()
    }

    /// Whether its requests are to be processed.
    pub fn is_active(&self) -> bool {
        self.is_started() && self.enabled
    }
}
