//! Samples all devices once a second, keeps their history, and sends events to viewers.
//!
//! Runs on the page's thread. Every device has a history, so that a page that is opened later can show it.
//! Details of a device are collected, and its requests are sampled, only while a viewer shows them.

use crate::history::{History, STEP, Span};
use crate::marks::Marks;
use crate::paths;
use crate::rates::Sample;
use crate::stack;
use crate::viewers::{Viewers, event};
use engine::control::sample::Sampling;
use engine::control::{DeviceInfo, DeviceStats, HostView};
use engine::tables::TableCall;
use hyper::body::Bytes;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time between two samples.
pub(crate) const PERIOD: Duration = Duration::from_secs(1);
/// Largest number of sampled requests of one device that are sent in a second: more dots would not make a
/// chart clearer.
const DOTS: usize = 600;

/// The answers to HTTP requests, valid until the next sample.
#[derive(Default)]
pub(crate) struct Latest {
    /// JSON of the list of devices.
    pub(crate) devices: Bytes,
    histories: HashMap<String, History>,
    /// Metrics of this second in each text format; `None`: nobody has requested them yet.
    pub(crate) metrics: [Option<Bytes>; 2],
}

impl Latest {
    /// Returns the history of a device, as JSON.
    pub(crate) fn history(&mut self, name: &str, span: Span) -> Option<Bytes> {
        self.histories.get_mut(name).map(|history| history.answer(span))
    }
}

/// The state of a device at the last sample.
struct Known {
    stats: DeviceStats,
    /// The counters at the last sample of the hour's history, and the seconds since that sample.
    step: (DeviceStats, u64),
    marks: Marks,
    sampling: Option<Sampling>,
}

impl Known {
    /// Creates the state of a device that is sampled for the first time.
    fn new(stats: &DeviceStats) -> Known {
        Known { stats: stats.clone(), step: (stats.clone(), 0), marks: Marks::default(), sampling: None }
    }
}

/// The sampling task.
pub(crate) struct Collector {
    view: Arc<dyn HostView>,
    viewers: Arc<Viewers>,
    latest: Arc<Mutex<Latest>>,
    known: BTreeMap<String, Known>,
}

pub(crate) fn lock(latest: &Mutex<Latest>) -> MutexGuard<'_, Latest> {
    latest.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Collector {
    pub(crate) fn new(
        view: Arc<dyn HostView>,
        viewers: Arc<Viewers>,
        latest: Arc<Mutex<Latest>>,
    ) -> Collector {
        Collector { view, viewers, latest, known: BTreeMap::new() }
    }

    /// Runs until the future is dropped.
    pub(crate) async fn run(mut self) {
        let mut clock = tokio::time::interval(PERIOD);
        clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            clock.tick().await;
            self.sample().await;
        }
    }

    async fn sample(&mut self) {
        let (t, wants) = (now_ms(), self.viewers.wants());
        let infos = self.view.devices();
        self.known.retain(|name, _| infos.iter().any(|info| info.name == *name));
        let mut rows = Vec::new();
        for info in &infos {
            // A device that was removed meanwhile is left out.
            let Some(counted) = self.view.counted(&info.name) else { continue };
            let after = DeviceStats::new(&info.name, &counted);
            let Known { stats: before, mut step, mut marks, sampling } =
                self.known.remove(&info.name).unwrap_or_else(|| Known::new(&after));
            let sample = Sample::between(&before, &after, t);
            rows.push(row(info, &after, &sample));
            step.1 += 1;
            let text = {
                let mut latest = lock(&self.latest);
                let history = latest.histories.entry(info.name.clone()).or_default();
                if step.1 >= STEP {
                    history.push_step(&Sample::between(&step.0, &after, t), infos.len());
                    step = (after.clone(), 0);
                }
                history.push(&sample, infos.len()).to_owned()
            };
            marks.observe(info, &after, t);
            if marks.wants_paths(info) {
                let failed = self.failed_paths(&info.name, &after).await;
                marks.paths(info, failed, t);
            }
            let watched = |device: &Option<String>| device.as_deref() == Some(&*info.name);
            if wants.iter().any(|wants| watched(&wants.device)) {
                let details = self.details(info, &before, &after, &marks, &text).await;
                self.viewers.send(&event("device", &details), |wants| watched(&wants.device));
            }
            let is_watched = wants.iter().any(|wants| wants.addresses && watched(&wants.device));
            let sampling = self.addresses(info, sampling, is_watched, t);
            self.known.insert(info.name.clone(), Known { stats: after, step, marks, sampling });
        }
        let devices = json!({ "t": t, "devices": rows }).to_string();
        self.viewers.send(&event("tick", &devices), |_| true);
        let mut latest = lock(&self.latest);
        latest.histories.retain(|name, _| self.known.contains_key(name));
        latest.devices = devices.into();
        latest.metrics = [None, None];
    }

    /// Returns the details of a device as JSON.
    async fn details(
        &self,
        info: &DeviceInfo,
        before: &DeviceStats,
        after: &DeviceStats,
        marks: &Marks,
        sample: &str,
    ) -> String {
        // A device without a table has no targets.
        let status = self.view.table(&info.name, TableCall::Status).await.unwrap_or_default();
        let details = json!({
            "name": info.name,
            "info": info,
            "stack": stack::parts(info, before, after),
            "paths": paths::paths(&status.targets, &after.layers),
            "targets": status.targets,
            "marks": marks.all(),
            "errors": after.errors,
        });
        // The sample is JSON already.
        let details = details.to_string();
        format!("{{\"sample\":{sample},{}", &details[1..])
    }

    /// Returns the names of a device's failed paths.
    async fn failed_paths(&self, name: &str, stats: &DeviceStats) -> Vec<String> {
        let status = self.view.table(name, TableCall::Status).await.unwrap_or_default();
        let paths = paths::paths(&status.targets, &stats.layers);
        paths.into_iter().filter(|path| !path.status.works).map(|path| path.status.name).collect()
    }

    /// Sends the addresses of a device's sampled requests, if a viewer shows them. Returns the sampling, so
    /// that it continues.
    fn addresses(
        &self,
        info: &DeviceInfo,
        sampling: Option<Sampling>,
        is_watched: bool,
        t: u64,
    ) -> Option<Sampling> {
        if !is_watched {
            return None;
        }
        let sampling = sampling.or_else(|| self.view.clone().sample(&info.name))?;
        let (seen, every) = sampling.take(DOTS);
        let now = monotonic_ns();
        let dot = |seen: &engine::control::sample::SampledRequest| -> Value {
            let age_ms = now.saturating_sub(seen.time_ns) / 1_000_000;
            let kind = match seen.op {
                "read" | "prefetch" => 0,
                "write" | "write-zeroes" | "zone-append" => 1,
                _ => 2,
            };
            json!([t.saturating_sub(age_ms), seen.offset, seen.len, kind])
        };
        let dots: Vec<Value> = seen.iter().map(dot).collect();
        let event_data = json!({ "t": t, "name": info.name, "every": every, "dots": dots }).to_string();
        let whom =
            |wants: &crate::viewers::Wants| wants.addresses && wants.device.as_deref() == Some(&*info.name);
        self.viewers.send(&event("addresses", &event_data), whom);
        Some(sampling)
    }
}

/// Returns the row of a device in the list.
fn row(info: &DeviceInfo, stats: &DeviceStats, sample: &Sample) -> Value {
    json!({
        "name": info.name,
        "stack": info.stack,
        "layers": info.layers,
        "size": info.size,
        "ro": info.read_only,
        "suspended": info.backend.contains_key("suspended"),
        "exports": info.exports.iter().map(|export| &export.kind).collect::<Vec<_>>(),
        "clients": info.exports.iter().map(|export| export.connections).sum::<u64>(),
        "paths": info.backend.get("multipath"),
        "errors": stats.errors,
        "read": { "ios": sample.read.ios, "bytes": sample.read.bytes },
        "write": { "ios": sample.write.ios, "bytes": sample.write.bytes },
        "other": sample.other.ios,
        "p99": sample.p[2],
        "depth": sample.depth,
        "now": sample.now,
        "busy": sample.busy,
    })
}
