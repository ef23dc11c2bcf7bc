//! `linear <device> <offset>`: part of a device, moved to another place.

use super::{Area, Devices, Kind, Names, Place, Status, Target, TargetError, long_number, stack};
use crate::{Layer, Window};
use block::{LimitsError, Profile, Sectors};
use queue::{Node, NodeId, Ring};
use std::sync::Arc;

pub(super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("linear", [1, 5, 0], make)
}

struct Linear {
    len: Sectors,
    start: Sectors,
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [device, start] = words else { return Err(TargetError::new("Invalid argument count")) };
    let start = long_number(start).ok_or(TargetError::new("Invalid device sector"))?;
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

    fn looks_at_data(&self) -> bool {
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
    use super::super::testing::{error, made};
    use super::super::{Names, Status};

    #[test]
    fn a_line_is_read_and_shown_again() {
        let target = made("linear", "disk 2048");
        let mut names = Names::default();
        names.push("disk", "8:0");
        assert_eq!(target.status(Status::Table, &names), "8:0 2048");
        assert_eq!(target.status(Status::Info, &names), "");
        assert_eq!(target.areas()[0].start.0, 2048);
    }

    #[test]
    fn what_is_wrong_is_said_in_the_kernels_words() {
        assert_eq!(error("linear", "disk"), "Invalid argument count");
        assert_eq!(error("linear", "disk 0 1"), "Invalid argument count");
        assert_eq!(error("linear", "disk x"), "Invalid device sector");
        assert_eq!(error("linear", "missing 0"), "Device lookup failed: missing: it is not there");
    }
}
