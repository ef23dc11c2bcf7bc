//! The target `linear <device> <offset>`: maps its sectors to a contiguous range of a device.

use super::{
    Area, Devices, Names, RandomLine, Simulated, Status, Target, TargetError, TargetRange, TargetRow,
    parse_u64, stack,
};
use crate::{Layer, Window};
use block::{LimitsError, Profile, Sectors};
use queue::{Node, NodeId, Ring};
use std::sync::Arc;

pub(super) const ROW: TargetRow = TargetRow {
    name: "linear",
    version: [1, 5, 0],
    usage: "linear <device> <offset>",
    about: "maps to a part of a device",
    example: "0 1048576 linear disk.img 2048",
    singleton: false,
    immutable: false,
    simulated: Simulated::InStacks { random, fails: false },
};

fn random(below: &mut dyn FnMut(u64) -> u64, len: Sectors) -> RandomLine {
    RandomLine::over_one(len, "", below(65), len, "")
}

struct Linear {
    len: Sectors,
    start: Sectors,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [device, start] = args else { return Err(TargetError::new("Invalid argument count")) };
    let start = parse_u64(start).ok_or(TargetError::new("Invalid device sector"))?;
    devices.open(device).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
    Ok(Arc::new(Linear { len: place.len, start: Sectors(start) }))
}

impl<R: Ring> Layer<R> for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        stack(self.len, &[self.area()], below)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(Window::new(self.start.bytes(), below[0]))
    }
}

impl Linear {
    fn area(&self) -> Area {
        Area { device: 0, start: self.start, len: self.len }
    }
}

impl<R: Ring> Target<R> for Linear {
    fn areas(&self) -> Vec<Area> {
        vec![self.area()]
    }

    fn status(&self, what: Status, names: &Names) -> String {
        match what {
            Status::Info => String::new(),
            Status::Table => format!("{} {}", names.shown(0), self.start.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{build, error};
    use super::super::{Names, Status};

    #[test]
    fn table_status_repeats_the_line() {
        let target = build("linear", "disk 2048");
        let mut names = Names::default();
        names.push("disk", "8:0");
        assert_eq!(target.status(Status::Table, &names), "8:0 2048");
        assert_eq!(target.status(Status::Info, &names), "");
        assert_eq!(target.areas()[0].start.0, 2048);
    }

    #[test]
    fn bad_arguments_are_refused_with_the_kernels_text() {
        assert_eq!(error("linear", "disk"), "Invalid argument count");
        assert_eq!(error("linear", "disk 0 1"), "Invalid argument count");
        assert_eq!(error("linear", "disk x"), "Invalid device sector");
        assert_eq!(error("linear", "missing 0"), "Device lookup failed: missing: no such device");
    }
}
