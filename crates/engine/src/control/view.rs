//! [`Host`] as the control API sees it.

use crate::change::limits;
use crate::change::{Change, MoveRequest};
use crate::control::inflight::InFlightList;
use crate::control::sample::Sampling;
use crate::control::{BoxFuture, ControlError, Counted, DeviceInfo, HostView, QueueInfo};
use crate::device::Device;
use crate::host::{Host, HostError, HostErrorKind};
use crate::observe::trace::TraceOptions;
use crate::spec::StackSpec;
use crate::tables::{TableAnswer, TableCall};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::mpsc::Receiver;

impl HostView for Host {
    fn devices(&self) -> Vec<DeviceInfo> {
        Host::devices(self).iter().map(|device| self.info(device)).collect()
    }

    fn device(&self, name: &str) -> Option<DeviceInfo> {
        Host::device(self, name).map(|device| self.info(&device))
    }

    fn slow_facts<'a>(&'a self, name: &'a str) -> BoxFuture<'a, BTreeMap<String, String>> {
        Box::pin(async move {
            let facts = self.partition_facts(name).await;
            facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
        })
    }

    fn turns(&self) -> Vec<u64> {
        self.reactors().iter().map(|reactor| reactor.turns()).collect()
    }

    fn counted(&self, name: &str) -> Option<Counted> {
        let device = Host::device(self, name)?;
        let now = ring::clock();
        let mut queues: Vec<_> = device.queues().iter().map(|queue| queue.stats.snapshot(now)).collect();
        // Counters of queues that are gone stay part of the device's sums.
        match queues.first_mut() {
            Some(first) => first.add(&device.past()),
            None => queues.push(device.past()),
        }
        let busy_ns = device.busy().busy_ns(now);
        let (limit_hits, timeouts) = (device.limit_counts.named().to_vec(), device.timeouts.count());
        let (nodes, labels) = (device.nodes(), device.labels());
        Some(Counted { uptime: device.uptime(), queues, busy_ns, timeouts, nodes, labels, limit_hits })
    }

    fn in_flight<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<InFlightList, ControlError>> {
        Box::pin(async move {
            let device = Host::device(self, name).ok_or(ControlError::NotFound)?;
            Ok(Host::in_flight(self, &device).await)
        })
    }

    fn change<'a>(&'a self, name: &'a str, change: Change) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move { Host::change(self, name, change).await.map_err(refusal) })
    }

    fn move_contents<'a>(
        &'a self,
        name: &'a str,
        request: MoveRequest,
    ) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move { Host::move_contents(self, name, request).await.map_err(refusal) })
    }

    fn trace(self: Arc<Self>, name: &str, options: TraceOptions) -> Result<Receiver<Vec<u8>>, ControlError> {
        self.start_trace(name, options)
    }

    fn sample(self: Arc<Self>, name: &str) -> Option<Sampling> {
        Host::sample(&self, name)
    }

    fn table<'a>(
        &'a self,
        name: &'a str,
        call: TableCall,
    ) -> BoxFuture<'a, Result<TableAnswer, ControlError>> {
        Box::pin(async move {
            Host::table(self, name, call).await.map_err(|error| match error.kind() {
                HostErrorKind::NoDevice => ControlError::NotFound,
                _ => ControlError::Refused { errno: error.errno(), why: error.to_string() },
            })
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move { self.remove_device(name).await.map_err(refusal) })
    }

    fn delete_by_force<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move { self.remove_device_by_force(name).await.map_err(refusal) })
    }
}

/// Returns the facts of a device: those of its backend, and options that act by themselves.
fn facts(device: &Device) -> BTreeMap<String, String> {
    let mut facts: BTreeMap<String, String> =
        device.describe().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    if let StackSpec::File(spec) = device.stack() {
        // With these, all names of /sys/block/loopN/loop are covered.
        for (name, flag) in [("autoclear", spec.autoclear), ("partscan", spec.partscan)] {
            facts.insert(name.to_owned(), u8::from(flag).to_string());
        }
        if spec.autosize {
            facts.insert("autosize".to_owned(), "yes".to_owned());
        }
    }
    facts.insert("scheduler".to_owned(), crate::change::scheduler::list(device));
    if let Some(files) = crate::control::deleted::describe(&device.composition().tree.deleted()) {
        facts.insert("deleted".to_owned(), files);
    }
    if let Some(slow) = device.slow.describe() {
        facts.insert("slow requests".to_owned(), slow);
    }
    facts.insert("io_timeout".to_owned(), device.timeouts.describe());
    if device.is_suspended() {
        facts.insert("suspended".to_owned(), "yes: its requests are held (blockyard resume)".to_owned());
    }
    facts
}

fn refusal(error: HostError) -> ControlError {
    match error.kind() {
        HostErrorKind::NoDevice => ControlError::NotFound,
        _ => ControlError::Failed(error.to_string()),
    }
}

impl Host {
    fn info(&self, device: &Arc<Device>) -> DeviceInfo {
        let (engine, now) = (self.engine(), ring::clock());
        let queues = device.queues().into_iter().map(|queue| QueueInfo {
            reactor: queue.reactor as u16,
            engine: engine.name.to_owned(),
            why: engine.why.clone(),
            depth: device.depth(),
            in_flight: queue.stats.snapshot(now).in_flight,
        });
        DeviceInfo {
            name: device.name().to_string(),
            stack: device.description(),
            layers: device.layers().iter().map(ToString::to_string).collect(),
            size: device.size().0,
            logical_block_size: device.limits().logical_block_size.0 as u32,
            read_only: device.read_only(),
            limits: device.limits().values().map(|(field, value)| (field.name.to_owned(), value)).collect(),
            exports: limits::with_reported_limits(device, self.exports(device)),
            backend: facts(device),
            queues: queues.collect(),
            pid: std::process::id(),
            uptime_ms: device.uptime().as_millis() as u64,
        }
    }
}
