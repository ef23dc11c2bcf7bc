//! A text of an image that its servers share, in the image's metadata: reservations of initiators, for example.

use crate::device::{Rbd, RbdError};
use std::time::{Duration, Instant};

/// The key of the metadata.
const KEY: &str = "blockyard.reservations";
/// The lock of those who change it.
const LOCK: &str = "blockyard_reservations";
/// How long another server may keep the lock: it ends by itself earlier.
const LOCK_TIMEOUT: Duration = Duration::from_secs(15);
const PERIOD: Duration = Duration::from_millis(20);

impl Rbd {
    /// Returns a name for the image that no other image has, whichever server opens it.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn unique_name(&self) -> Result<String, RbdError> {
        let opened = self.opened();
        Ok(format!("{} {}", self.spec().place(), opened.image.id().map_err(|why| opened.failed(why))?))
    }

    /// Returns whether this server holds the exclusive lock; `None`: the image has none.
    pub fn is_lock_owner(&self) -> Option<bool> {
        self.opened().has_lock.then(|| self.opened().image.holds_lock())
    }

    /// Returns the shared text. Waits for the cluster.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn shared_text(&self) -> Result<Option<String>, RbdError> {
        self.opened().image.metadata(KEY).map_err(|why| self.opened().failed(why))
    }

    /// Replaces the shared text; `None` removes it. Waits for the cluster.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn set_shared_text(&self, text: Option<&str>) -> Result<(), RbdError> {
        self.opened().image.set_metadata(KEY, text).map_err(|why| self.opened().failed(why))
    }

    /// Excludes other servers from changing the shared text until [`Rbd::unlock_shared_text`], for ten seconds at
    /// most. Waits.
    ///
    /// # Errors
    /// The cluster refuses, or another server does not end.
    pub fn lock_shared_text(&self) -> Result<(), RbdError> {
        let opened = self.opened();
        let until = Instant::now() + LOCK_TIMEOUT;
        while !opened.image.try_lock(LOCK, &cookie()).map_err(|why| opened.failed(why))? {
            if Instant::now() > until {
                let step = "locking the image's metadata";
                return Err(opened.failed((step, std::io::ErrorKind::TimedOut.into())));
            }
            std::thread::sleep(PERIOD);
        }
        Ok(())
    }

    /// Admits other servers again.
    pub fn unlock_shared_text(&self) {
        if let Err((step, error)) = self.opened().image.unlock(LOCK, &cookie()) {
            tracing::warn!(image = %self.spec().place(), %error, "{step} failed: the lock ends by itself");
        }
    }
}

fn cookie() -> String {
    format!("blockyard {}", std::process::id())
}
