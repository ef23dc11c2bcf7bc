//! Finds devices and exports of a topology that contradict each other.

use super::{DeviceSpec, ExportSpec, Problem, Topology};
use crate::{LayerSpec, StackSpec, misplaced};

impl Topology {
    /// Returns the exports and devices that contradict each other.
    pub fn conflicts(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut accepted: Vec<&ExportSpec> = Vec::new();
        for export in &self.exports {
            if !self.devices.iter().any(|device| device.name == export.device) {
                let names = self.devices.iter().map(|device| device.name.as_str());
                let near = options::did_you_mean(export.device.as_str(), names);
                let why = format!("there is no device \"{}\" ({near}write [device.{0}])", export.device);
                problems.push(Problem::new(export.line, "export.device", why));
            }
            let conflict = accepted.iter().find_map(|earlier| {
                let conflicts = export.kind.conflicts(&earlier.kind, earlier.device == export.device);
                Some(conflicts).filter(|conflicts| !conflicts.is_empty())
            });
            match conflict {
                None => accepted.push(export),
                Some(conflicts) => problems.extend(conflicts.into_iter().map(|conflict| {
                    Problem::new(export.line, format!("export.{}", conflict.key), conflict.why)
                })),
            }
        }
        for device in &self.devices {
            if let Some(why) = misplaced(&device.layers) {
                problems.push(Problem::new(device.line, format!("device.{}.layers", device.name), why));
            }
        }
        problems.extend(self.unscanned());
        problems.extend(self.unfollowed());
        problems.extend(self.refused_stacks());
        problems.extend(self.circles());
        problems
    }

    /// Returns the exports that are not possible with the stack of their device.
    fn refused_stacks(&self) -> Vec<Problem> {
        let problem = |export: &ExportSpec| {
            let device = self.devices.iter().find(|device| device.name == export.device)?;
            let (why, row) = (export.kind.refuses(&device.stack)?, export.kind.row()?);
            Some(Problem::new(export.line, format!("export.{}", row.kind), why))
        };
        self.exports.iter().filter_map(problem).collect()
    }

    /// Returns the devices with `partscan` whose exports create no kernel block device.
    fn unscanned(&self) -> Vec<Problem> {
        let is_kernel = |export: &ExportSpec| export.kind.row().is_some_and(|row| row.is_kernel_device);
        let wants = |device: &&DeviceSpec| matches!(&device.stack, StackSpec::File(file) if file.partscan);
        let of = |device: &DeviceSpec| {
            let mut exports = self.exports.iter().filter(|export| export.device == device.name);
            exports.any(is_kernel)
        };
        let lost = self.devices.iter().filter(wants).filter(|device| !of(device));
        lost.map(|device| {
            let why =
                "partscan needs a kernel block device (add --loop, --ublk or --nbd-device, or leave it out)";
            Problem::new(device.line, format!("device.{}.stack", device.name), why.to_owned())
        })
        .collect()
    }

    /// Returns the devices with `autosize` whose size is determined by an overlay.
    fn unfollowed(&self) -> Vec<Problem> {
        let wants = |device: &&DeviceSpec| matches!(&device.stack, StackSpec::File(file) if file.autosize);
        let lost = self.devices.iter().filter(wants).filter(|device| device.is_overlaid());
        lost.map(|device| {
            let why = "an overlay keeps the size it was made with (leave autosize out)".to_owned();
            Problem::new(device.line, format!("device.{}.stack", device.name), why)
        })
        .collect()
    }
}

impl DeviceSpec {
    /// Returns whether one of the layers is an overlay.
    pub fn is_overlaid(&self) -> bool {
        self.layers.iter().any(|layer| matches!(layer, LayerSpec::Cow(_)))
    }
}
