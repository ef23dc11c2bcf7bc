//! Additional header segments of a SCSI Command (RFC 7143, section 11.2.2).

use super::PduError;

/// Maximum length of all additional header segments, in bytes: the length field counts 255 words.
pub const MAX_AHS_LEN: u32 = 255 * 4;

/// Additional headers of a SCSI Command.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Ahs<'a> {
    /// Bytes of the CDB after its 16th, if the CDB is longer (section 11.2.2.3).
    pub extended_cdb: Option<&'a [u8]>,
    /// Expected length of the data-in of a bidirectional command, in bytes (section 11.2.2.4).
    pub bidirectional_read_len: Option<u32>,
}

/// Type of the segment with the rest of a long CDB.
const EXTENDED_CDB: u8 = 1;
/// Type of the segment with the read length of a bidirectional command.
const BIDIRECTIONAL: u8 = 2;

impl<'a> Ahs<'a> {
    /// Parses the additional headers of a SCSI Command. Each kind may occur once; unknown kinds are refused.
    ///
    /// # Errors
    /// A segment is cut off, repeated, of an unknown kind, or has a length that its kind does not allow.
    pub fn parse(mut bytes: &'a [u8]) -> Result<Ahs<'a>, PduError> {
        let mut ahs = Ahs::default();
        while let Some((&[high, low, kind], rest)) = bytes.split_first_chunk() {
            // The length counts the bytes after the type.
            let len = usize::from(u16::from_be_bytes([high, low]));
            let cut_off = PduError::InvalidAhs("a segment is cut off");
            let (segment, _) = rest.split_at_checked(len).ok_or(cut_off)?;
            bytes = rest.get((len + 3).next_multiple_of(4) - 3..).ok_or(cut_off)?;
            match (kind & 0x3f, segment) {
                // The first byte is reserved, and the length of a CDB is a multiple of four bytes.
                (EXTENDED_CDB, [_, cdb @ ..]) if !cdb.is_empty() => {
                    if ahs.extended_cdb.replace(cdb).is_some() {
                        return Err(PduError::InvalidAhs("two extended CDBs"));
                    }
                }
                (BIDIRECTIONAL, &[_, a, b, c, d]) => {
                    let len = u32::from_be_bytes([a, b, c, d]);
                    if ahs.bidirectional_read_len.replace(len).is_some() {
                        return Err(PduError::InvalidAhs("two read lengths"));
                    }
                }
                (EXTENDED_CDB | BIDIRECTIONAL, _) => return Err(PduError::InvalidAhs("wrong length")),
                _ => return Err(PduError::InvalidAhs("unknown type")),
            }
        }
        if bytes.is_empty() { Ok(ahs) } else { Err(PduError::InvalidAhs("a segment is cut off")) }
    }

    /// Appends the segment with the bytes of a CDB after its 16th.
    pub fn put_extended_cdb(out: &mut Vec<u8>, rest: &[u8]) {
        let len = (rest.len() + 1).min(usize::from(u16::MAX)) as u16;
        out.extend_from_slice(&len.to_be_bytes());
        out.extend_from_slice(&[EXTENDED_CDB, 0]);
        out.extend_from_slice(rest);
        out.resize(out.len().next_multiple_of(4), 0);
    }
}
