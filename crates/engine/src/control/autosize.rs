//! The loop options `autosize`, by which a device follows its file's growth, and `autoclear`, by which it is
//! removed after its last client has gone; and images of a cluster, which other clients resize and lock.
//!
//! Runs on the control plane, polls several times a second while there is such a device, and sleeps otherwise: a
//! file system does not report that a file grew on another host, and an event for each of our own writes would
//! cost more than polling. A file that became shorter is not followed, as clients would lose blocks.

use crate::change::Change;
use crate::control::HostView;
use crate::device::Device;
use crate::host::Host;
use crate::spec::{DiskFileSpec, StackSpec};
use rbd::Rbd;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Polling interval. People and scripts that use a device after it grew wait longer.
const PERIOD: Duration = Duration::from_millis(250);

fn file_spec(device: &Device) -> Option<DiskFileSpec> {
    match device.stack() {
        StackSpec::File(spec) => Some(spec),
        _ => None,
    }
}

/// Polls the devices of a host that have such an option until the future is dropped. `view` removes devices.
pub async fn watch(host: Arc<Host>, view: Arc<dyn HostView>) {
    let watched = |device: &Arc<Device>| match device.stack() {
        StackSpec::File(spec) => spec.autosize || spec.autoclear,
        StackSpec::Rbd(_) => true,
        _ => false,
    };
    // Devices whose lock is being taken over, which waits for the cluster.
    let mut locking = HashMap::new();
    let refused = Arc::<Refusals>::default();
    // Devices that have had a client.
    let mut used = HashSet::new();
    // A device disappears from the list while it is being removed, and returns if that is refused.
    loop {
        while !host.devices().iter().any(watched) {
            host.stack_came.notified().await;
        }
        tokio::time::sleep(PERIOD).await;
        for device in host.devices() {
            if matches!(device.stack(), StackSpec::Rbd(_)) {
                follow_image(&host, &device).await;
                let task = locking.get(&device.number());
                if task.is_none_or(JoinHandle::is_finished)
                    && let Some(rbd) = host.rbd_without_lock(&device)
                {
                    let (number, refused) = (device.number(), refused.clone());
                    let take = move || take_lock_over(&device, &rbd, &refused);
                    locking.insert(number, tokio::task::spawn_blocking(take));
                    continue;
                }
            }
            let Some(spec) = file_spec(&device) else { continue };
            if spec.autosize {
                grow(&host, &device).await;
            }
            if spec.autoclear {
                if host.is_used(&device) {
                    used.insert(device.number());
                } else if used.contains(&device.number())
                    && let Err(error) = view.delete(device.name().as_str()).await
                {
                    tracing::error!(device = %device.name(), %error, "autoclear failed");
                }
            }
        }
    }
}

/// Resizes a device after another client has resized its image, larger or smaller: data that was cut off is
/// lost already. The cluster reports changes of the image, so it is not queried before one.
async fn follow_image(host: &Arc<Host>, device: &Arc<Device>) {
    let (measuring, measured) = (host.clone(), device.clone());
    let changed = tokio::task::spawn_blocking(move || measuring.changed_rbd_size(&measured)).await;
    let Ok(Some(size)) = changed else { return };
    match host.change(device.name().as_str(), Change::Resize { size: None, shrink: true }).await {
        Ok(()) => {
            tracing::info!(device = %device.name(), %size, "the device was resized to its image's new size")
        }
        Err(error) => {
            tracing::error!(device = %device.name(), %error, "the device could not be resized to its image's new size")
        }
    }
}

/// Why the exclusive locks of devices, by their numbers, could not be taken over. Attempts are repeated several times a
/// second, and each reason is logged once.
type Refusals = Mutex<HashMap<usize, String>>;

/// Fences a client that has not handed the exclusive lock of the device's image over in time.
fn take_lock_over(device: &Device, rbd: &Rbd, refused: &Refusals) {
    let outcome = rbd.take_lock_over();
    let mut refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
    match outcome {
        Ok(client) => {
            refused.remove(&device.number());
            if let Some(client) = client {
                tracing::warn!(device = %device.name(), %client, "the exclusive lock was taken over: the client is blocklisted");
            }
        }
        Err(error) => {
            let why = error.to_string();
            if refused.insert(device.number(), why.clone()).is_none_or(|known| known != why) {
                tracing::error!(device = %device.name(), %error, "the exclusive lock cannot be taken over");
            }
        }
    }
}

async fn grow(host: &Host, device: &Arc<Device>) {
    let Some(size) = host.growth(device) else { return };
    match host.change(device.name().as_str(), Change::Resize { size: None, shrink: false }).await {
        Ok(()) => {
            tracing::info!(device = %device.name(), %size, "the device was resized to its file's new size")
        }
        Err(error) => {
            tracing::error!(device = %device.name(), %error, "the device could not be resized to its file's new size")
        }
    }
}
