//! From the driver's words to ours and back, without a queue: what it describes becomes a request, how that ended
//! becomes what it is told.
//!
//! A descriptor lies in memory that the kernel writes. It is copied once, and everything in it is checked here.

use ::ublk::{IoDescriptor, IoFlags, KernelOp};
use block::{Bytes, Flags, Op, Request, Sectors, Status, Zone};

/// What requests of a device are held against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bounds {
    /// The device's size.
    pub(super) size: Bytes,
    /// The most that one request may move.
    pub(super) io_max: Bytes,
}

/// A request, and how much data it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Asked {
    /// The request, without memory.
    pub(super) req: Request,
    /// Its data, in bytes; 0: it has none.
    pub(super) data_len: u32,
}

impl Asked {
    /// Nothing to be done.
    pub(super) const NOTHING: Asked = Asked { req: Request::flush(), data_len: 0 };

    /// A request whose data is as long as its range, if it has any. The range is not longer than a buffer then.
    pub(super) const fn of(req: Request) -> Asked {
        Asked { data_len: if req.op.moves_data() { req.len.0 as u32 } else { 0 }, req }
    }

    /// The data comes from the client.
    pub(super) const fn brings_data(&self) -> bool {
        matches!(self.req.op, Op::Write | Op::ZoneAppend)
    }

    /// The data goes to the client.
    pub(super) const fn takes_data(&self) -> bool {
        matches!(self.req.op, Op::Read | Op::ReportZones)
    }
}

/// The request that a descriptor tells of, without memory.
///
/// # Errors
/// What to answer: it is not supported, or makes no sense.
pub(super) fn asked_of(descriptor: &IoDescriptor, bounds: Bounds) -> Result<Asked, Status> {
    if descriptor.op() == Some(KernelOp::Flush) {
        // It has no place: the block layer's own flush request begins at sector 2^64 - 1.
        return Ok(Asked::NOTHING);
    }
    let start = descriptor.start_sector.checked_mul(512).ok_or(Status::Invalid)?;
    let zone = |op| match start < bounds.size.0 {
        true => Ok(Asked::of(Request::new(op, Bytes(start), Bytes::ZERO))),
        false => Err(Status::IoError),
    };
    let flags = descriptor.flags();
    let (op, flags) = match descriptor.op() {
        Some(KernelOp::Read) => (Op::Read, Flags::NONE),
        Some(KernelOp::Write) => (Op::Write, fua(flags)),
        Some(KernelOp::ZoneAppend) => (Op::ZoneAppend, fua(flags)),
        Some(KernelOp::ZoneOpen) => return zone(Op::ZoneOpen),
        Some(KernelOp::ZoneClose) => return zone(Op::ZoneClose),
        Some(KernelOp::ZoneFinish) => return zone(Op::ZoneFinish),
        Some(KernelOp::ZoneReset) => return zone(Op::ZoneReset),
        Some(KernelOp::ZoneResetAll) => {
            return Ok(Asked::of(Request::new(Op::ZoneResetAll, Bytes::ZERO, Bytes::ZERO)));
        }
        Some(KernelOp::ReportZones) => return report(descriptor, start, bounds),
        Some(KernelOp::Discard) => (Op::Discard, fua(flags)),
        Some(KernelOp::WriteZeroes) => {
            let keep = if flags.has(IoFlags::NOUNMAP) { Flags::NO_UNMAP } else { Flags::NONE };
            (Op::WriteZeroes, fua(flags).with(keep))
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
    Ok(Asked::of(Request { flags, ..Request::new(op, Bytes(start), len) }))
}

/// A report of so many zones, in place of so many sectors: all from there to the end, as many as fit.
fn report(descriptor: &IoDescriptor, start: u64, bounds: Bounds) -> Result<Asked, Status> {
    let data = u64::from(descriptor.nr_sectors) * Zone::RECORD_LEN as u64;
    let rest = bounds.size.0.checked_sub(start).filter(|&rest| rest > 0).ok_or(Status::IoError)?;
    if data == 0 || data > bounds.io_max.0 {
        return Err(Status::Invalid);
    }
    Ok(Asked { req: Request::new(Op::ReportZones, Bytes(start), Bytes(rest)), data_len: data as u32 })
}

fn fua(flags: IoFlags) -> Flags {
    if flags.has(IoFlags::FUA) { Flags::FUA } else { Flags::NONE }
}

/// What the driver is told: how many bytes of the request are done, or a negative errno.
pub(super) fn result_of(status: Status, asked: &Asked) -> i32 {
    match status {
        Status::Ok if asked.data_len > 0 => asked.data_len as i32,
        // More than fits stands for a discard or a write of zeroes, of which it only asks whether it failed.
        Status::Ok => i32::try_from(asked.req.len.0).unwrap_or(i32::MAX),
        // No driver above it would offer the request again: to a file system this is an error like any other.
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
    fn every_operation_becomes_ours_with_its_flags() {
        let of = |op_flags| asked_of(&descriptor(op_flags, 8, 16), BOUNDS).unwrap().req;
        let fua = IoFlags::FUA.0;
        assert_eq!(of(0), Request::new(Op::Read, Bytes(4096), Bytes(8192)));
        assert_eq!(of(1 | fua).flags, Flags::FUA);
        assert_eq!(of(2), Request::flush());
        // As the block layer sends it.
        assert_eq!(asked_of(&descriptor(2, u64::MAX, 0), BOUNDS), Ok(Asked::NOTHING));
        assert_eq!(of(3).op, Op::Discard);
        assert_eq!(of(5 | IoFlags::NOUNMAP.0 | fua).flags, Flags::NO_UNMAP.with(Flags::FUA));
        assert_eq!(of(1 | IoFlags::META.0 | IoFlags::SWAP.0 | 1 << 31).flags, Flags::NONE);
    }

    #[test]
    fn what_is_not_known_is_not_supported() {
        for op in [4, 6, 9, 16, 17, 19, 36, 255] {
            assert_eq!(asked_of(&descriptor(op, 0, 8), BOUNDS), Err(Status::NotSupported));
        }
    }

    #[test]
    fn a_range_that_is_not_the_devices_is_an_error() {
        let of =
            |op, start, sectors| asked_of(&descriptor(op, start, sectors), BOUNDS).map(|asked| asked.req.op);
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
    fn operations_on_zones_become_ours() {
        let of = |op, start, sectors| asked_of(&descriptor(op, start, sectors), BOUNDS);
        let ops = [10, 11, 12, 15].map(|op| of(op, 8, 64).unwrap());
        let want = [Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish, Op::ZoneReset];
        assert_eq!(ops, want.map(|op| Asked::of(Request::new(op, Bytes(4096), Bytes::ZERO))));
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
    fn the_driver_is_told_bytes_or_an_errno() {
        let long = Asked::of(Request::new(Op::Discard, Bytes::ZERO, Bytes::gib(4)));
        assert_eq!(result_of(Status::Ok, &Asked::of(Request::new(Op::Read, Bytes::ZERO, Bytes(4096)))), 4096);
        assert_eq!(result_of(Status::Ok, &Asked::NOTHING), 0);
        assert_eq!(result_of(Status::Ok, &long), i32::MAX);
        assert_eq!(result_of(Status::NoSpace, &long), -libc::ENOSPC);
        assert_eq!(result_of(Status::Requeue, &long), -libc::EIO);
    }
}
