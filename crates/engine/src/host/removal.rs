//! Removes devices, one by one or all at shutdown, and hands one over to another process.

use super::{Export, Exported, Handover, Host, HostError, HostErrorKind, lock};
use crate::device::Device;
use crate::device::tree::targets;
use crate::reactor::Reactor;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Time that clients have to read their last replies before they are disconnected.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Most devices that are removed in parallel at shutdown.
const REMOVALS_MAX: usize = 32;
/// First pause before the removal of a device in use is tried again at shutdown. Short, as a program that
/// probes a new device (udev, blkid) finishes soon.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(5);
/// Longest such pause; each is twice the one before.
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(200);
/// Longest time that requests in flight may take before a handover proceeds without them.
const QUIESCE_MAX: Duration = Duration::from_secs(10);
/// Interval at which the reactors are asked whether they are idle.
const IDLE_POLL: Duration = Duration::from_millis(2);

impl Host {
    /// Removes a device: closes its exports, finishes requests in flight, flushes. Clients that do not read
    /// their replies are disconnected after 10 s.
    ///
    /// # Errors
    /// There is no such device. An export refuses, and the device stays. The final flush failed, or an export
    /// could not be removed completely: then the device is gone.
    pub async fn remove_device(&self, name: &str) -> Result<(), HostError> {
        self.remove(name, false).await
    }

    /// Removes a device although clients use it; they get errors.
    ///
    /// # Errors
    /// As [`remove_device`](Host::remove_device).
    pub async fn remove_device_by_force(&self, name: &str) -> Result<(), HostError> {
        self.remove(name, true).await
    }

    async fn remove(&self, name: &str, by_force: bool) -> Result<(), HostError> {
        let device = self.device(name).ok_or_else(HostError::no_device)?;
        self.check_unused(&device)?;
        // Wait for a change in progress.
        let _lock = device.change_lock.lock().await;
        {
            // The device may have been removed, or another may use it since. From here on none can.
            let devices = lock(&self.devices);
            if !devices.iter().any(|other| Arc::ptr_eq(other, &device)) {
                return Err(HostError::no_device());
            }
            check_no_holders(&devices, &device)?;
            device.set_being_removed(true);
        }
        if let Err(refused) = self.close_exports(&device, by_force).await {
            device.set_being_removed(false);
            return Err(refused);
        }
        lock(&self.devices).retain(|other| !Arc::ptr_eq(other, &device));
        let mut exports = Vec::new();
        lock(&self.exported).retain(|entry| {
            let of_it = Arc::ptr_eq(&entry.device, &device);
            exports.extend(of_it.then(|| entry.export.clone()));
            !of_it
        });
        let flushed = self.retire(&device).await;
        if let Some(session) = device.trace() {
            session.end();
        }
        let mut result = if flushed { Ok(()) } else { Err(HostError::flush()) };
        for export in exports {
            let removed = export.closed().await;
            // A failed flush matters more.
            result = result.and(removed);
        }
        result
    }

    /// Closes one export of a device, which stays.
    ///
    /// # Errors
    /// There is no such device; the export refuses, and stays open; it was closed and left something behind.
    pub async fn remove_export(
        &self,
        device: &Arc<Device>,
        export: &Arc<dyn Export>,
    ) -> Result<(), HostError> {
        // A change in progress ends first.
        let _turn = device.change_lock.lock().await;
        let is_it = |other: &Arc<dyn Export>| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(export));
        if !self.exports_of(device).iter().any(is_it) {
            return Err(HostError::no_device());
        }
        export.close(device).await?;
        lock(&self.exported).retain(|entry| !is_it(&entry.export));
        export.closed().await
    }

    fn check_unused(&self, device: &Arc<Device>) -> Result<(), HostError> {
        check_no_holders(&lock(&self.devices), device)
    }

    /// Closes all exports of a device, or none: each is asked before the first is closed, and a suspended
    /// device is resumed only if none refuses. If one refuses after all, because a client came in between,
    /// the exports before it stay closed, and the device is not removed.
    async fn close_exports(&self, device: &Arc<Device>, by_force: bool) -> Result<(), HostError> {
        let mut exports = self.exports_of(device);
        // NBD never refuses, so it is closed last.
        exports.sort_by_key(|export| export.handover() == Handover::ClientsReconnect);
        let was_suspended = device.is_suspended();
        // A single export needs no earlier check: its `close` refuses, with more information.
        if !by_force && (exports.len() > 1 || was_suspended) {
            for export in &exports {
                export.may_close(device).await?;
            }
        }
        if was_suspended {
            // Held requests have to end, or no client could disconnect.
            self.resume(device);
        }
        for export in &exports {
            let address = export.info(device).address;
            let closed = if by_force { export.force(device) } else { export.close(device) };
            if let Err(refused) = closed.await {
                if was_suspended && let Err(error) = self.suspend(device, false).await {
                    tracing::error!(device = %device.name(), %error, "the device is not suspended any more");
                }
                return Err(refused);
            }
            tracing::debug!(device = %device.name(), address, "closed");
            let is_it =
                |entry: &&mut Exported| std::ptr::addr_eq(Arc::as_ptr(&entry.export), Arc::as_ptr(export));
            lock(&self.exported).iter_mut().filter(is_it).for_each(|entry| entry.is_closed = true);
        }
        Ok(())
    }

    /// Removes a device once its clients have let go of it, as they would lose unwritten data.
    async fn remove_when_free(&self, name: &str) -> Result<(), HostError> {
        let mut is_logged = false;
        let mut pause = RETRY_PAUSE_MIN;
        loop {
            match self.remove_device(name).await {
                Err(in_use) if in_use.is_in_use() => {
                    if in_use.kind() != HostErrorKind::HasHolders && !std::mem::replace(&mut is_logged, true)
                    {
                        tracing::warn!(
                            "{name}: {in_use}; waiting until it is not (a second signal ends at once)"
                        );
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(RETRY_PAUSE_MAX);
                }
                other => return other,
            }
        }
    }

    /// Has all reactors retire a device. Returns whether the final flushes succeeded.
    async fn retire(&self, device: &Arc<Device>) -> bool {
        let mut retired: Vec<_> = self.reactors.iter().map(|r| r.retire(device.clone())).collect();
        let all = async {
            let mut flushed = true;
            for done in &mut retired {
                flushed &= done.await.unwrap_or(false);
            }
            flushed
        };
        let mut all = std::pin::pin!(all);
        match tokio::time::timeout(REPLY_TIMEOUT, &mut all).await {
            Ok(flushed) => flushed,
            Err(_) => {
                targets::fail_waiting(&device.composition());
                self.reactors.iter().for_each(|reactor| reactor.abort(device.clone()));
                all.await
            }
        }
    }

    /// Removes every device, then stops the reactors.
    ///
    /// # Errors
    /// The devices that could not be removed, or not without loss, each with its error.
    pub async fn shut_down(self: &Arc<Self>) -> Result<(), Vec<(String, HostError)>> {
        self.shutting_down.store(true, Relaxed);
        // In parallel: removing a kernel device takes a while, most of which is waiting.
        let mut removals = tokio::task::JoinSet::new();
        let mut failed = Vec::new();
        let mut done = |ended: Option<Result<_, tokio::task::JoinError>>| match ended {
            Some(Ok((name, Err(why)))) => failed.push((name, why)),
            Some(Err(panicked)) if panicked.is_panic() => std::panic::resume_unwind(panicked.into_panic()),
            _ => {}
        };
        let mut devices = self.devices();
        // Holders are removed before the devices they use. The list keeps all devices to the end: an origin
        // that is in use longer than its snapshots copies for them until it is removed.
        let all = devices.clone();
        devices.sort_by_cached_key(|device| std::cmp::Reverse(lower_device_count(&all, device)));
        for device in devices {
            if removals.len() >= REMOVALS_MAX {
                done(removals.join_next().await);
            }
            let (host, name) = (self.clone(), device.name().to_string());
            removals.spawn(async move {
                let removed = host.remove_when_free(&name).await;
                (name, removed)
            });
        }
        while !removals.is_empty() {
            done(removals.join_next().await);
        }
        self.reactors.iter().for_each(Reactor::stop);
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// Hands a device over to another process: no request is in flight any more, and its block device waits.
    /// This process must end then.
    ///
    /// # Errors
    /// The process has other devices, or an export cannot be handed over; then the device is still served.
    pub async fn hand_over_device(&self, name: &str) -> Result<(), HostError> {
        let device = self.device(name).ok_or_else(HostError::no_device)?;
        let refused = |why: &str| Err(HostError::new(HostErrorKind::Refused, why));
        if self.devices().len() > 1 {
            return refused(
                "its process serves other devices, too, and one process is handed to one (end it, and recover each device)",
            );
        }
        let exports = self.exports_of(&device);
        let handovers: Vec<Handover> = exports.iter().map(|export| export.handover()).collect();
        if !handovers.iter().any(|handover| matches!(handover, Handover::DeviceWaits { .. })) {
            return refused(
                "it has no ublk export, and only a ublk device can be handed to another process (del it, and add it again)",
            );
        }
        if handovers.contains(&Handover::Ends) {
            return refused("it has an export that ends with this process (del it, and add it again)");
        }
        for export in exports {
            export.hand_over().await?;
        }
        if device.is_suspended() {
            // Held requests have to end.
            self.resume(&device);
        }
        let reissues = handovers.contains(&Handover::DeviceWaits { reissues: true });
        let started = Instant::now();
        while !self.is_idle().await {
            // A client that keeps sending, as on kernels that cannot quiesce, is answered by the next server.
            if reissues && started.elapsed() > QUIESCE_MAX {
                break;
            }
            tokio::time::sleep(IDLE_POLL).await;
        }
        // Completions reach the driver in the turn in which they happen, or at the beginning of the next.
        for _ in 0..2 {
            for reactor in self.reactors() {
                let _ = reactor.next_turn().await;
            }
        }
        Ok(())
    }

    /// Returns whether no request is in flight between a ublk driver and a queue. Clients on sockets are not
    /// waited for: they send their requests to the next server again.
    async fn is_idle(&self) -> bool {
        let mut idle = true;
        for reactor in self.reactors() {
            idle &= reactor.next_turn().await.unwrap_or(true);
        }
        idle
    }
}

/// Counts the devices of a list that a device uses.
fn lower_device_count(all: &[Arc<Device>], device: &Device) -> usize {
    all.iter().filter(|other| device.uses(other)).count()
}

/// Checks that no other device uses this one, or would with its inactive table.
fn check_no_holders(devices: &[Arc<Device>], device: &Arc<Device>) -> Result<(), HostError> {
    let above = devices.iter().find(|other| !Arc::ptr_eq(other, device) && other.uses(device));
    above.map_or(Ok(()), |above| Err(HostError::held_by(above.name().as_str())))
}
