//! Detects files that were deleted while a device is served from them: their data is lost when the process
//! ends, and nothing else shows that.
//!
//! Runs on the control plane: every few seconds it reads the link counts of all open files. Each file is
//! logged once per device. `show` and `list` read the link counts on request.

use crate::host::Host;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Interval at which link counts are read.
const PERIOD: Duration = Duration::from_secs(2);

/// Describes deleted files, for `show`. `None`: there are none.
pub(crate) fn describe(files: &[PathBuf]) -> Option<String> {
    let paths: Vec<String> = files.iter().map(|path| path.display().to_string()).collect();
    (!paths.is_empty()).then(|| format!("{} (copy the device before its server ends)", paths.join(", ")))
}

/// Logs deleted files until the future is dropped.
pub async fn watch(host: Arc<Host>) {
    let mut reported: HashSet<(usize, PathBuf)> = HashSet::new();
    loop {
        tokio::time::sleep(PERIOD).await;
        let mut deleted = HashSet::new();
        for device in host.devices() {
            for path in device.composition().tree.deleted() {
                let known = (device.number(), path);
                if !reported.contains(&known) {
                    tracing::warn!(
                        device = %device.name(),
                        "{} was deleted while it is served: its data is gone when the server ends (copy the device first)",
                        known.1.display()
                    );
                }
                deleted.insert(known);
            }
        }
        reported = deleted;
    }
}
