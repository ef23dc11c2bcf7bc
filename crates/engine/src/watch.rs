//! What a device does by itself: `autosize` follows its file's growth, `autoclear` takes it away when its last
//! client has gone.
//!
//! Runs on the control plane, and only in processes that have such a device: it looks a few times a second.
//! A file system tells nobody that a file grew on another host, and an event for each write of ours would cost
//! more than looking. A file that became shorter is not followed: that would take blocks away from clients.

use crate::change::Change;
use crate::control::Yard;
use crate::device::Device;
use crate::host::Host;
use crate::spec::{FileSpec, StackSpec};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// How often it looks. A device that grew is used by people and scripts, who wait for longer.
const PERIOD: Duration = Duration::from_millis(250);

fn file_spec(device: &Device) -> Option<FileSpec> {
    match device.stack() {
        StackSpec::File(spec) => Some(spec),
        _ => None,
    }
}

/// Watch the devices of a host, if any of them wants to be, until the future is dropped. `yard` deletes them.
pub async fn watch(host: Arc<Host>, yard: Arc<dyn Yard>) {
    let watched =
        |device: &Arc<Device>| file_spec(device).is_some_and(|spec| spec.autosize || spec.autoclear);
    // Devices that have had a client.
    let mut used = HashSet::new();
    if !host.devices().iter().any(watched) {
        return;
    }
    // Without an end of its own: a device is out of sight while it is asked to go, and back if it refuses.
    loop {
        tokio::time::sleep(PERIOD).await;
        for device in host.devices() {
            let Some(spec) = file_spec(&device) else { continue };
            if spec.autosize {
                follow(&host, &device).await;
            }
            if spec.autoclear {
                if host.is_used(&device) {
                    used.insert(device.number());
                } else if used.contains(&device.number())
                    && let Err(error) = yard.delete(device.name().as_str()).await
                {
                    tracing::error!(device = %device.name(), %error, "autoclear failed");
                }
            }
        }
    }
}

async fn follow(host: &Host, device: &Arc<Device>) {
    let Some(size) = host.growth(device) else { return };
    match host.change(device.name().as_str(), Change::Resize { size: None, shrink: false }).await {
        Ok(()) => tracing::info!(device = %device.name(), %size, "its file grew, and so does it"),
        Err(error) => tracing::error!(device = %device.name(), %error, "it cannot follow its file's growth"),
    }
}
