//! The NBD listeners of a process. Exports of one address share a listener.

use super::listen::Listening;
use super::{ConnectionLimits, Listener, NameTaken, Tls, TlsError};
use engine::control::{BoxFuture, ExportInfo};
use engine::device::Device;
use engine::host::{Export, Host, HostError, HostErrorKind};
use engine::rundir::RunDir;
use spec::{NbdAddress, TlsSpec};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A listener that more exports may join.
struct Joinable {
    /// The address as given, where the port may be 0.
    address: NbdAddress,
    tls: TlsSpec,
    listener: Arc<Listener>,
}

/// All NBD listeners of a process, and the limits that their clients share.
pub struct Servers {
    host: Arc<Host>,
    listeners: Mutex<Vec<Joinable>>,
    limits: Arc<ConnectionLimits>,
}

impl Servers {
    /// Creates the set, without listeners.
    pub fn new(host: &Arc<Host>) -> Servers {
        let limits = Arc::new(ConnectionLimits::new(host.nbd_limits()));
        Servers { host: host.clone(), listeners: Mutex::default(), limits }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Joinable>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exports a device to NBD clients at an address. Returns its URI. Must be called on the control plane's
    /// runtime.
    ///
    /// # Errors
    /// The address, the certificates or the name are refused; nothing is left behind.
    pub fn export(
        &self,
        device: &Arc<Device>,
        address: &NbdAddress,
        name: &str,
        tls: &TlsSpec,
    ) -> Result<String, HostError> {
        Host::refuse_zones(device, "NBD")?;
        let listener = self.listener(address, tls)?;
        self.add(device, listener, name)
    }

    /// Exports a device on a socket that the service manager opened. Later calls of
    /// [`export`](Servers::export) with the socket's address add further devices to it.
    ///
    /// # Errors
    /// As [`export`](Servers::export).
    pub fn export_on(
        &self,
        device: &Arc<Device>,
        listening: Listening,
        name: &str,
        tls: &TlsSpec,
    ) -> Result<String, HostError> {
        Host::refuse_zones(device, "NBD")?;
        let address = listening.address.clone();
        let listener = self.start(&address, tls, Ok(listening))?;
        self.lock().push(Joinable { address, tls: tls.clone(), listener: listener.clone() });
        self.add(device, listener, name)
    }

    /// Returns the listener of an address, which is started if it does not exist.
    fn listener(&self, address: &NbdAddress, tls: &TlsSpec) -> Result<Arc<Listener>, HostError> {
        let mut listeners = self.lock();
        // Listeners without exports are closed already.
        listeners.retain(|known| !known.listener.exports().is_empty());
        let has_address =
            |known: &&Joinable| known.listener.address() == *address || known.address == *address;
        if let Some(known) = listeners.iter().find(has_address) {
            if known.tls != *tls {
                let why = format!(
                    "{address} is in use by an export with other TLS options (give all exports of an address the same)"
                );
                return Err(HostError::new(HostErrorKind::Refused, why));
            }
            return Ok(known.listener.clone());
        }
        let listener = self.start(address, tls, Listening::open(address))?;
        listeners.push(Joinable { address: address.clone(), tls: tls.clone(), listener: listener.clone() });
        Ok(listener)
    }

    fn start(
        &self,
        address: &NbdAddress,
        tls: &TlsSpec,
        listening: io::Result<Listening>,
    ) -> Result<Arc<Listener>, HostError> {
        let loaded = Tls::load(tls)?.map(Arc::new);
        let started = listening
            .and_then(|listening| Listener::start(listening, loaded, &self.host, self.limits.clone()));
        started.map_err(|source| listen_error(address, &source))
    }

    fn add(&self, device: &Arc<Device>, listener: Arc<Listener>, name: &str) -> Result<String, HostError> {
        if let Err(taken) = listener.exports().add(name, device.clone()) {
            if listener.exports().is_empty() {
                listener.close();
            }
            return Err(taken.into());
        }
        let uri = listener.uri(name);
        self.host.add_export(device, Arc::new(NbdExport { listener, name: name.to_owned() }));
        Ok(uri)
    }
}

/// A device as an export of a listener.
struct NbdExport {
    listener: Arc<Listener>,
    name: String,
}

impl Export for NbdExport {
    fn info(&self, device: &Device) -> ExportInfo {
        ExportInfo {
            kind: "nbd".to_owned(),
            address: self.listener.uri(&self.name),
            connections: device.connections().into(),
            counts: Default::default(),
            sessions: Default::default(),
            tls: self.listener.tls_mode().to_string(),
            details: self.listener.limit_facts(device),
        }
    }

    fn renamed(&self, run: &RunDir, from: &str, to: &str) -> Result<(), HostError> {
        let (from, to) = (run.nbd_socket(from), run.nbd_socket(to));
        self.listener
            .rename_socket(&from, &to)
            .map_err(|why| HostError::failed("its socket cannot be renamed", why))
    }

    fn close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        self.listener.exports().remove(&self.name);
        if self.listener.exports().is_empty() {
            self.listener.close();
        }
        Box::pin(async { Ok(()) })
    }
}

impl From<NameTaken> for HostError {
    fn from(error: NameTaken) -> HostError {
        HostError::caused(HostErrorKind::NameTaken, error)
    }
}

impl From<TlsError> for HostError {
    fn from(error: TlsError) -> HostError {
        HostError::caused(HostErrorKind::Failed, error)
    }
}

fn listen_error(address: &NbdAddress, source: &io::Error) -> HostError {
    let hint = match source.kind() {
        io::ErrorKind::AddrInUse => " (another server listens there: stop it or choose another address)",
        io::ErrorKind::AlreadyExists => " (remove it or choose another address)",
        io::ErrorKind::PermissionDenied => " (choose an address that you may use)",
        io::ErrorKind::NotFound => " (does its directory exist?)",
        _ => "",
    };
    HostError::new(HostErrorKind::Failed, format!("{address}: {source}{hint}"))
}
