//! Prevents cycles of devices, each using the next: requests would circulate for ever, and walks down would
//! not end.
//!
//! A device uses another if an argument of its table names it, if one of its files is, or lies on, an export
//! of the other (a FUSE file, a kernel block device, a file system on one), or if it is a client of the
//! other's NBD export. Dependencies through another process, or through another name of the same NBD server,
//! are not seen.
//!
//! A table is checked when it is loaded, against what every device is about to be, and again when it is
//! activated, against what they are then. One lock orders the checks of all devices: of two tables that would
//! use each other the second one is refused, also if both are resumed at the same time.
//!
//! *Invariant:* walks are loops over a list of visited devices, not recursion.

use crate::change::{ChangeError, blocking};
use crate::device::Device;
use crate::device::dependencies::Dependencies;
use crate::host::{Host, HostError};
use crate::spec::DeviceName;
use crate::stacking;
use proto::nbd::Uri;
use proto::nbd::uri::Server;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, PoisonError};

/// Which tables of the devices on the way are considered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TableSet {
    /// The tables that will be active once every inactive table was resumed.
    Planned,
    /// The active tables, and those that are being activated.
    InUse,
}

/// Addresses of the exports of a process's devices.
struct ExportAddresses(Vec<(Arc<Device>, Vec<String>)>);

impl ExportAddresses {
    fn at(&self, node: &Path) -> Option<usize> {
        self.0.iter().position(|(_, addresses)| addresses.iter().any(|address| Path::new(address) == node))
    }

    fn serves(&self, uri: &str) -> Option<usize> {
        let wanted: Uri = uri.parse().ok()?;
        let is_it = |address: &String| {
            let Ok(served) = address.parse::<Uri>() else { return false };
            served.export == wanted.export && is_same_server(&served.server, &wanted.server)
        };
        self.0.iter().position(|(_, addresses)| addresses.iter().any(is_it))
    }

    /// Lists the devices that something uses directly, each with the files or URIs in between.
    fn below(&self, dependencies: &Dependencies) -> Vec<(Vec<String>, Arc<Device>)> {
        let mut below: Vec<_> =
            dependencies.devices.iter().map(|device| (Vec::new(), device.clone())).collect();
        for path in &dependencies.files {
            let found = stacking::devices_below_file(path, &|node| self.at(node));
            below.extend(found.into_iter().map(|(number, between)| (between, self.0[number].0.clone())));
        }
        for uri in &dependencies.servers {
            let found = self.serves(uri);
            below.extend(found.map(|number| (vec![uri.clone()], self.0[number].0.clone())));
        }
        below
    }
}

fn is_same_server(one: &Server, other: &Server) -> bool {
    match (one, other) {
        (Server::Unix(one), Server::Unix(other)) => {
            one == other
                || fs::canonicalize(one).ok().is_some_and(|one| fs::canonicalize(other).ok() == Some(one))
        }
        (Server::Tcp { port: one, .. }, Server::Tcp { host, port: other }) => {
            // If a process listens on all addresses, any local one leads there.
            let is_local =
                host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
            one == other && is_local
        }
        _ => false,
    }
}

/// Returns the dependencies of a device.
fn dependencies_of(device: &Device, which: TableSet) -> Vec<Arc<Dependencies>> {
    let (inactive, pending) = {
        let slot = device.slot.lock().unwrap_or_else(PoisonError::into_inner);
        (slot.inactive.clone(), slot.pending.clone())
    };
    let next = inactive.filter(|_| which == TableSet::Planned).unwrap_or_else(|| device.composition());
    [Some(Arc::new(next.tree.dependencies())), pending].into_iter().flatten().collect()
}

/// Returns the path from a device's dependencies down to the device itself, which is at both ends; `None`:
/// there is none.
fn find_cycle(
    device: &Arc<Device>,
    dependencies: Arc<Dependencies>,
    addresses: &ExportAddresses,
    which: TableSet,
) -> Option<Vec<String>> {
    let mut seen: Vec<Arc<Device>> = Vec::new();
    let mut left = vec![(dependencies, vec![device.name().to_string()])];
    while let Some((dependencies, trail)) = left.pop() {
        for (between, lower) in addresses.below(&dependencies) {
            let mut trail = trail.clone();
            trail.extend(between);
            trail.push(lower.name().to_string());
            if Arc::ptr_eq(&lower, device) {
                return Some(trail);
            }
            if !seen.iter().any(|known| Arc::ptr_eq(known, &lower)) {
                left.extend(
                    dependencies_of(&lower, which)
                        .into_iter()
                        .map(|dependencies| (dependencies, trail.clone())),
                );
                seen.push(lower);
            }
        }
    }
    None
}

impl Host {
    /// Returns, by device number, the names of the devices directly below each device of this process:
    /// devices that its table names, devices whose exports its files are, and devices of whose NBD exports it
    /// is a client.
    pub fn devices_below(&self) -> HashMap<usize, Vec<DeviceName>> {
        let addresses = self.export_addresses();
        let below = |device: &Arc<Device>| {
            let found = dependencies_of(device, TableSet::InUse)
                .into_iter()
                .flat_map(|footing| addresses.below(&footing));
            let mut names: Vec<DeviceName> = found
                .filter(|(_, lower)| !Arc::ptr_eq(lower, device))
                .map(|(_, lower)| lower.name())
                .collect();
            names.sort();
            names.dedup();
            names
        };
        addresses.0.iter().map(|(device, _)| (device.number(), below(device))).collect()
    }

    /// Returns the addresses of the exports of each device.
    fn export_addresses(&self) -> ExportAddresses {
        let addresses_of = |device: &Arc<Device>| {
            self.exports(device).into_iter().map(|export| export.address).collect::<Vec<_>>()
        };
        ExportAddresses(
            self.devices().into_iter().map(|device| (device.clone(), addresses_of(&device))).collect(),
        )
    }

    /// Checks that a device with these dependencies does not use itself. The caller holds
    /// [`stacking`](Host::stacking) until other checks see the dependencies.
    ///
    /// # Errors
    /// [`ChangeError::Cycle`], with the cycle.
    pub(crate) async fn check_stacking(
        &self,
        device: &Arc<Device>,
        dependencies: Arc<Dependencies>,
        which: TableSet,
    ) -> Result<(), HostError> {
        let addresses = self.export_addresses();
        let device = device.clone();
        // Resolving paths may wait for a disk.
        match blocking(move || Ok(find_cycle(&device, dependencies, &addresses, which))).await? {
            None => Ok(()),
            Some(cycle) => Err(ChangeError::Cycle(cycle.join(" → ")).into()),
        }
    }

    /// Reserves dependencies that a device is about to get: other checks include them until the guard is
    /// dropped.
    ///
    /// # Errors
    /// [`ChangeError::Cycle`].
    pub(crate) async fn reserve_dependencies(
        &self,
        device: &Arc<Device>,
        dependencies: Dependencies,
    ) -> Result<PendingDependencies, HostError> {
        let _one_at_a_time = self.stacking.lock().await;
        let dependencies = Arc::new(dependencies);
        self.check_stacking(device, dependencies.clone(), TableSet::InUse).await?;
        device.slot.lock().unwrap_or_else(PoisonError::into_inner).pending = Some(dependencies);
        Ok(PendingDependencies(device.clone()))
    }
}

/// Dependencies that a device is about to get, until this is dropped.
pub(crate) struct PendingDependencies(Arc<Device>);

impl Drop for PendingDependencies {
    fn drop(&mut self) {
        self.0.slot.lock().unwrap_or_else(PoisonError::into_inner).pending = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::dependencies::lower_devices;
    use crate::device::tree::{self, OpenContext, SourcePool};
    use crate::device::{Composition, DeviceConfig};
    use crate::spec::{DeviceName, TableSpec};

    fn device(name: &str) -> Arc<Device> {
        let config = DeviceConfig {
            name: name.parse::<DeviceName>().unwrap(),
            stack: "zero:1M".parse().unwrap(),
            layers: Vec::new(),
            limits: String::new(),
            depth: 4,
            slow: None,
            io_timeout: None,
        };
        let context = OpenContext { pool: &SourcePool::default(), device: &|_| None, name: None };
        Arc::new(Device::open(&config, 0, &context).unwrap())
    }

    fn over(lower: &Arc<Device>) -> Arc<Composition> {
        let find = |name: &str| (name == lower.name().as_str()).then(|| lower.clone());
        let context = OpenContext { pool: &SourcePool::default(), device: &find, name: None };
        let table = format!("0 8 linear {} 0", lower.name()).parse::<TableSpec>().unwrap();
        Arc::new(tree::open_table(&table, &[], "", &context).unwrap())
    }

    fn named(device: &Arc<Device>, composition: &Composition, which: TableSet) -> Option<String> {
        find_cycle(device, Arc::new(composition.tree.dependencies()), &ExportAddresses(Vec::new()), which)
            .map(|cycle| cycle.join(" → "))
    }

    #[test]
    fn loaded_and_pending_tables_are_considered() {
        let (a, b) = (device("a"), device("b"));
        let (over_a, over_b) = (over(&a), over(&b));
        assert_eq!(named(&b, &over_a, TableSet::Planned), None);
        assert_eq!(named(&b, &over(&b), TableSet::InUse).as_deref(), Some("b → b"));
        a.slot.lock().unwrap().inactive = Some(over_b.clone());
        assert_eq!(named(&b, &over_a, TableSet::Planned).as_deref(), Some("b → a → b"));
        assert_eq!(named(&b, &over_a, TableSet::InUse), None, "a loaded table may never be resumed");
        a.slot.lock().unwrap().inactive = None;
        a.slot.lock().unwrap().pending = Some(Arc::new(over_b.tree.dependencies()));
        assert_eq!(named(&b, &over_a, TableSet::InUse).as_deref(), Some("b → a → b"), "two resumes at once");
        a.slot.lock().unwrap().pending = None;
        a.set_composition(over_b);
        assert_eq!(named(&b, &over_a, TableSet::InUse).as_deref(), Some("b → a → b"));
        // The table that is to replace the active one may be loaded already.
        a.slot.lock().unwrap().inactive = Some(over(&device("c")));
        assert_eq!(named(&b, &over_a, TableSet::Planned), None);
    }

    #[test]
    fn a_walk_ends_in_a_cycle_of_devices() {
        let (a, b, c) = (device("a"), device("b"), device("c"));
        let (over_a, over_b) = (over(&a), over(&b));
        a.set_composition(over_b);
        b.set_composition(over_a.clone());
        assert_eq!(lower_devices(&over_a.tree).len(), 2);
        assert!(!over_a.tree.depends_on(&c) && over_a.tree.depends_on(&a));
        assert!(!a.is_io_suspended() && a.survives());
        b.set_suspended(true);
        assert!(a.is_io_suspended());
        assert_eq!(named(&c, &over_a, TableSet::InUse), None);
        // Breaks the reference cycle, which would leak both devices.
        a.set_composition(over(&c));
    }

    #[test]
    fn several_names_of_one_server_are_the_same() {
        let uri = |text: &str| text.parse::<Uri>().unwrap().server;
        assert!(is_same_server(&uri("nbd://0.0.0.0:7/x"), &uri("nbd://localhost:7/x")));
        assert!(is_same_server(&uri("nbd://127.0.0.1:7/x"), &uri("nbd://[::1]:7/x")));
        assert!(!is_same_server(&uri("nbd://127.0.0.1:7/x"), &uri("nbd://127.0.0.1:8/x")));
        assert!(!is_same_server(&uri("nbd://127.0.0.1:7/x"), &uri("nbd://elsewhere:7/x")));
        let folder = tempfile::tempdir().unwrap();
        let (socket, link) = (folder.path().join("s"), folder.path().join("l"));
        fs::write(&socket, "").unwrap();
        std::os::unix::fs::symlink("s", &link).unwrap();
        assert!(is_same_server(&Server::Unix(socket.clone()), &Server::Unix(link)));
        assert!(!is_same_server(&Server::Unix(socket), &Server::Unix(folder.path().join("other"))));
    }
}
