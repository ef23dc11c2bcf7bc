//! `--layer 'kind,key=value,…'`.

use super::{SpecError, items};
use block::LimitOverrides;
use std::fmt;
use std::str::FromStr;

/// Which layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LayerKind {
    /// Cuts requests to its limits, by the kernel's rules.
    Split,
}

/// One layer of a stack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerSpec {
    /// Which it is.
    pub kind: LayerKind,
    /// Its queue limits as `key=value,…` with the kernel's field names. Never empty for `split`.
    pub limits: String,
}

impl FromStr for LayerSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<LayerSpec, SpecError> {
        let mut items = items::split(text).into_iter();
        let kind = items.next().unwrap_or_default();
        if kind != "split" {
            return Err(SpecError::new(
                format!("there is no layer \"{kind}\" in this build"),
                "there is: split, for example 'split,max_sectors=255'",
            ));
        }
        let limits: Vec<String> = items.collect();
        if limits.is_empty() {
            return Err(SpecError::new(
                "split has no limit to split by",
                "for example split,max_sectors=255",
            ));
        }
        let limits = limits.join(",");
        check_limits(&limits)?;
        Ok(LayerSpec { kind: LayerKind::Split, limits })
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
        match self.kind {
            LayerKind::Split => write!(f, "split,{}", self.limits),
        }
    }
}
