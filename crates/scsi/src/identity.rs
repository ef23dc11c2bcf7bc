//! Names of a logical unit: INQUIRY's strings and the designators of VPD page 83h.

/// Names of a logical unit that do not change while it exists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// T10 vendor identification; only the first 8 ASCII characters are used.
    pub vendor: String,
    /// Product identification; only the first 16 ASCII characters are used.
    pub product: String,
    /// Product identification while the attribute `emulate_model_alias` is on: the name of the backstore.
    pub alias: String,
    /// Product revision; only the first 4 ASCII characters are used.
    pub revision: String,
    /// Unit serial number: VPD page 80h.
    pub serial: String,
    /// NAA designator of type 6h: VPD page 83h.
    pub naa: [u8; 16],
}

/// Designators of the path on which a command arrived, for VPD page 83h.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Designators {
    /// Relative target port identifier: SPC-6 section 3.1.
    pub relative_port: u16,
    /// ALUA target port group.
    pub port_group: u16,
}

impl Identity {
    /// IEEE company id of LIO's NAA designators, so that a unit moved from LIO keeps its name.
    const COMPANY: u32 = 0x00_1405;

    /// Creates an identity from a serial number. The NAA designator is computed as LIO does: `6001405`, followed by
    /// the first 25 hexadecimal digits of the serial number.
    pub fn new(vendor: &str, product: &str, revision: &str, serial: &str) -> Identity {
        let mut nibbles = [0_u8; 32];
        nibbles[0] = 6;
        for (index, nibble) in nibbles[1..7].iter_mut().enumerate() {
            *nibble = (Identity::COMPANY >> (20 - 4 * index) & 0xF) as u8;
        }
        let digits = serial.chars().filter_map(|letter| letter.to_digit(16));
        nibbles[7..].iter_mut().zip(digits).for_each(|(nibble, digit)| *nibble = digit as u8);
        let naa = std::array::from_fn(|index| nibbles[2 * index] << 4 | nibbles[2 * index + 1]);
        Identity {
            vendor: vendor.to_owned(),
            product: product.to_owned(),
            alias: product.to_owned(),
            revision: revision.to_owned(),
            serial: serial.to_owned(),
            naa,
        }
    }
}

/// Returns an ASCII field of fixed length, left-aligned and padded with spaces: SPC-6 section 4.3.1. Other
/// characters become `?`.
pub(crate) fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    field.iter_mut().zip(text.chars()).for_each(|(byte, letter)| {
        *byte = if (' '..='~').contains(&letter) { letter as u8 } else { b'?' };
    });
    field
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_naa_designator_is_the_one_that_lio_computes() {
        let identity = Identity::new("LIO-ORG", "disk", "4.0", "7f2a2e05-2b42-4a8f-9c0e-77f6a0c2b1aa");
        let hex: String = identity.naa.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "60014057f2a2e052b424a8f9c0e77f6a");
    }

    #[test]
    fn fields_are_padded_and_cut() {
        assert_eq!(&padded::<4>("ab"), b"ab  ");
        assert_eq!(&padded::<4>("abcdef"), b"abcd");
        assert_eq!(&padded::<4>("ä\n"), b"??  ");
    }
}
