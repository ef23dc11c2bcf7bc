//! Allocation status of a range, as [`Op::Extents`](crate::Op::Extents) reports it.

use crate::Bytes;

/// A range of a device with a single allocation status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Length in bytes; never 0.
    pub len: Bytes,
    /// Nothing is allocated for this range.
    pub hole: bool,
    /// The range reads as zeroes.
    pub zero: bool,
}

impl Extent {
    /// Bytes of one record in a request's data: `len` as u64, then a u64 with `hole` in bit 0 and `zero` in
    /// bit 1, both native-endian.
    pub const RECORD_LEN: usize = 16;

    /// Encodes the extent as a record.
    pub fn to_record(self) -> [u8; Self::RECORD_LEN] {
        let mut record = [0; Self::RECORD_LEN];
        record[..8].copy_from_slice(&self.len.0.to_ne_bytes());
        let flags = u64::from(self.hole) | u64::from(self.zero) << 1;
        record[8..].copy_from_slice(&flags.to_ne_bytes());
        record
    }

    /// Decodes a record; `None` when there are too few bytes or the length is 0.
    pub fn from_record(record: &[u8]) -> Option<Extent> {
        let len = u64::from_ne_bytes(record.get(..8)?.try_into().ok()?);
        let flags = u64::from_ne_bytes(record.get(8..16)?.try_into().ok()?);
        (len > 0).then_some(Extent { len: Bytes(len), hole: flags & 1 != 0, zero: flags & 2 != 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_record_decodes_to_the_same_extent() {
        for (hole, zero) in [(false, false), (true, false), (false, true), (true, true)] {
            let extent = Extent { len: Bytes(1 << 40), hole, zero };
            assert_eq!(Extent::from_record(&extent.to_record()), Some(extent));
        }
        assert_eq!(Extent::from_record(&[0; 16]), None);
        assert_eq!(Extent::from_record(&[1; 15]), None);
    }
}
