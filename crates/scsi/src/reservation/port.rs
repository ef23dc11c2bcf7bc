//! Names of the ports of a registration, and their TransportIDs: SPC-6 section 7.6.4.6.
//!
//! A registration belongs to an I_T nexus: an initiator port and a target port. An iSCSI initiator port is
//! identified by the name of the initiator and the ISID of its session.

use crate::{NexusName, Sense};

/// Longest iSCSI name in bytes: RFC 7143 section 4.2.7.1.
pub const NAME_LEN_MAX: usize = 223;

/// The I_T nexus of a registration.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Registrant {
    /// iSCSI name of the initiator, in lower case.
    pub initiator: String,
    /// ISID of the session; `None` stands for all sessions of the initiator (a TransportID without an ISID,
    /// or `enforce_pr_isids` is off).
    pub isid: Option<[u8; 6]>,
    /// Relative target port identifier.
    pub port: u16,
}

impl Registrant {
    /// Returns the I_T nexus of a session. `with_isid` is the attribute `enforce_pr_isids`.
    pub fn of(nexus: &NexusName, with_isid: bool) -> Registrant {
        Registrant {
            initiator: nexus.initiator.to_ascii_lowercase(),
            isid: with_isid.then_some(nexus.isid),
            port: nexus.relative_port,
        }
    }

    /// Checks whether commands of this session are commands of this I_T nexus.
    pub fn covers(&self, nexus: &NexusName) -> bool {
        self.port == nexus.relative_port
            && self.isid.is_none_or(|isid| isid == nexus.isid)
            && self.initiator.eq_ignore_ascii_case(&nexus.initiator)
    }

    /// Checks whether both denote at least one common I_T nexus.
    pub fn overlaps(&self, other: &Registrant) -> bool {
        self.port == other.port
            && self.initiator == other.initiator
            && match (self.isid, other.isid) {
                (Some(one), Some(other)) => one == other,
                _ => true,
            }
    }

    /// Returns the TransportID of the initiator port.
    pub fn transport_id(&self) -> Vec<u8> {
        let (format, name) = match self.isid {
            Some(isid) => (0x40, format!("{},i,0x{:012x}", self.initiator, isid_number(isid))),
            None => (0x00, self.initiator.clone()),
        };
        // The name is terminated by NUL and padded to a multiple of four, at least 20 bytes.
        let len = (name.len() + 1).next_multiple_of(4).max(20);
        let mut id = vec![format | PROTOCOL_ISCSI, 0];
        id.extend_from_slice(&u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes());
        id.extend_from_slice(name.as_bytes());
        id.resize(HEADER_LEN + len, 0);
        id
    }
}

/// Protocol identifier of iSCSI: SPC-6 table 527.
const PROTOCOL_ISCSI: u8 = 0x05;
const HEADER_LEN: usize = 4;

/// Converts an ISID to a number, as TransportIDs print it.
pub(super) fn isid_number(isid: [u8; 6]) -> u64 {
    isid.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// An initiator port in a parameter list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TransportId {
    /// iSCSI name of the initiator, in lower case.
    pub initiator: String,
    /// ISID, if the TransportID has one.
    pub isid: Option<[u8; 6]>,
}

impl TransportId {
    /// Parses the TransportID at the start of `list`, which begins at byte `at` of the parameter list.
    /// Returns it and its length. Errors: 05/1A/00 if it is truncated; 05/26/00 with a field pointer if a
    /// field is wrong.
    pub fn parse(list: &[u8], at: usize) -> Result<(TransportId, usize), Sense> {
        let wrong = |byte: usize| Sense::parameter_field(u16::try_from(at + byte).unwrap_or(u16::MAX), None);
        let (header, rest) = list.split_first_chunk::<HEADER_LEN>().ok_or(Sense::PARAMETER_LIST_LENGTH)?;
        if header[0] & 0x0F != PROTOCOL_ISCSI {
            return Err(wrong(0));
        }
        let len = usize::from(u16::from_be_bytes([header[2], header[3]]));
        if len < 20 || len % 4 != 0 {
            return Err(wrong(2));
        }
        let field = rest.get(..len).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
        let end = field.iter().position(|byte| *byte == 0).ok_or_else(|| wrong(HEADER_LEN))?;
        let text = field.get(..end).and_then(|name| std::str::from_utf8(name).ok());
        let text = text.ok_or_else(|| wrong(HEADER_LEN))?.to_ascii_lowercase();
        let (initiator, isid) = match header[0] >> 6 {
            0 => (text.as_str(), None),
            1 => {
                let (name, number) = text.split_once(",i,0x").ok_or_else(|| wrong(HEADER_LEN))?;
                (name, Some(parse_isid(number).ok_or_else(|| wrong(HEADER_LEN))?))
            }
            _ => return Err(wrong(0)),
        };
        if initiator.is_empty() || initiator.len() > NAME_LEN_MAX || initiator.contains(char::is_whitespace) {
            return Err(wrong(HEADER_LEN));
        }
        Ok((TransportId { initiator: initiator.to_owned(), isid }, HEADER_LEN + len))
    }
}

/// Parses 12 hexadecimal digits.
pub(super) fn parse_isid(digits: &str) -> Option<[u8; 6]> {
    if digits.len() != 12 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let [0, 0, isid @ ..] = u64::from_str_radix(digits, 16).ok()?.to_be_bytes() else { return None };
    Some(isid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn registrant(initiator: &str, isid: Option<[u8; 6]>) -> Registrant {
        Registrant { initiator: initiator.into(), isid, port: 1 }
    }

    #[test]
    fn a_transport_id_with_an_isid_has_format_01_and_one_without_format_00() {
        let id = registrant("iqn.1993-08.org.debian:01:abc", Some([0, 2, 0x3d, 0, 0, 1])).transport_id();
        assert_eq!(id[..4], [0x45, 0, 0, 48]);
        assert_eq!(&id[4..48], b"iqn.1993-08.org.debian:01:abc,i,0x00023d0000");
        assert_eq!(&id[48..], b"01\0\0", "terminated and padded to a multiple of four");
        let id = registrant("iqn.a:b", None).transport_id();
        assert_eq!(id[..4], [0x05, 0, 0, 20], "at least 20 bytes");
        assert_eq!(&id[4..11], b"iqn.a:b");
    }

    #[test]
    fn foreign_protocols_short_lists_and_bad_names_are_refused() {
        let good = registrant("iqn.2026-11.example:host", Some([1, 2, 3, 4, 5, 6])).transport_id();
        assert!(TransportId::parse(&good, 28).is_ok());
        assert_eq!(TransportId::parse(&good[..good.len() - 1], 28), Err(Sense::PARAMETER_LIST_LENGTH));
        assert_eq!(TransportId::parse(&good[..3], 28), Err(Sense::PARAMETER_LIST_LENGTH));
        let change = |at: usize, byte: u8| {
            let mut id = good.clone();
            id[at] = byte;
            TransportId::parse(&id, 28)
        };
        assert_eq!(change(0, 0x40), Err(Sense::parameter_field(28, None)), "Fibre Channel");
        assert_eq!(change(0, 0x85), Err(Sense::parameter_field(28, None)), "reserved format");
        assert_eq!(change(3, 18), Err(Sense::parameter_field(30, None)), "too short for a TransportID");
        assert_eq!(change(4, 0), Err(Sense::parameter_field(32, None)), "no name");
        assert_eq!(change(4, 0xFF), Err(Sense::parameter_field(32, None)), "not UTF-8");
        assert_eq!(change(35, b'z'), Err(Sense::parameter_field(32, None)), "not hexadecimal");
    }

    #[test]
    fn a_registrant_without_isid_covers_all_sessions_of_the_initiator() {
        let nexus = NexusName {
            initiator: "iqn.A:host".into(),
            isid: [1; 6],
            target: "iqn.t".into(),
            portal_group: 1,
            relative_port: 1,
        };
        let with = Registrant::of(&nexus, true);
        let without = Registrant::of(&nexus, false);
        assert!(with.covers(&nexus) && without.covers(&nexus));
        let other = NexusName { isid: [2; 6], ..nexus.clone() };
        assert!(!with.covers(&other) && without.covers(&other));
        assert!(!without.covers(&NexusName { relative_port: 2, ..nexus }));
        assert!(with.overlaps(&without) && !with.overlaps(&Registrant::of(&other, true)));
    }

    proptest! {
        #[test]
        fn transport_ids_come_back(name in "[a-z0-9.:-]{1,223}", isid in any::<Option<[u8; 6]>>()) {
            let id = registrant(&name, isid).transport_id();
            prop_assert_eq!(id.len() % 4, 0);
            let (parsed, len) = TransportId::parse(&id, 0).unwrap();
            prop_assert_eq!(len, id.len());
            prop_assert_eq!(parsed, TransportId { initiator: name, isid });
        }

        #[test]
        fn foreign_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), start in 0..70_000_usize) {
            let _ = TransportId::parse(&bytes, start);
        }
    }
}
