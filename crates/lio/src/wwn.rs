//! Names of targets, initiators and storage objects: parses and generates them.

use crate::config::{Fabric, PortalId};
use crate::system::System;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

/// A type of names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// iSCSI qualified name.
    Iqn,
    /// NAA: 16 hexadecimal digits.
    Naa,
    /// EUI-64.
    Eui,
}

impl Kind {
    /// Returns the name of the type for messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Iqn => "iqn",
            Kind::Naa => "naa",
            Kind::Eui => "eui",
        }
    }
}

impl Fabric {
    /// Returns the permitted types of a fabric's names, the preferred one first.
    pub fn name_kinds(self) -> &'static [Kind] {
        match self {
            Fabric::Iscsi => &[Kind::Iqn, Kind::Naa, Kind::Eui],
            Fabric::Loopback => &[Kind::Naa],
        }
    }
}

fn clean(kind: Kind, text: &str) -> String {
    let lower = text.trim().to_lowercase();
    if kind == Kind::Iqn {
        return lower;
    }
    let bare = lower.strip_prefix("0x").unwrap_or(&lower).replace(['-', ':'], "");
    let has_kind = ["naa.", "eui.", "ib."].iter().any(|prefix| bare.starts_with(prefix));
    if has_kind { bare } else { format!("{}.{bare}", kind.name()) }
}

fn is_hex(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn is_kind(kind: Kind, text: &str) -> bool {
    match kind {
        Kind::Iqn => is_iqn(text),
        Kind::Naa => text
            .strip_prefix("naa.")
            .is_some_and(|digits| is_hex(digits) && digits.starts_with(['1', '2', '5', 'c', 'd', 'e', 'f'])),
        Kind::Eui => text.strip_prefix("eui.").is_some_and(is_hex),
    }
}

/// Whether a text is `iqn.YYYY-MM.DOMAIN…`, without spaces and underscores.
fn is_iqn(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("iqn.") else { return false };
    let Some((date, name)) = rest.split_once('.') else { return false };
    let date = date.as_bytes();
    let is_date = matches!(date, [a, b, c, d, b'-', b'0' | b'1', e] if [a, b, c, d, e].iter().all(|x| x.is_ascii_digit()));
    // `/` and `*` have a meaning in paths, so no path could name such a node; RFC 7143 section 4.2.7.2 allows
    // neither character.
    is_date
        && name.contains('.')
        && !text.contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '_' | '/' | '*'))
}

/// Returns a name in its normal form.
///
/// # Errors
/// rtslib's message.
pub fn normalize(fabric: Fabric, text: &str) -> Result<String, String> {
    let kinds = fabric.name_kinds();
    let found = kinds.iter().find_map(|&kind| {
        let name = clean(kind, text);
        is_kind(kind, &name).then_some(name)
    });
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    found.ok_or_else(|| format!("WWN not valid as: {}", names.join(", ")))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns a new name of the preferred type.
pub fn generate(fabric: Fabric, system: &mut dyn System) -> String {
    let mut random = [0; 6];
    system.random(&mut random);
    let digits = hex(&random);
    match fabric {
        Fabric::Iscsi => {
            let host = system.host_name();
            let host: String = host.split('.').next().unwrap_or_default().replace('_', "").to_lowercase();
            let host = if host.is_empty() { "localhost".to_owned() } else { host };
            let machine = std::env::consts::ARCH.replace('_', "");
            format!("iqn.2003-01.org.linux-iscsi.{host}.{machine}:sn.{digits}")
        }
        // IEEE registered (5), OpenIB's company (001405), 9 random digits: rtslib's form.
        Fabric::Loopback => format!("naa.5001405{}", &digits[..9]),
    }
}

/// Returns a new unit serial number: a random UUID (RFC 9562, version 4).
pub fn unit_serial(system: &mut dyn System) -> String {
    let mut random = [0; 16];
    system.random(&mut random);
    random[6] = random[6] & 0x0f | 0x40;
    random[8] = random[8] & 0x3f | 0x80;
    let digits = hex(&random);
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    parts.join("-")
}

/// Returns a new name for a link of configfs: rtslib's ten digits.
pub fn alias(system: &mut dyn System) -> String {
    let mut random = [0; 5];
    system.random(&mut random);
    hex(&random)
}

/// Whether a text is a unit serial number that can be stored: 1 to 254 printable characters (LIO).
pub fn is_unit_serial(text: &str) -> bool {
    (1..=254).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Returns a portal's address as a socket address.
pub fn portal_address(portal: &PortalId) -> Option<SocketAddr> {
    let bare = portal.ip.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let ip: IpAddr = match bare {
        Some(bare) => IpAddr::V6(bare.parse().ok()?),
        None => IpAddr::V4(portal.ip.parse().ok()?),
    };
    Some(SocketAddr::new(ip, portal.port))
}

/// Returns an address as rtslib stores it: an IPv6 address gets brackets.
pub fn canonical_ip(ip: &str) -> String {
    if ip.contains('.') && !ip.contains(':') || ip.starts_with('[') {
        ip.to_owned()
    } else {
        format!("[{ip}]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn names_are_normalized() {
        let iscsi = |text| normalize(Fabric::Iscsi, text);
        assert_eq!(
            iscsi("iqn.2003-01.ORG.linux-iscsi:Disk").as_deref(),
            Ok("iqn.2003-01.org.linux-iscsi:disk")
        );
        assert_eq!(iscsi("eui.0123456789abcdef").as_deref(), Ok("eui.0123456789abcdef"));
        assert_eq!(iscsi("5001405a1b2c3d4e").as_deref(), Ok("naa.5001405a1b2c3d4e"));
        for bad in ["", "iqn.2003-01.org", "iqn.2003-01.a.b_c", "iqn.2003-01.a.b c", "iqn.03-1.a.b", "disk"] {
            assert_eq!(iscsi(bad), Err("WWN not valid as: iqn, naa, eui".to_owned()), "{bad}");
        }
        let loopback = |text| normalize(Fabric::Loopback, text);
        assert_eq!(loopback("0x5001405a1b2c3d4e").as_deref(), Ok("naa.5001405a1b2c3d4e"));
        assert_eq!(loopback("iqn.2003-01.a.b"), Err("WWN not valid as: naa".to_owned()));
    }

    #[test]
    fn new_names_have_their_form() {
        let mut system = Memory::default();
        for fabric in Fabric::ALL {
            let name = generate(fabric, &mut system);
            assert_eq!(normalize(fabric, &name), Ok(name.clone()));
        }
        let serial = unit_serial(&mut system);
        assert!(is_unit_serial(&serial) && serial.len() == 36 && serial.as_bytes()[14] == b'4', "{serial}");
    }

    #[test]
    fn portals_are_socket_addresses() {
        let address = |ip: &str| portal_address(&PortalId { ip: ip.to_owned(), port: 3260 });
        assert_eq!(address("[::0]").map(|address| address.to_string()).as_deref(), Some("[::]:3260"));
        assert!(address("0.0.0.0").is_some() && address("::").is_none() && address("host.org").is_none());
        assert_eq!(
            (canonical_ip("::0"), canonical_ip("1.2.3.4")),
            ("[::0]".to_owned(), "1.2.3.4".to_owned())
        );
        assert_eq!(canonical_ip("::ffff:1.2.3.4"), "[::ffff:1.2.3.4]");
    }
}
