//! The host of a server process with the state that its control socket needs: claimed names in the run directory,
//! deferred removals, and the applied topology.

use crate::apply::carry_out::Applier;
use crate::listing::devices;
use crate::process;
use crate::targetcli::{self, Lio};
use engine::apply::{ApplyAnswer, ApplyRequest, TopologyText};
use engine::change::{Change, MoveRequest};
use engine::control::inflight::InFlightList;
use engine::control::sample::Sampling;
use engine::control::{BoxFuture, ControlError, Counted, DeviceInfo, HostView};
use engine::host::Host;
use engine::observe::trace::TraceOptions;
use engine::rundir::{NameClaim, RunDir};
use engine::spec::DeviceName;
use engine::stacking;
use engine::tables::{TableAnswer, TableCall};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::mpsc::Receiver;

/// Interval between checks of devices with deferred removal.
const DEFERRED_POLL: Duration = Duration::from_millis(100);

pub(crate) struct Served {
    pub(crate) host: Arc<Host>,
    pub(crate) run: RunDir,
    /// Path of the control socket.
    pub(crate) control: PathBuf,
    pub(crate) applier: Applier,
    /// LIO's tree, if this is the process that serves it. It outlives its devices.
    pub(crate) lio: Option<Lio>,
    claims: Mutex<HashMap<String, NameClaim>>,
    /// Devices to remove when their last user closes them.
    deferred: Mutex<Vec<String>>,
    /// Notified when a device is added to `deferred`.
    has_deferred: Notify,
    /// Notified when the last device is deleted.
    pub(crate) emptied: Notify,
    /// Notified when the devices are handed over to another process.
    pub(crate) left: Notify,
}

impl Served {
    pub(crate) fn new(
        host: Arc<Host>,
        run: RunDir,
        control: PathBuf,
        applier: Applier,
        claims: Vec<(DeviceName, NameClaim)>,
        lio: Option<Lio>,
    ) -> Served {
        let claims = claims.into_iter().map(|(name, claim)| (name.to_string(), claim)).collect();
        let (emptied, left, has_deferred) = (Notify::new(), Notify::new(), Notify::new());
        Served {
            host,
            run,
            control,
            applier,
            lio,
            claims: Mutex::new(claims),
            deferred: Mutex::default(),
            has_deferred,
            emptied,
            left,
        }
    }

    /// Removes deferred devices once they are unused, until the future is dropped.
    pub(crate) async fn remove_deferred(&self) {
        loop {
            let names = self.deferred.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if names.is_empty() {
                self.has_deferred.notified().await;
                continue;
            }
            for name in names {
                let device = self.host.device(&name);
                let is_used = device.as_ref().is_some_and(|device| self.host.is_used(device));
                // A device that cannot be removed yet stays deferred.
                if device.is_none() || !is_used && self.delete(&name).await.is_ok() {
                    self.deferred
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .retain(|other| *other != name);
                }
            }
            tokio::time::sleep(DEFERRED_POLL).await;
        }
    }

    /// Refuses a file that is stored on the device itself, directly or through devices of other processes.
    async fn refuse_cycle(&self, name: &str, path: &Path) -> Result<(), ControlError> {
        let all = devices(&self.run).await.map_err(|why| ControlError::Failed(why.to_string()))?;
        let infos: Vec<DeviceInfo> = all.into_iter().map(|(_, info)| info).collect();
        match stacking::path_to_device(path, name, &infos) {
            None => Ok(()),
            Some(path) => Err(ControlError::Failed(format!(
                "it would use itself, by {} (choose a file that is not on it)",
                path.join(" > ")
            ))),
        }
    }

    /// Renames a device: claims the new name first, and releases the old one after the rename.
    async fn rename(&self, name: &str, to: &str) -> Result<(), ControlError> {
        let refused = |errno: Errno, why: &dyn std::fmt::Display| ControlError::Refused {
            errno: errno.raw_os_error(),
            why: why.to_string(),
        };
        let claims = || self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        let next: DeviceName = to.parse().map_err(|why| refused(Errno::INVAL, &why))?;
        let claim = self.run.claim(&next).map_err(|why| refused(Errno::BUSY, &why))?;
        let before = claims().remove(name).ok_or(ControlError::NotFound)?;
        let renamed = match claim.rename_from(&before) {
            Ok(()) => {
                self.host.rename(name, &next, &self.run).await.map_err(|why| refused(Errno::BUSY, &why))
            }
            Err(why) => Err(refused(Errno::IO, &why)),
        };
        if renamed.is_err() {
            // Moves the link in the run directory back.
            let _ = before.rename_from(&claim);
            claims().insert(name.to_owned(), before);
            return renamed;
        }
        claims().insert(to.to_owned(), claim);
        let mut deferred = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
        deferred.iter_mut().filter(|other| *other == name).for_each(|other| to.clone_into(other));
        Ok(())
    }

    /// Releases the name of a device after a deletion, unless the device still exists.
    fn deleted(&self, name: &str) {
        // The device is removed even after a failed flush.
        if HostView::device(&*self.host, name).is_none() {
            self.claims.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        }
        self.applier.registry.forget_removed(&self.host);
        if let Some(lio) = &self.lio {
            lio.forget_removed();
        }
        self.end_if_empty();
    }

    /// Ends the process when its last device was removed, unless a topology is being applied, which may add others.
    pub(crate) fn end_if_empty(&self) {
        if self.lio.is_none() && self.host.devices().is_empty() && !self.applier.is_busy() {
            self.emptied.notify_one();
        }
    }

    /// Holds the claim of an added device's name.
    pub(crate) fn keep(&self, name: &DeviceName, claim: NameClaim) {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_string(), claim);
    }

    /// Releases all names.
    pub(crate) fn release(&self) {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl HostView for Served {
    fn devices(&self) -> Vec<DeviceInfo> {
        HostView::devices(&*self.host)
    }

    fn device(&self, name: &str) -> Option<DeviceInfo> {
        HostView::device(&*self.host, name)
    }

    fn slow_facts<'a>(&'a self, name: &'a str) -> BoxFuture<'a, BTreeMap<String, String>> {
        self.host.slow_facts(name)
    }

    fn turns(&self) -> Vec<u64> {
        self.host.turns()
    }

    fn counted(&self, name: &str) -> Option<Counted> {
        self.host.counted(name)
    }

    fn in_flight<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<InFlightList, ControlError>> {
        HostView::in_flight(&*self.host, name)
    }

    fn move_contents<'a>(
        &'a self,
        name: &'a str,
        request: MoveRequest,
    ) -> BoxFuture<'a, Result<(), ControlError>> {
        HostView::move_contents(&*self.host, name, request)
    }

    fn change<'a>(&'a self, name: &'a str, change: Change) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move {
            if let Change::File(path) = &change {
                self.refuse_cycle(name, path).await?;
            }
            let leaves = change == Change::HandOver;
            let done = HostView::change(&*self.host, name, change).await;
            if leaves && done.is_ok() {
                self.left.notify_one();
            }
            done
        })
    }

    fn trace(self: Arc<Self>, name: &str, options: TraceOptions) -> Result<Receiver<Vec<u8>>, ControlError> {
        self.host.start_trace(name, options)
    }

    fn sample(self: Arc<Self>, name: &str) -> Option<Sampling> {
        Host::sample(&self.host, name)
    }

    fn table<'a>(
        &'a self,
        name: &'a str,
        call: TableCall,
    ) -> BoxFuture<'a, Result<TableAnswer, ControlError>> {
        Box::pin(async move {
            if let TableCall::Rename { to } = &call {
                self.rename(name, to).await?;
                return HostView::table(&*self.host, to, TableCall::Info).await;
            }
            if let TableCall::Message { arguments, .. } = &call
                && arguments.iter().map(String::as_str).eq(["@cancel_deferred_remove"])
            {
                self.deferred.lock().unwrap_or_else(PoisonError::into_inner).retain(|other| other != name);
                return HostView::table(&*self.host, name, TableCall::Info).await;
            }
            let later = call == TableCall::RemoveLater;
            let answer = HostView::table(&*self.host, name, call).await?;
            if later {
                self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push(name.to_owned());
                self.has_deferred.notify_one();
            }
            Ok(answer)
        })
    }

    fn topology(&self) -> TopologyText {
        self.applier.registry.text(&self.host)
    }

    fn apply(&self, request: ApplyRequest) -> BoxFuture<'_, Result<ApplyAnswer, ControlError>> {
        Box::pin(async move {
            // A service manager reports the unit as reloading until READY=1.
            process::notify_reloading();
            let answer = self.apply_topology(&request).await;
            let status = process::serving_status(self.host.devices().len());
            process::notify(&format!("READY=1\nSTATUS={status}\n"));
            answer
        })
    }

    fn targetcli(
        self: Arc<Self>,
        call: serde_json::Value,
    ) -> BoxFuture<'static, Result<serde_json::Value, ControlError>> {
        Box::pin(targetcli::answer(self, call))
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move {
            let done = self.host.delete(name).await;
            self.deleted(name);
            done
        })
    }

    fn delete_by_force<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move {
            let done = self.host.delete_by_force(name).await;
            self.deleted(name);
            done
        })
    }
}
