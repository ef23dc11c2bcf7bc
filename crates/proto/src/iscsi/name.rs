//! iSCSI names: `iqn.`, `eui.` and `naa.` (RFC 7143, section 4.2.7; normal form: RFC 3722).
//!
//! Names are compared in normal form: lower case. [`normalise`] checks the whole form, for names that a user
//! chooses; [`of_peer`] checks what is needed to use a peer's name safely, as LIO does: initiators exist whose
//! names have underscores or lack a date.

/// Longest name in bytes (section 4.2.7.1). With its NUL it takes LIO's 224 bytes.
pub const MAX_NAME: usize = 223;

/// Reason why a text is not an iSCSI name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NameError {
    /// The text is empty or longer than [`MAX_NAME`].
    #[error("an iSCSI name has 1 to {MAX_NAME} bytes")]
    Length,
    /// The text does not start with a known type.
    #[error("an iSCSI name starts with iqn., eui. or naa.")]
    Type,
    /// A character is not allowed.
    #[error("iSCSI names have letters, digits, '-', '.' and ':' only, not {0:?}")]
    Character(char),
    /// The date or the naming authority of an `iqn.` name is missing.
    #[error("an iqn. name has the form iqn.YYYY-MM.REVERSED-DOMAIN[:NAME]")]
    Iqn,
    /// The number of hexadecimal digits of an `eui.` or `naa.` name is wrong.
    #[error("eui. is followed by 16 hexadecimal digits, naa. by 16 or 32")]
    Digits,
}

/// Checks a name that a user chose, and returns its normal form.
///
/// # Errors
/// The text is not a valid iSCSI name.
pub fn normalise(text: &str) -> Result<String, NameError> {
    let name = lower(text)?;
    if let Some(c) = name.chars().find(|c| c.is_ascii() && !(c.is_ascii_alphanumeric() || "-.:".contains(*c)))
    {
        return Err(NameError::Character(c));
    }
    let (kind, rest) = name.split_at_checked(4).ok_or(NameError::Type)?;
    let is_hex = rest.bytes().all(|byte| byte.is_ascii_hexdigit());
    match kind {
        "iqn." if is_iqn(rest) => Ok(name),
        "iqn." => Err(NameError::Iqn),
        "eui." if is_hex && rest.len() == 16 => Ok(name),
        "naa." if is_hex && (rest.len() == 16 || rest.len() == 32) => Ok(name),
        "eui." | "naa." => Err(NameError::Digits),
        _ => Err(NameError::Type),
    }
}

/// Checks a name that a peer sent, and returns its normal form: of bounded length, without control
/// characters, spaces or commas.
///
/// # Errors
/// The text is empty, too long, or has a character that is not allowed in a name.
pub fn of_peer(text: &str) -> Result<String, NameError> {
    let name = lower(text)?;
    match name.chars().find(|c| c.is_control() || c.is_whitespace() || *c == ',') {
        Some(c) => Err(NameError::Character(c)),
        None => Ok(name),
    }
}

/// Converts to lower case, and checks the length.
fn lower(text: &str) -> Result<String, NameError> {
    if text.is_empty() || text.len() > MAX_NAME {
        return Err(NameError::Length);
    }
    let name = text.to_lowercase();
    // Some characters are longer in lower case, so the length is checked again.
    if name.len() > MAX_NAME { Err(NameError::Length) } else { Ok(name) }
}

/// Checks `YYYY-MM.AUTHORITY[:NAME]`.
fn is_iqn(rest: &str) -> bool {
    let Some((date, after)) = rest.split_once('.') else { return false };
    let Some((year, month)) = date.split_once('-') else { return false };
    let number = |text: &str, len| text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit());
    let authority = after.split(':').next().unwrap_or_default();
    number(year, 4)
        && number(month, 2)
        && ("01"..="12").contains(&month)
        && authority.split('.').all(|label| !label.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_all_types_are_lowered() {
        for (given, normal) in [
            ("iqn.2003-01.org.linux-iscsi.HOST:sn.42", "iqn.2003-01.org.linux-iscsi.host:sn.42"),
            ("IQN.1993-08.org.debian:01:ABC", "iqn.1993-08.org.debian:01:abc"),
            ("iqn.2001-04.com.example", "iqn.2001-04.com.example"),
            ("eui.02004567A425678D", "eui.02004567a425678d"),
            ("naa.52004567BA64678D", "naa.52004567ba64678d"),
            ("naa.62004567BA64678D0123456789ABCDEF", "naa.62004567ba64678d0123456789abcdef"),
            ("iqn.2001-04.com.example:dißk", "iqn.2001-04.com.example:dißk"),
        ] {
            assert_eq!(normalise(given).as_deref(), Ok(normal));
            assert_eq!(of_peer(given).as_deref(), Ok(normal));
        }
    }

    #[test]
    fn malformed_names_are_refused() {
        let long = format!("iqn.2001-04.com.example:{}", "a".repeat(MAX_NAME));
        for (given, why) in [
            ("", NameError::Length),
            (&long, NameError::Length),
            ("disk", NameError::Type),
            ("iq", NameError::Type),
            ("iqn.", NameError::Iqn),
            ("iqn.2001-13.com.example", NameError::Iqn),
            ("iqn.2001-4.com.example", NameError::Iqn),
            ("iqn.2001-04.", NameError::Iqn),
            ("iqn.2001-04:x", NameError::Iqn),
            ("iqn.2001-04.com..example", NameError::Iqn),
            ("eui.123", NameError::Digits),
            ("naa.52004567ba64678g", NameError::Digits),
            ("iqn.2001-04.com.example:a b", NameError::Character(' ')),
            ("iqn.2001-04.com.example:a_b", NameError::Character('_')),
        ] {
            assert_eq!(normalise(given), Err(why), "{given}");
        }
    }

    #[test]
    fn names_of_peers_may_have_any_form_but_no_separators() {
        assert!(of_peer("iqn.1993-08.org.debian:my_host").is_ok());
        assert!(of_peer("host").is_ok());
        for bad in ["", "a b", "a,b", "a\nb", "a\0b"] {
            assert!(of_peer(bad).is_err(), "{bad:?}");
        }
    }
}
