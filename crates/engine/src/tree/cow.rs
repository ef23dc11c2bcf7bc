//! Opening and making overlays: the file, its header, the check that it belongs to what stands below.

use super::scratch::Scratch;
use super::source::Source;
use super::{Extent, Tree};
use crate::device::DeviceError;
use crate::spec::{CowSpec, FileFormat, FileSpec, Format, StackSpec};
use block::{Bytes, Fact};
use layers::CowLayer;
use layers::cow::Index;
use layers::cow::format::{
    HEADER_LEN, Header, HeaderError, Identity, Layout, SAMPLE_LEN, SECOND_AT, TABLE_AT, Witness,
};
use layers::cow::records;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why an overlay cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CowError {
    /// What is to be only read was to be made.
    #[error("what stands under an overlay is only read (leave out create, or make it first)")]
    Create,
    /// It cannot be read or written.
    #[error("{doing} {} failed: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The overlay.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// It is no overlay.
    #[error("{}: {why} (give another file, or make one with create)", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: HeaderError,
    },
    /// Something about it does not fit.
    #[error("{}: {why}", path.display())]
    Unfit {
        /// The overlay.
        path: PathBuf,
        /// What, and what to do.
        why: String,
    },
}

/// What is under an overlay, opened to be read only.
pub(super) fn origin(mut stack: StackSpec) -> Result<StackSpec, CowError> {
    if let StackSpec::File(file) = &mut stack {
        if file.create.is_some() {
            return Err(CowError::Create);
        }
        file.ro = true;
    }
    Ok(stack)
}

/// Put an overlay over a tree.
pub(super) fn open(below: Tree, spec: &CowSpec) -> Result<Tree, DeviceError> {
    let path = &spec.file;
    let unfit = |why: String| CowError::Unfit { path: path.clone(), why };
    let identity = identify(&below).map_err(CowError::at("reading what is under", path))?;
    let layout =
        Layout::new(spec.size.unwrap_or(identity.size), spec.chunk).map_err(|why| unfit(why.into()))?;
    let is_there = fs::exists(path).map_err(CowError::at("looking for", path))?;
    let make = !is_there && spec.create;
    let store = Tree::leaf(Source::open(&StackSpec::File(FileSpec {
        path: path.clone(),
        direct: spec.direct,
        format: FileFormat::Given(Format::Raw),
        create: make.then(|| layout.file_len()),
        ..FileSpec::default()
    }))?);
    let opened = if make {
        make_new(&store, identity, layout)
            .map_err(CowError::at("making", path))
            .inspect_err(|_| drop(fs::remove_file(path)))?
    } else {
        open_old(&below, &store, identity, spec)?
    };
    check_blocks(&below, &store, opened.header.layout).map_err(unfit).inspect_err(|_| {
        if make {
            // Nothing is left of it: it would be in the way of the next attempt, which gives other sizes.
            drop(fs::remove_file(path));
        }
    })?;
    let Opened { header, table } = opened;
    let index = Index::open(header.layout, header.origin.size, &table, header.life);
    let mut facts: Vec<Fact> = vec![("overlay", path.display().to_string())];
    if header.committing {
        facts.push(("overlay commit", "cut short (commit it again)".to_owned()));
    }
    if header.committing {
        let why = "a commit of it was cut short: what is under it has a part of that (commit it again)";
        tracing::warn!("{}: {why}", path.display());
    }
    let index = Arc::new(index);
    let layer = Arc::new(CowLayer::new(index.clone(), facts));
    Ok(Tree::over(layer, vec![below, store])?.sized_by(Extent::Overlay(index)))
}

impl CowError {
    fn at(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> CowError {
        move |source| CowError::Io { doing, path: path.to_owned(), source }
    }
}

/// What was read of an overlay.
struct Opened {
    header: Header,
    table: Vec<u8>,
}

/// Which origin this is.
pub(super) fn identify(tree: &Tree) -> io::Result<Identity> {
    let size = tree.profile().size;
    let mut content = Vec::new();
    each_sample(tree, Identity::samples(size), |_, sample| content.extend_from_slice(sample))?;
    Ok(Identity::new(size, content.into_iter()))
}

/// What an origin of that size is recognised by while what the overlay holds is written to it.
pub(super) fn witness(tree: &Tree, size: Bytes, index: &Index) -> io::Result<Witness> {
    let chunk = index.layout().chunk.0;
    let mut from = 0;
    let held = std::iter::from_fn(|| {
        let run = index.next_live(from)?;
        from = run.end;
        Some((run.start * chunk, run.end * chunk))
    });
    let mut samples = Vec::new();
    let places = Witness::places(size, held);
    each_sample(tree, places.into_iter(), |at, sample| samples.push((at, Witness::hash(sample))))?;
    Ok(Witness::new(samples))
}

/// Whether this is the origin that a commit was cut short on: what the overlay does not hold is what it was.
fn is_witnessed(tree: &Tree, witness: &Witness, index: &Index) -> io::Result<bool> {
    let chunk = index.layout().chunk.0;
    // What came to the overlay since may have gone down already.
    let left = |at: &u64| index.next_live(at / chunk).is_none_or(|run| run.start > at / chunk);
    let mut is_it = true;
    let places = witness.samples().iter().map(|(at, _)| *at).filter(left);
    each_sample(tree, places, |at, sample| {
        is_it &= witness.samples().contains(&(at, Witness::hash(sample)))
    })?;
    Ok(is_it)
}

/// Read samples that begin at these places.
fn each_sample(
    tree: &Tree,
    places: impl Iterator<Item = u64>,
    mut each: impl FnMut(u64, &[u8]),
) -> io::Result<()> {
    let mut scratch = Scratch::new(tree).map_err(io::Error::other)?;
    let size = tree.profile().size;
    let block = tree.profile().limits.logical_block_size.0;
    for at in places {
        // Whole logical blocks, of which a sample is a part if they are longer.
        let start = Bytes(at).align_down(block).0;
        let end = (start + SAMPLE_LEN.max(block)).min(size.0);
        let skip = (at - start) as usize;
        let mut blocks = vec![0; end.saturating_sub(start) as usize];
        let Some(sample) = skip.checked_add(SAMPLE_LEN as usize).filter(|end| *end <= blocks.len()) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        scratch.read(start, &mut blocks)?;
        each(at, &blocks[skip..sample]);
    }
    Ok(())
}

/// The first header goes to the disk last, when all else is there.
fn make_new(store: &Tree, origin: Identity, layout: Layout) -> io::Result<Opened> {
    let mut scratch = Scratch::new(store).map_err(io::Error::other)?;
    let header = Header { sequence: 1, origin, life: 1, layout, committing: false, witness: Witness::EMPTY };
    scratch.flush()?;
    for at in [SECOND_AT, 0] {
        scratch.write(at, &header.encode())?;
    }
    scratch.flush()?;
    Ok(Opened { header, table: vec![0; layout.table_len() as usize] })
}

fn open_old(below: &Tree, store: &Tree, origin: Identity, spec: &CowSpec) -> Result<Opened, CowError> {
    let path = &spec.file;
    let io = |doing| CowError::at(doing, path);
    let unfit = |why: String| CowError::Unfit { path: path.clone(), why };
    let mut scratch = Scratch::new(store).map_err(io::Error::other).map_err(io("reading"))?;
    let mut head = vec![0; 2 * HEADER_LEN];
    if store.profile().size.0 < head.len() as u64 {
        return Err(CowError::Header { path: path.clone(), why: HeaderError::NotOne });
    }
    scratch.read(0, &mut head).map_err(io("reading"))?;
    let mut header = Header::read(&head).map_err(|why| CowError::Header { path: path.clone(), why })?;
    let layout = header.layout;
    if store.profile().size < layout.file_len() {
        return Err(unfit(format!(
            "it is cut off: {} of {} are there",
            store.profile().size,
            layout.file_len()
        )));
    }
    // A commit that was cut short has changed what is under it, and may have made it as long as the device, or a part of that.
    let lengths = header.origin.size..=layout.size.max(header.origin.size);
    let is_under_way = header.committing && lengths.contains(&origin.size);
    if header.origin != origin && !is_under_way {
        return Err(unfit(match header.origin.size == origin.size {
            true => "it belongs to another device, or what is under it was changed (give the one it was made over)".into(),
            false => format!("it belongs to a device of {}, and this one has {}", header.origin.size, origin.size),
        }));
    }
    let differs = |what: &str, has: Bytes| unfit(format!("its {what} is {has} (leave out {what})"));
    match (spec.chunk, spec.size) {
        (Some(chunk), _) if chunk != layout.chunk => return Err(differs("chunk", layout.chunk)),
        (_, Some(size)) if size != layout.size => return Err(differs("size", layout.size)),
        _ => {}
    }
    let mut table = vec![0; layout.table_len() as usize];
    scratch.read(TABLE_AT, &mut table).map_err(io("reading the table of"))?;
    let found = unflushed(&mut scratch, header, &table, path)?;
    for chunk in &found {
        table[(chunk / 8) as usize] |= 1 << (chunk % 8);
    }
    if header.committing {
        let index = Index::open(layout, header.origin.size, &table, header.life);
        if !is_witnessed(below, &header.witness, &index).map_err(io("reading what is under"))? {
            return Err(unfit(
                "a commit of it was cut short, and this is not what it was being written to (give that one)"
                    .into(),
            ));
        }
    }
    // From here on the table has them, and what is in the journal means nothing.
    header = Header { life: header.life + 1, sequence: header.sequence + 1, ..header };
    adopt(&mut scratch, &header, &table, !found.is_empty()).map_err(io("writing"))?;
    Ok(Opened { header, table })
}

/// The chunks that no flush has brought into the table, and that are whole nevertheless, as the journal can tell.
fn unflushed(scratch: &mut Scratch, header: Header, table: &[u8], path: &Path) -> Result<Vec<u64>, CowError> {
    let layout = header.layout;
    let len = if header.life == 0 { layout.table_len() } else { layout.journal_len() };
    let mut journal = vec![0; len as usize];
    scratch
        .read(layout.journal_at().0, &mut journal)
        .map_err(CowError::at("reading the journal of", path))?;
    if header.life == 0 {
        let lost = journal.iter().zip(table).map(|(tally, table)| (tally & !table).count_ones()).sum::<u32>();
        if lost > 0 {
            let size = Bytes(u64::from(lost) * layout.chunk.0);
            tracing::warn!(
                "{}: {size} that an older version wrote and never flushed cannot be verified: the origin's data is \
                 read there",
                path.display()
            );
        }
        return Ok(Vec::new());
    }
    let data_at = layout.data_at().0;
    records::vouched(layout, table, &journal, header.life, |at, into| scratch.read(data_at + at.0, into))
        .map_err(CowError::at("reading", path))
}

/// Bring what was found into the table: its data first, then the table, then the header of a new life, each on stable
/// storage before the next.
fn adopt(scratch: &mut Scratch, header: &Header, table: &[u8], found: bool) -> io::Result<()> {
    if found {
        scratch.flush()?;
        scratch.write(TABLE_AT, table)?;
        scratch.flush()?;
    }
    let older = if header.sequence.is_multiple_of(2) { SECOND_AT } else { 0 };
    scratch.write(older, &header.encode())?;
    scratch.flush()
}

/// Whether chunks are whole blocks of both.
fn check_blocks(below: &Tree, store: &Tree, layout: Layout) -> Result<(), String> {
    let block = [below, store].map(|tree| tree.profile().limits.logical_block_size);
    let block = block[0].max(block[1]);
    if layout.chunk < block {
        return Err(format!(
            "a chunk of {} is less than a block of {block} (make it with chunk={block})",
            layout.chunk
        ));
    }
    if !layout.size.is_aligned(block.0) {
        return Err(format!("{} are no whole blocks of {block}", layout.size));
    }
    Ok(())
}
