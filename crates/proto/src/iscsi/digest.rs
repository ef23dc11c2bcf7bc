//! Header and data digests: CRC32C (RFC 7143, section 13.1), by the processor's instruction where it has one.
//!
//! The header digest covers the BHS and additional headers, the data digest the data segment and its padding.
//! On the wire a digest is the CRC with its least significant byte first.

/// A digest in progress.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Digest(u32);

impl Digest {
    /// Starts a digest.
    pub const fn new() -> Digest {
        Digest(0)
    }

    /// Appends bytes, in chunks of any length.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    /// Appends the zeroes that pad a segment of `len` bytes.
    pub fn pad(&mut self, len: u32) {
        self.update(&[0; 3][..super::pdu::padding(len) as usize]);
    }

    /// Returns the four bytes on the wire.
    pub const fn finish(self) -> [u8; 4] {
        self.0.to_le_bytes()
    }
}

/// Returns the digest of `bytes`, as the four bytes on the wire.
pub fn of(bytes: &[u8]) -> [u8; 4] {
    let mut digest = Digest::new();
    digest.update(bytes);
    digest.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The examples of RFC 7143, appendix B.4 of RFC 3720.
    #[test]
    fn examples_of_the_standard() {
        assert_eq!(of(&[0; 32]), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(of(&[0xff; 32]), [0x43, 0xab, 0xa8, 0x62]);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(of(&rising), [0x4e, 0x79, 0xdd, 0x46]);
        let falling: Vec<u8> = (0..32).rev().collect();
        assert_eq!(of(&falling), [0x5c, 0xdb, 0x3f, 0x11]);
    }

    proptest! {
        #[test]
        fn pieces_have_the_digest_of_the_whole(bytes: Vec<u8>, at: prop::sample::Index) {
            let (head, tail) = bytes.split_at(at.index(bytes.len() + 1));
            let mut digest = Digest::new();
            digest.update(head);
            digest.update(tail);
            prop_assert_eq!(digest.finish(), of(&bytes));
        }
    }
}
