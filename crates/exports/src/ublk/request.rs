//! Translates the driver's descriptors to requests, and completion statuses to results for the driver.
//!
//! A descriptor is in memory that the kernel writes. It is copied once, and all of its fields are checked
//! here.

use ::ublk::{IoDescriptor, IoFlags, KernelOp};
use block::{Bytes, Flags, Op, Request, Sectors, Status, Zone};

/// Limits that requests of a device are checked against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bounds {
    /// Size of the device in bytes.
    pub(super) size: Bytes,
    /// Largest request in bytes.
    pub(super) io_max: Bytes,
}

/// A request, and the length of its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ParsedRequest {
    /// The request, without memory.
    pub(super) req: Request,
    /// Bytes of data, or 0 if the request has none.
    pub(super) data_len: u32,
}

impl ParsedRequest {
    /// A request that has no effect.
    pub(super) const NOTHING: ParsedRequest = ParsedRequest { req: Request::flush(), data_len: 0 };

    /// Creates a request whose data, if it has any, is as long as its range. If so, the range must not be
    /// longer than a buffer.
    pub(super) const fn of(req: Request) -> ParsedRequest {
        ParsedRequest { data_len: if req.op.moves_data() { req.len.0 as u32 } else { 0 }, req }
    }

    /// Returns whether the data comes from the client.
    pub(super) const fn brings_data(&self) -> bool {
        matches!(self.req.op, Op::Write | Op::ZoneAppend)
    }

    /// Returns whether the data goes to the client.
    pub(super) const fn takes_data(&self) -> bool {
        matches!(self.req.op, Op::Read | Op::ReportZones)
    }
}

/// Parses a descriptor into a request without memory.
///
/// # Errors
/// The status to complete the request with: unsupported, or invalid.
pub(super) fn parse_request(descriptor: &IoDescriptor, bounds: Bounds) -> Result<ParsedRequest, Status> {
    if descriptor.op() == Some(KernelOp::Flush) {
        // The sector of a flush is meaningless: the block layer's own flush request has sector 2^64 - 1.
        return Ok(ParsedRequest::NOTHING);
    }
    let start = descriptor.start_sector.checked_mul(512).ok_or(Status::Invalid)?;
    let zone = |op| match start < bounds.size.0 {
        true => Ok(ParsedRequest::of(Request::new(op, Bytes(start), Bytes::ZERO))),
        false => Err(Status::IoError),
    };
    let flags = descriptor.flags();
    let (op, flags) = match descriptor.op() {
        Some(KernelOp::Read) => (Op::Read, Flags::empty()),
        Some(KernelOp::Write) => (Op::Write, fua(flags)),
        Some(KernelOp::ZoneAppend) => (Op::ZoneAppend, fua(flags)),
        Some(KernelOp::ZoneOpen) => return zone(Op::ZoneOpen),
        Some(KernelOp::ZoneClose) => return zone(Op::ZoneClose),
        Some(KernelOp::ZoneFinish) => return zone(Op::ZoneFinish),
        Some(KernelOp::ZoneReset) => return zone(Op::ZoneReset),
        Some(KernelOp::ZoneResetAll) => {
            return Ok(ParsedRequest::of(Request::new(Op::ZoneResetAll, Bytes::ZERO, Bytes::ZERO)));
        }
        Some(KernelOp::ReportZones) => return report(descriptor, start, bounds),
        Some(KernelOp::Discard) => (Op::Discard, fua(flags)),
        Some(KernelOp::WriteZeroes) => {
            let keep = if flags.has(IoFlags::NOUNMAP) { Flags::NO_UNMAP } else { Flags::empty() };
            (Op::WriteZeroes, fua(flags).union(keep))
        }
        _ => return Err(Status::NotSupported),
    };
    let len = Sectors(descriptor.nr_sectors.into()).bytes();
    let end = start.checked_add(len.0).ok_or(Status::Invalid)?;
    if len == Bytes::ZERO || op.moves_data() && len > bounds.io_max {
        return Err(Status::Invalid);
    }
    if end > bounds.size.0 {
        return Err(Status::IoError);
    }
    Ok(ParsedRequest::of(Request { flags, ..Request::new(op, Bytes(start), len) }))
}

/// Parses a zone report, whose descriptor has a number of zones in place of sectors. It reports the zones
/// from the start sector to the end, as many as fit.
fn report(descriptor: &IoDescriptor, start: u64, bounds: Bounds) -> Result<ParsedRequest, Status> {
    let data = u64::from(descriptor.nr_sectors) * Zone::RECORD_LEN as u64;
    let rest = bounds.size.0.checked_sub(start).filter(|&rest| rest > 0).ok_or(Status::IoError)?;
    if data == 0 || data > bounds.io_max.0 {
        return Err(Status::Invalid);
    }
    Ok(ParsedRequest { req: Request::new(Op::ReportZones, Bytes(start), Bytes(rest)), data_len: data as u32 })
}

fn fua(flags: IoFlags) -> Flags {
    if flags.has(IoFlags::FUA) { Flags::FUA } else { Flags::empty() }
}

/// Returns the result for the driver: the number of bytes done, or a negative errno.
pub(super) fn result_of(status: Status, asked: &ParsedRequest) -> i32 {
    match status {
        Status::Ok if asked.data_len > 0 => asked.data_len as i32,
        // The length of a discard or write-zeroes request may not fit; the driver only checks for failure.
        Status::Ok => i32::try_from(asked.req.len.0).unwrap_or(i32::MAX),
        // No driver above would repeat the request: to a file system this is an error like any other.
        Status::Requeue => -libc::EIO,
        other => -other.errno(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { size: Bytes::mib(1), io_max: Bytes(64 << 10) };

    fn descriptor(op: u32, start: u64, sectors: u32) -> IoDescriptor {
        IoDescriptor { op_flags: op, nr_sectors: sectors, start_sector: start, addr: 0 }
    }

    #[test]
    fn operations_are_translated_with_their_flags() {
        let of = |op_flags| parse_request(&descriptor(op_flags, 8, 16), BOUNDS).unwrap().req;
        let fua = IoFlags::FUA.0;
        assert_eq!(of(0), Request::new(Op::Read, Bytes(4096), Bytes(8192)));
        assert_eq!(of(1 | fua).flags, Flags::FUA);
        assert_eq!(of(2), Request::flush());
        // The block layer sends a flush with this sector.
        assert_eq!(parse_request(&descriptor(2, u64::MAX, 0), BOUNDS), Ok(ParsedRequest::NOTHING));
        assert_eq!(of(3).op, Op::Discard);
        assert_eq!(of(5 | IoFlags::NOUNMAP.0 | fua).flags, Flags::NO_UNMAP.union(Flags::FUA));
        assert_eq!(of(1 | IoFlags::META.0 | IoFlags::SWAP.0 | 1 << 31).flags, Flags::empty());
    }

    #[test]
    fn unknown_operations_are_not_supported() {
        for op in [4, 6, 9, 16, 17, 19, 36, 255] {
            assert_eq!(parse_request(&descriptor(op, 0, 8), BOUNDS), Err(Status::NotSupported));
        }
    }

    #[test]
    fn a_range_past_the_device_is_an_error() {
        let of = |op, start, sectors| {
            parse_request(&descriptor(op, start, sectors), BOUNDS).map(|asked| asked.req.op)
        };
        assert_eq!(of(0, 2047, 1), Ok(Op::Read));
        assert_eq!(of(0, 2047, 2), Err(Status::IoError));
        assert_eq!(of(3, 2048, 1), Err(Status::IoError));
        assert_eq!(of(0, u64::MAX >> 9, u32::MAX), Err(Status::Invalid));
        assert_eq!(of(0, u64::MAX, 1), Err(Status::Invalid));
        assert_eq!(of(1, 0, 0), Err(Status::Invalid));
        assert_eq!(of(1, 0, 129), Err(Status::Invalid), "longer than its buffer");
        assert_eq!(of(3, 0, 2048), Ok(Op::Discard), "it needs no buffer");
    }

    #[test]
    fn zone_operations_are_translated() {
        let of = |op, start, sectors| parse_request(&descriptor(op, start, sectors), BOUNDS);
        let ops = [10, 11, 12, 15].map(|op| of(op, 8, 64).unwrap());
        let want = [Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish, Op::ZoneReset];
        assert_eq!(ops, want.map(|op| ParsedRequest::of(Request::new(op, Bytes(4096), Bytes::ZERO))));
        assert_eq!(of(14, 0, 2048).unwrap().req, Request::new(Op::ZoneResetAll, Bytes::ZERO, Bytes::ZERO));
        assert_eq!(of(15, 2048, 64), Err(Status::IoError));
        let append = of(13, 64, 8).unwrap();
        assert_eq!((append.req.op, append.data_len), (Op::ZoneAppend, 4096));
        let report = of(18, 1024, 3).unwrap();
        assert_eq!(report.req, Request::new(Op::ReportZones, Bytes(512 << 10), Bytes(512 << 10)));
        assert_eq!((report.data_len, result_of(Status::Ok, &report)), (192, 192));
        assert_eq!(of(18, 0, 1025), Err(Status::Invalid));
        assert_eq!(of(18, 2048, 1), Err(Status::IoError));
    }

    #[test]
    fn the_result_is_bytes_or_an_errno() {
        let long = ParsedRequest::of(Request::new(Op::Discard, Bytes::ZERO, Bytes::gib(4)));
        assert_eq!(
            result_of(Status::Ok, &ParsedRequest::of(Request::new(Op::Read, Bytes::ZERO, Bytes(4096)))),
            4096
        );
        assert_eq!(result_of(Status::Ok, &ParsedRequest::NOTHING), 0);
        assert_eq!(result_of(Status::Ok, &long), i32::MAX);
        assert_eq!(result_of(Status::NoSpace, &long), -libc::ENOSPC);
        assert_eq!(result_of(Status::Requeue, &long), -libc::EIO);
    }
}
