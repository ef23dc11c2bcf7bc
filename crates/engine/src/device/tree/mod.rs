//! A device's stack as a tree: backends at its leaves, layers above them, each layer over one child or more.
//!
//! Owned by the device, on the control plane. Each element is the **shared** part, created once; from it
//! [`Tree::build_nodes`] builds the nodes of one hardware queue, on that queue's thread. The properties of
//! the whole (size, limits, abilities) are computed from the leaves upwards.
//!
//! Nodes are numbered in the order in which the tree is walked, a layer before its children and the children
//! in order, so a parent's number is always below its children's. One backend may occur several times in a
//! tree, with a node of its own for each on the same shared part.
//!
//! *Invariant:* no path from the top to a backend is longer than [`DEPTH_MAX`] nodes.

mod build;
mod commit;
mod cow;
mod dry_run;
mod layer;
pub(crate) mod migration;
mod nodes;
mod part;
#[cfg(test)]
mod power_cuts;
mod scheduler;
mod source;
mod sync_io;
mod table;
pub(crate) mod targets;

pub(crate) use build::{commit, open, open_table};
pub use commit::CommitError;
pub(crate) use commit::{Clients, Commit, free_space};
pub use cow::CowError;
pub(crate) use dry_run::dry_run;
pub use part::PartError;
pub(crate) use part::{TABLE_FACT, table_facts};
pub(crate) use sync_io::SyncIo;
pub use table::TableError;
pub(crate) use table::{Loaded, LoadedTarget, OpenContext, SourcePool, numbers_of};

use crate::connect::Remote;
use crate::device::dependencies::{Dependencies, lower_devices};
use crate::device::{Composition, Device, DeviceError};
use crate::spec::DiskFileSpec;
use backends::{Fact, File, Null, OpenError};
use block::{Bytes, Integrity, LimitOverrides, LimitsError, Profile, Region};
use exports::nbd::DeviceFacts;
use layers::cow::Index;
use layers::scheduler::Scheduler;
use layers::{Layer, SplitLayer};
use partition::Selector;
use queue::{DEPTH_MAX, FileId, NodeId, QueueWaker, Stack};
use rbd::Rbd;
use ring::{ForeignMemory, KernelRing};
use source::Source;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// The part of a device on one reactor.
pub(crate) struct BuiltNodes {
    /// The nodes of its queue.
    pub(crate) stack: Stack<KernelRing>,
    /// Properties that the front-end may rely on.
    pub(crate) facts: DeviceFacts,
    /// Files and memory that the ring holds for it.
    pub(crate) resources: RingResources,
}

/// Files and memory that a ring holds for a device, released with its queue.
pub(crate) struct RingResources {
    files: Vec<FileId>,
    regions: Vec<Region>,
    /// Number of its files that use the ring's registered memory.
    registrations: u32,
    /// Wakes the queue when its nodes receive something from other threads.
    waker: QueueWaker,
}

impl RingResources {
    fn region(&mut self, ring: &mut KernelRing, memory: ForeignMemory) -> Region {
        let region = ring.add_foreign(memory);
        self.regions.push(region);
        region
    }

    fn file(&mut self, ring: &mut KernelRing, file: Arc<OwnedFd>) -> std::io::Result<FileId> {
        let id = ring.add_file(file)?;
        self.files.push(id);
        Ok(id)
    }

    /// Releases the resources, after the device's queue is gone.
    pub(crate) fn release(self, ring: &mut KernelRing) {
        self.files.into_iter().for_each(|file| ring.remove_file(file));
        self.regions.into_iter().for_each(|region| ring.remove_region(region));
        (0..self.registrations).for_each(|_| ring.release_memory());
    }
}

#[derive(Clone)]
enum Element {
    Backend(Arc<dyn Source>),
    Layer(Arc<dyn Layer<KernelRing>>, Vec<Tree>),
    /// Another device of this process. The tree builds its own nodes for that device's composition.
    Device(Arc<Device>, Arc<Composition>),
}

/// Returns the replacement of a file.
type RebuildFile = dyn Fn(&Arc<File>) -> Result<Arc<File>, OpenError> + Send;

/// How to rebuild a tree for a device that is served.
pub(crate) struct Rebuild {
    /// Applied to each of its files.
    pub(crate) file: Box<RebuildFile>,
    /// Applied to each of its images of a cluster.
    pub(crate) rbd: RbdSize,
    /// Applied to its partitions.
    pub(crate) tables: PartitionTables,
}

/// The effect of a change on the size of an image of a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RbdSize {
    /// The size stays as it is.
    Keep,
    /// The image's current size is the device's.
    Remeasured,
    /// The image is given this size.
    Given(Bytes),
}

/// The effect of a change on partition tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PartitionTables {
    /// They are not read: partitions keep their place and size.
    Keep,
    /// They are re-read: partitions may have changed their size, but not their place.
    Reread,
    /// The disk was replaced, and its table with it.
    Replaced,
}

/// What determines a layer's size, other than its children.
#[derive(Clone)]
enum Extent {
    /// The children alone determine it.
    Below,
    /// The partition that the selector finds in the table below, and where it started.
    Partition(Selector, Bytes),
    /// The overlay's own size, fixed when it was created.
    Overlay(Arc<Index>),
    /// The children alone determine it. The layer is the scheduler, whose parameters can change.
    Scheduler(Arc<Scheduler>),
}

/// What determines the size of a tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SizeSource {
    /// Its only file, or its only image of a cluster.
    File,
    /// A partition.
    Partition,
    /// An overlay.
    Overlay,
    /// The options of its backend, or several backends.
    Other,
}

/// A backend, or a layer with its children. A clone stands for further nodes on the same shared parts.
#[derive(Clone)]
pub(crate) struct Tree {
    element: Element,
    profile: Profile,
    extent: Extent,
}

impl Tree {
    /// Creates a tree of one backend, which may occur elsewhere, too.
    fn leaf(source: Arc<dyn Source>) -> Tree {
        Tree { profile: source.profile(), element: Element::Backend(source), extent: Extent::Below }
    }

    /// Creates a tree of a device in its current composition.
    fn of_device(device: &Arc<Device>) -> Tree {
        Tree::of_composition(device, device.composition())
    }

    /// Creates a tree of a device in the given composition.
    fn of_composition(device: &Arc<Device>, composition: Arc<Composition>) -> Tree {
        Tree {
            profile: composition.tree.profile.clone(),
            element: Element::Device(device.clone(), composition),
            extent: Extent::Below,
        }
    }

    /// Opens a stack that is no table, for a command that does not serve it.
    ///
    /// # Errors
    /// It cannot be opened, or has no such partition.
    pub(crate) fn alone(stack: &crate::spec::StackSpec) -> Result<Tree, DeviceError> {
        let tree = Tree::leaf(source::open(stack, None)?);
        match stack {
            crate::spec::StackSpec::File(DiskFileSpec { part: Some(selector), .. }) => {
                part::open(tree, selector)
            }
            _ => Ok(tree),
        }
    }

    /// Returns whether it is the export of a server, which may have block status.
    pub(crate) fn is_remote(&self) -> bool {
        self.remote().is_some()
    }

    /// Returns the NBD backend, if the tree is nothing else.
    fn remote(&self) -> Option<&Remote> {
        let Element::Backend(source) = &self.element else { return None };
        source.remote()
    }

    /// Returns the direct dependencies of the tree.
    pub(crate) fn dependencies(&self) -> Dependencies {
        let mut dependencies = Dependencies::default();
        self.collect_dependencies(&mut dependencies);
        dependencies
    }

    fn collect_dependencies(&self, dependencies: &mut Dependencies) {
        match &self.element {
            Element::Device(device, _) => dependencies.devices.push(device.clone()),
            Element::Layer(_, below) => {
                below.iter().for_each(|child| child.collect_dependencies(dependencies))
            }
            Element::Backend(source) => source.add_dependencies(dependencies),
        }
    }

    /// Returns whether the tree uses a device, directly or through others.
    pub(crate) fn depends_on(&self, device: &Arc<Device>) -> bool {
        lower_devices(self).iter().any(|lower| Arc::ptr_eq(lower, device))
    }

    /// Returns whether a device that the tree uses is suspended.
    pub(crate) fn is_io_suspended(&self) -> bool {
        lower_devices(self).iter().any(|lower| lower.is_suspended())
    }

    /// Returns the tree over the current compositions of the devices that it uses.
    ///
    /// # Errors
    /// The layers do not fit, or there are more layers than a request's path has room for.
    pub(crate) fn with_current_devices(&self) -> Result<Tree, DeviceError> {
        self.with_devices(&[])
    }

    /// Returns the tree over the current compositions of the devices that it uses, or, for those listed, over
    /// the compositions that they are about to get.
    ///
    /// # Errors
    /// The layers do not fit, or there are more layers than a request's path has room for.
    pub(crate) fn with_devices(&self, next: &[(Arc<Device>, Arc<Composition>)]) -> Result<Tree, DeviceError> {
        let tree = self.with_devices_unchecked(next)?;
        tree.check_height()?;
        Ok(tree)
    }

    fn with_devices_unchecked(&self, next: &[(Arc<Device>, Arc<Composition>)]) -> Result<Tree, DeviceError> {
        match &self.element {
            Element::Backend(_) => Ok(self.clone()),
            Element::Device(device, _) => {
                let composition = next.iter().find(|(other, _)| Arc::ptr_eq(other, device));
                let composition =
                    composition.map_or_else(|| device.composition(), |(_, composition)| composition.clone());
                Ok(Tree::of_composition(device, composition))
            }
            Element::Layer(layer, below) => {
                let below =
                    below.iter().map(|child| child.with_devices_unchecked(next)).collect::<Result<_, _>>()?;
                Ok(self.with_children(layer, below)?)
            }
        }
    }

    /// Returns the tree with its uppermost layer over other children.
    fn with_children(
        &self,
        layer: &Arc<dyn Layer<KernelRing>>,
        below: Vec<Tree>,
    ) -> Result<Tree, LimitsError> {
        let mut tree = Tree::over(layer.clone(), below)?.with_extent(self.extent.clone());
        // Properties that a table's rules removed stay removed.
        tree.profile.opaque &= self.profile.opaque;
        tree.profile.zero_copy_reads &= self.profile.zero_copy_reads;
        tree.profile.read_only |= self.profile.read_only;
        Ok(tree)
    }

    /// Creates a tree of a layer over children.
    fn over(layer: Arc<dyn Layer<KernelRing>>, below: Vec<Tree>) -> Result<Tree, LimitsError> {
        let profiles: Vec<Profile> = below.iter().map(|child| child.profile.clone()).collect();
        let mut profile = layer.profile(&profiles)?;
        profile.opaque = !layer.accesses_data() && profiles.iter().all(|child| child.opaque);
        Ok(Tree { profile, element: Element::Layer(layer, below), extent: Extent::Below })
    }

    /// Sets what determines the size.
    fn with_extent(mut self, extent: Extent) -> Tree {
        self.extent = extent;
        self
    }

    /// Returns what determines the size.
    pub(crate) fn size_source(&self) -> SizeSource {
        match (&self.extent, &self.element) {
            (Extent::Partition(..), _) => SizeSource::Partition,
            (Extent::Overlay(_), _) => SizeSource::Overlay,
            (_, Element::Backend(source)) if source.file().is_some() || source.rbd().is_some() => {
                SizeSource::File
            }
            (_, Element::Backend(_)) => SizeSource::Other,
            (_, Element::Layer(_, below)) => match &below[..] {
                [below] => below.size_source(),
                _ => SizeSource::Other,
            },
            (_, Element::Device(..)) => SizeSource::Other,
        }
    }

    /// Returns the child of the uppermost layer, if it has exactly one.
    pub(crate) fn below_top(&self) -> Option<&Tree> {
        match &self.element {
            Element::Layer(_, below) if below.len() == 1 => below.first(),
            _ => None,
        }
    }

    /// Returns the tree with queue limits.
    ///
    /// # Errors
    /// The limits contradict themselves or those below, or there is one layer too many.
    pub(crate) fn with_limits(&self, wanted: LimitOverrides) -> Result<Tree, DeviceError> {
        let tree = Tree::over(Arc::new(SplitLayer::new(wanted)), vec![self.clone()])?;
        tree.check_height()?;
        Ok(tree)
    }

    /// Returns the profile of the whole.
    pub(crate) fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Returns the current profile: a backend does not offer features that it was seen not to have.
    pub(crate) fn current_profile(&self) -> Profile {
        match &self.element {
            Element::Backend(source) => source.profile(),
            Element::Layer(layer, below) => {
                let profiles: Vec<Profile> = below.iter().map(Tree::current_profile).collect();
                // Layers that fitted when they were opened fit with fewer features.
                layer.profile(&profiles).unwrap_or_else(|_| self.profile.clone())
            }
            Element::Device(_, composition) => composition.tree.current_profile(),
        }
    }

    /// Returns the integrity data that it keeps. No layer carries it, so only a backend alone has any.
    pub(crate) fn integrity(&self) -> Option<Integrity> {
        match &self.element {
            Element::Backend(source) => source.integrity(),
            Element::Layer(..) | Element::Device(..) => None,
        }
    }

    /// Returns whether integrity data kept below is hidden by layers.
    pub(crate) fn hides_integrity(&self) -> bool {
        match &self.element {
            Element::Layer(_, below) => {
                matches!(&below[..], [below] if below.integrity().is_some() || below.hides_integrity())
            }
            Element::Device(_, composition) => {
                composition.tree.integrity().is_some() || composition.tree.hides_integrity()
            }
            Element::Backend(_) => false,
        }
    }

    /// Returns its file, if it has exactly one backend, which is a file.
    pub(crate) fn only_file(&self) -> Option<&Arc<File>> {
        match (&self.element, self.children()) {
            (Element::Backend(source), _) => source.file(),
            (Element::Layer(..), [below]) => below.only_file(),
            // Another device's file is changed through that device.
            (Element::Layer(..) | Element::Device(..), _) => None,
        }
    }

    /// Returns its image of a cluster, if it has exactly one backend, which is one.
    pub(crate) fn only_rbd(&self) -> Option<&Arc<Rbd>> {
        match (&self.element, self.children()) {
            (Element::Backend(source), _) => source.rbd(),
            (Element::Layer(..), [below]) => below.only_rbd(),
            (Element::Layer(..) | Element::Device(..), _) => None,
        }
    }

    /// Returns whether its only file, or its only image of a cluster, has this size.
    pub(crate) fn is_as_long_as(&self, size: Bytes) -> bool {
        match (self.only_file(), self.only_rbd()) {
            (Some(file), _) => file.measured().is_ok_and(|len| len == size),
            (None, Some(rbd)) => rbd.measured().is_ok_and(|len| len == size),
            (None, None) => false,
        }
    }

    /// Truncates its only file, or its only image of a cluster, to the device's size.
    ///
    /// # Errors
    /// The file system or the cluster refuses.
    pub(crate) fn cut(&self) -> Result<(), DeviceError> {
        match (self.only_file(), self.only_rbd()) {
            (Some(file), _) => Ok(file.cut()?),
            (None, Some(rbd)) => Ok(rbd.cut()?),
            (None, None) => Ok(()),
        }
    }

    /// Returns its null device, if it has exactly one backend, which is a null device.
    pub(crate) fn only_null(&self) -> Option<&Null> {
        match (&self.element, self.children()) {
            (Element::Backend(source), _) => source.null(),
            (Element::Layer(..), [below]) => below.only_null(),
            (Element::Layer(..) | Element::Device(..), _) => None,
        }
    }

    /// Lists all its files, in the order of the walk.
    pub(crate) fn files(&self) -> Vec<&Arc<File>> {
        match &self.element {
            Element::Backend(source) => source.file().into_iter().collect(),
            Element::Layer(_, below) => below.iter().flat_map(Tree::files).collect(),
            Element::Device(..) => Vec::new(),
        }
    }

    /// Lists files that were deleted while they are served.
    pub(crate) fn deleted(&self) -> Vec<PathBuf> {
        match &self.element {
            Element::Backend(source) => source.backend().deleted(),
            Element::Layer(_, below) => below.iter().flat_map(Tree::deleted).collect(),
            // The other device reports its own deleted files.
            Element::Device(..) => Vec::new(),
        }
    }

    /// Returns the tree with every file replaced by what `rebuild` returns.
    ///
    /// # Errors
    /// A file is refused, the layers do not fit, or a partition is missing in its table.
    pub(crate) fn rebuilt(&self, rebuild: &Rebuild) -> Result<Tree, DeviceError> {
        let (layer, below) = match &self.element {
            Element::Backend(source) => {
                return Ok(Tree::leaf(match (source.file(), source.rbd(), rebuild.rbd) {
                    (Some(file), ..) => source::reuse_file((rebuild.file)(file)?),
                    (_, Some(rbd), RbdSize::Given(size)) => source::reuse_rbd(rbd.resized(size)?),
                    (_, Some(rbd), RbdSize::Remeasured) => source::reuse_rbd(rbd.remeasured()?),
                    (_, Some(_), RbdSize::Keep) | (None, None, _) => source.clone(),
                }));
            }
            // Another device's file is changed through that device.
            Element::Device(..) => return Ok(self.clone()),
            Element::Layer(layer, below) => (layer, below),
        };
        let mut below =
            below.iter().map(|child| child.rebuilt(rebuild)).collect::<Result<Vec<_>, DeviceError>>()?;
        match &self.extent {
            Extent::Partition(selector, start) if rebuild.tables != PartitionTables::Keep => {
                // A partition's window has one child.
                let found = part::open(below.remove(0), selector)?;
                match found.extent {
                    Extent::Partition(_, now)
                        if rebuild.tables == PartitionTables::Reread && now != *start =>
                    {
                        Err(PartError::Moved { from: *start, to: now }.into())
                    }
                    _ => Ok(found),
                }
            }
            extent => Ok(Tree::over(layer.clone(), below)?.with_extent(extent.clone())),
        }
    }

    /// Returns whether a backend allows only one queue.
    pub(crate) fn is_single(&self) -> bool {
        match &self.element {
            Element::Backend(source) => source.is_single(),
            Element::Layer(_, below) => below.iter().any(Tree::is_single),
            Element::Device(_, composition) => composition.tree.is_single(),
        }
    }

    /// Returns whether all acknowledged data outlives this process. An image that is written has metadata in
    /// memory until a flush.
    pub(crate) fn survives(&self) -> bool {
        self.survives_itself() && lower_devices(self).iter().all(|lower| lower.survives_itself())
    }

    /// Returns whether acknowledged data outlives this process, without regard to the devices that the tree
    /// uses.
    pub(crate) fn survives_itself(&self) -> bool {
        match &self.element {
            Element::Backend(source) => source.survives(),
            Element::Layer(_, below) => below.iter().all(Tree::survives_itself),
            Element::Device(..) => true,
        }
    }

    /// Writes acknowledged data to stable storage.
    ///
    /// # Errors
    /// Some data could not be stored: writes are refused from now on.
    pub(crate) fn sync(&self) -> Result<(), DeviceError> {
        match self.only_file() {
            Some(file) => Ok(file.sync()?),
            None => Ok(SyncIo::new(self)?.flush()?),
        }
    }

    fn children(&self) -> &[Tree] {
        match &self.element {
            Element::Backend(_) => &[],
            Element::Layer(_, below) => below,
            Element::Device(_, composition) => std::slice::from_ref(&composition.tree),
        }
    }

    /// Number of nodes on the longest path.
    fn height(&self) -> usize {
        // Another device has no node of its own.
        let own = usize::from(!matches!(self.element, Element::Device(..)));
        own + self.children().iter().map(Tree::height).max().unwrap_or(0)
    }

    fn count(&self) -> usize {
        let own = usize::from(!matches!(self.element, Element::Device(..)));
        own + self.children().iter().map(Tree::count).sum::<usize>()
    }

    /// Describes the stack, for `show`: the backend that the first children lead to, then the layers above
    /// it, bottom first.
    pub(crate) fn describe(&self) -> Vec<Fact> {
        match &self.element {
            Element::Backend(source) => source.backend().describe(),
            Element::Device(_, composition) => composition.tree.describe(),
            Element::Layer(layer, below) => {
                let mut facts = below.first().map(Tree::describe).unwrap_or_default();
                facts.extend(layer.describe());
                facts
            }
        }
    }

    /// Opens the file behind it, if the tree is exactly that file.
    pub(crate) fn plain_file(&self) -> Option<std::io::Result<OwnedFd>> {
        let Element::Backend(source) = &self.element else { return None };
        let file = source.file()?;
        let facts = file.shared().facts();
        let whole = facts.start.0 == 0 && file.spec().sizelimit.is_none() && !facts.block_device;
        whole.then(|| file.descriptor())
    }

    /// Builds the nodes of a queue of that depth, on the thread that owns `ring`. After an error the ring
    /// holds nothing for it.
    pub(crate) fn build_nodes(
        &self,
        ring: &mut KernelRing,
        depth: u16,
        waker: QueueWaker,
    ) -> Result<BuiltNodes, DeviceError> {
        let mut stack = Stack::default();
        let mut resources = RingResources { files: Vec::new(), regions: Vec::new(), registrations: 0, waker };
        self.made_for(depth);
        if let Err(error) = self.build_nodes_at(NodeId::TOP, ring, depth, &mut stack, &mut resources) {
            resources.release(ring);
            return Err(error);
        }
        let Profile { zero_copy_reads, inline, sparse, opaque, .. } = self.profile;
        let allows_zero_copy = self.lends_own_memory();
        let compare_and_write = self.compares_and_writes();
        Ok(BuiltNodes {
            stack,
            facts: DeviceFacts {
                zero_copy_reads,
                allows_zero_copy,
                inline,
                sparse,
                opaque,
                compare_and_write,
            },
            resources,
        })
    }

    /// Returns whether reads return, or may return, memory of this process without a copy. Mapped files do
    /// not count, as the file system can take their pages away.
    fn lends_own_memory(&self) -> bool {
        match &self.element {
            Element::Backend(source) => source.profile().zero_copy_reads,
            Element::Device(_, composition) => composition.tree.lends_own_memory(),
            Element::Layer(layer, below) => {
                let profiles: Vec<Profile> = below.iter().map(|child| child.profile.clone()).collect();
                below.iter().all(Tree::lends_own_memory)
                    && layer.profile(&profiles).is_ok_and(|profile| profile.zero_copy_reads)
            }
        }
    }

    /// Returns whether [`Op::CompareAndWrite`](block::Op::CompareAndWrite) reaches the backend unchanged.
    fn compares_and_writes(&self) -> bool {
        match &self.element {
            Element::Backend(source) => source.compares_and_writes(),
            Element::Layer(layer, below) => {
                layer.passes_compare_and_write()
                    && matches!(&below[..], [child] if child.compares_and_writes())
            }
            Element::Device(..) => false,
        }
    }

    fn build_nodes_at(
        &self,
        at: NodeId,
        ring: &mut KernelRing,
        depth: u16,
        stack: &mut Stack<KernelRing>,
        resources: &mut RingResources,
    ) -> Result<(), DeviceError> {
        let (layer, below) = match &self.element {
            Element::Backend(source) => {
                stack.backend(source.build_node(ring, resources)?);
                return Ok(());
            }
            Element::Device(_, composition) => {
                return composition.tree.build_nodes_at(at, ring, depth, stack, resources);
            }
            Element::Layer(layer, below) => (layer, below),
        };
        let mut next = usize::from(at.0) + 1;
        let mut numbers = Vec::new();
        for child in below {
            // A stack of too many nodes is refused as a whole by its queue.
            numbers.push(NodeId(next.min(255) as u8));
            next += child.count();
        }
        stack.layer(layer.node(&self.profile, &numbers), layer.child_requests(depth));
        for (child, &number) in below.iter().zip(&numbers) {
            child.build_nodes_at(number, ring, depth, stack, resources)?;
        }
        Ok(())
    }

    fn check_height(&self) -> Result<(), DeviceError> {
        match self.height() {
            height if height > DEPTH_MAX => Err(DeviceError::TooDeep(height - 1)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
