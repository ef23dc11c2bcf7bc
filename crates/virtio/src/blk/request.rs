//! Requests: a header, data, and a status byte, wherever the driver puts the descriptor boundaries (2.6.4:
//! the device must not rely on message framing).

use super::{Config, HEADER_LEN, RANGE_LEN, S_IOERR, S_UNSUPP, SECTOR};
use crate::Features;
use crate::memory::{GuestMemory, Span};
use crate::ring::{Chain, Head};
use block::{Bytes, Flags, Op};

/// Type of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `VIRTIO_BLK_T_IN`.
    Read,
    /// `VIRTIO_BLK_T_OUT`.
    Write,
    /// `VIRTIO_BLK_T_FLUSH`.
    Flush,
    /// `VIRTIO_BLK_T_GET_ID`.
    GetId,
    /// `VIRTIO_BLK_T_DISCARD`.
    Discard,
    /// `VIRTIO_BLK_T_WRITE_ZEROES`.
    WriteZeroes,
    /// `VIRTIO_BLK_T_ZONE_APPEND`.
    ZoneAppend,
    /// `VIRTIO_BLK_T_ZONE_REPORT`.
    ZoneReport,
    /// `VIRTIO_BLK_T_ZONE_OPEN`.
    ZoneOpen,
    /// `VIRTIO_BLK_T_ZONE_CLOSE`.
    ZoneClose,
    /// `VIRTIO_BLK_T_ZONE_FINISH`.
    ZoneFinish,
    /// `VIRTIO_BLK_T_ZONE_RESET`.
    ZoneReset,
    /// `VIRTIO_BLK_T_ZONE_RESET_ALL`.
    ZoneResetAll,
    /// A type that this device does not support, with its number.
    Other(u32),
}

impl Kind {
    /// Converts the number in a header.
    #[inline]
    pub const fn from_number(number: u32) -> Kind {
        match number {
            0 => Kind::Read,
            1 => Kind::Write,
            4 => Kind::Flush,
            8 => Kind::GetId,
            11 => Kind::Discard,
            13 => Kind::WriteZeroes,
            15 => Kind::ZoneAppend,
            16 => Kind::ZoneReport,
            18 => Kind::ZoneOpen,
            20 => Kind::ZoneClose,
            22 => Kind::ZoneFinish,
            24 => Kind::ZoneReset,
            26 => Kind::ZoneResetAll,
            other => Kind::Other(other),
        }
    }

    /// Returns the number in a header.
    pub const fn number(self) -> u32 {
        match self {
            Kind::Read => 0,
            Kind::Write => 1,
            Kind::Flush => 4,
            Kind::GetId => 8,
            Kind::Discard => 11,
            Kind::WriteZeroes => 13,
            Kind::ZoneAppend => 15,
            Kind::ZoneReport => 16,
            Kind::ZoneOpen => 18,
            Kind::ZoneClose => 20,
            Kind::ZoneFinish => 22,
            Kind::ZoneReset => 24,
            Kind::ZoneResetAll => 26,
            Kind::Other(number) => number,
        }
    }

    /// Returns whether the device writes the data of the request.
    #[inline]
    const fn fills_data(self) -> bool {
        matches!(self, Kind::Read | Kind::GetId | Kind::ZoneReport)
    }
}

/// A chain has no space for a header or a status byte. It is not a request, so it cannot be failed either;
/// the device needs a reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Malformed {
    /// The chain has fewer than 16 readable bytes.
    #[error("a request without a header")]
    Header,
    /// The chain has no writable byte.
    #[error("a request without a status byte")]
    Status,
}

/// Everything needed to complete a request: plain data, to be kept while the request is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Identifies the chain.
    pub head: Head,
    /// Bytes that the device writes if the request succeeds, including the status byte.
    pub written: u32,
    /// Whether writable data precedes the status byte. The used length counts bytes from the start of the
    /// writable memory, so a failed request with such data reports 0.
    pub has_data: bool,
    /// Memory of the status byte.
    pub status: Span,
}

/// A request, borrowed from its chain.
#[derive(Clone, Copy, Debug)]
pub struct Request<'c> {
    /// Type of the request.
    pub kind: Kind,
    /// Sector as in the header, not checked.
    pub sector: u64,
    /// Data: device-writable for reads, reports and the ID; device-readable for all other types.
    pub data: &'c [Span],
    /// Length of the data in bytes.
    pub len: u64,
    /// `append_sector` of a zone append, 8 bytes; empty for all other types, and if the driver left no
    /// space for it.
    pub append_sector: Span,
    /// Completes the request.
    pub ticket: Ticket,
}

/// Parses a chain as a request. The header is read once; the chain's spans are reduced to those of the
/// data.
///
/// # Errors
/// The chain has no space for a header or a status byte.
#[inline]
pub fn parse<'c>(memory: &GuestMemory, chain: &'c mut Chain) -> Result<Request<'c>, Malformed> {
    let words = match chain.take_front(HEADER_LEN) {
        Some(header) => memory.load_pair(header).ok_or(Malformed::Header)?,
        None => scattered_header(memory, chain).ok_or(Malformed::Header)?,
    };
    let (kind, sector) = (Kind::from_number(words[0] as u32), words[1]);
    let status = chain.take_last(1).ok_or(Malformed::Status)?;
    let append_sector = match kind {
        Kind::ZoneAppend => chain.take_last(8).unwrap_or(Span::EMPTY),
        _ => Span::EMPTY,
    };
    let (head, has_data) = (chain.head(), !chain.writable().is_empty());
    let chain = &*chain;
    let data = if kind.fills_data() { chain.writable() } else { chain.readable() };
    let len = data.iter().map(|span| u64::from(span.len())).sum();
    let filled = if kind.fills_data() { len } else { u64::from(append_sector.len()) };
    // 2.7.4.2: a chain has at most 2^32 bytes. A longer one completes with a length that no driver relies
    // on.
    let written = u32::try_from(filled + 1).unwrap_or(u32::MAX);
    let has_data = has_data || !append_sector.is_empty();
    Ok(Request { kind, sector, data, len, append_sector, ticket: Ticket { head, written, has_data, status } })
}

/// Reads a header that spans several descriptors.
#[cold]
fn scattered_header(memory: &GuestMemory, chain: &mut Chain) -> Option<[u64; 2]> {
    let mut bytes = [0; HEADER_LEN as usize];
    chain.copy_front(memory, &mut bytes).then(|| words_of(bytes))
}

fn words_of(bytes: [u8; 16]) -> [u64; 2] {
    let number = u128::from_le_bytes(bytes);
    [number as u64, (number >> 64) as u64]
}

/// A checked range of a discard or write zeroes request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// Offset of the first byte.
    pub offset: Bytes,
    /// Length, never 0.
    pub len: Bytes,
    /// [`Flags::NO_UNMAP`] for a write zeroes request without the `unmap` flag.
    pub flags: Flags,
}

impl Range {
    /// A range without bytes, for filling arrays.
    pub const EMPTY: Range = Range { offset: Bytes(0), len: Bytes(0), flags: Flags::empty() };
}

impl Config {
    /// Checks a read or write, and returns its offset and length in bytes.
    ///
    /// # Errors
    /// The status byte of the failed request: the length is 0 or not a multiple of the logical block, the
    /// range is not within the device, or the device is read-only.
    #[inline]
    pub fn check_transfer(&self, request: &Request<'_>) -> Result<(Bytes, Bytes), u8> {
        if self.is_read_only && request.kind != Kind::Read {
            return Err(S_IOERR);
        }
        if request.len == 0 {
            return Err(S_IOERR);
        }
        self.check_range(request.sector, request.len)
    }

    /// Checks that a range is within the device, and starts and ends on its logical blocks.
    #[inline]
    fn check_range(&self, sector: u64, len: u64) -> Result<(Bytes, Bytes), u8> {
        let capacity = self.capacity.0 * SECTOR;
        let offset = sector.checked_mul(SECTOR).ok_or(S_IOERR)?;
        // The block size is a power of two, so the mask checks offset and length at once.
        let misaligned = (offset | len) & (u64::from(self.block_size) - 1) != 0;
        if misaligned || offset > capacity || capacity - offset < len {
            return Err(S_IOERR);
        }
        Ok((Bytes(offset), Bytes(len)))
    }

    /// Reads and checks the ranges of a discard or write zeroes request, and stores them at the start of
    /// `ranges`. Returns their number, and the operation. Ranges without sectors are omitted.
    ///
    /// # Errors
    /// The status byte of the failed request: the type is not offered; the data is not a whole number of
    /// ranges; there are more ranges than offered or than `ranges` has space for; a flag is unknown; a
    /// range is too long or not within the device; the device is read-only.
    pub fn read_ranges(
        &self,
        memory: &GuestMemory,
        request: &Request<'_>,
        ranges: &mut [Range],
    ) -> Result<(Op, usize), u8> {
        let (op, feature, count_max, sectors_max) = match request.kind {
            Kind::Discard => {
                (Op::Discard, Features::DISCARD, self.discard_ranges_max, self.discard_sectors_max)
            }
            Kind::WriteZeroes => (
                Op::WriteZeroes,
                Features::WRITE_ZEROES,
                self.write_zeroes_ranges_max,
                self.write_zeroes_sectors_max,
            ),
            _ => return Err(S_UNSUPP),
        };
        if !self.features().contains(feature) {
            return Err(S_UNSUPP);
        }
        let count = request.len / u64::from(RANGE_LEN);
        let fits = count > 0 && count <= u64::from(count_max) && count <= ranges.len() as u64;
        if self.is_read_only || !request.len.is_multiple_of(u64::from(RANGE_LEN)) || !fits {
            return Err(S_IOERR);
        }
        let (mut data, mut filled) = (request.data.iter().copied(), 0);
        let mut span = Span::EMPTY;
        for _ in 0..count {
            let words = next_words(memory, &mut span, &mut data).ok_or(S_IOERR)?;
            let (sector, sectors, flags) = (words[0], words[1] as u32, (words[1] >> 32) as u32);
            // 5.2.6.2: UNSUPP "if any unknown flag is set", and for discards "if the unmap flag is set".
            let known = if op == Op::Discard { 0 } else { UNMAP };
            if flags & !known != 0 {
                return Err(S_UNSUPP);
            }
            if sectors > sectors_max {
                return Err(S_IOERR);
            }
            let (offset, len) = self.check_range(sector, u64::from(sectors) * SECTOR)?;
            if len.0 == 0 {
                continue;
            }
            let keep = op == Op::WriteZeroes && flags & UNMAP == 0;
            let flags = if keep { Flags::NO_UNMAP } else { Flags::empty() };
            ranges[filled] = Range { offset, len, flags };
            filled += 1;
        }
        Ok((op, filled))
    }
}

/// The flag `unmap` of a range.
const UNMAP: u32 = 1;

/// Reads the next 16 bytes of scattered data, each exactly once.
fn next_words(
    memory: &GuestMemory,
    span: &mut Span,
    data: &mut impl Iterator<Item = Span>,
) -> Option<[u64; 2]> {
    let mut bytes = [0; RANGE_LEN as usize];
    let mut filled = 0;
    while filled < bytes.len() {
        if span.is_empty() {
            *span = data.next()?;
        }
        let (front, rest) = span.split_at((bytes.len() - filled) as u32);
        let end = filled + front.len() as usize;
        memory.read(front, &mut bytes[filled..end]).then_some(())?;
        (*span, filled) = (rest, end);
    }
    Some(words_of(bytes))
}
