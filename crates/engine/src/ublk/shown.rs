//! A ublk device as its host knows it: an export like others, which may refuse to go and can be left to another process.

use super::{QUIESCING, UblkError, UblkExport, blocking, users_of};
use crate::cached::drop_blocks;
use crate::control::{BoxFuture, ExportInfo};
use crate::device::Device;
use crate::host::{Export, HostError};
use crate::rundir::RunDir;
use crate::spec::{Recovery, TableSpec};
use ::ublk::Features;
use block::Bytes;
use exports::ublk::LaneShared;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// As the host knows it.
pub(super) struct Shown(pub(super) Arc<UblkExport>);

impl Export for Shown {
    fn info(&self, device: &Device) -> ExportInfo {
        ExportInfo {
            kind: "ublk".to_owned(),
            address: self.0.path(),
            connections: users_of(self.0.info.dev_id),
            tls: "off".to_owned(),
            details: self.0.details(device),
        }
    }

    fn retabled(&self, table: &TableSpec) -> Result<(), HostError> {
        Ok(self.0.rewrite(|run, record| record.with_table(run, table))?)
    }

    fn relayered(&self, device: &Device) -> Result<(), HostError> {
        let (layers, times) = (device.layers(), [device.slow.limit(), device.timeouts.limit()]);
        Ok(self.0.rewrite(|run, record| record.with_layers(run, &layers, times))?)
    }

    fn refiled(&self, file: &Path) -> Result<(), HostError> {
        Ok(self.0.rewrite(|run, record| record.with_file(run, file))?)
    }

    fn renamed(&self, _: &RunDir, _: &str, to: &str) -> Result<(), HostError> {
        Ok(self.0.rewrite(|run, record| record.renamed(run, to))?)
    }

    /// Asked a few times a second, so without a question to the driver.
    fn is_used(&self, _: &Device) -> bool {
        users_of(self.0.info.dev_id) > 0
    }

    fn may_close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        let in_use = self.0.live.load(Relaxed) && users_of(self.0.info.dev_id) > 0;
        let answer = if in_use { Err(UblkError::InUse(self.0.path()).into()) } else { Ok(()) };
        Box::pin(async { answer })
    }

    fn close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { Ok(self.0.clone().take_away(false).await?) })
    }

    fn force<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { Ok(self.0.clone().take_away(true).await?) })
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
            let lanes: Vec<_> = self.0.lanes().clone();
            let before: Vec<u64> = lanes.iter().map(|lane| lane.size.load(Relaxed)).collect();
            let grows = |lane: &Arc<LaneShared>| lane.size.load(Relaxed) < size.0;
            // Blocks are let in before they are told of, and told to be gone before they are kept out.
            lanes.iter().filter(|lane| grows(lane)).for_each(|lane| lane.size.store(size.0, Relaxed));
            let driver = self.0.driver.clone();
            let told = blocking(move || driver.update_size(number, size.sectors().0)).await;
            if let Err(refused) = told.and_then(|told| told.map_err(UblkError::from)) {
                lanes.iter().zip(before).for_each(|(lane, before)| lane.size.store(before, Relaxed));
                return Err(refused.into());
            }
            lanes.iter().for_each(|lane| lane.size.store(size.0, Relaxed));
            Ok(())
        })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move { Ok(drop_blocks(self.0.path()).await?) })
    }

    fn leave(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            let number = self.0.info.dev_id;
            match Recovery::of(self.0.info.features()) {
                Recovery::None => {
                    return Err(UblkError::CannotLeave("it was made without recovery").into());
                }
                Recovery::FailIo => {
                    return Err(UblkError::CannotLeave(
                        "its requests would fail meanwhile, as recovery=fail-io says",
                    )
                    .into());
                }
                // The next server gets whatever this one still has.
                Recovery::Reissue if !self.0.info.features().has(Features::QUIESCE) => {}
                Recovery::Requeue if !self.0.info.features().has(Features::QUIESCE) => {
                    let why = "this kernel cannot quiesce it, and requests under way would fail";
                    return Err(UblkError::CannotLeave(why).into());
                }
                Recovery::Requeue | Recovery::Reissue => {
                    let driver = self.0.driver.clone();
                    blocking(move || driver.quiesce(number, QUIESCING)).await?.map_err(UblkError::from)?;
                }
            }
            self.0.left.store(true, Relaxed);
            Ok(())
        })
    }

    fn closed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            if self.0.left.load(Relaxed) {
                return Ok(());
            }
            let export = self.0.clone();
            Ok(blocking(move || export.delete()).await??)
        })
    }
}
