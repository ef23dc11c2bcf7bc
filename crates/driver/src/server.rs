//! Serves one driver: creates its exports, and shuts down on a signal.

use attach::ublk::Origin;
use attach::{Exports, UblkLife};
use backends::{CustomSpec, Driver};
use engine::host::{Host, HostConfig};
use engine::rundir::RunDir;
use engine::spec::StackSpec;
use engine::topology::{ExportKind, NbdOptions};
use spec::{DeviceName, NbdLimits, TlsSpec};
use std::fmt;
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};

/// Requests in flight on a queue, the default of `blockyard serve`.
const DEPTH: u16 = 128;

/// Why a driver cannot be served.
#[derive(Debug)]
#[non_exhaustive]
pub struct Error {
    what: String,
    why: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}

impl std::error::Error for Error {}

/// A driver with its exports and the number of threads.
#[derive(Clone)]
pub struct Server {
    name: String,
    driver: Arc<dyn Driver>,
    exports: Vec<(&'static str, String)>,
    threads: usize,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("name", &self.name).field("exports", &self.exports).finish()
    }
}

impl Server {
    /// Creates a server of a driver, without an export.
    pub fn new(name: &str, driver: impl Driver) -> Server {
        Server { name: name.to_owned(), driver: Arc::new(driver), exports: Vec::new(), threads: 1 }
    }

    /// Exports the device to NBD clients on `unix:PATH` or `tcp:HOST:PORT`.
    #[must_use]
    pub fn nbd(self, address: &str) -> Server {
        self.export("nbd", address)
    }

    /// Exports the device as a ublk device: empty for the next free number, or `N` for `/dev/ublkbN`, with the
    /// options of `--ublk`. Requires root.
    #[must_use]
    pub fn ublk(self, options: &str) -> Server {
        self.export("ublk", options)
    }

    /// Exports the device by an export of any kind. `text` is the value of its flag: see
    /// `blockyard help exports`.
    #[must_use]
    pub fn export(mut self, kind: &'static str, text: &str) -> Server {
        self.exports.push((kind, text.to_owned()));
        self
    }

    /// Sets the number of threads, which call the driver at the same time. The default is 1.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Server {
        self.threads = threads.max(1);
        self
    }

    fn failed(&self, why: impl fmt::Display) -> Error {
        Error { what: self.name.clone(), why: why.to_string() }
    }

    /// Serves until SIGINT or SIGTERM, then drains and flushes. Prints the address of each export.
    ///
    /// # Errors
    /// An export fails, or the last flush.
    pub fn run(self) -> Result<(), Error> {
        let failed = |why: std::io::Error| self.failed(why);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        runtime.block_on(async {
            let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
            let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
            let running = self.start().await?;
            for (kind, address) in running.addresses() {
                println!("{} {kind} {address}", self.name);
            }
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            running.stop().await
        })
    }

    /// Starts to serve, on the current tokio runtime, which has to stay alive.
    ///
    /// # Errors
    /// There is no export, an export fails, or the driver's size is invalid.
    pub async fn start(&self) -> Result<Running, Error> {
        let name: DeviceName = self.name.parse().map_err(|why| self.failed(why))?;
        if self.exports.is_empty() {
            return Err(self.failed("it has no export (call nbd or ublk first)"));
        }
        let options = NbdOptions { name: self.name.clone(), tls: TlsSpec::default() };
        let kinds = self
            .exports
            .iter()
            .map(|(kind, text)| ExportKind::parse(kind, text, &options).map_err(|why| self.failed(why)))
            .collect::<Result<Vec<_>, Error>>()?;
        let run = RunDir::locate().map_err(|why| self.failed(why))?;
        run.create().map_err(|why| self.failed(why))?;
        let (ring, nbd) = (ring::RingConfig::default(), NbdLimits::default());
        let config = HostConfig { reactors: self.threads, ring, nbd };
        let host = Host::start(&config).map_err(|why| self.failed(why))?;
        let exports = Exports::new(&host, run);
        let mut running = Running { host, exports, addresses: Vec::new(), name: self.name.clone() };
        match self.attach(&mut running, name, &kinds).await {
            Ok(()) => Ok(running),
            Err(why) => {
                // No client has sent requests yet.
                let _ = running.host.shut_down().await;
                Err(why)
            }
        }
    }

    async fn attach(
        &self,
        running: &mut Running,
        name: DeviceName,
        kinds: &[ExportKind],
    ) -> Result<(), Error> {
        let stack = StackSpec::Custom(CustomSpec { name: self.name.clone(), driver: self.driver.clone() });
        let config = engine::device::DeviceConfig {
            name,
            stack,
            layers: Vec::new(),
            limits: String::new(),
            depth: DEPTH,
            slow: None,
            io_timeout: None,
        };
        let device = running.host.add_device(&config).map_err(|why| self.failed(why))?;
        for kind in kinds {
            let life = || UblkLife { origin: Origin::New, keep: None };
            let shown = running.exports.export(&device, kind, life).await.map_err(|why| self.failed(why))?;
            running.addresses.push((shown.kind, shown.address));
        }
        Ok(())
    }
}

/// A driver that is being served.
pub struct Running {
    name: String,
    host: Arc<Host>,
    exports: Exports,
    addresses: Vec<(&'static str, String)>,
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("name", &self.name).field("addresses", &self.addresses).finish()
    }
}

impl Running {
    /// Returns the kind and address of each export.
    pub fn addresses(&self) -> &[(&'static str, String)] {
        &self.addresses
    }

    /// Drains the requests in flight, flushes the driver, and removes the exports.
    ///
    /// # Errors
    /// The flush fails, or an export cannot be removed.
    pub async fn stop(self) -> Result<(), Error> {
        let stopped = self.host.shut_down().await;
        drop(self.exports);
        let failures = stopped.err().unwrap_or_default().into_iter().map(|(_, why)| why.to_string());
        let failures: Vec<String> = failures.collect();
        if failures.is_empty() { Ok(()) } else { Err(Error { what: self.name, why: failures.join("; ") }) }
    }
}
