//! What `show` says about the partition table on a device that has one.
//!
//! The table is read when somebody asks, through nodes of the device's own stack, on a thread for that: the
//! control plane answers also for a device whose backend hangs. A device has one such thread at most; while that
//! hangs, `show` says so and starts no other.

use crate::device::Device;
use crate::host::Host;
use crate::tree;
use backends::Fact;
use block::Features;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long an answer is waited for. A table is read in a few milliseconds from any disk.
const PATIENCE: Duration = Duration::from_millis(500);

impl Host {
    /// The facts about a device's partition table. None where there is none, where layers tell of it already, where
    /// requests are held back, and where all requests go over one connection.
    pub(crate) async fn partition_facts(&self, name: &str) -> Vec<Fact> {
        let Some(device) = self.device(name) else { return Vec::new() };
        let profile = device.profile();
        let held_back = device.is_suspended() || device.is_changing() || device.is_single();
        if held_back || profile.limits.features.has(Features::ZONED) {
            return Vec::new();
        }
        if device.describe().iter().any(|(name, _)| *name == tree::TABLE_FACT) {
            return Vec::new();
        }
        let hangs = || vec![(tree::TABLE_FACT, "not known: the device does not answer".to_owned())];
        if device.reads_table.swap(true, SeqCst) {
            return hangs();
        }
        let answer = read(device);
        match tokio::time::timeout(PATIENCE, answer).await {
            Ok(Ok(facts)) => facts,
            // There was no thread to be had, or no memory: what was asked for is told without this.
            Ok(Err(_)) => Vec::new(),
            Err(_) => hangs(),
        }
    }
}

fn read(device: Arc<Device>) -> oneshot::Receiver<Vec<Fact>> {
    let (answer, answered) = oneshot::channel();
    let ours = device.clone();
    // Not a thread of the runtime's, for which the process would wait when it ends.
    let started = std::thread::Builder::new().name("table".into()).spawn(move || {
        let form = ours.form();
        let facts = tree::table_facts(&form.tree);
        drop(form);
        ours.reads_table.store(false, SeqCst);
        // Whoever has the answer may take the device away, and with it its files.
        drop(ours);
        let _ = answer.send(facts);
    });
    if started.is_err() {
        device.reads_table.store(false, SeqCst);
    }
    answered
}
