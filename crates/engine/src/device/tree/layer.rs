//! Changes the options of one layer of a tree, in the running layer or by replacing it.

use super::{Element, Tree};
use crate::device::DeviceError;
use block::Profile;
use layers::LayerOptions;

impl Tree {
    /// Changes the options of the layer that has `above` layers on top of it. Returns false if the running
    /// layer cannot change.
    pub(crate) fn change_layer(&self, above: usize, options: &str) -> bool {
        match (&self.element, above) {
            (Element::Layer(layer, _), 0) => layer.change(options),
            (Element::Layer(_, below), _) => below[0].change_layer(above - 1, options),
            _ => false,
        }
    }

    /// Returns this tree with another layer instead of the one that has `above` layers on top of it, over the
    /// same children.
    ///
    /// # Errors
    /// The layer does not fit.
    pub(crate) fn with_layer(&self, above: usize, options: &LayerOptions) -> Result<Tree, DeviceError> {
        let Element::Layer(layer, below) = &self.element else {
            return Err(DeviceError::Layer {
                name: options.name(),
                why: "this device has no such layer".to_owned(),
            });
        };
        let mut below = below.clone();
        if above > 0 {
            below[0] = below[0].with_layer(above - 1, options)?;
            return Ok(self.with_children(layer, below)?);
        }
        let profiles: Vec<Profile> = below.iter().map(|child| child.profile().clone()).collect();
        let layer =
            options.layer(&profiles).map_err(|why| DeviceError::Layer { name: options.name(), why })?;
        Ok(Tree::over(layer, below)?)
    }
}
