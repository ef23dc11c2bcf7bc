//! Commands for the state of the unit: REQUEST SENSE, START STOP UNIT, PREVENT ALLOW MEDIUM REMOVAL,
//! identifying information.

use crate::attention::Attention;
use crate::bytes::be32;
use crate::dispatch::Call;
use crate::nexus::Restrictions;
use crate::sense::Sense;
use crate::{Begin, Outcome};
use std::sync::atomic::Ordering;

/// Executes REQUEST SENSE: SPC-6 section 6.39. Reports and clears a pending unit attention, or reports why
/// the unit is not ready.
pub(crate) fn request_sense(call: &Call<'_>) -> Begin {
    let sense = match call.nexus.take_attention(true) {
        Some(attention) => attention.sense(),
        None if call.nexus.is_restricted(Restrictions::NO_MEDIUM) => Sense::NO_MEDIUM,
        None => call.unit().guards.sanitize.sense().unwrap_or(Sense::NONE),
    };
    let mut bytes = [0; Sense::LEN_MAX];
    let len = sense.encode(call.cdb[1] & 0x01 != 0, &mut bytes);
    Outcome::with_data(bytes[..len].to_vec(), call.cdb[4].into()).into()
}

/// Executes START STOP UNIT: SBC-4 section 5.31. The unit is always active, so power conditions and START
/// without LOEJ change nothing; stopping flushes unless NO_FLUSH is set. LOEJ loads and ejects the medium
/// of a removable unit, and is an invalid field for other units.
pub(crate) fn start_stop(call: &Call<'_>) -> Begin {
    let bits = call.cdb[4];
    let (condition, no_flush, loads, starts) = (bits >> 4, bits & 4 != 0, bits & 2 != 0, bits & 1 != 0);
    match condition {
        0 => {}
        // ACTIVE, IDLE, STANDBY, LU_CONTROL, FORCE_IDLE_0 and FORCE_STANDBY_0; START and LOEJ are ignored.
        // A removable unit also accepts conditions that it ignores, as SBC-2 units did with vendor-specific
        // ones.
        0x1 | 0x2 | 0x3 | 0x7 | 0xA | 0xB => return Outcome::good(0).into(),
        _ if call.facts.media.removable => return Outcome::good(0).into(),
        _ => return Sense::cdb_field(4, Some(7)).into(),
    }
    if loads {
        if !call.facts.media.removable {
            return Sense::cdb_field(4, Some(1)).into();
        }
        // A locked drive does not load a medium either: libiscsi's PreventAllow.Eject.
        if call.unit().is_removal_prevented() {
            return Sense::REMOVAL_PREVENTED.into();
        }
        call.unit().eject(!starts, call.nexus);
    }
    if !starts && !no_flush && !call.facts.media.read_only {
        return Begin::Io(call.flush());
    }
    Outcome::good(0).into()
}

/// Executes PREVENT ALLOW MEDIUM REMOVAL: SBC-4 section 5.15. Each nexus has its own PREVENT state.
pub(crate) fn prevent_allow(call: &Call<'_>) -> Begin {
    let prevents = call.cdb[4] & 0x03;
    if prevents > 1 {
        return Sense::cdb_field(4, Some(1)).into();
    }
    call.nexus.prevents_removal.store(prevents == 1, Ordering::Relaxed);
    Outcome::good(0).into()
}

/// Maximum bytes of identifying information, by type: SPC-6 section 6.30.
const IDENTIFYING_MAX: [u16; 2] = [64, 256];

/// Returns the index of an information type, or `None` if it is not supported.
fn identifying_kind(kind: u8) -> Option<usize> {
    match kind >> 1 {
        0b000_0000 => Some(0),
        0b000_0010 => Some(1),
        _ => None,
    }
}

/// Executes REPORT IDENTIFYING INFORMATION: SPC-6 section 6.30.
pub(crate) fn report_identifying(call: &Call<'_>) -> Begin {
    const SUPPORTED: u8 = 0x7F;
    let allocation = be32(&call.cdb, 6);
    let kind = call.cdb[10];
    if kind >> 1 == SUPPORTED {
        let mut data = vec![0, 0, 0, 8];
        for (kind, max) in [0_u8, 0b10].into_iter().zip(IDENTIFYING_MAX) {
            data.extend_from_slice(&[kind << 1, 0]);
            data.extend_from_slice(&max.to_be_bytes());
        }
        return Outcome::with_data(data, allocation).into();
    }
    let Some(kind) = identifying_kind(kind) else { return Sense::cdb_field(10, Some(7)).into() };
    let information = call.unit().identifying(kind);
    let mut data = vec![0, 0];
    data.extend_from_slice(&(information.len() as u16).to_be_bytes());
    data.extend_from_slice(&information);
    Outcome::with_data(data, allocation).into()
}

/// Begins SET IDENTIFYING INFORMATION: SPC-6 section 6.44. The parameter list has not been received yet.
pub(crate) fn set_identifying_begin(call: &Call<'_>) -> Begin {
    let len = be32(&call.cdb, 6);
    let Some(kind) = identifying_kind(call.cdb[10]) else { return Sense::cdb_field(10, Some(7)).into() };
    if len > IDENTIFYING_MAX[kind].into() {
        return Sense::cdb_field(6, None).into();
    }
    call.parameters(len)
}

/// Continues SET IDENTIFYING INFORMATION with its parameter list.
pub(crate) fn set_identifying(call: &Call<'_>, list: &[u8]) -> Begin {
    let Some(kind) = identifying_kind(call.cdb[10]) else { return Sense::cdb_field(10, Some(7)).into() };
    // Text is null-terminated UTF-8.
    if kind == 1 && !list.is_empty() && (list.last() != Some(&0) || std::str::from_utf8(list).is_err()) {
        return Sense::parameter_field(0, None).into();
    }
    if list.len() < be32(&call.cdb, 6) as usize || list.len() > usize::from(u16::MAX) {
        return Sense::PARAMETER_LIST_LENGTH.into();
    }
    call.unit().set_identifying(kind, list);
    call.unit().raise_all(Attention::IDENTIFIER_CHANGED, Some(call.nexus));
    Outcome::good(list.len() as u64).into()
}
