//! LBA and length fields of CDBs, and checks of them.

use crate::bytes::{be8, be16, be24, be32, be64};
use crate::dispatch::Call;
use crate::sense::Sense;
use crate::{Media, Outcome, ScsiStatus, sense};
use block::Status;

/// A range of blocks, and the index of the CDB byte with its length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Blocks {
    pub(super) lba: u64,
    pub(super) count: u64,
    pub(super) count_at: u16,
}

impl Blocks {
    /// Decodes the range in a CDB; the opcode's group determines the layout.
    pub(super) fn of(cdb: &[u8]) -> Blocks {
        let (lba, count, count_at) = match be8(cdb, 0) {
            0x7F => (be64(cdb, 12), be32(cdb, 28).into(), 28),
            0x00..=0x1F => {
                let count = match be8(cdb, 4) {
                    0 => 256,
                    count => u64::from(count),
                };
                ((be24(cdb, 1) & 0x1F_FFFF).into(), count, 4)
            }
            // COMPARE AND WRITE has one byte, WRITE ATOMIC two.
            0x89 => (be64(cdb, 2), be8(cdb, 13).into(), 13),
            0x9C => (be64(cdb, 2), be16(cdb, 12).into(), 12),
            0x20..=0x5F => (be32(cdb, 2).into(), be16(cdb, 7).into(), 7),
            0x80..=0x9F => (be64(cdb, 2), be32(cdb, 10).into(), 10),
            _ => (be32(cdb, 2).into(), be32(cdb, 6).into(), 6),
        };
        Blocks { lba, count, count_at }
    }

    /// Checks that the range lies on the medium: LIO-10.
    pub(super) fn check(&self, media: &Media) -> Result<(), Sense> {
        match self.lba.checked_add(self.count) {
            Some(end) if end <= media.blocks => Ok(()),
            _ => Err(Sense::LBA_OUT_OF_RANGE),
        }
    }

    /// Checks the range, and that the command may transfer this much (MAXIMUM TRANSFER LENGTH).
    pub(super) fn check_transfer(&self, media: &Media) -> Result<(), Sense> {
        self.check(media)?;
        match self.count <= media.blocks_of(media.transfer_max).into() {
            true => Ok(()),
            false => Err(self.too_long()),
        }
    }

    /// Returns 05/24/00 with a pointer to the length.
    pub(super) fn too_long(&self) -> Sense {
        Sense::cdb_field(self.count_at, None)
    }

    /// Replaces a length of 0 with the rest of the medium.
    pub(super) fn or_rest(self, media: &Media) -> Blocks {
        match self.count {
            0 => Blocks { count: media.blocks.saturating_sub(self.lba), ..self },
            _ => self,
        }
    }

    /// Returns the offset in bytes; valid after [`check`](Blocks::check).
    pub(super) fn offset(&self, media: &Media) -> u64 {
        self.lba << media.block_shift()
    }

    /// Returns the length in bytes; valid after [`check`](Blocks::check).
    pub(super) fn len(&self, media: &Media) -> u64 {
        self.count << media.block_shift()
    }
}

/// Checks that the initiator sends as many bytes as the CDB requests. Commands that write all or nothing
/// accept no other length.
pub(super) fn check_data_out(call: &Call<'_>, wanted: u64) -> Result<(), Outcome> {
    match u64::from(call.command.data_out) == wanted {
        true => Ok(()),
        false => Err(Outcome { wanted, ..Sense::INVALID_TRANSFER.into() }),
    }
}

/// Returns the outcome of a command whose block request failed. `offset` is the request's, in bytes.
pub(super) fn failed(status: Status, offset: u64, shift: u32, is_write: bool) -> Outcome {
    failed_at(status, offset >> shift, is_write)
}

/// Returns the outcome of a command whose block request failed at this LBA.
pub(crate) fn failed_at(status: Status, lba: u64, is_write: bool) -> Outcome {
    match status {
        Status::ReservationConflict => Outcome::status(ScsiStatus::ReservationConflict),
        status => sense::of_block_status(status, lba, is_write).into(),
    }
}
