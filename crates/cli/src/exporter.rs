//! Adds the exports of this process's devices: for `serve` and `up` at the start, for `apply` later.

use crate::launch::Launch;
use crate::process;
use attach::nbd::listen::Listening;
use attach::{Exports, Shown, UblkLife};
use engine::device::Device;
use engine::host::{Export, Host, HostError};
use engine::rundir::RunDir;
use engine::spec::{NbdAddress, NbdExportSpec};
use engine::topology::{ExportKind, NbdOptions};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An export of a device.
pub(crate) struct Exported {
    /// Kind and address.
    pub(crate) shown: Shown,
    pub(crate) export: Arc<dyn Export>,
    /// Whether the export uses a socket opened by the service manager.
    pub(crate) is_on_given_socket: bool,
}

/// Sockets opened by the service manager, for exports without an address.
struct GivenSockets {
    /// Sockets without an export yet.
    unused: Vec<Listening>,
    /// Addresses of sockets that have an export.
    used: Vec<NbdAddress>,
}

/// Exports devices of one process.
pub(crate) struct Exporter {
    exports: Exports,
    run: RunDir,
    /// The description of this process's devices for a process that takes them over.
    launch: Mutex<Launch>,
    given: Mutex<GivenSockets>,
    verbose: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Exporter {
    /// Creates an exporter. `given`: sockets opened by the service manager. `verbose`: report choices on stderr.
    pub(crate) fn new(
        host: &Arc<Host>,
        run: RunDir,
        launch: Launch,
        given: Vec<Listening>,
        verbose: bool,
    ) -> Exporter {
        let exports = Exports::new(host, run.clone());
        let given = Mutex::new(GivenSockets { unused: given, used: Vec::new() });
        Exporter { exports, run, launch: Mutex::new(launch), given, verbose }
    }

    /// Replaces the description of the devices by a new topology text.
    pub(crate) fn describe(&self, text: &str, file: &std::path::Path) {
        let mut launch = lock(&self.launch);
        let page = launch.page.clone();
        *launch = Launch::by_topology(text, file);
        launch.page = page;
    }

    /// Exports a device. The default export becomes one export for each socket opened by the service manager.
    ///
    /// # Errors
    /// The export cannot be created. Exports that this call created before the error stay.
    pub(crate) async fn export(
        &self,
        device: &Arc<Device>,
        kind: &ExportKind,
    ) -> Result<Vec<Exported>, HostError> {
        let chosen;
        let kind = match kind {
            ExportKind::Default(options) => {
                let exported = self.on_given_sockets(device, options).await?;
                if !exported.is_empty() {
                    return Ok(exported);
                }
                chosen = self.choose(device, options).await;
                &chosen
            }
            kind => kind,
        };
        if is_for_kernel(kind) {
            process::serve_the_kernel();
        }
        let shown = self.exports.export(device, kind, || self.ublk_life(device)).await?;
        if self.verbose
            && let Some(why) = &shown.why
        {
            eprintln!("blockyard: {}: {why}", device.name());
        }
        Ok(vec![self.exported(device, shown, false)?])
    }

    /// Returns the device's newest export.
    fn exported(
        &self,
        device: &Arc<Device>,
        shown: Shown,
        is_on_given_socket: bool,
    ) -> Result<Exported, HostError> {
        let export = self.exports.host().exports_of(device).pop().ok_or_else(HostError::no_device)?;
        Ok(Exported { shown, export, is_on_given_socket })
    }

    /// Returns whether a ublk device is created or taken over, and the record for its next server.
    fn ublk_life(&self, device: &Device) -> UblkLife {
        let launch = lock(&self.launch);
        let keep = launch.record(&self.run, device.name().as_str(), &device.stack());
        UblkLife { origin: launch.origin(), keep }
    }

    async fn on_given_sockets(
        &self,
        device: &Arc<Device>,
        options: &NbdOptions,
    ) -> Result<Vec<Exported>, HostError> {
        let mut exported = Vec::new();
        let (used, unused) = {
            let mut given = lock(&self.given);
            (given.used.clone(), std::mem::take(&mut given.unused))
        };
        for address in used {
            let kind = ExportKind::Nbd(NbdExportSpec { address, options: options.clone() });
            let shown = self.exports.export(device, &kind, || self.ublk_life(device)).await?;
            exported.push(self.exported(device, shown, true)?);
        }
        for listening in unused {
            lock(&self.given).used.push(listening.address.clone());
            let shown = self.exports.nbd_on(device, listening, options)?;
            exported.push(self.exported(device, shown, true)?);
        }
        Ok(exported)
    }

    /// Chooses the best export that this machine supports.
    async fn choose(&self, device: &Arc<Device>, options: &NbdOptions) -> ExportKind {
        let wanted = std::env::var("BLOCKYARD_EXPORT").ok();
        let (kind, why) = self.exports.choose(device, options, wanted.as_deref()).await;
        if self.verbose {
            eprintln!("blockyard: {}: no export given: using {kind}, because {why}", device.name());
        }
        kind
    }
}

/// Whether an export is, or can become, a block device of the kernel.
pub(crate) fn is_for_kernel(kind: &ExportKind) -> bool {
    // The default export, which has no row, can become one.
    kind.row().is_none_or(|row| row.is_kernel_device)
}
