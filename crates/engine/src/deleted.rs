//! Files that were deleted while a device is served from them: their data is gone when the process ends, and nothing
//! else shows that.
//!
//! Runs on the control plane: every few seconds it reads the link counts of all files that are open. Each file is
//! reported in the log once for each device. `show` and `list` read the link counts when they are asked.

use crate::host::Host;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How often the link counts are read.
const PERIOD: Duration = Duration::from_secs(2);

/// What `show` says of deleted files. `None`: there are none.
pub(crate) fn describe(files: &[PathBuf]) -> Option<String> {
    let paths: Vec<String> = files.iter().map(|path| path.display().to_string()).collect();
    (!paths.is_empty()).then(|| format!("{} (copy the device before its server ends)", paths.join(", ")))
}

/// Warn of deleted files until the future is dropped.
pub async fn watch(host: Arc<Host>) {
    let mut reported: HashSet<(usize, PathBuf)> = HashSet::new();
    loop {
        tokio::time::sleep(PERIOD).await;
        let mut deleted = HashSet::new();
        for device in host.devices() {
            for path in device.form().tree.deleted() {
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
