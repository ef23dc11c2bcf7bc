//! Monitors the paths of multipath tables: checks, failback, log lines.
//!
//! Runs on the control plane, a few times a second while there is such a table and not at all otherwise. A
//! check reads one block of a failed path on a thread of its own, through nodes of its own on the path's
//! shared parts, so it is no request of the device. The first read that succeeds reinstates the path; after
//! each failure the pause doubles. Paths that a message failed are left alone. Programs that activate paths
//! are started and awaited here (`paths/activate.rs`).
//!
//! *Invariant:* one check of a path at a time.

mod activate;

use self::activate::Activations;
use crate::device::Device;
use crate::device::tree::{Loaded, LoadedTarget, SyncIo, Tree};
use crate::host::Host;
use crate::poll::poll_while_any;
use crate::spec::{Failback, PathSpec, StackSpec};
use backends::nbd::NbdError;
use layers::multipath::Multipath;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// State of a path.
struct Path {
    was_active: bool,
    failed_at: Instant,
    due: Instant,
    pause: Duration,
    /// Whether a check is running.
    busy: Arc<AtomicBool>,
}

/// State of the paths of one table.
struct MonitoredTable {
    shared: Weak<Multipath>,
    paths: Vec<Path>,
    activations: Activations,
    /// Time since which a better group than the current one has a path.
    better_since: Option<Instant>,
}

/// Monitors all paths of a host until the future is dropped.
pub async fn watch(host: Arc<Host>) {
    let mut monitored: Vec<MonitoredTable> = Vec::new();
    poll_while_any(&host.table_came, || {
        let tables = tables(&host);
        monitored.retain(|monitored| monitored.shared.strong_count() > 0);
        for (device, loaded, spec) in &tables {
            for target in &loaded.targets {
                let Some(shared) = target.target.paths() else { continue };
                let place = monitored.iter().position(|known| known.shared.as_ptr() == Arc::as_ptr(&shared));
                let place = place.unwrap_or_else(|| {
                    monitored.push(MonitoredTable::new(&shared, spec));
                    monitored.len() - 1
                });
                monitored[place].poll(device, target, &shared, spec);
            }
        }
        !tables.is_empty()
    })
    .await;
}

type Table = (Arc<Device>, Arc<Loaded>, PathSpec);

/// Lists the active multipath tables.
fn tables(host: &Host) -> Vec<Table> {
    let multipath = |device: Arc<Device>| {
        let composition = device.composition();
        let loaded = composition.table.clone()?;
        let StackSpec::Table(spec) = &composition.stack else { return None };
        let has = loaded.targets.iter().any(|target| target.target.paths().is_some());
        has.then_some((device, loaded, spec.paths))
    };
    host.devices().into_iter().filter_map(multipath).collect()
}

impl MonitoredTable {
    fn new(shared: &Arc<Multipath>, spec: &PathSpec) -> MonitoredTable {
        let now = Instant::now();
        let pause = spec.checker.unwrap_or_default();
        let path = |_| Path { was_active: true, failed_at: now, due: now, pause, busy: Arc::default() };
        let paths = (0..shared.config().path_count()).map(path).collect();
        if let Some(timeout) = spec.no_path_timeout {
            shared.set_no_path_timeout(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        }
        let activations = Activations::default();
        MonitoredTable { shared: Arc::downgrade(shared), paths, activations, better_since: None }
    }

    fn poll(&mut self, device: &Device, target: &LoadedTarget, shared: &Arc<Multipath>, spec: &PathSpec) {
        let now = Instant::now();
        for (number, path) in self.paths.iter_mut().enumerate() {
            let (is_active, name) = (shared.is_active(number), target.names.shown(number));
            let valid = shared.valid_paths();
            match (std::mem::replace(&mut path.was_active, is_active), is_active) {
                (true, false) => {
                    let reason = shared.path_failure(number).map(tracing::field::display);
                    tracing::warn!(device = %device.name(), path = name, reason, "a path failed; {valid} work");
                    (path.failed_at, path.pause) = (now, spec.checker.unwrap_or_default());
                    path.due = now + path.pause;
                }
                (false, true) => {
                    let down = format!("{} ms", path.failed_at.elapsed().as_millis());
                    tracing::warn!(device = %device.name(), path = name, down, "a path is back; {valid} work");
                }
                _ => {}
            }
            if spec.checker.is_some() && shared.wants_check(number) && now >= path.due {
                path.check(number, &target.devices[number], shared, spec);
            }
        }
        self.activations.start_pending(device.name().as_str(), &target.names, shared);
        self.fail_back(device, shared, spec);
    }

    /// Switches back to the first group that has a path, if failback is enabled.
    fn fail_back(&mut self, device: &Device, shared: &Multipath, spec: &PathSpec) {
        let better = match (spec.failback, shared.current(), shared.best()) {
            (Failback::After(after), Some(now), Some(best)) if best != now => Some((after, now, best)),
            _ => None,
        };
        let Some((after, current, best)) = better else {
            self.better_since = None;
            return;
        };
        let since = *self.better_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= after && shared.fail_back(current, best) {
            tracing::info!(device = %device.name(), "back to priority group {}", best + 1);
            self.better_since = None;
        }
    }
}

impl Path {
    fn check(&mut self, number: usize, tree: &Tree, shared: &Arc<Multipath>, spec: &PathSpec) {
        if self.busy.swap(true, SeqCst) {
            return;
        }
        self.due = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(spec.checker_max);
        let (busy, tree, shared) = (self.busy.clone(), tree.clone(), shared.clone());
        let work = move || {
            if is_readable(&tree) && shared.wants_check(number) {
                shared.reinstate_path(number);
            }
            busy.store(false, SeqCst);
        };
        // A thread that cannot be created now is tried again at the next poll.
        if std::thread::Builder::new().name("path-check".to_owned()).spawn(work).is_err() {
            self.busy.store(false, SeqCst);
        }
    }
}

/// Returns whether the first block can be read.
fn is_readable(path: &Tree) -> bool {
    let mut block = vec![0; path.profile().limits.logical_block_size.0 as usize];
    let read =
        SyncIo::new(path).map_err(io::Error::other).and_then(|mut scratch| scratch.read(0, &mut block));
    match read {
        Ok(()) => true,
        // The server allows one connection, which a queue has or waits for: only a request can tell whether
        // it works.
        Err(error) => is_single(&error),
    }
}

fn is_single(error: &(dyn std::error::Error + 'static)) -> bool {
    if let Some(NbdError::Single) = error.downcast_ref::<NbdError>() {
        return true;
    }
    if let Some(inner) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        return is_single(inner);
    }
    error.source().is_some_and(is_single)
}
