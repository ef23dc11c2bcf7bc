//! Builds the tree of a table: constructs every target, opens its devices, checks its areas.
//!
//! Arguments that name devices are resolved here: `kind:…` as everywhere in this program, the name of a
//! device of this process, `major:minor`, or a path. An argument that is open already in this process,
//! through any table, means the same opened device: two targets on `ram:1G` share that memory.
//!
//! *Invariant:* a table that is refused leaves nothing open.

use super::source::{self, Source};
use super::{SyncIo, Tree};
use crate::connect::{AssumedExport, Remote};
use crate::device::{Device, DeviceError};
use crate::spec::{DiskFileSpec, FileFormat, FileSpec, Format, LineSpec, StackSpec, TableSpec, escaped_word};
use block::{Bytes, Features, Profile, Sectors};
use layers::dm::{
    Devices, LookupError, Names, TableLayer, TableTarget, Target, TargetError, TargetRange, TargetType,
};
use ring::KernelRing;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The opened devices that the tables of a process share.
#[derive(Default)]
pub(crate) struct SourcePool {
    open: Mutex<HashMap<String, Weak<dyn Source>>>,
}

impl SourcePool {
    /// Opens a device, or shares it. `later`: the export that an unreachable server is assumed to have.
    fn open(
        &self,
        spec: &StackSpec,
        later: Option<&AssumedExport>,
        device: Option<&str>,
    ) -> Result<Arc<dyn Source>, DeviceError> {
        let key = spec.to_string();
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, source| source.strong_count() > 0);
        if let Some(source) = open.get(&key).and_then(Weak::upgrade) {
            return Ok(source);
        }
        let source = match (spec, later) {
            (StackSpec::Nbd(spec), Some(assumed)) => source::open_assumed(spec, assumed, device)?,
            _ => source::open(spec, device)?,
        };
        open.insert(key, Arc::downgrade(&source));
        Ok(source)
    }
}

/// Context for opening the backends of a stack or a table.
pub(crate) struct OpenContext<'a> {
    pub(crate) pool: &'a SourcePool,
    /// Finds a device of this process by name.
    pub(crate) device: &'a dyn Fn(&str) -> Option<Arc<Device>>,
    /// The name of the device that gets the table, for the log.
    pub(crate) name: Option<&'a str>,
}

/// Why a table is refused.
#[derive(Debug)]
pub struct TableError {
    /// Line of the text, from 1; 0: the whole table.
    pub line: u32,
    /// Target type; empty if no target is at fault.
    pub kind: String,
    /// The reason, in the kernel's words.
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

/// A target of a table that was loaded.
pub(crate) struct LoadedTarget {
    pub(crate) place: TargetRange,
    pub(crate) kind: &'static str,
    pub(crate) target: Arc<dyn Target<KernelRing>>,
    pub(crate) names: Names,
    /// Each device that it opened, as a tree of its own.
    pub(crate) devices: Vec<Tree>,
}

/// A table that was loaded.
pub(crate) struct Loaded {
    pub(crate) targets: Vec<LoadedTarget>,
    /// Type of an immutable target, which only tables with that type may follow.
    immutable: Option<&'static str>,
}

impl Loaded {
    /// Creates a table of one target.
    pub(super) fn of_target(target: LoadedTarget) -> Loaded {
        Loaded { targets: vec![target], immutable: None }
    }

    /// Checks whether `next` may replace this table.
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

    /// Returns whether it is a single `error` target, which may follow any (`DM_TARGET_WILDCARD`).
    fn is_wildcard(&self) -> bool {
        matches!(self.targets.as_slice(), [LoadedTarget { kind: "error", .. }])
    }

    /// Number of events that a process may wait for.
    pub(crate) fn events(&self) -> u32 {
        self.targets.iter().map(|loaded| loaded.target.events()).fold(0, u32::wrapping_add)
    }
}

/// Checks the sequence of the lines of a table.
#[derive(Default)]
pub(super) struct LineChecker {
    next: u64,
    /// Type of the last line.
    last: Option<&'static str>,
    /// Type of a singleton target.
    alone: Option<&'static str>,
}

impl LineChecker {
    /// Checks the next line. Returns its place and its target type.
    pub(super) fn admit(
        &mut self,
        line: &LineSpec,
    ) -> Result<(TargetRange, TargetType<KernelRing>), TableError> {
        let refuse =
            |kind: &str, why: TargetError| TableError { line: line.line, kind: kind.to_owned(), why };
        if line.len == 0 {
            return Err(refuse("", TargetError::new("zero-length target")));
        }
        let kind = TargetType::find(&line.kind).map_err(|why| refuse("", why))?;
        let row = kind.row;
        if self.alone.is_some() || (row.singleton && self.last.is_some()) {
            let alone = self.alone.unwrap_or(row.name);
            let why = format!("{alone}: singleton target type must appear alone in table");
            return Err(refuse("", TargetError::of(why)));
        }
        self.last = Some(row.name);
        if row.singleton {
            self.alone = self.last;
        }
        let end = line.start.checked_add(line.len).filter(|&end| end <= i64::MAX as u64 / 512);
        let (true, Some(end)) = (line.start == self.next, end) else {
            return Err(refuse(&line.kind, TargetError::new("Gap in table")));
        };
        self.next = end;
        Ok((TargetRange { start: Sectors(line.start), len: Sectors(line.len) }, kind))
    }
}

/// Opens everything that a table names.
pub(crate) fn load(spec: &TableSpec, context: &OpenContext<'_>) -> Result<(Tree, Arc<Loaded>), DeviceError> {
    let (mut rows, mut targets, mut trees) = (Vec::new(), Vec::new(), Vec::new());
    let mut checker = LineChecker::default();
    for line in &spec.lines {
        let (place, kind) = checker.admit(line)?;
        let refuse = |why: TargetError| TableError { line: line.line, kind: line.kind.clone(), why };
        let (tree, loaded) =
            target(line, place, &kind, &spec.base, context).map_err(|error| match error {
                BuildError::Target(why) => DeviceError::from(refuse(why)),
                BuildError::Limits(why) => why.into(),
            })?;
        rows.push(TableTarget {
            place,
            max_io_len: loaded.target.max_io_len(),
            splits_discards: loaded.target.splits_discards(),
        });
        targets.push(loaded);
        trees.push(tree);
    }
    if targets.is_empty() {
        // A device that waits for its first table.
        let tree = Tree::leaf(source::open(&StackSpec::Error(Bytes::ZERO), None)?);
        return Ok((tree, Arc::new(Loaded { targets, immutable: None })));
    }
    let mut tree = match trees.pop() {
        Some(tree) if TableLayer::is_needless(&rows) => tree,
        last => {
            trees.extend(last);
            Tree::over(Arc::new(TableLayer::new(rows)), trees)?
        }
    };
    // A later table may access data, or not be zero-copy: exports have prepared for neither.
    (tree.profile.opaque, tree.profile.zero_copy_reads) = (false, false);
    tree.profile.read_only |= spec.read_only;
    let immutable =
        layers::dm::rows().iter().find(|row| row.immutable && targets.iter().any(|t| t.kind == row.name));
    let immutable = immutable.map(|row| row.name);
    Ok((tree, Arc::new(Loaded { targets, immutable })))
}

enum BuildError {
    Target(TargetError),
    Limits(block::LimitsError),
}

fn target(
    line: &LineSpec,
    place: TargetRange,
    kind: &TargetType<KernelRing>,
    base: &Path,
    context: &OpenContext<'_>,
) -> Result<(Tree, LoadedTarget), BuildError> {
    let arguments = line.arguments();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut opening = TargetDevices { base, context, opened: Vec::new() };
    let target = (kind.construct)(place, &arguments, &mut opening).map_err(BuildError::Target)?;
    let mut names = Names::default();
    opening.opened.iter().for_each(|opened| names.push(&*opened.word, &*opened.shown));
    for area in target.areas() {
        let device = &opening.opened[area.device];
        check_area(&device.shown, device.tree.profile(), area.start.0, area.len.0)
            .map_err(BuildError::Target)?;
    }
    let devices: Vec<Tree> = opening.opened.into_iter().map(|opened| opened.tree).collect();
    let tree = Tree::over(target.clone(), devices.clone()).map_err(BuildError::Limits)?;
    let block = tree.profile.limits.logical_block_size.sectors().0.max(1);
    if [place.start.0, place.len.0].iter().any(|sectors| !sectors.is_multiple_of(block)) {
        return Err(BuildError::Target(TargetError::of(format!(
            "table line (start sect {} len {}) not aligned to h/w logical block size {}",
            place.start.0,
            place.len.0,
            block * 512
        ))));
    }
    Ok((tree, LoadedTarget { place, kind: kind.row.name, target, names, devices }))
}

/// Checks that a device has the area that a target uses (`device_area_is_invalid`).
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

/// The devices of one target, during its construction.
struct TargetDevices<'a> {
    base: &'a Path,
    context: &'a OpenContext<'a>,
    opened: Vec<OpenedDevice>,
}

impl TargetDevices<'_> {
    fn add(&mut self, word: &str, later: Option<Sectors>) -> Result<usize, LookupError> {
        let (tree, identity, shown) = self.resolve(word, later)?;
        if tree.profile().limits.features.contains(Features::ZONED) {
            let why = format!("{word}: targets do not support zones");
            return Err(LookupError { why, errno: libc::EOPNOTSUPP });
        }
        self.opened.push(OpenedDevice { word: word.to_owned(), shown, identity, tree });
        Ok(self.opened.len() - 1)
    }

    /// Resolves an argument. Returns the device, its identity, and the name under which it is shown.
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
            if let Some(why) = refuse_probe(&spec) {
                return Err(LookupError { why: format!("{word}: {why}"), errno: libc::EINVAL });
            }
            if let (StackSpec::Nbd(nbd), Some(_)) = (&mut spec, later)
                && !word.contains("reconnect=")
            {
                // There may be another path: requests are better retried there than held for this one.
                nbd.reconnect = std::time::Duration::ZERO;
            }
            if let StackSpec::File(DiskFileSpec { part: None, file, .. }) = &spec
                && let Some(numbers) = numbers_of(&file.path)
            {
                return Ok((self.stack(&spec, later)?, numbers.clone(), numbers));
            }
            let tree = self.stack(&spec, later)?;
            // The file exists now, if it was to be created.
            let identity = match &spec {
                StackSpec::File(file) => identity_of_file(file),
                _ => spec.to_string(),
            };
            return Ok((tree, identity, escaped_word(word)));
        }
        let name = word.strip_prefix("/dev/mapper/").unwrap_or(word);
        if let Some(device) = (self.context.device)(name).filter(|device| !device.is_being_removed()) {
            return Ok((Tree::of_device(&device), format!("device {name}"), name.to_owned()));
        }
        self.path(Path::new(word))
    }

    fn path(&self, path: &Path) -> Result<(Tree, String, String), LookupError> {
        // Targets of one table, and several tables, may use parts of one disk, as in the kernel. As there, it
        // is a disk whatever its content begins with.
        let file = raw_shared(self.base.join(path));
        let numbers = numbers_of(&file.file.path);
        let identity = numbers.clone().unwrap_or_else(|| identity_of_file(&file));
        let shown = numbers.unwrap_or_else(|| escaped_word(&path.to_string_lossy()));
        Ok((self.stack(&StackSpec::File(file), None)?, identity, shown))
    }

    fn stack(&self, spec: &StackSpec, later: Option<Sectors>) -> Result<Tree, LookupError> {
        let failed = |error: DeviceError| LookupError { errno: errno_of(&error), why: error.to_string() };
        let assumed = later.map(|len| AssumedExport { size: len.bytes(), like: self.known_path() });
        let tree =
            Tree::leaf(self.context.pool.open(spec, assumed.as_ref(), self.context.name).map_err(failed)?);
        match spec {
            StackSpec::File(DiskFileSpec { part: Some(selector), .. }) => {
                super::part::open(tree, selector).map_err(failed)
            }
            _ => Ok(tree),
        }
    }

    /// Returns the export over another path: one that cannot be reached is assumed to lead to the same.
    fn known_path(&self) -> Option<backends::nbd::Export> {
        self.opened.iter().find_map(|opened| {
            opened.tree.remote().filter(|remote| remote.is_known()).map(|r| *r.nbd.export())
        })
    }

    fn scratch(&self, device: usize) -> io::Result<SyncIo> {
        SyncIo::new(&self.opened[device].tree).map_err(io::Error::other)
    }
}

impl Devices for TargetDevices<'_> {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        self.add(word, None)
    }

    fn open_later(&mut self, word: &str, len: Sectors) -> Result<(usize, bool), LookupError> {
        let device = self.add(word, Some(len))?;
        let is_reachable = self.opened[device].tree.remote().is_none_or(Remote::is_known);
        Ok((device, is_reachable))
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

/// Returns the errno that the kernel would return.
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

/// Returns the description that a path in a table stands for.
pub(super) fn raw_shared(path: PathBuf) -> DiskFileSpec {
    let file = FileSpec { share: true, ..FileSpec::new(path) };
    DiskFileSpec { file, format: FileFormat::Given(Format::Raw), ..DiskFileSpec::default() }
}

/// Returns why an argument is refused that leaves the format to detection: the table is loaded again at each
/// start, when a client may have written to the file.
pub(super) fn refuse_probe(spec: &StackSpec) -> Option<&'static str> {
    let StackSpec::File(file) = spec else { return None };
    (file.format == FileFormat::Probe)
        .then_some("a table does not detect formats (give format=raw, qcow2 or vmdk)")
}

pub(super) fn is_number_pair(word: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    word.split_once(':').is_some_and(|(major, minor)| digits(major) && digits(minor))
}

/// Returns the node of a block device by its numbers, as the kernel names it.
pub(super) fn node_of(numbers: &str) -> Option<PathBuf> {
    let target = std::fs::read_link(Path::new("/sys/dev/block").join(numbers)).ok()?;
    let node = Path::new("/dev").join(target.file_name()?);
    node.exists().then_some(node)
}

/// Returns the identity of a file, independent of its name, with the part of it that is used.
pub(super) fn identity_of_file(file: &DiskFileSpec) -> String {
    let DiskFileSpec { file: FileSpec { path, offset, .. }, part, .. } = file;
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

/// Returns `major:minor` of a block device node; `None` for other files.
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
    fn a_file_is_one_disk_under_any_name() {
        let folder = std::env::temp_dir().join(format!("blockyard-identity-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("disk"), vec![0; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("disk", folder.join("link")).unwrap();
        let opening = |word: &str| {
            let context = OpenContext { pool: &SourcePool::default(), device: &|_| None, name: None };
            let mut opening = TargetDevices { base: &folder, context: &context, opened: Vec::new() };
            let device = opening.open(word).unwrap();
            opening.identity(device).to_owned()
        };
        let plain = opening("disk");
        let whole = format!("file:{}", folder.join("disk").display());
        for word in ["link", "./disk", "file:disk,share", "file:link,share,direct=off", &whole] {
            assert_eq!(opening(word), plain, "{word}");
        }
        assert_eq!(opening("file:new,size=1M,create"), opening("new"), "a file created by opening it");
        assert_ne!(opening("file:disk,offset=4096,share"), plain);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
