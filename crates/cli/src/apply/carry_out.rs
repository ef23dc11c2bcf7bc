//! Executes a plan in the server process, one action at a time; each action takes effect fully or not at all.
//!
//! A failed action is undone: a device whose export fails is removed, a table that cannot be resumed is cleared. The
//! first failure ends the plan; the effects of earlier actions stay.

use crate::exporter::Exporter;
use crate::holder;
use crate::recover;
use crate::registry::Registry;
use crate::served::Served;
use engine::apply::{Action, ActionReport, ApplyAnswer, ApplyRequest, Outcome, Plan, plan};
use engine::change::Change;
use engine::control::{ControlError, HostView};
use engine::device::Device;
use engine::host::{Host, HostErrorKind};
use engine::spec::DeviceName;
use engine::tables::TableCall;
use engine::topology::{DeviceSpec, ExportKind, Topology, check_files, device_config};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

/// Adds devices and exports to this process.
pub(crate) struct Applier {
    pub(crate) exporter: Exporter,
    pub(crate) registry: Registry,
    /// Held while a topology is applied.
    turn: tokio::sync::Mutex<()>,
}

impl Applier {
    pub(crate) fn new(exporter: Exporter, registry: Registry) -> Applier {
        Applier { exporter, registry, turn: tokio::sync::Mutex::default() }
    }

    /// Whether a topology is being applied.
    pub(crate) fn is_busy(&self) -> bool {
        self.turn.try_lock().is_err()
    }

    /// Adds an export to a device and registers `described`, which may name the same files and sockets by other paths.
    /// Returns the kind and address of each export. After an error no export is left.
    pub(crate) async fn add_export(
        &self,
        host: &Host,
        device: &Arc<Device>,
        kind: &ExportKind,
        described: &ExportKind,
    ) -> Result<Vec<(&'static str, String)>, engine::host::HostError> {
        let before = host.exports_of(device).len();
        match self.exporter.export(device, kind).await {
            Ok(exported) => {
                self.registry.add_export(device, described, &exported);
                Ok(exported.into_iter().map(|one| (one.shown.kind, one.shown.address)).collect())
            }
            Err(why) => {
                for export in host.exports_of(device).split_off(before) {
                    // The export was just added and has no clients; an error here has no consequence.
                    let _ = host.remove_export(device, &export).await;
                }
                Err(why)
            }
        }
    }
}

impl Served {
    /// Plans the changes, and executes them unless the request is a dry run.
    pub(crate) async fn apply_topology(&self, request: &ApplyRequest) -> Result<ApplyAnswer, ControlError> {
        let Ok(turn) = self.applier.turn.try_lock() else {
            let why = "this process is applying another topology (try again when that has finished)";
            return Err(ControlError::Busy(why.to_owned()));
        };
        let canonical = |path: &Path| path.canonicalize().ok();
        if self.applier.registry.file().and_then(canonical) != canonical(&request.file) {
            let why = "this process was not started with this file (start another process with blockyard up)";
            return Err(ControlError::Failed(why.to_owned()));
        }
        let wanted = Topology::parse(&request.text, &request.file)
            .map_err(|why| ControlError::Failed(why.to_string()))?;
        let plan = plan(&self.applier.registry.running(&self.host), &wanted);
        let mut answer = ApplyAnswer::planned(&plan);
        answer.refused.extend(self.missing(&plan, wanted).await);
        if request.dry_run || !answer.refused.is_empty() {
            return Ok(answer);
        }
        self.carry_out(&plan, request, &mut answer).await;
        drop(turn);
        self.end_if_empty();
        Ok(answer)
    }

    async fn carry_out(&self, plan: &Plan, request: &ApplyRequest, answer: &mut ApplyAnswer) {
        // An added device may be a ublk device, which another process recovers with this text.
        self.applier.exporter.describe(&request.text, &request.file);
        let mut has_failed = false;
        for (action, report) in plan.actions.iter().zip(&mut answer.actions) {
            report.outcome = match has_failed {
                true => Outcome::NotDone,
                false => self.act(action, report).await,
            };
            has_failed |= report.outcome == Outcome::Failed;
        }
        if !has_failed {
            self.describe(request);
        }
    }

    /// Executes one action and logs the result.
    async fn act(&self, action: &Action, report: &mut ActionReport) -> Outcome {
        let done = match self.host.is_shutting_down() {
            true => Err("the process is shutting down".to_owned()),
            false => self.carry_out_one(action).await,
        };
        match done {
            Ok(addresses) => {
                tracing::info!("applied: {action}");
                report.addresses = addresses;
                Outcome::Done
            }
            Err(why) => {
                tracing::error!("not applied: {action}: {why}");
                report.why = Some(why);
                Outcome::Failed
            }
        }
    }

    async fn carry_out_one(&self, action: &Action) -> Result<Vec<String>, String> {
        let device = |name: &DeviceName| {
            let missing = || ControlError::NotFound.to_string();
            self.host.device(name.as_str()).ok_or_else(missing)
        };
        let text = |why: ControlError| why.to_string();
        let addresses = |all: Vec<(&str, String)>| {
            all.into_iter().map(|(kind, address)| format!("{kind} {address}")).collect()
        };
        match action {
            Action::Remove { device: name, .. } => {
                // A client may have connected since planning.
                if self.host.is_used(&device(name)?) {
                    return Err(
                        "a client has connected meanwhile (disconnect it, and apply again)".to_owned()
                    );
                }
                self.delete(name.as_str()).await.map_err(text)?;
                Ok(Vec::new())
            }
            Action::RemoveExport { device: name, kind, .. } => {
                let device = device(name)?;
                for export in self.applier.registry.exports(&device, kind) {
                    if export.is_used(&device) {
                        return Err(
                            "a client has connected meanwhile (disconnect it, and apply again)".to_owned()
                        );
                    }
                    self.host.remove_export(&device, &export).await.map_err(|why| why.to_string())?;
                }
                self.applier.registry.forget_export(&device, kind);
                Ok(Vec::new())
            }
            Action::Change { device: name, change } => {
                self.change(name.as_str(), change.clone()).await.map_err(text)?;
                Ok(Vec::new())
            }
            Action::Table { device: name, text: table, base } => {
                if device(name)?.is_suspended() {
                    return Err(format!("it is suspended (run: blockyard resume {name}, and apply again)"));
                }
                self.load(name.as_str(), table, base).await.map_err(text)?;
                Ok(Vec::new())
            }
            Action::Add { spec, exports } => self.add(spec, exports).await.map(addresses),
            Action::AddExport { device: name, kind } => {
                let device = device(name)?;
                let added = self.applier.add_export(&self.host, &device, kind, kind).await;
                added.map(addresses).map_err(|why| why.to_string())
            }
        }
    }

    /// Loads a table and makes it the active one.
    async fn load(&self, name: &str, text: &str, base: &Path) -> Result<(), ControlError> {
        let load = TableCall::Load { text: text.to_owned(), base: base.to_owned() };
        self.table(name, load).await?;
        let resumed = self.change(name, Change::Resume).await;
        if resumed.is_err() {
            // Clears the inactive table that was just loaded.
            let _ = self.table(name, TableCall::Clear).await;
        }
        resumed
    }

    /// Opens a device, exports it, and publishes its name in the run directory.
    pub(crate) async fn add(
        &self,
        spec: &DeviceSpec,
        exports: &[ExportKind],
    ) -> Result<Vec<(&'static str, String)>, String> {
        let name = &spec.name;
        let claim = self.run.claim(name).map_err(|why| why.to_string())?;
        if let Some(why) = recover::waits_for_a_server(&self.run, name) {
            return Err(why);
        }
        let (host, config) = (self.host.clone(), device_config(spec));
        // Opening may wait for a disk or a server.
        let opened = tokio::task::spawn_blocking(move || host.add_device(&config)).await;
        let device = match opened.map_err(|why| why.to_string())? {
            Ok(device) => device,
            Err(why) => return Err(holder::with_holder(&self.run, why.to_string()).await),
        };
        self.applier.registry.add(spec, &device);
        let mut addresses = Vec::new();
        let mut failed = None;
        for kind in exports {
            match self.applier.add_export(&self.host, &device, kind, kind).await {
                Ok(added) => addresses.extend(added),
                Err(why) => {
                    failed = Some(holder::with_listener(why.to_string()));
                    break;
                }
            }
        }
        if failed.is_none()
            && let Err(why) = claim.publish(&self.control)
        {
            failed = Some(why.to_string());
        }
        let Some(why) = failed else {
            self.keep(name, claim);
            return Ok(addresses);
        };
        if let Err(left) = self.host.remove_device(name.as_str()).await
            && left.kind() != HostErrorKind::NoDevice
        {
            tracing::error!(device = %name, error = %left, "a device whose export failed could not be removed");
        }
        self.applier.registry.forget_removed(&self.host);
        Err(why)
    }

    /// Reports why devices and exports of the plan could not be added: missing files, missing permissions.
    async fn missing(&self, plan: &Plan, wanted: Topology) -> Vec<String> {
        let is_added = |action: &&Action| matches!(action, Action::Add { .. } | Action::AddExport { .. });
        let added: HashSet<DeviceName> =
            plan.actions.iter().filter(is_added).map(|action| action.device().clone()).collect();
        let devices = wanted.devices.iter().filter(|spec| added.contains(&spec.name)).map(|spec| spec.line);
        let exports = wanted.exports.iter().filter(|export| added.contains(&export.device));
        let lines: HashSet<u32> = devices.chain(exports.map(|export| export.line)).collect();
        let problems = tokio::task::spawn_blocking(move || check_files(&wanted)).await.unwrap_or_default();
        let problems = problems.into_iter().filter(|problem| lines.contains(&problem.line));
        problems.map(|problem| format!("{}: {}", problem.key, problem.why)).collect()
    }

    /// Stores the new description of each device, also in the records that `recover` reads.
    fn describe(&self, request: &ApplyRequest) {
        // The text was parsed before, so an error is impossible.
        let Ok(topology) = Topology::parse(&request.text, &request.file) else { return };
        self.applier.registry.describe(&self.host, &topology);
        for device in self.host.devices() {
            let text = topology.text_of(&request.text, &request.file, device.name().as_str());
            for export in self.host.exports_of(&device) {
                if let Err(error) = export.topology_changed(&text, &request.file) {
                    tracing::error!(device = %device.name(), %error, "the record was not updated: recover would restore the device as before");
                }
            }
        }
    }
}
