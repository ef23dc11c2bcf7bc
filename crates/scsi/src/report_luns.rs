//! REPORT LUNS, and commands to LUNs that do not exist: SPC-6 sections 6.34 and 4.3.1, SAM-6 section 5.11.

use crate::attention::Attention;
use crate::bytes::{be16, be32, put};
use crate::command::Session;
use crate::dispatch::Call;
use crate::sense::Sense;
use crate::{Begin, Command, Lun, Outcome};

/// Smallest valid allocation length, in bytes: SPC-6 section 6.34.
const ALLOCATION_MIN: u32 = 16;

/// Executes REPORT LUNS of a session.
pub(crate) fn report(call: &Call<'_>) -> Begin {
    let outcome = luns(call.session, call.cdb[2], be32(&call.cdb, 6));
    if outcome.sense == Sense::NONE {
        call.nexus.clear_attention(Attention::LUNS_CHANGED);
    }
    outcome.into()
}

fn luns(session: &dyn Session, select: u8, allocation: u32) -> Outcome {
    let all = session.luns();
    if allocation < ALLOCATION_MIN {
        return Sense::cdb_field(6, None).into();
    }
    let well_known = [Lun::REPORT_LUNS];
    let (luns, known): (&[Lun], &[Lun]) = match select {
        0x00 | 0x11 => (all, &[]),
        0x01 => (&[], &well_known),
        0x02 => (all, &well_known),
        // Administrative and subsidiary units do not exist.
        0x10 | 0x12 => (&[], &[]),
        _ => return Sense::cdb_field(2, None).into(),
    };
    let mut data = vec![0; 8];
    luns.iter().chain(known).for_each(|lun| data.extend_from_slice(&lun.0));
    let len = data.len() as u32 - 8;
    put(&mut data, 0, &len.to_be_bytes());
    Outcome::with_data(data, allocation)
}

/// Ends a command to a LUN that does not exist, or to the well-known logical unit REPORT LUNS if `lun` is
/// that unit.
pub fn no_unit(lun: Lun, command: &Command<'_>, session: &dyn Session) -> Outcome {
    let cdb = command.cdb;
    let is_well_known = lun == Lun::REPORT_LUNS;
    match cdb.first().copied() {
        Some(0x12) => {
            let allocation = be16(cdb, 3).into();
            if crate::bytes::be8(cdb, 1) != 0 || crate::bytes::be8(cdb, 2) != 0 {
                return Sense::cdb_field(1, Some(0)).into();
            }
            // 7Fh is qualifier 3, type 1Fh: no unit can exist here. Type 1Eh is a well-known logical unit.
            let mut data = vec![0; 36];
            data[0] = if is_well_known { 0x1E } else { 0x7F };
            [data[2], data[3], data[4]] = [0x06, 0x02, 31];
            put(&mut data, 8, &crate::identity::padded::<28>("BLKYARD "));
            Outcome::with_data(data, allocation)
        }
        Some(0xA0) => luns(session, crate::bytes::be8(cdb, 2), be32(cdb, 6)),
        Some(0x03) => {
            let sense = if is_well_known { Sense::NONE } else { Sense::LUN_NOT_SUPPORTED };
            let mut bytes = [0; Sense::LEN_MAX];
            let len = sense.encode(crate::bytes::be8(cdb, 1) & 1 != 0, &mut bytes);
            Outcome::with_data(bytes[..len].to_vec(), crate::bytes::be8(cdb, 4).into())
        }
        Some(0x00) if is_well_known => Outcome::good(0),
        _ if is_well_known => Sense::INVALID_OPCODE.into(),
        _ => Sense::LUN_NOT_SUPPORTED.into(),
    }
}
