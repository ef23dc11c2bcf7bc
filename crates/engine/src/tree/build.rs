//! From what was described to the tree that serves it.

use super::source::Source;
use super::{Tree, part};
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
    let mut tree = Tree::leaf(Source::open(&config.stack)?);
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
    }
}

fn split(below: Tree, limits: &str) -> Result<Tree, DeviceError> {
    let wanted: LimitOverrides = limits.parse()?;
    Ok(Tree::over(Arc::new(SplitLayer::new(wanted)), vec![below])?)
}
