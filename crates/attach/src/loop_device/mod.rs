//! The loop export: a device as a FUSE file, and a loop device of the kernel bound to that file.
//!
//! The file is `NAME.fuse` in the run directory; its mount is a [`FuseExport`]. Binding, unbinding and
//! resizing wait for I/O on that file, so the helper process does them ([`run_helper`]). The helper has none
//! of this process's descriptors open: if this process dies, the helper's requests fail and it ends.
//!
//! Mounts and loop devices that a dead server left behind are found by name ([`remove_orphan`]).

mod orphans;

pub use crate::helper::{Refusal, run_helper};
pub use orphans::{is_orphaned, orphaned_files, remove_orphan};

use crate::fuse::{FuseError, FuseExport};
use crate::helper::page_cache::drop_blocks;
use crate::helper::{self, HelperError, Task};
use crate::{Exported, Exports, UblkLife};
use engine::control::{BoxFuture, ExportInfo};
use engine::device::Device;
use engine::host::{Export, Handover, Host, HostError, HostErrorKind};
use spec::{Bytes, FuseSpec, LoopSpec};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time between unbinding the loop device and the kernel closing the file, after which the file can
/// be unmounted.
const UNBIND_MAX: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Why a device cannot be exported as a loop device, or the loop device cannot be removed.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// An error of the FUSE file.
    #[error(transparent)]
    File(#[from] FuseError),
    /// The helper failed: its message.
    #[error("{0}")]
    Helper(String),
    /// The loop device is in use: the helper's message.
    #[error("{0}")]
    InUse(String),
}

impl From<HelperError> for LoopError {
    fn from(error: HelperError) -> LoopError {
        match error {
            HelperError::Failed(why) => LoopError::Helper(why),
            HelperError::InUse(why) => LoopError::InUse(why),
        }
    }
}

impl From<LoopError> for HostError {
    fn from(error: LoopError) -> HostError {
        let is_used = matches!(error, LoopError::InUse(_) | LoopError::File(FuseError::InUse { .. }));
        HostError::caused(if is_used { HostErrorKind::InUse } else { HostErrorKind::Failed }, error)
    }
}

/// Exports a device as a loop device over a file in the run directory. Blocks its thread while the helper
/// binds it.
///
/// # Errors
/// The device is zoned, or no loop device is free; nothing is left behind.
pub(crate) async fn export(
    exports: &Exports,
    device: &Arc<Device>,
    spec: &LoopSpec,
    _life: impl FnOnce() -> UblkLife,
) -> Result<Exported, HostError> {
    Host::refuse_zones(device, "a loop device")?;
    let file = exports.run().loop_file(device.name().as_str());
    let export = LoopExport::start(exports.host(), device, &file, spec)?;
    let address = export.address();
    exports.host().add_export(device, Arc::new(export));
    Ok(Exported::at(address))
}

/// Checks whether this process may create loop devices over FUSE files.
///
/// # Errors
/// Returns the reason why it may not.
pub(crate) fn is_possible() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("it needs root".to_owned());
    }
    let missing = [fuse::DEVICE, loopdev::CONTROL].into_iter().find(|path| !Path::new(path).exists());
    missing.map_or(Ok(()), |path| Err(format!("{path} is missing")))
}

/// A device that is exported as a loop device.
pub(crate) struct LoopExport {
    file: FuseExport,
    number: u32,
}

impl LoopExport {
    /// Mounts the device as `file`, which is in the run directory, and binds a loop device to it.
    pub(crate) fn start(
        host: &Host,
        device: &Arc<Device>,
        file: &Path,
        spec: &LoopSpec,
    ) -> Result<LoopExport, LoopError> {
        remove_orphan(file);
        let fuse = FuseSpec { path: file.to_owned(), passthrough: spec.passthrough, uring: spec.uring };
        let mounted = FuseExport::start_below(host, device, &fuse)?;
        let request = loopdev::Request {
            file: mounted.path().to_owned(),
            number: spec.number,
            block_len: device.limits().logical_block_size.0 as u32,
            read_only: device.read_only(),
            partscan: spec.partscan || device.wants_partitions(),
        };
        match helper::ask(&Task::Attach(request)) {
            Ok(Some(number)) => Ok(LoopExport { file: mounted, number }),
            outcome => {
                let _ = mounted.unmount(true);
                let missing =
                    || LoopError::Helper("the helper returned no loop device (is one free?)".to_owned());
                Err(outcome.err().map_or_else(missing, LoopError::from))
            }
        }
    }

    /// Path of the loop device.
    pub(crate) fn address(&self) -> String {
        loopdev::path(self.number).display().to_string()
    }

    async fn remove(&self, force: bool) -> Result<(), LoopError> {
        let task = Task::Detach { number: self.number, file: self.file.path().to_owned(), force };
        let asked = tokio::task::spawn_blocking(move || helper::ask(&task)).await;
        asked.map_err(|why| LoopError::Helper(why.to_string()))??;
        let start = Instant::now();
        loop {
            match self.file.unmount(force) {
                Err(FuseError::InUse { .. }) if start.elapsed() < UNBIND_MAX => {
                    tokio::time::sleep(POLL_INTERVAL).await
                }
                outcome => return Ok(outcome?),
            }
        }
    }
}

impl Export for LoopExport {
    fn info(&self, device: &Device) -> ExportInfo {
        let of_file = self.file.info(device);
        ExportInfo {
            kind: of_file.kind.replacen("fuse", "loop", 1),
            address: self.address(),
            connections: loopdev::stacked_on(self.number),
            ..of_file
        }
    }

    /// Returns whether the loop device is in use. The loop driver always has the FUSE file open, so users
    /// of that file do not count.
    fn is_used(&self, _device: &Device) -> bool {
        loopdev::is_used(self.number)
    }

    fn is_passthrough(&self) -> bool {
        self.file.is_passthrough()
    }

    fn handover(&self) -> Handover {
        Handover::Ends
    }

    fn may_close<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async {
            let number = self.number;
            let asked = tokio::task::spawn_blocking(move || loopdev::check_unused(number)).await;
            let unused = asked.map_err(|why| LoopError::Helper(why.to_string()))?;
            Ok(unused.map_err(|why| LoopError::InUse(why.to_string()))?)
        })
    }

    fn close<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { Ok(self.remove(false).await?) })
    }

    fn force<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { Ok(self.remove(true).await?) })
    }

    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            self.file.resized(size).await?;
            let number = self.number;
            let asked = tokio::task::spawn_blocking(move || helper::ask(&Task::SetCapacity(number))).await;
            asked.map_err(|why| LoopError::Helper(why.to_string()))?.map_err(LoopError::from)?;
            Ok(())
        })
    }

    fn content_changed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            self.file.content_changed().await?;
            Ok(drop_blocks(self.address()).await?)
        })
    }
}
