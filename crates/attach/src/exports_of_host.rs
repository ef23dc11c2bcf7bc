//! The exports of one process: from a description to a device that clients can reach.
//!
//! Each export of crate `spec` has a module here, whose function `export` creates its
//! [`Export`](engine::host::Export) and registers it with the host. A new export is a module and a line in
//! `list!`; the compiler rejects an export of `spec` that is missing here.

use crate::nbd::listen::Listening;
use crate::ublk::{Origin, Record};
use crate::{fuse, iscsi, loop_device, nbd, nbd_device, ublk, vhost};
use engine::device::Device;
use engine::host::{Host, HostError};
use engine::rundir::RunDir;
use engine::topology::{ExportKind, NbdOptions};
use spec::{ExportOptions, NbdExportSpec};
use std::sync::Arc;

/// The kind, address and settings of an attached export, for messages and `show`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shown {
    /// The export's name in the list ([`export_rows`](spec::export_rows)): `nbd`.
    pub kind: &'static str,
    /// The URI or path at which clients reach the device.
    pub address: String,
    /// The settings that the host chose, and the reasons, where it had a choice.
    pub why: Option<String>,
}

/// The address of an export that was attached, and the reasons for its settings.
pub(crate) struct Exported {
    /// A URI or a path.
    pub(crate) address: String,
    /// The settings that the host chose, and the reasons, where it had a choice.
    pub(crate) why: Option<String>,
}

impl Exported {
    /// Describes an export at an address whose settings left the host no choice.
    pub(crate) fn at(address: String) -> Exported {
        Exported { address, why: None }
    }
}

/// How a ublk device came to be, and the record from which another server can take it over.
pub struct UblkLife {
    /// Whether the device is created, or taken over from a server that died.
    pub origin: Origin,
    /// The record and the run directory that it is kept in; `None`: no record.
    pub keep: Option<(RunDir, Record)>,
}

/// Exports devices of a host.
pub struct Exports {
    host: Arc<Host>,
    run: RunDir,
    nbd: nbd::Servers,
    iscsi: Arc<iscsi::Targets>,
}

macro_rules! list {
    ($($kind:ident => $module:ident),* $(,)?) => {
        impl Exports {
            async fn attach(
                &self,
                device: &Arc<Device>,
                kind: &ExportKind,
                life: impl FnOnce() -> UblkLife,
            ) -> Result<Exported, HostError> {
                match kind {
                    ExportKind::Default(_) => unreachable!("an export is chosen first"),
                    $(ExportKind::$kind(options) => $module::export(self, device, options, life).await,)*
                }
            }
        }
    };
}

list!(Nbd => nbd, Ublk => ublk, Loop => loop_device, NbdDevice => nbd_device, Fuse => fuse, Iscsi => iscsi, VhostUser => vhost);

impl Exports {
    /// Creates exports for a host, none yet. Sockets and files that exports need are created in `run`.
    pub fn new(host: &Arc<Host>, run: RunDir) -> Exports {
        let iscsi = iscsi::Targets::new(host, engine::state_dir::locate());
        Exports { host: host.clone(), run, nbd: nbd::Servers::new(host), iscsi }
    }

    /// The host whose devices are exported.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// The run directory, in which exports create sockets and files.
    pub(crate) fn run(&self) -> &RunDir {
        &self.run
    }

    /// The NBD servers of the process.
    pub(crate) fn nbd(&self) -> &nbd::Servers {
        &self.nbd
    }

    /// The iSCSI targets of the process.
    pub fn iscsi(&self) -> &Arc<iscsi::Targets> {
        &self.iscsi
    }

    /// Exports a device. `life` is called for ublk only. Must be called on the control plane's runtime.
    ///
    /// # Errors
    /// The export is refused or fails. Nothing is left behind, except a block device of the kernel that is
    /// removed with the device.
    ///
    /// # Panics
    /// For [`ExportKind::Default`], which the caller replaces by an export first.
    pub async fn export(
        &self,
        device: &Arc<Device>,
        kind: &ExportKind,
        life: impl FnOnce() -> UblkLife,
    ) -> Result<Shown, HostError> {
        let Exported { address, why } = self.attach(device, kind, life).await?;
        Ok(Shown { kind: kind.row().map_or("", |row| row.kind), address, why })
    }

    /// Exports a device to NBD clients on a socket that the service manager opened.
    ///
    /// # Errors
    /// The certificates or the export name are refused; nothing is left behind.
    pub fn nbd_on(
        &self,
        device: &Arc<Device>,
        listening: Listening,
        NbdOptions { name, tls }: &NbdOptions,
    ) -> Result<Shown, HostError> {
        let address = self.nbd.export_on(device, listening, name, tls)?;
        Ok(Shown { kind: NbdExportSpec::ROW.kind, address, why: None })
    }
}
