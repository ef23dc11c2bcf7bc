//! From what was described to the tree that serves it.

use super::source::Source;
use super::{Surroundings, Tree, cow, part, table};
use crate::device::{DeviceConfig, DeviceError, Form};
use crate::spec::{FileFormat, FileSpec, Format, LayerSpec, StackSpec, TableSpec};
use block::{LimitOverrides, Profile};
use layers::{SplitLayer, Words};
use std::sync::Arc;

/// Open the backend, and put the layers on it.
///
/// # Errors
/// Whatever does not open, stack or fit; nothing stays open.
pub(crate) fn open(config: &DeviceConfig, around: &Surroundings<'_>) -> Result<Form, DeviceError> {
    let mut stack = config.stack.clone();
    if let StackSpec::Table(spec) = &stack {
        return open_table(spec, &config.layers, &config.limits, around);
    }
    if config.layers.iter().any(|layer| matches!(layer, LayerSpec::Cow(_))) {
        // An origin is only read: others may have overlays over it too.
        stack = cow::origin(stack)?;
    }
    let source = Source::open(&stack)?;
    let mut words = config.stack.clone();
    source.settle(&mut words);
    let mut tree = Tree::leaf(source);
    if let StackSpec::File(file) = &config.stack
        && let Some(selector) = &file.part
    {
        tree = part::open(tree, selector)?;
    }
    let tree = finish(tree, &config.layers, &config.limits)?;
    Ok(Form { stack: words, layers: all_layers(&config.layers, &config.limits), tree, table: None })
}

/// Load a table, and put the layers on it.
///
/// # Errors
/// What of the table is refused, or does not open, stack or fit; nothing stays open.
pub(crate) fn open_table(
    spec: &TableSpec,
    layers: &[LayerSpec],
    limits: &str,
    around: &Surroundings<'_>,
) -> Result<Form, DeviceError> {
    let (tree, loaded) = table::load(spec, around)?;
    let tree = finish(tree, layers, limits)?;
    let (stack, layers) = (StackSpec::Table(spec.clone()), all_layers(layers, limits));
    Ok(Form { stack, layers, tree, table: Some(loaded) })
}

impl Tree {
    /// The same tree with other layers in the place of the uppermost `count`, each of which stands on one thing.
    ///
    /// # Errors
    /// What does not stack or fit.
    pub(crate) fn relayered(&self, count: usize, layers: &[LayerSpec]) -> Result<Tree, DeviceError> {
        let bare = (0..count).fold(self, |tree, _| tree.beneath().unwrap_or(tree));
        finish(bare.clone(), layers, "")
    }
}

/// The layers, with limits of the whole device as the last of them.
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

/// Write the uppermost overlay of a device that nobody serves down into what it stands over.
///
/// # Errors
/// What does not open, and what cannot be written: the overlay can be committed again.
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
        LayerSpec::Driver(words) => driver(below, words),
        LayerSpec::Scheduler(choice) => below.with_scheduler(Some(choice)),
    }
}

/// A layer of the list of drivers, over its files as well.
fn driver(below: Tree, words: &Words) -> Result<Tree, DeviceError> {
    let mut children = vec![below];
    for wanted in words.files() {
        let file = FileSpec {
            path: wanted.path,
            format: FileFormat::Given(Format::Raw),
            create: wanted.create,
            ..FileSpec::default()
        };
        children.push(Tree::leaf(Source::open(&StackSpec::File(file))?));
    }
    let profiles: Vec<Profile> = children.iter().map(|child| child.profile().clone()).collect();
    let layer = words.layer(&profiles).map_err(|why| DeviceError::Layer { name: words.name(), why })?;
    Ok(Tree::over(layer, children)?)
}

fn split(below: Tree, limits: &str) -> Result<Tree, DeviceError> {
    let wanted: LimitOverrides = limits.parse()?;
    Ok(Tree::over(Arc::new(SplitLayer::new(wanted)), vec![below])?)
}
