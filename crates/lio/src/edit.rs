//! A configuration together with the system to which it is applied.

use crate::config::{Change, Config, StorageObject};
use crate::system::{Applied, System};

/// Changes a configuration and its system together.
pub struct Editor<'a> {
    /// The configuration.
    pub config: &'a mut Config,
    /// The system.
    pub system: &'a mut dyn System,
}

impl Editor<'_> {
    /// Checks a change, applies it to the system, then to the configuration.
    ///
    /// # Errors
    /// The change is refused, or the system fails; nothing has changed.
    pub fn change(&mut self, change: Change) -> Result<Applied, String> {
        self.config.check(&change)?;
        let mut change = change;
        let mut applied = Applied::default();
        match &mut change {
            Change::AddStorage(object) => self.open(object)?,
            change => applied = self.system.apply(self.config, change)?,
        }
        if let Change::AddLun(_, _, lun) = &mut change {
            lun.node.clone_from(&applied.node);
        }
        self.config.apply(change);
        Ok(applied)
    }

    /// Opens the device of a storage object, and sets the attributes that follow from it.
    fn open(&mut self, object: &mut StorageObject) -> Result<(), String> {
        let facts = self.system.open(object)?;
        object.opened(&facts);
        Ok(())
    }
}
