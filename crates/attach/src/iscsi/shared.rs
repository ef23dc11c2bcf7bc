//! Logical units over an image of a Ceph cluster that other gateways may serve, too.
//!
//! Their persistent reservations are in the image's metadata, which every gateway polls. PERSISTENT RESERVE
//! OUT takes a lock against other gateways, starts from the reservations that they have stored, and
//! completes after a pause in which they adopt the change. The access state of the target ports follows the
//! image's exclusive lock: active/optimized while this gateway holds it, else active/non-optimized, where a
//! write acquires the lock.
//!
//! A gateway that has not read the reservations for longer than [`VALIDITY`], because it was stopped, cut
//! off or busy, reads them before it begins another command.

use super::unit::Unit;
use engine::device::Device;
use scsi::reservation::Reservations;
use scsi::{AptplStore, LogicalUnit};
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How often a gateway reads the reservations.
const PERIOD: Duration = Duration::from_millis(250);
/// How long a gateway relies on reservations that it has read.
const VALIDITY: Duration = Duration::from_millis(600);
/// How long a command waits for other gateways: longer than they rely on older reservations.
const ADOPTION: Duration = Duration::from_millis(800);
/// LIO's attribute of a group's access state.
const ACCESS_STATE: &str = "alua_access_state";

/// Reservations in the metadata of a device's image.
pub(super) struct SharedStore(Arc<Device>);

impl SharedStore {
    /// Returns the store of a device over an image; `None`: the device has another backend, or the image is
    /// read-only.
    pub(super) fn of(device: &Arc<Device>) -> Option<SharedStore> {
        device.rbd_image().filter(|image| image.is_lock_owner().is_some() && !device.read_only())?;
        Some(SharedStore(device.clone()))
    }

    /// Applies the stored reservations to a unit, and makes the unit store its changes here from now on.
    pub(super) fn install(self, unit: &LogicalUnit) -> io::Result<()> {
        if let Some(reservations) = self.load()? {
            unit.restore_reservations(reservations);
        }
        unit.set_aptpl_store(Some(Arc::new(self)));
        Ok(())
    }
}

impl AptplStore for SharedStore {
    fn store(&self, text: Option<&str>) -> io::Result<()> {
        let image = self.0.rbd_image().ok_or(io::ErrorKind::NotFound)?;
        image.set_shared_text(text).map_err(io::Error::other)
    }

    fn valid_for(&self) -> Option<Duration> {
        Some(VALIDITY)
    }

    fn load(&self) -> io::Result<Option<Reservations>> {
        let image = self.0.rbd_image().ok_or(io::ErrorKind::NotFound)?;
        let text = image.shared_text().map_err(io::Error::other)?;
        text.map(|text| Reservations::parse_image(&text).map_err(io::Error::other)).transpose()
    }

    fn begin(&self) -> io::Result<()> {
        let image = self.0.rbd_image().ok_or(io::ErrorKind::NotFound)?;
        image.lock_shared_text().map_err(io::Error::other)
    }

    fn end(&self) {
        if let Some(image) = self.0.rbd_image() {
            image.unlock_shared_text();
        }
    }

    fn await_others(&self) {
        std::thread::sleep(ADOPTION);
    }
}

/// Makes a unit follow the lock and the reservations of its image, until the unit is dropped.
pub(super) fn follow(unit: &Arc<Unit>) {
    if SharedStore::of(unit.device()).is_none() {
        return;
    }
    let unit = Arc::downgrade(unit);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(PERIOD).await;
            let following = unit.clone();
            let followed = tokio::task::spawn_blocking(move || adopt(&following)).await;
            if !followed.unwrap_or(false) {
                return;
            }
        }
    });
}

/// Adopts the state of the image once. Returns whether the unit still exists.
fn adopt(unit: &Weak<Unit>) -> bool {
    let Some(unit) = unit.upgrade() else { return false };
    let Some(image) = unit.device().rbd_image() else { return true };
    let is_owner = image.is_lock_owner().unwrap_or(true);
    let state = u64::from(!is_owner);
    let logical = unit.logical();
    let groups = logical.access_groups();
    let stale: Vec<String> = groups
        .groups()
        .iter()
        // Other states, for example standby, were set by an administrator and are kept.
        .filter(|group| group.state.is_active() && group.attribute(ACCESS_STATE) != Some(state))
        .map(|group| group.name.clone())
        .collect();
    if !stale.is_empty() {
        logical.change_access_groups(None, |groups| {
            for name in &stale {
                // The group exists, and supports both states unless its owner has forbidden one.
                let _ = groups.set_attribute(name, ACCESS_STATE, state);
            }
        });
    }
    if let Err(error) = logical.refresh_reservations() {
        tracing::debug!(device = %unit.device().name(), %error, "reservations cannot be read");
    }
    true
}
