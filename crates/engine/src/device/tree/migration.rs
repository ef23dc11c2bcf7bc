//! The tree of a device whose contents move to another stack: the layers of the device stay; the stack below
//! them is replaced by a migration over both stacks, and the migration later by the destination.

use super::source;
use super::{Element, LoadedTarget, SyncIo, Tree};
use crate::device::DeviceError;
use crate::device::tree::Loaded;
use crate::spec::{DiskFileSpec, LayerSpec, StackSpec};
use block::{Bytes, Sectors};
use layers::dm::migration::Migration;
use layers::dm::{Names, TableLayer, TableTarget, TargetRange};
use ring::KernelRing;
use std::sync::Arc;

/// A migration, and the trees of the device during and after it.
pub(crate) struct MovePlan {
    pub(crate) migration: Arc<Migration>,
    /// The device's whole tree while its contents move.
    pub(crate) during: Tree,
    /// The migration as a table, so that it is suspended, resumed and run in the background like a target.
    pub(crate) table: Arc<Loaded>,
    /// The device's whole tree afterwards.
    pub(crate) after: Tree,
    /// The destination alone.
    destination: Tree,
    /// The destination as it would be typed, with the format that was found.
    pub(crate) stack: StackSpec,
}

impl MovePlan {
    /// Flushes the destination: what was copied to it is on stable storage afterwards.
    ///
    /// # Errors
    /// The flush failed.
    pub(crate) fn flush(&self) -> Result<(), DeviceError> {
        Ok(SyncIo::new(&self.destination)?.flush()?)
    }
}

/// Opens the destination, as long as the device without its layers, and builds the trees.
///
/// # Errors
/// The destination cannot be opened or does not fit; nothing stays open.
pub(crate) fn plan(
    tree: &Tree,
    layers: &[LayerSpec],
    to: &StackSpec,
    rate: Option<u64>,
    name: &str,
) -> Result<MovePlan, DeviceError> {
    let source = tree.base(layers.len()).clone();
    let refuse = DeviceError::Move;
    let opened = source::open(to, Some(name))?;
    let mut stack = to.clone();
    opened.record_format(&mut stack);
    let mut destination = Tree::leaf(opened);
    if let StackSpec::File(DiskFileSpec { part: Some(selector), .. }) = to {
        destination = super::part::open(destination, selector)?;
    }
    let (from, into) = (source.profile().clone(), destination.profile().clone());
    if into.read_only {
        return Err(refuse("the destination is read-only".to_owned()));
    }
    if into.size != from.size {
        return Err(refuse(format!(
            "the destination has size {}, and the device {} (give it the same size: size=, or resize one of them)",
            into.size, from.size
        )));
    }
    let (was, now) = (from.limits.logical_block_size, into.limits.logical_block_size);
    if now > was {
        let why = format!(
            "the destination has logical blocks of {now}, and users of the device rely on blocks of {was}"
        );
        return Err(refuse(why));
    }
    let place = TargetRange { start: Sectors(0), len: from.size.sectors() };
    if place.len.bytes() != from.size || place.len == Sectors(0) {
        return Err(refuse(format!("the device size {} is not a multiple of 512 bytes", from.size)));
    }
    let migration = Migration::new(place.len, stack.to_string(), rate);
    let target = migration.target::<KernelRing>();
    let devices = vec![source, destination.clone()];
    let row =
        TableTarget { place, max_io_len: target.max_io_len(), splits_discards: target.splits_discards() };
    let over = Tree::over(target.clone(), devices.clone())?;
    let mut base = Tree::over(Arc::new(TableLayer::new(vec![row])), vec![over])?;
    base.profile.opaque = devices.iter().all(|device| device.profile.opaque);
    let mut names = Names::default();
    ["source", "destination"].into_iter().for_each(|name| names.push(name, name));
    let table = Loaded::of_target(LoadedTarget { place, kind: "move", target, names, devices });
    let during = tree.with_base(layers.len(), base)?;
    during.check_height()?;
    let after = tree.with_base(layers.len(), destination.clone())?;
    Ok(MovePlan { migration, during, table: Arc::new(table), after, destination, stack })
}

impl Tree {
    /// Returns the tree below the uppermost `layers`.
    fn base(&self, layers: usize) -> &Tree {
        (0..layers).fold(self, |tree, _| match &tree.element {
            Element::Layer(_, below) => &below[0],
            _ => tree,
        })
    }

    /// Returns this tree with its uppermost `layers`, which keep their state, over another tree.
    fn with_base(&self, layers: usize, base: Tree) -> Result<Tree, DeviceError> {
        match &self.element {
            Element::Layer(layer, below) if layers > 0 => {
                let mut below = below.clone();
                below[0] = below[0].with_base(layers - 1, base)?;
                Ok(self.with_children(layer, below)?)
            }
            _ => Ok(base),
        }
    }

    /// Returns the size of the tree below the uppermost `layers`.
    pub(crate) fn base_size(&self, layers: usize) -> Bytes {
        self.base(layers).profile().size
    }
}
