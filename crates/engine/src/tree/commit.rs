//! Writing an overlay down into what it stands over.
//!
//! The order is what makes it safe to be killed at any moment (docs/cow.md): the header says that a commit is under
//! way, so that the origin may differ from the one it was made over, and what of it stays as it is; chunks are written to the origin and flushed;
//! the header takes the origin as it is now; then only the table is emptied, and then the data let go of. Up to the
//! last step the overlay holds all of it, so whoever reads through it sees the same throughout.
//!
//! Runs on a thread beside the control plane. It knows nothing of queues: whoever serves the device holds its
//! requests back around [`Commit::carry`] and [`Commit::settle`].

use super::scratch::Scratch;
use super::{Element, Extent, Remake, Source, Tables, Tree, cow};
use crate::device::DeviceError;
use crate::spec::{CowSpec, LayerSpec, StackSpec};
use backends::File;
use block::Bytes;
use layers::CowLayer;
use layers::cow::Index;
use layers::cow::format::{HEADER_LEN, Header, Identity, SECOND_AT, TABLE_AT, Witness};
use std::io;
use std::sync::Arc;

/// What is copied at once.
const PIECE_LEN: u64 = 1 << 20;

/// Why an overlay is not committed. What was written of it until then does no harm: the overlay holds it too.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// There is none.
    #[error("it has no overlay (there is nothing to commit)")]
    NoOverlay,
    /// The user said so.
    #[error("what is under the overlay is only read (leave out ro)")]
    ReadOnly,
    /// It would have to be opened a second time, which only a file can be.
    #[error(
        "what is under the overlay is no file, or more than one (stop it, then: blockyard commit STACK --layer …)"
    )]
    NotOneFile,
    /// The overlay is longer than what it stands over.
    #[error(
        "the overlay holds data past the end of what is under it, which cannot be made longer (make that {0} long)"
    )]
    Shorter(Bytes),
    /// The file under the overlay would become an image of another format.
    #[error(
        "what clients wrote begins as an image of another format, and nobody said what the file under the overlay is (serve it with format=raw, then commit again)"
    )]
    BecomesImage,
    /// It cannot be read or written.
    #[error("{doing} failed: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

fn at(doing: &'static str) -> impl Fn(io::Error) -> CommitError {
    move |source| CommitError::Io { doing, source }
}

/// What the device's clients do meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Clients {
    /// They write on, past the origin's end, too: what has no room there yet is left for the last time.
    GoOn,
    /// They wait, or there are none: this is the last time.
    Wait,
}

/// A commit under way: what is under the overlay, open to be written.
pub(crate) struct Commit {
    index: Arc<Index>,
    base: Tree,
    /// Opened a second time for it: nobody else is let in as long as that is so.
    reopened: Option<Arc<File>>,
    /// What the header says that the origin is recognised by: that is not written to.
    witness: Witness,
}

impl Drop for Commit {
    fn drop(&mut self) {
        if let Some(file) = &self.reopened {
            deny_writers(file);
        }
    }
}

impl Commit {
    /// Of a tree that is served, whose origin is open to be read.
    pub(crate) fn of_served(tree: &Tree) -> Result<Commit, DeviceError> {
        let (index, below) = overlay(tree)?;
        let origin = &below[0];
        let file = origin.only_file().ok_or(CommitError::NotOneFile)?;
        let again = Remake { file: Box::new(|file| file.reopened_for_writing()), tables: Tables::Keep };
        let base = origin.remade(&again).inspect_err(|_| deny_writers(file))?;
        let mut commit =
            Commit { index: index.clone(), base, reopened: Some(file.clone()), witness: Witness::EMPTY };
        commit.begin(tree)?;
        Ok(commit)
    }

    /// Of a tree and what is under its overlay, open to be written.
    #[cfg(test)]
    pub(super) fn of_parts(tree: &Tree, base: Tree) -> Result<Commit, DeviceError> {
        let index = overlay(tree)?.0.clone();
        let mut commit = Commit { index, base, reopened: None, witness: Witness::EMPTY };
        commit.begin(tree)?;
        Ok(commit)
    }

    /// Of a tree that is not served, whose origin is open to be written.
    fn of_opened(tree: &mut Tree) -> Result<Commit, DeviceError> {
        let Extent::Overlay(index) = &tree.extent else { return Err(CommitError::NoOverlay.into()) };
        let Element::Layer(_, below) = &mut tree.element else { return Err(CommitError::NoOverlay.into()) };
        // The overlay is not read through the tree any more, so its origin may be taken from it.
        let base = below.remove(0);
        let index = index.clone();
        let mut commit = Commit { index, base, reopened: None, witness: Witness::EMPTY };
        commit.begin(tree)?;
        Ok(commit)
    }

    /// From here on the origin may differ from the one that the overlay was made over, in its length, too.
    fn begin(&mut self, tree: &Tree) -> Result<(), DeviceError> {
        self.wanted()?;
        self.announce(tree)?;
        self.lengthen()
    }

    /// Have the header say that the origin may differ, and what it is recognised by: what the overlay does not hold now.
    fn announce(&mut self, tree: &Tree) -> Result<(), DeviceError> {
        let store = overlay(tree)?.1.last().ok_or(CommitError::NoOverlay)?;
        // Past that it may be as short as it was after a power cut, however long it is now.
        let size = self.index.origin_size().min(self.base.profile().size);
        let witness =
            cow::witness(&self.base, size, &self.index).map_err(at("reading what is under the overlay"))?;
        write_header(&mut Scratch::new(store)?, |header| {
            header.committing = true;
            header.witness = witness;
        })?;
        self.witness = witness;
        Ok(())
    }

    /// For the last time, while the clients wait: what has come to the overlay since the beginning goes down, too.
    pub(crate) fn finish(&mut self, tree: &Tree) -> Result<(), DeviceError> {
        // Something may have come to lie past the origin's end meanwhile, or where it was recognised.
        self.lengthen()?;
        self.announce(tree)?;
        self.carry(tree, Clients::Wait)
    }

    /// Room for what lies past the origin's end, if anything does by now.
    fn lengthen(&mut self) -> Result<(), DeviceError> {
        if let Some((file, size)) = self.wanted()? {
            self.base = Tree::leaf(Source::File(file.resized(size)?));
            // On stable storage before anything that lies behind the old end.
            Scratch::new(&self.base)?.flush().map_err(at("flushing the new length of what is under it"))?;
        }
        Ok(())
    }

    /// The file that has to become longer before all chunks fit, and how long.
    fn wanted(&self) -> Result<Option<(&Arc<File>, Bytes)>, CommitError> {
        let layout = self.index.layout();
        let size = self.base.profile().size;
        if size >= layout.size || self.index.next_live(size.0 / layout.chunk.0).is_none() {
            return Ok(None);
        }
        match &self.base.element {
            Element::Backend(source) => match &**source {
                Source::File(file) if !file.shared().facts().block_device => Ok(Some((file, layout.size))),
                _ => Err(CommitError::Shorter(layout.size)),
            },
            _ => Err(CommitError::Shorter(layout.size)),
        }
    }

    /// Write all chunks down that differ, and flush. May be done again, for what has changed since.
    pub(crate) fn carry(&self, tree: &Tree, clients: Clients) -> Result<(), DeviceError> {
        let store = &overlay(tree)?.1.last().ok_or(CommitError::NoOverlay)?;
        let layout = self.index.layout();
        let mut store = Scratch::new(store)?;
        let mut base = Scratch::new(&self.base)?;
        let room = self.base.profile().size.0;
        let (mut ours, mut theirs) = (vec![0; PIECE_LEN as usize], vec![0; PIECE_LEN as usize]);
        let mut from = 0;
        while let Some(run) = self.index.next_live(from) {
            from = run.end;
            let (mut offset, stop) =
                (run.start * layout.chunk.0, (run.end * layout.chunk.0).min(layout.size.0));
            if stop > room && clients == Clients::Wait {
                // What does not fit must not be taken for carried.
                return Err(CommitError::Shorter(layout.size).into());
            }
            let stop = stop.min(room);
            while offset < stop {
                let (free, next) = self.free_of_witness(offset, stop);
                let len = PIECE_LEN.min(free) as usize;
                if len == 0 {
                    offset = next;
                    continue;
                }
                let (ours, theirs) = (&mut ours[..len], &mut theirs[..len]);
                store.read(layout.data_at().0 + offset, ours).map_err(at("reading the overlay"))?;
                base.read(offset, theirs).map_err(at("reading what is under it"))?;
                write_changed(&mut base, offset, ours, theirs).map_err(|why| match why.raw_os_error() {
                    Some(libc::EPERM) => CommitError::BecomesImage,
                    _ => at("writing what is under it")(why),
                })?;
                offset += len as u64;
            }
        }
        base.flush().map_err(at("flushing what is under it"))?;
        Ok(())
    }

    /// How far one may write from there on, before a chunk that the origin is recognised by, and where to go on behind it.
    /// Such a chunk has come to the overlay after that was said; it is carried when something else is said.
    fn free_of_witness(&self, offset: u64, stop: u64) -> (u64, u64) {
        let chunk = self.index.layout().chunk.0;
        let first = offset - offset % chunk;
        let next = self.witness.samples().iter().map(|(at, _)| at - at % chunk).find(|start| *start >= first);
        let start = next.unwrap_or(stop).clamp(offset, stop);
        (start - offset, (next.unwrap_or(stop) + chunk).min(stop))
    }

    /// All of it has been carried down: the overlay's origin is the one that is there now. What is served from here
    /// on, with an overlay that holds nothing.
    pub(crate) fn settle(&self, tree: &Tree) -> Result<Tree, DeviceError> {
        let store = overlay(tree)?.1.last().ok_or(CommitError::NoOverlay)?;
        let identity = cow::identify(&self.base).map_err(at("reading what is under it"))?;
        // The records in the journal mean nothing from here on: should the device keep its overlay after all, its table
        // names everything.
        Scratch::new(tree)?.flush().map_err(at("flushing the overlay"))?;
        let life = write_header(&mut Scratch::new(store)?, |header| {
            settled(header, identity);
        })?;
        self.index.restart(life);
        tree.with_empty_overlay(identity.size, life)
    }
}

/// Give the space of an overlay back that holds nothing any more: first its tables, then the data.
pub(crate) fn give_back(tree: &Tree) -> Result<(), DeviceError> {
    let (index, below) = overlay(tree)?;
    let layout = index.layout();
    let mut store = Scratch::new(below.last().ok_or(CommitError::NoOverlay)?)?;
    let mut clear = |from: u64, len: u64| {
        store.write_zeroes(from, len).and_then(|()| store.flush()).map_err(at("emptying the overlay"))
    };
    clear(TABLE_AT, layout.table_len())?;
    clear(layout.journal_at().0, layout.journal_len())?;
    let data = layout.data_at().0;
    clear(data, layout.file_len().0 - data)?;
    Ok(())
}

/// Commit the uppermost overlay of a device that nobody serves.
///
/// # Errors
/// What does not open, [`CommitError`]: the overlay stays as it was, and can be committed again.
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
    let mut tree = part(Tree::leaf(Source::open(&stack)?))?;
    for layer in below {
        tree = add(tree, layer)?;
    }
    if tree.profile().read_only {
        return Err(CommitError::ReadOnly.into());
    }
    commit_opened(cow::open(tree, &CowSpec { create: false, chunk: None, size: None, ..spec.clone() })?)
}

/// Commit the overlay at the top of a tree that nobody serves.
pub(super) fn commit_opened(mut tree: Tree) -> Result<(), DeviceError> {
    let commit = Commit::of_opened(&mut tree)?;
    commit.carry(&tree, Clients::Wait)?;
    let store = overlay(&tree)?.1.last().ok_or(CommitError::NoOverlay)?;
    let identity = cow::identify(&commit.base).map_err(at("reading what is under it"))?;
    write_header(&mut Scratch::new(store)?, |header| {
        settled(header, identity);
    })?;
    give_back(&tree)
}

fn deny_writers(file: &File) {
    if let Err(error) = file.deny_writers() {
        tracing::warn!(%error, "{} is not locked against writers any more", file.spec().path.display());
    }
}

/// The uppermost overlay: what it holds, and what it stands on, the store last.
fn overlay(tree: &Tree) -> Result<(&Arc<Index>, &[Tree]), CommitError> {
    match (&tree.extent, &tree.element) {
        (Extent::Overlay(index), Element::Layer(_, below)) => Ok((index, below)),
        (_, Element::Layer(_, below)) if below.len() == 1 => overlay(&below[0]),
        _ => Err(CommitError::NoOverlay),
    }
}

/// Write the runs of 4 KiB that differ; zeroes as a hole, where the file system can.
fn write_changed(base: &mut Scratch, offset: u64, ours: &[u8], theirs: &[u8]) -> io::Result<()> {
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

/// Change the header of an overlay, if that is any change: in the older of its copies, so that one is whole always.
/// Returns the life that it names.
fn write_header(store: &mut Scratch, change: impl Fn(&mut Header)) -> Result<u64, CommitError> {
    let failed = at("writing the overlay's header");
    let mut head = vec![0; 2 * HEADER_LEN];
    store.read(0, &mut head).map_err(&failed)?;
    let old = Header::read(&head).map_err(|why| failed(io::Error::other(why)))?;
    let mut new = Header { sequence: old.sequence + 1, ..old };
    change(&mut new);
    if new == (Header { sequence: new.sequence, ..old }) {
        return Ok(old.life);
    }
    let first = Header::read(&head[..HEADER_LEN]);
    let older = if first.is_ok_and(|header| header.sequence == old.sequence) { SECOND_AT } else { 0 };
    store
        .flush()
        .and_then(|()| store.write(older, &new.encode()))
        .and_then(|()| store.flush())
        .map_err(failed)?;
    Ok(new.life)
}

/// The header of an overlay whose origin has all of it, for good.
fn settled(header: &mut Header, origin: Identity) {
    header.origin = origin;
    header.committing = false;
    header.witness = Witness::EMPTY;
    header.life += 1;
}

impl Tree {
    /// The same tree, whose overlay holds nothing and whose files are looked at anew.
    fn with_empty_overlay(&self, origin: Bytes, life: u64) -> Result<Tree, DeviceError> {
        let Element::Layer(layer, below) = &self.element else { return Err(CommitError::NoOverlay.into()) };
        let Extent::Overlay(index) = &self.extent else {
            let below =
                below.iter().map(|child| child.with_empty_overlay(origin, life)).collect::<Result<_, _>>()?;
            return Ok(Tree::over(layer.clone(), below)?.sized_by(self.extent.clone()));
        };
        let anew = Remake { file: Box::new(|file| file.remeasured()), tables: Tables::Keep };
        let below = below.iter().map(|child| child.remade(&anew)).collect::<Result<Vec<_>, _>>()?;
        let path = below.last().and_then(Tree::only_file).map(|file| file.spec().path.display().to_string());
        let table = vec![0; index.layout().table_len() as usize];
        let index = Arc::new(Index::open(index.layout(), origin, &table, life));
        let layer = CowLayer::new(index.clone(), vec![("overlay", path.unwrap_or_default())]);
        Ok(Tree::over(Arc::new(layer), below)?.sized_by(Extent::Overlay(index)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_written_and_zeroes_are_no_data() {
        let leaf = Tree::leaf(Source::open(&"ram:64K".parse().unwrap()).unwrap());
        let mut base = Scratch::new(&leaf).unwrap();
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
