//! CHAP: challenges and responses (RFC 1994; RFC 7143, sections 12.1.3 and 12.1.4).
//!
//! Secrets are in [`super::login::Secret`]. Responses are compared in constant time.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use subtle::ConstantTimeEq as _;

use super::login::Secret;

/// Longest binary value in bytes (RFC 7143, section 6.1).
pub const MAX_BINARY: usize = 1024;
/// Random bytes for one login: an identifier and a challenge.
pub const NONCE_LEN: usize = 33;

/// Hash function (CHAP_A).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Algorithm {
    /// MD5, which every implementation has.
    Md5 = 5,
    /// SHA-1.
    Sha1 = 6,
    /// SHA-256.
    Sha256 = 7,
    /// SHA3-256.
    Sha3_256 = 8,
}

impl Algorithm {
    /// All algorithms, the strongest first.
    pub const ALL: [Algorithm; 4] = [Algorithm::Sha3_256, Algorithm::Sha256, Algorithm::Sha1, Algorithm::Md5];

    /// Converts the number in CHAP_A.
    pub fn from_code(code: u64) -> Option<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| u64::from(algorithm.code()) == code)
    }

    /// Number in CHAP_A.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Bytes of a response, which is also the length of our challenges, as in LIO.
    pub const fn response_len(self) -> usize {
        match self {
            Algorithm::Md5 => 16,
            Algorithm::Sha1 => 20,
            Algorithm::Sha256 | Algorithm::Sha3_256 => 32,
        }
    }

    /// Computes the response: the hash of identifier, secret and challenge (RFC 1994, section 4.1).
    pub fn response(self, identifier: u8, secret: &Secret, challenge: &[u8]) -> Vec<u8> {
        let parts = [&[identifier][..], secret.expose(), challenge];
        match self {
            Algorithm::Md5 => hash::<md5::Md5>(parts),
            Algorithm::Sha1 => hash::<sha1::Sha1>(parts),
            Algorithm::Sha256 => hash::<sha2::Sha256>(parts),
            Algorithm::Sha3_256 => hash::<sha3::Sha3_256>(parts),
        }
    }

    /// Checks a response, in a time that depends on its length only.
    pub fn verify(self, identifier: u8, secret: &Secret, challenge: &[u8], response: &[u8]) -> bool {
        self.response(identifier, secret, challenge).ct_eq(response).into()
    }
}

fn hash<D: sha1::Digest>(parts: [&[u8]; 3]) -> Vec<u8> {
    let mut hasher = D::new();
    parts.iter().for_each(|part| hasher.update(part));
    hasher.finalize().to_vec()
}

/// Chooses the first algorithm of a CHAP_A list that is supported.
pub fn choose(list: &str) -> Option<Algorithm> {
    list.split(',').find_map(|code| Algorithm::from_code(super::text::number(code)?))
}

/// Decodes a binary value: hexadecimal after `0x`, or base64 after `0b` (RFC 7143, section 6.1). Returns `None`
/// if it is malformed or longer than [`MAX_BINARY`].
pub fn decode(value: &str) -> Option<Vec<u8>> {
    let (prefix, digits) = value.split_at_checked(2)?;
    let bytes = match prefix {
        "0x" | "0X" => decode_hex(digits)?,
        "0b" | "0B" => STANDARD.decode(digits).or_else(|_| STANDARD_NO_PAD.decode(digits)).ok()?,
        _ => return None,
    };
    (!bytes.is_empty() && bytes.len() <= MAX_BINARY).then_some(bytes)
}

/// Decodes hexadecimal digits. The first byte may have a single digit.
fn decode_hex(digits: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let (first, rest) = digits.as_bytes().split_at(digits.len() % 2);
    let pairs = rest.as_chunks::<2>().0.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?));
    first.iter().map(|byte| digit(*byte)).chain(pairs).collect()
}

/// Encodes a binary value: `0x` and hexadecimal digits, which every implementation understands.
pub fn encode(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
    let digits = digits.filter_map(|digit| char::from_digit(digit.into(), 16));
    "0x".chars().chain(digits).collect()
}

/// Encodes a binary value: `0b` and base64 digits.
pub fn encode_base64(bytes: &[u8]) -> String {
    format!("0b{}", STANDARD.encode(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Computed with `printf '\x27secretsecret0123456789' | md5sum`, sha1sum, sha256sum and openssl's sha3-256.
    #[test]
    fn responses_are_those_of_other_implementations() {
        let secret = Secret::new("secretsecret");
        let challenge: Vec<u8> = (b'0'..=b'9').collect();
        for (algorithm, expected) in [
            (Algorithm::Md5, "a4cf8244a449c129735c377513fe435d"),
            (Algorithm::Sha1, "d7034704896a0e93196dafe24aac7ed1344fa018"),
            (Algorithm::Sha256, "f5e6058178de77a8b233ce2dbebe75d79c181aad79ba23076dfb44074183dd8b"),
            (Algorithm::Sha3_256, "4b05b03bc0315778c0e57402298d22d059bbb6a50a2d73b472844093535f65a7"),
        ] {
            let response = algorithm.response(0x27, &secret, &challenge);
            assert_eq!(encode(&response), format!("0x{expected}"));
            assert_eq!(response.len(), algorithm.response_len());
            assert!(algorithm.verify(0x27, &secret, &challenge, &response));
            assert!(!algorithm.verify(0x28, &secret, &challenge, &response));
            assert!(!algorithm.verify(0x27, &secret, &challenge, &response[1..]));
            assert!(!algorithm.verify(0x27, &Secret::new("other"), &challenge, &response));
        }
    }

    #[test]
    fn first_known_algorithm_of_the_list_is_chosen() {
        assert_eq!(choose("5,6,7,8"), Some(Algorithm::Md5));
        assert_eq!(choose("9,7,5"), Some(Algorithm::Sha256));
        assert_eq!(choose("0x8"), Some(Algorithm::Sha3_256));
        for bad in ["", "56", "5 ", "md5", ",", "4"] {
            assert_eq!(choose(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn binary_values_are_hexadecimal_or_base64() {
        assert_eq!(decode("0xAb0c"), Some(vec![0xab, 0x0c]));
        assert_eq!(decode("0Xabc"), Some(vec![0x0a, 0xbc]));
        assert_eq!(decode("0bqww="), Some(vec![0xab, 0x0c]));
        assert_eq!(decode("0Bqww"), Some(vec![0xab, 0x0c]));
        let long = format!("0x{}", "00".repeat(MAX_BINARY + 1));
        for bad in ["", "0", "0x", "0b", "0xg0", "0b*", "abcd", "12", "0xäb", &long] {
            assert_eq!(decode(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn secrets_are_never_printed() {
        assert_eq!(format!("{:?}", Secret::new("geheim")), "Secret(..)");
    }

    proptest! {
        #[test]
        fn binary_values_survive_encoding(bytes in prop::collection::vec(any::<u8>(), 1..100)) {
            prop_assert_eq!(decode(&encode(&bytes)), Some(bytes.clone()));
            prop_assert_eq!(decode(&encode_base64(&bytes)), Some(bytes));
        }
    }
}
