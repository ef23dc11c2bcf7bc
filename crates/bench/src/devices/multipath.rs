//! Multipath devices of the comparison: the kernel's over null_blk, and ours over null devices.

use std::path::Path;

use super::subjects::{Device, Site, await_size, null_blk, serve, wait_for};
use crate::error::{Error, Result};
use crate::multipath::selector_arguments;
use crate::tools::{output, run};

/// Paths of a device.
const PATHS: usize = 4;
/// Sectors of a device: 1 GiB.
const SECTORS: u64 = 1 << 21;

/// Creates a dm-multipath device over null_blk devices.
pub(super) fn kernel(selector: &str) -> Result<Device> {
    run(&["modprobe", &format!("dm_{}", selector.replace('-', "_"))])?;
    let names: Vec<String> = (0..PATHS).map(|number| format!("nullb1{number}")).collect();
    let paths = names.iter().map(|name| null_blk(name, &[("size", "1024")])).collect::<Result<Vec<_>>>()?;
    let nodes: Vec<String> = paths.iter().map(|path| path.node.to_string_lossy().into_owned()).collect();
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let table = format!("0 {SECTORS} multipath {}", selector_arguments(selector, &nodes));
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
    let stacks = ["null:1G"; PATHS];
    let table = site.folder.join("multipath.table");
    let line = format!("0 {SECTORS} multipath {}\n", selector_arguments(selector, &stacks));
    std::fs::write(&table, line).map_err(Error::at(&table))?;
    let (child, node) = serve("", &["--table", &table.to_string_lossy(), "--ublk"], Path::new(""), site)?;
    let pid = child.id();
    wait_for(&[&node])?;
    let mut device = Device::new(&node, &[&["kill", &pid.to_string()]]);
    await_size(&device.name())?;
    device.is_served_by(child);
    Ok(device)
}
