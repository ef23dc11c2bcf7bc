//! The loop export: a device as a file of ours, and a loop device of the kernel's bound to that.
//!
//! The file is `NAME.fuse` in the run directory; its mount is a [`FuseExport`]. Binding, letting go and resizing
//! wait for I/O on that file, so a process of its own does them ([`run_helper`]): this program under its hidden word
//! `loop-device`. It has nothing of ours open, so whatever becomes of us, it is answered or told that we are gone.
//!
//! What a server that died left is found again by name: see [`clear_stale`].

mod helper;
mod stale;

pub(crate) use helper::helper;
pub use helper::{Refusal, run_helper};
pub use stale::{clear_stale, dead_files, is_left_behind};

use crate::cached::drop_blocks;
use crate::control::{BoxFuture, ExportInfo};
use crate::device::Device;
use crate::fuse::{FuseError, FuseExport};
use crate::host::{Export, Host, HostError};
use crate::spec::{Bytes, FuseSpec, LoopSpec};
use helper::Task;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The kernel lets go of a file soon after the loop device did; the mount can be taken away only then.
const LET_GO_MAX: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(1);

/// Why a device is not shown as a loop device, or not taken away.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// Its file.
    #[error(transparent)]
    File(#[from] FuseError),
    /// The loop device: a sentence of the helper's.
    #[error("{0}")]
    Helper(String),
    /// Somebody uses it: the same.
    #[error("{0}")]
    InUse(String),
}

/// Whether this process may make loop devices over files of its own.
pub fn loop_available() -> bool {
    rustix::process::geteuid().is_root() && Path::new(fuse::DEVICE).exists() && loopdev::is_available()
}

/// A device that is shown as a loop device.
pub(crate) struct LoopExport {
    file: FuseExport,
    number: u32,
}

impl LoopExport {
    /// Mount the device as `file`, which is in the run directory, and bind a loop device to that.
    pub(crate) fn start(
        host: &Host,
        device: &Arc<Device>,
        file: &Path,
        spec: &LoopSpec,
    ) -> Result<LoopExport, LoopError> {
        clear_stale(file);
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
                    || LoopError::Helper("the helper named no loop device (is there one?)".to_owned());
                Err(outcome.err().unwrap_or_else(missing))
            }
        }
    }

    /// Its path.
    pub(crate) fn address(&self) -> String {
        loopdev::path(self.number).display().to_string()
    }

    async fn take_away(&self, force: bool) -> Result<(), LoopError> {
        let task = Task::Detach { number: self.number, file: self.file.path().to_owned(), force };
        let asked = tokio::task::spawn_blocking(move || helper::ask(&task)).await;
        asked.map_err(|why| LoopError::Helper(why.to_string()))??;
        let start = Instant::now();
        loop {
            match self.file.unmount(force) {
                Err(FuseError::InUse { .. }) if start.elapsed() < LET_GO_MAX => {
                    tokio::time::sleep(LOOK).await
                }
                outcome => return Ok(outcome?),
            }
        }
    }
}

impl Export for LoopExport {
    fn info(&self, device: &Device) -> ExportInfo {
        let of_file = self.file.info(device);
        ExportInfo { kind: of_file.kind.replacen("fuse", "loop", 1), address: self.address(), ..of_file }
    }

    /// The loop driver has the file open throughout: what counts is who has the loop device.
    fn is_used(&self, _device: &Device) -> bool {
        loopdev::is_used(self.number)
    }

    fn is_passed_by(&self) -> bool {
        self.file.is_passed_by()
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
        Box::pin(async { Ok(self.take_away(false).await?) })
    }

    fn force<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { Ok(self.take_away(true).await?) })
    }

    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            self.file.resized(size).await?;
            let number = self.number;
            let asked = tokio::task::spawn_blocking(move || helper::ask(&Task::SetCapacity(number))).await;
            asked.map_err(|why| LoopError::Helper(why.to_string()))??;
            Ok(())
        })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            self.file.replaced().await?;
            Ok(drop_blocks(self.address()).await?)
        })
    }
}
