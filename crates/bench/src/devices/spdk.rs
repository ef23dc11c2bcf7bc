//! SPDK's ublk target over a device in its memory, where the guest has `spdk_tgt`.
//!
//! The target is set up by a configuration file, in the form that its `save_config` writes, so no client of its
//! RPC socket is needed. It runs without huge pages and without devices of the PCI bus, which a guest lacks.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::subjects::{Device, Site, await_size, spawn, wait_for};
use crate::error::{Error, Result};

const NODE: &str = "/dev/ublkb7";
/// Memory of the target besides the device, in MiB.
const MEMORY_MIB: u64 = 512;

/// Starts the target; it is ended by a signal, which removes the device.
pub(super) fn ublk(site: &Site) -> Result<Device> {
    let path = site.folder.join("spdk.json");
    std::fs::write(&path, configuration(site).to_string()).map_err(Error::at(&path))?;
    let memory = (MEMORY_MIB + (site.size >> 20)).to_string();
    let mut command = Command::new("spdk_tgt");
    command.args(["--no-huge", "--no-pci", "--mem-size", &memory, "--cpumask", "0x1", "--json"]).arg(&path);
    let child = spawn(command.stdout(Stdio::null()).stderr(Stdio::null()));
    let child =
        child.map_err(|error| Error(format!("{} (what to do: ./x bench report --spdk PATH)", error.0)))?;
    let pid = child.id();
    // Dropping the device on an error ends the target.
    let mut device = Device::new(NODE, &[&["kill", &pid.to_string()]]);
    device.is_served_by(child);
    wait_for(&[NODE])?;
    await_size(Path::new(NODE).file_name().and_then(|name| name.to_str()).unwrap_or_default())?;
    Ok(device)
}

fn configuration(site: &Site) -> Value {
    json!({"subsystems": [
        {"subsystem": "bdev", "config": [{
            "method": "bdev_malloc_create",
            "params": {"name": "bench", "num_blocks": site.size / 512, "block_size": 512},
        }]},
        {"subsystem": "ublk", "config": [
            {"method": "ublk_create_target", "params": {}},
            {
                "method": "ublk_start_disk",
                "params": {"bdev_name": "bench", "ublk_id": 7, "num_queues": site.queues, "queue_depth": 128},
            },
        ]},
    ]})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_has_the_size_and_queues_of_the_others() {
        let value = configuration(&Site { folder: "/tmp".into(), size: 1 << 20, queues: 3 });
        assert_eq!(value.pointer("/subsystems/0/config/0/params/num_blocks"), Some(&json!(2048)));
        let disk = value.pointer("/subsystems/1/config/1/params").expect("a disk");
        assert_eq!((&disk["bdev_name"], &disk["num_queues"]), (&json!("bench"), &json!(3)));
    }
}
