//! Multipath devices of the comparison: the kernel's over null_blk, and ours over null devices.

use std::path::Path;

use super::subjects::{Device, Site, await_size, null_blk, put, serve, wait_for};
use crate::error::{Error, Result};
use crate::multipath::selector_arguments;
use crate::tools::{output, run};

/// Paths of a device. With io-affinity, a path serves a processor or more, so there are at most as many as those.
const PATHS: usize = 4;
/// Sectors of a device: 1 GiB.
const SECTORS: u64 = 1 << 21;

/// Returns the number of paths for a selector, and that of the processors.
fn extent(selector: &str) -> (usize, usize) {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    (if selector == "io-affinity" { PATHS.min(cpus) } else { PATHS }, cpus)
}

/// Creates a dm-multipath device with this number of queues over null_blk devices with as many.
pub(super) fn kernel(selector: &str, queues: u32) -> Result<Device> {
    run(&["modprobe", &format!("dm_{}", selector.replace('-', "_"))])?;
    // Read when a table is loaded; the default is one queue.
    put(Path::new("/sys/module/dm_mod/parameters/dm_mq_nr_hw_queues"), &queues.to_string())?;
    let (count, cpus) = extent(selector);
    let names: Vec<String> = (0..count).map(|number| format!("nullb1{number}")).collect();
    let null = |name: &String| null_blk(name, queues, &[("size", "1024")]);
    let paths = names.iter().map(null).collect::<Result<Vec<_>>>()?;
    let nodes: Vec<String> = paths.iter().map(|path| path.node.to_string_lossy().into_owned()).collect();
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let table = format!("0 {SECTORS} multipath {}", selector_arguments(selector, &nodes, cpus));
    // A guest has no udev that would create the link in /dev/mapper.
    let mut device = Device::new("", &[&["dmsetup", "remove", "--noudevsync", "bench"]]);
    for path in paths {
        device.below(path);
    }
    run(&["dmsetup", "create", "bench", "--noudevsync", "--table", &table])?;
    let minor = output(&["dmsetup", "info", "-c", "--noheadings", "-o", "minor", "bench"])?;
    device.node = wait_for(&[&format!("/dev/dm-{}", minor.trim())])?.into();
    await_size(&device.name())?;
    Ok(device)
}

/// Serves a table with this selector over null devices through ublk.
pub(super) fn ours(selector: &str, site: &Site) -> Result<Device> {
    let (count, cpus) = extent(selector);
    let stacks = vec!["null:1G"; count];
    let table = site.folder.join("multipath.table");
    let line = format!("0 {SECTORS} multipath {}\n", selector_arguments(selector, &stacks, cpus));
    std::fs::write(&table, line).map_err(Error::at(&table))?;
    let (child, node) = serve("", &["--table", &table.to_string_lossy(), "--ublk"], Path::new(""), site)?;
    let pid = child.id();
    wait_for(&[&node])?;
    let mut device = Device::new(&node, &[&["kill", &pid.to_string()]]);
    await_size(&device.name())?;
    device.is_served_by(child);
    Ok(device)
}
