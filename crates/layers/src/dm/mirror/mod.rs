//! `mirror <log type> <#args> <args> <devices> [<device> <offset>]+ [<#features> handle_errors keep_log]`: the same on several
//! devices.
//!
//! Reads go to the first device, and to another where it has what they ask for and the first has failed. Writes go to all, but
//! in regions that are not in sync to the first alone: those are copied by a [`chore`](super::chore), one after the other,
//! while requests go on elsewhere. The log says which regions are in sync: in memory (`core`), or on a device of its own
//! (`disk`), in the kernel's format.

mod node;
mod record;
#[cfg(test)]
mod restarts;
mod shared;
mod standing;
#[cfg(test)]
mod tests;
mod words;

use super::chore::{Chore, Disks};
use super::{Area, Devices, Kind, Names, Place, Status, Target, TargetError, long_number, number, stack};
use crate::Layer;
use block::{Fact, LimitsError, Profile, Sectors};
use node::MirrorNode;
use queue::{Node, NodeId, Ring};
use shared::Shared;
use standing::Leg;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use words::{LEGS_MAX, LogKind, LogWords, features};

pub(super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("mirror", [1, 14, 0], make)
}

/// What is kept of regions is in memory, a few bytes each.
const REGIONS_MAX: u64 = 1 << 26;

/// Children: the log's device, if there is one, then the legs.
struct Mirror {
    shared: Arc<Shared>,
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let (log, log_word, used) = LogWords::read(words, place.len)?;
    let failed = "Error creating mirror dirty log";
    let log_device = match log_word {
        Some(word) => Some(devices.open(word).map_err(|why| TargetError::lookup(failed, why))?),
        None => None,
    };
    let words = &words[used..];
    let count = words.first().and_then(|word| number(word)).filter(|count| (2..=LEGS_MAX).contains(count));
    let count = count.ok_or(TargetError::new("Invalid number of mirrors"))? as usize;
    let legs_words = words[1..].get(..2 * count).ok_or(TargetError::new("Too few mirror arguments"))?;
    let mut legs = Vec::new();
    for pair in legs_words.chunks(2) {
        let start = long_number(pair[1]).ok_or(TargetError::new("Invalid offset"))?;
        let device =
            devices.open(pair[0]).map_err(|why| TargetError::lookup("Device lookup failure", why))?;
        let size = devices.profile(device).size.sectors();
        if start.checked_add(place.len.0).is_none_or(|end| end > size.0) {
            let (name, len, size) = (pair[0], place.len.0, size.0);
            return Err(TargetError::of(format!(
                "{name} too small for target: start={start}, len={len}, dev_size={size}"
            )));
        }
        legs.push(Leg::new(device, Sectors(start), pair[0], devices.identity(device)));
    }
    let features = features(&words[1 + 2 * count..])?;
    if place.len.0.div_ceil(log.region.0) > REGIONS_MAX {
        return Err(TargetError::new(failed).with_errno(libc::ENOMEM));
    }
    let shared = Arc::new(Shared::new(legs, place.len, log, log_device.zip(log_word), features));
    if let Some(device) = log_device {
        let block = devices.profile(device).limits.logical_block_size.0.max(4096);
        let len = shared.log_len(block);
        if (len as u64) > devices.profile(device).size.0 || block > 4096 {
            return Err(TargetError::new(failed));
        }
    }
    Ok(Arc::new(Mirror { shared }))
}

impl Mirror {
    fn area(&self) -> Vec<Area> {
        let area = |leg: &Leg| Area { device: leg.device, start: leg.start, len: self.shared.len };
        self.shared.legs.iter().map(area).collect()
    }
}

impl<R: Ring> Layer<R> for Mirror {
    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut whole = stack(self.shared.len, &self.area(), below)?;
        // What is written is sent to several, so it stays what it was.
        (whole.lends, whole.bytewise, whole.sparse) = (false, false, false);
        Ok(whole)
    }

    fn spares(&self, depth: u16) -> u16 {
        // A write goes to all legs at once, and to the log before that.
        let most = self.shared.legs.len() as u16 + 1;
        most.saturating_mul(depth).clamp(most, 8192)
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    fn describe(&self) -> Vec<Fact> {
        let told = self.shared.told();
        if told.is_empty() { Vec::new() } else { vec![("mirror legs", told.join("; "))] }
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(MirrorNode::new(self.shared.clone(), below))
    }
}

impl<R: Ring> Target<R> for Mirror {
    fn areas(&self) -> Vec<Area> {
        self.area()
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(self.shared.log.region)
    }

    fn status(&self, what: Status, names: &Names) -> String {
        let shared = &self.shared;
        let log = shared.log_device.map(|device| names.shown(device));
        match what {
            Status::Info => {
                let legs: String =
                    shared.legs.iter().map(|leg| format!("{} ", names.shown(leg.device))).collect();
                let (synced, all) = shared.progress();
                let log = match log {
                    None => "1 core".to_owned(),
                    Some(name) => {
                        format!("3 disk {name} {}", if shared.has_log_failed() { 'D' } else { 'A' })
                    }
                };
                format!("{} {legs}{synced}/{all} 1 {} {log}", shared.legs.len(), shared.letters())
            }
            Status::Table => {
                debug_assert_eq!(shared.log.kind == LogKind::Disk, log.is_some());
                let leg = |leg: &Leg| format!(" {} {}", names.shown(leg.device), leg.start.0);
                let legs: String = shared.legs.iter().map(leg).collect();
                let features = match (shared.handles_errors, shared.keeps_log) {
                    (true, true) => " 2 handle_errors keep_log",
                    (true, false) => " 1 handle_errors",
                    _ => "",
                };
                format!("{}{}{legs}{features}", shared.log.shown(log), shared.legs.len())
            }
        }
    }

    fn events(&self) -> u32 {
        self.shared.events.load(Relaxed)
    }

    /// The table before this one may write the log until now.
    fn prepare(&self, disks: &mut dyn Disks) -> Result<(), TargetError> {
        match self.shared.log_device {
            Some(device) => self.shared.read_log(device, disks),
            None => Ok(()),
        }
    }

    fn notices(&self) -> Vec<String> {
        self.shared.notices()
    }

    fn presuspend(&self, noflush: bool) {
        self.shared.suspend(noflush);
    }

    fn resume(&self) {
        self.shared.resume();
    }

    fn chore(&self) -> Option<Arc<dyn Chore>> {
        Some(self.shared.clone())
    }
}
