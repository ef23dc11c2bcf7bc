//! Completion status of a request: a closed set with the meanings (`blk_status_t`) and errnos of the kernel.

/// Completion status of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Status {
    /// Success: the whole request is done.
    Ok,
    /// The operation is not supported.
    NotSupported,
    /// The request timed out.
    Timeout,
    /// Out of space: the backing store is full, or the range ends past the device.
    NoSpace,
    /// The path to the device failed; another path may work.
    Transport,
    /// Permanent failure of the target; another path would not help.
    Target,
    /// Another initiator holds a reservation.
    ReservationConflict,
    /// Medium error: the data is lost.
    Medium,
    /// The protection information (integrity tuple) does not match the data.
    Protection,
    /// Memory or another system resource is exhausted for now.
    Resource,
    /// A resource of the device is exhausted for now.
    DeviceResource,
    /// The request would have had to wait, and [`Flags::NOWAIT`](crate::Flags::NOWAIT) was given.
    Again,
    /// The device is offline.
    Offline,
    /// A stacking device asks for the whole request to be requeued.
    Requeue,
    /// Too many open zones.
    ZoneOpenResource,
    /// Too many active zones.
    ZoneActiveResource,
    /// The command's duration limit was exceeded.
    DurationLimit,
    /// The request is invalid: misaligned, or beyond the device's limits.
    Invalid,
    /// Any other error.
    IoError,
    /// The device does not permit the operation to its clients; another path would not help.
    NotPermitted,
}

/// One row per status, in the order of the enum: the status and its errno.
const TABLE: [(Status, i32); 20] = [
    (Status::Ok, 0),
    (Status::NotSupported, libc::EOPNOTSUPP),
    (Status::Timeout, libc::ETIMEDOUT),
    (Status::NoSpace, libc::ENOSPC),
    (Status::Transport, libc::ENOLINK),
    (Status::Target, libc::EREMOTEIO),
    (Status::ReservationConflict, libc::EBADE),
    (Status::Medium, libc::ENODATA),
    (Status::Protection, libc::EILSEQ),
    (Status::Resource, libc::ENOMEM),
    (Status::DeviceResource, libc::EBUSY),
    (Status::Again, libc::EAGAIN),
    (Status::Offline, libc::ENODEV),
    (Status::Requeue, libc::EREMCHG),
    (Status::ZoneOpenResource, libc::ETOOMANYREFS),
    (Status::ZoneActiveResource, libc::EOVERFLOW),
    (Status::DurationLimit, libc::ETIME),
    (Status::Invalid, libc::EINVAL),
    (Status::IoError, libc::EIO),
    (Status::NotPermitted, libc::EPERM),
];

impl Status {
    /// The errno, positive; 0 for [`Status::Ok`]. Source: `blk_errors[]` in the kernel's block/blk-core.c.
    pub const fn errno(self) -> i32 {
        TABLE[self as usize].1
    }

    /// Converts a positive errno. One that the kernel's table lacks becomes [`Status::IoError`], as in the
    /// kernel; `EPERM` is one of these.
    pub fn from_errno(errno: i32) -> Status {
        let named = &TABLE[..Status::NotPermitted as usize];
        named.iter().find(|row| row.1 == errno).map_or(Status::IoError, |row| row.0)
    }

    /// Converts a result of the kernel or a child: bytes moved, or a negative errno. Fewer bytes than `len`
    /// is an I/O error: the layers that can continue a short transfer have done so already.
    pub fn from_result(result: i64, len: u64) -> Status {
        if result < 0 {
            Status::from_errno(i32::try_from(-result).unwrap_or(libc::EIO))
        } else if result as u64 == len {
            Status::Ok
        } else {
            Status::IoError
        }
    }

    /// Whether the path may have failed rather than the device (MP-5), so that another path is worth trying
    /// (`blk_path_error`).
    pub const fn is_path_error(self) -> bool {
        !matches!(
            self,
            Status::Ok
                | Status::NotSupported
                | Status::NoSpace
                | Status::Target
                | Status::ReservationConflict
                | Status::Medium
                | Status::Protection
                | Status::NotPermitted
        )
    }

    /// Whether the request succeeded.
    pub const fn is_ok(self) -> bool {
        matches!(self, Status::Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_own_errno_and_comes_back_from_it() {
        for (number, (status, errno)) in TABLE.into_iter().enumerate() {
            assert_eq!(status as usize, number);
            assert_eq!(status.errno(), errno);
            let back = if status == Status::NotPermitted { Status::IoError } else { status };
            assert_eq!(Status::from_errno(errno), back);
        }
    }

    #[test]
    fn an_errno_the_kernel_does_not_name_is_an_io_error() {
        assert_eq!(Status::from_errno(libc::EPERM), Status::IoError);
        assert_eq!(Status::from_errno(-5), Status::IoError);
    }

    #[test]
    fn a_short_transfer_is_not_success() {
        assert_eq!(Status::from_result(4096, 4096), Status::Ok);
        assert_eq!(Status::from_result(512, 4096), Status::IoError);
        assert_eq!(Status::from_result(-28, 4096), Status::NoSpace);
        assert_eq!(Status::from_result(i64::MIN + 1, 0), Status::IoError);
    }

    #[test]
    fn errors_that_another_path_cannot_fix_are_no_path_errors() {
        let not: Vec<_> = TABLE.iter().map(|r| r.0).filter(|s| !s.is_path_error()).collect();
        use Status::*;
        let here = [Ok, NotSupported, NoSpace, Target, ReservationConflict, Medium, Protection, NotPermitted];
        assert_eq!(not, here);
    }
}
