//! Logical unit numbers as SAM encodes them in the LUN field (SAM-5, section 4.7; RFC 7143, section 11.2.1.7).

/// Largest LUN that [`encode`] can express: 24 bits of extended flat space addressing.
pub const MAX_LUN: u32 = (1 << 24) - 1;

/// Decodes a LUN field of a single-level address, or returns `None` for other formats, which no logical unit of
/// ours has. Peripheral device (bus 0), flat space, and extended flat space addressing are understood.
pub const fn decode(field: u64) -> Option<u32> {
    let [a, b, c, d, ..] = field.to_be_bytes();
    let (method, low) = (a >> 6, a & 0x3f);
    match method {
        // Peripheral device addressing: the bus is 0.
        0 if low == 0 && field << 16 == 0 => Some(b as u32),
        // Flat space addressing: 14 bits.
        1 if field << 16 == 0 => Some((low as u32) << 8 | b as u32),
        // Extended logical unit addressing: length 1 (3 bytes), method 2 (extended flat space).
        3 if low == 0x12 && field << 32 == 0 => Some(u32::from_be_bytes([0, b, c, d])),
        _ => None,
    }
}

/// Encodes a LUN in the shortest format: peripheral device addressing up to 255, flat space up to 16383, then
/// extended flat space addressing. Returns `None` above [`MAX_LUN`].
pub const fn encode(lun: u32) -> Option<u64> {
    let lun = lun as u64;
    match lun {
        0..=0xff => Some(lun << 48),
        0x100..=0x3fff => Some((lun | 0x4000) << 48),
        0x4000..=0xff_ffff => Some((lun | 0xd200_0000) << 32),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lun_survives_encoding() {
        for lun in (0..=0x4100).chain([0xffff, 0x1_0000, MAX_LUN]) {
            assert_eq!(encode(lun).and_then(decode), Some(lun));
        }
        assert_eq!(encode(MAX_LUN + 1), None);
    }

    #[test]
    fn formats_are_those_of_sam() {
        assert_eq!(encode(1), Some(0x0001_0000_0000_0000));
        assert_eq!(encode(0x100), Some(0x4100_0000_0000_0000));
        assert_eq!(encode(0x4000), Some(0xd200_4000_0000_0000));
        assert_eq!(decode(0x4001_0000_0000_0000), Some(1), "initiators may use flat space for small LUNs");
    }

    #[test]
    fn other_formats_are_no_logical_unit() {
        for field in [0x0101_0000_0000_0000, 0x0000_0001_0000_0000, 0x8000_0000_0000_0000, u64::MAX, 1] {
            assert_eq!(decode(field), None, "{field:#x}");
        }
    }
}
