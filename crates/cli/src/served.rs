//! The devices of this process as its control socket shows them: the host's, with the names that this
//! process holds in the run directory.

use crate::listing::devices;
use engine::change::Change;
use engine::control::{BoxFuture, ControlError, Counted, DeviceInfo, Yard};
use engine::cycle;
use engine::glance::Glance;
use engine::host::Host;
use engine::rundir::{NameClaim, RunDir};
use engine::slow::InFlightList;
use engine::spec::DeviceName;
use engine::tables::{TableAnswer, TableCall};
use engine::trace::TraceOptions;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::mpsc::Receiver;

/// How often devices that are to go are looked at.
const DEFERRED_LOOK: Duration = Duration::from_millis(100);

pub(crate) struct Served {
    host: Arc<Host>,
    run: RunDir,
    claims: Mutex<HashMap<String, NameClaim>>,
    /// Devices that are to go when nobody uses them any more.
    deferred: Mutex<Vec<String>>,
    /// Told when there is such a device.
    has_deferred: Notify,
    /// Told when the last device was deleted.
    pub(crate) emptied: Notify,
    /// Told when the devices are left to another process.
    pub(crate) left: Notify,
}

impl Served {
    pub(crate) fn new(host: Arc<Host>, run: RunDir, claims: Vec<(DeviceName, NameClaim)>) -> Served {
        let claims = claims.into_iter().map(|(name, claim)| (name.to_string(), claim)).collect();
        let (emptied, left, has_deferred) = (Notify::new(), Notify::new(), Notify::new());
        Served {
            host,
            run,
            claims: Mutex::new(claims),
            deferred: Mutex::default(),
            has_deferred,
            emptied,
            left,
        }
    }

    /// Remove devices that are to go when nobody uses them any more, until the future is dropped.
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
                // What stands in the way is looked at again.
                if device.is_none() || !is_used && self.delete(&name).await.is_ok() {
                    self.deferred
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .retain(|other| *other != name);
                }
            }
            tokio::time::sleep(DEFERRED_LOOK).await;
        }
    }

    /// A file that stands on the device itself, whoever serves what lies between, cannot be behind it.
    async fn refuse_cycle(&self, name: &str, path: &Path) -> Result<(), ControlError> {
        let all = devices(&self.run).await.map_err(|why| ControlError::Failed(why.to_string()))?;
        let infos: Vec<DeviceInfo> = all.into_iter().map(|(_, info)| info).collect();
        match cycle::way(path, name, &infos) {
            None => Ok(()),
            Some(way) => Err(ControlError::Failed(format!(
                "it would stand on itself, by {} (choose a file that is not on it)",
                way.join(" > ")
            ))),
        }
    }

    /// Takes the new name before the device has it, and gives the old one up behind that.
    async fn rename(&self, name: &str, to: &str) -> Result<(), ControlError> {
        let refused = |errno: Errno, why: &dyn std::fmt::Display| ControlError::Refused {
            errno: errno.raw_os_error(),
            why: why.to_string(),
        };
        let claims = || self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        let next: DeviceName = to.parse().map_err(|why| refused(Errno::INVAL, &why))?;
        let claim = self.run.claim(&next).map_err(|why| refused(Errno::BUSY, &why))?;
        let before = claims().remove(name).ok_or(ControlError::NotFound)?;
        let renamed = match claim.follow(&before) {
            Ok(()) => {
                self.host.rename(name, &next, &self.run).await.map_err(|why| refused(Errno::BUSY, &why))
            }
            Err(why) => Err(refused(Errno::IO, &why)),
        };
        if renamed.is_err() {
            // Where it leads from was its place a moment ago.
            let _ = before.follow(&claim);
            claims().insert(name.to_owned(), before);
            return renamed;
        }
        claims().insert(to.to_owned(), claim);
        let mut deferred = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
        deferred.iter_mut().filter(|other| *other == name).for_each(|other| to.clone_into(other));
        Ok(())
    }

    /// One device less, unless that was refused.
    fn deleted(&self, name: &str) {
        // Also after a failed flush the device is gone.
        if Yard::device(&*self.host, name).is_none() {
            self.claims.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        }
        if Yard::devices(&*self.host).is_empty() {
            self.emptied.notify_one();
        }
    }

    /// Gives up every name.
    pub(crate) fn release(&self) {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Yard for Served {
    fn devices(&self) -> Vec<DeviceInfo> {
        Yard::devices(&*self.host)
    }

    fn device(&self, name: &str) -> Option<DeviceInfo> {
        Yard::device(&*self.host, name)
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
        Yard::in_flight(&*self.host, name)
    }

    fn change<'a>(&'a self, name: &'a str, change: Change) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move {
            if let Change::File(path) = &change {
                self.refuse_cycle(name, path).await?;
            }
            let leaves = change == Change::Leave;
            let done = Yard::change(&*self.host, name, change).await;
            if leaves && done.is_ok() {
                self.left.notify_one();
            }
            done
        })
    }

    fn trace(self: Arc<Self>, name: &str, options: TraceOptions) -> Result<Receiver<Vec<u8>>, ControlError> {
        self.host.start_trace(name, options)
    }

    fn glance(self: Arc<Self>, name: &str) -> Option<Glance> {
        Host::glance(&self.host, name)
    }

    fn table<'a>(
        &'a self,
        name: &'a str,
        call: TableCall,
    ) -> BoxFuture<'a, Result<TableAnswer, ControlError>> {
        Box::pin(async move {
            if let TableCall::Rename { to } = &call {
                self.rename(name, to).await?;
                return Yard::table(&*self.host, to, TableCall::Info).await;
            }
            if let TableCall::Message { words, .. } = &call
                && words.iter().map(String::as_str).eq(["@cancel_deferred_remove"])
            {
                self.deferred.lock().unwrap_or_else(PoisonError::into_inner).retain(|other| other != name);
                return Yard::table(&*self.host, name, TableCall::Info).await;
            }
            let later = call == TableCall::RemoveLater;
            let answer = Yard::table(&*self.host, name, call).await?;
            if later {
                self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push(name.to_owned());
                self.has_deferred.notify_one();
            }
            Ok(answer)
        })
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
