//! Operations on all targets of a table while it is activated, suspended and given up.

use super::{LoadedTarget, SyncIo, TableError, Tree};
use crate::device::{Composition, DeviceError};
use block::Bytes;
use layers::dm::background::Disks;
use std::io;

/// Has the targets of a table that is about to be activated read their metadata.
///
/// # Errors
/// A target cannot be activated: the table must not be used.
pub(crate) fn prepare(composition: &Composition) -> Result<(), DeviceError> {
    for loaded in composition.table.iter().flat_map(|loaded| &loaded.targets) {
        let devices = loaded.devices.iter().map(Tree::with_current_devices).collect::<Result<_, _>>()?;
        let prepared = loaded.target.prepare(&mut TargetDisks::new(devices));
        prepared.map_err(|why| TableError { line: 0, kind: loaded.kind.to_owned(), why })?;
    }
    Ok(())
}

/// Notifies the targets that the table is about to be suspended.
pub(crate) fn presuspend(composition: &Composition, noflush: bool) {
    for_each_target(composition, |target| target.target.presuspend(noflush));
}

/// Fails requests that wait for a path, as the device is removed and nobody waits for them any more.
pub(crate) fn fail_waiting(composition: &Composition) {
    for_each_target(composition, |target| {
        if let Some(paths) = target.target.paths() {
            paths.prepare_removal();
        }
    });
}

/// Notifies the targets that the table is resumed.
pub(crate) fn resume(composition: &Composition) {
    for_each_target(composition, |target| target.target.resume());
}

/// Calls `each` with each target of a table.
pub(crate) fn for_each_target(composition: &Composition, mut each: impl FnMut(&LoadedTarget)) {
    composition.table.iter().flat_map(|loaded| &loaded.targets).for_each(&mut each);
}

/// The devices of a target, opened on first use.
pub(crate) struct TargetDisks {
    disks: Vec<(Tree, Option<SyncIo>)>,
}

impl TargetDisks {
    pub(crate) fn new(devices: Vec<Tree>) -> TargetDisks {
        TargetDisks { disks: devices.into_iter().map(|tree| (tree, None)).collect() }
    }

    fn disk(&mut self, device: usize) -> io::Result<&mut SyncIo> {
        let (tree, scratch) = &mut self.disks[device];
        if scratch.is_none() {
            *scratch = Some(SyncIo::new(tree).map_err(io::Error::other)?);
        }
        scratch.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disks for TargetDisks {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.disk(device)?.read(at.0, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.disk(device)?.write(at.0, from)
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.disk(device)?.flush()
    }

    fn write_durably(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.disk(device)?.record(at.0, from)
    }
}
