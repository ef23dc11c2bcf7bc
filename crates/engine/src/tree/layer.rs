//! A layer of a tree that goes on with other words, or has another in its place.

use super::{Element, Tree};
use crate::device::DeviceError;
use block::Profile;
use layers::Words;

impl Tree {
    /// Have the layer below so many others, each over what stands first below it, go on with other words. Whether it can.
    pub(crate) fn change_layer(&self, above: usize, words: &str) -> bool {
        match (&self.element, above) {
            (Element::Layer(layer, _), 0) => layer.change(words),
            (Element::Layer(_, below), _) => below[0].change_layer(above - 1, words),
            _ => false,
        }
    }

    /// The same tree with a layer of these words in the place of the one below so many others, over the same children.
    ///
    /// # Errors
    /// What does not stack or fit.
    pub(crate) fn with_layer(&self, above: usize, words: &Words) -> Result<Tree, DeviceError> {
        let Element::Layer(layer, below) = &self.element else {
            return Err(DeviceError::Layer { name: words.name(), why: "it is not there".to_owned() });
        };
        let mut below = below.clone();
        if above > 0 {
            below[0] = below[0].with_layer(above - 1, words)?;
            let mut tree = Tree::over(layer.clone(), below)?.sized_by(self.extent.clone());
            tree.profile.read_only |= self.profile.read_only;
            return Ok(tree);
        }
        let profiles: Vec<Profile> = below.iter().map(|child| child.profile().clone()).collect();
        let layer = words.layer(&profiles).map_err(|why| DeviceError::Layer { name: words.name(), why })?;
        Ok(Tree::over(layer, below)?)
    }
}
