//! From a table's text to the tree that serves it: every target made, its devices opened, its areas checked.
//!
//! The words that name devices are resolved here: `kind:…` as everywhere in this program, the name of a device of this
//! process, `major:minor`, or a path. A word that was opened before in this process and still is, by whichever
//! table, means the same opened device: two targets on `ram:1G` share that memory.
//!
//! *Invariant:* a table that is refused leaves nothing open.

use super::source::Source;
use super::{Scratch, Tree};
use crate::device::{Device, DeviceError};
use crate::dial::{Assumed, Remote};
use crate::spec::{FileFormat, FileSpec, Format, LineSpec, StackSpec, TableSpec, escaped_word};
use block::{Bytes, Features, Profile, Sectors};
use layers::dm::{Devices, Kind, LookupError, Names, Place, Row, TableLayer, Target, TargetError, kinds};
use ring::KernelRing;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What tables of a process have in common: the devices that their words opened.
#[derive(Default)]
pub(crate) struct Pool {
    open: Mutex<HashMap<String, Weak<Source>>>,
}

impl Pool {
    /// Open what is described, or share it. `later`: it may be away, and is taken for that then.
    fn open(&self, spec: &StackSpec, later: Option<&Assumed>) -> Result<Arc<Source>, DeviceError> {
        let key = spec.to_string();
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, source| source.strong_count() > 0);
        if let Some(source) = open.get(&key).and_then(Weak::upgrade) {
            return Ok(source);
        }
        let source = Arc::new(match (spec, later) {
            (StackSpec::Nbd(spec), Some(assumed)) => {
                Source::Nbd(Box::new(Remote::open_later(spec, assumed)?))
            }
            _ => Source::open(spec)?,
        });
        open.insert(key, Arc::downgrade(&source));
        Ok(source)
    }
}

/// What a table is loaded with.
pub(crate) struct Surroundings<'a> {
    pub(crate) pool: &'a Pool,
    /// The device of this process that has a name.
    pub(crate) device: &'a dyn Fn(&str) -> Option<Arc<Device>>,
}

/// Why a table is refused.
#[derive(Debug)]
pub struct TableError {
    /// The line of its text, from 1; 0: all of it.
    pub line: u32,
    /// The target; empty where none is meant.
    pub kind: String,
    /// What is wrong, in the kernel's words.
    pub why: TargetError,
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.line, self.kind.as_str()) {
            (0, _) => write!(f, "{}", self.why),
            (line, "") => write!(f, "line {line} of the table: {}", self.why),
            (line, kind) => write!(f, "line {line} of the table: {kind}: {}", self.why),
        }
    }
}

impl std::error::Error for TableError {}

/// One target of a table that was loaded.
pub(crate) struct LoadedTarget {
    pub(crate) place: Place,
    pub(crate) kind: &'static str,
    pub(crate) target: Arc<dyn Target<KernelRing>>,
    pub(crate) names: Names,
    /// Each device that it opened, as a tree of its own.
    pub(crate) devices: Vec<Tree>,
}

/// A table that was loaded.
pub(crate) struct Loaded {
    pub(crate) targets: Vec<LoadedTarget>,
    /// There is a target that only tables with it may follow.
    immutable: Option<&'static str>,
}

impl Loaded {
    /// Whether `next` may take its place.
    pub(crate) fn admits(&self, next: &Loaded) -> Result<(), TableError> {
        let Some(kind) = self.immutable else { return Ok(()) };
        if next.targets.len() == 1 && next.targets[0].kind == kind || next.is_wildcard() {
            return Ok(());
        }
        Err(TableError {
            line: 0,
            kind: String::new(),
            why: TargetError::of(format!("can't replace immutable target type {kind}")),
        })
    }

    /// One `error` target alone may follow any (`DM_TARGET_WILDCARD`).
    fn is_wildcard(&self) -> bool {
        matches!(self.targets.as_slice(), [LoadedTarget { kind: "error", .. }])
    }

    /// Things that happened in it that someone may wait for.
    pub(crate) fn events(&self) -> u32 {
        self.targets.iter().map(|loaded| loaded.target.events()).fold(0, u32::wrapping_add)
    }
}

/// What the lines of a table have to be to each other, one after the other.
#[derive(Default)]
pub(super) struct Order {
    next: u64,
    /// Of the last line.
    last: Option<&'static str>,
    /// One that stands alone.
    alone: Option<&'static str>,
}

impl Order {
    /// Where the next line's target lies, and what it is.
    pub(super) fn admit<'k>(
        &mut self,
        line: &LineSpec,
        known: &'k [Kind<KernelRing>],
    ) -> Result<(Place, &'k Kind<KernelRing>), TableError> {
        let refuse =
            |kind: &str, why: TargetError| TableError { line: line.line, kind: kind.to_owned(), why };
        if line.len == 0 {
            return Err(refuse("", TargetError::new("zero-length target")));
        }
        let Some(kind) = known.iter().find(|kind| kind.name == line.kind) else {
            return Err(refuse("", TargetError::of(format!("{}: unknown target type", line.kind))));
        };
        if self.alone.is_some() || (kind.singleton && self.last.is_some()) {
            let alone = self.alone.unwrap_or(kind.name);
            let why = format!("{alone}: singleton target type must appear alone in table");
            return Err(refuse("", TargetError::of(why)));
        }
        self.last = Some(kind.name);
        if kind.singleton {
            self.alone = self.last;
        }
        let end = line.start.checked_add(line.len).filter(|&end| end <= i64::MAX as u64 / 512);
        let (true, Some(end)) = (line.start == self.next, end) else {
            return Err(refuse(&line.kind, TargetError::new("Gap in table")));
        };
        self.next = end;
        Ok((Place { start: Sectors(line.start), len: Sectors(line.len) }, kind))
    }
}

/// Make all that a table says.
pub(crate) fn load(spec: &TableSpec, around: &Surroundings<'_>) -> Result<(Tree, Arc<Loaded>), DeviceError> {
    let known = kinds::<KernelRing>();
    let (mut rows, mut targets, mut trees) = (Vec::new(), Vec::new(), Vec::new());
    let mut order = Order::default();
    for line in &spec.lines {
        let (place, kind) = order.admit(line, &known)?;
        let refuse = |why: TargetError| TableError { line: line.line, kind: line.kind.clone(), why };
        let (tree, loaded) = target(line, place, kind, &spec.base, around).map_err(|error| match error {
            Unmade::Target(why) => DeviceError::from(refuse(why)),
            Unmade::Limits(why) => why.into(),
        })?;
        rows.push(Row { place, max_io_len: loaded.target.max_io_len(), spreads: loaded.target.spreads() });
        targets.push(loaded);
        trees.push(tree);
    }
    if targets.is_empty() {
        // A device that waits for its first table.
        let tree = Tree::leaf(Source::open(&StackSpec::Error(Bytes::ZERO))?);
        return Ok((tree, Arc::new(Loaded { targets, immutable: None })));
    }
    let mut tree = match trees.pop() {
        Some(tree) if TableLayer::is_needless(&rows) => tree,
        last => {
            trees.extend(last);
            Tree::over(Arc::new(TableLayer::new(rows)), trees)?
        }
    };
    // A table that comes later may look at data, or have no memory to lend: exports have made room for neither.
    (tree.profile.opaque, tree.profile.lends) = (false, false);
    tree.profile.read_only |= spec.read_only;
    let immutable = known.iter().find(|kind| kind.immutable && targets.iter().any(|t| t.kind == kind.name));
    let immutable = immutable.map(|kind| kind.name);
    Ok((tree, Arc::new(Loaded { targets, immutable })))
}

enum Unmade {
    Target(TargetError),
    Limits(block::LimitsError),
}

fn target(
    line: &LineSpec,
    place: Place,
    kind: &Kind<KernelRing>,
    base: &Path,
    around: &Surroundings<'_>,
) -> Result<(Tree, LoadedTarget), Unmade> {
    let words = line.words();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut opening = Opening { base, around, opened: Vec::new() };
    let target = (kind.make)(place, &words, &mut opening).map_err(Unmade::Target)?;
    let mut names = Names::default();
    opening.opened.iter().for_each(|opened| names.push(&*opened.word, &*opened.shown));
    for area in target.areas() {
        let device = &opening.opened[area.device];
        check_area(&device.shown, device.tree.profile(), area.start.0, area.len.0).map_err(Unmade::Target)?;
    }
    let devices: Vec<Tree> = opening.opened.into_iter().map(|opened| opened.tree).collect();
    let tree = Tree::over(target.clone(), devices.clone()).map_err(Unmade::Limits)?;
    let block = tree.profile.limits.logical_block_size.sectors().0.max(1);
    if [place.start.0, place.len.0].iter().any(|sectors| !sectors.is_multiple_of(block)) {
        return Err(Unmade::Target(TargetError::of(format!(
            "table line (start sect {} len {}) not aligned to h/w logical block size {}",
            place.start.0,
            place.len.0,
            block * 512
        ))));
    }
    Ok((tree, LoadedTarget { place, kind: kind.name, target, names, devices }))
}

/// Whether a device holds what a target uses of it (`device_area_is_invalid`).
pub(super) fn check_area(name: &str, profile: &Profile, start: u64, len: u64) -> Result<(), TargetError> {
    let size = profile.size.sectors().0;
    if start >= size || start.checked_add(len).is_none_or(|end| end > size) {
        return Err(TargetError::of(format!(
            "{name} too small for target: start={start}, len={len}, dev_size={size}"
        )));
    }
    let block = profile.limits.logical_block_size;
    let in_blocks = |sectors: u64| Sectors(sectors).bytes().is_aligned(block.0);
    for (what, sectors) in [("start", start), ("len", len)] {
        if !in_blocks(sectors) {
            let block = block.0;
            return Err(TargetError::of(format!(
                "{what}={sectors} not aligned to h/w logical block size {block} of {name}"
            )));
        }
    }
    Ok(())
}

/// A device that a constructor opened.
struct OpenedDevice {
    word: String,
    shown: String,
    identity: String,
    tree: Tree,
}

/// The devices of one target, while it is made.
struct Opening<'a> {
    base: &'a Path,
    around: &'a Surroundings<'a>,
    opened: Vec<OpenedDevice>,
}

impl Opening<'_> {
    fn add(&mut self, word: &str, later: Option<Sectors>) -> Result<usize, LookupError> {
        let (tree, identity, shown) = self.resolve(word, later)?;
        if tree.profile().limits.features.has(Features::ZONED) {
            let why = format!("{word}: targets do not know of zones");
            return Err(LookupError { why, errno: libc::EOPNOTSUPP });
        }
        self.opened.push(OpenedDevice { word: word.to_owned(), shown, identity, tree });
        Ok(self.opened.len() - 1)
    }

    /// The device that a word names, which one it is, and how it is shown.
    fn resolve(&self, word: &str, later: Option<Sectors>) -> Result<(Tree, String, String), LookupError> {
        let missing = |why: String| LookupError { why, errno: libc::ENODEV };
        if is_number_pair(word) {
            let path =
                node_of(word).ok_or_else(|| missing(format!("{word}: there is no such block device")))?;
            return self.path(&path);
        }
        if word.contains(':') {
            let spec: StackSpec =
                word.parse().map_err(|why| LookupError { why: format!("{why}"), errno: libc::EINVAL })?;
            let mut spec = spec.rooted(self.base);
            if let Some(why) = undecided(&spec) {
                return Err(LookupError { why: format!("{word}: {why}"), errno: libc::EINVAL });
            }
            if let (StackSpec::Nbd(nbd), Some(_)) = (&mut spec, later)
                && !word.contains("reconnect=")
            {
                // There may be another path: what this one does not answer is better asked there than waited for.
                nbd.reconnect = std::time::Duration::ZERO;
            }
            if let StackSpec::File(FileSpec { part: None, path, .. }) = &spec
                && let Some(numbers) = numbers_of(path)
            {
                return Ok((self.stack(&spec, later)?, numbers.clone(), numbers));
            }
            let tree = self.stack(&spec, later)?;
            // Now that the file is there, if it was to be made.
            let identity = match &spec {
                StackSpec::File(file) => identity_of_file(file),
                _ => spec.to_string(),
            };
            return Ok((tree, identity, escaped_word(word)));
        }
        let name = word.strip_prefix("/dev/mapper/").unwrap_or(word);
        if let Some(device) = (self.around.device)(name).filter(|device| !device.is_leaving()) {
            return Ok((Tree::of_device(&device), format!("device {name}"), name.to_owned()));
        }
        self.path(Path::new(word))
    }

    fn path(&self, path: &Path) -> Result<(Tree, String, String), LookupError> {
        // Targets of one table, and several tables, may stand on parts of one disk, as they may in the kernel. As there,
        // it is a disk whatever it begins with.
        let file = plain(self.base.join(path));
        let numbers = numbers_of(&file.path);
        let identity = numbers.clone().unwrap_or_else(|| identity_of_file(&file));
        let shown = numbers.unwrap_or_else(|| escaped_word(&path.to_string_lossy()));
        Ok((self.stack(&StackSpec::File(file), None)?, identity, shown))
    }

    fn stack(&self, spec: &StackSpec, later: Option<Sectors>) -> Result<Tree, LookupError> {
        let failed = |error: DeviceError| LookupError { errno: errno_of(&error), why: error.to_string() };
        let assumed = later.map(|len| Assumed { size: len.bytes(), like: self.a_path() });
        let tree = Tree::on(self.around.pool.open(spec, assumed.as_ref()).map_err(failed)?);
        match spec {
            StackSpec::File(FileSpec { part: Some(selector), .. }) => {
                super::part::open(tree, selector).map_err(failed)
            }
            _ => Ok(tree),
        }
    }

    /// What another path to an NBD server led to: one that is away for now is taken to lead to the like.
    fn a_path(&self) -> Option<backends::nbd::Export> {
        self.opened.iter().find_map(|opened| {
            opened.tree.remote().filter(|remote| remote.is_known()).map(|r| *r.nbd.export())
        })
    }

    fn scratch(&self, device: usize) -> io::Result<Scratch> {
        Scratch::new(&self.opened[device].tree).map_err(io::Error::other)
    }
}

impl Devices for Opening<'_> {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        self.add(word, None)
    }

    fn open_later(&mut self, word: &str, len: Sectors) -> Result<(usize, bool), LookupError> {
        let device = self.add(word, Some(len))?;
        let is_there = self.opened[device].tree.remote().is_none_or(Remote::is_known);
        Ok((device, is_there))
    }

    fn profile(&self, device: usize) -> &Profile {
        self.opened[device].tree.profile()
    }

    fn identity(&self, device: usize) -> &str {
        &self.opened[device].identity
    }

    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.scratch(device)?.read(at.0, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.scratch(device)?.write(at.0, from)
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.scratch(device)?.flush()
    }
}

/// The errno that the kernel would have for it.
fn errno_of(error: &DeviceError) -> i32 {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(errno) = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return errno;
        }
        source = error.source();
    }
    libc::ENODEV
}

/// What a path in a table stands for.
pub(super) fn plain(path: PathBuf) -> FileSpec {
    FileSpec { path, share: true, format: FileFormat::Given(Format::Raw), ..FileSpec::default() }
}

/// Why a word of a table is refused that leaves the format to the file: the table is loaded anew at each start, when a
/// client may have written to it.
pub(super) fn undecided(spec: &StackSpec) -> Option<&'static str> {
    let StackSpec::File(file) = spec else { return None };
    (file.format == FileFormat::Probe)
        .then_some("a table does not detect formats (give format=raw, qcow2 or vmdk)")
}

pub(super) fn is_number_pair(word: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    word.split_once(':').is_some_and(|(major, minor)| digits(major) && digits(minor))
}

/// The node of a block device by its numbers, as the kernel names it.
pub(super) fn node_of(numbers: &str) -> Option<PathBuf> {
    let target = std::fs::read_link(Path::new("/sys/dev/block").join(numbers)).ok()?;
    let node = Path::new("/dev").join(target.file_name()?);
    node.exists().then_some(node)
}

/// Which disk a file is: the file itself, however it is named and opened, and the part of it that is meant.
pub(super) fn identity_of_file(file: &FileSpec) -> String {
    let FileSpec { path, offset, part, .. } = file;
    let whole = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => format!("file {}:{}", metadata.dev(), metadata.ino()),
        _ => numbers_of(path).unwrap_or_else(|| format!("file:{}", path.display())),
    };
    match part {
        None if offset.0 == 0 => whole,
        None => format!("{whole} from {offset}"),
        Some(part) => format!("{whole} from {offset} part {part}"),
    }
}

/// `major:minor` of a block device's node; `None` for what is none.
pub(crate) fn numbers_of(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok()?;
    let device = metadata.rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    metadata.file_type().is_block_device().then(|| format!("{major}:{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_one_disk_whatever_it_is_called() {
        let folder = std::env::temp_dir().join(format!("blockyard-identity-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("disk"), vec![0; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("disk", folder.join("link")).unwrap();
        let opening = |word: &str| {
            let around = Surroundings { pool: &Pool::default(), device: &|_| None };
            let mut opening = Opening { base: &folder, around: &around, opened: Vec::new() };
            let device = opening.open(word).unwrap();
            opening.identity(device).to_owned()
        };
        let plain = opening("disk");
        let whole = format!("file:{}", folder.join("disk").display());
        for word in ["link", "./disk", "file:disk,share", "file:link,share,direct=off", &whole] {
            assert_eq!(opening(word), plain, "{word}");
        }
        assert_eq!(opening("file:new,size=1M,create"), opening("new"), "one that is made by being opened");
        assert_ne!(opening("file:disk,offset=4096,share"), plain);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
