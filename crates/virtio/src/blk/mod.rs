//! The virtio block device: requests and configuration space (VIRTIO 1.3, 5.2).

mod config;
mod request;
#[cfg(all(test, not(loom)))]
mod tests;
mod zoned;

pub use config::{Config, Shape};
pub use request::{Kind, Malformed, Range, Request, Ticket, parse};
pub use zoned::{ZONE_DESCRIPTOR_LEN, ZoneRequest, encode_report, failed_status_byte, zone_status_byte};

use block::Status;

/// Bytes of a sector, the unit of offsets regardless of the logical block size.
pub const SECTOR: u64 = 512;
/// Bytes of a request's header.
pub const HEADER_LEN: u32 = 16;
/// Bytes of the device's ID string.
pub const ID_LEN: u32 = 20;
/// Bytes of a range of a discard or write zeroes request.
pub const RANGE_LEN: u32 = 16;

/// `VIRTIO_BLK_S_OK`.
pub const S_OK: u8 = 0;
/// `VIRTIO_BLK_S_IOERR`.
pub const S_IOERR: u8 = 1;
/// `VIRTIO_BLK_S_UNSUPP`.
pub const S_UNSUPP: u8 = 2;
/// `VIRTIO_BLK_S_ZONE_INVALID_CMD`.
pub const S_ZONE_INVALID_CMD: u8 = 3;
/// `VIRTIO_BLK_S_ZONE_UNALIGNED_WP`.
pub const S_ZONE_UNALIGNED_WP: u8 = 4;
/// `VIRTIO_BLK_S_ZONE_OPEN_RESOURCE`.
pub const S_ZONE_OPEN_RESOURCE: u8 = 5;
/// `VIRTIO_BLK_S_ZONE_ACTIVE_RESOURCE`.
pub const S_ZONE_ACTIVE_RESOURCE: u8 = 6;

/// Converts a block layer status to a request's status byte. Only zoned devices complete with the two zone
/// resource statuses.
#[inline]
pub const fn status_byte(status: Status) -> u8 {
    match status {
        Status::Ok => S_OK,
        Status::NotSupported => S_UNSUPP,
        Status::ZoneOpenResource => S_ZONE_OPEN_RESOURCE,
        Status::ZoneActiveResource => S_ZONE_ACTIVE_RESOURCE,
        _ => S_IOERR,
    }
}
