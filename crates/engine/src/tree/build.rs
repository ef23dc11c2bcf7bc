//! From what was described to the tree that serves it.

use super::source::Source;
use super::{Tree, cow, part};
use crate::device::{DeviceConfig, DeviceError};
use crate::spec::{LayerSpec, StackSpec};
use block::LimitOverrides;
use layers::SplitLayer;
use std::sync::Arc;

/// Open the backend, and put the layers on it.
///
/// # Errors
/// Whatever does not open, stack or fit; nothing stays open.
pub(crate) fn open(config: &DeviceConfig) -> Result<Tree, DeviceError> {
    let mut stack = config.stack.clone();
    if config.layers.iter().any(|layer| matches!(layer, LayerSpec::Cow(_))) {
        // An origin is only read: others may have overlays over it too.
        stack = cow::origin(stack)?;
    }
    let mut tree = Tree::leaf(Source::open(&stack)?);
    if let StackSpec::File(file) = &config.stack
        && let Some(selector) = &file.part
    {
        tree = part::open(tree, selector)?;
    }
    for layer in &config.layers {
        tree = add(tree, layer)?;
    }
    if !config.limits.is_empty() {
        // Limits of the whole device are a split above everything else.
        tree = split(tree, &config.limits)?;
    }
    tree.check_height()?;
    Ok(tree)
}

fn add(below: Tree, layer: &LayerSpec) -> Result<Tree, DeviceError> {
    match layer {
        LayerSpec::Split(limits) => split(below, limits),
        LayerSpec::Part(selector) => part::open(below, selector),
        LayerSpec::Cow(spec) => cow::open(below, spec),
    }
}

fn split(below: Tree, limits: &str) -> Result<Tree, DeviceError> {
    let wanted: LimitOverrides = limits.parse()?;
    Ok(Tree::over(Arc::new(SplitLayer::new(wanted)), vec![below])?)
}
