//! The running state: the current devices of a process as a topology.
//!
//! [`Opened`] stores a device's description and its state right after opening. Differences from that state
//! were made by online changes. Everything else is as described, even if opening resolved it (a probed
//! format).

use crate::device::Device;
use crate::spec::{Bytes, DeviceName, LayerSpec, NbdSpec, StackSpec};
use crate::topology::{DeviceSpec, ExportKind, Topology};

/// The running state of a server process.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Running {
    /// Ring, poll, queues and NBD limits of the process; no devices and exports.
    pub settings: Topology,
    /// The devices of the process.
    pub devices: Vec<RunningDevice>,
}

/// A device of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunningDevice {
    /// The current description.
    pub spec: DeviceSpec,
    /// The exports of the device.
    pub exports: Vec<RunningExport>,
    /// The current size.
    pub size: Bytes,
    /// Describes the use by clients of its exports ("2 clients use it"); `None` if unused.
    pub in_use: Option<String>,
    /// The devices of the process directly below it.
    pub below: Vec<DeviceName>,
}

/// An export of a running device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunningExport {
    /// The export's description.
    pub kind: ExportKind,
    /// The export's address: a URI or a path.
    pub address: String,
    /// Number of clients.
    pub clients: u64,
}

/// A device's description, and its state right after opening.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Opened {
    spec: DeviceSpec,
    stack: StackSpec,
    layers: Vec<LayerSpec>,
}

/// A device's description for a topology file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedDevice {
    /// The description, with online changes.
    pub spec: DeviceSpec,
    /// Properties that a topology cannot express, each with what to do.
    pub left_out: Vec<String>,
}

impl Opened {
    /// Stores the description and the state of a device that was just opened.
    pub fn new(spec: &DeviceSpec, device: &Device) -> Opened {
        Opened {
            spec: DeviceSpec { line: 0, ..spec.clone() },
            stack: device.stack(),
            layers: device.layers(),
        }
    }

    /// Returns the current description, as far as another description could be applied to the device.
    pub fn now(&self, device: &Device) -> DeviceSpec {
        let mut spec = self.spec.clone();
        spec.name = device.name();
        match (&mut spec.stack, device.stack(), &self.stack) {
            (StackSpec::File(spec), StackSpec::File(now), StackSpec::File(then)) => {
                if now.file.path != then.file.path {
                    spec.file.path = now.file.path;
                }
                if now.file.direct != then.file.direct {
                    spec.file.direct = now.file.direct;
                }
            }
            (spec @ StackSpec::Table(_), now @ StackSpec::Table(_), then) if now != *then => *spec = now,
            _ => {}
        }
        let layers = self.with_described_overlays(device.layers());
        if layers != self.with_described_overlays(self.layers.clone()) {
            // Limits are a split layer above the others.
            (spec.layers, spec.limits) = (layers, None);
        }
        (spec.slow, spec.io_timeout) = (device.slow.limit(), device.timeouts.limit());
        spec
    }

    /// Gives overlays their described direct I/O mode, which follows the device's file at run time.
    fn with_described_overlays(&self, mut layers: Vec<LayerSpec>) -> Vec<LayerSpec> {
        for (layer, described) in layers.iter_mut().zip(&self.spec.layers) {
            if let (LayerSpec::Cow(now), LayerSpec::Cow(described)) = (layer, described) {
                now.direct = described.direct;
            }
        }
        layers
    }

    /// Returns the current description for a topology file.
    pub fn saved(&self, device: &Device) -> SavedDevice {
        let mut left_out = Vec::new();
        let mut spec = self.now(device);
        if let (StackSpec::File(spec), StackSpec::File(now), StackSpec::File(then)) =
            (&mut spec.stack, device.stack(), &self.stack)
            && now.file.sizelimit != then.file.sizelimit
        {
            spec.file.sizelimit = now.file.sizelimit;
        }
        if let StackSpec::Table(table) = &spec.stack {
            if table.lines.is_empty() {
                left_out.push("it has no table yet (load one, and save again)".to_owned());
            }
            if !table.uuid.is_empty() {
                left_out.push(format!("its UUID {} (dmsetup rename --setuuid sets it)", table.uuid));
            }
            if table.read_only {
                left_out.push(
                    "its read-only state: the saved device can be written (give its files ro)".to_owned(),
                );
            }
        }
        if device.is_suspended() {
            left_out.push("its suspension (blockyard suspend)".to_owned());
        }
        SavedDevice { spec, left_out }
    }
}

/// Whether the text of a device contains no path of private keys.
pub fn without_secrets(spec: &DeviceSpec, exports: &[ExportKind]) -> bool {
    let has_key = |nbd: &NbdSpec| nbd.uri.params.iter().any(|(name, _)| name.starts_with("tls-"));
    let of_stack = |stack: &StackSpec| matches!(stack, StackSpec::Nbd(nbd) if has_key(nbd));
    let of_table = match &spec.stack {
        StackSpec::Table(table) => {
            table.arguments().any(|word| word.parse().is_ok_and(|stack| of_stack(&stack)))
        }
        _ => false,
    };
    let of_exports = exports.iter().any(|kind| {
        let options = match kind {
            ExportKind::Default(options) => Some(options),
            ExportKind::Nbd(spec) => Some(&spec.options),
            _ => None,
        };
        options.is_some_and(|options| options.tls.certificates.is_some())
    });
    !(of_stack(&spec.stack) || of_table || of_exports)
}
