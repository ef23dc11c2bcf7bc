//! Moves the contents of a device to another stack while it is served: `blockyard move`
//! ([ADR 49](../../../../docs/adr/0049-moving-a-device.md)).
//!
//! An online reconfiguration puts a migration over the device's stack and the destination. While it copies,
//! other changes of the device are refused. When both are equal, a second reconfiguration drains the device,
//! flushes the destination, and switches the device to the destination. Until then the source has every
//! acknowledged write: a move that fails, is cancelled or dies with the process leaves the device as it was.

use crate::change::{ChangeError, MoveRequest, blocking};
use crate::device::tree::migration::{MovePlan, plan};
use crate::device::tree::targets;
use crate::device::{Composition, Device, MoveState};
use crate::host::{Host, HostError, HostErrorKind};
use crate::spec::{LayerSpec, StackSpec};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

/// Interval at which the progress of the copy is polled.
const INTERVAL: Duration = Duration::from_millis(50);

fn state(device: &Device) -> MutexGuard<'_, Option<Arc<MoveState>>> {
    device.moving.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refused(errno: i32, why: impl Into<String>) -> HostError {
    HostError::with_errno(HostErrorKind::Refused, errno, ChangeError::Move(why.into()))
}

/// Pause before another attempt to switch the device back to its source.
const RETRY: Duration = Duration::from_secs(1);

/// Marks the device as moving until this is dropped.
struct Moving {
    device: Arc<Device>,
    state: Arc<MoveState>,
}

impl Moving {
    fn start(device: &Arc<Device>, to: &StackSpec) -> Result<Moving, HostError> {
        check_not_moving(device)?;
        let new = Arc::new(MoveState { to: to.to_string(), is_cancelled: AtomicBool::new(false) });
        *state(device) = Some(new.clone());
        Ok(Moving { device: device.clone(), state: new })
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        *state(&self.device) = None;
    }
}

/// Refuses a change of a device whose contents are being moved.
pub(crate) fn check_not_moving(device: &Device) -> Result<(), HostError> {
    match &*state(device) {
        None => Ok(()),
        Some(moving) => {
            let to = &moving.to;
            let why = format!(
                "its contents are being moved to {to} (wait for the end, or: blockyard move NAME --cancel)"
            );
            Err(refused(libc::EBUSY, why))
        }
    }
}

/// Requests the cancellation of the device's move. Returns whether a move was in progress.
pub(crate) fn cancel(device: &Device) -> bool {
    let moving = state(device).clone();
    moving.inspect(|moving| moving.is_cancelled.store(true, SeqCst)).is_some()
}

impl Host {
    /// Moves the contents of a device and returns when the move has ended, or cancels a move.
    ///
    /// # Errors
    /// The device does not exist; the move is refused, fails or is cancelled, and the device is served from
    /// its source as before; or there is no move to cancel.
    pub async fn move_contents(&self, name: &str, request: MoveRequest) -> Result<(), HostError> {
        let device = self.device(name).ok_or_else(HostError::no_device)?;
        match request {
            MoveRequest::Move { to, rate } => self.move_to(&device, &to, rate).await,
            MoveRequest::CancelMove => Host::cancel_move(&device),
        }
    }

    /// Cancels the move of a device.
    fn cancel_move(device: &Device) -> Result<(), HostError> {
        match cancel(device) {
            true => Ok(()),
            false => Err(refused(libc::EINVAL, "its contents are not being moved")),
        }
    }

    /// Moves the contents of a device to another stack and returns when the move has ended.
    async fn move_to(&self, device: &Arc<Device>, to: &str, rate: Option<u64>) -> Result<(), HostError> {
        let to: StackSpec = to.parse().map_err(|why| refused(libc::EINVAL, format!("{to}: {why}")))?;
        let lock = device.change_lock.lock().await;
        if device.is_being_removed() {
            return Err(HostError::no_device());
        }
        if self.is_passthrough(device) {
            return Err(ChangeError::Passthrough.into());
        }
        let before = device.composition();
        check(device, &before, &to)?;
        let moving = Moving::start(device, &to)?;
        let (given, name) = (before.clone(), device.name());
        let planned = blocking(move || plan(&given.tree, &given.layers, &to, rate, name.as_str())).await?;
        let planned = Arc::new(planned);
        self.check_memory(device, &before, &planned)?;
        let during = Arc::new(Composition {
            stack: before.stack.clone(),
            layers: before.layers.clone(),
            tree: planned.during.clone(),
            table: Some(planned.table.clone()),
        });
        self.check_blocks(device, &planned.during).map_err(ChangeError::from)?;
        self.check_blocks(device, &planned.after).map_err(ChangeError::from)?;
        let pending = self.reserve_dependencies(device, during.tree.dependencies()).await?;
        let next = during.clone();
        let exchanged = self.exchange(device, move || Ok(Ok(next))).await;
        if exchanged.is_ok() {
            targets::resume(&during);
            self.background_came.notify_one();
        }
        self.finish_exchange(device, exchanged.is_ok());
        drop(pending);
        exchanged?;
        drop(lock);
        tracing::info!(device = %device.name(), to = %planned.stack, "the contents are being moved");
        let result = self.complete(device, &before, &during, &planned, &moving).await;
        match &result {
            Ok(()) => tracing::info!(device = %device.name(), to = %planned.stack, "the contents were moved"),
            Err(error) => tracing::warn!(device = %device.name(), %error, "the contents were not moved"),
        }
        result
    }

    /// Waits for the copy, then switches the device to the destination; after an error, back to the source.
    async fn complete(
        &self,
        device: &Arc<Device>,
        before: &Arc<Composition>,
        during: &Arc<Composition>,
        planned: &Arc<MovePlan>,
        moving: &Moving,
    ) -> Result<(), HostError> {
        let why = loop {
            tokio::time::sleep(INTERVAL).await;
            if device.is_being_removed() {
                break refused(libc::EINVAL, "it is being removed");
            }
            if moving.state.is_cancelled.load(SeqCst) {
                break refused(
                    libc::ECANCELED,
                    "the move was cancelled; the device has its previous contents",
                );
            }
            if let Some(why) = planned.migration.failure() {
                break refused(libc::EIO, format!("{why}; the device is served from its source as before"));
            }
            if planned.migration.is_complete() {
                match self.leave_destination(device, during, planned).await {
                    Ok(true) => return Ok(()),
                    // A write failed or was not supported: its region is copied again.
                    Ok(false) => {}
                    Err(error) => break error,
                }
            }
        };
        let _lock = device.change_lock.lock().await;
        let is_moving =
            device.composition().table.as_ref().is_some_and(|now| Arc::ptr_eq(now, &planned.table));
        // Requests that do not end can delay this. Until they do, the device is served by both stacks.
        while is_moving && !device.is_being_removed() {
            match self.swap(device, during, before.clone()).await {
                Ok(()) => break,
                Err(error) => {
                    tracing::warn!(device = %device.name(), %error, "the device cannot be switched back to its source yet")
                }
            }
            tokio::time::sleep(RETRY).await;
        }
        Err(why)
    }

    /// Drains the device and switches it to the destination. Returns false if the copy is no longer complete
    /// after the drain.
    async fn leave_destination(
        &self,
        device: &Arc<Device>,
        during: &Arc<Composition>,
        planned: &Arc<MovePlan>,
    ) -> Result<bool, HostError> {
        let _lock = device.change_lock.lock().await;
        let after = Arc::new(Composition {
            stack: planned.stack.clone(),
            layers: during.layers.clone(),
            tree: planned.after.clone(),
            table: None,
        });
        targets::presuspend(during, false);
        let (plan, exports) = (planned.clone(), self.exports_of(device));
        let make = move || {
            // No request is in flight here.
            if !plan.migration.is_complete() {
                return Ok(Err(ChangeError::Move("not complete".to_owned())));
            }
            plan.flush()?;
            // Recorded before the device accepts writes again: a server that takes the device over must use
            // the destination from then on.
            for export in &exports {
                if let Err(error) = export.stack_changed(&plan.stack) {
                    return Ok(Err(ChangeError::Move(format!("recording the new stack failed: {error}"))));
                }
            }
            Ok(Ok(after))
        };
        let exchanged = self.exchange(device, make).await;
        if exchanged.is_err() {
            for export in self.exports_of(device) {
                if let Err(error) = export.stack_changed(&during.stack) {
                    tracing::error!(device = %device.name(), %error, "the record was not updated: recovery would use the destination");
                }
            }
            targets::resume(during);
        }
        self.finish_exchange(device, exchanged.is_ok());
        match exchanged {
            Ok(()) => {}
            Err(_) if planned.migration.failure().is_none() && !planned.migration.is_complete() => {
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        self.report_limits(device).await;
        Ok(true)
    }

    async fn swap(
        &self,
        device: &Arc<Device>,
        from: &Arc<Composition>,
        to: Arc<Composition>,
    ) -> Result<(), HostError> {
        targets::presuspend(from, false);
        let exchanged = self.exchange(device, move || Ok(Ok(to))).await;
        self.finish_exchange(device, exchanged.is_ok());
        exchanged
    }

    /// Refuses the move of a ublk device whose data stays in kernel memory to a stack that accesses data.
    fn check_memory(
        &self,
        device: &Arc<Device>,
        before: &Composition,
        planned: &MovePlan,
    ) -> Result<(), HostError> {
        let was_opaque = before.tree.profile().opaque;
        let is_needed = self.exports_of(device).iter().any(|export| export.needs_opaque_stack());
        if is_needed && was_opaque && !(planned.during.profile().opaque && planned.after.profile().opaque) {
            let why = "the kernel does not give its data to this process, which the destination needs (add the device \
                       with --ublk=mode=copy)";
            return Err(refused(libc::EINVAL, why));
        }
        Ok(())
    }
}

/// Checks whether the contents of a device can move at all.
fn check(device: &Device, composition: &Composition, to: &StackSpec) -> Result<(), HostError> {
    let no = |why: &str| Err(refused(libc::EINVAL, why));
    if device.is_suspended() {
        return no("it is suspended (resume it first)");
    }
    if composition.table.is_some() {
        return no("it has a table (load another, with a mirror for example)");
    }
    if composition.layers.iter().any(|layer| matches!(layer, LayerSpec::Cow(_))) {
        return no("it is an overlay, and its origin has no data of its own to move (commit it first)");
    }
    let drops_data = match to {
        StackSpec::Zero(_) | StackSpec::Error(_) => true,
        StackSpec::Null(spec) => !spec.memory_backed,
        _ => false,
    };
    if drops_data {
        return no("the destination does not store data");
    }
    if matches!(to, StackSpec::Table(_)) {
        return no("a table cannot be the destination");
    }
    if composition.tree.profile().read_only {
        return no("it is read-only (blockyard copy copies it, and set NAME file= exchanges the file)");
    }
    if composition.tree.profile().limits.features.contains(block::Features::ZONED) {
        return no("zoned devices cannot be moved");
    }
    if composition.tree.base_size(composition.layers.len()).0 == 0 {
        return no("its size is 0");
    }
    Ok(())
}
