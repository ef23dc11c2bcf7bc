//! Which devices of a process stand on which, and that none comes to stand on itself: requests would go round for ever,
//! and whatever follows the devices downwards would never end.
//!
//! A device stands on another when a word of its table names it, when one of its files is, or lies on, what the other is
//! shown as (a FUSE file, a kernel block device, a file system on one), or when it is a client of the other's NBD export.
//! What is only reached through another process, or through another name of the same NBD server, is not seen.
//!
//! A table is checked when it is loaded, against what every device is to be next, and again when it is put to use,
//! against what they are then. One lock orders the checks of all devices: of two tables that would stand on each other
//! the second one is refused, also when both are resumed at the same time.
//!
//! *Invariant:* walks are loops over a list of devices that were seen, not recursion.

use crate::change::{ChangeError, off_the_runtime};
use crate::cycle;
use crate::device::Device;
use crate::host::{Host, HostError};
use crate::tree::Tree;
use proto::nbd::Uri;
use proto::nbd::uri::Server;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

/// What a tree stands on that may be another device of this process.
#[derive(Default)]
pub(crate) struct Footing {
    /// Devices that it names.
    pub(crate) devices: Vec<Arc<Device>>,
    /// Its files, those of its layers included.
    pub(crate) files: Vec<PathBuf>,
    /// URIs of NBD servers that it is a client of.
    pub(crate) servers: Vec<String>,
}

/// Which tables of the devices on the way count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    /// Those that will be in use when every table that is loaded has been resumed.
    Planned,
    /// Those in use, and those that are being put to use.
    InUse,
}

/// Where the devices of a process can be reached by others.
struct Shown(Vec<(Arc<Device>, Vec<String>)>);

impl Shown {
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

    /// The devices that something stands on directly, each with what lies between.
    fn below(&self, footing: &Footing) -> Vec<(Vec<String>, Arc<Device>)> {
        let mut below: Vec<_> = footing.devices.iter().map(|device| (Vec::new(), device.clone())).collect();
        for path in &footing.files {
            let found = cycle::shown_below(path, &|node| self.at(node));
            below.extend(found.into_iter().map(|(number, between)| (between, self.0[number].0.clone())));
        }
        for uri in &footing.servers {
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
            // Where a process listens on all addresses, any that is this host's leads there.
            let is_local =
                host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
            one == other && is_local
        }
        _ => false,
    }
}

/// The devices that a tree stands on, directly or by others, each once.
pub(crate) fn devices_below(tree: &Tree) -> Vec<Arc<Device>> {
    let mut found = Vec::new();
    let take = |tree: &Tree, found: &mut Vec<Arc<Device>>| {
        for device in tree.footing().devices {
            if !found.iter().any(|known| Arc::ptr_eq(known, &device)) {
                found.push(device);
            }
        }
    };
    take(tree, &mut found);
    let mut next = 0;
    while let Some(device) = found.get(next) {
        let form = device.form();
        take(&form.tree, &mut found);
        next += 1;
    }
    found
}

/// What a device stands on.
fn footings(device: &Device, which: Which) -> Vec<Arc<Footing>> {
    let (inactive, coming) = {
        let slot = device.slot.lock().unwrap_or_else(PoisonError::into_inner);
        (slot.inactive.clone(), slot.coming.clone())
    };
    let next = inactive.filter(|_| which == Which::Planned).unwrap_or_else(|| device.form());
    [Some(Arc::new(next.tree.footing())), coming].into_iter().flatten().collect()
}

/// The way from what a device is to stand on down to the device itself, which begins and ends it; `None`: there is none.
fn way(device: &Arc<Device>, footing: Arc<Footing>, shown: &Shown, which: Which) -> Option<Vec<String>> {
    let mut seen: Vec<Arc<Device>> = Vec::new();
    let mut left = vec![(footing, vec![device.name().to_string()])];
    while let Some((footing, trail)) = left.pop() {
        for (between, lower) in shown.below(&footing) {
            let mut trail = trail.clone();
            trail.extend(between);
            trail.push(lower.name().to_string());
            if Arc::ptr_eq(&lower, device) {
                return Some(trail);
            }
            if !seen.iter().any(|known| Arc::ptr_eq(known, &lower)) {
                left.extend(footings(&lower, which).into_iter().map(|footing| (footing, trail.clone())));
                seen.push(lower);
            }
        }
    }
    None
}

impl Host {
    /// Check that a device that comes to stand on this does not stand on itself. The caller holds
    /// [`stacking`](Host::stacking) until others can see what the device stands on then.
    ///
    /// # Errors
    /// [`ChangeError::Cycle`], which names the cycle.
    pub(crate) async fn check_stacking(
        &self,
        device: &Arc<Device>,
        footing: Arc<Footing>,
        which: Which,
    ) -> Result<(), HostError> {
        let addresses = |device: &Arc<Device>| {
            self.exports(device).into_iter().map(|export| export.address).collect::<Vec<_>>()
        };
        let shown =
            Shown(self.devices().into_iter().map(|device| (device.clone(), addresses(&device))).collect());
        let device = device.clone();
        // Paths are looked up, which may wait for a disk.
        match off_the_runtime(move || Ok(way(&device, footing, &shown, which))).await? {
            None => Ok(()),
            Some(way) => Err(ChangeError::Cycle(way.join(" → ")).into()),
        }
    }

    /// A device is about to stand on this, and counts as if it did until what is answered is dropped.
    ///
    /// # Errors
    /// [`ChangeError::Cycle`].
    pub(crate) async fn comes_to_stand_on(
        &self,
        device: &Arc<Device>,
        footing: Footing,
    ) -> Result<Coming, HostError> {
        let _one_at_a_time = self.stacking.lock().await;
        let footing = Arc::new(footing);
        self.check_stacking(device, footing.clone(), Which::InUse).await?;
        device.slot.lock().unwrap_or_else(PoisonError::into_inner).coming = Some(footing);
        Ok(Coming(device.clone()))
    }
}

/// What a device is about to stand on counts as long as this lives.
pub(crate) struct Coming(Arc<Device>);

impl Drop for Coming {
    fn drop(&mut self) {
        self.0.slot.lock().unwrap_or_else(PoisonError::into_inner).coming = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceConfig, Form};
    use crate::spec::{DeviceName, TableSpec};
    use crate::tree::{self, Pool, Surroundings};

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
        let around = Surroundings { pool: &Pool::default(), device: &|_| None };
        Arc::new(Device::open(&config, 0, &around).unwrap())
    }

    fn over(lower: &Arc<Device>) -> Arc<Form> {
        let find = |name: &str| (name == lower.name().as_str()).then(|| lower.clone());
        let around = Surroundings { pool: &Pool::default(), device: &find };
        let table = format!("0 8 linear {} 0", lower.name()).parse::<TableSpec>().unwrap();
        Arc::new(tree::open_table(&table, &[], "", &around).unwrap())
    }

    fn named(device: &Arc<Device>, form: &Form, which: Which) -> Option<String> {
        way(device, Arc::new(form.tree.footing()), &Shown(Vec::new()), which).map(|way| way.join(" → "))
    }

    #[test]
    fn what_is_loaded_and_what_is_on_its_way_count_as_well_as_what_is_in_use() {
        let (a, b) = (device("a"), device("b"));
        let (over_a, over_b) = (over(&a), over(&b));
        assert_eq!(named(&b, &over_a, Which::Planned), None);
        assert_eq!(named(&b, &over(&b), Which::InUse).as_deref(), Some("b → b"));
        a.slot.lock().unwrap().inactive = Some(over_b.clone());
        assert_eq!(named(&b, &over_a, Which::Planned).as_deref(), Some("b → a → b"));
        assert_eq!(named(&b, &over_a, Which::InUse), None, "what is only loaded may never be resumed");
        a.slot.lock().unwrap().inactive = None;
        a.slot.lock().unwrap().coming = Some(Arc::new(over_b.tree.footing()));
        assert_eq!(named(&b, &over_a, Which::InUse).as_deref(), Some("b → a → b"), "two resumes at once");
        a.slot.lock().unwrap().coming = None;
        a.set_form(over_b);
        assert_eq!(named(&b, &over_a, Which::InUse).as_deref(), Some("b → a → b"));
        // What is to come in the place of what is in use may be loaded already.
        a.slot.lock().unwrap().inactive = Some(over(&device("c")));
        assert_eq!(named(&b, &over_a, Which::Planned), None);
    }

    #[test]
    fn a_walk_ends_among_devices_that_stand_on_each_other() {
        let (a, b, c) = (device("a"), device("b"), device("c"));
        let (over_a, over_b) = (over(&a), over(&b));
        a.set_form(over_b);
        b.set_form(over_a.clone());
        assert_eq!(devices_below(&over_a.tree).len(), 2);
        assert!(!over_a.tree.stands_on(&c) && over_a.tree.stands_on(&a));
        assert!(!a.is_held() && a.survives());
        b.set_suspended(true);
        assert!(a.is_held());
        assert_eq!(named(&c, &over_a, Which::InUse), None);
        // Or they would hold each other for ever.
        a.set_form(over(&c));
    }

    #[test]
    fn one_server_is_known_by_several_names() {
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
