//! Selection of a partition by the user.

use crate::{Partition, Table};
use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// Selects a partition of a table: `2`, `PARTUUID=0f5c…`, `LABEL=root`, or a bare name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Selector {
    /// By number.
    Number(u32),
    /// By PARTUUID, case-insensitive.
    Uuid(String),
    /// By the partition's name in a GPT.
    Label(String),
}

impl FromStr for Selector {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Selector, Infallible> {
        let strip = |word: &str| text.strip_prefix(word).and_then(|rest| rest.strip_prefix('='));
        Ok(if let Some(uuid) = strip("PARTUUID") {
            Selector::Uuid(uuid.to_ascii_lowercase())
        } else if let Some(label) = strip("PARTLABEL").or_else(|| strip("LABEL")) {
            Selector::Label(label.to_owned())
        } else if let (Ok(number), true) = (text.parse(), text.bytes().all(|byte| byte.is_ascii_digit())) {
            Selector::Number(number)
        } else {
            Selector::Label(text.to_owned())
        })
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::Number(number) => write!(f, "{number}"),
            Selector::Uuid(uuid) => write!(f, "PARTUUID={uuid}"),
            Selector::Label(label) => write!(f, "LABEL={label}"),
        }
    }
}

/// Why a selector matches no partition, or several.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SelectError {
    /// No partition matches.
    #[error("there is no partition {selector} ({there})")]
    None {
        /// The selector.
        selector: Selector,
        /// The existing partitions.
        there: String,
    },
    /// Several partitions match.
    #[error("several partitions are called {selector}: {numbers} (choose one by its number)")]
    Several {
        /// The selector.
        selector: Selector,
        /// Numbers of the matching partitions.
        numbers: String,
    },
    /// The partition is extended and contains only logical partitions.
    #[error("partition {number} is an extended partition, which only contains logical ones ({there})")]
    Extended {
        /// Number of the partition.
        number: u32,
        /// The existing partitions.
        there: String,
    },
}

/// Most partitions that a message lists.
const NAMED_MAX: usize = 16;

impl Table {
    /// Finds the selected partition.
    ///
    /// # Errors
    /// [`SelectError`], which lists the existing partitions.
    pub fn select(&self, selector: &Selector) -> Result<&Partition, SelectError> {
        let is_meant = |partition: &&Partition| match selector {
            Selector::Number(number) => partition.number == *number,
            Selector::Uuid(uuid) => partition.uuid == *uuid,
            Selector::Label(label) => partition.name == *label,
        };
        let found: Vec<&Partition> = self.partitions.iter().filter(is_meant).collect();
        match found[..] {
            [] => Err(SelectError::None { selector: selector.clone(), there: self.there() }),
            [one] if one.extended => Err(SelectError::Extended { number: one.number, there: self.there() }),
            [one] => Ok(one),
            _ => {
                let numbers: Vec<_> = found.iter().map(|partition| partition.number.to_string()).collect();
                Err(SelectError::Several { selector: selector.clone(), numbers: numbers.join(", ") })
            }
        }
    }

    /// Lists the partitions for a message.
    fn there(&self) -> String {
        let named: Vec<_> = self.partitions.iter().take(NAMED_MAX).map(ToString::to_string).collect();
        match self.partitions.len() {
            0 if self.notes.is_empty() => format!("the {} table is empty", self.format),
            0 => format!("the {} table is empty: {}", self.format, self.notes.join("; ")),
            count if count > NAMED_MAX => {
                format!("there are {} and {} more", named.join(", "), count - NAMED_MAX)
            }
            _ => format!("there are {}", named.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read;
    use crate::testing::{gpt_image, mbr_image};

    fn selector(text: &str) -> Selector {
        text.parse().unwrap()
    }

    #[test]
    fn a_partition_is_named_by_number_uuid_or_label() {
        let table = read(&mut gpt_image(512)).unwrap().unwrap();
        for text in
            ["3", "PARTUUID=03030303-0303-0303-0303-030303030303", "LABEL=röot", "PARTLABEL=röot", "röot"]
        {
            assert_eq!(table.select(&selector(text)).unwrap().number, 3, "{text}");
            assert_eq!(selector(&selector(text).to_string()), selector(text));
        }
        let upper = selector("PARTUUID=03030303-0303-0303-0303-030303030303".to_uppercase().as_str());
        assert_eq!(table.select(&upper).unwrap().number, 3);
    }

    #[test]
    fn a_miss_lists_the_existing_partitions() {
        let table = read(&mut gpt_image(512)).unwrap().unwrap();
        let error = table.select(&selector("2")).unwrap_err().to_string();
        assert_eq!(error, "there is no partition 2 (there are 1 \"boot\" (32K), 3 \"röot\" (32K))");
        let table = read(&mut mbr_image()).unwrap().unwrap();
        let error = table.select(&selector("2")).unwrap_err().to_string();
        assert!(error.contains("extended") && error.contains("there are 1 (10K)"), "{error}");
    }

    #[test]
    fn an_ambiguous_name_is_refused() {
        let mut table = read(&mut gpt_image(512)).unwrap().unwrap();
        table.partitions[0].name = "röot".to_owned();
        let error = table.select(&selector("röot")).unwrap_err().to_string();
        assert_eq!(error, "several partitions are called LABEL=röot: 1, 3 (choose one by its number)");
    }
}
