//! Third-party copy: EXTENDED COPY(LID1) and RECEIVE COPY RESULTS, as VMware and sg_xcopy use them. SPC-6 sections 5.18,
//! 6.4 and 6.21.
//!
//! Only one kind of segment is supported: block device to block device (02h). So is only one kind of CSCD
//! descriptor: identification (E4h) with the NAA designator of a unit that the session can access. Source
//! and destination may overlap within one unit. EXTENDED COPY(LID4) and ROD tokens are neither supported
//! nor reported as supported.

pub(crate) mod commands;
mod parameters;
mod report;
mod steps;
#[cfg(test)]
mod tests;

pub use parameters::{CopyList, Cscd, Segment};
pub use report::{CopyResults, receive, third_party_page};

use crate::sense::Key;
use crate::{Begin, Nexus, Outcome, Program, Sense};
use std::sync::Arc;

/// Maximum number of CSCD descriptors of a command.
pub const CSCD_MAX: u16 = 16;
/// Maximum number of segment descriptors of a command.
pub const SEGMENTS_MAX: u16 = 64;
/// Maximum bytes of descriptors of a command, both kinds together.
pub const DESCRIPTORS_LEN_MAX: u32 =
    CSCD_MAX as u32 * parameters::CSCD_LEN as u32 + SEGMENTS_MAX as u32 * parameters::SEGMENT_LEN as u32;
/// Bytes of a parameter list before the descriptors.
pub(crate) const HEADER_LEN: u32 = 16;
/// Bytes of a chunk. Two chunks are in flight.
pub const CHUNK_LEN: u32 = 1 << 20;

/// 05/26/06 TOO MANY TARGET DESCRIPTORS.
pub const TOO_MANY_TARGETS: Sense = Sense::new(Key::IllegalRequest, 0x26, 0x06);
/// 05/26/07 UNSUPPORTED TARGET DESCRIPTOR TYPE CODE.
pub const UNSUPPORTED_TARGET: Sense = Sense::new(Key::IllegalRequest, 0x26, 0x07);
/// 05/26/08 TOO MANY SEGMENT DESCRIPTORS.
pub const TOO_MANY_SEGMENTS: Sense = Sense::new(Key::IllegalRequest, 0x26, 0x08);
/// 05/26/09 UNSUPPORTED SEGMENT DESCRIPTOR TYPE CODE.
pub const UNSUPPORTED_SEGMENT: Sense = Sense::new(Key::IllegalRequest, 0x26, 0x09);
/// 0A/00/00: a range is outside a unit, or its length is not a whole number of blocks of both units.
pub const COPY_ABORTED: Sense = Sense::new(Key::CopyAborted, 0x00, 0x00);
/// 0A/08/04 UNREACHABLE COPY TARGET: the null device.
pub const UNREACHABLE_TARGET: Sense = Sense::new(Key::CopyAborted, 0x08, 0x04);
/// 0A/0D/01 THIRD PARTY DEVICE FAILURE: a request to a unit failed, or the unit refuses it.
pub const THIRD_PARTY_FAILURE: Sense = Sense::new(Key::CopyAborted, 0x0D, 0x01);
/// 0A/0D/02 COPY TARGET DEVICE NOT REACHABLE: no unit has this designator.
pub const NOT_REACHABLE: Sense = Sense::new(Key::CopyAborted, 0x0D, 0x02);

/// A unit that takes part in a copy.
#[derive(Clone, Debug)]
pub enum Party {
    /// The unit that the command was sent to.
    Own,
    /// Another unit.
    Other(Arc<Nexus>),
    /// The unit is not usable: segments that need it fail with this sense data.
    Missing(Sense),
}

/// Begins EXTENDED COPY(LID1) with its parameter list. `find` returns the session's nexus of the unit with
/// an NAA designator; `may` checks whether a nexus may read (`false`) or write (`true`) its unit.
pub fn begin(
    nexus: &Arc<Nexus>,
    list: &[u8],
    results: &CopyResults,
    find: &dyn Fn(&[u8]) -> Option<Arc<Nexus>>,
    may: fn(&Nexus, bool) -> bool,
) -> Begin {
    // An empty parameter list is not an error: SPC-6 section 6.4.2.
    if list.is_empty() {
        return Outcome::good(0).into();
    }
    let copy = match CopyList::parse(list) {
        Ok(copy) => copy,
        Err(sense) => return sense.into(),
    };
    let party = |cscd: &Cscd| match cscd {
        Cscd::Null => Party::Missing(UNREACHABLE_TARGET),
        Cscd::Unit { naa, block_size } => {
            let found = if naa[..] == nexus.unit().identity().naa { Some(nexus.clone()) } else { find(naa) };
            match found {
                Some(other) if *block_size != 0 && *block_size != other.unit().media().block_size => {
                    Party::Missing(COPY_ABORTED)
                }
                Some(other) if Arc::ptr_eq(other.unit(), nexus.unit()) => Party::Own,
                Some(other) => Party::Other(other),
                None => Party::Missing(NOT_REACHABLE),
            }
        }
    };
    let parties: Vec<Party> = copy.cscds.iter().map(party).collect();
    let progress = results.begin(nexus.name(), &copy);
    let wanted = list.len() as u64;
    Begin::Program(Program::new(
        nexus,
        steps::Copy::new(nexus, copy.segments, parties, progress, may, wanted),
    ))
}
