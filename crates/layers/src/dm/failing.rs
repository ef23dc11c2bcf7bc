//! `error [<device> <offset>]`: every request fails. With a device it has that device's limits.

use super::{Area, Devices, Kind, Names, Place, Status, Target, TargetError, long_number, stack};
use crate::Layer;
use block::{Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

pub(super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("error", [1, 7, 0], make)
}

struct Failing {
    len: Sectors,
    /// Where on the device whose limits it has.
    start: Option<Sectors>,
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let start = match words {
        [] => None,
        [device, start] => {
            let start = long_number(start).ok_or(TargetError::new("Invalid device sector"))?;
            devices.open(device).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
            Some(Sectors(start))
        }
        _ => return Err(TargetError::new("Invalid argument count")),
    };
    Ok(Arc::new(Failing { len: place.len, start }))
}

impl Failing {
    fn area(&self) -> Vec<Area> {
        self.start.map(|start| Area { device: 0, start, len: self.len }).into_iter().collect()
    }
}

impl<R: Ring> Layer<R> for Failing {
    fn name(&self) -> &'static str {
        "error"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        stack(self.len, &self.area(), below)
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, _: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(FailingNode)
    }
}

impl<R: Ring> Target<R> for Failing {
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

struct FailingNode;

impl<R: Ring> Node<R> for FailingNode {
    fn submit(&mut self, _: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        // The kernel's asks for no flush, and a flush that nobody asks for goes well.
        Verdict::Up(if req.op == Op::Flush { block::Status::Ok } else { block::Status::IoError })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::error;

    #[test]
    fn it_takes_a_device_or_nothing() {
        assert_eq!(error("error", "disk"), "Invalid argument count");
        assert_eq!(error("error", "disk x"), "Invalid device sector");
    }
}
