//! The names of a target's devices, for status, tables and messages.

/// The names of a target's devices, by device number.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Names {
    names: Vec<[String; 2]>,
}

impl Names {
    /// Adds a device: its name in the table line, and its name in status and tables, which is `major:minor`
    /// if it has one.
    pub fn push(&mut self, written: impl Into<String>, shown: impl Into<String>) {
        self.names.push([written.into(), shown.into()]);
    }

    /// Returns the name of a device in status and tables.
    pub fn shown(&self, device: usize) -> &str {
        &self.names[device][1]
    }

    /// Returns the devices that an argument names by either name. A device may be listed more than once;
    /// `file:` before a path may be left out.
    pub fn find(&self, word: &str) -> Vec<usize> {
        let is = |name: &String| name == word || name.strip_prefix("file:") == Some(word);
        (0..self.names.len()).filter(|number| self.names[*number].iter().any(is)).collect()
    }

    /// Returns the number of devices.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Returns whether no device was added.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}
