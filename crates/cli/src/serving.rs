//! `serve` and `up`: open and export devices, print their addresses, serve until a signal, then drain and flush.
//!
//! One thread runs the control plane: control socket, handshakes, signals. The engine's reactor threads process I/O.

use crate::apply;
use crate::apply::carry_out::Applier;
use crate::args::{RunArgs, ServeArgs, UpArgs};
use crate::exporter::{Exporter, is_for_kernel};
use crate::failure::Failure;
use crate::holder;
use crate::inflight;
use crate::launch::Launch;
use crate::listing::run_dir;
use crate::page;
use crate::plan;
use crate::process;
use crate::progress::shown;
use crate::recover;
use crate::registry::Registry;
use crate::served::Served;
use crate::signals::{Signals, status_of};
use crate::supervise;
use crate::targetcli;
use attach::nbd::listen::{Listening, Socket};
use engine::control;
use engine::host::{Host, HostError, HostErrorKind};
use engine::rundir::{ControlSocket, NameClaim, RunDir, RunDirError};
use engine::spec::{DeviceName, ExportOptions, NbdAddress, NbdExportSpec};
use engine::topology::{ExportKind, ExportSpec, Topology};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Time limit for control requests still in flight at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// Time for the client of a hand-over to read the answer before the process exits.
const LAST_ANSWERS_TAKEN: Duration = Duration::from_millis(20);
/// Longest path of a Unix socket in bytes: sun_path holds 108 with the final 0.
const SOCKET_PATH_MAX: usize = 107;
/// A signal to a process group reaches a supervised server twice, the copy forwarded by the supervisor within this time.
const SAME_SIGNAL: Duration = Duration::from_secs(1);

/// The state of a command that serves, before its devices are open.
struct Serving {
    what: &'static str,
    run: RunDir,
    args: RunArgs,
    /// Whether a number is appended to a name that is taken.
    may_rename: bool,
    /// Sockets opened by the service manager, for exports without an address.
    inherited: Vec<Listening>,
    /// The topology file of `up`, an absolute path.
    file: Option<PathBuf>,
    /// The topology with absolute paths; `None` if the served topology has them already.
    described: Option<Topology>,
    /// Whether this process takes over a device of a previous server.
    takes_over: bool,
    /// The listening socket of the web page.
    page: Option<web::Listening>,
    /// Whether the process serves LIO's tree, and may be without devices.
    serves_lio: bool,
    /// The invocation to record for a takeover. `None` once the exporter has it.
    launch: Option<Launch>,
}

pub(crate) fn serve(args: &ServeArgs) -> Result<ExitCode, Failure> {
    // A detached process was started by `add`, which reports this process's errors as its own.
    let what = if args.run.detached { "add" } else { "serve" };
    let mut topology = plan::topology(what, args)?;
    if args.supervise && !args.run.watched {
        return supervise::supervise(what, args.run.detached);
    }
    if args.run.detached {
        process::leave_session(what)?;
    }
    let inherited = inherited_sockets(what)?;
    if !inherited.is_empty() && args.exports.has(NbdExportSpec::ROW.kind) {
        let first = &topology.exports[0];
        if let Some(options) = first.nbd_options().cloned() {
            topology.exports.push(ExportSpec { kind: ExportKind::Default(options), ..first.clone() });
        }
    }
    let page = args.page.listen(what)?;
    start(what, topology, args.run, args.name.is_none(), inherited, page, Launch::by_line(args.run.watched))
}

pub(crate) fn up(args: &UpArgs) -> Result<ExitCode, Failure> {
    if args.reload {
        return apply::reload(args);
    }
    let text = engine::topology::read(&args.file).map_err(|why| Failure::new("up", "", why))?;
    let topology = Topology::parse(&text, &args.file).map_err(|why| Failure::new("up", "", why))?;
    let launch = Launch::by_topology(&text, &apply::registered(&args.file));
    // Paths are made absolute, as other processes report them. A socket whose absolute path is too long
    // keeps the given one.
    let has_room = |export: &ExportSpec| match &export.kind {
        ExportKind::Nbd(NbdExportSpec { address: NbdAddress::Unix(path), .. }) => {
            path.as_os_str().len() <= SOCKET_PATH_MAX
        }
        _ => true,
    };
    let absolute = launch.topology().filter(|topology| topology.exports.iter().all(has_room));
    let topology = absolute.cloned().unwrap_or(topology);
    let inherited = inherited_sockets("up")?;
    if !inherited.is_empty()
        && topology.exports.iter().all(|export| !matches!(export.kind, ExportKind::Default(_)))
    {
        let why = "no export uses it (leave out nbd = … of an export)";
        return Err(Failure::new("up", "inherited socket", why));
    }
    start("up", topology, args.run, false, inherited, args.page.listen("up")?, launch)
}

pub(crate) fn start(
    what: &'static str,
    topology: Topology,
    args: RunArgs,
    may_rename: bool,
    inherited: Vec<Listening>,
    page: Option<web::Listening>,
    mut launch: Launch,
) -> Result<ExitCode, Failure> {
    // A page that could not be restored stays recorded, for the next attempt.
    launch.page = page.as_ref().map(page::kept).or(launch.page);
    let run = run_dir(what)?;
    run.create().map_err(|why| Failure::new(what, "", why))?;
    crate::log::start(args.log, args.verbose);
    process::raise_file_limit();
    if topology.exports.iter().any(|export| is_for_kernel(&export.kind)) {
        process::serve_the_kernel();
    }
    let (takes_over, described) = (launch.takes_over(), launch.topology().cloned());
    let file = launch.file().map(Path::to_owned);
    let launch = Some(launch);
    let serves_lio = false;
    let serving = Serving {
        what,
        run,
        args,
        may_rename,
        inherited,
        file,
        described,
        takes_over,
        page,
        serves_lio,
        launch,
    };
    run_to_end(what, serving, topology)
}

/// Serves LIO's tree, at first without devices.
pub(crate) fn serve_lio(what: &'static str, args: RunArgs) -> Result<ExitCode, Failure> {
    let run = run_dir(what)?;
    run.create().map_err(|why| Failure::new(what, "", why))?;
    crate::log::start(args.log, args.verbose);
    process::raise_file_limit();
    let serving = Serving {
        what,
        run,
        args,
        may_rename: false,
        inherited: Vec::new(),
        file: None,
        described: None,
        takes_over: false,
        page: None,
        serves_lio: true,
        launch: None,
    };
    run_to_end(what, serving, Topology::default())
}

fn run_to_end(what: &'static str, serving: Serving, topology: Topology) -> Result<ExitCode, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|why| Failure::new(what, "", why))?.block_on(serving.run(topology))
}

/// Takes the sockets passed by a service manager (`LISTEN_FDS`).
fn inherited_sockets(what: &str) -> Result<Vec<Listening>, Failure> {
    let mut passed = listenfd::ListenFd::from_env();
    let count = passed.len();
    let mut take = |i| match passed.take_unix_listener(i) {
        Ok(Some(listener)) => Listening::inherited(Socket::Unix(listener)),
        _ => match passed.take_tcp_listener(i)? {
            Some(listener) => Listening::inherited(Socket::Tcp(listener)),
            None => Err(io::Error::other("it was taken already")),
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
        let tree = self.serves_lio.then(|| self.claim_tree(&control)).transpose()?;
        let host =
            Host::start(&engine::topology::host_config(&topology)).map_err(|why| self.failure("", why))?;
        let inherited = std::mem::take(&mut self.inherited);
        // Only the first call of `run` finds the invocation.
        let launch = self.launch.take().unwrap_or_else(|| Launch::by_line(self.args.watched));
        let exporter = Exporter::new(&host, self.run.clone(), launch, inherited, self.args.verbose);
        let registry = Registry::new(&topology, self.file.clone(), self.page.is_some());
        let applier = Applier::new(exporter, registry);
        let mut ready = match self.bring_up(&host, &applier, &topology, &control, &claims).await {
            Ok(ready) => ready,
            // The device must keep waiting for the next attempt, so it is not removed by a shutdown.
            Err(failure) if self.takes_over => return Err(failure),
            Err(failure) => {
                // No client has sent requests yet, so errors of the shutdown lose no data.
                let _ = host.shut_down().await;
                return Err(failure);
            }
        };
        let path = control.path().to_owned();
        if let Some(claim) = &tree {
            claim.publish(control.path()).map_err(|why| self.failure(targetcli::NAME, why))?;
            ready += &self.ready_line(targetcli::NAME, "control", &control.path().display().to_string());
        }
        let lio = self.serves_lio.then(|| targetcli::Lio::new(&host));
        let served = Arc::new(Served::new(host.clone(), self.run.clone(), path, applier, claims, lio));
        let (stop, stopped) = oneshot::channel::<()>();
        let listener = control.listener().ok_or_else(|| self.failure("", "the control socket is gone"))?;
        let answers = tokio::spawn(control::serve(listener, served.clone(), async { drop(stopped.await) }));
        let watcher = tokio::spawn(engine::control::autosize::watch(host.clone(), served.clone()));
        let checker = tokio::spawn(engine::tables::paths::watch(host.clone()));
        let watchdog = tokio::spawn(process::feed_watchdog());
        let remover = served.clone();
        let remover = tokio::spawn(async move { remover.remove_deferred().await });
        let background = tokio::spawn(engine::tables::background::watch(host.clone()));
        let page = self.page.take().map(|page| page.serve(served.clone(), tokio::runtime::Handle::current()));
        let page = match page.transpose() {
            Ok(page) => page,
            // The devices are served without the page.
            Err(why) => {
                eprintln!("blockyard: {} failed: --web: {why}", self.what);
                None
            }
        };
        if let Some(page) = &page {
            ready += &self.ready_line("*", "web", page.url());
        }
        let slow = tokio::spawn(engine::control::inflight::watch(host.clone()));
        let deleted = tokio::spawn(engine::control::deleted::watch(host.clone()));
        let lister = tokio::spawn(inflight::on_signal(host.clone(), asked));
        let reported = self.report_ready(&ready, &topology);
        if reported.is_ok() {
            tokio::select! {
                _ = signals.next() => {}
                () = served.emptied.notified() => {}
                () = served.left.notified() => {
                    tokio::time::sleep(LAST_ANSWERS_TAKEN).await;
                    served.release();
                    control.remove();
                    crate::log::finish();
                    // No requests are in flight, and the devices stay for the next server.
                    std::process::exit(0);
                }
            }
        }
        watcher.abort();
        checker.abort();
        remover.abort();
        background.abort();
        drop(page);
        slow.abort();
        deleted.abort();
        let ended = self.drain(&host, &served, &control, &mut signals).await;
        lister.abort();
        watchdog.abort();
        drop(stop);
        // Clients that have not read their answers by then lose them.
        let _ = tokio::time::timeout(LAST_ANSWERS, answers).await;
        reported.and(ended)
    }

    /// Claims the names of all devices; a derived name that is taken gets a number.
    fn claim_names(&self, topology: &mut Topology) -> Result<Vec<(DeviceName, NameClaim)>, Failure> {
        let mut claims = Vec::new();
        for i in 0..topology.devices.len() {
            let wanted = topology.devices[i].name.clone();
            let mut taken: Vec<String> = Vec::new();
            let claim = loop {
                let name = wanted.unique(|name| taken.iter().any(|other| other == name));
                match self.run.claim(&name) {
                    Ok(claim) => match self.waits(&name) {
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

    /// Claims the name of LIO's tree, which only one process of a user may serve.
    fn claim_tree(&self, control: &ControlSocket) -> Result<NameClaim, Failure> {
        let name: DeviceName = targetcli::NAME.parse().map_err(|why| self.failure(targetcli::NAME, why))?;
        self.run.claim(&name).map_err(|why| {
            control.remove();
            self.failure(&name, why)
        })
    }

    /// Returns why a name cannot be used, unless this process takes its device over.
    fn waits(&self, name: &DeviceName) -> Option<String> {
        if self.takes_over { None } else { recover::waits_for_a_server(&self.run, name) }
    }

    /// Opens devices and exports; returns the ready lines.
    async fn bring_up(
        &self,
        host: &Arc<Host>,
        applier: &Applier,
        topology: &Topology,
        control: &ControlSocket,
        claims: &[(DeviceName, NameClaim)],
    ) -> Result<String, Failure> {
        for device in topology.in_order() {
            let opened = host.add_device(&engine::topology::device_config(device));
            let opened = match opened {
                Ok(opened) => opened,
                Err(why) => {
                    let why = holder::with_holder(&self.run, why.to_string()).await;
                    return Err(self.failure(&device.name, why));
                }
            };
            let described = self
                .described
                .as_ref()
                .and_then(|topology| topology.devices.iter().find(|described| described.name == device.name));
            applier.registry.add(described.unwrap_or(device), &opened);
        }
        let mut ready = String::new();
        for (number, export) in topology.exports.iter().enumerate() {
            let fail = |why: HostError| self.failure(&export.device, holder::with_listener(why.to_string()));
            let device = host.device(export.device.as_str()).ok_or_else(|| fail(HostError::no_device()))?;
            let described = self.described.as_ref().and_then(|topology| topology.exports.get(number));
            let described = described.unwrap_or(export);
            let added = applier.add_export(host, &device, &export.kind, &described.kind).await;
            for (kind, address) in added.map_err(fail)? {
                ready += &self.ready_line(export.device.as_str(), kind, &address);
            }
        }
        for (name, claim) in claims {
            claim.publish(control.path()).map_err(|why| self.failure(name, why))?;
        }
        Ok(ready)
    }

    fn ready_line(&self, name: &str, kind: &str, address: &str) -> String {
        if self.args.json {
            let pid = std::process::id();
            let line = serde_json::json!({ "name": name, "export": kind, "address": address, "pid": pid });
            format!("{line}\n")
        } else {
            format!("{name} {kind} {address}\n")
        }
    }

    /// Prints the ready lines, notifies the service manager, and detaches from the parent if asked to.
    fn report_ready(&self, ready: &str, topology: &Topology) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(ready.as_bytes()).and_then(|()| stdout.flush());
        drop(stdout);
        // A recovered device is served even if the caller of `recover` is gone: its users wait for it.
        if let Err(why) = written
            && !self.takes_over
        {
            return Err(self.failure("stdout", why));
        }
        process::notify(&format!("READY=1\nSTATUS={}\n", process::serving_status(topology.devices.len())));
        let first = topology.devices.first().map(|device| device.name.as_str());
        if self.args.detached
            && let Some(name) = first.or(self.serves_lio.then_some(targetcli::NAME))
        {
            process::leave_parent(&self.run, name, self.takes_over)
                .map_err(|why| self.failure(name, format!("{why} (its log)")))?;
        }
        Ok(())
    }

    /// Drains, flushes and removes all devices. A signal meanwhile ends the process at once.
    async fn drain(
        &self,
        host: &Arc<Host>,
        served: &Served,
        control: &ControlSocket,
        signals: &mut Signals,
    ) -> Result<ExitCode, Failure> {
        process::notify("STOPPING=1\nSTATUS=draining and flushing\n");
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
        let flush = "the last flush failed: writes since the flush before may be lost (check the backend)";
        let failures = lost.err().unwrap_or_default().into_iter().map(|(name, why)| match why {
            why if why.kind() == HostErrorKind::Flush => self.failure(name, flush),
            why => self.failure(name, why),
        });
        failures.reduce(Failure::and).map_or(Ok(ExitCode::SUCCESS), Err)
    }
}
