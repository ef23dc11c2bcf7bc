//! The control plane of the NBD export: listeners, the devices each offers, and the handshakes.
//!
//! A [`Listener`] is one address with any number of exports. It accepts connections, runs each handshake on
//! the control plane's runtime, and hands the connection to a reactor. It never touches data, except to
//! encrypt it for TLS connections.

mod connection;
mod limits;
pub mod listen;
mod servers;
#[cfg(test)]
mod tests;
mod tls;

pub(crate) use connection::adoption;
pub(crate) use limits::ConnectionLimits;
pub use servers::Servers;
pub use tls::{Tls, TlsError};

use crate::handshakes::Peer;
use crate::nbd::listen::Listening;
use crate::{Exported, UblkLife};
use engine::device::Device;
use engine::host::{Host, HostError};
use proto::nbd::server::{self, Catalogue, Config, Found};
use proto::nbd::{BlockSizes, ExportId, ExportInfo};
use spec::{NbdAddress, NbdExportSpec, NbdOptions, TlsMode, nbd_uri};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// Largest payload of one request: the protocol's limit for portable clients.
const PAYLOAD_MAX: u32 = 32 << 20;

/// Exports a device to NBD clients.
///
/// # Errors
/// The address, the certificates or the export name are refused; nothing is left behind.
pub(crate) async fn export(
    exports: &crate::Exports,
    device: &Arc<Device>,
    NbdExportSpec { address, options: NbdOptions { name, tls } }: &NbdExportSpec,
    _life: impl FnOnce() -> UblkLife,
) -> Result<Exported, HostError> {
    exports.nbd().export(device, address, name, tls).map(Exported::at)
}

/// A device, under a name on a listener.
#[derive(Clone)]
struct Export {
    name: String,
    device: Arc<Device>,
}

/// The exports of one listener.
#[derive(Default)]
pub struct Exports {
    list: Mutex<Vec<Export>>,
}

impl Exports {
    /// Adds a device under a name.
    ///
    /// # Errors
    /// The name is taken on this listener; nothing has changed.
    pub fn add(&self, name: &str, device: Arc<Device>) -> Result<(), NameTaken> {
        let mut list = self.lock();
        if list.iter().any(|export| export.name == name) {
            return Err(NameTaken(name.to_owned()));
        }
        list.push(Export { name: name.to_owned(), device });
        Ok(())
    }

    /// Removes the export of that name. Open connections stay.
    pub fn remove(&self, name: &str) {
        self.lock().retain(|export| export.name != name);
    }

    /// Whether the listener has no exports.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn device(&self, id: ExportId) -> Option<Arc<Device>> {
        self.lock().iter().find(|e| e.device.number() == id.0).map(|e| e.device.clone())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Export>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Another export of the listener has this name.
#[derive(Debug, thiserror::Error)]
#[error("another device is already exported there as \"{0}\" (choose another --nbd-name)")]
pub struct NameTaken(String);

impl Catalogue for Exports {
    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        for export in self.lock().iter() {
            each(&export.name, &export.device.public_description());
        }
    }

    fn look_up(&self, name: &str) -> Option<Found> {
        let list = self.lock();
        let export = list.iter().find(|export| export.name == name)?;
        let id = ExportId(export.device.number());
        Some(Found { id, name: name.to_owned(), info: info_of(&export.device) })
    }

    fn default_export(&self) -> Option<String> {
        match self.lock().as_slice() {
            [only] => Some(only.name.clone()),
            _ => None,
        }
    }
}

/// The exports as offered to one peer: exports at their connection limit are refused.
struct PeerCatalogue<'a> {
    exports: &'a Exports,
    limits: &'a Arc<ConnectionLimits>,
    peer: Peer,
}

impl Catalogue for PeerCatalogue<'_> {
    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        self.exports.list(each);
    }

    fn look_up(&self, name: &str) -> Option<Found> {
        self.exports.look_up(name)
    }

    fn default_export(&self) -> Option<String> {
        self.exports.default_export()
    }

    fn refusal(&self, found: &Found) -> Option<&'static str> {
        let why = self.limits.refusal(self.peer, found.id.0)?;
        if let Some(device) = self.exports.device(found.id) {
            device.limit_counts.refused.fetch_add(1, Relaxed);
        }
        if let Some(count) = self.limits.admit_line() {
            tracing::warn!(export = %found.name, "{count} NBD clients were refused, the last one of {}: {why}", self.peer);
        }
        Some(why)
    }
}

/// Returns the protocol's description of a device: only what its stack guarantees.
pub(crate) fn info_of(device: &Device) -> ExportInfo {
    let can = device.abilities();
    let writable = !device.read_only();
    ExportInfo {
        size: device.size().0,
        description: device.public_description(),
        block_sizes: BlockSizes {
            minimum: device.block_size_min(),
            preferred: device.block_size_preferred(),
            maximum: PAYLOAD_MAX,
        },
        read_only: device.read_only(),
        rotational: can.rotational,
        can_flush: can.flush,
        can_fua: can.fua && writable,
        can_trim: can.discard && writable,
        can_zeroes: can.write_zeroes && writable,
        can_fast_zero: can.fast_zero && writable,
        // All connections reach the same backend, and a flush covers writes that completed on any of them.
        can_multi_conn: true,
        can_cache: true,
        can_df: true,
    }
}

/// An address that is listened on.
pub struct Listener {
    /// Its socket file is removed when this is dropped.
    listening: Mutex<Option<Listening>>,
    address: Mutex<NbdAddress>,
    exports: Arc<Exports>,
    tls: Option<Arc<Tls>>,
    closing: watch::Sender<bool>,
    limits: Arc<ConnectionLimits>,
    /// Handshakes that were dropped because there were too many.
    handshakes_dropped: Arc<AtomicU64>,
}

impl Listener {
    /// Starts to accept connections. Must be called on the control plane's runtime.
    ///
    /// # Errors
    /// The runtime cannot watch a socket.
    pub(crate) fn start(
        mut listening: Listening,
        tls: Option<Arc<Tls>>,
        host: &Arc<Host>,
        limits: Arc<ConnectionLimits>,
    ) -> std::io::Result<Arc<Listener>> {
        let sockets = std::mem::take(&mut listening.sockets)
            .into_iter()
            .map(connection::Acceptor::new)
            .collect::<std::io::Result<Vec<_>>>()?;
        let (closing, _) = watch::channel(false);
        let address = Mutex::new(listening.address.clone());
        let listening = Mutex::new(Some(listening));
        let listener = Arc::new(Listener {
            listening,
            address,
            exports: Arc::default(),
            tls,
            closing,
            limits,
            handshakes_dropped: Arc::default(),
        });
        for socket in sockets {
            tokio::spawn(connection::accept_loop(socket, listener.clone(), host.clone()));
        }
        Ok(listener)
    }

    /// The exports of this address.
    pub fn exports(&self) -> &Exports {
        &self.exports
    }

    /// URI of an export.
    pub fn uri(&self, name: &str) -> String {
        nbd_uri(&self.address(), name, self.tls_mode())
    }

    /// The address, with the port that the kernel chose for 0.
    pub fn address(&self) -> NbdAddress {
        self.address.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// If this listens on the Unix socket `from`, renames its file to `to`. Connections stay.
    pub(crate) fn rename_socket(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        let mut address = self.address.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(&*address, NbdAddress::Unix(path) if path == from) {
            return Ok(());
        }
        let mut listening = self.listening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(listening) = listening.as_mut() {
            listening.rename(to)?;
        }
        *address = NbdAddress::Unix(to.to_owned());
        Ok(())
    }

    /// Returns whether clients use TLS.
    pub fn tls_mode(&self) -> TlsMode {
        self.tls.as_ref().map_or(TlsMode::Off, |tls| tls.mode())
    }

    /// Stops accepting, drops handshakes in progress, and removes the socket file.
    pub fn close(&self) {
        self.closing.send_replace(true);
        drop(self.listening.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// The clients' limits and how often each took effect, for `show`.
    pub(crate) fn limit_facts(&self, device: &Device) -> BTreeMap<String, String> {
        let hits = device.limit_counts.named().into_iter();
        let handshakes = ("handshakes", self.handshakes_dropped.load(Relaxed));
        let hits: Vec<String> = hits
            .chain([handshakes])
            .filter(|(_, count)| *count > 0)
            .map(|(limit, count)| format!("{limit}={count}"))
            .collect();
        let mut facts = BTreeMap::from([("limits".to_owned(), self.limits.limits().to_string())]);
        if !hits.is_empty() {
            facts.insert("limit hits".to_owned(), hits.join(","));
        }
        facts
    }

    fn handshake_config(&self) -> Config {
        let tls = match self.tls_mode() {
            TlsMode::Off => server::TlsMode::Off,
            TlsMode::On => server::TlsMode::Optional,
            TlsMode::Require => server::TlsMode::Required,
        };
        Config { tls, ..Config::default() }
    }
}
