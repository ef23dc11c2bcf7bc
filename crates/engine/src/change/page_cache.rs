//! Devices whose content was replaced (`set NAME file=`): their exports drop what the kernel has cached of
//! them.

use crate::device::Device;
use crate::host::{Host, HostError};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

impl Host {
    /// Records that the content of these devices was replaced.
    pub(crate) fn mark_content_replaced(stack: &[Arc<Device>]) {
        stack.iter().for_each(|device| device.has_stale_cache.store(true, SeqCst));
    }

    /// Has the exports of these devices drop what the kernel has cached of replaced content, except for
    /// suspended devices. Returns the first error, after all were asked. Must not be called while a change is
    /// in progress: dirty pages are written first, which may wait for a `resume`.
    pub(crate) async fn drop_caches(&self, stack: &[Arc<Device>]) -> Result<(), HostError> {
        let stale = stack.iter().filter(|device| !device.is_io_suspended());
        let stale = stale.filter(|device| device.has_stale_cache.swap(false, SeqCst));
        // In parallel, so that none waits for one that does not answer.
        let asked: Vec<_> = stale
            .flat_map(|device| self.exports_of(device))
            .map(|export| tokio::spawn(async move { export.content_changed().await }))
            .collect();
        let mut result = Ok(());
        for answer in asked {
            match answer.await {
                Ok(answer) => result = result.and(answer),
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            }
        }
        result
    }
}
