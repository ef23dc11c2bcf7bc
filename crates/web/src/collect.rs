//! Once a second: look at all devices, keep what is new, and tell those who watch.
//!
//! Runs on the page's thread. Of every device a sample is kept, so that a page that is opened later has a past; its
//! details are made only while somebody looks at it, and where its requests go is only listened to then.

use crate::history::History;
use crate::paths;
use crate::rates::Sample;
use crate::stack;
use crate::viewers::{Viewers, event};
use engine::control::{DeviceInfo, DeviceStats, Yard};
use engine::glance::Glance;
use engine::tables::TableCall;
use hyper::body::Bytes;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How often.
pub(crate) const PERIOD: Duration = Duration::from_secs(1);
/// Requests of one device that a picture gets a second: more dots than these say no more.
const DOTS: usize = 600;

/// What answers are made from between two looks.
#[derive(Default)]
pub(crate) struct Latest {
    /// All devices, in short: as text.
    pub(crate) devices: Bytes,
    histories: HashMap<String, History>,
    /// What scrapers were told in this second, once somebody has asked, in each form.
    pub(crate) metrics: [Option<Bytes>; 2],
}

impl Latest {
    /// The past of a device.
    pub(crate) fn history(&mut self, name: &str) -> Option<Bytes> {
        self.histories.get_mut(name).map(History::answer)
    }
}

/// Of one device, what it had counted when it was last looked at.
struct Known {
    stats: DeviceStats,
    glance: Option<Glance>,
}

/// The one who looks.
pub(crate) struct Collector {
    yard: Arc<dyn Yard>,
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
    pub(crate) fn new(yard: Arc<dyn Yard>, viewers: Arc<Viewers>, latest: Arc<Mutex<Latest>>) -> Collector {
        Collector { yard, viewers, latest, known: BTreeMap::new() }
    }

    /// Until the future is dropped.
    pub(crate) async fn run(mut self) {
        let mut clock = tokio::time::interval(PERIOD);
        clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            clock.tick().await;
            self.look().await;
        }
    }

    async fn look(&mut self) {
        let (t, wants) = (now_ms(), self.viewers.wants());
        let infos = self.yard.devices();
        self.known.retain(|name, _| infos.iter().any(|info| info.name == *name));
        let mut rows = Vec::new();
        for info in &infos {
            // A device that was removed meanwhile is left out.
            let Some(counted) = self.yard.counted(&info.name) else { continue };
            let after = DeviceStats::new(&info.name, &counted);
            let known = self.known.remove(&info.name);
            let (before, glance) = match known {
                Some(known) => (known.stats, known.glance),
                None => (after.clone(), None),
            };
            let sample = Sample::between(&before, &after, t);
            rows.push(row(info, &after, &sample));
            let text = {
                let mut latest = lock(&self.latest);
                let history = latest.histories.entry(info.name.clone()).or_default();
                history.push(&sample, infos.len()).to_owned()
            };
            let watched = |device: &Option<String>| device.as_deref() == Some(&*info.name);
            if wants.iter().any(|wants| watched(&wants.device)) {
                let details = self.details(info, &before, &after, &text).await;
                self.viewers.send(&event("device", &details), |wants| watched(&wants.device));
            }
            let looked_at = wants.iter().any(|wants| wants.addresses && watched(&wants.device));
            let glance = self.addresses(info, glance, looked_at, t);
            self.known.insert(info.name.clone(), Known { stats: after, glance });
        }
        let devices = json!({ "t": t, "devices": rows }).to_string();
        self.viewers.send(&event("tick", &devices), |_| true);
        let mut latest = lock(&self.latest);
        latest.histories.retain(|name, _| self.known.contains_key(name));
        latest.devices = devices.into();
        latest.metrics = [None, None];
    }

    /// All about one device.
    async fn details(
        &self,
        info: &DeviceInfo,
        before: &DeviceStats,
        after: &DeviceStats,
        sample: &str,
    ) -> String {
        // What is made from no table has no targets.
        let status = self.yard.table(&info.name, TableCall::Status).await.unwrap_or_default();
        let details = json!({
            "name": info.name,
            "info": info,
            "stack": stack::parts(info, before, after),
            "paths": paths::paths(&status.targets, &after.layers),
            "targets": status.targets,
            "errors": after.errors,
        });
        // The sample is text already.
        let details = details.to_string();
        format!("{{\"sample\":{sample},{}", &details[1..])
    }

    /// Tell where requests of a device go, if somebody looks.
    fn addresses(
        &self,
        info: &DeviceInfo,
        glance: Option<Glance>,
        looked_at: bool,
        t: u64,
    ) -> Option<Glance> {
        if !looked_at {
            return None;
        }
        let glance = glance.or_else(|| self.yard.clone().glance(&info.name))?;
        let (seen, every) = glance.take(DOTS);
        let now = monotonic_ns();
        let dot = |seen: &engine::glance::Seen| -> Value {
            let age_ms = now.saturating_sub(seen.time_ns) / 1_000_000;
            let kind = match seen.op {
                "read" | "prefetch" => 0,
                "write" | "write-zeroes" | "zone-append" => 1,
                _ => 2,
            };
            json!([t.saturating_sub(age_ms), seen.offset, seen.len, kind])
        };
        let dots: Vec<Value> = seen.iter().map(dot).collect();
        let told = json!({ "t": t, "name": info.name, "every": every, "dots": dots }).to_string();
        let whom =
            |wants: &crate::viewers::Wants| wants.addresses && wants.device.as_deref() == Some(&*info.name);
        self.viewers.send(&event("addresses", &told), whom);
        Some(glance)
    }
}

/// A device in the list of all.
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
