//! The words of a mirror's line, in the kernel's grammar (dm-raid1.c, dm-log.c).

use super::super::{TargetError, number};
use block::Sectors;

/// `DM_KCOPYD_MAX_REGIONS` and one.
pub(super) const LEGS_MAX: u32 = 9;
/// A region is a page at least.
const REGION_MIN: u64 = 8;

/// Where a dirty region log is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LogKind {
    Core,
    Disk,
}

/// `<log type> <#args> <args>`, without its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LogWords {
    pub(super) kind: LogKind,
    pub(super) region: Sectors,
    /// `sync`: all is to be copied; `nosync`: nothing is. Not said: what the log knows.
    pub(super) sync: Option<bool>,
}

impl LogWords {
    /// Reads the log's words. Its device, if it has one, and how many words there were.
    pub(super) fn read<'a>(
        words: &[&'a str],
        len: Sectors,
    ) -> Result<(LogWords, Option<&'a str>, usize), TargetError> {
        let [kind, count, rest @ ..] = words else {
            return Err(TargetError::new("Insufficient mirror log arguments"));
        };
        let count = number(count).ok_or(TargetError::new("Invalid mirror log argument count"))? as usize;
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
        let region = Sectors(number(region).ok_or_else(failed)?.into());
        if !region.0.is_power_of_two() || region.0 < REGION_MIN || region > len {
            return Err(failed());
        }
        Ok((LogWords { kind, region, sync }, device, 2 + count))
    }

    /// As the table shows it, with a space at its end. `device`: of the log.
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

/// `[<#features> <feature>…]`: handle_errors, keep_log.
pub(super) fn features(words: &[&str]) -> Result<[bool; 2], TargetError> {
    let mut features = [false; 2];
    let [count, rest @ ..] = words else { return Ok(features) };
    let count = number(count).ok_or(TargetError::new("Invalid number of features"))? as usize;
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
