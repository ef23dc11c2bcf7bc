//! Names of iSCSI targets and initiators (RFC 7143, section 4.2.7; RFC 3980 for `naa.`).

use crate::{DeviceName, SpecError};
use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;

/// The longest name in bytes (RFC 7143, section 4.2.7.1).
const LEN_MAX: usize = 223;

/// The prefix of the names of targets for which the user gives no name.
const TARGET_PREFIX: &str = "iqn.2026-11.io.blockyard:";

/// The name of an iSCSI target or initiator: `iqn.2026-11.io.blockyard:disk`, `eui.02004567a425678d`,
/// `naa.52004567ba64678d`. Stored in lower case, as RFC 3722 normalizes names before they are compared.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct IscsiName(String);

impl IscsiName {
    /// Returns the target name for a device whose export gives none. Characters that iSCSI names cannot
    /// contain become `-`.
    pub fn of_device(device: &DeviceName) -> IscsiName {
        let word = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { '-' };
        let device: String = device.as_str().chars().map(word).collect();
        IscsiName(format!("{TARGET_PREFIX}{device}"))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for IscsiName {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<IscsiName, SpecError> {
        let name = text.to_ascii_lowercase();
        let problem = match name.split_once('.') {
            _ if name.len() > LEN_MAX => Some("it is longer than 223 bytes"),
            Some(("iqn", rest)) => qualified_problem(rest),
            Some(("eui", digits)) => number_problem(digits, &[16]),
            Some(("naa", digits)) => number_problem(digits, &[16, 32]),
            _ => Some("it does not begin with iqn., eui. or naa."),
        };
        match problem {
            None => Ok(IscsiName(name)),
            Some(why) => Err(SpecError::new(
                format!("\"{text}\" is not an iSCSI name: {why}"),
                "for example iqn.2026-11.com.example:disk",
            )),
        }
    }
}

/// Returns what is wrong with `yyyy-mm.reversed.domain[:anything]`; `None` if it is valid.
fn qualified_problem(rest: &str) -> Option<&'static str> {
    let (date, authority) = rest.split_once('.').unwrap_or((rest, ""));
    let digits = |text: &str, len| text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_month = |month: &str| digits(month, 2) && matches!(month.parse(), Ok(1..=12));
    if !date.split_once('-').is_some_and(|(year, month)| digits(year, 4) && is_month(month)) {
        return Some("iqn. is not followed by a year and a month, as in iqn.2026-11.");
    }
    let domain = authority.split(':').next().unwrap_or_default();
    if domain.is_empty() {
        return Some("the date is not followed by a reversed domain, as in .com.example");
    }
    // RFC 3722 allows letters of other scripts, too; they are compared unchanged.
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | ':') || !c.is_ascii();
    let is_clean = authority.chars().all(|c| is_name(c) && !c.is_control() && !c.is_whitespace());
    if is_clean { None } else { Some("only letters, digits, -, . and : may be in it") }
}

fn number_problem(digits: &str, lens: &[usize]) -> Option<&'static str> {
    let is_number = lens.contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_number { None } else { Some("eui. takes 16 hexadecimal digits, naa. 16 or 32") }
}

impl IscsiName {
    /// Accepts the name of an initiator unchanged: some initiators have names with underscores or without a
    /// date.
    ///
    /// # Errors
    /// The name is empty, too long, or contains spaces, commas or control characters.
    pub fn of_initiator(text: &str) -> Result<IscsiName, SpecError> {
        proto::iscsi::name::of_peer(text).map(IscsiName).map_err(|why| {
            SpecError::new(
                format!("\"{text}\" is not the name of an initiator: {why}"),
                "for example iqn.1993-08.org.debian:01:abc",
            )
        })
    }
}

impl Borrow<str> for IscsiName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for IscsiName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_all_three_types_are_accepted_and_compared_in_lower_case() {
        for text in [
            "iqn.2026-11.io.blockyard:disk",
            "iqn.1993-08.org.debian:01:abc",
            "iqn.2001-04.com.example",
            "eui.02004567a425678d",
            "naa.52004567ba64678d",
            "naa.62004567ba64678d0123456789abcdef",
        ] {
            assert_eq!(text.parse::<IscsiName>().expect(text).as_str(), text);
        }
        let name: IscsiName = "IQN.2026-11.com.Example:Disk".parse().expect("a name");
        assert_eq!(name.as_str(), "iqn.2026-11.com.example:disk");
    }

    #[test]
    fn other_texts_are_refused_with_the_reason() {
        let long = format!("iqn.2026-11.com.example:{}", "a".repeat(200));
        for (text, why) in [
            ("", "begin with"),
            ("disk", "begin with"),
            ("iqn.disk", "a year and a month"),
            ("iqn.2026-13.com.example", "a year and a month"),
            ("iqn.2026-11", "a reversed domain"),
            ("iqn.2026-11.:disk", "a reversed domain"),
            ("iqn.2026-11.com.example:my disk", "letters, digits"),
            ("iqn.2026-11.com.example:a_b", "letters, digits"),
            ("eui.0200", "hexadecimal"),
            ("naa.x2004567ba64678d", "hexadecimal"),
            (&long, "223"),
        ] {
            let refusal = text.parse::<IscsiName>().expect_err(text).to_string();
            assert!(refusal.contains(why), "{text}: {refusal}");
        }
    }

    #[test]
    fn initiators_may_have_names_that_targets_may_not() {
        let name = IscsiName::of_initiator("iqn.2001-04.com.Example:my_host").expect("a name");
        assert_eq!(name.as_str(), "iqn.2001-04.com.example:my_host");
        assert!(IscsiName::of_initiator("a b").is_err() && IscsiName::of_initiator("").is_err());
    }

    #[test]
    fn the_name_of_a_device_is_a_valid_target_name() {
        for (device, target) in [("disk", "disk"), ("Data_1+x.img", "data-1-x.img")] {
            let name = IscsiName::of_device(&device.parse().expect("a device name"));
            assert_eq!(name.as_str(), format!("iqn.2026-11.io.blockyard:{target}"));
            assert_eq!(name.as_str().parse(), Ok(name));
        }
    }
}
