//! Logical units: a device, its identity, and its reservations that survive a restart.

use super::aptpl::AptplFile;
use super::shared::SharedStore;
use super::tree::UnitId;
use block::Profile;
use engine::device::Device;
use engine::host::{Host, HostError, HostErrorKind};
use scsi::{Attributes, Identity, LogicalUnit, Media};
use sha2::{Digest, Sha256};
use spec::{Bytes, StackSpec};
use std::path::Path;
use std::sync::Arc;
use tokio::sync::{Mutex, oneshot};

/// T10 vendor identification of units that are given none.
const VENDOR: &str = "BLKYARD";
/// Product revision of units that are given none.
const REVISION: &str = "1.0";

/// Properties of a logical unit at its creation.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct UnitOptions {
    /// The unit serial number, from which the NAA identifier is derived; `None`: derived from the device.
    pub serial: Option<String>,
    /// The product identification of INQUIRY; `None`: the device's name.
    pub product: Option<String>,
    /// The vendor identification of INQUIRY; `None`: `BLKYARD`.
    pub vendor: Option<String>,
    /// The product revision of INQUIRY; `None`: `1.0`.
    pub revision: Option<String>,
    /// Attributes; `None`: the defaults.
    pub attributes: Option<Attributes>,
    /// The medium can be ejected.
    pub removable: bool,
}

/// A device as a logical unit, whatever targets and LUNs show it.
pub struct Unit {
    device: Arc<Device>,
    logical: Arc<LogicalUnit>,
    /// Answers of the I/O threads whose queues are switching to the range lock; empty when all have
    /// answered.
    guarding: Mutex<Vec<oneshot::Receiver<()>>>,
}

impl Unit {
    /// Creates the logical unit of a device. Its reservations are read from `state_dir` and kept there, if
    /// that is given.
    pub(super) fn open(
        device: &Arc<Device>,
        options: &UnitOptions,
        state_dir: Option<&Path>,
    ) -> Result<Unit, HostError> {
        let serial = options.serial.clone().unwrap_or_else(|| serial_of(device));
        let product = options.product.clone().unwrap_or_else(|| device.name().to_string());
        let vendor = options.vendor.as_deref().unwrap_or(VENDOR);
        let revision = options.revision.as_deref().unwrap_or(REVISION);
        let identity = Identity::new(vendor, &product, revision, &naa_digits(&serial));
        let identity = Identity { serial: serial.clone(), ..identity };
        let media = media_of(device, device.size(), options.removable);
        let logical = LogicalUnit::new(identity, media, options.attributes.unwrap_or_default());
        if let Some(shared) = SharedStore::of(device) {
            shared.install(&logical).map_err(|why| HostError::caused(HostErrorKind::Failed, why))?;
        } else if let Some(state_dir) = state_dir {
            let file = AptplFile::new(&state_dir.join("iscsi"), &serial);
            file.install(&logical).map_err(|why| HostError::caused(HostErrorKind::Failed, why))?;
        }
        // Commands that exclude others from a range take the range lock of the device's queues.
        device.range_lock_or_init();
        Ok(Unit { device: device.clone(), logical, guarding: Mutex::default() })
    }

    /// Makes the device's existing queues use its range lock. [`Unit::guarded`] waits for them.
    pub(super) fn guard(&mut self, host: &Host) {
        let answers = host.reactors().iter().map(|reactor| reactor.refresh(self.device.clone()));
        self.guarding.get_mut().extend(answers);
    }

    /// Waits until every queue of the device uses the range lock, as COMPARE AND WRITE requires.
    pub(super) async fn guarded(&self) {
        let mut guarding = self.guarding.lock().await;
        while let Some(answer) = guarding.last_mut() {
            // A thread that ended has no queue.
            let _ = answer.await;
            guarding.pop();
        }
    }

    /// Returns the ID of the unit: the number of its device.
    pub fn id(&self) -> UnitId {
        UnitId(self.device.number())
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The logical unit: its attributes, target port groups and reservations.
    pub fn logical(&self) -> &Arc<LogicalUnit> {
        &self.logical
    }

    /// The unit serial number.
    pub fn serial(&self) -> &str {
        &self.logical.identity().serial
    }

    /// Adopts a new size or new limits of the device.
    pub(super) fn device_changed(&self, size: Bytes) {
        self.logical.set_media(media_of(&self.device, size, self.logical.media().removable));
    }
}

/// Returns the medium for a device of this size.
fn media_of(device: &Device, size: Bytes, removable: bool) -> Media {
    Media { removable, ..Media::of(&Profile { size, ..device.profile() }) }
}

/// Returns the text whose hexadecimal digits become the NAA identifier. Serial numbers with fewer than 25
/// such digits, which would leave much of it 0, are hashed.
fn naa_digits(serial: &str) -> String {
    let digits = serial.chars().filter(char::is_ascii_hexdigit).count();
    if digits >= 25 { serial.to_owned() } else { uuid_of(&format!("blockyard naa\0{serial}")) }
}

/// Returns the serial number of a device that was given none: a UUID derived from this machine's id, the
/// device's name and its backing file, so that it survives restarts and changes of size, and two machines
/// that serve devices of one name are not taken for two paths to one disk.
fn serial_of(device: &Device) -> String {
    // Two gateways of one image must have one serial number, as two paths to one disk.
    if let Some(name) = device.rbd_image().and_then(|image| image.unique_name().ok()) {
        return uuid_of(&format!("blockyard rbd\0{name}"));
    }
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let machine = match machine.trim() {
        "" => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        id => id.to_owned(),
    };
    serial_from(&machine, device.name().as_str(), &backing_of(&device.stack()))
}

fn backing_of(stack: &StackSpec) -> String {
    match stack {
        StackSpec::File(file) => {
            let path = &file.file.path;
            let path =
                path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.clone());
            format!("file:{}:{}", file.file.offset.0, path.display())
        }
        stack => stack.kind().to_owned(),
    }
}

fn serial_from(machine: &str, name: &str, backing: &str) -> String {
    uuid_of(&format!("blockyard iscsi\0{machine}\0{name}\0{backing}"))
}

/// Returns the hash of a text, written as a UUID.
fn uuid_of(text: &str) -> String {
    let digest = Sha256::digest(text);
    let hex: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_derived_serial_is_stable_and_differs_by_machine_name_and_file() {
        let serial = serial_from("m", "disk", "file:0:/disk.img");
        assert_eq!(serial, serial_from("m", "disk", "file:0:/disk.img"));
        assert_eq!(serial.len(), 36);
        for (machine, name, backing) in [
            ("n", "disk", "file:0:/disk.img"),
            ("m", "disc", "file:0:/disk.img"),
            ("m", "disk", "file:0:/b.img"),
        ] {
            assert_ne!(serial, serial_from(machine, name, backing));
        }
    }

    #[test]
    fn two_short_serials_have_different_naa_identifiers() {
        let naa = |serial: &str| Identity::new("", "", "", &naa_digits(serial)).naa;
        assert_ne!(naa("disk-x"), naa("disk-y"));
        let uuid = "7f2a2e05-2b42-4a8f-9c0e-77f6a0c2b1aa";
        assert_eq!(naa_digits(uuid), uuid, "LIO's rule");
    }

    #[test]
    fn the_size_of_a_ram_disk_does_not_change_its_serial() {
        let backing = |text: &str| backing_of(&text.parse().expect("a stack"));
        assert_eq!(backing("ram:1M"), backing("ram:2M"));
        assert_ne!(backing("ram:1M"), backing("null:1M"));
    }
}
