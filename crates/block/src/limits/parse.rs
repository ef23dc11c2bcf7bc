//! Limits that a user sets: `max_sectors=255,max_segments=64`, by the kernel's field names.

use super::{Field, LimitsError, QueueLimits, Unit};
use crate::{Bytes, Sectors};
use std::fmt;
use std::str::FromStr;

/// Limits to be set over those a device has. The names are the kernel's; fields counted in bytes or
/// sectors also take a size with a suffix (`max_sectors=1M` is 2048 sectors), masks also hexadecimal
/// (`0xfff`). `max_sectors`, `max_discard_sectors` and `max_wzeroes_unmap_sectors` are computed from
/// several fields: setting them states the user's wish, as writing `max_sectors_kb` in sysfs does.
#[derive(Clone, Default, Debug)]
pub struct LimitOverrides(Vec<(Field, u64)>);

/// Why a text is not a list of limits.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParseLimitsError {
    /// An item without `=`.
    #[error("\"{0}\" is not name=value")]
    NotAPair(String),
    /// No limit has this name, or it cannot be set.
    #[error("there is no limit \"{name}\" to set; there are {}", settable())]
    UnknownName {
        /// The name that was given.
        name: String,
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
    if value > field.max { Err("is more than the kernel's field holds") } else { Ok(value) }
}

impl FromStr for LimitOverrides {
    type Err = ParseLimitsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut set: Vec<(Field, u64)> = Vec::new();
        for item in text.split(',').filter(|item| !item.is_empty()) {
            let (name, value) =
                item.split_once('=').ok_or_else(|| ParseLimitsError::NotAPair(item.to_owned()))?;
            let field = QueueLimits::FIELDS
                .into_iter()
                .find(|field| field.name == name && field.set.is_some())
                .ok_or_else(|| ParseLimitsError::UnknownName { name: name.to_owned() })?;
            if set.iter().any(|(other, _)| other.name == field.name) {
                return Err(ParseLimitsError::Twice(field.name));
            }
            let number = parse_value(&field, value).map_err(|why| ParseLimitsError::Value {
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

    /// Set them, and validate the whole. On an error nothing has changed.
    ///
    /// # Errors
    /// As [`QueueLimits::validate`]; and, as in sysfs, for a `max_sectors` above what the device can take.
    pub fn apply(&self, limits: &mut QueueLimits) -> Result<(), LimitsError> {
        let mut changed = limits.clone();
        for (field, value) in &self.0 {
            if let Some(set) = field.set {
                set(&mut changed, *value);
            }
        }
        changed.validate()?;
        let asked = self.0.iter().find(|(field, _)| field.name == "max_sectors");
        if let Some(&(field, value)) = asked
            && value > changed.max_hw_sectors.0
        {
            let rule = "must not be above max_hw_sectors: raise that too";
            return Err(LimitsError { field: field.name, value, rule });
        }
        *limits = changed;
        Ok(())
    }
}
