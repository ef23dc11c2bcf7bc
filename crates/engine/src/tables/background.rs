//! Background work of targets: a mirror copies what is not in sync, for example.
//!
//! Runs on the control plane, a few times a second while a target has background work and not at all
//! otherwise. The work itself is done on a thread of its own, with nodes of its own on the shared parts of
//! the target's devices. The target's queues and its background work synchronize between them.
//!
//! *Invariant:* one thread at a time for each target.

use crate::device::tree::Tree;
use crate::device::tree::targets::TargetDisks;
use crate::host::Host;
use crate::poll::poll_while_any;
use layers::dm::background::BackgroundWork;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time after which a thread checks whether its table is still active.
const SLICE: Duration = Duration::from_millis(500);

/// The background work of a target, and whether a thread runs it.
struct TargetWork {
    work: Weak<dyn BackgroundWork>,
    busy: Arc<AtomicBool>,
}

/// Runs the background work of all targets of a host until the future is dropped.
pub async fn watch(host: Arc<Host>) {
    let mut known: Vec<TargetWork> = Vec::new();
    poll_while_any(&host.background_came, || {
        known.retain(|known| known.work.strong_count() > 0);
        let mut any = false;
        for device in host.devices() {
            let Some(loaded) = device.composition().table.clone() else { continue };
            for target in &loaded.targets {
                let Some(work) = target.target.background_work() else { continue };
                any = true;
                for notice in target.target.notices() {
                    tracing::warn!(device = %device.name(), "{}: {notice}", target.kind);
                }
                let is_this =
                    |known: &&TargetWork| std::ptr::addr_eq(known.work.as_ptr(), Arc::as_ptr(&work));
                let busy = match known.iter().find(is_this) {
                    Some(known) => known.busy.clone(),
                    None => {
                        let busy = Arc::<AtomicBool>::default();
                        known.push(TargetWork { work: Arc::downgrade(&work), busy: busy.clone() });
                        busy
                    }
                };
                if work.is_due(ring::clock()) && !busy.swap(true, SeqCst) {
                    start(work, target.devices.clone(), busy);
                }
            }
        }
        any
    })
    .await;
}

fn start(work: Arc<dyn BackgroundWork>, devices: Vec<Tree>, busy: Arc<AtomicBool>) {
    let idle = busy.clone();
    let work = move || {
        let mut below = TargetDisks::new(devices);
        let until = Instant::now() + SLICE;
        while work.is_due(ring::clock()) && Instant::now() < until {
            work.step(ring::clock(), &mut below);
        }
        busy.store(false, SeqCst);
    };
    // A thread that cannot be created now is tried again at the next poll.
    if std::thread::Builder::new().name("target-work".to_owned()).spawn(work).is_err() {
        idle.store(false, SeqCst);
    }
}
