//! Attributes of a group by their LIO names.

use super::{AccessGroups, AccessState, Group, StateStatus, Supported};

/// Reasons why a group, or an attribute of it, cannot be changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GroupError {
    /// The name is taken, empty, or has characters that LIO's tree does not allow.
    #[error("target port group \"{0}\" exists, or the name is not valid")]
    Name(String),
    /// The identifier is taken.
    #[error("target port group identifier {0} is taken")]
    Id(u16),
    /// The unit has no space for another group.
    #[error("the logical unit has the most target port groups that it can have")]
    TooMany,
    /// The group does not exist, or is the default group, which cannot be removed.
    #[error("target port group \"{0}\" does not exist, or cannot be removed")]
    Unknown(String),
    /// The attribute does not exist.
    #[error("unknown attribute \"{0}\" of a target port group")]
    Attribute(String),
    /// The attribute cannot have this value.
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

/// Access to an attribute: name, valid values, and functions that read and set it.
struct Attribute {
    name: &'static str,
    expected: &'static str,
    max: u64,
    get: fn(&Group) -> u64,
    /// Sets the attribute; `None` if it is read-only.
    set: Option<fn(&mut Group, u64) -> bool>,
}

/// Creates the attribute that says whether a state is supported.
const fn support(name: &'static str, get: fn(&Group) -> u64, set: fn(&mut Group, u64) -> bool) -> Attribute {
    Attribute { name, expected: "0 or 1", max: 1, get, set: Some(set) }
}

macro_rules! support {
    ($name:literal, $bit:ident) => {
        support(
            $name,
            |group| group.supported.contains(Supported::$bit).into(),
            |group, value| {
                group.supported.set(Supported::$bit, value != 0);
                true
            },
        )
    };
}

const TABLE: &[Attribute] = &[
    Attribute {
        name: "alua_access_state",
        expected: "0, 1, 2, 3, 14 or 15, if the group supports it",
        max: 15,
        get: |group| group.state as u64,
        set: Some(|group, value| {
            let state = u8::try_from(value).ok().and_then(AccessState::of);
            match state.filter(|state| group.supported.contains(state.supported_bit())) {
                Some(state) => {
                    if group.state != state {
                        (group.state, group.status) = (state, StateStatus::Implicit);
                    }
                    true
                }
                None => false,
            }
        }),
    },
    Attribute {
        name: "alua_access_status",
        expected: "0 (none), 1 (explicit) or 2 (implicit)",
        max: 2,
        get: |group| group.status as u64,
        set: Some(|group, value| {
            group.status = [StateStatus::None, StateStatus::Explicit, StateStatus::Implicit][value as usize];
            true
        }),
    },
    Attribute {
        name: "alua_access_type",
        expected: "0 (none), 1 (implicit), 2 (explicit) or 3 (both)",
        max: 3,
        get: |group| group.access_type.into(),
        set: Some(|group, value| {
            group.access_type = value as u8;
            true
        }),
    },
    Attribute {
        name: "alua_write_metadata",
        expected: "0 or 1",
        max: 1,
        get: |group| group.write_metadata.into(),
        set: Some(|group, value| {
            group.write_metadata = value != 0;
            true
        }),
    },
    Attribute {
        name: "preferred",
        expected: "0 or 1",
        max: 1,
        get: |group| group.preferred.into(),
        set: Some(|group, value| {
            group.preferred = value != 0;
            true
        }),
    },
    Attribute {
        name: "nonop_delay_msecs",
        expected: "up to 10000 milliseconds",
        max: 10_000,
        get: |group| group.nonoptimized_delay_ms.into(),
        set: Some(|group, value| {
            group.nonoptimized_delay_ms = value as u16;
            true
        }),
    },
    Attribute {
        name: "trans_delay_msecs",
        expected: "up to 30000 milliseconds",
        max: 30_000,
        get: |group| group.transition_delay_ms.into(),
        set: Some(|group, value| {
            group.transition_delay_ms = value as u16;
            true
        }),
    },
    Attribute {
        name: "implicit_trans_secs",
        expected: "up to 255 seconds",
        max: 255,
        get: |group| group.implicit_transition_secs.into(),
        set: Some(|group, value| {
            group.implicit_transition_secs = value as u8;
            true
        }),
    },
    support!("alua_support_offline", OFFLINE),
    support!("alua_support_standby", STANDBY),
    support!("alua_support_transitioning", TRANSITIONING),
    support!("alua_support_active_nonoptimized", ACTIVE_NONOPTIMIZED),
    support!("alua_support_unavailable", UNAVAILABLE),
    support!("alua_support_active_optimized", ACTIVE_OPTIMIZED),
    Attribute {
        name: "alua_support_lba_dependent",
        expected: "nothing: read-only",
        max: 0,
        get: |_| 0,
        set: None,
    },
];

/// Names of all attributes except `tg_pt_gp_id` and `members`.
pub const ATTRIBUTES: [&str; TABLE.len()] = {
    let mut names = [""; TABLE.len()];
    let mut index = 0;
    while index < TABLE.len() {
        names[index] = TABLE[index].name;
        index += 1;
    }
    names
};

impl Group {
    /// Returns the value of an attribute.
    pub fn attribute(&self, name: &str) -> Option<u64> {
        if name == "tg_pt_gp_id" {
            return Some(self.id.into());
        }
        TABLE.iter().find(|attribute| attribute.name == name).map(|attribute| (attribute.get)(self))
    }
}

impl AccessGroups {
    /// Sets an attribute of a group. Returns whether the access state or the preference of a group changed,
    /// in which case the change must be reported to every nexus.
    pub fn set_attribute(&mut self, group: &str, name: &str, value: u64) -> Result<bool, GroupError> {
        let index = self.groups.iter().position(|known| known.name == group);
        let index = index.ok_or_else(|| GroupError::Unknown(group.to_owned()))?;
        if name == "tg_pt_gp_id" {
            return self.set_id(index, value);
        }
        let attribute = TABLE.iter().find(|attribute| attribute.name == name);
        let attribute = attribute.ok_or_else(|| GroupError::Attribute(name.to_owned()))?;
        let group = &mut self.groups[index];
        let before = (group.state, group.preferred);
        let is_set = attribute.set.is_some_and(|set| value <= attribute.max && set(group, value));
        if !is_set {
            return Err(GroupError::Value { name: attribute.name, value, expected: attribute.expected });
        }
        Ok((group.state, group.preferred) != before)
    }

    /// Changes the identifier of a group other than the default group.
    fn set_id(&mut self, index: usize, value: u64) -> Result<bool, GroupError> {
        let wrong =
            GroupError::Value { name: "tg_pt_gp_id", value, expected: "a free number from 1 to 65535" };
        let id = u16::try_from(value).map_err(|_| wrong.clone())?;
        if self.groups[index].id == id {
            return Ok(false);
        }
        if index == 0 || id == 0 || self.groups.iter().any(|group| group.id == id) {
            return Err(wrong);
        }
        self.groups[index].id = id;
        Ok(false)
    }
}
