//! The target `mirror <log type> <#args> <args> <devices> [<device> <offset>]+ [<#feature args> <feature>…]`:
//! the same data on several legs.
//!
//! Reads go to the primary leg, and to another leg with the region in sync if the primary has failed. Writes
//! go to all legs, but in regions that are out of sync to the primary only: [background
//! work](super::background) copies those, one at a time, while requests continue elsewhere. The dirty log
//! records the regions in sync: in memory (`core`), or on a device of its own (`disk`) in the kernel's
//! format.

mod args;
mod legs;
mod node;
mod record;
#[cfg(test)]
mod restart_tests;
mod shared;
#[cfg(test)]
mod tests;

use super::background::{BackgroundWork, Disks};
use super::{
    Area, Devices, Names, Simulated, Status, Target, TargetError, TargetRange, TargetRow, parse_u32,
    parse_u64, stack,
};
use crate::Layer;
use args::{LEGS_MAX, LogArgs, LogKind, features};
use block::{Fact, LimitsError, Profile, Sectors};
use legs::Leg;
use node::MirrorNode;
use queue::{Node, NodeId, Ring};
use shared::Shared;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub(super) const ROW: TargetRow = TargetRow {
    name: "mirror",
    version: [1, 14, 0],
    usage: concat!(
        "mirror core <#args> <region> [sync|nosync] <devices> [<device> <offset>]+ [<#feature args> <feature>…]\n",
        "mirror disk <#args> <log device> <region> [sync|nosync] <devices> [<device> <offset>]+ [<#feature args> <feature>…]",
    ),
    about: "the same data on several devices",
    example: "0 2097152 mirror core 1 1024 2 a.img 0 b.img 0",
    singleton: false,
    immutable: false,
    simulated: Simulated::Apart,
};

/// Largest number of regions, which take a few bytes of memory each.
const REGIONS_MAX: u64 = 1 << 26;

/// The shared part of a mirror. Children: the log device, if any, then the legs.
struct Mirror {
    shared: Arc<Shared>,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let (log, log_arg, used) = LogArgs::read(args, place.len)?;
    let failed = "Error creating mirror dirty log";
    let log_device = match log_arg {
        Some(word) => Some(devices.open(word).map_err(|why| TargetError::lookup(failed, why))?),
        None => None,
    };
    let args = &args[used..];
    let count = args.first().and_then(|word| parse_u32(word)).filter(|count| (2..=LEGS_MAX).contains(count));
    let count = count.ok_or(TargetError::new("Invalid number of mirrors"))? as usize;
    let leg_args = args[1..].get(..2 * count).ok_or(TargetError::new("Too few mirror arguments"))?;
    let mut legs = Vec::new();
    for pair in leg_args.chunks(2) {
        let start = parse_u64(pair[1]).ok_or(TargetError::new("Invalid offset"))?;
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
    let features = features(&args[1 + 2 * count..])?;
    if place.len.0.div_ceil(log.region.0) > REGIONS_MAX {
        return Err(TargetError::new(failed).with_errno(libc::ENOMEM));
    }
    let shared = Arc::new(Shared::new(legs, place.len, log, log_device.zip(log_arg), features));
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
        // Several legs write from the same buffer, so it must not change meanwhile.
        (whole.zero_copy_reads, whole.bytewise, whole.sparse) = (false, false, false);
        Ok(whole)
    }

    fn child_requests(&self, depth: u16) -> u16 {
        // A write goes to all legs at once, after a write to the log.
        let most = self.shared.legs.len() as u16 + 1;
        most.saturating_mul(depth).clamp(most, 8192)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn describe(&self) -> Vec<Fact> {
        let legs = self.shared.describe_legs();
        if legs.is_empty() { Vec::new() } else { vec![("mirror legs", legs.join("; "))] }
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

    /// Reads the log only now, because the previous table may have written it until now.
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

    fn background_work(&self) -> Option<Arc<dyn BackgroundWork>> {
        Some(self.shared.clone())
    }
}
