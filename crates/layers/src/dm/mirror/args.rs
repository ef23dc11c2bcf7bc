//! The arguments of a mirror's table line, with the kernel's rules (dm-raid1.c, dm-log.c).

use super::super::{TargetError, parse_u32};
use block::Sectors;

/// Largest number of legs: the kernel's `DM_KCOPYD_MAX_REGIONS` + 1.
pub(super) const LEGS_MAX: u32 = 9;
/// The smallest region in sectors: a page.
const REGION_MIN: u64 = 8;

/// The log type: in memory or on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LogKind {
    Core,
    Disk,
}

/// The arguments `<log type> <#args> <args>`, without the log device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LogArgs {
    pub(super) kind: LogKind,
    pub(super) region: Sectors,
    /// `sync` (true): copy everything; `nosync` (false): copy nothing. `None`: copy what the log says.
    pub(super) sync: Option<bool>,
}

impl LogArgs {
    /// Parses the log arguments. Returns them, the log device if any, and the number of arguments used.
    pub(super) fn read<'a>(
        args: &[&'a str],
        len: Sectors,
    ) -> Result<(LogArgs, Option<&'a str>, usize), TargetError> {
        let [kind, count, rest @ ..] = args else {
            return Err(TargetError::new("Insufficient mirror log arguments"));
        };
        let count = parse_u32(count).ok_or(TargetError::new("Invalid mirror log argument count"))? as usize;
        let args = rest.get(..count).ok_or(TargetError::new("Insufficient mirror log arguments"))?;
        let failed = || TargetError::new("Error creating mirror dirty log");
        let (kind, device, args) = match (*kind, args) {
            ("core", args) => (LogKind::Core, None, args),
            ("disk", [device, args @ ..]) => (LogKind::Disk, Some(*device), args),
            _ => return Err(failed()),
        };
        let (region, sync) = match args {
            [region] => (region, None),
            [region, "sync"] => (region, Some(true)),
            [region, "nosync"] => (region, Some(false)),
            _ => return Err(failed()),
        };
        let region = Sectors(parse_u32(region).ok_or_else(failed)?.into());
        if !region.0.is_power_of_two() || region.0 < REGION_MIN || region > len {
            return Err(failed());
        }
        Ok((LogArgs { kind, region, sync }, device, 2 + count))
    }

    /// Returns the arguments for the table status, with a trailing space. `device`: the log device.
    pub(super) fn shown(&self, device: Option<&str>) -> String {
        let sync = match self.sync {
            None => "",
            Some(true) => "sync ",
            Some(false) => "nosync ",
        };
        let more = usize::from(self.sync.is_some());
        match device {
            None => format!("core {} {} {sync}", 1 + more, self.region.0),
            Some(device) => format!("disk {} {device} {} {sync}", 2 + more, self.region.0),
        }
    }
}

/// Parses `[<#feature args> <feature>…]`. Returns whether `handle_errors` and `keep_log` are given.
pub(super) fn features(args: &[&str]) -> Result<[bool; 2], TargetError> {
    let mut features = [false; 2];
    let [count, rest @ ..] = args else { return Ok(features) };
    let count = parse_u32(count).ok_or(TargetError::new("Invalid number of features"))? as usize;
    if count > rest.len() {
        return Err(TargetError::new("Not enough arguments to support feature count"));
    }
    for word in &rest[..count] {
        match *word {
            "handle_errors" => features[0] = true,
            "keep_log" => features[1] = true,
            _ => return Err(TargetError::new("Unrecognised feature requested")),
        }
    }
    if features == [false, true] {
        return Err(TargetError::new("keep_log feature requires the handle_errors feature"));
    }
    if rest.len() > count {
        return Err(TargetError::new("Too many mirror arguments"));
    }
    Ok(features)
}
