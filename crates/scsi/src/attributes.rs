//! Attributes of a logical unit, by LIO's names (`attrib/`).

use thiserror::Error;

/// Reasons why an attribute cannot be set.
#[derive(Clone, PartialEq, Eq, Error, Debug)]
pub enum AttributeError {
    /// No attribute has this name.
    #[error("unknown attribute \"{0}\"")]
    Unknown(String),
    /// The attribute exists, but does not have this value.
    #[error("{name}: {value} is not possible; expected {expected}")]
    Value {
        /// Name of the attribute.
        name: &'static str,
        /// The value given.
        value: u64,
        /// Possible values.
        expected: &'static str,
    },
}

/// Attributes of a logical unit, with LIO's names and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attributes {
    /// INQUIRY returns the name of the backstore as the product.
    pub emulate_model_alias: bool,
    /// FUA of writes is honoured; otherwise FUA in a CDB is an invalid field.
    pub emulate_fua_write: bool,
    /// A volatile write cache is reported (WCE) even if the device has none.
    pub emulate_write_cache: bool,
    /// UA_INTLCK_CTRL: 0: a unit attention is cleared when it is reported; 1: it is kept; 2: also
    /// established with BUSY.
    pub emulate_ua_intlck_ctrl: u8,
    /// TAS: aborted commands of other nexuses end with TASK ABORTED.
    pub emulate_tas: bool,
    /// UNMAP is supported, if the device can discard.
    pub emulate_tpu: bool,
    /// WRITE SAME with UNMAP is supported, if the device can discard.
    pub emulate_tpws: bool,
    /// COMPARE AND WRITE is supported.
    pub emulate_caw: bool,
    /// EXTENDED COPY is supported.
    pub emulate_3pc: bool,
    /// Reservations, persistent and SPC-2, are supported.
    pub emulate_pr: bool,
    /// Whether REPORT SUPPORTED OPERATION CODES is supported.
    pub emulate_rsoc: bool,
    /// The ISID is part of an initiator port's name in persistent reservations.
    pub enforce_pr_isids: bool,
    /// Registrations persist through power loss even if the initiator does not request that.
    pub force_pr_aptpl: bool,
    /// Unmapped blocks read as zeroes (LBPRZ): UNMAP writes zeroes if discarding alone does not guarantee
    /// that.
    pub unmap_zeroes_data: bool,
    /// Maximum number of blocks of an UNMAP command.
    pub max_unmap_lba_count: u32,
    /// Maximum number of descriptors of an UNMAP command.
    pub max_unmap_block_desc_count: u32,
    /// Maximum number of blocks of a WRITE SAME command; 0: limited only by the capacity. LIO has 4096 for
    /// files and 65535 for block devices.
    pub max_write_same_len: u32,
    /// Maximum number of blocks of a COMPARE AND WRITE command; LIO has 1.
    pub max_compare_and_write_len: u8,
    /// CDBs of 32 bytes are supported: WRITE SAME (32).
    pub long_cdbs: bool,
}

impl Default for Attributes {
    fn default() -> Attributes {
        Attributes {
            emulate_model_alias: false,
            emulate_fua_write: true,
            emulate_write_cache: false,
            emulate_ua_intlck_ctrl: 0,
            emulate_tas: true,
            emulate_tpu: true,
            emulate_tpws: true,
            emulate_caw: true,
            emulate_3pc: true,
            emulate_pr: true,
            emulate_rsoc: true,
            enforce_pr_isids: true,
            force_pr_aptpl: false,
            unmap_zeroes_data: true,
            max_unmap_lba_count: u32::MAX,
            max_unmap_block_desc_count: 256,
            max_write_same_len: 0xFFFF,
            max_compare_and_write_len: u8::MAX,
            long_cdbs: true,
        }
    }
}

/// Declares the attributes with the values 0 and 1.
macro_rules! switches {
    ($($name:ident),* $(,)?) => {
        const SWITCHES: &[&str] = &[$(stringify!($name)),*];

        fn switch_mut<'a>(attributes: &'a mut Attributes, name: &str) -> Option<(&'static str, &'a mut bool)> {
            match name {
                $(stringify!($name) => Some((stringify!($name), &mut attributes.$name)),)*
                _ => None,
            }
        }

        fn switch(attributes: &Attributes, name: &str) -> Option<bool> {
            match name {
                $(stringify!($name) => Some(attributes.$name),)*
                _ => None,
            }
        }
    };
}

switches! {
    emulate_model_alias, emulate_fua_write, emulate_write_cache, emulate_tas, emulate_tpu, emulate_tpws,
    emulate_caw, emulate_3pc, emulate_pr, emulate_rsoc, enforce_pr_isids, force_pr_aptpl, unmap_zeroes_data,
}

/// Names of the attributes with a number.
const NUMBERS: &[&str] =
    &["emulate_ua_intlck_ctrl", "max_unmap_lba_count", "max_unmap_block_desc_count", "max_write_same_len"];

impl Attributes {
    /// Iterates over the attributes with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let names = SWITCHES.iter().chain(NUMBERS).copied();
        names.filter_map(|name| Some((name, self.value(name)?)))
    }

    /// Returns the value of an attribute.
    pub fn value(&self, name: &str) -> Option<u64> {
        if let Some(is_on) = switch(self, name) {
            return Some(is_on.into());
        }
        Some(match name {
            "emulate_ua_intlck_ctrl" => self.emulate_ua_intlck_ctrl.into(),
            "max_unmap_lba_count" => self.max_unmap_lba_count.into(),
            "max_unmap_block_desc_count" => self.max_unmap_block_desc_count.into(),
            "max_write_same_len" => self.max_write_same_len.into(),
            _ => return None,
        })
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// The name is unknown, or the attribute does not allow this value.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), AttributeError> {
        if let Some((name, switch)) = switch_mut(self, name) {
            *switch = match value {
                0 => false,
                1 => true,
                _ => return Err(AttributeError::Value { name, value, expected: "0 or 1" }),
            };
            return Ok(());
        }
        let Some(name) = NUMBERS.iter().find(|known| **known == name) else {
            return Err(AttributeError::Unknown(name.to_owned()));
        };
        if *name == "emulate_ua_intlck_ctrl" {
            let known = u8::try_from(value).ok().filter(|value| *value <= 2);
            let expected = "0, 1 or 2";
            self.emulate_ua_intlck_ctrl = known.ok_or(AttributeError::Value { name, value, expected })?;
            return Ok(());
        }
        let expected = "a number below 2^32";
        let number = u32::try_from(value).map_err(|_| AttributeError::Value { name, value, expected })?;
        match *name {
            "max_unmap_lba_count" => self.max_unmap_lba_count = number,
            "max_unmap_block_desc_count" => self.max_unmap_block_desc_count = number,
            _ => self.max_write_same_len = number,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attribute_is_read_back_as_it_was_set() {
        let mut attributes = Attributes::default();
        let names: Vec<&str> = attributes.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), SWITCHES.len() + NUMBERS.len());
        for name in names {
            for value in [1, 0] {
                attributes.set(name, value).unwrap();
                assert_eq!(attributes.value(name), Some(value), "{name}");
            }
        }
    }

    #[test]
    fn values_out_of_range_and_unknown_names_are_rejected() {
        let mut attributes = Attributes::default();
        assert!(matches!(attributes.set("emulate_tpu", 2), Err(AttributeError::Value { .. })));
        assert!(matches!(attributes.set("emulate_ua_intlck_ctrl", 3), Err(AttributeError::Value { .. })));
        assert!(matches!(attributes.set("max_unmap_lba_count", 1 << 32), Err(AttributeError::Value { .. })));
        assert!(matches!(attributes.set("emulate_tea", 1), Err(AttributeError::Unknown(_))));
        assert_eq!(attributes, Attributes::default());
    }
}
