//! The dependencies of a device: other devices of the process, files, NBD servers.

use super::Device;
use super::tree::Tree;
use std::path::PathBuf;
use std::sync::Arc;

/// The dependencies of a tree that may be, or lead to, another device of this process.
#[derive(Default)]
pub(crate) struct Dependencies {
    /// Devices that it uses by name.
    pub(crate) devices: Vec<Arc<Device>>,
    /// Its files, including those of its layers.
    pub(crate) files: Vec<PathBuf>,
    /// URIs of NBD servers that it is a client of.
    pub(crate) servers: Vec<String>,
}

/// Lists the devices that a tree uses, directly or through others, each once.
pub(crate) fn lower_devices(tree: &Tree) -> Vec<Arc<Device>> {
    let mut found = Vec::new();
    let take = |tree: &Tree, found: &mut Vec<Arc<Device>>| {
        for device in tree.dependencies().devices {
            if !found.iter().any(|known| Arc::ptr_eq(known, &device)) {
                found.push(device);
            }
        }
    };
    take(tree, &mut found);
    let mut next = 0;
    while let Some(device) = found.get(next) {
        let composition = device.composition();
        take(&composition.tree, &mut found);
        next += 1;
    }
    found
}
