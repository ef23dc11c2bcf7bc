//! Data of PERSISTENT RESERVE IN: SPC-6 section 6.15.

use super::{Failure, Reservations};
use crate::Sense;
use crate::bytes::{be8, be16};

/// Service action of PERSISTENT RESERVE IN: SPC-6 table 185.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum InAction {
    /// READ KEYS: the registered keys.
    ReadKeys = 0x00,
    /// READ RESERVATION: the persistent reservation.
    ReadReservation = 0x01,
    /// REPORT CAPABILITIES: the supported features.
    ReportCapabilities = 0x02,
    /// READ FULL STATUS: every registration with its TransportID.
    ReadFullStatus = 0x03,
}

impl InAction {
    /// All service actions.
    pub const ALL: [InAction; 4] = [
        InAction::ReadKeys,
        InAction::ReadReservation,
        InAction::ReportCapabilities,
        InAction::ReadFullStatus,
    ];
}

/// The types in the form of the PERSISTENT RESERVATION TYPE MASK: SPC-6 table 192.
#[derive(Clone, Copy, Debug)]
pub struct Kinds;

impl Kinds {
    /// First byte: WR_EX_AR, EX_AC_RO, WR_EX_RO, EX_AC, WR_EX. Second byte: EX_AC_AR.
    pub const MASK: [u8; 2] = [0xEA, 0x01];
}

/// CRH, SIP_C, ATP_C: compatible handling of RESERVE and RELEASE, SPEC_I_PT, ALL_TG_PT. The values are
/// LIO's.
const CAPABLE: u8 = 0x1C;
/// PTPL_C; in the next byte PTPL_A.
const PERSIST: u8 = 0x01;
/// TMV, and ALLOW COMMANDS 001b: TEST UNIT READY is allowed for all types.
const ALLOW_COMMANDS: u8 = 0x90;

impl Reservations {
    /// Answers the CDB of PERSISTENT RESERVE IN. Returns the data, not truncated, and the allocation
    /// length. Error: the service action is unknown.
    pub fn report(&self, cdb: &[u8], can_persist: bool) -> Result<(Vec<u8>, u32), Failure> {
        let code = be8(cdb, 1) & 0x1F;
        let action = InAction::ALL.into_iter().find(|action| *action as u8 == code);
        let data = match action.ok_or(Sense::cdb_field(1, Some(4)))? {
            InAction::ReadKeys => self.keys(),
            InAction::ReadReservation => self.reservation(),
            InAction::ReportCapabilities => self.capabilities(can_persist),
            InAction::ReadFullStatus => self.full_status(),
        };
        Ok((data, be16(cdb, 7).into()))
    }

    /// Returns PRGENERATION and the length of the content, followed by the content.
    fn with_header(&self, content: &[u8]) -> Vec<u8> {
        let len = u32::try_from(content.len()).unwrap_or(u32::MAX);
        [&self.generation.to_be_bytes(), &len.to_be_bytes(), content].concat()
    }

    fn keys(&self) -> Vec<u8> {
        let keys: Vec<u8> = self.registrations.iter().flat_map(|known| known.key.to_be_bytes()).collect();
        self.with_header(&keys)
    }

    fn reservation(&self) -> Vec<u8> {
        let Some(held) = &self.held else { return self.with_header(&[]) };
        // The key is zero for the types that all registrants hold.
        let key = self.registrations.iter().find(|known| held.holder.as_ref() == Some(&known.registrant));
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&key.map_or(0, |known| known.key).to_be_bytes());
        descriptor[13] = held.kind as u8;
        self.with_header(&descriptor)
    }

    fn capabilities(&self, can_persist: bool) -> Vec<u8> {
        let mut data = vec![0, 8, CAPABLE, ALLOW_COMMANDS, Kinds::MASK[0], Kinds::MASK[1], 0, 0];
        if can_persist {
            data[2] |= PERSIST;
        }
        if self.persists {
            data[3] |= PERSIST;
        }
        data
    }

    fn full_status(&self) -> Vec<u8> {
        let mut content = Vec::new();
        for known in &self.registrations {
            let mut descriptor = [0; 24];
            descriptor[..8].copy_from_slice(&known.key.to_be_bytes());
            if self.holds(&known.registrant) {
                descriptor[12] = 0x01;
                descriptor[13] = self.held.as_ref().map_or(0, |held| held.kind as u8);
            }
            descriptor[18..20].copy_from_slice(&known.registrant.port.to_be_bytes());
            let id = known.registrant.transport_id();
            descriptor[20..].copy_from_slice(&u32::try_from(id.len()).unwrap_or(u32::MAX).to_be_bytes());
            content.extend_from_slice(&descriptor);
            content.extend_from_slice(&id);
        }
        self.with_header(&content)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;

    #[test]
    fn the_type_mask_has_a_bit_for_each_type() {
        // Bit n of the first byte stands for type n, except type 8, which is bit 0 of the second byte.
        let mask = Kind::ALL.into_iter().fold([0_u8; 2], |[first, second], kind| match kind as u8 {
            8 => [first, second | 1],
            code => [first | 1 << code, second],
        });
        assert_eq!(mask, Kinds::MASK);
    }

    #[test]
    fn capabilities_tell_whether_reservations_can_persist_and_do() {
        let cdb = [0x5E, 0x02, 0, 0, 0, 0, 0, 0, 8, 0];
        let report = |persists, can_persist| {
            Reservations { persists, ..Reservations::default() }.report(&cdb, can_persist).unwrap().0
        };
        assert_eq!(report(false, true), [0, 8, 0x1D, 0x90, 0xEA, 1, 0, 0], "LIO's");
        assert_eq!(report(true, true)[3], 0x91);
        assert_eq!(report(false, false)[2], 0x1C);
    }

    #[test]
    fn unknown_service_actions_are_refused() {
        for code in 4..0x20 {
            let result = Reservations::default().report(&[0x5E, code, 0, 0, 0, 0, 0, 64, 0, 0], true);
            assert_eq!(result, Err(Failure::Check(Sense::cdb_field(1, Some(4)))), "{code:02x}");
        }
    }
}
