//! The topology that this process serves: the description of each device and export, stored when it was added and
//! updated with later changes.

use crate::exporter::Exported;
use engine::apply::{
    DeviceText, Opened, Running, RunningDevice, RunningExport, TopologyText, without_secrets,
};
use engine::device::Device;
use engine::host::{Export, Host};
use engine::topology::{DeviceSpec, ExportKind, ExportSpec, Topology};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device's description and exports.
struct Described {
    opened: Opened,
    exports: Vec<DescribedExport>,
}

/// An export's description and the open exports; the default export can open several.
struct DescribedExport {
    kind: ExportKind,
    exports: Vec<Arc<dyn Export>>,
    is_on_given_socket: bool,
}

/// The descriptions of all devices of this process.
pub(crate) struct Registry {
    /// Ring, poll, queues and NBD limits of the process; no devices and exports.
    settings: Topology,
    /// The topology file of `up`: an absolute path.
    file: Option<PathBuf>,
    has_page: bool,
    /// Keyed by the device's number, which renaming does not change.
    devices: Mutex<HashMap<usize, Described>>,
}

impl Registry {
    /// Creates the registry of a process without devices. `file`: the topology file of `up`.
    pub(crate) fn new(topology: &Topology, file: Option<PathBuf>, has_page: bool) -> Registry {
        let settings = Topology { devices: Vec::new(), exports: Vec::new(), ..topology.clone() };
        Registry { settings, file, has_page, devices: Mutex::default() }
    }

    /// Returns the topology file of `up`.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Described>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the description of a device that was just opened.
    pub(crate) fn add(&self, spec: &DeviceSpec, device: &Device) {
        let described = Described { opened: Opened::new(spec, device), exports: Vec::new() };
        let mut devices = self.lock();
        devices.insert(device.number(), described);
    }

    /// Replaces the descriptions of all devices, which match `topology`.
    pub(crate) fn describe(&self, host: &Host, topology: &Topology) {
        for device in host.devices() {
            let spec = topology.devices.iter().find(|spec| spec.name == device.name());
            if let (Some(spec), Some(described)) = (spec, self.lock().get_mut(&device.number())) {
                described.opened = Opened::new(spec, &device);
            }
        }
    }

    /// Stores the description of an export that was just added.
    pub(crate) fn add_export(&self, device: &Device, kind: &ExportKind, exported: &[Exported]) {
        let export = DescribedExport {
            kind: kind.clone(),
            exports: exported.iter().map(|one| one.export.clone()).collect(),
            is_on_given_socket: exported.iter().any(|one| one.is_on_given_socket),
        };
        if let Some(described) = self.lock().get_mut(&device.number()) {
            described.exports.push(export);
        }
    }

    /// Returns the open exports of a device with the description `kind`.
    pub(crate) fn exports(&self, device: &Device, kind: &ExportKind) -> Vec<Arc<dyn Export>> {
        let devices = self.lock();
        let described = devices.get(&device.number()).into_iter().flat_map(|described| &described.exports);
        described.filter(|export| export.kind == *kind).flat_map(|export| export.exports.clone()).collect()
    }

    /// Forgets an export that was removed.
    pub(crate) fn forget_export(&self, device: &Device, kind: &ExportKind) {
        if let Some(described) = self.lock().get_mut(&device.number()) {
            described.exports.retain(|export| export.kind != *kind);
        }
    }

    /// Forgets devices that the host does not have any more.
    pub(crate) fn forget_removed(&self, host: &Host) {
        let numbers: Vec<usize> = host.devices().iter().map(|device| device.number()).collect();
        self.lock().retain(|number, _| numbers.contains(number));
    }

    /// Returns the running state for planning.
    pub(crate) fn running(&self, host: &Host) -> Running {
        let mut below = host.devices_below();
        let described = self.lock();
        let mut device = |device: &Arc<Device>| {
            let described = described.get(&device.number())?;
            let export = |export: &DescribedExport| {
                let infos: Vec<_> = export.exports.iter().map(|one| one.info(device)).collect();
                // The mount of a FUSE file, and the loop driver, count as connections but do not use the device.
                let used = export.exports.iter().filter(|one| one.is_used(device));
                RunningExport {
                    kind: export.kind.clone(),
                    address: infos.iter().map(|info| info.address.as_str()).collect::<Vec<_>>().join(" "),
                    clients: used.map(|one| one.info(device).connections.max(1)).max().unwrap_or_default(),
                }
            };
            Some(RunningDevice {
                spec: described.opened.now(device),
                exports: described.exports.iter().map(export).collect(),
                size: device.size(),
                in_use: in_use(host, device),
                below: below.remove(&device.number()).unwrap_or_default(),
            })
        };
        let devices = host.devices().iter().filter_map(&mut device).collect();
        Running { settings: self.settings.clone(), devices }
    }

    /// Returns the served devices as text of a topology.
    pub(crate) fn text(&self, host: &Host) -> TopologyText {
        let described = self.lock();
        let mut topology = Topology::default();
        let mut left_out: HashMap<String, Vec<String>> = HashMap::new();
        for device in host.devices() {
            let Some(described) = described.get(&device.number()) else { continue };
            let mut saved = described.opened.saved(&device);
            for export in &described.exports {
                if export.is_on_given_socket {
                    let why = "the socket that the service manager opened for it (name an address: nbd = …)";
                    saved.left_out.push(why.to_owned());
                }
                let (device, kind) = (saved.spec.name.clone(), export.kind.clone());
                topology.exports.push(ExportSpec { device, kind, line: 0 });
            }
            left_out.insert(saved.spec.name.to_string(), saved.left_out);
            topology.devices.push(saved.spec);
        }
        let devices = topology.in_order().into_iter().map(|spec| {
            let exports = topology.exports.iter().filter(|export| export.device == spec.name);
            let exports: Vec<ExportKind> = exports.map(|export| export.kind.clone()).collect();
            DeviceText {
                name: spec.name.to_string(),
                text: if has_no_table(spec) { String::new() } else { spec.text(&exports) },
                left_out: left_out.remove(spec.name.as_str()).unwrap_or_default(),
                has_secrets: !without_secrets(spec, &exports),
            }
        });
        let page = "its page (start it with: blockyard up FILE --web ADDRESS)".to_owned();
        TopologyText {
            pid: std::process::id(),
            file: self.file.clone(),
            settings: self.settings.settings_text(),
            left_out: self.has_page.then_some(page).into_iter().collect(),
            devices: devices.collect(),
        }
    }
}

/// Whether a device was created without a table (`dmsetup create --notable`) and none was loaded since.
fn has_no_table(spec: &DeviceSpec) -> bool {
    matches!(&spec.stack, engine::spec::StackSpec::Table(table) if table.lines.is_empty())
}

/// Describes the use of a device by its exports' clients ("2 clients use it"); `None` if it is unused.
fn in_use(host: &Host, device: &Arc<Device>) -> Option<String> {
    if !host.is_used(device) {
        return None;
    }
    let exports = host.exports(device);
    let clients = exports.iter().map(|export| export.connections).max().unwrap_or_default();
    Some(if clients > 1 { format!("{clients} clients use it") } else { "a client uses it".to_owned() })
}
