//! Looking after the paths of multipath tables: checks, going back to a better group, telling what happened.
//!
//! Runs on the control plane, a few times a second while there is such a table and not at all while there is none. A path
//! that failed is read from, one block, on a thread that may wait for it: through nodes of its own on the path's shared
//! parts, so that a check is no request of the device's. The first read that goes well puts the path into use; after
//! each that fails the pause is twice as long. A path that a message took out of use is left alone. Where paths have to be
//! activated, the programs that do so are started and awaited here (`paths/activate.rs`).
//!
//! *Invariant:* one check of a path at a time.

mod activate;

use self::activate::Activations;
use crate::device::Device;
use crate::host::Host;
use crate::looking::while_any;
use crate::spec::{Failback, PathSpec, StackSpec};
use crate::tree::{Loaded, LoadedTarget, Scratch, Tree};
use backends::nbd::NbdError;
use layers::multipath::Multipath;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// One path.
struct Path {
    was_active: bool,
    failed_at: Instant,
    due: Instant,
    pause: Duration,
    /// A check is under way.
    busy: Arc<AtomicBool>,
}

/// The paths of one table.
struct Watched {
    shared: Weak<Multipath>,
    paths: Vec<Path>,
    activations: Activations,
    /// Since when a better group than the one in use has a path.
    better_since: Option<Instant>,
}

/// Look after all paths of a host until the future is dropped.
pub async fn watch(host: Arc<Host>) {
    let mut watched: Vec<Watched> = Vec::new();
    while_any(&host.table_came, || {
        let tables = tables(&host);
        watched.retain(|watched| watched.shared.strong_count() > 0);
        for (device, loaded, spec) in &tables {
            for target in &loaded.targets {
                let Some(shared) = target.target.paths() else { continue };
                let place = watched.iter().position(|known| known.shared.as_ptr() == Arc::as_ptr(&shared));
                let place = place.unwrap_or_else(|| {
                    watched.push(Watched::new(&shared, spec));
                    watched.len() - 1
                });
                watched[place].look(device, target, &shared, spec);
            }
        }
        !tables.is_empty()
    })
    .await;
}

type Table = (Arc<Device>, Arc<Loaded>, PathSpec);

/// The multipath tables in use.
fn tables(host: &Host) -> Vec<Table> {
    let multipath = |device: Arc<Device>| {
        let form = device.form();
        let loaded = form.table.clone()?;
        let StackSpec::Table(spec) = &form.stack else { return None };
        let has = loaded.targets.iter().any(|target| target.target.paths().is_some());
        has.then_some((device, loaded, spec.paths))
    };
    host.devices().into_iter().filter_map(multipath).collect()
}

impl Watched {
    fn new(shared: &Arc<Multipath>, spec: &PathSpec) -> Watched {
        let now = Instant::now();
        let pause = spec.checker.unwrap_or_default();
        let path = |_| Path { was_active: true, failed_at: now, due: now, pause, busy: Arc::default() };
        let paths = (0..shared.config().path_count()).map(path).collect();
        if let Some(timeout) = spec.no_path_timeout {
            shared.set_no_path_timeout(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        }
        let activations = Activations::default();
        Watched { shared: Arc::downgrade(shared), paths, activations, better_since: None }
    }

    fn look(&mut self, device: &Device, target: &LoadedTarget, shared: &Arc<Multipath>, spec: &PathSpec) {
        let now = Instant::now();
        for (number, path) in self.paths.iter_mut().enumerate() {
            let (is_active, name) = (shared.is_active(number), target.names.shown(number));
            let valid = shared.valid();
            match (std::mem::replace(&mut path.was_active, is_active), is_active) {
                (true, false) => {
                    let reason = shared.path_failure(number).map(tracing::field::display);
                    tracing::warn!(device = %device.name(), path = name, reason, "a path failed; {valid} work");
                    (path.failed_at, path.pause) = (now, spec.checker.unwrap_or_default());
                    path.due = now + path.pause;
                }
                (false, true) => {
                    let away = format!("{} ms", path.failed_at.elapsed().as_millis());
                    tracing::warn!(device = %device.name(), path = name, away, "a path is back; {valid} work");
                }
                _ => {}
            }
            if spec.checker.is_some() && shared.wants_check(number) && now >= path.due {
                path.check(number, &target.devices[number], shared, spec);
            }
        }
        self.activations.look(device.name().as_str(), &target.names, shared);
        self.fail_back(device, shared, spec);
    }

    /// Go back to the first group that has a path, if that is wanted.
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
            if reads(&tree) && shared.wants_check(number) {
                shared.reinstate_path(number);
            }
            busy.store(false, SeqCst);
        };
        // A thread that cannot be made now can be made the next time.
        if std::thread::Builder::new().name("path-check".to_owned()).spawn(work).is_err() {
            self.busy.store(false, SeqCst);
        }
    }
}

/// Whether the first block can be read.
fn reads(path: &Tree) -> bool {
    let mut block = vec![0; path.profile().limits.logical_block_size.0 as usize];
    let read =
        Scratch::new(path).map_err(io::Error::other).and_then(|mut scratch| scratch.read(0, &mut block));
    match read {
        Ok(()) => true,
        // Its server takes one connection, and a queue holds or awaits that: only a request can tell.
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
