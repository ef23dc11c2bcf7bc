//! Opens and creates overlays: the file, its header, and the check that it belongs to its origin.

use super::source;
use super::sync_io::SyncIo;
use super::{Extent, Tree};
use crate::device::DeviceError;
use crate::spec::{CowSpec, DiskFileSpec, FileFormat, FileSpec, Format, StackSpec};
use block::{Bytes, Fact};
use layers::CowLayer;
use layers::cow::Index;
use layers::cow::format::{
    Fingerprint, HEADER_LEN, Header, HeaderError, Identity, Layout, SAMPLE_LEN, SECOND_AT, TABLE_AT,
};
use layers::cow::records;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why an overlay cannot be opened or created.
#[derive(Debug, thiserror::Error)]
pub enum CowError {
    /// The origin is to be created, but an origin is only read.
    #[error("the origin of an overlay is only read (leave out create, or create the file first)")]
    Create,
    /// An I/O error.
    #[error("{doing} {} failed: {source}", path.display())]
    Io {
        /// The operation.
        doing: &'static str,
        /// The overlay.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not an overlay.
    #[error("{}: {why} (give another file, or create an overlay with create)", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: HeaderError,
    },
    /// The overlay does not fit its origin or options.
    #[error("{}: {why}", path.display())]
    Unfit {
        /// The overlay.
        path: PathBuf,
        /// The reason, with a hint.
        why: String,
    },
}

/// Returns an origin's description, opened read-only.
pub(super) fn origin(mut stack: StackSpec) -> Result<StackSpec, CowError> {
    if let StackSpec::File(file) = &mut stack {
        if file.file.create.is_some() {
            return Err(CowError::Create);
        }
        file.file.ro = true;
    }
    Ok(stack)
}

/// Opens an overlay over a tree, or creates it.
pub(super) fn open(below: Tree, spec: &CowSpec) -> Result<Tree, DeviceError> {
    let path = &spec.file;
    let unfit = |why: String| CowError::Unfit { path: path.clone(), why };
    let identity = identify(&below).map_err(CowError::at("reading the origin of", path))?;
    let layout =
        Layout::new(spec.size.unwrap_or(identity.size), spec.chunk).map_err(|why| unfit(why.into()))?;
    let exists = fs::exists(path).map_err(CowError::at("checking for", path))?;
    let create = !exists && spec.create;
    let file = StackSpec::File(DiskFileSpec {
        file: FileSpec {
            direct: spec.direct,
            create: create.then(|| layout.file_len()),
            ..FileSpec::new(path)
        },
        format: FileFormat::Given(Format::Raw),
        ..DiskFileSpec::default()
    });
    let store = Tree::leaf(source::open(&file, None)?);
    let opened = if create {
        create_overlay(&store, identity, layout)
            .map_err(CowError::at("creating", path))
            .inspect_err(|_| drop(fs::remove_file(path)))?
    } else {
        open_existing(&below, &store, identity, spec)?
    };
    check_blocks(&below, &store, opened.header.layout).map_err(unfit).inspect_err(|_| {
        if create {
            // The new file is removed: the next attempt, with other sizes, would fail because it exists.
            drop(fs::remove_file(path));
        }
    })?;
    let Opened { header, table } = opened;
    let index = Index::open(header.layout, header.origin.size, &table, header.generation);
    let mut facts: Vec<Fact> = vec![("overlay", path.display().to_string())];
    if header.committing {
        facts.push(("overlay commit", "interrupted (commit it again)".to_owned()));
    }
    if header.committing {
        let why = "a commit of this overlay was interrupted: its origin has a part of it (commit it again)";
        tracing::warn!("{}: {why}", path.display());
    }
    let index = Arc::new(index);
    let layer = Arc::new(CowLayer::new(index.clone(), facts));
    Ok(Tree::over(layer, vec![below, store])?.with_extent(Extent::Overlay(index)))
}

impl CowError {
    fn at(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> CowError {
        move |source| CowError::Io { doing, path: path.to_owned(), source }
    }
}

/// Header and table of an overlay.
struct Opened {
    header: Header,
    table: Vec<u8>,
}

/// Returns the identity of an origin.
pub(super) fn identify(tree: &Tree) -> io::Result<Identity> {
    let size = tree.profile().size;
    let mut content = Vec::new();
    for_each_sample(tree, Identity::samples(size), |_, sample| content.extend_from_slice(sample))?;
    Ok(Identity::new(size, content.into_iter()))
}

/// Takes samples of an origin of that size where the overlay holds nothing: they identify it during a commit.
pub(super) fn fingerprint(tree: &Tree, size: Bytes, index: &Index) -> io::Result<Fingerprint> {
    let chunk = index.layout().chunk.0;
    let mut from = 0;
    let held = std::iter::from_fn(|| {
        let run = index.next_live(from)?;
        from = run.end;
        Some((run.start * chunk, run.end * chunk))
    });
    let mut samples = Vec::new();
    let places = Fingerprint::offsets(size, held);
    for_each_sample(tree, places.into_iter(), |at, sample| samples.push((at, Fingerprint::hash(sample))))?;
    Ok(Fingerprint::new(samples))
}

/// Checks whether this is the origin of an interrupted commit: parts that the overlay does not hold are
/// unchanged.
fn has_same_fingerprint(tree: &Tree, fingerprint: &Fingerprint, index: &Index) -> io::Result<bool> {
    let chunk = index.layout().chunk.0;
    // Chunks that were written to the overlay since may have been committed already.
    let left = |at: &u64| index.next_live(at / chunk).is_none_or(|run| run.start > at / chunk);
    let mut matches = true;
    let places = fingerprint.samples().iter().map(|(at, _)| *at).filter(left);
    for_each_sample(tree, places, |at, sample| {
        matches &= fingerprint.samples().contains(&(at, Fingerprint::hash(sample)))
    })?;
    Ok(matches)
}

/// Reads the samples that begin at these offsets.
fn for_each_sample(
    tree: &Tree,
    places: impl Iterator<Item = u64>,
    mut each: impl FnMut(u64, &[u8]),
) -> io::Result<()> {
    let mut scratch = SyncIo::new(tree).map_err(io::Error::other)?;
    let size = tree.profile().size;
    let block = tree.profile().limits.logical_block_size.0;
    for at in places {
        // Reads whole logical blocks, which may be longer than a sample.
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

/// Writes a new overlay. Its first header is written last.
fn create_overlay(store: &Tree, origin: Identity, layout: Layout) -> io::Result<Opened> {
    let mut scratch = SyncIo::new(store).map_err(io::Error::other)?;
    let header = Header {
        sequence: 1,
        origin,
        generation: 1,
        layout,
        committing: false,
        fingerprint: Fingerprint::EMPTY,
    };
    scratch.flush()?;
    for at in [SECOND_AT, 0] {
        scratch.write(at, &header.encode())?;
    }
    scratch.flush()?;
    Ok(Opened { header, table: vec![0; layout.table_len() as usize] })
}

fn open_existing(below: &Tree, store: &Tree, origin: Identity, spec: &CowSpec) -> Result<Opened, CowError> {
    let path = &spec.file;
    let io = |doing| CowError::at(doing, path);
    let unfit = |why: String| CowError::Unfit { path: path.clone(), why };
    let mut scratch = SyncIo::new(store).map_err(io::Error::other).map_err(io("reading"))?;
    let mut head = vec![0; 2 * HEADER_LEN];
    if store.profile().size.0 < head.len() as u64 {
        return Err(CowError::Header { path: path.clone(), why: HeaderError::NotOne });
    }
    scratch.read(0, &mut head).map_err(io("reading"))?;
    let mut header = Header::read(&head).map_err(|why| CowError::Header { path: path.clone(), why })?;
    let layout = header.layout;
    if store.profile().size < layout.file_len() {
        return Err(unfit(format!(
            "it is truncated: it has {} of {}",
            store.profile().size,
            layout.file_len()
        )));
    }
    // An interrupted commit has changed the origin, and may have extended it up to the device's size.
    let lengths = header.origin.size..=layout.size.max(header.origin.size);
    let is_committing = header.committing && lengths.contains(&origin.size);
    if header.origin != origin && !is_committing {
        return Err(unfit(match header.origin.size == origin.size {
            true => "it belongs to another device, or its origin was changed (give the origin that it was created over)".into(),
            false => format!("it belongs to a device of size {}, and this one has {}", header.origin.size, origin.size),
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
    let found = recover_unflushed(&mut scratch, header, &table, path)?;
    for chunk in &found {
        table[(chunk / 8) as usize] |= 1 << (chunk % 8);
    }
    if header.committing {
        let index = Index::open(layout, header.origin.size, &table, header.generation);
        if !has_same_fingerprint(below, &header.fingerprint, &index).map_err(io("reading the origin of"))? {
            return Err(unfit(
                "a commit of it was interrupted, and this is not the origin that it was being written to (give that one)"
                    .into(),
            ));
        }
    }
    // From here on the table has all chunks, and the journal is obsolete.
    header = Header { generation: header.generation + 1, sequence: header.sequence + 1, ..header };
    save_recovered(&mut scratch, &header, &table, !found.is_empty()).map_err(io("writing"))?;
    Ok(Opened { header, table })
}

/// Returns the chunks that are complete according to the journal, but that no flush has written to the table.
fn recover_unflushed(
    scratch: &mut SyncIo,
    header: Header,
    table: &[u8],
    path: &Path,
) -> Result<Vec<u64>, CowError> {
    let layout = header.layout;
    let len = if header.generation == 0 { layout.table_len() } else { layout.journal_len() };
    let mut journal = vec![0; len as usize];
    scratch
        .read(layout.journal_at().0, &mut journal)
        .map_err(CowError::at("reading the journal of", path))?;
    if header.generation == 0 {
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
    records::confirmed_chunks(layout, table, &journal, header.generation, |at, into| {
        scratch.read(data_at + at.0, into)
    })
    .map_err(CowError::at("reading", path))
}

/// Writes recovered chunks to the table: first their data, then the table, then the header of a new
/// generation, each on stable storage before the next.
fn save_recovered(scratch: &mut SyncIo, header: &Header, table: &[u8], found: bool) -> io::Result<()> {
    if found {
        scratch.flush()?;
        scratch.write(TABLE_AT, table)?;
        scratch.flush()?;
    }
    let older = if header.sequence.is_multiple_of(2) { SECOND_AT } else { 0 };
    scratch.write(older, &header.encode())?;
    scratch.flush()
}

/// Checks that chunks are whole logical blocks of both children.
fn check_blocks(below: &Tree, store: &Tree, layout: Layout) -> Result<(), String> {
    let block = [below, store].map(|tree| tree.profile().limits.logical_block_size);
    let block = block[0].max(block[1]);
    if layout.chunk < block {
        return Err(format!(
            "the chunk size {} is less than the logical block size {block} (create it with chunk={block})",
            layout.chunk
        ));
    }
    if !layout.size.is_aligned(block.0) {
        return Err(format!("the size {} is not a multiple of the logical block size {block}", layout.size));
    }
    Ok(())
}
