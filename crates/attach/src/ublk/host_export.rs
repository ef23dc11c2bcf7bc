//! A ublk device as an export of its host: it may refuse to be removed, and can be handed over to another
//! process.

use super::{QUIESCE_MAX, UblkError, UblkExport, blocking, users_of};
use crate::helper::page_cache::drop_blocks;
use ::ublk::Features;
use block::Bytes;
use engine::control::{BoxFuture, ExportInfo};
use engine::device::Device;
use engine::host::{Export, Handover, HostError};
use engine::rundir::RunDir;
use exports::ublk::ServedQueueShared;
use spec::{Recovery, StackSpec, TableSpec};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The host's reference to a ublk device.
pub(super) struct HostExport(pub(super) Arc<UblkExport>);

impl Export for HostExport {
    fn info(&self, device: &Device) -> ExportInfo {
        ExportInfo {
            kind: "ublk".to_owned(),
            address: self.0.path(),
            connections: users_of(self.0.info.dev_id),
            counts: Default::default(),
            sessions: Default::default(),
            tls: "off".to_owned(),
            details: self.0.details(device),
        }
    }

    fn needs_opaque_stack(&self) -> bool {
        self.0.choice.mode.is_opaque() || self.0.client_memory.is_some()
    }

    fn table_changed(&self, table: &TableSpec) -> Result<(), HostError> {
        Ok(self.0.update_record(|run, record| record.with_table(run, table))?)
    }

    fn layers_changed(&self, device: &Device) -> Result<(), HostError> {
        let (layers, times) = (device.layers(), [device.slow.limit(), device.timeouts.limit()]);
        Ok(self.0.update_record(|run, record| record.with_layers(run, &layers, times))?)
    }

    fn file_changed(&self, file: &Path) -> Result<(), HostError> {
        Ok(self.0.update_record(|run, record| record.with_file(run, file))?)
    }

    fn stack_changed(&self, stack: &StackSpec) -> Result<(), HostError> {
        Ok(self.0.update_record(|run, record| record.with_stack(run, stack))?)
    }

    fn topology_changed(&self, text: &str, file: &Path) -> Result<(), HostError> {
        Ok(self.0.update_record(|run, record| record.with_topology(run, text, file))?)
    }

    fn renamed(&self, _: &RunDir, _: &str, to: &str) -> Result<(), HostError> {
        Ok(self.0.update_record(|run, record| record.renamed(run, to))?)
    }

    /// Called several times a second, so it does not query the driver.
    fn is_used(&self, _: &Device) -> bool {
        users_of(self.0.info.dev_id) > 0
    }

    fn may_close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        let in_use = self.0.live.load(Relaxed) && users_of(self.0.info.dev_id) > 0;
        let answer = if in_use { Err(UblkError::InUse(self.0.path()).into()) } else { Ok(()) };
        Box::pin(async { answer })
    }

    fn close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { Ok(self.0.clone().stop_device(false).await?) })
    }

    fn force<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { Ok(self.0.clone().stop_device(true).await?) })
    }

    fn may_resize(&self, _: Bytes) -> Result<(), HostError> {
        match self.0.info.features().has(Features::UPDATE_SIZE) {
            true => Ok(()),
            false => Err(UblkError::Lacks(Features::UPDATE_SIZE, "resize; del and add it instead").into()),
        }
    }

    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            self.may_resize(size)?;
            let number = self.0.info.dev_id;
            let queues: Vec<_> = self.0.queues().clone();
            let before: Vec<u64> = queues.iter().map(|served| served.size.load(Relaxed)).collect();
            let grows = |served: &Arc<ServedQueueShared>| served.size.load(Relaxed) < size.0;
            // When growing, queues accept requests to new blocks before the kernel knows the size; when
            // shrinking, they refuse requests after the kernel knows it.
            queues
                .iter()
                .filter(|served| grows(served))
                .for_each(|served| served.size.store(size.0, Relaxed));
            let driver = self.0.driver.clone();
            let updated = blocking(move || driver.update_size(number, size.sectors().0)).await;
            if let Err(refused) = updated.and_then(|updated| updated.map_err(UblkError::from)) {
                queues.iter().zip(before).for_each(|(served, before)| served.size.store(before, Relaxed));
                return Err(refused.into());
            }
            queues.iter().for_each(|served| served.size.store(size.0, Relaxed));
            Ok(())
        })
    }

    fn content_changed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move { Ok(drop_blocks(self.0.path()).await?) })
    }

    fn handover(&self) -> Handover {
        let recovery = Recovery::of(self.0.info.features());
        Handover::DeviceWaits { reissues: recovery == Recovery::Reissue }
    }

    fn hand_over(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            let number = self.0.info.dev_id;
            match Recovery::of(self.0.info.features()) {
                Recovery::None => {
                    return Err(UblkError::CannotHandOver("it was created without recovery").into());
                }
                Recovery::FailIo => {
                    return Err(UblkError::CannotHandOver(
                        "with recovery=fail-io its requests would fail meanwhile",
                    )
                    .into());
                }
                // The next server gets the requests that this one still has.
                Recovery::Reissue if !self.0.info.features().has(Features::QUIESCE) => {}
                Recovery::Requeue if !self.0.info.features().has(Features::QUIESCE) => {
                    let why = "this kernel cannot quiesce it, and requests in flight would fail";
                    return Err(UblkError::CannotHandOver(why).into());
                }
                Recovery::Requeue | Recovery::Reissue => {
                    let driver = self.0.driver.clone();
                    blocking(move || driver.quiesce(number, QUIESCE_MAX)).await?.map_err(UblkError::from)?;
                }
            }
            self.0.keeps_device.store(true, Relaxed);
            Ok(())
        })
    }

    fn closed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            if self.0.keeps_device.load(Relaxed) {
                return Ok(());
            }
            let export = self.0.clone();
            Ok(blocking(move || export.delete()).await??)
        })
    }
}
