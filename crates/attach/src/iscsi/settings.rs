//! Attributes and parameters of portal groups and ACLs, under LIO's names and with LIO's defaults.
//!
//! Each is a row: its name, default and rule. Settings that LIO has and that have one possible value here (a
//! higher error recovery level, protection information, markers) accept only that value.

use std::collections::BTreeMap;

/// Values that a setting accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// 0 or 1.
    Flag,
    /// `Yes` or `No`, as RFC 7143 spells booleans.
    YesNo,
    /// A number within these bounds, or 0 if `zero` is set.
    Number {
        /// The least value.
        min: i64,
        /// The largest value.
        max: i64,
        /// Whether 0 is accepted below `min`.
        zero: bool,
    },
    /// A comma-separated list of some of these words, each at most once.
    List(&'static [&'static str]),
    /// Any printable text of at most 255 bytes.
    Text,
    /// Only the default.
    Fixed,
}

/// A setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SettingRow {
    /// LIO's name: `authentication`.
    pub name: &'static str,
    /// The value until it is set.
    pub default: &'static str,
    /// The accepted values.
    pub rule: Rule,
}

const fn row(name: &'static str, default: &'static str, rule: Rule) -> SettingRow {
    SettingRow { name, default, rule }
}

const fn number(min: i64, max: i64) -> Rule {
    Rule::Number { min, max, zero: false }
}

/// The largest value of lengths (RFC 7143, section 13): 2²⁴ − 1 bytes.
const LENGTH: Rule = number(512, 16_777_215);
const METHODS: Rule = Rule::List(&["CHAP", "None"]);
const DIGESTS: Rule = Rule::List(&["CRC32C", "None"]);

/// Attributes of a portal group.
pub const GROUP_ATTRIBUTES: &[SettingRow] = &[
    row("authentication", "1", Rule::Flag),
    row("cache_dynamic_acls", "0", Rule::Flag),
    row("default_cmdsn_depth", "64", number(1, 512)),
    row("default_erl", "0", Rule::Fixed),
    row("demo_mode_discovery", "1", Rule::Flag),
    row("demo_mode_write_protect", "1", Rule::Flag),
    row("fabric_prot_type", "0", Rule::Fixed),
    row("generate_node_acls", "0", Rule::Flag),
    row("login_keys_workaround", "1", Rule::Flag),
    row("login_timeout", "15", number(5, 30)),
    row("prod_mode_write_protect", "0", Rule::Flag),
    row("t10_pi", "0", Rule::Fixed),
    row("tpg_enabled_sendtargets", "1", Rule::Flag),
];

/// Attributes of an ACL.
pub const ACL_ATTRIBUTES: &[SettingRow] = &[
    row("authentication", "-1", number(-1, 1)),
    row("dataout_timeout", "3", number(2, 60)),
    row("dataout_timeout_retries", "5", number(1, 15)),
    row("default_erl", "0", Rule::Fixed),
    row("nopin_response_timeout", "30", number(3, 60)),
    row("nopin_timeout", "15", Rule::Number { min: 3, max: 60, zero: true }),
    row("random_datain_pdu_offsets", "0", Rule::Fixed),
    row("random_datain_seq_offsets", "0", Rule::Fixed),
    row("random_r2t_offsets", "0", Rule::Fixed),
];

/// Negotiated parameters of a portal group. `MaxXmitDataSegmentLength` is what the target declares as its
/// `MaxRecvDataSegmentLength`, as in LIO.
pub const PARAMETERS: &[SettingRow] = &[
    row("AuthMethod", "CHAP,None", METHODS),
    row("DataDigest", "CRC32C,None", DIGESTS),
    row("DataPDUInOrder", "Yes", Rule::Fixed),
    row("DataSequenceInOrder", "Yes", Rule::Fixed),
    row("DefaultTime2Retain", "20", number(0, 3600)),
    row("DefaultTime2Wait", "2", number(0, 3600)),
    row("ErrorRecoveryLevel", "0", Rule::Fixed),
    row("FirstBurstLength", "65536", LENGTH),
    row("HeaderDigest", "CRC32C,None", DIGESTS),
    row("IFMarkInt", "Reject", Rule::Fixed),
    row("IFMarker", "No", Rule::Fixed),
    row("ImmediateData", "Yes", Rule::YesNo),
    row("InitialR2T", "Yes", Rule::YesNo),
    row("MaxBurstLength", "262144", LENGTH),
    row("MaxConnections", "1", number(1, 65535)),
    row("MaxOutstandingR2T", "1", number(1, 65535)),
    row("MaxRecvDataSegmentLength", "8192", LENGTH),
    row("MaxXmitDataSegmentLength", "262144", LENGTH),
    row("OFMarkInt", "Reject", Rule::Fixed),
    row("OFMarker", "No", Rule::Fixed),
    row("TargetAlias", "LIO Target", Rule::Text),
];

/// A setting that does not exist, or a value that it does not accept.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SettingError {
    /// No setting has that name.
    #[error("no setting has the name \"{name}\"{near}")]
    Unknown {
        /// The name.
        name: String,
        /// A suggestion, in brackets; empty if none is near.
        near: String,
    },
    /// The value is not accepted.
    #[error("{name} cannot be \"{value}\" ({expected})")]
    Value {
        /// The setting.
        name: &'static str,
        /// The value.
        value: String,
        /// The accepted values, for the message.
        expected: String,
    },
}

/// The values of a table of settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    rows: &'static [SettingRow],
    /// Values that differ from the default.
    changed: BTreeMap<&'static str, String>,
}

impl Settings {
    /// All settings of a table, with their defaults.
    pub const fn new(rows: &'static [SettingRow]) -> Settings {
        Settings { rows, changed: BTreeMap::new() }
    }

    fn row(&self, name: &str) -> Result<&'static SettingRow, SettingError> {
        self.rows.iter().find(|row| row.name == name).ok_or_else(|| {
            let near = spec::did_you_mean(name, self.rows.iter().map(|row| row.name));
            let near = if near.is_empty() { near } else { format!(" ({})", near.trim_end()) };
            SettingError::Unknown { name: name.to_owned(), near }
        })
    }

    /// Sets a value.
    ///
    /// # Errors
    /// The setting does not exist or does not accept the value; nothing has changed.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), SettingError> {
        let row = self.row(name)?;
        let Some(value) = accepted(row, value.trim()) else {
            let (name, value) = (row.name, value.to_owned());
            return Err(SettingError::Value { name, value, expected: expected(row) });
        };
        if value == row.default {
            self.changed.remove(row.name);
        } else {
            self.changed.insert(row.name, value);
        }
        Ok(())
    }

    /// Returns a value.
    ///
    /// # Errors
    /// The setting does not exist.
    pub fn get(&self, name: &str) -> Result<&str, SettingError> {
        self.row(name).map(|row| self.value(row))
    }

    fn value(&self, row: &'static SettingRow) -> &str {
        self.changed.get(row.name).map_or(row.default, String::as_str)
    }

    /// Returns all names and values, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.rows.iter().map(|row| (row.name, self.value(row)))
    }

    /// Returns the text of a setting that must be in the table.
    pub(super) fn text(&self, name: &'static str) -> &str {
        self.get(name).unwrap_or_default()
    }

    /// Returns the number of a setting that must be in the table.
    pub(super) fn number(&self, name: &'static str) -> i64 {
        self.text(name).parse().unwrap_or_default()
    }

    /// Returns whether a setting of the table is 1 or `Yes`.
    pub(super) fn is_on(&self, name: &'static str) -> bool {
        matches!(self.text(name), "1" | "Yes")
    }
}

/// Returns the value as it is stored; `None` if it is not accepted.
fn accepted(row: &SettingRow, value: &str) -> Option<String> {
    let word = |words: &[(&str, &str)]| {
        let found = words.iter().find(|(given, _)| given.eq_ignore_ascii_case(value));
        found.map(|(_, stored)| (*stored).to_owned())
    };
    match row.rule {
        Rule::Flag => {
            word(&[("0", "0"), ("1", "1"), ("no", "0"), ("yes", "1"), ("false", "0"), ("true", "1")])
        }
        Rule::YesNo => word(&[("Yes", "Yes"), ("No", "No"), ("1", "Yes"), ("0", "No")]),
        Rule::Number { min, max, zero } => {
            let number: i64 = value.parse().ok()?;
            let is_ok = (min..=max).contains(&number) || (zero && number == 0);
            is_ok.then(|| number.to_string())
        }
        Rule::List(words) => {
            let mut found: Vec<&str> = Vec::new();
            for given in value.split(',') {
                let word = words.iter().find(|word| word.eq_ignore_ascii_case(given.trim()))?;
                if found.contains(word) {
                    return None;
                }
                found.push(word);
            }
            Some(found.join(","))
        }
        Rule::Text => (value.len() <= 255 && !value.chars().any(char::is_control)).then(|| value.to_owned()),
        Rule::Fixed => value.eq_ignore_ascii_case(row.default).then(|| row.default.to_owned()),
    }
}

fn expected(row: &SettingRow) -> String {
    match row.rule {
        Rule::Flag => "use 0 or 1".to_owned(),
        Rule::YesNo => "use Yes or No".to_owned(),
        Rule::Number { min, max, zero } => {
            format!("use {}{min} to {max}", if zero { "0, or " } else { "" })
        }
        Rule::List(words) => format!("use {}, or a list of both", words.join(" or ")),
        Rule::Text => "use at most 255 printable bytes".to_owned(),
        Rule::Fixed => format!("only {} is supported", row.default),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_lios_and_tables_are_sorted() {
        for rows in [GROUP_ATTRIBUTES, ACL_ATTRIBUTES, PARAMETERS] {
            assert!(rows.is_sorted_by_key(|row| row.name), "{rows:?}");
            for row in rows {
                assert_eq!(accepted(row, row.default).as_deref(), Some(row.default), "{row:?}");
            }
        }
        let attributes = Settings::new(GROUP_ATTRIBUTES);
        assert!(attributes.is_on("authentication") && !attributes.is_on("generate_node_acls"));
        assert_eq!(attributes.number("default_cmdsn_depth"), 64);
    }

    #[test]
    fn values_are_checked_and_stored_in_one_spelling() {
        let mut parameters = Settings::new(PARAMETERS);
        for (name, value, stored) in [
            ("InitialR2T", "no", "No"),
            ("HeaderDigest", "none, crc32c", "None,CRC32C"),
            ("MaxBurstLength", "16776192", "16776192"),
            ("ErrorRecoveryLevel", "0", "0"),
            ("TargetAlias", "My disk", "My disk"),
        ] {
            parameters.set(name, value).expect(name);
            assert_eq!(parameters.get(name), Ok(stored));
        }
        for (name, value) in [
            ("InitialR2T", "maybe"),
            ("HeaderDigest", "CRC32C,CRC32C"),
            ("HeaderDigest", ""),
            ("MaxBurstLength", "511"),
            ("MaxBurstLength", "16777216"),
            ("ErrorRecoveryLevel", "1"),
            ("TargetAlias", "a\nb"),
        ] {
            let refused = parameters.set(name, value).expect_err(name).to_string();
            assert!(refused.contains("cannot be"), "{refused}");
        }
        let unknown = parameters.set("InitialR2t", "Yes").expect_err("unknown").to_string();
        assert_eq!(unknown, "no setting has the name \"InitialR2t\" (did you mean InitialR2T?)");
        let mut acl = Settings::new(ACL_ATTRIBUTES);
        assert!(acl.set("nopin_timeout", "0").is_ok() && acl.set("nopin_timeout", "2").is_err());
        assert!(acl.set("authentication", "-1").is_ok() && acl.set("authentication", "-2").is_err());
    }
}
