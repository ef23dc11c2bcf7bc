//! Parameter list of EXTENDED COPY(LID1): SPC-6 section 6.4.

use super::{
    CSCD_MAX, DESCRIPTORS_LEN_MAX, SEGMENTS_MAX, TOO_MANY_SEGMENTS, TOO_MANY_TARGETS, UNSUPPORTED_SEGMENT,
    UNSUPPORTED_TARGET,
};
use crate::Sense;
use crate::bytes::{be8, be16, be24, be32, be64};

/// Bytes before the descriptors.
const HEADER_LEN: usize = super::HEADER_LEN as usize;
/// Bytes of a CSCD descriptor. All types from E4h to E9h have this length.
pub(super) const CSCD_LEN: u16 = 32;
/// Bytes of a segment descriptor of type 02h.
pub(super) const SEGMENT_LEN: u16 = 28;
/// Type of the identification CSCD descriptor.
pub(super) const TYPE_IDENTIFICATION: u8 = 0xE4;
/// Type of the block to block segment descriptor.
pub(super) const TYPE_BLOCK_TO_BLOCK: u8 = 0x02;
/// CSCD descriptor id of the unit that processes the command: SPC-6 table 128.
pub(super) const OWN_UNIT: u16 = 0xFFFF;

/// A copy source or copy destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cscd {
    /// The NUL bit is set.
    Null,
    /// A logical unit.
    Unit {
        /// NAA designator.
        naa: Vec<u8>,
        /// DISK BLOCK LENGTH in bytes, or 0 if not specified.
        block_size: u32,
    },
}

/// A block to block copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Index of the source's CSCD descriptor, or FFFFh.
    pub source: u16,
    /// Index of the destination's CSCD descriptor, or FFFFh.
    pub destination: u16,
    /// Whether `blocks` counts blocks of the destination instead of the source (DC).
    pub counts_destination: bool,
    /// Blocks to copy.
    pub blocks: u16,
    /// First block of the source.
    pub source_lba: u64,
    /// First block of the destination.
    pub destination_lba: u64,
}

/// The parameter list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CopyList {
    /// LIST IDENTIFIER.
    pub id: u8,
    /// Whether the result is held for RECEIVE COPY RESULTS.
    pub holds_result: bool,
    /// Copy sources and destinations.
    pub cscds: Vec<Cscd>,
    /// Copies to execute, in this order.
    pub segments: Vec<Segment>,
}

fn at(byte: usize, bit: Option<u8>) -> Sense {
    Sense::parameter_field(u16::try_from(byte).unwrap_or(u16::MAX), bit)
}

impl CopyList {
    /// Parses a list. Errors: 05/1A/00 if descriptors are truncated or longer than the unit accepts,
    /// 05/26/06 to 05/26/09 for too many or unknown descriptors, 05/26/00 for a wrong field.
    pub fn parse(list: &[u8]) -> Result<CopyList, Sense> {
        let header = list.get(..HEADER_LEN).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
        let (cscd_len, segment_len) = (u32::from(be16(header, 2)), be32(header, 8));
        let descriptors_len = u64::from(cscd_len) + u64::from(segment_len);
        let content_len = HEADER_LEN as u64 + descriptors_len + u64::from(be32(header, 12));
        if (list.len() as u64) < content_len || descriptors_len > u64::from(DESCRIPTORS_LEN_MAX) {
            return Err(Sense::PARAMETER_LIST_LENGTH);
        }
        let usage = be8(header, 1) >> 3 & 0x03;
        // A reserved usage, or a list identifier where the usage allows none.
        if usage == 1 || (usage == 3 && header[0] != 0) {
            return Err(at(1, Some(4)));
        }
        let (cscd_len, segment_len) = (cscd_len as usize, segment_len as usize);
        let cscds = parse_cscds(list.get(HEADER_LEN..HEADER_LEN + cscd_len).unwrap_or(&[]))?;
        let start = HEADER_LEN + cscd_len;
        let segments = parse_segments(list.get(start..start + segment_len).unwrap_or(&[]), start)?;
        // Only unsupported segment types use inline data.
        if be32(header, 12) != 0 {
            return Err(at(12, None));
        }
        Ok(CopyList { id: header[0], holds_result: usage == 0, cscds, segments })
    }
}

fn parse_cscds(list: &[u8]) -> Result<Vec<Cscd>, Sense> {
    let (chunks, rest) = list.as_chunks::<{ CSCD_LEN as usize }>();
    if chunks.len() > CSCD_MAX.into() {
        return Err(TOO_MANY_TARGETS);
    }
    let cscds = chunks.iter().enumerate();
    let cscds = cscds.map(|(index, cscd)| parse_cscd(cscd, HEADER_LEN + index * usize::from(CSCD_LEN)));
    let cscds = cscds.collect::<Result<_, _>>()?;
    if rest.is_empty() { Ok(cscds) } else { Err(Sense::PARAMETER_LIST_LENGTH) }
}

fn parse_cscd(cscd: &[u8; CSCD_LEN as usize], start: usize) -> Result<Cscd, Sense> {
    if cscd[0] != TYPE_IDENTIFICATION {
        return Err(UNSUPPORTED_TARGET);
    }
    // LU ID TYPE is ignored for E4h: SPC-6 section 6.4.5.3. PERIPHERAL DEVICE TYPE must be a direct access
    // block device.
    if cscd[1] & 0x1F != 0 {
        return Err(at(start + 1, Some(4)));
    }
    if cscd[1] & 0x20 != 0 {
        return Ok(Cscd::Null);
    }
    // The code set must be binary, the association logical unit, the designator type NAA.
    if cscd[4] & 0x0F != 1 {
        return Err(at(start + 4, Some(3)));
    }
    if cscd[5] & 0x3F != 0x03 {
        return Err(at(start + 5, Some(5)));
    }
    let naa = cscd.get(8..8 + usize::from(cscd[7])).filter(|naa| matches!(naa.len(), 8 | 16));
    let naa = naa.ok_or(at(start + 7, None))?;
    Ok(Cscd::Unit { naa: naa.to_vec(), block_size: be24(cscd, 29) })
}

fn parse_segments(list: &[u8], start: usize) -> Result<Vec<Segment>, Sense> {
    let (mut segments, mut offset) = (Vec::new(), 0);
    while let Some(rest) = list.get(offset..).filter(|rest| !rest.is_empty()) {
        if segments.len() >= SEGMENTS_MAX.into() {
            return Err(TOO_MANY_SEGMENTS);
        }
        if rest[0] != TYPE_BLOCK_TO_BLOCK {
            return Err(UNSUPPORTED_SEGMENT);
        }
        let segment = rest.get(..SEGMENT_LEN.into()).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
        if be16(segment, 2) != SEGMENT_LEN - 4 {
            return Err(at(start + offset + 2, None));
        }
        segments.push(Segment {
            source: be16(segment, 4),
            destination: be16(segment, 6),
            counts_destination: segment[1] & 0x02 != 0,
            blocks: be16(segment, 10),
            source_lba: be64(segment, 12),
            destination_lba: be64(segment, 20),
        });
        offset += usize::from(SEGMENT_LEN);
    }
    Ok(segments)
}
