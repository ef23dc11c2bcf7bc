//! Limits that a user sets: `max_sectors=255,max_segments=64`, by the kernel's field names or by those of sysfs.

use super::sysfs::Attribute;
use super::{Field, LimitsError, QueueLimits, Unit};
use crate::{Bytes, Sectors};
use std::fmt;
use std::str::FromStr;

/// Limits to be set over those a device has. The names are the kernel's; fields counted in bytes or
/// sectors also take a size with a suffix (`max_sectors=1M` is 2048 sectors), masks also hexadecimal
/// (`0xfff`). `max_sectors`, `max_discard_sectors` and `max_wzeroes_unmap_sectors` are computed from
/// several fields: setting them states the user's wish, as writing `max_sectors_kb` in sysfs does, and as
/// there a `max_sectors` of 0 takes it back. What a file of sysfs is called, in its unit, is understood, too
/// (`max_sectors_kb=127` is `max_sectors=254`).
#[derive(Clone, Default, Debug)]
pub struct LimitOverrides(Vec<(Field, u64)>);

/// Why a text is not a list of limits.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParseLimitsError {
    /// An item without `=`.
    #[error("\"{0}\" is not name=value")]
    NotAPair(String),
    /// No limit has this name.
    #[error("there is no limit \"{name}\" to set; there are {}", settable())]
    UnknownName {
        /// The name that was given.
        name: String,
    },
    /// It is shown, and not set.
    #[error("{name} is read-only: {why}")]
    Fixed {
        /// The limit's name.
        name: String,
        /// Why.
        why: &'static str,
    },
    /// The same limit twice.
    #[error("{0} is given twice")]
    Twice(&'static str),
    /// What follows the `=` is not a number of the field's kind.
    #[error("{name}={value}: {why}")]
    Value {
        /// The limit's name.
        name: &'static str,
        /// The text that was given for it.
        value: String,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// Files of sysfs for features that are not the user's to change.
const FEATURES: [(&str, &str); 5] = [
    ("write_cache", "a flush that is not passed on would lose what it was to store"),
    ("fua", "it is what stands below that writes past its cache"),
    ("zoned", "zones are those of what stands below"),
    ("stable_writes", "nothing here looks twice at data that is written"),
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
    /// In plain numbers; reads back as the same.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (field, value)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{}={value}", field.name)?;
        }
        Ok(())
    }
}

impl LimitOverrides {
    /// Whether nothing is to be set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// These, and then the later ones: what both set is as those say.
    #[must_use]
    pub fn then(&self, later: &LimitOverrides) -> LimitOverrides {
        let is_kept = |(field, _): &&(Field, u64)| later.0.iter().all(|(other, _)| other.name != field.name);
        LimitOverrides(self.0.iter().filter(is_kept).chain(&later.0).copied().collect())
    }

    /// The names of those that are set, as the kernel's structure has them.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.0.iter().map(|(field, _)| field.name)
    }

    /// Set them, and validate the whole. On an error nothing has changed. As in the kernel since 6.9, a
    /// `max_sectors` above what the device can take comes to that.
    ///
    /// # Errors
    /// As [`QueueLimits::validate`].
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

    /// Set them over what stands below, whose limits these are: none of them may promise more than that can do.
    ///
    /// # Errors
    /// As [`apply`](LimitOverrides::apply), and for what is beyond what stands below. Nothing has changed.
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

/// A limit that was set is refused where what stands below could not keep it.
fn beyond(name: &'static str, below: &QueueLimits, now: &QueueLimits) -> Result<(), LimitsError> {
    let value = |limits: &QueueLimits| limits.value(name).unwrap_or_default();
    let (was, is) = (value(below), value(now));
    let refuse = |rule| Err(LimitsError { field: name, value: is, rule });
    let is_zoned = below.features.has(super::Features::ZONED);
    match name {
        "logical_block_size" if is < was => refuse("must not be below that of what stands below"),
        "chunk_sectors" | "zone_write_granularity" | "max_open_zones" | "max_active_zones"
            if is_zoned && is != was =>
        {
            refuse("is that of the zones, and stays")
        }
        "chunk_sectors" if was != 0 && (is == 0 || !was.is_multiple_of(is)) => {
            refuse("must divide the chunks of what stands below")
        }
        "virt_boundary_mask" | "dma_alignment" if is & was != was => {
            refuse("must hold the mask of what stands below")
        }
        // 0 is no limit of its own.
        "max_dev_sectors" if was != 0 && (is == 0 || is > was) => {
            refuse("must not be above that of what stands below")
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
            refuse("must not be above that of what stands below")
        }
        _ => Ok(()),
    }
}
