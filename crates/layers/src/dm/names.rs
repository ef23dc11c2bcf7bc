//! How the devices of a target are shown and found again.

/// The names of a target's devices, by number.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Names {
    names: Vec<[String; 2]>,
}

impl Names {
    /// One device more: as it was written, and as it is shown, which is `major:minor` for devices that have one.
    pub fn push(&mut self, written: impl Into<String>, shown: impl Into<String>) {
        self.names.push([written.into(), shown.into()]);
    }

    /// As it is shown.
    pub fn shown(&self, device: usize) -> &str {
        &self.names[device][1]
    }

    /// Those that a word names, in either way, for a device may be there more than once; a path also without its kind.
    pub fn find(&self, word: &str) -> Vec<usize> {
        let is = |name: &String| name == word || name.strip_prefix("file:") == Some(word);
        (0..self.names.len()).filter(|number| self.names[*number].iter().any(is)).collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}
