//! Requests of zoned devices (VIRTIO 1.3, 5.2.6, with `VIRTIO_BLK_F_ZONED`).

use super::{
    Config, Kind, Request, S_IOERR, S_UNSUPP, S_ZONE_INVALID_CMD, S_ZONE_UNALIGNED_WP, SECTOR, status_byte,
};
use block::{Bytes, Op, Status, Zone, ZoneCondition, ZoneKind};

/// Bytes of the header of a zone report, and of each descriptor after it.
pub const ZONE_DESCRIPTOR_LEN: u32 = 64;

/// A checked zone request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZoneRequest {
    /// Operation of the block layer.
    pub op: Op,
    /// Offset of the first byte: that of the zone, or for reports of the zone or within it; 0 to reset all
    /// zones.
    pub offset: Bytes,
    /// Length: of the data to append, or for reports up to the end of the device; otherwise 0.
    pub len: Bytes,
    /// Maximum number of zones that a report has space for.
    pub zones_max: u32,
}

impl Config {
    /// Checks a zone request.
    ///
    /// # Errors
    /// The status byte of the failed request: the device is not zoned or does not support zone appends, the
    /// sector is not the first one of a zone, or the data is too long or too short.
    pub fn check_zone(&self, request: &Request<'_>) -> Result<ZoneRequest, u8> {
        let zoned = self.zoned.ok_or(S_UNSUPP)?;
        let op = match request.kind {
            Kind::ZoneAppend => Op::ZoneAppend,
            Kind::ZoneReport => Op::ReportZones,
            Kind::ZoneOpen => Op::ZoneOpen,
            Kind::ZoneClose => Op::ZoneClose,
            Kind::ZoneFinish => Op::ZoneFinish,
            Kind::ZoneReset => Op::ZoneReset,
            Kind::ZoneResetAll => Op::ZoneResetAll,
            _ => return Err(S_UNSUPP),
        };
        if self.is_read_only && op != Op::ReportZones {
            return Err(S_IOERR);
        }
        // 5.2.6.1: the sector is not used for this type.
        if op == Op::ZoneResetAll {
            return Ok(ZoneRequest { op, offset: Bytes::ZERO, len: Bytes::ZERO, zones_max: 0 });
        }
        if request.sector >= self.capacity.0 {
            return Err(S_ZONE_INVALID_CMD);
        }
        let offset = Bytes(request.sector * SECTOR);
        if op == Op::ReportZones {
            let room = request.len.checked_sub(ZONE_DESCRIPTOR_LEN.into()).ok_or(S_ZONE_INVALID_CMD)?;
            let zones_max = u32::try_from(room / u64::from(ZONE_DESCRIPTOR_LEN)).unwrap_or(u32::MAX);
            let len = Bytes(self.capacity.0 * SECTOR - offset.0);
            return Ok(ZoneRequest { op, offset, len, zones_max });
        }
        if !request.sector.is_multiple_of(u64::from(zoned.zone_sectors).max(1)) {
            return Err(S_ZONE_INVALID_CMD);
        }
        let mut len = Bytes::ZERO;
        if op == Op::ZoneAppend {
            let longest = u64::from(zoned.append_sectors_max) * SECTOR;
            if longest == 0 {
                return Err(S_UNSUPP);
            }
            if request.len == 0 || request.len > longest || request.append_sector.is_empty() {
                return Err(S_ZONE_INVALID_CMD);
            }
            if !request.len.is_multiple_of(zoned.write_granularity.into()) {
                return Err(S_ZONE_UNALIGNED_WP);
            }
            len = Bytes(request.len);
        }
        Ok(ZoneRequest { op, offset, len, zones_max: 0 })
    }
}

/// Converts a block layer status to that of a zone request. 5.2.6: errors without a zone status of their
/// own become `VIRTIO_BLK_S_ZONE_INVALID_CMD`.
pub const fn zone_status_byte(status: Status) -> u8 {
    match status {
        Status::Invalid | Status::IoError => S_ZONE_INVALID_CMD,
        _ => status_byte(status),
    }
}

/// Finds the status of a read, write or zone append that failed with an error without a status of its own, from the
/// state of its zone. `sector` and `sectors` are those of the request. 5.2.6.2: a write that does not start at the
/// write pointer is `VIRTIO_BLK_S_ZONE_UNALIGNED_WP`; access that the zone's condition or capacity does not permit is
/// `VIRTIO_BLK_S_ZONE_INVALID_CMD`.
pub fn failed_status_byte(op: Op, sector: u64, sectors: u64, zone: &Zone) -> u8 {
    let end = zone.start.0 + if op == Op::Read { zone.len.0 } else { zone.capacity.0 };
    let is_dead = match op {
        Op::Read => zone.condition == ZoneCondition::Offline,
        _ => matches!(zone.condition, ZoneCondition::Offline | ZoneCondition::ReadOnly | ZoneCondition::Full),
    };
    let is_sequential = zone.kind == ZoneKind::SequentialRequired;
    match op {
        _ if is_dead => S_ZONE_INVALID_CMD,
        Op::ZoneAppend => S_ZONE_INVALID_CMD,
        Op::Write if is_sequential && sector != zone.write_pointer.0 => S_ZONE_UNALIGNED_WP,
        _ if sector.saturating_add(sectors) > end => S_ZONE_INVALID_CMD,
        _ => S_IOERR,
    }
}

/// Encodes a zone report from records of [`Zone`], which end at the first that is none. Fills all of `report`: a header,
/// descriptors as far as there is room, and zeroes. Returns the number of descriptors.
pub fn encode_report(records: &[u8], report: &mut [u8]) -> u64 {
    report.fill(0);
    let Some((header, descriptors)) = report.split_at_mut_checked(ZONE_DESCRIPTOR_LEN as usize) else {
        return 0;
    };
    let zones = records.chunks_exact(Zone::RECORD_LEN).map_while(Zone::from_record);
    let mut count = 0u64;
    for (zone, descriptor) in zones.zip(descriptors.chunks_exact_mut(ZONE_DESCRIPTOR_LEN as usize)) {
        descriptor[..8].copy_from_slice(&zone.capacity.0.to_le_bytes());
        descriptor[8..16].copy_from_slice(&zone.start.0.to_le_bytes());
        descriptor[16..24].copy_from_slice(&zone.write_pointer.0.to_le_bytes());
        // The specification uses the kernel's numbers for types and conditions.
        descriptor[24] = zone.kind as u8;
        descriptor[25] = zone.condition as u8;
        count += 1;
    }
    header[..8].copy_from_slice(&count.to_le_bytes());
    count
}
