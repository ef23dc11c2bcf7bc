//! A device's stack as a tree: backends at its leaves, layers above them, each layer over one child or more.
//!
//! Owned by the device, on the control plane. Each element is the **shared** part, made once; from it
//! [`Tree::mount`] makes the nodes of one hardware queue, on that queue's thread. What the whole is (size,
//! limits, abilities) is computed from the leaves upwards, by the same few lines for every shape of tree.
//!
//! Nodes are numbered in the order in which the tree is walked, a layer before its children and the children
//! in order, so a parent's number is always below its children's. One backend may stand in several places of
//! a tree: each place has a node of its own on the same shared part.
//!
//! *Invariant:* no path from the top to a backend is longer than [`DEPTH_MAX`] nodes.

mod build;
mod commit;
mod cow;
mod layer;
mod part;
mod places;
#[cfg(test)]
mod power_cuts;
mod rehearsal;
mod scheduler;
mod scratch;
mod source;
mod table;

pub(crate) use build::{commit, open, open_table};
pub use commit::CommitError;
pub(crate) use commit::{Clients, Commit, give_back};
pub use cow::CowError;
pub use part::PartError;
pub(crate) use part::{TABLE_FACT, table_facts};
pub(crate) use rehearsal::rehearse;
pub(crate) use scratch::Scratch;
pub use table::TableError;
pub(crate) use table::{Loaded, LoadedTarget, Pool, Surroundings, numbers_of};

use crate::device::{Device, DeviceError, Form};
use crate::dial::Remote;
use crate::reactor::Nudge;
use crate::stacking::{Footing, devices_below};
use backends::{Fact, File, Null, OpenError};
use block::{Bytes, Integrity, LimitOverrides, LimitsError, Profile, Region};
use exports::nbd::DeviceFacts;
use layers::cow::Index;
use layers::scheduler::Scheduler;
use layers::{Layer, SplitLayer};
use partition::Selector;
use queue::{DEPTH_MAX, FileId, NodeId, Stack};
use ring::{ForeignMemory, KernelRing};
use source::Source;
use std::path::PathBuf;
use std::sync::Arc;

/// What a reactor keeps for a device that it serves.
pub(crate) struct Mounted {
    /// The nodes of its queue.
    pub(crate) stack: Stack<KernelRing>,
    /// What the front-end may count on.
    pub(crate) facts: DeviceFacts,
    /// What the ring holds for it.
    pub(crate) held: Held,
}

/// What a ring holds for a device, to be let go with it.
pub(crate) struct Held {
    files: Vec<FileId>,
    regions: Vec<Region>,
    /// How many of its files use the ring's registered memory.
    registrations: u32,
    /// Wakes the queue, for what is brought to its nodes from other threads.
    nudge: Nudge,
}

impl Held {
    fn region(&mut self, ring: &mut KernelRing, memory: ForeignMemory) -> Region {
        let region = ring.add_foreign(memory);
        self.regions.push(region);
        region
    }

    /// The device's queue is gone.
    pub(crate) fn release(self, ring: &mut KernelRing) {
        self.files.into_iter().for_each(|file| ring.remove_file(file));
        self.regions.into_iter().for_each(|region| ring.remove_region(region));
        (0..self.registrations).for_each(|_| ring.release_memory());
    }
}

#[derive(Clone)]
enum Element {
    Backend(Arc<Source>),
    Layer(Arc<dyn Layer<KernelRing>>, Vec<Tree>),
    /// What another device of this process is, with nodes of our own.
    Device(Arc<Device>, Arc<Form>),
}

/// What is to become of a file.
type RemakeFile = dyn Fn(&Arc<File>) -> Result<Arc<File>, OpenError> + Send;

/// What is to become of a tree that changes while it is served.
pub(crate) struct Remake {
    /// Of each of its files.
    pub(crate) file: Box<RemakeFile>,
    /// Of its partitions.
    pub(crate) tables: Tables,
}

/// What a change means to partition tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tables {
    /// They are not looked at: partitions stay where and as long as they were.
    Keep,
    /// They may have changed, and partitions may have become longer or shorter, in their place.
    Reread,
    /// They are other disks' tables.
    Others,
}

/// What decides a layer's size, other than what stands below it.
#[derive(Clone)]
enum Extent {
    /// Nothing.
    Below,
    /// The partition that this selects in the table below, and where it began.
    Partition(Selector, Bytes),
    /// It was decided when this overlay was made.
    Overlay(Arc<Index>),
    /// Nothing. It is this scheduler, whose parameters change.
    Scheduler(Arc<Scheduler>),
}

/// Why a tree has the size it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SizeOf {
    /// That of its only file.
    File,
    /// That of a partition.
    Partition,
    /// That of an overlay.
    Overlay,
    /// What its backend was made with, or what several backends come to.
    Other,
}

/// A backend, or a layer and what stands below it. A clone is further nodes on the same shared parts.
#[derive(Clone)]
pub(crate) struct Tree {
    element: Element,
    profile: Profile,
    extent: Extent,
}

impl Tree {
    /// A tree of one leaf.
    fn leaf(source: Source) -> Tree {
        Tree::on(Arc::new(source))
    }

    /// The same on a backend that may stand elsewhere, too.
    fn on(source: Arc<Source>) -> Tree {
        Tree { profile: source.profile(), element: Element::Backend(source), extent: Extent::Below }
    }

    /// What a device is at the moment.
    fn of_device(device: &Arc<Device>) -> Tree {
        Tree::of_form(device, device.form())
    }

    /// What a device is in that form.
    fn of_form(device: &Arc<Device>, form: Arc<Form>) -> Tree {
        Tree {
            profile: form.tree.profile.clone(),
            element: Element::Device(device.clone(), form),
            extent: Extent::Below,
        }
    }

    /// The server, where it is nothing but an export of one.
    fn remote(&self) -> Option<&Remote> {
        let Element::Backend(source) = &self.element else { return None };
        let Source::Nbd(remote) = &**source else { return None };
        Some(remote)
    }

    /// What it stands on directly that may be another device of this process.
    pub(crate) fn footing(&self) -> Footing {
        let mut footing = Footing::default();
        self.add_footing(&mut footing);
        footing
    }

    fn add_footing(&self, footing: &mut Footing) {
        match &self.element {
            Element::Device(device, _) => footing.devices.push(device.clone()),
            Element::Layer(_, below) => below.iter().for_each(|child| child.add_footing(footing)),
            Element::Backend(source) => match &**source {
                Source::File(file) => footing.files.push(file.spec().path.clone()),
                Source::Image(image) => footing.files.push(image.spec().path.clone()),
                Source::Nbd(remote) => footing.servers.push(remote.nbd.uri().to_owned()),
                Source::Ram(_) | Source::Null(..) | Source::Zero(..) | Source::Failing(_) => {}
            },
        }
    }

    /// Whether it stands on a device, directly or by others.
    pub(crate) fn stands_on(&self, device: &Arc<Device>) -> bool {
        devices_below(self).iter().any(|lower| Arc::ptr_eq(lower, device))
    }

    /// Whether a device that it stands on is held back.
    pub(crate) fn is_held(&self) -> bool {
        devices_below(self).iter().any(|lower| lower.is_suspended())
    }

    /// The same tree over what the devices that it stands on are by now.
    ///
    /// # Errors
    /// What its layers do not take, and more layers than a request's path holds.
    pub(crate) fn rebased(&self) -> Result<Tree, DeviceError> {
        self.rebased_on(&[])
    }

    /// The same tree over what the devices that it stands on are by now, or for those listed here, over the forms that they
    /// are about to have.
    ///
    /// # Errors
    /// What its layers do not take, and more layers than a request's path holds.
    pub(crate) fn rebased_on(&self, coming: &[(Arc<Device>, Arc<Form>)]) -> Result<Tree, DeviceError> {
        let tree = self.rebased_part(coming)?;
        tree.check_height()?;
        Ok(tree)
    }

    fn rebased_part(&self, coming: &[(Arc<Device>, Arc<Form>)]) -> Result<Tree, DeviceError> {
        match &self.element {
            Element::Backend(_) => Ok(self.clone()),
            Element::Device(device, _) => {
                let form = coming.iter().find(|(other, _)| Arc::ptr_eq(other, device));
                let form = form.map_or_else(|| device.form(), |(_, form)| form.clone());
                Ok(Tree::of_form(device, form))
            }
            Element::Layer(layer, below) => {
                let below = below.iter().map(|child| child.rebased_part(coming)).collect::<Result<_, _>>()?;
                let mut tree = Tree::over(layer.clone(), below)?.sized_by(self.extent.clone());
                // What a table took away stays away, and what it forbade stays forbidden.
                tree.profile.opaque &= self.profile.opaque;
                tree.profile.lends &= self.profile.lends;
                tree.profile.read_only |= self.profile.read_only;
                Ok(tree)
            }
        }
    }

    /// A layer over children, which are its own from here on.
    fn over(layer: Arc<dyn Layer<KernelRing>>, below: Vec<Tree>) -> Result<Tree, LimitsError> {
        let profiles: Vec<Profile> = below.iter().map(|child| child.profile.clone()).collect();
        let mut profile = layer.profile(&profiles)?;
        profile.opaque = !layer.looks_at_data() && profiles.iter().all(|child| child.opaque);
        Ok(Tree { profile, element: Element::Layer(layer, below), extent: Extent::Below })
    }

    /// Its size is decided so.
    fn sized_by(mut self, extent: Extent) -> Tree {
        self.extent = extent;
        self
    }

    /// Why it has the size it has.
    pub(crate) fn size_of(&self) -> SizeOf {
        match (&self.extent, &self.element) {
            (Extent::Partition(..), _) => SizeOf::Partition,
            (Extent::Overlay(_), _) => SizeOf::Overlay,
            (_, Element::Backend(source)) => match **source {
                Source::File(_) => SizeOf::File,
                _ => SizeOf::Other,
            },
            (_, Element::Layer(_, below)) => match &below[..] {
                [below] => below.size_of(),
                _ => SizeOf::Other,
            },
            (_, Element::Device(..)) => SizeOf::Other,
        }
    }

    /// What stands below its uppermost layer, if that stands on one thing.
    pub(crate) fn beneath(&self) -> Option<&Tree> {
        match &self.element {
            Element::Layer(_, below) if below.len() == 1 => below.first(),
            _ => None,
        }
    }

    /// The same tree held to queue limits.
    ///
    /// # Errors
    /// What contradicts itself or what stands below, and one layer too many.
    pub(crate) fn held_to(&self, wanted: LimitOverrides) -> Result<Tree, DeviceError> {
        let tree = Tree::over(Arc::new(SplitLayer::new(wanted)), vec![self.clone()])?;
        tree.check_height()?;
        Ok(tree)
    }

    /// What the whole is to whoever uses it.
    pub(crate) fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The same as of now: a backend that was seen not to do something does not offer it any more.
    pub(crate) fn current(&self) -> Profile {
        match &self.element {
            Element::Backend(source) => source.profile(),
            Element::Layer(layer, below) => {
                let profiles: Vec<Profile> = below.iter().map(Tree::current).collect();
                // What fitted when it was opened fits with less.
                layer.profile(&profiles).unwrap_or_else(|_| self.profile.clone())
            }
            Element::Device(_, form) => form.tree.current(),
        }
    }

    /// The integrity data that it keeps. No layer carries it, so only what stands alone has any.
    pub(crate) fn integrity(&self) -> Option<Integrity> {
        match &self.element {
            Element::Backend(source) => match &**source {
                Source::Ram(ram) => ram.integrity(),
                _ => None,
            },
            Element::Layer(..) | Element::Device(..) => None,
        }
    }

    /// Whether what it stands on keeps integrity data that its layers do not carry.
    pub(crate) fn hides_integrity(&self) -> bool {
        match &self.element {
            Element::Layer(_, below) => {
                matches!(&below[..], [below] if below.integrity().is_some() || below.hides_integrity())
            }
            Element::Device(_, form) => form.tree.integrity().is_some() || form.tree.hides_integrity(),
            Element::Backend(_) => false,
        }
    }

    /// The file that it stands on, if it stands on one file and nothing else.
    pub(crate) fn only_file(&self) -> Option<&Arc<File>> {
        match (&self.element, self.children()) {
            (Element::Backend(source), _) => match &**source {
                Source::File(file) => Some(file),
                _ => None,
            },
            (Element::Layer(..), [below]) => below.only_file(),
            // What is another device's is changed there.
            (Element::Layer(..) | Element::Device(..), _) => None,
        }
    }

    /// The null device that it stands on, if it stands on one and nothing else.
    pub(crate) fn only_null(&self) -> Option<&Null> {
        match (&self.element, self.children()) {
            (Element::Backend(source), _) => match &**source {
                Source::Null(null, _) => Some(null),
                _ => None,
            },
            (Element::Layer(..), [below]) => below.only_null(),
            (Element::Layer(..) | Element::Device(..), _) => None,
        }
    }

    /// All files that it stands on, in the order of the walk.
    pub(crate) fn files(&self) -> Vec<&Arc<File>> {
        match &self.element {
            Element::Backend(source) => match &**source {
                Source::File(file) => vec![file],
                _ => Vec::new(),
            },
            Element::Layer(_, below) => below.iter().flat_map(Tree::files).collect(),
            Element::Device(..) => Vec::new(),
        }
    }

    /// Those of its files that were deleted while they are served.
    pub(crate) fn deleted(&self) -> Vec<PathBuf> {
        match &self.element {
            Element::Backend(source) => source.backend().deleted(),
            Element::Layer(_, below) => below.iter().flat_map(Tree::deleted).collect(),
            // That device's process reports them.
            Element::Device(..) => Vec::new(),
        }
    }

    /// The same tree with every file replaced by what `remake` makes of it.
    ///
    /// # Errors
    /// What `remake` refuses, what the layers do not take, and a partition that is not in its table any more.
    pub(crate) fn remade(&self, remake: &Remake) -> Result<Tree, DeviceError> {
        let (layer, below) = match &self.element {
            Element::Backend(source) => {
                let source = match &**source {
                    Source::File(file) => Source::File((remake.file)(file)?),
                    _ => {
                        let (element, extent) = (Element::Backend(source.clone()), Extent::Below);
                        return Ok(Tree { profile: source.profile(), element, extent });
                    }
                };
                return Ok(Tree::leaf(source));
            }
            // What is another device's is changed there.
            Element::Device(..) => return Ok(self.clone()),
            Element::Layer(layer, below) => (layer, below),
        };
        let mut below =
            below.iter().map(|child| child.remade(remake)).collect::<Result<Vec<_>, DeviceError>>()?;
        match &self.extent {
            Extent::Partition(selector, start) if remake.tables != Tables::Keep => {
                // A window stands on one child.
                let found = part::open(below.remove(0), selector)?;
                match found.extent {
                    Extent::Partition(_, now) if remake.tables == Tables::Reread && now != *start => {
                        Err(PartError::Moved { from: *start, to: now }.into())
                    }
                    _ => Ok(found),
                }
            }
            extent => Ok(Tree::over(layer.clone(), below)?.sized_by(extent.clone())),
        }
    }

    /// Whether there can be one queue only, for the sake of a backend.
    pub(crate) fn is_single(&self) -> bool {
        match &self.element {
            Element::Backend(source) => matches!(&**source, Source::Nbd(remote) if remote.nbd.is_single()),
            Element::Layer(_, below) => below.iter().any(Tree::is_single),
            Element::Device(_, form) => form.tree.is_single(),
        }
    }

    /// Whether all that was acknowledged is there after this process: of an image that is written, tables are in
    /// memory until a flush.
    pub(crate) fn survives(&self) -> bool {
        self.survives_itself() && devices_below(self).iter().all(|lower| lower.survives_itself())
    }

    /// The same, leaving out the devices that it stands on.
    pub(crate) fn survives_itself(&self) -> bool {
        match &self.element {
            Element::Backend(source) => !matches!(&**source, Source::Image(image) if !image.spec().read_only),
            Element::Layer(_, below) => below.iter().all(Tree::survives_itself),
            Element::Device(..) => true,
        }
    }

    /// Put what was written onto stable storage.
    ///
    /// # Errors
    /// What could not be stored: it refuses writes from now on.
    pub(crate) fn sync(&self) -> Result<(), DeviceError> {
        match self.only_file() {
            Some(file) => Ok(file.sync()?),
            None => Ok(Scratch::new(self)?.flush()?),
        }
    }

    fn children(&self) -> &[Tree] {
        match &self.element {
            Element::Backend(_) => &[],
            Element::Layer(_, below) => below,
            Element::Device(_, form) => std::slice::from_ref(&form.tree),
        }
    }

    /// Nodes on the longest path.
    fn height(&self) -> usize {
        // What another device is has no node of its own.
        let own = usize::from(!matches!(self.element, Element::Device(..)));
        own + self.children().iter().map(Tree::height).max().unwrap_or(0)
    }

    fn count(&self) -> usize {
        let own = usize::from(!matches!(self.element, Element::Device(..)));
        own + self.children().iter().map(Tree::count).sum::<usize>()
    }

    /// What `show` says: the backend that the first children lead to, then the layers above it, lowest first.
    pub(crate) fn describe(&self) -> Vec<Fact> {
        match &self.element {
            Element::Backend(source) => source.backend().describe(),
            Element::Device(_, form) => form.tree.describe(),
            Element::Layer(layer, below) => {
                let mut facts = below.first().map(Tree::describe).unwrap_or_default();
                facts.extend(layer.describe());
                facts
            }
        }
    }

    /// The file behind it, when the tree is that file whole and nothing else.
    pub(crate) fn plain_file(&self) -> Option<std::io::Result<std::os::fd::OwnedFd>> {
        let Element::Backend(source) = &self.element else { return None };
        let Source::File(file) = &**source else { return None };
        let facts = file.shared().facts();
        let whole = facts.start.0 == 0 && file.spec().sizelimit.is_none() && !facts.block_device;
        whole.then(|| file.descriptor())
    }

    /// Make the nodes of a queue of that depth on the thread that owns `ring`. When that fails the ring holds
    /// nothing more than before.
    pub(crate) fn mount(
        &self,
        ring: &mut KernelRing,
        depth: u16,
        nudge: Nudge,
    ) -> Result<Mounted, DeviceError> {
        let mut stack = Stack::default();
        let mut held = Held { files: Vec::new(), regions: Vec::new(), registrations: 0, nudge };
        self.made_for(depth);
        if let Err(error) = self.mount_at(NodeId::TOP, ring, depth, &mut stack, &mut held) {
            held.release(ring);
            return Err(error);
        }
        let Profile { lends, in_place, sparse, opaque, .. } = self.profile;
        let may_lend = self.has_memory();
        Ok(Mounted { stack, facts: DeviceFacts { lends, may_lend, in_place, sparse, opaque }, held })
    }

    /// Whether what is read is, or may be, memory of this process that stays as it is: nothing that a file system can
    /// take away again, as it can what is mapped of a file.
    fn has_memory(&self) -> bool {
        match &self.element {
            Element::Backend(source) => source.profile().lends,
            Element::Device(_, form) => form.tree.has_memory(),
            Element::Layer(layer, below) => {
                let profiles: Vec<Profile> = below.iter().map(|child| child.profile.clone()).collect();
                below.iter().all(Tree::has_memory)
                    && layer.profile(&profiles).is_ok_and(|profile| profile.lends)
            }
        }
    }

    fn mount_at(
        &self,
        at: NodeId,
        ring: &mut KernelRing,
        depth: u16,
        stack: &mut Stack<KernelRing>,
        held: &mut Held,
    ) -> Result<(), DeviceError> {
        let (layer, below) = match &self.element {
            Element::Backend(source) => {
                stack.backend(source.mount(ring, held)?);
                return Ok(());
            }
            Element::Device(_, form) => return form.tree.mount_at(at, ring, depth, stack, held),
            Element::Layer(layer, below) => (layer, below),
        };
        let mut next = usize::from(at.0) + 1;
        let mut numbers = Vec::new();
        for child in below {
            // A stack of too many nodes is refused as a whole by its queue.
            numbers.push(NodeId(next.min(255) as u8));
            next += child.count();
        }
        stack.layer(layer.node(&self.profile, &numbers), layer.spares(depth));
        for (child, &number) in below.iter().zip(&numbers) {
            child.mount_at(number, ring, depth, stack, held)?;
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
