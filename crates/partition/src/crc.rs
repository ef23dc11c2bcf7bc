//! CRC-32 as GPT has it: the polynomial of IEEE 802.3, reflected.

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut value = index as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ 0xedb8_8320 } else { value >> 1 };
            bit += 1;
        }
        table[index] = value;
        index += 1;
    }
    table
};

/// The CRC of these pieces, one behind the other.
pub(crate) fn crc32(pieces: &[&[u8]]) -> u32 {
    let mut value = u32::MAX;
    for &byte in pieces.iter().copied().flatten() {
        value = value >> 8 ^ TABLE[usize::from(value as u8 ^ byte)];
    }
    !value
}

#[cfg(test)]
mod tests {
    use super::crc32;

    #[test]
    fn the_check_value_of_the_catalogue_comes_out() {
        assert_eq!(crc32(&[b"12345", b"6789"]), 0xcbf4_3926);
        assert_eq!(crc32(&[]), 0);
    }
}
