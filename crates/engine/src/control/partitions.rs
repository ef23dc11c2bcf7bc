//! The partition table of a device, for `show`.
//!
//! The table is read on request, through nodes of the device's own stack, on a thread of its own, so the
//! control plane also answers for a device whose backend hangs. A device has at most one such thread; while
//! it hangs, `show` reports that and starts no other.

use crate::device::Device;
use crate::device::tree;
use crate::host::Host;
use backends::Fact;
use block::Features;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tokio::sync::oneshot;

/// Longest wait for the table, which takes a few milliseconds on any disk.
const READ_TIMEOUT: Duration = Duration::from_millis(500);

impl Host {
    /// Returns facts about a device's partition table: none if it has no table, if layers report it already,
    /// if requests are held, or if all requests share one connection.
    pub(crate) async fn partition_facts(&self, name: &str) -> Vec<Fact> {
        let Some(device) = self.device(name) else { return Vec::new() };
        let profile = device.profile();
        let is_held = device.is_suspended() || device.is_changing() || device.is_single();
        if is_held || profile.limits.features.contains(Features::ZONED) {
            return Vec::new();
        }
        if device.describe().iter().any(|(name, _)| *name == tree::TABLE_FACT) {
            return Vec::new();
        }
        let hangs = || vec![(tree::TABLE_FACT, "not known: the device does not answer".to_owned())];
        if device.is_reading_partitions.swap(true, SeqCst) {
            return hangs();
        }
        let answer = read(device);
        match tokio::time::timeout(READ_TIMEOUT, answer).await {
            Ok(Ok(facts)) => facts,
            // No thread or no memory: the answer goes without these facts.
            Ok(Err(_)) => Vec::new(),
            Err(_) => hangs(),
        }
    }
}

fn read(device: Arc<Device>) -> oneshot::Receiver<Vec<Fact>> {
    let (answer, answered) = oneshot::channel();
    let ours = device.clone();
    // Not a thread of the runtime, for which the process would wait when it ends.
    let started = std::thread::Builder::new().name("table".into()).spawn(move || {
        let composition = ours.composition();
        let facts = tree::table_facts(&composition.tree);
        drop(composition);
        ours.is_reading_partitions.store(false, SeqCst);
        // The receiver may remove the device, which must close its files.
        drop(ours);
        let _ = answer.send(facts);
    });
    if started.is_err() {
        device.is_reading_partitions.store(false, SeqCst);
    }
    answered
}
