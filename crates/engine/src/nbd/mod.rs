//! The NBD export, seen from the control plane: who listens where, and which devices are offered there.
//!
//! A [`Listener`] is one address with any number of exports. It accepts, carries each handshake to its
//! end on the control plane's runtime, and hands the connection to a reactor. It never touches data,
//! save to encrypt it for TLS connections.

mod connection;
mod crowd;
mod tls;

pub(crate) use connection::adoption;
pub(crate) use crowd::Crowd;
pub use tls::{Tls, TlsError};

use crate::device::Device;
use crate::host::Host;
use crate::listen::Listening;
use crate::spec::{NbdAddress, TlsMode, nbd_uri};
use crowd::Peer;
use proto::nbd::server::{self, Catalogue, Config, Found};
use proto::nbd::{BlockSizes, ExportId, ExportInfo};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// The largest payload we take or send in one request: what the protocol calls portable.
const PAYLOAD_MAX: u32 = 32 << 20;

/// A device under a name on a listener.
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
    /// Offer a device under a name.
    ///
    /// # Errors
    /// The name is taken here; nothing has changed.
    pub fn add(&self, name: &str, device: Arc<Device>) -> Result<(), NameTaken> {
        let mut list = self.lock();
        if list.iter().any(|export| export.name == name) {
            return Err(NameTaken(name.to_owned()));
        }
        list.push(Export { name: name.to_owned(), device });
        Ok(())
    }

    /// Offer the device no longer; connections that there are stay.
    pub fn remove(&self, device: &Arc<Device>) {
        self.lock().retain(|export| !Arc::ptr_eq(&export.device, device));
    }

    /// Whether nothing is offered.
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

/// Two exports of one listener cannot have the same name.
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

/// The exports as one peer sees them: full ones are refused to it.
struct Door<'a> {
    exports: &'a Exports,
    crowd: &'a Crowd,
    peer: Peer,
}

impl Catalogue for Door<'_> {
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
        let why = self.crowd.refusal(self.peer, found.id.0)?;
        if let Some(device) = self.exports.device(found.id) {
            device.limit_counts.refused.fetch_add(1, Relaxed);
        }
        if let Some(count) = self.crowd.say() {
            tracing::warn!(export = %found.name, "{count} NBD clients were refused, the last one of {}: {why}", self.peer);
        }
        Some(why)
    }
}

/// What the protocol may say of a device: only what its stack keeps.
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
        // All connections reach the same backend, and a flush covers what has ended on any of them.
        can_multi_conn: true,
        can_cache: true,
        can_df: true,
    }
}

/// One address that is listened on.
pub struct Listener {
    /// Its file goes when this does.
    listening: Mutex<Option<Listening>>,
    address: Mutex<NbdAddress>,
    exports: Arc<Exports>,
    tls: Option<Arc<Tls>>,
    closing: watch::Sender<bool>,
    crowd: Arc<Crowd>,
    /// Handshakes that were ended because there were too many.
    handshakes_dropped: Arc<AtomicU64>,
}

impl Listener {
    /// Start to accept connections. Must be called on the control plane's runtime.
    ///
    /// # Errors
    /// A socket that the runtime cannot watch.
    pub fn start(
        mut listening: Listening,
        tls: Option<Arc<Tls>>,
        host: &Arc<Host>,
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
            crowd: host.crowd.clone(),
            handshakes_dropped: Arc::default(),
        });
        for socket in sockets {
            tokio::spawn(connection::accept_loop(socket, listener.clone(), host.clone()));
        }
        Ok(listener)
    }

    /// What is offered here.
    pub fn exports(&self) -> &Exports {
        &self.exports
    }

    /// Where clients reach an export of that name, as a URI.
    pub fn uri(&self, name: &str) -> String {
        nbd_uri(&self.address(), name, self.tls_mode())
    }

    /// Where it listens, with the port that was given for 0.
    pub fn address(&self) -> NbdAddress {
        self.address.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// If it listens on the socket of that path, the file is called something else from now on; connections stay.
    pub(crate) fn moved(&self, from: &Path, to: &Path) -> std::io::Result<()> {
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

    /// Whether clients use TLS.
    pub fn tls_mode(&self) -> TlsMode {
        self.tls.as_ref().map_or(TlsMode::Off, |tls| tls.mode())
    }

    /// Accept nothing more, and drop handshakes that are under way. The socket's file goes.
    pub fn close(&self) {
        self.closing.send_replace(true);
        drop(self.listening.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// The limits that its clients are held to, and how often they took effect.
    pub(crate) fn limit_facts(&self, device: &Device) -> BTreeMap<String, String> {
        let hits = device.limit_counts.named().into_iter();
        let handshakes = ("handshakes", self.handshakes_dropped.load(Relaxed));
        let hits: Vec<String> = hits
            .chain([handshakes])
            .filter(|(_, count)| *count > 0)
            .map(|(limit, count)| format!("{limit}={count}"))
            .collect();
        let mut facts = BTreeMap::from([("limits".to_owned(), self.crowd.limits().to_string())]);
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
