//! Device names, which are safe as file names, in URIs and as metric labels.

use super::SpecError;
use std::fmt;
use std::str::FromStr;

/// A device's name: 1 to 64 of `A-Z a-z 0-9 . _ + -`, not starting with `.` or `-`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceName(String);

/// The longest name, in bytes. `NAME.control` under a run directory must fit the 107 bytes of a Unix
/// socket's path.
const LEN_MAX: usize = 64;

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '+' | '-')
}

impl DeviceName {
    /// Returns the text as a name, with `-` for characters that a name cannot have; `fallback` if nothing is left.
    pub(super) fn nearest(text: &str, fallback: &'static str) -> DeviceName {
        let clean: String = text.chars().map(|c| if is_word(c) { c } else { '-' }).take(LEN_MAX).collect();
        let clean = clean.trim_start_matches(['.', '-']).trim_end_matches('-');
        DeviceName(if clean.is_empty() { fallback.to_owned() } else { clean.to_owned() })
    }

    /// Returns this name, or the first of `NAME-2`, `NAME-3`, … that is not taken.
    #[must_use]
    pub fn unique(&self, taken: impl Fn(&str) -> bool) -> DeviceName {
        if !taken(&self.0) {
            return self.clone();
        }
        let numbered = (2u64..).map(|n| {
            let suffix = format!("-{n}");
            let keep = self.0.len().min(LEN_MAX - suffix.len());
            format!("{}{suffix}", &self.0[..keep])
        });
        numbered.into_iter().find(|name| !taken(name)).map_or_else(|| self.clone(), DeviceName)
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DeviceName {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<DeviceName, SpecError> {
        let fits =
            (1..=LEN_MAX).contains(&text.len()) && text.chars().all(is_word) && !text.starts_with(['.', '-']);
        if fits {
            return Ok(DeviceName(text.to_owned()));
        }
        Err(SpecError::new(
            format!("\"{text}\" is not a device name"),
            format!("use 1 to {LEN_MAX} of A-Z a-z 0-9 . _ + - and do not start with . or -"),
        ))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}
