//! What a process tells about its devices: [`Host`] as the control plane sees it.

use crate::change::Change;
use crate::control::{BoxFuture, ControlError, Counted, DeviceInfo, QueueInfo, Yard};
use crate::device::Device;
use crate::glance::Glance;
use crate::host::{Host, HostError};
use crate::limits;
use crate::slow::InFlightList;
use crate::spec::StackSpec;
use crate::tables::{self, TableAnswer, TableCall};
use crate::trace::TraceOptions;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::mpsc::Receiver;

impl Yard for Host {
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
        let mut queues: Vec<_> = device.lanes().iter().map(|lane| lane.stats.snapshot(now)).collect();
        // What queues that are gone have counted stays part of the device's sums.
        match queues.first_mut() {
            Some(first) => first.add(&device.past()),
            None => queues.push(device.past()),
        }
        let busy_ns = device.busy().busy_ns(now);
        let (limit_hits, timeouts) = (device.limit_counts.named().to_vec(), device.timeouts.count());
        let nodes = device.nodes();
        Some(Counted { uptime: device.uptime(), queues, busy_ns, timeouts, nodes, limit_hits })
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

    fn trace(self: Arc<Self>, name: &str, options: TraceOptions) -> Result<Receiver<Vec<u8>>, ControlError> {
        self.start_trace(name, options)
    }

    fn glance(self: Arc<Self>, name: &str) -> Option<Glance> {
        Host::glance(&self, name)
    }

    fn table<'a>(
        &'a self,
        name: &'a str,
        call: TableCall,
    ) -> BoxFuture<'a, Result<TableAnswer, ControlError>> {
        Box::pin(async move {
            Host::table(self, name, call).await.map_err(|error| match error {
                HostError::NoDevice => ControlError::NotFound,
                error => ControlError::Refused { errno: tables::errno_of(&error), why: error.to_string() },
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

/// What there is to say about what serves it: what its backend says, and what it was told to do by itself.
fn facts(device: &Device) -> BTreeMap<String, String> {
    let mut facts: BTreeMap<String, String> =
        device.describe().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    if let StackSpec::File(spec) = device.stack() {
        // With these, the names of /sys/block/loopN/loop are complete.
        for (name, flag) in [("autoclear", spec.autoclear), ("partscan", spec.partscan)] {
            facts.insert(name.to_owned(), u8::from(flag).to_string());
        }
        if spec.autosize {
            facts.insert("autosize".to_owned(), "yes".to_owned());
        }
    }
    facts.insert("scheduler".to_owned(), crate::scheduler::shown(device));
    if let Some(files) = crate::deleted::describe(&device.form().tree.deleted()) {
        facts.insert("deleted".to_owned(), files);
    }
    if let Some(slow) = device.slow.describe() {
        facts.insert("slow requests".to_owned(), slow);
    }
    facts.insert("io_timeout".to_owned(), device.timeouts.describe());
    if device.is_suspended() {
        facts.insert("suspended".to_owned(), "yes: its requests are held back (blockyard resume)".to_owned());
    }
    facts
}

fn refusal(error: HostError) -> ControlError {
    match error {
        HostError::NoDevice => ControlError::NotFound,
        other => ControlError::Failed(other.to_string()),
    }
}

impl Host {
    fn info(&self, device: &Arc<Device>) -> DeviceInfo {
        let (engine, now) = (self.engine(), ring::clock());
        let queues = device.lanes().into_iter().map(|lane| QueueInfo {
            reactor: lane.reactor as u16,
            engine: engine.name.to_owned(),
            why: engine.why.clone(),
            depth: device.depth(),
            in_flight: lane.stats.snapshot(now).in_flight,
        });
        DeviceInfo {
            name: device.name().to_string(),
            stack: device.description(),
            layers: device.layers().iter().map(ToString::to_string).collect(),
            size: device.size().0,
            logical_block_size: device.limits().logical_block_size.0 as u32,
            read_only: device.read_only(),
            limits: device.limits().values().map(|(field, value)| (field.name.to_owned(), value)).collect(),
            exports: limits::with_told(device, self.exports(device)),
            backend: facts(device),
            queues: queues.collect(),
            pid: std::process::id(),
            uptime_ms: device.uptime().as_millis() as u64,
        }
    }
}
