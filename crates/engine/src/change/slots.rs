//! The two table slots of a device: the active table, and the inactive one, which the next resume activates.

use super::cycles::PendingDependencies;
use crate::device::tree::Loaded;
use crate::device::{Composition, Device, TableState};
use crate::host::{Host, HostError, HostErrorKind};
use crate::spec::Bytes;
use layers::dm::MessageError;
use std::sync::{Arc, MutexGuard, PoisonError};

/// Why a table operation is refused, beyond what may be wrong with any change.
#[derive(Debug, thiserror::Error)]
pub enum TableRefusal {
    /// The device has no table.
    #[error("it is {0}, and has no table (create it with --table)")]
    NoTable(String),
    /// The inactive slot is empty.
    #[error("no table is loaded (load one with blockyard table NAME --load FILE)")]
    NothingLoaded,
    /// No target has the sector.
    #[error("no target at sector {0}")]
    NoTarget(u64),
    /// The target refuses the message.
    #[error("{arguments}: {text}")]
    Message {
        /// The message.
        arguments: String,
        /// The reason and what the target accepts.
        text: String,
        /// The kernel's error.
        why: MessageError,
    },
    /// The uuid can be set once.
    #[error("its UUID is {now} already, and cannot become {wanted}")]
    HasUuid {
        /// The present uuid.
        now: String,
        /// The requested uuid.
        wanted: String,
    },
    /// A layer was created for the present table.
    #[error("a layer ({0}) above the table was created for it")]
    Layer(String),
    /// Exports cannot report larger blocks to their users.
    #[error("its logical blocks would have {now}, and users rely on blocks of {was}")]
    Blocks {
        /// Block size that users know.
        was: Bytes,
        /// Block size of the new table.
        now: Bytes,
    },
}

impl From<TableRefusal> for HostError {
    fn from(error: TableRefusal) -> HostError {
        HostError::with_errno(HostErrorKind::Refused, error.errno(), error)
    }
}

impl TableRefusal {
    /// Returns the errno of the kernel's ioctl, positive.
    pub(crate) fn errno(&self) -> i32 {
        match self {
            TableRefusal::NothingLoaded => libc::ENXIO,
            TableRefusal::Message { why, .. } => why.errno(),
            _ => libc::EINVAL,
        }
    }
}

pub(crate) fn slot(device: &Device) -> MutexGuard<'_, TableState> {
    device.slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    /// Takes the inactive table, which is about to be activated.
    ///
    /// # Errors
    /// The device would use itself: the table stays loaded.
    pub(crate) async fn take_inactive(
        &self,
        device: &Arc<Device>,
    ) -> Result<Option<(Arc<Composition>, PendingDependencies)>, HostError> {
        let Some(loaded) = slot(device).inactive.clone() else { return Ok(None) };
        let pending = self.reserve_dependencies(device, loaded.tree.dependencies()).await?;
        // It may have been cleared meanwhile.
        Ok(slot(device).inactive.take().map(|composition| (composition, pending)))
    }

    /// Returns a table that could not be activated to the inactive slot.
    pub(crate) fn return_inactive(&self, device: &Device, composition: Arc<Composition>) {
        slot(device).inactive.get_or_insert(composition);
    }
}

/// Checks that users know of no smaller logical blocks than those of the new composition.
pub(crate) fn check_blocks(device: &Device, composition: &Composition) -> Result<(), TableRefusal> {
    let (was, now) =
        (device.limits().logical_block_size, composition.tree.profile().limits.logical_block_size);
    match now > was && !active(device)?.targets.is_empty() {
        true => Err(TableRefusal::Blocks { was, now }),
        false => Ok(()),
    }
}

/// Returns a loaded table below the present layers of the device, which may have changed since it was loaded.
///
/// # Errors
/// The layers do not fit any more.
pub(crate) fn below_present_layers(
    device: &Device,
    loaded: &Arc<Composition>,
) -> Result<Arc<Composition>, HostError> {
    let layers = device.layers();
    if loaded.layers == layers {
        return Ok(loaded.clone());
    }
    let tree = loaded.tree.with_top_layers(loaded.layers.len(), &layers)?;
    let composition = Composition { stack: loaded.stack.clone(), layers, tree, table: loaded.table.clone() };
    check_blocks(device, &composition)?;
    Ok(Arc::new(composition))
}

/// Adds the events of a table that is gone to those of the device.
pub(crate) fn retire(device: &Device, composition: &Composition) {
    let events = composition.table.as_ref().map_or(0, |loaded| loaded.events());
    let mut slot = slot(device);
    slot.past_events = slot.past_events.wrapping_add(events);
}

pub(crate) fn active(device: &Device) -> Result<Arc<Loaded>, TableRefusal> {
    let composition = device.composition();
    composition.table.clone().ok_or_else(|| TableRefusal::NoTable(composition.stack.to_string()))
}
