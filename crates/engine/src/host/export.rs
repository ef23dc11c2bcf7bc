//! The interface between devices and their exports.

use super::HostError;
use crate::device::Device;
use crate::info::{BoxFuture, ExportInfo};
use crate::rundir::RunDir;
use crate::spec::{Bytes, StackSpec, TableSpec};
use std::path::Path;
use std::sync::Arc;

/// What happens to an export when its server ends and another process takes the device over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handover {
    /// A kernel block device stays and waits for the next server.
    DeviceWaits {
        /// Whether unanswered requests are sent again to the next server.
        reissues: bool,
    },
    /// Clients reconnect to the next server.
    ClientsReconnect,
    /// The export ends with its server.
    Ends,
}

/// An export of a device, as the control plane uses it.
pub trait Export: Send + Sync {
    /// Describes the export, for `show`.
    fn info(&self, device: &Device) -> ExportInfo;

    /// Returns whether a client has it in use.
    fn is_used(&self, device: &Device) -> bool {
        self.info(device).connections > 0
    }

    /// Returns whether the kernel does I/O on the device's file directly, so that requests cannot be held.
    fn is_passthrough(&self) -> bool {
        false
    }

    /// Returns whether the data of requests may be in memory that only the kernel, or another process, can
    /// access, so that the device's nodes must not access it.
    fn needs_opaque_stack(&self) -> bool {
        false
    }

    /// Checks whether [`close`](Export::close) would be refused now because a client has the device in use.
    /// Changes nothing and does no I/O on the device, which may be suspended. A device is removed only if
    /// none of its exports refuses.
    fn may_close<'a>(&'a self, device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        let _ = device;
        Box::pin(async { Ok(()) })
    }

    /// Closes the export. Requests in flight are finished afterwards, while the queues are retired. If it
    /// refuses, for example because the device is in use, it stays open.
    fn close<'a>(&'a self, device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>>;

    /// Closes the export although clients use the device; they get errors.
    fn force<'a>(&'a self, device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        self.close(device)
    }

    /// Checks whether the export supports another size. Changes nothing. A device is resized only if none of
    /// its exports refuses.
    fn may_resize(&self, size: Bytes) -> Result<(), HostError> {
        let _ = size;
        Ok(())
    }

    /// Reports a new size of the device to its clients. Called while the device is served, after it grew and
    /// before it shrinks, so that no client knows of blocks that do not exist. Exports whose clients learn
    /// the size only when they connect need nothing. After a refusal the device keeps or regains its size,
    /// and this is called with that size.
    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        let _ = size;
        Box::pin(async { Ok(()) })
    }

    /// Drops what the kernel has cached of the device, whose content was replaced. May wait for I/O on the
    /// device, for a bounded time.
    fn content_changed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async { Ok(()) })
    }

    /// Renames the export's files in the run directory with the device.
    fn renamed(&self, run: &RunDir, from: &str, to: &str) -> Result<(), HostError> {
        let _ = (run, from, to);
        Ok(())
    }

    /// Records a new table for a server that takes the device over.
    fn table_changed(&self, table: &TableSpec) -> Result<(), HostError> {
        let _ = table;
        Ok(())
    }

    /// Records a new file for a server that takes the device over.
    fn file_changed(&self, file: &Path) -> Result<(), HostError> {
        let _ = file;
        Ok(())
    }

    /// Records the stack to which the device's contents moved, for a server that takes the device over.
    fn stack_changed(&self, stack: &StackSpec) -> Result<(), HostError> {
        let _ = stack;
        Ok(())
    }

    /// Records a new scheduler, limits, layers or timeouts for a server that takes the device over.
    fn layers_changed(&self, device: &Device) -> Result<(), HostError> {
        let _ = device;
        Ok(())
    }

    /// A topology describes the device from now on: records the device's part of its text for a server that
    /// takes it over.
    fn topology_changed(&self, text: &str, file: &Path) -> Result<(), HostError> {
        let _ = (text, file);
        Ok(())
    }

    /// Returns what happens to the export when another process takes the device over.
    fn handover(&self) -> Handover {
        Handover::ClientsReconnect
    }

    /// Stops serving and leaves the kernel's device to another process. This process is about to end.
    fn hand_over(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async { Ok(()) })
    }

    /// Removes what is left of the export, after the device's queues are gone.
    fn closed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async { Ok(()) })
    }
}
