//! SendTargets (RFC 7143, appendix C): the request's value, and the records of the answer.

use std::net::SocketAddr;

use super::login::SessionType;
use super::name;
use super::text::put;

/// Targets that a SendTargets request asks for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum SendTargets {
    /// All targets that the initiator may use; in discovery sessions only.
    All,
    /// One target, by its name in normal form: the session's own target, or the one that the request names.
    One(String),
}

impl SendTargets {
    /// Parses the value of the key. Returns `None` if it is not valid.
    ///
    /// An empty value asks for the session's own target, which a discovery session does not have. `All` is
    /// for discovery sessions. A normal session that sends it gets the record of its own target: libiscsi's
    /// suite expects an answer, and LIO gives one.
    pub fn parse(value: &str, session: &SessionType) -> Option<SendTargets> {
        match (value, session) {
            ("All", SessionType::Discovery) => Some(SendTargets::All),
            ("All" | "", SessionType::Normal { target }) => Some(SendTargets::One(target.clone())),
            ("", SessionType::Discovery) => None,
            (value, _) => {
                let name = name::of_peer(value).ok()?;
                let has_type = ["iqn.", "eui.", "naa."].iter().any(|kind| name.starts_with(kind));
                has_type.then_some(SendTargets::One(name))
            }
        }
    }
}

/// A target and the addresses of its portals.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Record {
    /// Name of the target.
    pub target: String,
    /// Addresses of its portals, with their portal group tags.
    pub portals: Vec<(SocketAddr, u16)>,
}

/// Appends a record: TargetName, then a TargetAddress for each portal.
pub fn put_record(out: &mut Vec<u8>, record: &Record) {
    put(out, "TargetName", &record.target);
    for (address, tag) in &record.portals {
        // The zone of a link-local address is meaningful on this host only.
        let address = SocketAddr::new(address.ip(), address.port());
        put(out, "TargetAddress", &format!("{address},{tag}"));
    }
}

/// Parses the records of an answer, for initiators. Skips addresses that are not IP addresses.
pub fn records(pairs: &[(&str, &str)]) -> Vec<Record> {
    let mut records: Vec<Record> = Vec::new();
    for (key, value) in pairs {
        match (*key, records.last_mut()) {
            ("TargetName", _) => records.push(Record { target: (*value).to_owned(), portals: Vec::new() }),
            ("TargetAddress", Some(record)) => {
                let portal = value.rsplit_once(',');
                let portal =
                    portal.and_then(|(address, tag)| Some((address.parse().ok()?, tag.parse().ok()?)));
                record.portals.extend(portal);
            }
            _ => {}
        }
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_name_and_addresses_with_group_tags() {
        let record = Record {
            target: "iqn.2026-11.io.blockyard:disk".to_owned(),
            portals: vec![
                ("192.0.2.1:3260".parse().expect("an address"), 1),
                ("[2001:db8::1]:3261".parse().expect("an address"), 2),
            ],
        };
        let mut out = Vec::new();
        put_record(&mut out, &record);
        let expected = "TargetName=iqn.2026-11.io.blockyard:disk\0TargetAddress=192.0.2.1:3260,1\0\
                        TargetAddress=[2001:db8::1]:3261,2\0";
        assert_eq!(String::from_utf8_lossy(&out), expected);
        assert_eq!(records(&super::super::text::pairs(&out).expect("valid")), [record]);
    }

    /// The values of libiscsi's iSCSISendTargets suite, and appendix C.
    #[test]
    fn values_are_all_a_name_or_empty() {
        let own = "iqn.2026-11.io.blockyard:disk".to_owned();
        let normal = SessionType::Normal { target: own.clone() };
        for session in [&normal, &SessionType::Discovery] {
            let other = SendTargets::One("iqn.2001-04.com.example:a".to_owned());
            assert_eq!(SendTargets::parse("iqn.2001-04.com.EXAMPLE:a", session), Some(other));
            for bad in ["Alle", "A", "aLL", "All ", "disk"] {
                assert_eq!(SendTargets::parse(bad, session), None, "{bad}");
            }
        }
        assert_eq!(SendTargets::parse("All", &SessionType::Discovery), Some(SendTargets::All));
        assert_eq!(SendTargets::parse("All", &normal), Some(SendTargets::One(own.clone())));
        assert_eq!(SendTargets::parse("", &normal), Some(SendTargets::One(own)));
        assert_eq!(SendTargets::parse("", &SessionType::Discovery), None);
    }
}
