//! Commits an overlay into its origin, of a device that is served and of one that is not.
//!
//! While the device is served, most chunks are copied while its clients continue. Then requests are held,
//! chunks that have changed since are copied, and every queue gets a stack with an empty overlay
//! ([ADR 14](../../../docs/adr/0014-live-change.md)). A failure at any step leaves the device as it was,
//! serving.

use crate::change::blocking;
use crate::device::tree::{self, Clients, Commit};
use crate::device::{CommitError, Composition, Device, DeviceConfig, DeviceError};
use crate::host::{Host, HostError};
use crate::spec::StackSpec;
use std::sync::Arc;

/// Commits the uppermost overlay of a device that is not served. Blocks its thread.
///
/// # Errors
/// Something cannot be opened, is in use or cannot be written: the overlay stays, and can be committed again.
pub fn commit(config: &DeviceConfig) -> Result<(), DeviceError> {
    tree::commit(config)
}

impl Host {
    pub(crate) async fn commit(&self, device: &Arc<Device>) -> Result<(), HostError> {
        let before = device.composition();
        if matches!(&before.stack, StackSpec::File(spec) if spec.file.ro) {
            return Err(DeviceError::from(CommitError::ReadOnly).into());
        }
        let composition = before.clone();
        let commit = blocking(move || {
            let commit = Commit::of_served(&composition.tree)?;
            commit.copy_down(&composition.tree, Clients::Running)?;
            Ok(commit)
        })
        .await?;
        let composition = before.clone();
        let exchanged = self.exchange(device, move || {
            let mut commit = commit;
            commit.copy_rest(&composition.tree)?;
            let (stack, layers) = (composition.stack.clone(), composition.layers.clone());
            let tree = commit.complete(&composition.tree)?;
            Ok(Ok(Arc::new(Composition { stack, layers, tree, table: composition.table.clone() })))
        });
        let result = exchanged.await;
        if result.is_ok() {
            // The device does not return to the old stack from here on, so its data may be freed.
            let composition = device.composition();
            let emptied = blocking(move || tree::free_space(&composition.tree)).await;
            if let Err(error) = emptied {
                tracing::warn!(device = %device.name(), %error, "the overlay is committed, but its space could not be freed");
            }
        }
        self.finish_exchange(device, result.is_ok());
        result
    }
}
