//! The range of a target in its table, the parts of devices that it uses, and the limits stacked from those.

use block::{Abilities, Bytes, LimitsError, Profile, QueueLimits, Sectors};

/// The range of a target in its table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TargetRange {
    /// First sector of the range.
    pub start: Sectors,
    /// Length of the range; at least one sector.
    pub len: Sectors,
}

/// A part of a device that a target uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    /// Number of the device, in the order of opening.
    pub device: usize,
    /// First sector on the device.
    pub start: Sectors,
    /// Length of the range.
    pub len: Sectors,
}

/// Returns the profile of a target of length `len`, before the target changes it: limits stacked as
/// `dm_calculate_queue_limits` does for one target, and the abilities that all of the devices have.
///
/// # Errors
/// [`LimitsError`]: the stacked limits contradict each other.
pub fn stack(len: Sectors, areas: &[Area], below: &[Profile]) -> Result<Profile, LimitsError> {
    let mut limits = QueueLimits::stacking();
    let mut whole = Profile {
        size: len.bytes(),
        read_only: false,
        abilities: Abilities::MEMORY,
        limits: QueueLimits::default(),
        bytewise: true,
        zero_copy_reads: !below.is_empty(),
        inline: false,
        sparse: false,
        opaque: true,
    };
    for area in areas {
        let child = &below[area.device];
        // A misaligned device is stacked all the same; `misaligned` is then set in the limits.
        let _ = limits.stack(&child.limits, area.start);
    }
    for child in below {
        whole.read_only |= child.read_only;
        whole.abilities = common_abilities(whole.abilities, child.abilities);
        whole.bytewise &= child.bytewise;
        whole.zero_copy_reads &= child.zero_copy_reads;
        whole.opaque &= child.opaque;
    }
    if let [child] = below {
        (whole.inline, whole.sparse) = (child.inline, child.sparse);
    }
    if areas.is_empty() {
        // No device below limits the size of a discard.
        limits.discard_granularity = Bytes(512);
        limits.max_hw_discard_sectors = limits.max_user_discard_sectors;
    }
    limits.validate()?;
    Ok(Profile { limits, ..whole })
}

/// Returns the abilities that both have. The result is rotational if either of them is.
pub(crate) fn common_abilities(a: Abilities, b: Abilities) -> Abilities {
    Abilities {
        flush: a.flush && b.flush,
        fua: a.fua && b.fua,
        discard: a.discard && b.discard,
        write_zeroes: a.write_zeroes && b.write_zeroes,
        fast_zero: a.fast_zero && b.fast_zero,
        rotational: a.rotational || b.rotational,
    }
}
