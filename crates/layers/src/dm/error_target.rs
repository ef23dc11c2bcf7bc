//! The target `error [<device> <offset>]`: every request fails. With a device it has the queue limits of that
//! device.

use super::{
    Area, Devices, Names, Simulated, Status, Target, TargetError, TargetRange, TargetRow, parse_u64, stack,
};
use crate::Layer;
use block::{Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

pub(super) const ROW: TargetRow = TargetRow {
    name: "error",
    version: [1, 7, 0],
    usage: "error [<device> <offset>]",
    about: "every request fails",
    example: "0 2097152 error",
    singleton: false,
    immutable: false,
    simulated: Simulated::KeepsNothing,
};

struct ErrorTarget {
    len: Sectors,
    /// The offset on the device whose limits the target has; `None`: no device was given.
    start: Option<Sectors>,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let start = match args {
        [] => None,
        [device, start] => {
            let start = parse_u64(start).ok_or(TargetError::new("Invalid device sector"))?;
            devices.open(device).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
            Some(Sectors(start))
        }
        _ => return Err(TargetError::new("Invalid argument count")),
    };
    Ok(Arc::new(ErrorTarget { len: place.len, start }))
}

impl ErrorTarget {
    fn area(&self) -> Vec<Area> {
        self.start.map(|start| Area { device: 0, start, len: self.len }).into_iter().collect()
    }
}

impl<R: Ring> Layer<R> for ErrorTarget {
    fn name(&self) -> &'static str {
        "error"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        stack(self.len, &self.area(), below)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, _: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(ErrorNode)
    }
}

impl<R: Ring> Target<R> for ErrorTarget {
    fn areas(&self) -> Vec<Area> {
        self.area()
    }

    fn status(&self, what: Status, names: &Names) -> String {
        match (what, self.start) {
            (Status::Table, Some(start)) => format!("{} {}", names.shown(0), start.0),
            _ => String::new(),
        }
    }
}

struct ErrorNode;

impl<R: Ring> Node<R> for ErrorNode {
    fn submit(&mut self, _: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        // The kernel's target receives no flush requests (`num_flush_bios` is 0), so a flush of its table
        // succeeds.
        Verdict::Up(if req.op == Op::Flush { block::Status::Ok } else { block::Status::IoError })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::error;

    #[test]
    fn a_device_without_a_valid_offset_is_refused() {
        assert_eq!(error("error", "disk"), "Invalid argument count");
        assert_eq!(error("error", "disk x"), "Invalid device sector");
    }
}
