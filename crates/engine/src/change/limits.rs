//! Changes the queue limits of a device that is served ([ADR 14](../../../docs/adr/0014-live-change.md)), and
//! reports them to its hosts.
//!
//! The limits of a device are a `split` layer above everything else. A change replaces that layer while the
//! queues are frozen; nothing below is rebuilt. Requests that are too large are split here from then on. If
//! the host's kernel has files for limits in sysfs, they are written, so that the kernel splits requests
//! itself and its counters match; the previous values are restored when the limits are removed. All of it
//! runs on the control plane.
//!
//! *Invariant:* a client that counts in logical blocks never sees their size change.

use crate::change::blocking;
use crate::device::tree::Tree;
use crate::device::{Composition, Device};
use crate::host::{Host, HostError};
use crate::info::ExportInfo;
use crate::spec::{Bytes, LayerSpec};
pub use block::{Attribute, Features, Field, LimitOverrides, ParseLimitsError, QueueLimits, Scale, Unit};
use std::fs;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Longest wait for the kernel to accept limits: it waits until no request of the device is in flight.
const SYSFS_TIMEOUT: Duration = Duration::from_secs(5);

/// Why limits are refused.
#[derive(Debug, thiserror::Error)]
pub enum LimitsRefusal {
    /// A client or the kernel counts in the present logical blocks.
    #[error(
        "logical_block_size: {0} uses blocks of {1} (disconnect it first, or remove the device and add it again with --limits)"
    )]
    InUse(String, Bytes),
    /// The last block would be cut off.
    #[error("logical_block_size: its size {0} is not a multiple of {1}")]
    Uneven(Bytes, Bytes),
}

/// Adds to the exports what was reported to their hosts of changed limits.
pub(crate) fn with_reported_limits(device: &Device, mut exports: Vec<ExportInfo>) -> Vec<ExportInfo> {
    let reported = device.reported_limits.lock().unwrap_or_else(PoisonError::into_inner);
    for export in &mut exports {
        if let Some(text) = reported.text.get(&export.address) {
            export.details.insert("limits".to_owned(), text.clone());
        }
    }
    exports
}

/// Returns a device's tree and layers without its own limits, and those limits.
fn without_limits(
    composition: &Composition,
) -> Result<(Tree, Vec<LayerSpec>, LimitOverrides), ParseLimitsError> {
    match (composition.layers.split_last(), composition.tree.below_top()) {
        (Some((LayerSpec::Split(set), layers)), Some(tree)) => {
            Ok((tree.clone(), layers.to_vec(), set.parse()?))
        }
        _ => Ok((composition.tree.clone(), composition.layers.clone(), LimitOverrides::default())),
    }
}

impl Host {
    pub(crate) async fn change_limits(
        &self,
        device: &Arc<Device>,
        set: &str,
        reset: bool,
    ) -> Result<(), HostError> {
        let before = device.composition();
        let (tree, mut layers, was) = without_limits(&before).map_err(crate::device::DeviceError::from)?;
        let set: LimitOverrides = set.parse().map_err(crate::device::DeviceError::from)?;
        let wanted = if reset { set } else { was.then(&set) };
        let tree = if wanted.is_empty() { tree } else { tree.with_limits(wanted.clone())? };
        self.check_blocks(device, &tree).map_err(crate::change::ChangeError::from)?;
        if !wanted.is_empty() {
            layers.push(LayerSpec::Split(wanted.to_string()));
        }
        let composition =
            Composition { stack: before.stack.clone(), layers, tree, table: before.table.clone() };
        let of_device = device.clone();
        // Clients that connect during the change wait; one that connected before, since the check, knows the
        // old block size.
        let make = move || {
            let was = of_device.limits().logical_block_size;
            match was != composition.tree.profile().limits.logical_block_size && of_device.connections() > 0 {
                true => Ok(Err(LimitsRefusal::InUse("a client that connected".to_owned(), was).into())),
                false => Ok(Ok(Arc::new(composition))),
            }
        };
        let changed = self.exchange(device, make).await;
        self.finish_exchange(device, changed.is_ok());
        changed?;
        self.report_limits(device).await;
        Ok(())
    }

    /// Checks that the logical block size stays the same if a client or the kernel uses it.
    pub(super) fn check_blocks(&self, device: &Arc<Device>, tree: &Tree) -> Result<(), LimitsRefusal> {
        let (was, is) = (device.limits().logical_block_size, tree.profile().limits.logical_block_size);
        if was == is {
            return Ok(());
        }
        let uses_blocks = |export: &ExportInfo| export.connections > 0 || export.address.starts_with("/dev/");
        if let Some(export) = self.exports(device).into_iter().find(uses_blocks) {
            return Err(LimitsRefusal::InUse(export.address, was));
        }
        match device.size().is_aligned(is.0) {
            true => Ok(()),
            false => Err(LimitsRefusal::Uneven(device.size(), is)),
        }
    }

    /// Reports the present limits to hosts, as far as they accept a report.
    pub(super) async fn report_limits(&self, device: &Arc<Device>) {
        let limits = device.limits();
        for export in self.exports(device) {
            let text = match export.address.strip_prefix("/dev/") {
                Some(_) if device.is_io_suspended() => {
                    "not reported while the device is suspended: larger requests are split here".to_owned()
                }
                Some(name) => {
                    let queue = Path::new("/sys/block").join(name).join("queue");
                    let (device, limits) = (device.clone(), limits.clone());
                    let work = blocking(move || Ok(write_sysfs(&device, &queue, &limits)));
                    match tokio::time::timeout(SYSFS_TIMEOUT, work).await {
                        Ok(Ok(text)) => text,
                        _ => {
                            "the kernel has not accepted them yet: larger requests are split here".to_owned()
                        }
                    }
                }
                None if export.connections > 0 => format!(
                    "{} cannot report them: {} the block sizes from its connection",
                    export.kind,
                    if export.connections == 1 { "its client keeps" } else { "each client keeps" }
                ),
                None => "reported to clients when they connect".to_owned(),
            };
            let mut reported = device.reported_limits.lock().unwrap_or_else(PoisonError::into_inner);
            reported.text.insert(export.address, text);
        }
    }
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Writes changed limits to the files of a queue in sysfs. Returns what was written, and what was not and
/// why.
fn write_sysfs(device: &Device, queue: &Path, limits: &QueueLimits) -> String {
    let files = [
        ("max_sectors_kb", limits.max_sectors.0 >> 1),
        ("discard_max_bytes", limits.max_discard_sectors.bytes().0),
        ("rotational", limits.value("rotational").unwrap_or_default()),
    ];
    let (mut reported, mut refused) = (Vec::new(), Vec::new());
    for (name, ours) in files {
        let file = queue.join(name);
        let Some(now) = number(&file) else { continue };
        let mut record = device.reported_limits.lock().unwrap_or_else(PoisonError::into_inner);
        let (had, wrote) = record.sysfs.entry(file.clone()).or_insert((now, now));
        if now != *wrote && now != *had {
            // An administrator has set it meanwhile.
            *had = now;
        }
        let had = *had;
        drop(record);
        // A host that splits smaller on its own account keeps its value.
        let wanted = if name == "rotational" { ours } else { ours.min(had) };
        if wanted != now {
            match fs::write(&file, wanted.to_string()) {
                Ok(()) => {
                    // The kernel may round it.
                    let wrote = number(&file).unwrap_or(wanted);
                    let mut record = device.reported_limits.lock().unwrap_or_else(PoisonError::into_inner);
                    record.sysfs.insert(file, (had, wrote));
                    reported.push(format!("{name}={wanted}"));
                }
                Err(why) => refused.push(format!("{name}: {why}")),
            }
        } else if now != had {
            reported.push(format!("{name}={now}"));
        }
    }
    let mut text = match reported.is_empty() {
        true => "nothing to report to the kernel".to_owned(),
        false => format!("reported to the kernel: {}", reported.join(", ")),
    };
    if !refused.is_empty() {
        text += &format!("; not reported: {}", refused.join(", "));
    }
    text + "; requests beyond other limits are split here"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceConfig;
    use crate::host::HostConfig;

    fn config(layers: &[&str], limits: &str) -> DeviceConfig {
        DeviceConfig {
            name: "disk".parse().expect("a name"),
            stack: "null:1M".parse().expect("a stack"),
            layers: layers.iter().map(|layer| layer.parse().expect("a layer")).collect(),
            limits: limits.to_owned(),
            depth: 8,
            slow: None,
            io_timeout: None,
        }
    }

    async fn changed(host: &Host, device: &Device, set: &str, reset: bool) -> Result<Vec<String>, String> {
        let change = crate::change::Change::Limits { set: set.to_owned(), reset };
        host.change("disk", change).await.map_err(|why| why.to_string())?;
        Ok(device.layers().iter().map(ToString::to_string).collect())
    }

    #[tokio::test]
    async fn limits_are_one_split_on_top_after_any_number_of_changes() {
        let host = Host::start(&HostConfig {
            reactors: 1,
            ring: ring::RingConfig::default(),
            nbd: Default::default(),
        })
        .expect("a host");
        let device = host.add_device(&config(&["delay,read=1ms"], "")).expect("a device");
        let delay = device.layers()[0].to_string();
        let whole = device.limits();
        let layers = changed(&host, &device, "max_sectors=255", false).await.expect("set");
        assert_eq!(layers, [delay.clone(), "split,max_sectors=255".to_owned()]);
        let layers = changed(&host, &device, "max_segments=128,max_sectors_kb=64", false).await.expect("set");
        assert_eq!(layers[1..], ["split,max_segments=128,max_sectors=128"]);
        assert_eq!((device.limits().max_sectors.0, device.limits().max_segments), (128, 128));
        let refused = changed(&host, &device, "max_hw_sectors=4294967295", false).await.expect_err("refused");
        assert!(refused.contains("the device below"), "{refused}");
        assert_eq!(device.limits().max_sectors.0, 128, "nothing has changed");
        assert_eq!(changed(&host, &device, "", true).await.expect("reset"), [delay]);
        assert_eq!(device.limits(), whole);
        host.shut_down().await.expect("shut down");
    }

    #[tokio::test]
    async fn limits_set_after_a_table_was_loaded_stay_when_it_is_resumed() {
        use crate::change::Change;
        let host = Host::start(&HostConfig {
            reactors: 1,
            ring: ring::RingConfig::default(),
            nbd: Default::default(),
        })
        .expect("a host");
        let mut config = config(&["kyber"], "max_sectors=255");
        config.stack = crate::spec::StackSpec::Table("0 2048 zero".parse().expect("a table"));
        let device = host.add_device(&config).expect("a device");
        let load = |text: &str| crate::tables::TableCall::Load { text: text.to_owned(), base: "/".into() };
        host.table("disk", load("0 4096 zero")).await.expect("loaded");
        let set = [
            Change::Limits { set: "max_sectors=16".to_owned(), reset: false },
            Change::Scheduler("mq-deadline".to_owned()),
            Change::Parameter { name: "fifo_batch".to_owned(), value: "4".to_owned() },
        ];
        for change in set {
            host.change("disk", change).await.expect("set");
        }
        let layers = ["mq-deadline,fifo_batch=4", "split,max_sectors=16"];
        let shown = || device.layers().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!((shown(), device.size()), (layers.map(str::to_owned).to_vec(), Bytes(1 << 20)));
        host.change("disk", Change::Resume).await.expect("resumed");
        assert_eq!((shown(), device.size()), (layers.map(str::to_owned).to_vec(), Bytes(2 << 20)));
        assert_eq!(device.limits().max_sectors.0, 16);
        assert_eq!(crate::change::scheduler::list(&device), "none [mq-deadline] kyber");
        // A table that was loaded before a change gets the layers as they are at the resume, also if they
        // were removed.
        host.table("disk", load("0 2048 zero")).await.expect("loaded");
        assert!(changed(&host, &device, "", true).await.is_ok());
        host.change("disk", Change::Scheduler("none".to_owned())).await.expect("none");
        host.change("disk", Change::Resume).await.expect("resumed");
        assert_eq!((device.layers(), device.size()), (vec![], Bytes(1 << 20)));
        assert_eq!(crate::change::scheduler::list(&device), "[none] mq-deadline kyber");
        host.shut_down().await.expect("shut down");
    }

    #[tokio::test]
    async fn block_sizes_that_no_client_knows_may_change_but_must_divide_the_size() {
        let host = Host::start(&HostConfig {
            reactors: 1,
            ring: ring::RingConfig::default(),
            nbd: Default::default(),
        })
        .expect("a host");
        let mut odd = config(&[], "");
        odd.stack = "null:1049088".parse().expect("a stack");
        let device = host.add_device(&odd).expect("a device");
        let refused = changed(&host, &device, "logical_block_size=4096", false).await.expect_err("uneven");
        assert!(refused.contains("is not a multiple of"), "{refused}");
        changed(&host, &device, "logical_block_size=512", false).await.expect("the same");
        host.shut_down().await.expect("shut down");
    }

    #[test]
    fn kernel_limits_are_written_and_restored() {
        let queue = tempfile::tempdir().expect("a folder");
        let device = Device::open(
            &config(&[], ""),
            0,
            &crate::device::tree::OpenContext { pool: &Arc::default(), device: &|_| None, name: None },
        )
        .expect("a device");
        fs::write(queue.path().join("max_sectors_kb"), "512\n").expect("written");
        let holds = || fs::read_to_string(queue.path().join("max_sectors_kb")).expect("read");
        let mut limits = device.limits();
        "max_sectors=255".parse::<LimitOverrides>().expect("limits").apply(&mut limits).expect("set");
        let text = write_sysfs(&device, queue.path(), &limits);
        assert!(text.contains("to the kernel: max_sectors_kb=127"), "{text}");
        assert_eq!(holds(), "127");
        let text = write_sysfs(&device, queue.path(), &device.limits());
        assert!(text.contains("max_sectors_kb=512"), "{text}");
        assert_eq!(holds(), "512", "not our own 32 MiB");
        assert!(write_sysfs(&device, queue.path(), &device.limits()).contains("nothing to report"));
        // A value that an administrator sets meanwhile is restored later.
        write_sysfs(&device, queue.path(), &limits);
        fs::write(queue.path().join("max_sectors_kb"), "100\n").expect("written");
        assert!(
            write_sysfs(&device, queue.path(), &limits).contains("nothing to report"),
            "it is small enough"
        );
        let mut smaller = device.limits();
        "max_sectors=64".parse::<LimitOverrides>().expect("limits").apply(&mut smaller).expect("set");
        write_sysfs(&device, queue.path(), &smaller);
        assert_eq!(holds(), "32");
        write_sysfs(&device, queue.path(), &device.limits());
        assert_eq!(holds(), "100");
    }
}
