//! From what was described to the tree that serves it.

use super::source::Source;
use super::{Surroundings, Tree, cow, part, table};
use crate::device::{DeviceConfig, DeviceError, Form};
use crate::spec::{FileFormat, FileSpec, Format, LayerSpec, LogSpec, StackSpec, TableSpec};
use block::{LimitOverrides, Sectors};
use layers::dm::{Delay, Flakey, LogWrites, Place};
use layers::{Layer, SplitLayer};
use ring::KernelRing;
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
        LayerSpec::Delay(spec) => over(Delay::of(spec.nanos()), vec![below]),
        LayerSpec::Flakey(spec) => {
            let flakey = Flakey::new(Sectors(0), Sectors(0), [spec.up, spec.down], spec.features);
            over(flakey, vec![below])
        }
        LayerSpec::Log(spec) => log(below, spec),
        LayerSpec::Scheduler(choice) => below.with_scheduler(Some(choice)),
    }
}

fn over(layer: impl Layer<KernelRing> + 'static, below: Vec<Tree>) -> Result<Tree, DeviceError> {
    Ok(Tree::over(Arc::new(layer), below)?)
}

/// A log of what is written, in a file.
fn log(below: Tree, spec: &LogSpec) -> Result<Tree, DeviceError> {
    let file = FileSpec {
        path: spec.file.clone(),
        format: FileFormat::Given(Format::Raw),
        create: spec.create,
        ..FileSpec::default()
    };
    let log = Tree::leaf(Source::open(&StackSpec::File(file))?);
    let place = Place { start: Sectors(0), len: Sectors(0) };
    let layer = LogWrites::new(place, below.profile(), log.profile())
        .map_err(|why| std::io::Error::other(format!("{}: {why}", spec.file.display())))?;
    over(layer, vec![below, log])
}

fn split(below: Tree, limits: &str) -> Result<Tree, DeviceError> {
    let wanted: LimitOverrides = limits.parse()?;
    Ok(Tree::over(Arc::new(SplitLayer::new(wanted)), vec![below])?)
}
