//! Builds the tree of a device from its description.

use super::source;
use super::{OpenContext, Tree, cow, part, table};
use crate::device::{Composition, DeviceConfig, DeviceError};
use crate::spec::{DiskFileSpec, FileFormat, FileSpec, Format, LayerSpec, StackSpec, TableSpec};
use block::{LimitOverrides, Profile};
use layers::{LayerOptions, SplitLayer};
use std::sync::Arc;

/// Opens the backend and puts the layers on it.
///
/// # Errors
/// Something cannot be opened, or does not fit; nothing stays open.
pub(crate) fn open(config: &DeviceConfig, context: &OpenContext<'_>) -> Result<Composition, DeviceError> {
    let mut stack = config.stack.clone();
    if let StackSpec::Table(spec) = &stack {
        return open_table(spec, &config.layers, &config.limits, context);
    }
    if config.layers.iter().any(|layer| matches!(layer, LayerSpec::Cow(_))) {
        // An origin is only read: other devices may have overlays over it too.
        stack = cow::origin(stack)?;
    }
    let source = source::open(&stack, Some(config.name.as_str()))?;
    let mut described = config.stack.clone();
    source.record_format(&mut described);
    let mut tree = Tree::leaf(source);
    if let StackSpec::File(file) = &config.stack
        && let Some(selector) = &file.part
    {
        tree = part::open(tree, selector)?;
    }
    let tree = finish(tree, &config.layers, &config.limits)?;
    Ok(Composition {
        stack: described,
        layers: all_layers(&config.layers, &config.limits),
        tree,
        table: None,
    })
}

/// Loads a table and puts the layers on it.
///
/// # Errors
/// The table is refused, or something cannot be opened or does not fit; nothing stays open.
pub(crate) fn open_table(
    spec: &TableSpec,
    layers: &[LayerSpec],
    limits: &str,
    context: &OpenContext<'_>,
) -> Result<Composition, DeviceError> {
    let (tree, loaded) = table::load(spec, context)?;
    let tree = finish(tree, layers, limits)?;
    let (stack, layers) = (StackSpec::Table(spec.clone()), all_layers(layers, limits));
    Ok(Composition { stack, layers, tree, table: Some(loaded) })
}

impl Tree {
    /// Returns the tree with other layers in place of the uppermost `count`, each of which has one child.
    ///
    /// # Errors
    /// The layers do not fit.
    pub(crate) fn with_top_layers(&self, count: usize, layers: &[LayerSpec]) -> Result<Tree, DeviceError> {
        let bare = (0..count).fold(self, |tree, _| tree.below_top().unwrap_or(tree));
        finish(bare.clone(), layers, "")
    }
}

/// Returns the layers, with the limits of the whole device as the last one.
fn all_layers(layers: &[LayerSpec], limits: &str) -> Vec<LayerSpec> {
    let mut all = layers.to_vec();
    if !limits.is_empty() {
        all.push(LayerSpec::Split(limits.to_owned()));
    }
    all
}

fn finish(mut tree: Tree, layers: &[LayerSpec], limits: &str) -> Result<Tree, DeviceError> {
    for layer in layers {
        tree = add(tree, layer)?;
    }
    if !limits.is_empty() {
        // Limits of the whole device are a split above everything else.
        tree = split(tree, limits)?;
    }
    tree.check_height()?;
    Ok(tree)
}

/// Commits the uppermost overlay of a device that is not served into what is below it.
///
/// # Errors
/// Something cannot be opened or written: the overlay can be committed again.
pub(crate) fn commit(config: &DeviceConfig) -> Result<(), DeviceError> {
    let part = |tree| match &config.stack {
        StackSpec::File(file) => match &file.part {
            Some(selector) => part::open(tree, selector),
            None => Ok(tree),
        },
        _ => Ok(tree),
    };
    super::commit::commit(&config.stack, &config.layers, part, add)
}

fn add(below: Tree, layer: &LayerSpec) -> Result<Tree, DeviceError> {
    match layer {
        LayerSpec::Split(limits) => split(below, limits),
        LayerSpec::Part(selector) => part::open(below, selector),
        LayerSpec::Cow(spec) => cow::open(below, spec),
        LayerSpec::Driver(options) => driver(below, options),
        LayerSpec::Scheduler(choice) => below.with_scheduler(Some(choice)),
    }
}

/// Adds a layer of the driver list over `below` and over the files that its options name.
fn driver(below: Tree, options: &LayerOptions) -> Result<Tree, DeviceError> {
    let mut children = vec![below];
    for wanted in options.files() {
        let file = DiskFileSpec {
            file: FileSpec { create: wanted.create, ..FileSpec::new(wanted.path) },
            format: FileFormat::Given(Format::Raw),
            ..DiskFileSpec::default()
        };
        children.push(Tree::leaf(source::open(&StackSpec::File(file), None)?));
    }
    let profiles: Vec<Profile> = children.iter().map(|child| child.profile().clone()).collect();
    let layer = options.layer(&profiles).map_err(|why| DeviceError::Layer { name: options.name(), why })?;
    Ok(Tree::over(layer, children)?)
}

fn split(below: Tree, limits: &str) -> Result<Tree, DeviceError> {
    let wanted: LimitOverrides = limits.parse()?;
    Ok(Tree::over(Arc::new(SplitLayer::new(wanted)), vec![below])?)
}
