//! Other queue limits for a device that is served ([ADR 14](../../../docs/adr/0014-live-change.md)), and what its hosts
//! are told of them.
//!
//! Limits of a device are a `split` above everything else. A change puts another one in its place while the queues are
//! frozen; nothing below is made anew. Requests that are too large are cut here from then on, whatever hosts know. A host
//! whose kernel has files for limits in sysfs is told by those, so that it cuts requests itself and counts them as we do;
//! what it had is put back when the limits go. All runs on the control plane.
//!
//! *Invariant:* clients that count in logical blocks never meet a device with other ones.

use crate::change::off_the_runtime;
use crate::control::ExportInfo;
use crate::device::{Device, Form};
use crate::host::{Host, HostError};
use crate::spec::{Bytes, LayerSpec};
use crate::tree::Tree;
pub use block::{Attribute, Field, LimitOverrides, ParseLimitsError, QueueLimits, Scale, Unit};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// How long a kernel may take to be told: it waits until nothing of its device is under way.
const TELL_TIME: Duration = Duration::from_secs(5);

/// Why a device's limits stay as they are.
#[derive(Debug, thiserror::Error)]
pub enum LimitsRefusal {
    /// Somebody counts in them.
    #[error(
        "logical_block_size: {0} counts in blocks of {1} (disconnect it first, or serve the device anew with --limits)"
    )]
    InUse(String, Bytes),
    /// The last block would be cut.
    #[error("logical_block_size: its size of {0} is no whole number of blocks of {1}")]
    Uneven(Bytes, Bytes),
}

/// What hosts were told, by the address of the export.
#[derive(Default)]
pub(crate) struct Told {
    said: BTreeMap<String, String>,
    /// What files of sysfs held before, and what we wrote to them last.
    before: BTreeMap<PathBuf, (u64, u64)>,
}

/// With what their hosts were told of limits that changed.
pub(crate) fn with_told(device: &Device, mut exports: Vec<ExportInfo>) -> Vec<ExportInfo> {
    let told = device.told.lock().unwrap_or_else(PoisonError::into_inner);
    for export in &mut exports {
        if let Some(said) = told.said.get(&export.address) {
            export.details.insert("limits".to_owned(), said.clone());
        }
    }
    exports
}

/// Its tree without limits of its own, and those limits.
fn bare(form: &Form) -> Result<(Tree, Vec<LayerSpec>, LimitOverrides), ParseLimitsError> {
    match (form.layers.split_last(), form.tree.beneath()) {
        (Some((LayerSpec::Split(set), layers)), Some(tree)) => {
            Ok((tree.clone(), layers.to_vec(), set.parse()?))
        }
        _ => Ok((form.tree.clone(), form.layers.clone(), LimitOverrides::default())),
    }
}

impl Host {
    pub(crate) async fn change_limits(
        &self,
        device: &Arc<Device>,
        set: &str,
        reset: bool,
    ) -> Result<(), HostError> {
        let before = device.form();
        let (tree, mut layers, was) = bare(&before).map_err(crate::device::DeviceError::from)?;
        let set: LimitOverrides = set.parse().map_err(crate::device::DeviceError::from)?;
        let wanted = if reset { set } else { was.then(&set) };
        let tree = if wanted.is_empty() { tree } else { tree.held_to(wanted.clone())? };
        self.check_blocks(device, &tree).map_err(crate::change::ChangeError::from)?;
        if !wanted.is_empty() {
            layers.push(LayerSpec::Split(wanted.to_string()));
        }
        let form = Form { stack: before.stack.clone(), layers, tree, table: before.table.clone() };
        let of_device = device.clone();
        // Who connects meanwhile waits until this is over; who did since the last look knows the blocks that there were.
        let make = move || {
            let was = of_device.limits().logical_block_size;
            match was != form.tree.profile().limits.logical_block_size && of_device.connections() > 0 {
                true => Ok(Err(LimitsRefusal::InUse("a client that connected".to_owned(), was).into())),
                false => Ok(Ok(Arc::new(form))),
            }
        };
        let changed = self.exchange(device, make).await;
        self.let_go(device, changed.is_ok());
        changed?;
        self.tell_limits(device).await;
        Ok(())
    }

    /// Blocks stay as they are where somebody knows of them.
    fn check_blocks(&self, device: &Arc<Device>, tree: &Tree) -> Result<(), LimitsRefusal> {
        let (was, is) = (device.limits().logical_block_size, tree.profile().limits.logical_block_size);
        if was == is {
            return Ok(());
        }
        let knows = |export: &ExportInfo| export.connections > 0 || export.address.starts_with("/dev/");
        if let Some(export) = self.exports(device).into_iter().find(knows) {
            return Err(LimitsRefusal::InUse(export.address, was));
        }
        match device.size().is_aligned(is.0) {
            true => Ok(()),
            false => Err(LimitsRefusal::Uneven(device.size(), is)),
        }
    }

    /// Tell hosts what they can be told of the limits there are now.
    async fn tell_limits(&self, device: &Arc<Device>) {
        let limits = device.limits();
        for export in self.exports(device) {
            let said = match export.address.strip_prefix("/dev/") {
                Some(_) if device.is_held() => {
                    "not told while the device is suspended: what is too large is cut here".to_owned()
                }
                Some(name) => {
                    let queue = Path::new("/sys/block").join(name).join("queue");
                    let (device, limits) = (device.clone(), limits.clone());
                    let work = off_the_runtime(move || Ok(tell(&device, &queue, &limits)));
                    match tokio::time::timeout(TELL_TIME, work).await {
                        Ok(Ok(said)) => said,
                        _ => "the kernel has not taken them yet: what is too large is cut here".to_owned(),
                    }
                }
                None if export.connections > 0 => format!(
                    "{} has no word for them: {} go on with the block sizes that they were told of",
                    export.kind,
                    if export.connections == 1 { "its client will" } else { "its clients" }
                ),
                None => "told to clients when they connect".to_owned(),
            };
            let mut told = device.told.lock().unwrap_or_else(PoisonError::into_inner);
            told.said.insert(export.address, said);
        }
    }
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Write what changed to the files of a queue in sysfs. What was written, and what was not and why.
fn tell(device: &Device, queue: &Path, limits: &QueueLimits) -> String {
    let files = [
        ("max_sectors_kb", limits.max_sectors.0 >> 1),
        ("discard_max_bytes", limits.max_discard_sectors.bytes().0),
        ("rotational", limits.value("rotational").unwrap_or_default()),
    ];
    let (mut told, mut refused) = (Vec::new(), Vec::new());
    for (name, ours) in files {
        let file = queue.join(name);
        let Some(now) = number(&file) else { continue };
        let mut record = device.told.lock().unwrap_or_else(PoisonError::into_inner);
        let (had, wrote) = record.before.entry(file.clone()).or_insert((now, now));
        if now != *wrote && now != *had {
            // Somebody else has set it meanwhile.
            *had = now;
        }
        let had = *had;
        drop(record);
        // A host that cuts smaller on its own account goes on with that.
        let wanted = if name == "rotational" { ours } else { ours.min(had) };
        if wanted != now {
            match fs::write(&file, wanted.to_string()) {
                Ok(()) => {
                    // The kernel may round it.
                    let wrote = number(&file).unwrap_or(wanted);
                    let mut record = device.told.lock().unwrap_or_else(PoisonError::into_inner);
                    record.before.insert(file, (had, wrote));
                    told.push(format!("{name}={wanted}"));
                }
                Err(why) => refused.push(format!("{name}: {why}")),
            }
        } else if now != had {
            told.push(format!("{name}={now}"));
        }
    }
    let mut said = match told.is_empty() {
        true => "nothing to tell the kernel".to_owned(),
        false => format!("the kernel was told {}", told.join(", ")),
    };
    if !refused.is_empty() {
        said += &format!("; not told {}", refused.join(", "));
    }
    said + "; what is too large for the others is cut here"
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
    async fn limits_are_one_split_on_top_however_often_they_change() {
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
        assert!(refused.contains("stands below"), "{refused}");
        assert_eq!(device.limits().max_sectors.0, 128, "nothing has changed");
        assert_eq!(changed(&host, &device, "", true).await.expect("reset"), [delay]);
        assert_eq!(device.limits(), whole);
        host.shut_down().await.expect("shut down");
    }

    #[tokio::test]
    async fn what_was_set_after_a_table_was_loaded_stays_when_it_comes() {
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
        assert_eq!(crate::scheduler::shown(&device), "none [mq-deadline] kyber");
        // And when it is gone by then.
        host.table("disk", load("0 2048 zero")).await.expect("loaded");
        assert!(changed(&host, &device, "", true).await.is_ok());
        host.change("disk", Change::Scheduler("none".to_owned())).await.expect("none");
        host.change("disk", Change::Resume).await.expect("resumed");
        assert_eq!((device.layers(), device.size()), (vec![], Bytes(1 << 20)));
        assert_eq!(crate::scheduler::shown(&device), "[none] mq-deadline kyber");
        host.shut_down().await.expect("shut down");
    }

    #[tokio::test]
    async fn blocks_that_nobody_knows_of_may_change_and_must_fit() {
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
        assert!(refused.contains("no whole number of blocks"), "{refused}");
        changed(&host, &device, "logical_block_size=512", false).await.expect("the same");
        host.shut_down().await.expect("shut down");
    }

    #[test]
    fn a_kernel_is_told_what_it_has_files_for_and_gets_back_what_it_had() {
        let queue = tempfile::tempdir().expect("a folder");
        let device = Device::open(
            &config(&[], ""),
            0,
            &crate::tree::Surroundings { pool: &Arc::default(), device: &|_| None },
        )
        .expect("a device");
        fs::write(queue.path().join("max_sectors_kb"), "512\n").expect("written");
        let holds = || fs::read_to_string(queue.path().join("max_sectors_kb")).expect("read");
        let mut limits = device.limits();
        "max_sectors=255".parse::<LimitOverrides>().expect("limits").apply(&mut limits).expect("set");
        let said = tell(&device, queue.path(), &limits);
        assert!(said.contains("told max_sectors_kb=127"), "{said}");
        assert_eq!(holds(), "127");
        let said = tell(&device, queue.path(), &device.limits());
        assert!(said.contains("max_sectors_kb=512"), "{said}");
        assert_eq!(holds(), "512", "not the 32 MiB that we could take");
        assert!(tell(&device, queue.path(), &device.limits()).contains("nothing to tell"));
        // What an administrator sets meanwhile is what it gets back.
        tell(&device, queue.path(), &limits);
        fs::write(queue.path().join("max_sectors_kb"), "100\n").expect("written");
        assert!(tell(&device, queue.path(), &limits).contains("nothing to tell"), "it is small enough");
        let mut smaller = device.limits();
        "max_sectors=64".parse::<LimitOverrides>().expect("limits").apply(&mut smaller).expect("set");
        tell(&device, queue.path(), &smaller);
        assert_eq!(holds(), "32");
        tell(&device, queue.path(), &device.limits());
        assert_eq!(holds(), "100");
    }
}
