//! REPORT TARGET PORT GROUPS and SET TARGET PORT GROUPS: SPC-6 sections 6.37 and 6.45.

use super::{AccessGroups, AccessState, StateStatus};
use crate::Sense;
use crate::bytes::{be8, be16, be32};

/// Sense data of a SET TARGET PORT GROUPS that failed without changing anything.
pub type SetFailure = Sense;

impl AccessGroups {
    /// Returns the TPGS field of INQUIRY for a command that arrived at a target port: SPC-6 table 153.
    pub fn tpgs(&self, port: u16) -> u8 {
        self.of_port(port).access_type & 0x03
    }

    /// Answers the CDB of REPORT TARGET PORT GROUPS. Returns the data, not truncated, and the allocation
    /// length. Error: the data format is unknown.
    pub fn report(&self, cdb: &[u8], port: u16) -> Result<(Vec<u8>, u32), Sense> {
        let mut content = Vec::new();
        match be8(cdb, 1) >> 5 {
            0 => (),
            // Write the extended header.
            1 => content.extend_from_slice(&[0x10, self.of_port(port).implicit_transition_secs, 0, 0]),
            _ => return Err(Sense::cdb_field(1, Some(7))),
        }
        for group in &self.groups {
            let count = u8::try_from(group.ports.len()).unwrap_or(u8::MAX);
            let [high, low] = group.id.to_be_bytes();
            let state = u8::from(group.preferred) << 7 | group.state as u8;
            content.extend_from_slice(&[
                state,
                group.supported.bits(),
                high,
                low,
                0,
                group.status as u8,
                0,
                count,
            ]);
            for port in group.ports.iter().take(count.into()) {
                let [high, low] = port.to_be_bytes();
                content.extend_from_slice(&[0, 0, high, low]);
            }
        }
        let len = u32::try_from(content.len()).unwrap_or(u32::MAX);
        Ok(([&len.to_be_bytes(), content.as_slice()].concat(), be32(cdb, 6)))
    }

    /// Returns the parameter list length in the CDB of SET TARGET PORT GROUPS. Error: the port's group does
    /// not allow explicit changes, so the command is not supported.
    pub fn set_list_len(&self, cdb: &[u8], port: u16) -> Result<u32, SetFailure> {
        if self.of_port(port).access_type & 0x02 == 0 {
            return Err(Sense::INVALID_OPCODE);
        }
        Ok(be32(cdb, 6))
    }

    /// Executes SET TARGET PORT GROUPS: applies all descriptors or, if one is wrong, none. Returns whether
    /// a state changed, in which case the change must be reported to every nexus except the sender's.
    pub fn set(&mut self, list: &[u8]) -> Result<bool, SetFailure> {
        /// Reserved bytes at the start of the list.
        const HEADER_LEN: usize = 4;
        let Some(descriptors) = list.get(HEADER_LEN..) else {
            // An empty list changes nothing: SPC-6 section 6.45.
            return if list.is_empty() { Ok(false) } else { Err(Sense::PARAMETER_LIST_LENGTH) };
        };
        let (chunks, rest) = descriptors.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(Sense::PARAMETER_LIST_LENGTH);
        }
        let mut next = self.clone();
        for (index, chunk) in chunks.iter().enumerate() {
            let at = u16::try_from(HEADER_LEN + 4 * index).unwrap_or(u16::MAX);
            let id = be16(chunk, 2);
            let group = next.groups.iter_mut().find(|group| group.id == id);
            let group = group.ok_or(Sense::parameter_field(at.saturating_add(2), None))?;
            let state = AccessState::of(chunk[0] & 0x0F).filter(|state| {
                // An initiator cannot request a transition without an end state.
                *state != AccessState::Transitioning && group.supported.contains(state.supported_bit())
            });
            let state = state.ok_or(Sense::parameter_field(at, Some(3)))?;
            if group.access_type & 0x02 == 0 {
                return Err(Sense::parameter_field(at.saturating_add(2), None));
            }
            if group.state != state {
                (group.state, group.status) = (state, StateStatus::Explicit);
            }
        }
        let is_changed = next != *self;
        *self = next;
        Ok(is_changed)
    }
}
