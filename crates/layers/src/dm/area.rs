//! Where a target lies, what it uses of its devices, and what comes of that for the limits of the whole.

use block::{Abilities, Bytes, LimitsError, Profile, QueueLimits, Sectors};

/// Where a target lies in its table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Its first sector.
    pub start: Sectors,
    /// How many there are; at least one.
    pub len: Sectors,
}

/// Part of a device that a target uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    /// The device's number, in the order of opening.
    pub device: usize,
    /// Where it begins on that.
    pub start: Sectors,
    /// How long it is.
    pub len: Sectors,
}

/// What a target of `len` is over its devices, before it sets anything of its own: the limits are stacked as
/// `dm_calculate_queue_limits` does it for one target, and it can do what all of its devices can.
///
/// # Errors
/// Limits that contradict each other.
pub fn stack(len: Sectors, areas: &[Area], below: &[Profile]) -> Result<Profile, LimitsError> {
    let mut limits = QueueLimits::stacking();
    let mut whole = Profile {
        size: len.bytes(),
        read_only: false,
        abilities: Abilities::MEMORY,
        limits: QueueLimits::default(),
        bytewise: true,
        lends: !below.is_empty(),
        in_place: false,
        sparse: false,
        opaque: true,
    };
    for area in areas {
        let child = &below[area.device];
        // One that does not line up is stacked all the same, and shows in the limits.
        let _ = limits.stack(&child.limits, area.start);
    }
    for child in below {
        whole.read_only |= child.read_only;
        whole.abilities = both(whole.abilities, child.abilities);
        whole.bytewise &= child.bytewise;
        whole.lends &= child.lends;
        whole.opaque &= child.opaque;
    }
    if let [child] = below {
        (whole.in_place, whole.sparse) = (child.in_place, child.sparse);
    }
    if areas.is_empty() {
        // Nobody below says how much may be cleared in one go.
        limits.discard_granularity = Bytes(512);
        limits.max_hw_discard_sectors = limits.max_user_discard_sectors;
    }
    limits.validate()?;
    Ok(Profile { limits, ..whole })
}

/// What can be counted on whichever of the two a request meets.
pub(crate) fn both(a: Abilities, b: Abilities) -> Abilities {
    Abilities {
        flush: a.flush && b.flush,
        fua: a.fua && b.fua,
        discard: a.discard && b.discard,
        write_zeroes: a.write_zeroes && b.write_zeroes,
        fast_zero: a.fast_zero && b.fast_zero,
        rotational: a.rotational || b.rotational,
    }
}
