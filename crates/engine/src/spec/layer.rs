//! `--layer 'kind,key=value,…'`.

use super::items::Escaped;
use super::{SpecError, items};
use block::LimitOverrides;
use partition::Selector;
use std::fmt;
use std::str::FromStr;

/// One layer of a stack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LayerSpec {
    /// Cuts requests to its limits, by the kernel's rules. The limits as `key=value,…` with the kernel's field
    /// names; never empty.
    Split(String),
    /// One partition of what stands below.
    Part(Selector),
}

const KINDS: &str = "there are: split, for example 'split,max_sectors=255', and part, for example 'part,2'";

impl FromStr for LayerSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<LayerSpec, SpecError> {
        let mut items = items::split(text).into_iter();
        let kind = items.next().unwrap_or_default();
        match kind.as_str() {
            "split" => parse_split(items),
            "part" => parse_part(items),
            _ => Err(SpecError::new(format!("there is no layer \"{kind}\" in this build"), KINDS)),
        }
    }
}

fn parse_split(items: impl Iterator<Item = String>) -> Result<LayerSpec, SpecError> {
    let limits: Vec<String> = items.collect();
    if limits.is_empty() {
        return Err(SpecError::new("split has no limit to split by", "for example split,max_sectors=255"));
    }
    let limits = limits.join(",");
    check_limits(&limits)?;
    Ok(LayerSpec::Split(limits))
}

fn parse_part(mut items: impl Iterator<Item = String>) -> Result<LayerSpec, SpecError> {
    match (items.next(), items.next()) {
        (Some(selector), None) => parse_selector(&selector).map(LayerSpec::Part),
        _ => Err(SpecError::new("part names one partition", PART_FIX)),
    }
}

const PART_FIX: &str = "for example part,2 or part,LABEL=root or part,PARTUUID=…";

/// How a partition is named.
pub(super) fn parse_selector(text: &str) -> Result<Selector, SpecError> {
    match text.parse() {
        Ok(Selector::Number(0)) => Err(SpecError::new("partitions are numbered from 1", PART_FIX)),
        Ok(Selector::Uuid(name) | Selector::Label(name)) if name.is_empty() => {
            Err(SpecError::new("part names no partition", PART_FIX))
        }
        Ok(selector) => Ok(selector),
        Err(never) => match never {},
    }
}

/// Checks that a text is queue limits, at least one: `key=value,…`.
///
/// # Errors
/// A name or a value that is none.
pub fn check_limits(text: &str) -> Result<(), SpecError> {
    let fix = "write key=value with the kernel's names, for example max_sectors=255";
    match text.parse::<LimitOverrides>() {
        Ok(limits) if limits.is_empty() => Err(SpecError::new("there is no limit", fix)),
        Ok(_) => Ok(()),
        Err(why) => Err(SpecError::new(why.to_string(), fix)),
    }
}

impl fmt::Display for LayerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerSpec::Split(limits) => write!(f, "split,{limits}"),
            LayerSpec::Part(selector) => write!(f, "part,{}", Escaped(&selector.to_string())),
        }
    }
}
