//! null_blk's zone options, and the zones that they create on a device of a given size.
//!
//! Source: `null_init_zoned_dev` in drivers/block/null_blk/zoned.c. As there, a limit on open or active
//! zones that could never be reached counts as none, and at least one zone stays sequential.

use block::{Bytes, Sectors, UNLIMITED_SECTORS};

/// Maximum number of zones: their states then take 32 MiB.
const ZONES_MAX: u64 = 1 << 22;

/// Zone options, with null_blk's names; sizes are in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ZonedSpec {
    /// Length of a zone in bytes: a power of two.
    pub zone_size: Bytes,
    /// Capacity of a sequential zone in bytes; `None` for the length of the zone.
    pub zone_capacity: Option<Bytes>,
    /// Number of conventional zones at the beginning.
    pub nr_conv: u32,
    /// Maximum number of open zones; 0 for no limit.
    pub max_open: u32,
    /// Maximum number of active zones, which are open or partly written; 0 for no limit.
    pub max_active: u32,
    /// Largest zone append; 0 if the device does not support it, so that the kernel emulates it.
    pub append_max: Sectors,
    /// Whether zones start out full instead of empty.
    pub full: bool,
    /// One sector in each zone that is to be read-only.
    pub read_only: Vec<Sectors>,
    /// One sector in each zone that is to be offline.
    pub offline: Vec<Sectors>,
}

impl ZonedSpec {
    /// null_blk's default zone size.
    pub const ZONE_SIZE: Bytes = Bytes::mib(256);
}

impl Default for ZonedSpec {
    fn default() -> Self {
        ZonedSpec {
            zone_size: Self::ZONE_SIZE,
            zone_capacity: None,
            nr_conv: 0,
            max_open: 0,
            max_active: 0,
            append_max: UNLIMITED_SECTORS,
            full: false,
            read_only: Vec::new(),
            offline: Vec::new(),
        }
    }
}

/// Reasons why zone options are invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ZonedError {
    /// The zone size is not a power of two.
    #[error("a zone cannot be {0} bytes (zone_size is a power of two from 4K on)")]
    ZoneSize(Bytes),
    /// The device is smaller than one zone.
    #[error("a zone of {zone} does not fit a device of {size} (choose a smaller zone_size)")]
    ZoneBeyondDevice {
        /// Zone size.
        zone: Bytes,
        /// Device size.
        size: Bytes,
    },
    /// There would be more zones than supported.
    #[error("{0} zones are more than the {ZONES_MAX} that a device can have (choose a larger zone_size)")]
    TooMany(u64),
    /// The capacity is 0 or larger than a zone.
    #[error("zone_capacity cannot be {0} (it is whole sectors, at most zone_size)")]
    Capacity(Bytes),
    /// A zone capacity is given, but the last zone is smaller than the others.
    #[error("the device ends within a zone, which does not go with zone_capacity (make zones fit its size)")]
    SmallerLastZone,
    /// The sector is not in a sequential zone.
    #[error("sector {0} is in no sequential zone (zone_readonly and zone_offline name one of 512 bytes)")]
    NoSuchZone(u64),
}

/// The zones that result from the options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ZoneLayout {
    pub(super) zone_len: Sectors,
    pub(super) capacity: Sectors,
    pub(super) count: usize,
    pub(super) conventional: usize,
    pub(super) max_open: u32,
    pub(super) max_active: u32,
    pub(super) append_max: Sectors,
}

impl ZonedSpec {
    pub(super) fn check(&self, size: Bytes) -> Result<ZoneLayout, ZonedError> {
        let zone = self.zone_size;
        if !zone.0.is_power_of_two() || zone.0 < 4096 {
            return Err(ZonedError::ZoneSize(zone));
        }
        if zone > size {
            return Err(ZonedError::ZoneBeyondDevice { zone, size });
        }
        let count = size.0.div_ceil(zone.0);
        if count > ZONES_MAX {
            return Err(ZonedError::TooMany(count));
        }
        let capacity = self.zone_capacity.unwrap_or(zone);
        if capacity > zone || capacity == Bytes::ZERO || !capacity.is_aligned(512) {
            return Err(ZonedError::Capacity(capacity));
        }
        if capacity != zone && !size.is_aligned(zone.0) {
            return Err(ZonedError::SmallerLastZone);
        }
        let conventional = u64::from(self.nr_conv).min(count - 1);
        let sequential = count - conventional;
        let enforceable = |limit: u32| if u64::from(limit) >= sequential { 0 } else { limit };
        let max_active = enforceable(self.max_active);
        let max_open = match max_active {
            0 => enforceable(self.max_open),
            active => enforceable(self.max_open.min(active)),
        };
        for sector in self.read_only.iter().chain(&self.offline) {
            let index = sector.0 / zone.sectors().0;
            if index < conventional || index >= count {
                return Err(ZonedError::NoSuchZone(sector.0));
            }
        }
        Ok(ZoneLayout {
            zone_len: zone.sectors(),
            capacity: capacity.sectors(),
            count: count as usize,
            conventional: conventional as usize,
            max_open,
            max_active,
            append_max: self.append_max.min(capacity.sectors()),
        })
    }
}
