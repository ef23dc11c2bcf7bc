//! `serve` and `up`: bring devices up, say where they are, keep them until told to stop, and take them
//! down without losing anything.
//!
//! One thread runs the control plane: control socket, handshakes, signals. I/O is the reactors' business.

use crate::args::{RunArgs, ServeArgs, UpArgs};
use crate::attach;
use crate::choice::{self, Choice};
use crate::failure::Failure;
use crate::inflight;
use crate::listing::run_dir;
use crate::made::Made;
use crate::page;
use crate::plan;
use crate::progress::shown;
use crate::recover;
use crate::served::Served;
use crate::signals::{Signals, status_of};
use crate::supervise;
use engine::control;
use engine::device::Device;
use engine::host::{Host, HostError};
use engine::listen::{Listening, Socket};
use engine::rundir::{ControlSocket, NameClaim, RunDir, RunDirError};
use engine::spec::{DeviceName, LoopSpec, NbdAddress, TlsSpec, UblkSpec};
use engine::topology::{ExportKind, ExportSpec, NbdOptions, Topology};
use engine::ublk::{self, Record};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long answers of the control socket that are under way may take at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// How long whoever asked us to leave may take to read that we do.
const LAST_ANSWERS_TAKEN: Duration = Duration::from_millis(20);
/// A signal to a process and to the one that watches over it comes twice, at most this far apart.
const SAME_SIGNAL: Duration = Duration::from_secs(1);

/// Where a device can be reached.
struct ShownAt {
    /// As in the ready line: `nbd`.
    kind: &'static str,
    /// A URI or a path.
    address: String,
}

/// A command that serves.
struct Serving {
    what: &'static str,
    run: RunDir,
    args: RunArgs,
    /// A name that is taken may be numbered.
    may_rename: bool,
    /// Sockets that the service manager opened: exports without an address are there.
    inherited: Vec<Listening>,
    /// Where those are that are served already.
    served_on: Vec<NbdAddress>,
    /// Where a page of the devices is to be.
    page: Option<web::Listening>,
    /// What another process needs to do the same.
    made: Made,
}

pub(crate) fn serve(args: &ServeArgs) -> Result<ExitCode, Failure> {
    // A detached process was started by `add`, and its errors are shown as that.
    let what = if args.run.detached { "add" } else { "serve" };
    let mut topology = plan::topology(what, args)?;
    if args.supervise && !args.run.watched {
        return supervise::supervise(what, args.run.detached);
    }
    if args.run.detached {
        attach::leave_session(what)?;
    }
    let inherited = inherited_sockets(what)?;
    if !inherited.is_empty() && !args.nbd.is_empty() {
        let first = &topology.exports[0];
        if let Some(options) = first.nbd_options().cloned() {
            topology.exports.push(ExportSpec { kind: ExportKind::Default(options), ..first.clone() });
        }
    }
    let page = args.page.listen(what)?;
    start(what, topology, args.run, args.name.is_none(), inherited, page, Made::by_line(args.run.watched))
}

pub(crate) fn up(args: &UpArgs) -> Result<ExitCode, Failure> {
    let topology = Topology::load(&args.file).map_err(|why| Failure::new("up", "", why))?;
    let made = Made::by_topology(&args.file);
    let inherited = inherited_sockets("up")?;
    if !inherited.is_empty()
        && topology.exports.iter().all(|export| !matches!(export.kind, ExportKind::Default(_)))
    {
        let why = "nothing is to be exported there (leave out nbd = … of an export)";
        return Err(Failure::new("up", "inherited socket", why));
    }
    start("up", topology, args.run, false, inherited, args.page.listen("up")?, made)
}

pub(crate) fn start(
    what: &'static str,
    topology: Topology,
    args: RunArgs,
    may_rename: bool,
    inherited: Vec<Listening>,
    page: Option<web::Listening>,
    mut made: Made,
) -> Result<ExitCode, Failure> {
    // One that could not be brought back this time may be the next.
    made.page = page.as_ref().map(page::kept).or(made.page);
    let run = run_dir(what)?;
    run.create().map_err(|why| Failure::new(what, "", why))?;
    crate::log::start(args.log, args.verbose);
    attach::raise_file_limit();
    let is_for_kernel = |export: &ExportSpec| match export.kind {
        ExportKind::Ublk(_) | ExportKind::NbdDevice(_) | ExportKind::Loop(_) | ExportKind::Default(_) => true,
        ExportKind::Nbd { .. } | ExportKind::Fuse(_) => false,
    };
    if topology.exports.iter().any(is_for_kernel) {
        attach::serve_the_kernel();
    }
    let serving = Serving { what, run, args, may_rename, inherited, served_on: Vec::new(), page, made };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|why| Failure::new(what, "", why))?.block_on(serving.run(topology))
}

/// Sockets that a service manager opened for us (`LISTEN_FDS`).
fn inherited_sockets(what: &str) -> Result<Vec<Listening>, Failure> {
    let mut passed = listenfd::ListenFd::from_env();
    let count = passed.len();
    let mut take = |i| match passed.take_unix_listener(i) {
        Ok(Some(listener)) => Listening::inherited(Socket::Unix(listener)),
        _ => match passed.take_tcp_listener(i)? {
            Some(listener) => Listening::inherited(Socket::Tcp(listener)),
            None => Err(io::Error::other("it is gone")),
        },
    };
    let sockets: io::Result<Vec<_>> = (0..count).map(&mut take).collect();
    sockets.map_err(|why| Failure::new(what, "inherited socket", why))
}

impl Serving {
    fn failure(&self, name: impl std::fmt::Display, why: impl std::fmt::Display) -> Failure {
        Failure::new(self.what, name, why)
    }

    async fn run(mut self, mut topology: Topology) -> Result<ExitCode, Failure> {
        let mut signals = Signals::new().map_err(|why| self.failure("", why))?;
        let asked = Signals::user().map_err(|why| self.failure("", why))?;
        let mut control = self.run.control_socket().map_err(|why| self.failure("", why))?;
        let claims = self.claim_names(&mut topology)?;
        let host = Host::start(&topology.host_config()).map_err(|why| self.failure("", why))?;
        let mut ready = match self.bring_up(&host, &topology, &control, &claims).await {
            Ok(ready) => ready,
            // The device stays and waits for the next attempt; with this process its rings go.
            Err(failure) if self.made.takes_over() => return Err(failure),
            Err(failure) => {
                // Nothing was asked of the devices yet, so nothing can be lost with them.
                let _ = host.shut_down().await;
                return Err(failure);
            }
        };
        let served = Arc::new(Served::new(host.clone(), self.run.clone(), claims));
        let (stop, stopped) = oneshot::channel::<()>();
        let listener = control.listener().ok_or_else(|| self.failure("", "the control socket is gone"))?;
        let answers = tokio::spawn(control::serve(listener, served.clone(), async { drop(stopped.await) }));
        let watcher = tokio::spawn(engine::watch::watch(host.clone(), served.clone()));
        let checker = tokio::spawn(engine::paths::watch(host.clone()));
        let remover = served.clone();
        let remover = tokio::spawn(async move { remover.remove_deferred().await });
        let chores = tokio::spawn(engine::chores::watch(host.clone()));
        let page = self.page.take().map(|page| page.serve(served.clone(), tokio::runtime::Handle::current()));
        let page = match page.transpose() {
            Ok(page) => page,
            // It is shown nowhere, and goes on.
            Err(why) => {
                eprintln!("blockyard: {} failed: --web: {why}", self.what);
                None
            }
        };
        if let Some(page) = &page {
            ready += &self.ready_line("*", &ShownAt { kind: "web", address: page.url().to_owned() });
        }
        let slow = tokio::spawn(engine::slow::watch(host.clone()));
        let deleted = tokio::spawn(engine::deleted::watch(host.clone()));
        let lister = tokio::spawn(inflight::on_signal(host.clone(), asked));
        let told = self.tell_ready(&ready, &topology);
        if told.is_ok() {
            tokio::select! {
                _ = signals.next() => {}
                () = served.emptied.notified() => {}
                () = served.left.notified() => {
                    tokio::time::sleep(LAST_ANSWERS_TAKEN).await;
                    served.release();
                    control.remove();
                    crate::log::finish();
                    // Nothing is under way any more, and whatever is shown stays.
                    std::process::exit(0);
                }
            }
        }
        watcher.abort();
        checker.abort();
        remover.abort();
        chores.abort();
        drop(page);
        slow.abort();
        deleted.abort();
        let ended = self.drain(&host, &served, &control, &mut signals).await;
        lister.abort();
        drop(stop);
        // Whoever has not taken an answer by now does not want it.
        let _ = tokio::time::timeout(LAST_ANSWERS, answers).await;
        told.and(ended)
    }

    /// Takes the names of all devices; where that was not chosen by the user, another one if need be.
    fn claim_names(&self, topology: &mut Topology) -> Result<Vec<(DeviceName, NameClaim)>, Failure> {
        let mut claims = Vec::new();
        for i in 0..topology.devices.len() {
            let wanted = topology.devices[i].name.clone();
            let mut taken: Vec<String> = Vec::new();
            let claim = loop {
                let name = wanted.unique(|name| taken.iter().any(|other| other == name));
                match self.run.claim(&name) {
                    Ok(claim) => match self.waiting(&name) {
                        None => break (name, claim),
                        Some(_) if self.may_rename => taken.push(name.to_string()),
                        Some(why) => return Err(self.failure(&name, why)),
                    },
                    Err(RunDirError::Taken(name)) if self.may_rename => taken.push(name.to_string()),
                    Err(why) => return Err(self.failure(&name, why)),
                }
            };
            topology.rename(i, &claim.0);
            claims.push(claim);
        }
        Ok(claims)
    }

    /// Why a name cannot be had: its server died, and its device waits for another one. What is not there any more is
    /// forgotten.
    fn waiting(&self, name: &DeviceName) -> Option<String> {
        if self.made.takes_over() {
            return None;
        }
        let record = Record::load(&self.run, name.as_str()).ok()?;
        if ublk::waits(&record) {
            return Some(recover::waiting(&record));
        }
        // What went with its server leaves a number behind.
        let _ = ublk::clear(&self.run, &record, false);
        None
    }

    /// Opens devices and exports; the ready lines.
    async fn bring_up(
        &mut self,
        host: &Arc<Host>,
        topology: &Topology,
        control: &ControlSocket,
        claims: &[(DeviceName, NameClaim)],
    ) -> Result<String, Failure> {
        for device in topology.in_order() {
            host.add_device(&device.config()).map_err(|why| self.failure(&device.name, why))?;
        }
        let mut ready = String::new();
        for export in &topology.exports {
            for shown in self.export(host, export).await? {
                ready += &self.ready_line(export.device.as_str(), &shown);
            }
        }
        for (name, claim) in claims {
            claim.publish(control).map_err(|why| self.failure(name, why))?;
        }
        Ok(ready)
    }

    async fn export(&mut self, host: &Arc<Host>, export: &ExportSpec) -> Result<Vec<ShownAt>, Failure> {
        let shown = match host.device(export.device.as_str()) {
            Some(device) => self.show(host, &device, &export.kind).await,
            None => Err(HostError::NoDevice),
        };
        shown.map_err(|why| self.failure(&export.device, why))
    }

    async fn show(
        &mut self,
        host: &Arc<Host>,
        device: &Arc<Device>,
        kind: &ExportKind,
    ) -> Result<Vec<ShownAt>, HostError> {
        Ok(match kind {
            ExportKind::Nbd { address, options } => {
                let address = host.export_nbd(device, address, &options.name, &options.tls)?;
                vec![ShownAt { kind: "nbd", address }]
            }
            ExportKind::NbdDevice(spec) => {
                let address = host.export_nbd_device(device, spec).await?;
                vec![ShownAt { kind: "nbd-device", address }]
            }
            ExportKind::Fuse(spec) => {
                let address = host.export_fuse(device, spec)?;
                vec![ShownAt { kind: "fuse", address }]
            }
            ExportKind::Loop(spec) => {
                let file = self.run.loop_file(device.name().as_str());
                let address = host.export_loop(device, &file, spec)?;
                vec![ShownAt { kind: "loop", address }]
            }
            ExportKind::Ublk(spec) => vec![self.export_ublk(host, device, spec).await?],
            ExportKind::Default(options) => self.export_by_default(host, device, options).await?,
        })
    }

    async fn export_ublk(
        &self,
        host: &Arc<Host>,
        device: &Arc<Device>,
        spec: &UblkSpec,
    ) -> Result<ShownAt, HostError> {
        let shown = host
            .export_ublk(
                device,
                spec,
                self.made.origin(),
                self.made.record(&self.run, device.name().as_str(), &device.stack()),
            )
            .await?;
        if self.args.verbose {
            eprintln!("blockyard: {}: {}", device.name(), shown.why);
        }
        Ok(ShownAt { kind: "ublk", address: shown.path })
    }

    /// Without an address: the service manager's sockets, or one of its own.
    async fn export_by_default(
        &mut self,
        host: &Arc<Host>,
        device: &Arc<Device>,
        NbdOptions { name: export, tls }: &NbdOptions,
    ) -> Result<Vec<ShownAt>, HostError> {
        let mut shown = Vec::new();
        for address in &self.served_on {
            let address = host.export_nbd(device, address, export, tls)?;
            shown.push(ShownAt { kind: "nbd", address });
        }
        for listening in std::mem::take(&mut self.inherited) {
            self.served_on.push(listening.address.clone());
            let address = host.export_nbd_on(device, listening, export, tls)?;
            shown.push(ShownAt { kind: "nbd", address });
        }
        if !shown.is_empty() {
            return Ok(shown);
        }
        let (choice, why) =
            choice::of(host, device, export != device.name().as_str() || *tls != TlsSpec::default()).await;
        if self.args.verbose {
            eprintln!("blockyard: {}: no export was named: it gets {choice}, for {why}", device.name());
        }
        Ok(vec![match choice {
            Choice::Ublk => self.export_ublk(host, device, &UblkSpec::default()).await?,
            Choice::Loop => {
                let file = self.run.loop_file(device.name().as_str());
                let address = host.export_loop(device, &file, &LoopSpec::default())?;
                ShownAt { kind: "loop", address }
            }
            Choice::Nbd => {
                let address = NbdAddress::Unix(self.run.nbd_socket(device.name().as_str()));
                let address = host.export_nbd(device, &address, export, tls)?;
                ShownAt { kind: "nbd", address }
            }
        }])
    }

    fn ready_line(&self, name: &str, ShownAt { kind, address }: &ShownAt) -> String {
        if self.args.json {
            let pid = std::process::id();
            let line = serde_json::json!({ "name": name, "export": kind, "address": address, "pid": pid });
            format!("{line}\n")
        } else {
            format!("{name} {kind} {address}\n")
        }
    }

    /// Says where everything is, to whoever waits for it.
    fn tell_ready(&self, ready: &str, topology: &Topology) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        let told = stdout.write_all(ready.as_bytes()).and_then(|()| stdout.flush());
        drop(stdout);
        // A device that waited is served although whoever asked for that is gone: others wait for it, too.
        if let Err(why) = told
            && !self.made.takes_over()
        {
            return Err(self.failure("stdout", why));
        }
        attach::notify("READY=1\n");
        if self.args.detached
            && let Some(first) = topology.devices.first()
        {
            attach::leave_parent(&self.run, first.name.as_str(), self.made.takes_over())
                .map_err(|why| self.failure(&first.name, format!("{why} (its log)")))?;
        }
        Ok(())
    }

    /// Takes every device down. A signal meanwhile ends the process at once.
    async fn drain(
        &self,
        host: &Arc<Host>,
        served: &Served,
        control: &ControlSocket,
        signals: &mut Signals,
    ) -> Result<ExitCode, Failure> {
        attach::notify("STOPPING=1\n");
        let watched = self.args.watched;
        let mut next = async || {
            if watched {
                while tokio::time::timeout(SAME_SIGNAL, signals.next()).await.is_ok() {}
            }
            signals.next().await
        };
        let lost = tokio::select! {
            done = shown("draining", host.shut_down()) => done,
            signal = next() => {
                served.release();
                control.remove();
                crate::log::finish();
                std::process::exit(status_of(signal).into());
            }
        };
        served.release();
        let flush =
            "the last flush failed: what was written since the flush before may be lost (check the backend)";
        let failures = lost.err().unwrap_or_default().into_iter().map(|(name, why)| match why {
            HostError::Flush => self.failure(name, flush),
            why => self.failure(name, why),
        });
        failures.reduce(Failure::and).map_or(Ok(ExitCode::SUCCESS), Err)
    }
}
