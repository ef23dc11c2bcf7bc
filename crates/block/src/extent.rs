//! What [`Op::Extents`](crate::Op::Extents) answers with: how a range is backed.

use crate::Bytes;

/// One stretch of a device that is backed alike throughout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Its length. Never 0.
    pub len: Bytes,
    /// Nothing is allocated for it.
    pub hole: bool,
    /// It reads as zeroes.
    pub zero: bool,
}

impl Extent {
    /// Bytes of one record in a request's data: `len` as u64 and the two flags as bits 0 and 1 of
    /// another u64, both native-endian.
    pub const RECORD_LEN: usize = 16;

    /// Written out as a record.
    pub fn to_record(self) -> [u8; Self::RECORD_LEN] {
        let mut record = [0; Self::RECORD_LEN];
        record[..8].copy_from_slice(&self.len.0.to_ne_bytes());
        let flags = u64::from(self.hole) | u64::from(self.zero) << 1;
        record[8..].copy_from_slice(&flags.to_ne_bytes());
        record
    }

    /// Read back from a record; `None` when there are too few bytes or the length is 0.
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
    fn a_record_reads_back() {
        for (hole, zero) in [(false, false), (true, false), (false, true), (true, true)] {
            let extent = Extent { len: Bytes(1 << 40), hole, zero };
            assert_eq!(Extent::from_record(&extent.to_record()), Some(extent));
        }
        assert_eq!(Extent::from_record(&[0; 16]), None);
        assert_eq!(Extent::from_record(&[1; 15]), None);
    }
}
