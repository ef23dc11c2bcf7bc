//! Parses limits that a user sets: `max_sectors=255,max_segments=64`, by the kernel's field names or those of
//! sysfs.

use super::sysfs::Attribute;
use super::{Field, LimitsError, QueueLimits, Unit};
use crate::{Bytes, Sectors};
use std::fmt;
use std::str::FromStr;

/// User-set limits that override those of a device. Names are the kernel's field names; fields counted in
/// bytes or sectors also accept a size with a suffix (`max_sectors=1M` is 2048 sectors), masks also accept
/// hexadecimal (`0xfff`). `max_sectors`, `max_discard_sectors` and `max_wzeroes_unmap_sectors` are computed
/// from several fields: setting one sets the user's limit, as writing `max_sectors_kb` in sysfs does, and as
/// in sysfs a `max_sectors` of 0 restores the default. The names and units of sysfs are accepted, too
/// (`max_sectors_kb=127` is `max_sectors=254`).
#[derive(Clone, Default, Debug)]
pub struct LimitOverrides(Vec<(Field, u64)>);

/// Why a text is not a list of limits.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParseLimitsError {
    /// An item has no `=`.
    #[error("\"{0}\" is not name=value")]
    NotAPair(String),
    /// No limit has this name.
    #[error("there is no limit \"{name}\" to set; there are {}", settable())]
    UnknownName {
        /// The given name.
        name: String,
    },
    /// The limit is read-only.
    #[error("{name} is read-only: {why}")]
    Fixed {
        /// Name of the limit.
        name: String,
        /// Reason why it is read-only.
        why: &'static str,
    },
    /// A limit is given more than once.
    #[error("{0} is given twice")]
    Twice(&'static str),
    /// The value is not a number of the field's unit.
    #[error("{name}={value}: {why}")]
    Value {
        /// Name of the limit.
        name: &'static str,
        /// The given value.
        value: String,
        /// Reason why the value is invalid.
        why: &'static str,
    },
}

/// Feature files of sysfs that are read-only here, with the reason.
const FEATURES: [(&str, &str); 5] = [
    ("write_cache", "a flush that is not passed on would lose data"),
    ("fua", "it is determined by the devices below"),
    ("zoned", "zones are those of the device below"),
    ("stable_writes", "data of a write is never read twice here"),
    ("dax", "no memory of the device can be mapped"),
];

fn settable() -> String {
    let names: Vec<_> = QueueLimits::FIELDS.iter().filter(|f| f.set.is_some()).map(|f| f.name).collect();
    names.join(", ")
}

fn parse_value(field: &Field, text: &str) -> Result<u64, &'static str> {
    let plain = text.parse::<u64>().ok();
    let value = match field.unit {
        Unit::Count => plain.ok_or("is not a whole number")?,
        Unit::Mask => plain
            .or_else(|| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok())
            .ok_or("is not a mask, decimal or 0x…")?,
        Unit::Bytes => text.parse::<Bytes>().map_err(|_| "is not a size such as 4096 or 64K")?.0,
        Unit::Sectors => match plain {
            Some(sectors) => sectors,
            None => {
                let size: Bytes = text.parse().map_err(|_| "is neither sectors nor a size such as 128K")?;
                if !size.is_aligned(1 << Sectors::SHIFT) {
                    return Err("is not a whole number of sectors of 512 bytes");
                }
                size.sectors().0
            }
        },
    };
    within(field, value)
}

fn within(field: &Field, value: u64) -> Result<u64, &'static str> {
    if value > field.max { Err("is more than the kernel's field holds") } else { Ok(value) }
}

impl FromStr for LimitOverrides {
    type Err = ParseLimitsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut set: Vec<(Field, u64)> = Vec::new();
        for item in text.split(',').filter(|item| !item.is_empty()) {
            let (name, value) =
                item.split_once('=').ok_or_else(|| ParseLimitsError::NotAPair(item.to_owned()))?;
            if let Some((name, why)) = FEATURES.iter().find(|(known, _)| *known == name) {
                return Err(ParseLimitsError::Fixed { name: (*name).to_owned(), why });
            }
            let known = QueueLimits::FIELDS.into_iter().find(|field| field.name == name);
            let attribute = Attribute::ALL.iter().find(|attribute| attribute.name == name);
            let field = known
                .or_else(|| attribute.map(Attribute::field))
                .ok_or_else(|| ParseLimitsError::UnknownName { name: name.to_owned() })?;
            if let Some(why) = field.why_fixed() {
                return Err(ParseLimitsError::Fixed { name: name.to_owned(), why });
            }
            if set.iter().any(|(other, _)| other.name == field.name) {
                return Err(ParseLimitsError::Twice(field.name));
            }
            let parsed = match (known, attribute) {
                (None, Some(attribute)) => attribute.parse(value).and_then(|number| within(&field, number)),
                _ => parse_value(&field, value),
            };
            let number = parsed.map_err(|why| ParseLimitsError::Value {
                name: field.name,
                value: value.to_owned(),
                why,
            })?;
            set.push((field, number));
        }
        Ok(LimitOverrides(set))
    }
}

impl fmt::Display for LimitOverrides {
    /// Formats the limits as plain numbers that parse to an equal value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (field, value)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{}={value}", field.name)?;
        }
        Ok(())
    }
}

impl LimitOverrides {
    /// Whether no limit is set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Merges two sets of overrides; where both set a limit, `later` wins.
    #[must_use]
    pub fn then(&self, later: &LimitOverrides) -> LimitOverrides {
        let is_kept = |(field, _): &&(Field, u64)| later.0.iter().all(|(other, _)| other.name != field.name);
        LimitOverrides(self.0.iter().filter(is_kept).chain(&later.0).copied().collect())
    }

    /// Kernel names of the limits that are set.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.0.iter().map(|(field, _)| field.name)
    }

    /// Applies the overrides to `limits` and validates the result. On an error `limits` is unchanged. As in
    /// the kernel since 6.9, a `max_sectors` above the driver's maximum is capped to it.
    ///
    /// # Errors
    /// [`LimitsError`], as [`QueueLimits::validate`] returns it.
    pub fn apply(&self, limits: &mut QueueLimits) -> Result<(), LimitsError> {
        let mut changed = limits.clone();
        for (field, value) in &self.0 {
            if let Some(set) = field.set {
                set(&mut changed, *value);
            }
        }
        changed.validate()?;
        *limits = changed;
        Ok(())
    }

    /// Applies the overrides to `limits`, the limits of the device below, and refuses any that the device
    /// below could not keep.
    ///
    /// # Errors
    /// [`LimitsError`], as [`apply`](LimitOverrides::apply) returns it, or for a limit beyond that of the
    /// device below. `limits` is unchanged then.
    pub fn apply_over(&self, limits: &mut QueueLimits) -> Result<(), LimitsError> {
        let mut changed = limits.clone();
        self.apply(&mut changed)?;
        for (field, _) in &self.0 {
            beyond(field.name, limits, &changed)?;
        }
        *limits = changed;
        Ok(())
    }
}

/// Refuses a limit that the device below could not keep.
fn beyond(name: &'static str, below: &QueueLimits, now: &QueueLimits) -> Result<(), LimitsError> {
    let value = |limits: &QueueLimits| limits.value(name).unwrap_or_default();
    let (was, is) = (value(below), value(now));
    let refuse = |rule| Err(LimitsError { field: name, value: is, rule });
    let is_zoned = below.features.contains(super::Features::ZONED);
    match name {
        "logical_block_size" if is < was => refuse("must not be below that of the device below"),
        "chunk_sectors" | "zone_write_granularity" | "max_open_zones" | "max_active_zones"
            if is_zoned && is != was =>
        {
            refuse("is determined by the zones and cannot change")
        }
        "chunk_sectors" if was != 0 && (is == 0 || !was.is_multiple_of(is)) => {
            refuse("must divide chunk_sectors of the device below")
        }
        "virt_boundary_mask" | "dma_alignment" if is & was != was => {
            refuse("must include the mask of the device below")
        }
        // 0 means no limit of its own.
        "max_dev_sectors" if was != 0 && (is == 0 || is > was) => {
            refuse("must not be above that of the device below")
        }
        "max_hw_sectors"
        | "max_segments"
        | "max_segment_size"
        | "seg_boundary_mask"
        | "max_hw_discard_sectors"
        | "max_discard_segments"
        | "max_secure_erase_sectors"
        | "max_write_zeroes_sectors"
        | "max_hw_wzeroes_unmap_sectors"
        | "max_hw_zone_append_sectors"
        | "atomic_write_hw_max"
        | "atomic_write_hw_boundary"
        | "atomic_write_hw_unit_min"
        | "atomic_write_hw_unit_max"
            if is > was =>
        {
            refuse("must not be above that of the device below")
        }
        _ => Ok(()),
    }
}
