//! Text of login and text PDUs: `key=value` pairs, each ended by a NUL (RFC 7143, section 6.1).
//!
//! A text may span PDUs (C bit); a [`Collector`] gathers it up to [`MAX_TEXT`] bytes and [`MAX_PAIRS`] pairs, so
//! that the answers fit in the 8192 bytes of a login response.

/// Longest text, over all PDUs that it spans, in bytes.
pub const MAX_TEXT: usize = 16 << 10;
/// Maximum number of pairs in a text.
pub const MAX_PAIRS: usize = 64;
/// Longest key in bytes (section 6.1).
pub const MAX_KEY: usize = 63;
/// Longest value in bytes (section 6.1: 255, or 8192 for some keys; binary values have up to 1024 bytes).
pub const MAX_VALUE: usize = 8192;

/// Value that rejects an offer.
pub const REJECT: &str = "Reject";
/// Value that answers an unknown key.
pub const NOT_UNDERSTOOD: &str = "NotUnderstood";
/// Value that answers a key that has no meaning in this session.
pub const IRRELEVANT: &str = "Irrelevant";

/// Reason why a text is malformed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TextError {
    /// The text is too long.
    #[error("text of more than {MAX_TEXT} bytes")]
    TooLong,
    /// There are too many pairs.
    #[error("text of more than {MAX_PAIRS} pairs")]
    TooManyPairs,
    /// A pair has no `=`, an empty or malformed key, or a key that is too long.
    #[error("malformed key")]
    Key,
    /// A value is too long.
    #[error("value of more than {MAX_VALUE} bytes")]
    Value,
    /// The text is not UTF-8.
    #[error("text is not UTF-8")]
    Encoding,
}

/// Text of one or more PDUs.
#[derive(Clone, Default, Debug)]
pub struct Collector {
    buffer: Vec<u8>,
}

impl Collector {
    /// Appends the data segment of a PDU.
    ///
    /// # Errors
    /// The text is too long.
    pub fn push(&mut self, data: &[u8]) -> Result<(), TextError> {
        if self.buffer.len() + data.len() > MAX_TEXT {
            return Err(TextError::TooLong);
        }
        self.buffer.extend_from_slice(data);
        Ok(())
    }

    /// Takes the whole text, and leaves the collector empty.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    /// Drops the text gathered so far.
    pub fn clear(&mut self) {
        self.buffer = Vec::new();
    }
}

/// Splits a text into its pairs.
///
/// Surplus NULs between pairs are ignored, and the last NUL may be missing: some initiators pad the text
/// this way.
///
/// # Errors
/// The text is malformed.
pub fn pairs(text: &[u8]) -> Result<Vec<(&str, &str)>, TextError> {
    let mut pairs = Vec::new();
    for pair in text.split(|byte| *byte == 0).filter(|pair| !pair.is_empty()) {
        if pairs.len() == MAX_PAIRS {
            return Err(TextError::TooManyPairs);
        }
        let pair = std::str::from_utf8(pair).map_err(|_| TextError::Encoding)?;
        let (key, value) = pair.split_once('=').ok_or(TextError::Key)?;
        if key.is_empty() || key.len() > MAX_KEY || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TextError::Key);
        }
        if value.len() > MAX_VALUE {
            return Err(TextError::Value);
        }
        pairs.push((key, value));
    }
    Ok(pairs)
}

/// Appends a pair and its NUL.
pub fn put(out: &mut Vec<u8>, key: &str, value: &str) {
    out.extend_from_slice(key.as_bytes());
    out.push(b'=');
    out.extend_from_slice(value.as_bytes());
    out.push(0);
}

/// Parses a decimal or hexadecimal (`0x`) number (section 6.1).
pub fn number(value: &str) -> Option<u64> {
    let (digits, radix) = match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None => (value, 10),
    };
    // `from_str_radix` accepts a sign, which the standard does not allow.
    let valid = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if valid { u64::from_str_radix(digits, radix).ok() } else { None }
}

/// Parses `Yes` or `No`.
pub fn boolean(value: &str) -> Option<bool> {
    match value {
        "Yes" => Some(true),
        "No" => Some(false),
        _ => None,
    }
}

/// Returns `Yes` or `No`.
pub const fn yes_no(value: bool) -> &'static str {
    if value { "Yes" } else { "No" }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pairs_end_with_nul_and_surplus_nuls_are_ignored() {
        let expected = [("InitiatorName", "iqn.a"), ("Empty", ""), ("X-a.b", "c=d")];
        assert_eq!(pairs(b"InitiatorName=iqn.a\0\0Empty=\0X-a.b=c=d\0\0\0").as_deref(), Ok(&expected[..]));
        assert_eq!(pairs(b"a=b").as_deref(), Ok(&[("a", "b")][..]), "the last NUL may be missing");
        assert_eq!(pairs(b""), Ok(Vec::new()));
    }

    #[test]
    fn malformed_pairs_are_refused() {
        assert_eq!(pairs(b"novalue\0"), Err(TextError::Key));
        assert_eq!(pairs(b"=x\0"), Err(TextError::Key));
        assert_eq!(pairs(b"a b=x\0"), Err(TextError::Key));
        assert_eq!(pairs(format!("{}=x", "k".repeat(64)).as_bytes()), Err(TextError::Key));
        assert_eq!(pairs(format!("k={}", "x".repeat(8193)).as_bytes()), Err(TextError::Value));
        assert_eq!(pairs(b"a=\xff\0"), Err(TextError::Encoding));
        assert_eq!(pairs(&b"a=b\0".repeat(65)), Err(TextError::TooManyPairs));
    }

    #[test]
    fn text_over_many_pdus_is_bounded() {
        let mut collector = Collector::default();
        assert_eq!(collector.push(&[b'a'; MAX_TEXT]), Ok(()));
        assert_eq!(collector.push(&[0]), Err(TextError::TooLong));
        assert_eq!(collector.take().len(), MAX_TEXT);
        assert_eq!(collector.push(&[0]), Ok(()));
    }

    #[test]
    fn numbers_are_decimal_or_hexadecimal_without_sign() {
        assert_eq!(number("262144"), Some(262_144));
        assert_eq!(number("0x40000"), Some(262_144));
        for bad in ["", "0x", "+1", "-1", "0x+1", "1 ", "12a", "99999999999999999999"] {
            assert_eq!(number(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text: Vec<u8>) {
            if let Ok(pairs) = pairs(&text) {
                let mut again = Vec::new();
                pairs.iter().for_each(|(key, value)| put(&mut again, key, value));
                prop_assert_eq!(super::pairs(&again), Ok(pairs));
            }
        }
    }
}
