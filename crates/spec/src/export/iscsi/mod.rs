//! `--iscsi tcp:HOST:PORT[,OPTION...]`: an export as a logical unit of an iSCSI target.

mod name;
mod portal;

pub use name::IscsiName;
pub use portal::{ISCSI_PORT, PortalAddress};

use super::{Conflict, ExportFile, ExportOptions, ExportRow, FileAccess, NbdOptions};
use crate::{DeviceName, SpecError};
use options::{Escaped, OptionRow, Options, split, write_flag};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The largest LUN, LIO's limit; larger ones would need another addressing method than flat space.
const LUN_MAX: u16 = 16383;
/// The longest serial number in bytes; initiators show no more of it.
const SERIAL_LEN_MAX: usize = 36;

const OPTIONS: &[OptionRow] = &[
    OptionRow::value(
        "target",
        "NAME",
        "iqn.2026-11.io.blockyard:DEVICE",
        "the target's name (iqn., eui. or naa.); devices with the same target are its LUNs",
    ),
    OptionRow::value("lun", "0..16383", "the first free one", "the logical unit number"),
    OptionRow::value("tpg", "1..65535", "1", "the tag of the target portal group"),
    OptionRow::value(
        "acl",
        "INITIATOR",
        "",
        "an initiator that may log in and see the LUN; may be repeated. Without one, every initiator may",
    ),
    OptionRow::value("acl-ro", "INITIATOR", "", "as acl, but the initiator may only read"),
    OptionRow::flag("ro", "all initiators may only read"),
    OptionRow::value(
        "chap",
        "FILE",
        "",
        "initiators authenticate with a user and secret of this file, which only its owner may read",
    ),
    OptionRow::value(
        "discovery-chap",
        "FILE",
        "",
        "as chap, for initiators that list the targets of this process",
    ),
    OptionRow::value(
        "digests",
        "auto|on|off",
        "auto",
        "CRC32C of headers and data: as the initiator wants, always, never",
    ),
    OptionRow::flag(
        "removable",
        "the medium is removable: initiators may eject and load it (START STOP UNIT)",
    ),
    OptionRow::value(
        "cdb-max",
        "16|32",
        "32",
        "the longest command in bytes; 16: without WRITE SAME(32), whose description libiscsi misreads",
    ),
    OptionRow::value(
        "serial",
        "TEXT",
        "derived from the backing file or the name",
        "the unit serial number, from which the NAA identifier is derived",
    ),
];

/// Whether PDUs have CRC32C digests.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Digests {
    /// The initiator chooses.
    #[default]
    Auto,
    /// Initiators that do not agree are refused.
    On,
    /// Digests are not offered.
    Off,
}

const DIGESTS: &[(&str, Digests)] = &[("auto", Digests::Auto), ("on", Digests::On), ("off", Digests::Off)];

/// Longest command descriptor blocks that the unit accepts.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum CdbMax {
    /// 16 bytes.
    Short,
    /// 32 bytes.
    #[default]
    Long,
}

const CDB_MAX: &[(&str, CdbMax)] = &[("16", CdbMax::Short), ("32", CdbMax::Long)];

/// An initiator that may use a LUN.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AclSpec {
    /// The initiator's name.
    pub initiator: IscsiName,
    /// Whether it may only read.
    pub read_only: bool,
}

/// An export as a logical unit of an iSCSI target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IscsiSpec {
    /// The address at which the target listens.
    pub portal: PortalAddress,
    /// The target; `None`: a target named after the device.
    pub target: Option<IscsiName>,
    /// The logical unit number; `None`: the number that the device already has in the group, or else the
    /// first free one.
    pub lun: Option<u16>,
    /// The tag of the portal group. Never 0.
    pub tag: u16,
    /// The initiators that may use the LUN; empty: those that the group's ACLs admit, or all if it has no ACL.
    pub acls: Vec<AclSpec>,
    /// Whether all initiators may only read.
    pub read_only: bool,
    /// The file with the users and secrets of the group's initiators.
    pub chap: Option<PathBuf>,
    /// The file with the users and secrets of initiators in discovery sessions.
    pub discovery_chap: Option<PathBuf>,
    /// Whether PDUs have digests.
    pub digests: Digests,
    /// The unit serial number.
    pub serial: Option<String>,
    /// Whether the medium can be ejected.
    pub removable: bool,
    /// The longest command.
    pub cdb_max: CdbMax,
}

impl IscsiSpec {
    /// Returns the name of the target for a device.
    pub fn target_of(&self, device: &DeviceName) -> IscsiName {
        self.target.clone().unwrap_or_else(|| IscsiName::of_device(device))
    }
}

impl FromStr for IscsiSpec {
    type Err = SpecError;

    /// Parses `tcp::3260`, `tcp:[::1]:3260,target=iqn.2026-11.com.example:fast,lun=1,acl=iqn.1993-08.org.debian:01:abc`.
    fn from_str(text: &str) -> Result<IscsiSpec, SpecError> {
        let mut items = split(text).into_iter();
        let portal = items.next().unwrap_or_default().parse()?;
        let mut acls: Vec<AclSpec> = Vec::new();
        let mut rest = Vec::new();
        for item in items {
            let (initiator, read_only) = match item.split_once('=') {
                Some(("acl", initiator)) => (initiator, false),
                Some(("acl-ro", initiator)) => (initiator, true),
                _ => {
                    rest.push(item);
                    continue;
                }
            };
            let initiator = IscsiName::of_initiator(initiator)?;
            if acls.iter().any(|acl| acl.initiator == initiator) {
                return Err(SpecError::new(format!("initiator {initiator} is given twice"), "leave one out"));
            }
            acls.push(AclSpec { initiator, read_only });
        }
        let mut options = Options::new("iscsi", OPTIONS, rest.into_iter())?;
        // A flag without a value that has one of these names is still among the options.
        for key in ["acl", "acl-ro"] {
            options.text(key)?;
        }
        let target = options.value("target", "iqn.2026-11.com.example:disk")?;
        let lun = number(&mut options, "lun", 0, LUN_MAX)?;
        let tag = number(&mut options, "tpg", 1, u16::MAX)?.unwrap_or(1);
        let serial = options.text("serial")?;
        if serial.as_ref().is_some_and(|serial| !is_serial(serial)) {
            return Err(SpecError::new(
                "option serial is not a serial number",
                format!("use 1 to {SERIAL_LEN_MAX} printable ASCII characters"),
            ));
        }
        Ok(IscsiSpec {
            portal,
            target,
            lun,
            tag,
            acls,
            read_only: options.flag("ro")?,
            chap: options.text("chap")?.map(PathBuf::from),
            discovery_chap: options.text("discovery-chap")?.map(PathBuf::from),
            digests: options.choice("digests", DIGESTS)?.unwrap_or_default(),
            serial,
            removable: options.flag("removable")?,
            cdb_max: options.choice("cdb-max", CDB_MAX)?.unwrap_or_default(),
        })
    }
}

fn is_serial(text: &str) -> bool {
    text.len() <= SERIAL_LEN_MAX
        && text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
        && text.trim() == text
}

fn number(options: &mut Options, key: &str, min: u16, max: u16) -> Result<Option<u16>, SpecError> {
    let number: Option<u32> = options.value(key, "1")?;
    match number.map(|number| u16::try_from(number).ok().filter(|number| (min..=max).contains(number))) {
        Some(None) => {
            Err(SpecError::new(format!("option {key} is out of range"), format!("use {min} to {max}")))
        }
        number => Ok(number.flatten()),
    }
}

impl fmt::Display for IscsiSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.portal)?;
        if let Some(target) = &self.target {
            write!(f, ",target={target}")?;
        }
        if let Some(lun) = self.lun {
            write!(f, ",lun={lun}")?;
        }
        if self.tag != 1 {
            write!(f, ",tpg={}", self.tag)?;
        }
        for AclSpec { initiator, read_only } in &self.acls {
            let key = if *read_only { "acl-ro" } else { "acl" };
            write!(f, ",{key}={initiator}")?;
        }
        write_flag(f, self.read_only, "ro")?;
        for (key, file) in [("chap", &self.chap), ("discovery-chap", &self.discovery_chap)] {
            if let Some(file) = file {
                write!(f, ",{key}={}", Escaped(&file.to_string_lossy()))?;
            }
        }
        if let Some((word, _)) = DIGESTS.iter().find(|(_, digests)| *digests == self.digests)
            && self.digests != Digests::Auto
        {
            write!(f, ",digests={word}")?;
        }
        write_flag(f, self.removable, "removable")?;
        if let Some((word, _)) = CDB_MAX.iter().find(|(_, max)| *max == self.cdb_max)
            && self.cdb_max != CdbMax::default()
        {
            write!(f, ",cdb-max={word}")?;
        }
        self.serial.as_ref().map_or(Ok(()), |serial| write!(f, ",serial={}", Escaped(serial)))
    }
}

impl ExportOptions for IscsiSpec {
    const ROW: ExportRow = ExportRow {
        kind: "iscsi",
        value_name: "ADDRESS",
        value_optional: false,
        repeats: true,
        summary: "A LUN of an iSCSI target at tcp:HOST:PORT",
        usage: "--iscsi tcp:HOST:PORT[,OPTION...]",
        about: "a logical unit of an iSCSI target. Several addresses may be given; devices with the same target \
                are its LUNs",
        example: "blockyard serve file:disk.img --iscsi tcp:0.0.0.0:3260",
        options: OPTIONS,
        is_kernel_device: false,
        page: "iscsi.md",
    };

    fn parse(text: &str, _nbd: &NbdOptions) -> Result<IscsiSpec, SpecError> {
        text.parse()
    }

    fn rooted(self, base: &Path) -> IscsiSpec {
        let rooted = |file: Option<PathBuf>| file.map(|file| base.join(file));
        IscsiSpec { chap: rooted(self.chap), discovery_chap: rooted(self.discovery_chap), ..self }
    }

    fn address(&self) -> Option<String> {
        match (&self.target, self.lun) {
            (Some(target), Some(lun)) if self.portal.port != 0 => Some(self.portal.uri(target, lun)),
            _ => None,
        }
    }

    fn conflicts(&self, earlier: &IscsiSpec, is_same_device: bool) -> Vec<Conflict> {
        let mut conflicts = Vec::new();
        let mut conflict = |key, why| conflicts.push(Conflict { key, why });
        let is_same_target = match (&self.target, &earlier.target) {
            (Some(one), Some(other)) => one == other,
            (None, None) => is_same_device,
            _ => false,
        };
        if let (Some(one), Some(other)) = (&self.discovery_chap, &earlier.discovery_chap)
            && one != other
        {
            let why = "another export has another discovery-chap (a process has one)".to_owned();
            conflict("iscsi", why);
        }
        if is_same_device
            && self.serial != earlier.serial
            && self.serial.is_some()
            && earlier.serial.is_some()
        {
            conflict("iscsi", "the device has another serial already (a device has one)".to_owned());
        }
        if is_same_device && (self.removable, self.cdb_max) != (earlier.removable, earlier.cdb_max) {
            conflict("iscsi", "the device has another removable or cdb-max (give all the same)".to_owned());
        }
        if !is_same_target || self.tag != earlier.tag {
            return conflicts;
        }
        match (self.lun, earlier.lun) {
            (Some(one), Some(other)) if is_same_device && one != other => {
                conflict("iscsi", format!("the device is LUN {other} of the target already (leave lun out)"));
            }
            (Some(one), Some(other)) if !is_same_device && one == other => {
                conflict("iscsi", format!("another device is LUN {one} of the target (choose another lun)"));
            }
            _ => {}
        }
        if is_same_device && self.portal == earlier.portal {
            conflict("iscsi", format!("the device is at {} already (leave one out)", self.portal));
        }
        if let (Some(one), Some(other)) = (&self.chap, &earlier.chap)
            && one != other
        {
            conflict(
                "iscsi",
                "another LUN of the portal group has another chap (give all the same)".to_owned(),
            );
        }
        if self.digests != earlier.digests {
            conflict(
                "iscsi",
                "another LUN of the portal group has other digests (give all the same)".to_owned(),
            );
        }
        conflicts
    }

    fn files(&self) -> Vec<ExportFile> {
        let files = [&self.chap, &self.discovery_chap].into_iter().flatten();
        files
            .map(|path| ExportFile { key: "iscsi", path: path.clone(), access: FileAccess::ReadKey })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "tcp:[::1]:3260,target=iqn.2026-11.example:fast,lun=1,tpg=2,acl=iqn.1993-08.org.debian:01:abc,\
                           acl-ro=iqn.1993-08.org.debian:02:d,ro,chap=a,,b,discovery-chap=c,digests=on,serial=S 1";

    fn spec(text: &str) -> IscsiSpec {
        text.parse().unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    #[test]
    fn every_export_parses_back_from_its_text() {
        let removable = "tcp:host:1,digests=off,removable,cdb-max=16";
        for text in [EXAMPLE, "tcp::3260", "tcp:0.0.0.0:3260,lun=0", removable] {
            assert_eq!(spec(text).to_string(), text);
            assert_eq!(spec(&spec(text).to_string()), spec(text));
        }
        assert_eq!(spec("tcp:host").to_string(), "tcp:host:3260");
        let example = spec(EXAMPLE);
        assert_eq!(spec("tcp::3260,cdb-max=32").cdb_max, CdbMax::Long);
        assert_eq!((example.lun, example.tag, example.chap), (Some(1), 2, Some("a,b".into())));
        assert!(!example.acls[0].read_only && example.acls[1].read_only);
    }

    #[test]
    fn an_invalid_export_is_refused() {
        for (text, why) in [
            ("", "where an iSCSI target listens"),
            ("unix:/a", "where an iSCSI target listens"),
            ("tcp:host:x", "is not a port"),
            ("tcp::3260,target=disk", "is not an iSCSI name"),
            ("tcp::3260,lun=16384", "0 to 16383"),
            ("tcp::3260,lun=x", "lun"),
            ("tcp::3260,tpg=0", "1 to 65535"),
            ("tcp::3260,acl", "needs a value"),
            ("tcp::3260,acl=iqn.2026-11.a:b,acl-ro=iqn.2026-11.a:b", "given twice"),
            ("tcp::3260,digest=on", "did you mean digests?"),
            ("tcp::3260,digests=crc", "use one of"),
            ("tcp::3260,chap", "needs a value"),
            ("tcp::3260,serial=é", "printable ASCII"),
            ("tcp::3260,cdb-max=12", "use one of"),
        ] {
            let refusal = text.parse::<IscsiSpec>().expect_err(text).to_string();
            assert!(refusal.contains(why), "{text}: {refusal}");
        }
    }

    #[test]
    fn the_address_is_known_if_target_lun_and_port_are() {
        let uri = "iscsi://127.0.0.1:3260/iqn.2026-11.a:b/3";
        assert_eq!(spec("tcp:0.0.0.0,target=iqn.2026-11.a:b,lun=3").address().as_deref(), Some(uri));
        assert_eq!(spec("tcp::0,target=iqn.2026-11.a:b,lun=3").address(), None);
        assert_eq!(spec("tcp::3260,lun=3").address(), None);
    }

    #[test]
    fn exports_that_contradict_each_other_are_conflicts() {
        let conflicts = |one: &str, other: &str, same: bool| spec(other).conflicts(&spec(one), same);
        let t = "target=iqn.2026-11.a:b";
        assert_eq!(conflicts("tcp:a", "tcp:b", true), [], "a second portal");
        assert_eq!(conflicts("tcp:a", "tcp:a", false), [], "a target for each device");
        assert_eq!(conflicts(&format!("tcp:a,{t}"), &format!("tcp:a,{t}"), false), [], "two LUNs");
        for (one, other, same, why) in [
            ("tcp:a".to_owned(), "tcp:a".to_owned(), true, "is at tcp:a:3260 already"),
            (format!("tcp:a,{t},lun=1"), format!("tcp:a,{t},lun=1"), false, "choose another lun"),
            (format!("tcp:a,{t},lun=1"), format!("tcp:b,{t},lun=2"), true, "is LUN 1"),
            (format!("tcp:a,{t},chap=x"), format!("tcp:a,{t},chap=y"), false, "another chap"),
            (format!("tcp:a,{t},digests=on"), format!("tcp:a,{t}"), false, "other digests"),
            ("tcp:a,serial=1".to_owned(), "tcp:b,serial=2".to_owned(), true, "another serial"),
            ("tcp:a,removable".to_owned(), "tcp:b".to_owned(), true, "another removable"),
            (
                "tcp:a,discovery-chap=1".to_owned(),
                "tcp:b,discovery-chap=2".to_owned(),
                false,
                "a process has one",
            ),
        ] {
            let found = conflicts(&one, &other, same);
            assert!(found.iter().any(|conflict| conflict.why.contains(why)), "{one} {other}: {found:?}");
        }
    }

    #[test]
    fn relative_files_are_resolved() {
        let rooted = spec("tcp::1,chap=c,discovery-chap=/d").rooted(Path::new("/srv"));
        let files: Vec<PathBuf> = rooted.files().into_iter().map(|file| file.path).collect();
        assert_eq!(files, [Path::new("/srv/c"), Path::new("/d")]);
    }
}
