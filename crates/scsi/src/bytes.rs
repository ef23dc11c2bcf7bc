//! Big-endian fields of byte strings. Bytes past the end of a string read as zero.

/// Reads `N` bytes from `at` on.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes.get(at + index).copied().unwrap_or(0))
}

/// Reads one byte.
pub(crate) fn be8(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0)
}

/// Reads two bytes.
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(field(bytes, at))
}

/// Reads three bytes.
pub(crate) fn be24(bytes: &[u8], at: usize) -> u32 {
    let [high, middle, low] = field(bytes, at);
    u32::from_be_bytes([0, high, middle, low])
}

/// Reads four bytes.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(field(bytes, at))
}

/// Reads eight bytes.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(field(bytes, at))
}

/// Writes bytes at an offset. Bytes that do not fit are left out.
pub(crate) fn put(into: &mut [u8], at: usize, bytes: &[u8]) {
    into.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
}
