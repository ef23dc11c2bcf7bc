//! Writing an overlay down into what it stands over: of a device while it is served, and of one that is not.
//!
//! While it is served most is copied beside its clients; then its requests are held back, what has changed meanwhile is
//! copied, and every queue takes a stack whose overlay is empty ([ADR 14](../../../docs/adr/0014-live-change.md)). What
//! fails at any step leaves the device as it was, serving.

use crate::change::off_the_runtime;
use crate::device::{CommitError, Device, DeviceConfig, DeviceError, Form};
use crate::host::{Host, HostError};
use crate::spec::StackSpec;
use crate::tree::{self, Clients, Commit};
use std::sync::Arc;

/// Commit the uppermost overlay of a device that nobody serves.
///
/// # Errors
/// What does not open, is in use or cannot be written: the overlay stays, and can be committed again.
pub fn commit(config: &DeviceConfig) -> Result<(), DeviceError> {
    tree::commit(config)
}

impl Host {
    pub(crate) async fn commit(&self, device: &Arc<Device>) -> Result<(), HostError> {
        let before = device.form();
        if matches!(&before.stack, StackSpec::File(spec) if spec.ro) {
            return Err(DeviceError::from(CommitError::ReadOnly).into());
        }
        let form = before.clone();
        let commit = off_the_runtime(move || {
            let commit = Commit::of_served(&form.tree)?;
            commit.carry(&form.tree, Clients::GoOn)?;
            Ok(commit)
        })
        .await?;
        let form = before.clone();
        let exchanged = self.exchange(device, move || {
            let mut commit = commit;
            commit.finish(&form.tree)?;
            let (stack, layers) = (form.stack.clone(), form.layers.clone());
            let tree = commit.settle(&form.tree)?;
            Ok(Ok(Arc::new(Form { stack, layers, tree, table: form.table.clone() })))
        });
        let result = exchanged.await;
        if result.is_ok() {
            // The old stack is not gone back to from here on, so what it had may go.
            let form = device.form();
            let emptied = off_the_runtime(move || tree::give_back(&form.tree)).await;
            if let Err(error) = emptied {
                tracing::warn!(device = %device.name(), %error, "its overlay is committed, and keeps its space");
            }
        }
        self.let_go(device, result.is_ok());
        result
    }
}
