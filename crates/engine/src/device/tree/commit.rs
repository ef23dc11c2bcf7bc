//! Commits an overlay: writes its chunks down into its origin.
//!
//! The order makes a kill at any moment safe (docs/cow.md). The header records that a commit is in progress,
//! so the origin may differ from the one that the overlay was created over, and which parts of it stay as
//! they are. Chunks are written to the origin and flushed. The header adopts the origin as it is now. Then
//! the table is cleared, and last the data is freed. Up to the header's change the overlay holds all data, so
//! reads through it return the same throughout.
//!
//! Runs on a thread of the blocking pool. It does not know queues: if the device is served, the caller holds
//! its requests around [`Commit::copy_rest`] and [`Commit::complete`].

use super::sync_io::SyncIo;
use super::{Element, Extent, PartitionTables, RbdSize, Rebuild, Tree, cow, source};
use crate::device::DeviceError;
use crate::spec::{CowSpec, LayerSpec, StackSpec};
use backends::File;
use block::Bytes;
use layers::CowLayer;
use layers::cow::Index;
use layers::cow::format::{Fingerprint, HEADER_LEN, Header, Identity, SECOND_AT, TABLE_AT};
use std::io;
use std::sync::Arc;

/// Bytes copied at a time.
const COPY_LEN: u64 = 1 << 20;

/// Why an overlay cannot be committed. What was written until then does no harm: the overlay holds it too.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// There is no overlay.
    #[error("the device has no overlay (there is nothing to commit)")]
    NoOverlay,
    /// The origin was given as read-only.
    #[error("the origin under the overlay is read-only (leave out ro)")]
    ReadOnly,
    /// The origin would have to be opened a second time, which only a single file can be.
    #[error(
        "the origin under the overlay is not a single file (stop the device, then: blockyard commit STACK --layer …)"
    )]
    NotOneFile,
    /// The overlay is longer than its origin.
    #[error(
        "the overlay holds data past the end of its origin, which cannot be extended (extend the origin to {0})"
    )]
    Shorter(Bytes),
    /// The origin would begin like an image of another format.
    #[error(
        "the data begins with the header of an image format, and the origin's format was not given (serve it with format=raw, then commit again)"
    )]
    BecomesImage,
    /// An I/O error.
    #[error("{doing} failed: {source}")]
    Io {
        /// The operation.
        doing: &'static str,
        /// The cause.
        source: io::Error,
    },
}

fn at(doing: &'static str) -> impl Fn(io::Error) -> CommitError {
    move |source| CommitError::Io { doing, source }
}

/// The activity of the device's clients during a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Clients {
    /// They write on, also past the origin's end: chunks without room there are left for the last copy.
    Running,
    /// They are suspended, or there are none: this is the last copy.
    Suspended,
}

/// A commit in progress: the origin, open for writing.
pub(crate) struct Commit {
    index: Arc<Index>,
    base: Tree,
    /// The origin's file, which was opened a second time: write locks are held while that is so.
    reopened: Option<Arc<File>>,
    /// The samples in the header that identify the origin: the commit does not write there.
    fingerprint: Fingerprint,
}

impl Drop for Commit {
    fn drop(&mut self) {
        if let Some(file) = &self.reopened {
            deny_writers(file);
        }
    }
}

impl Commit {
    /// Starts a commit of a tree that is served, whose origin is open for reading.
    pub(crate) fn of_served(tree: &Tree) -> Result<Commit, DeviceError> {
        let (index, below) = overlay(tree)?;
        let origin = &below[0];
        let file = origin.only_file().ok_or(CommitError::NotOneFile)?;
        let again = Rebuild {
            file: Box::new(|file| file.reopened_for_writing()),
            rbd: RbdSize::Keep,
            tables: PartitionTables::Keep,
        };
        let base = origin.rebuilt(&again).inspect_err(|_| deny_writers(file))?;
        let mut commit = Commit {
            index: index.clone(),
            base,
            reopened: Some(file.clone()),
            fingerprint: Fingerprint::EMPTY,
        };
        commit.begin(tree)?;
        Ok(commit)
    }

    /// Starts a commit of a tree with its origin, open for writing.
    #[cfg(test)]
    pub(super) fn of_parts(tree: &Tree, base: Tree) -> Result<Commit, DeviceError> {
        let index = overlay(tree)?.0.clone();
        let mut commit = Commit { index, base, reopened: None, fingerprint: Fingerprint::EMPTY };
        commit.begin(tree)?;
        Ok(commit)
    }

    /// Starts a commit of a tree that is not served, whose origin is open for writing.
    fn of_opened(tree: &mut Tree) -> Result<Commit, DeviceError> {
        let Extent::Overlay(index) = &tree.extent else { return Err(CommitError::NoOverlay.into()) };
        let Element::Layer(_, below) = &mut tree.element else { return Err(CommitError::NoOverlay.into()) };
        // The overlay is not read through the tree any more, so its origin may be moved out.
        let base = below.remove(0);
        let index = index.clone();
        let mut commit = Commit { index, base, reopened: None, fingerprint: Fingerprint::EMPTY };
        commit.begin(tree)?;
        Ok(commit)
    }

    /// Records in the header that the origin may change, also in length.
    fn begin(&mut self, tree: &Tree) -> Result<(), DeviceError> {
        self.missing_length()?;
        self.mark_committing(tree)?;
        self.extend_origin()
    }

    /// Records in the header that the origin may change, and samples that identify it: parts that the overlay
    /// does not hold.
    fn mark_committing(&mut self, tree: &Tree) -> Result<(), DeviceError> {
        let store = overlay(tree)?.1.last().ok_or(CommitError::NoOverlay)?;
        // After a power cut the origin may be as short as before, however long it is now.
        let size = self.index.origin_size().min(self.base.profile().size);
        let fingerprint =
            cow::fingerprint(&self.base, size, &self.index).map_err(at("reading the origin"))?;
        write_header(&mut SyncIo::new(store)?, |header| {
            header.committing = true;
            header.fingerprint = fingerprint;
        })?;
        self.fingerprint = fingerprint;
        Ok(())
    }

    /// Copies for the last time, while clients are suspended, what has been written since the beginning.
    pub(crate) fn copy_rest(&mut self, tree: &Tree) -> Result<(), DeviceError> {
        // The overlay may hold chunks past the origin's end by now, or where it is sampled.
        self.extend_origin()?;
        self.mark_committing(tree)?;
        self.copy_down(tree, Clients::Suspended)
    }

    /// Extends the origin if the overlay holds chunks past its end.
    fn extend_origin(&mut self) -> Result<(), DeviceError> {
        if let Some((file, size)) = self.missing_length()? {
            self.base = Tree::leaf(source::reuse_file(file.resized(size)?));
            // The new length is on stable storage before anything past the old end.
            SyncIo::new(&self.base)?.flush().map_err(at("flushing the origin's new length"))?;
        }
        Ok(())
    }

    /// Returns the file that has to be extended for all chunks to fit, and to what size.
    fn missing_length(&self) -> Result<Option<(&Arc<File>, Bytes)>, CommitError> {
        let layout = self.index.layout();
        let size = self.base.profile().size;
        if size >= layout.size || self.index.next_live(size.0 / layout.chunk.0).is_none() {
            return Ok(None);
        }
        match &self.base.element {
            Element::Backend(source) => match source.file() {
                Some(file) if !file.shared().facts().block_device => Ok(Some((file, layout.size))),
                _ => Err(CommitError::Shorter(layout.size)),
            },
            Element::Layer(..) | Element::Device(..) => Err(CommitError::Shorter(layout.size)),
        }
    }

    /// Writes all chunks that differ to the origin, and flushes. May be repeated for what has changed since.
    pub(crate) fn copy_down(&self, tree: &Tree, clients: Clients) -> Result<(), DeviceError> {
        let store = &overlay(tree)?.1.last().ok_or(CommitError::NoOverlay)?;
        let layout = self.index.layout();
        let mut store = SyncIo::new(store)?;
        let mut base = SyncIo::new(&self.base)?;
        let room = self.base.profile().size.0;
        let (mut ours, mut theirs) = (vec![0; COPY_LEN as usize], vec![0; COPY_LEN as usize]);
        let mut from = 0;
        while let Some(run) = self.index.next_live(from) {
            from = run.end;
            let (mut offset, stop) =
                (run.start * layout.chunk.0, (run.end * layout.chunk.0).min(layout.size.0));
            if stop > room && clients == Clients::Suspended {
                // A chunk without room must not count as copied.
                return Err(CommitError::Shorter(layout.size).into());
            }
            let stop = stop.min(room);
            while offset < stop {
                let (free, next) = self.writable_before_sample(offset, stop);
                let len = COPY_LEN.min(free) as usize;
                if len == 0 {
                    offset = next;
                    continue;
                }
                let (ours, theirs) = (&mut ours[..len], &mut theirs[..len]);
                store.read(layout.data_at().0 + offset, ours).map_err(at("reading the overlay"))?;
                base.read(offset, theirs).map_err(at("reading the origin"))?;
                write_changed(&mut base, offset, ours, theirs).map_err(|why| match why.raw_os_error() {
                    Some(libc::EPERM) => CommitError::BecomesImage,
                    _ => at("writing the origin")(why),
                })?;
                offset += len as u64;
            }
        }
        base.flush().map_err(at("flushing the origin"))?;
        Ok(())
    }

    /// Returns how far may be written from `offset` before a sampled chunk, and where to continue after it. A
    /// sampled chunk was written to the overlay after the samples were taken; it is copied when other samples
    /// are taken.
    fn writable_before_sample(&self, offset: u64, stop: u64) -> (u64, u64) {
        let chunk = self.index.layout().chunk.0;
        let first = offset - offset % chunk;
        let next =
            self.fingerprint.samples().iter().map(|(at, _)| at - at % chunk).find(|start| *start >= first);
        let start = next.unwrap_or(stop).clamp(offset, stop);
        (start - offset, (next.unwrap_or(stop) + chunk).min(stop))
    }

    /// Completes a commit after the last copy: the header adopts the origin as it is now. Returns the tree to
    /// be served from here on, with an empty overlay.
    pub(crate) fn complete(&self, tree: &Tree) -> Result<Tree, DeviceError> {
        let store = overlay(tree)?.1.last().ok_or(CommitError::NoOverlay)?;
        let identity = cow::identify(&self.base).map_err(at("reading the origin"))?;
        // The journal is obsolete from here on: if the device keeps its overlay after all, the table has all
        // chunks.
        SyncIo::new(tree)?.flush().map_err(at("flushing the overlay"))?;
        let generation = write_header(&mut SyncIo::new(store)?, |header| {
            adopt_origin(header, identity);
        })?;
        self.index.restart(generation);
        tree.with_empty_overlay(identity.size, generation)
    }
}

/// Frees the space of an overlay that is empty: first its tables, then the data.
pub(crate) fn free_space(tree: &Tree) -> Result<(), DeviceError> {
    let (index, below) = overlay(tree)?;
    let layout = index.layout();
    let mut store = SyncIo::new(below.last().ok_or(CommitError::NoOverlay)?)?;
    let mut clear = |from: u64, len: u64| {
        store.write_zeroes(from, len).and_then(|()| store.flush()).map_err(at("emptying the overlay"))
    };
    clear(TABLE_AT, layout.table_len())?;
    clear(layout.journal_at().0, layout.journal_len())?;
    let data = layout.data_at().0;
    clear(data, layout.file_len().0 - data)?;
    Ok(())
}

/// Commits the uppermost overlay of a device that is not served.
///
/// # Errors
/// Something cannot be opened, or [`CommitError`]: the overlay is unchanged and can be committed again.
pub(crate) fn commit(
    stack: &StackSpec,
    layers: &[LayerSpec],
    part: impl Fn(Tree) -> Result<Tree, DeviceError>,
    add: impl Fn(Tree, &LayerSpec) -> Result<Tree, DeviceError>,
) -> Result<(), DeviceError> {
    let is_cow = |layer: &LayerSpec| matches!(layer, LayerSpec::Cow(_));
    let top = layers.iter().rposition(is_cow).ok_or(CommitError::NoOverlay)?;
    let (below, LayerSpec::Cow(spec)) = (&layers[..top], &layers[top]) else {
        return Err(CommitError::NoOverlay.into());
    };
    let stack = if below.iter().any(is_cow) { cow::origin(stack.clone())? } else { stack.clone() };
    let mut tree = part(Tree::leaf(source::open(&stack, None)?))?;
    for layer in below {
        tree = add(tree, layer)?;
    }
    if tree.profile().read_only {
        return Err(CommitError::ReadOnly.into());
    }
    commit_opened(cow::open(tree, &CowSpec { create: false, chunk: None, size: None, ..spec.clone() })?)
}

/// Commits the overlay at the top of a tree that is not served.
pub(super) fn commit_opened(mut tree: Tree) -> Result<(), DeviceError> {
    let commit = Commit::of_opened(&mut tree)?;
    commit.copy_down(&tree, Clients::Suspended)?;
    let store = overlay(&tree)?.1.last().ok_or(CommitError::NoOverlay)?;
    let identity = cow::identify(&commit.base).map_err(at("reading the origin"))?;
    write_header(&mut SyncIo::new(store)?, |header| {
        adopt_origin(header, identity);
    })?;
    free_space(&tree)
}

fn deny_writers(file: &File) {
    if let Err(error) = file.deny_writers() {
        tracing::warn!(%error, "{} is no longer locked against writers", file.spec().path.display());
    }
}

/// Finds the uppermost overlay: its index and its children, the store last.
fn overlay(tree: &Tree) -> Result<(&Arc<Index>, &[Tree]), CommitError> {
    match (&tree.extent, &tree.element) {
        (Extent::Overlay(index), Element::Layer(_, below)) => Ok((index, below)),
        (_, Element::Layer(_, below)) if below.len() == 1 => overlay(&below[0]),
        _ => Err(CommitError::NoOverlay),
    }
}

/// Writes the runs of 4 KiB that differ; zeroes as a hole, where the file system can.
fn write_changed(base: &mut SyncIo, offset: u64, ours: &[u8], theirs: &[u8]) -> io::Result<()> {
    const UNIT: usize = 4096;
    let differs = |at: usize| {
        let end = (at + UNIT).min(ours.len());
        ours[at..end] != theirs[at..end]
    };
    let mut at = 0;
    while at < ours.len() {
        let start = at;
        let changed = differs(at);
        while at < ours.len() && differs(at) == changed {
            at = (at + UNIT).min(ours.len());
        }
        let run = &ours[start..at];
        if changed && run.iter().all(|&byte| byte == 0) {
            base.write_zeroes(offset + start as u64, run.len() as u64)?;
        } else if changed {
            base.write(offset + start as u64, run)?;
        }
    }
    Ok(())
}

/// Applies `change` to the header of an overlay. Writes the older of its two copies, so that one is always
/// intact, or nothing if the header stays the same. Returns the generation in the header.
fn write_header(store: &mut SyncIo, change: impl Fn(&mut Header)) -> Result<u64, CommitError> {
    let failed = at("writing the overlay's header");
    let mut head = vec![0; 2 * HEADER_LEN];
    store.read(0, &mut head).map_err(&failed)?;
    let old = Header::read(&head).map_err(|why| failed(io::Error::other(why)))?;
    let mut new = Header { sequence: old.sequence + 1, ..old };
    change(&mut new);
    if new == (Header { sequence: new.sequence, ..old }) {
        return Ok(old.generation);
    }
    let first = Header::read(&head[..HEADER_LEN]);
    let older = if first.is_ok_and(|header| header.sequence == old.sequence) { SECOND_AT } else { 0 };
    store
        .flush()
        .and_then(|()| store.write(older, &new.encode()))
        .and_then(|()| store.flush())
        .map_err(failed)?;
    Ok(new.generation)
}

/// Changes the header of an overlay whose origin has all of its data.
fn adopt_origin(header: &mut Header, origin: Identity) {
    header.origin = origin;
    header.committing = false;
    header.fingerprint = Fingerprint::EMPTY;
    header.generation += 1;
}

impl Tree {
    /// Returns the tree with an empty overlay, and its files measured again.
    fn with_empty_overlay(&self, origin: Bytes, generation: u64) -> Result<Tree, DeviceError> {
        let Element::Layer(layer, below) = &self.element else { return Err(CommitError::NoOverlay.into()) };
        let Extent::Overlay(index) = &self.extent else {
            let below = below
                .iter()
                .map(|child| child.with_empty_overlay(origin, generation))
                .collect::<Result<_, _>>()?;
            return Ok(Tree::over(layer.clone(), below)?.with_extent(self.extent.clone()));
        };
        let anew = Rebuild {
            file: Box::new(|file| file.remeasured()),
            rbd: RbdSize::Keep,
            tables: PartitionTables::Keep,
        };
        let below = below.iter().map(|child| child.rebuilt(&anew)).collect::<Result<Vec<_>, _>>()?;
        let path = below.last().and_then(Tree::only_file).map(|file| file.spec().path.display().to_string());
        let table = vec![0; index.layout().table_len() as usize];
        let index = Arc::new(Index::open(index.layout(), origin, &table, generation));
        let layer = CowLayer::new(index.clone(), vec![("overlay", path.unwrap_or_default())]);
        Ok(Tree::over(Arc::new(layer), below)?.with_extent(Extent::Overlay(index)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_differing_runs_are_written_and_zeroes_become_holes() {
        let leaf = Tree::leaf(source::open(&"ram:64K".parse().unwrap(), None).unwrap());
        let mut base = SyncIo::new(&leaf).unwrap();
        let theirs = vec![7; 16384];
        base.write(8192, &theirs).unwrap();
        let mut ours = theirs.clone();
        ours[..4096].fill(0);
        ours[12288..].fill(9);
        write_changed(&mut base, 8192, &ours, &theirs).unwrap();
        let mut now = vec![0; 16384];
        base.read(8192, &mut now).unwrap();
        assert_eq!(now, ours);
    }
}
