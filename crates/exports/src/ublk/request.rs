//! From the driver's words to ours and back, without a queue: what it describes becomes a request, how that ended
//! becomes what it is told.
//!
//! A descriptor lies in memory that the kernel writes. It is copied once, and everything in it is checked here.

use ::ublk::{IoDescriptor, IoFlags, KernelOp};
use block::{Bytes, Flags, Op, Request, Sectors, Status};

/// What requests of a device are held against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bounds {
    /// The device's size.
    pub(super) size: Bytes,
    /// The most that one request may move.
    pub(super) io_max: Bytes,
}

/// The request that a descriptor tells of, without memory.
///
/// # Errors
/// What to answer: it is not supported, or makes no sense.
pub(super) fn request_of(descriptor: &IoDescriptor, bounds: Bounds) -> Result<Request, Status> {
    let flags = descriptor.flags();
    let (op, flags) = match descriptor.op() {
        Some(KernelOp::Read) => (Op::Read, Flags::NONE),
        Some(KernelOp::Write) => (Op::Write, fua(flags)),
        Some(KernelOp::Flush) => return Ok(Request::flush()),
        Some(KernelOp::Discard) => (Op::Discard, fua(flags)),
        Some(KernelOp::WriteZeroes) => {
            let keep = if flags.has(IoFlags::NOUNMAP) { Flags::NO_UNMAP } else { Flags::NONE };
            (Op::WriteZeroes, fua(flags).with(keep))
        }
        _ => return Err(Status::NotSupported),
    };
    let len = Sectors(descriptor.nr_sectors.into()).bytes();
    let start = descriptor.start_sector.checked_mul(512).ok_or(Status::Invalid)?;
    let end = start.checked_add(len.0).ok_or(Status::Invalid)?;
    if len == Bytes::ZERO || op.moves_data() && len > bounds.io_max {
        return Err(Status::Invalid);
    }
    if end > bounds.size.0 {
        return Err(Status::IoError);
    }
    Ok(Request { flags, ..Request::new(op, Bytes(start), len) })
}

fn fua(flags: IoFlags) -> Flags {
    if flags.has(IoFlags::FUA) { Flags::FUA } else { Flags::NONE }
}

/// What the driver is told: how many bytes of the request are done, or a negative errno.
pub(super) fn result_of(status: Status, req: &Request) -> i32 {
    match status {
        // More than fits stands for a discard or a write of zeroes, of which it only asks whether it failed.
        Status::Ok => i32::try_from(req.len.0).unwrap_or(i32::MAX),
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
        let of = |op_flags| request_of(&descriptor(op_flags, 8, 16), BOUNDS).unwrap();
        let fua = IoFlags::FUA.0;
        assert_eq!(of(0), Request::new(Op::Read, Bytes(4096), Bytes(8192)));
        assert_eq!(of(1 | fua).flags, Flags::FUA);
        assert_eq!(of(2), Request::flush());
        assert_eq!(of(3).op, Op::Discard);
        assert_eq!(of(5 | IoFlags::NOUNMAP.0 | fua).flags, Flags::NO_UNMAP.with(Flags::FUA));
        assert_eq!(of(1 | IoFlags::META.0 | IoFlags::SWAP.0 | 1 << 31).flags, Flags::NONE);
    }

    #[test]
    fn what_is_not_known_is_not_supported() {
        for op in [4, 6, 10, 17, 36, 255] {
            assert_eq!(request_of(&descriptor(op, 0, 8), BOUNDS), Err(Status::NotSupported));
        }
    }

    #[test]
    fn a_range_that_is_not_the_devices_is_an_error() {
        let of = |op, start, sectors| request_of(&descriptor(op, start, sectors), BOUNDS).map(|req| req.op);
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
    fn the_driver_is_told_bytes_or_an_errno() {
        let long = Request::new(Op::Discard, Bytes::ZERO, Bytes::gib(4));
        assert_eq!(result_of(Status::Ok, &Request::new(Op::Read, Bytes::ZERO, Bytes(4096))), 4096);
        assert_eq!(result_of(Status::Ok, &Request::flush()), 0);
        assert_eq!(result_of(Status::Ok, &long), i32::MAX);
        assert_eq!(result_of(Status::NoSpace, &long), -libc::ENOSPC);
        assert_eq!(result_of(Status::Requeue, &long), -libc::EIO);
    }
}
