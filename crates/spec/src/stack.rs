//! `kind:what,key=value,…`: the backend at the bottom of a stack.

use super::layer::parse_selector;
use super::null::{self, NullSpec};
use super::{DeviceName, NbdSpec, SpecError, TableSpec};
use block::{Bytes, Integrity};
use images::{Backing, Creation, Format};
use options::{Escaped, Options, split, write_choice, write_flag};
use partition::Selector;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The size of `null:`, `zero:` and `error:` when none is given: null_blk's default, 250 GiB.
pub const SIZE_DEFAULT: Bytes = Bytes::gib(250);

/// What holds a device's blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StackSpec {
    /// A regular file or a block device.
    File(FileSpec),
    /// Memory.
    Ram(RamSpec),
    /// Requests end, nothing is kept.
    Null(NullSpec),
    /// Reads are zeroes, writes vanish. The size.
    Zero(Bytes),
    /// Everything fails. The size.
    Error(Bytes),
    /// An export of an NBD server.
    Nbd(NbdSpec),
    /// Targets over devices of any of these kinds.
    Table(TableSpec),
}

impl StackSpec {
    /// Whether what it holds is there after the process that serves it.
    pub fn survives(&self) -> bool {
        match self {
            StackSpec::Ram(_) => false,
            StackSpec::Null(null) => !null.memory_backed,
            _ => true,
        }
    }
}

/// How a file is opened.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direct {
    /// Direct where the file system offers it and it pays, else through the page cache.
    #[default]
    Auto,
    /// `O_DIRECT`, or refuse.
    On,
    /// Through the page cache.
    Off,
}

/// What a file holds a disk as.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum FileFormat {
    /// Nothing was given: it is a raw disk. It is refused if it begins as an image, and clients cannot make it begin as
    /// one, so nobody who opens the file later without a format takes it for one.
    #[default]
    Unspecified,
    /// What its first bytes say, which is only good for files that no client has written.
    Probe,
    /// This, whatever it begins with.
    Given(Format),
}

/// `file:PATH`.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct FileSpec {
    /// The file.
    pub path: PathBuf,
    /// Whether the page cache is passed by.
    pub direct: Direct,
    /// Where in the file the device starts: at any byte, as with loop devices.
    pub offset: Bytes,
    /// How much of the file the device covers at most.
    pub sizelimit: Option<Bytes>,
    /// The logical block in bytes, a power of two in 512..=65536; none: what the file suggests.
    pub block: Option<u32>,
    /// Not to be written.
    pub ro: bool,
    /// Create the file, for a disk of this size, if it is missing. From `size=…,create`.
    pub create: Option<Bytes>,
    /// Bytes of a cluster of an image that is created; `None`: the format's default.
    pub cluster_size: Option<u32>,
    /// The backing file of an image that is created, as the image names it, and its format.
    pub backing_file: Option<(PathBuf, Format)>,
    /// Others may write the file too.
    pub share: bool,
    /// Only that partition of it.
    pub part: Option<Selector>,
    /// What the file holds a disk as.
    pub format: FileFormat,
    /// Serve the disk as it was when this internal snapshot of a qcow2 image was made, by its id or name.
    pub snapshot: Option<String>,
    /// Which files an image may name.
    pub backing: Backing,
    /// The device grows by itself when the file does.
    pub autosize: bool,
    /// The device goes when its last client has.
    pub autoclear: bool,
    /// The kernel is to look for partitions, where the device is one of its own.
    pub partscan: bool,
}

/// `ram:SIZE`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RamSpec {
    /// How much.
    pub size: Bytes,
    /// Ask the kernel for huge pages.
    pub hugepages: bool,
    /// Keep integrity data beside the data.
    pub integrity: Option<Integrity>,
}

const FORMAT: [(&str, FileFormat); 4] = [
    ("raw", FileFormat::Given(Format::Raw)),
    ("qcow2", FileFormat::Given(Format::Qcow2)),
    ("vmdk", FileFormat::Given(Format::Vmdk)),
    ("probe", FileFormat::Probe),
];
pub(super) const DIRECT: [(&str, Direct); 3] =
    [("auto", Direct::Auto), ("on", Direct::On), ("off", Direct::Off)];
const KINDS: &str = "there are file:PATH, ram:SIZE, null:SIZE, zero:SIZE, error:SIZE, nbd:URI";

impl FromStr for StackSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<StackSpec, SpecError> {
        let mut items = split(text).into_iter();
        let first = items.next().unwrap_or_default();
        let Some((kind, what)) = first.split_once(':') else {
            let fix = if first.contains(['/', '.']) {
                format!("for a file write file:{first}")
            } else {
                KINDS.into()
            };
            return Err(SpecError::new(format!("\"{first}\" has no kind"), fix));
        };
        match kind {
            "file" => parse_file(what, items).map(StackSpec::File),
            "ram" => parse_ram(what, items).map(StackSpec::Ram),
            "null" => null::parse(what, items).map(StackSpec::Null),
            "zero" => parse_bare("zero", what, items).map(StackSpec::Zero),
            "error" => parse_bare("error", what, items).map(StackSpec::Error),
            "nbd" => NbdSpec::parse(what, items).map(StackSpec::Nbd),
            "rbd" => Err(SpecError::new(format!("{kind}: is not in this build"), KINDS)),
            _ => Err(SpecError::new(format!("there is no backend \"{kind}\""), KINDS)),
        }
    }
}

fn parse_size(kind: &str, what: &str) -> Result<Bytes, SpecError> {
    let size: Bytes =
        what.parse().map_err(|why| SpecError::new(format!("{why}"), format!("for example {kind}:1G")))?;
    checked_size(kind, size)
}

fn checked_size(what: &str, size: Bytes) -> Result<Bytes, SpecError> {
    // Offsets are signed 64-bit numbers to the kernel and to clients.
    if size == Bytes::ZERO || size.0 > i64::MAX as u64 || !size.is_aligned(512) {
        return Err(SpecError::new(
            format!("{what} cannot be {size} bytes"),
            "use a multiple of 512 between 512 and 8E",
        ));
    }
    Ok(size)
}

pub(super) fn size_or_default(kind: &str, what: &str) -> Result<Bytes, SpecError> {
    if what.is_empty() { Ok(SIZE_DEFAULT) } else { parse_size(kind, what) }
}

fn block_size(options: &mut Options) -> Result<Option<u32>, SpecError> {
    let Some(block) = options.value::<Bytes>("block", "4096")? else { return Ok(None) };
    if !block.0.is_power_of_two() || !(512..=65536).contains(&block.0) {
        return Err(SpecError::new(format!("a block cannot be {block} bytes"), "use 512, 1K, 2K, … 64K"));
    }
    Ok(Some(block.0 as u32))
}

fn parse_file(what: &str, items: impl Iterator<Item = String>) -> Result<FileSpec, SpecError> {
    const KNOWN: &[&str] = &[
        "direct",
        "offset",
        "sizelimit",
        "block",
        "ro",
        "size",
        "create",
        "cluster_size",
        "backing_file",
        "backing_fmt",
        "share",
        "part",
        "format",
        "snapshot",
        "backing",
        "autosize",
        "autoclear",
        "partscan",
    ];
    let mut options = Options::new("file", KNOWN, items)?;
    if what.is_empty() {
        return Err(SpecError::new("file: has no path", "write file:PATH"));
    }
    let mut file = FileSpec {
        path: PathBuf::from(what),
        direct: options.choice("direct", &DIRECT)?.unwrap_or_default(),
        offset: options.value("offset", "1M")?.unwrap_or_default(),
        sizelimit: options.value("sizelimit", "2G")?,
        block: block_size(&mut options)?,
        ro: options.flag("ro")?,
        create: None,
        cluster_size: cluster_size(&mut options)?,
        backing_file: backing_file(&mut options)?,
        share: options.flag("share")?,
        part: options.text("part")?.map(|text| parse_selector(&text)).transpose()?,
        format: options.choice("format", &FORMAT)?.unwrap_or_default(),
        snapshot: options.text("snapshot")?,
        backing: parse_backing(options.text("backing")?)?,
        autosize: options.flag("autosize")?,
        autoclear: options.flag("autoclear")?,
        partscan: options.flag("partscan")?,
    };
    let size: Option<Bytes> = options.value("size", "10G")?;
    if file.backing != Backing::Beside && !file.may_be_image() {
        let fix = "add format=qcow2, or leave it out";
        return Err(SpecError::new(
            "backing says which files an image may name, and this is a raw disk",
            fix,
        ));
    }
    if file.snapshot.is_some() && !file.may_be_image() {
        return Err(SpecError::new(
            "snapshot names a state of a qcow2 image, and this is a raw disk",
            "add format=qcow2",
        ));
    }
    if file.sizelimit == Some(Bytes::ZERO) {
        return Err(SpecError::new("sizelimit is 0", "leave it out for the whole file"));
    }
    match (options.flag("create")?, size) {
        (true, None) => return Err(SpecError::new("create needs a size", "write size=10G,create")),
        (false, Some(_)) => {
            return Err(SpecError::new("size goes with create", "to use part of a file, write sizelimit"));
        }
        (true, Some(_)) if file.ro => {
            return Err(SpecError::new("a file cannot be created read-only", "leave out ro or create"));
        }
        (_, size) => file.create = size.map(|size| checked_size("a file", size)).transpose()?,
    }
    check_creation(&file)?;
    Ok(file)
}

fn cluster_size(options: &mut Options) -> Result<Option<u32>, SpecError> {
    let Some(size) = options.value::<Bytes>("cluster_size", "64K")? else { return Ok(None) };
    if !size.0.is_power_of_two() || !(512..=2 << 20).contains(&size.0) {
        let fix = "use a power of two: 512, 1K, … 2M";
        return Err(SpecError::new(format!("a cluster cannot be {size} bytes"), fix));
    }
    Ok(Some(size.0 as u32))
}

/// The backing file of a new image. Its format must be given: nothing detects it later.
fn backing_file(options: &mut Options) -> Result<Option<(PathBuf, Format)>, SpecError> {
    let formats = [("raw", Format::Raw), ("qcow2", Format::Qcow2)];
    match (options.text("backing_file")?, options.choice("backing_fmt", &formats)?) {
        (Some(name), Some(format)) => Ok(Some((PathBuf::from(name), format))),
        (None, None) => Ok(None),
        (Some(_), None) => {
            Err(SpecError::new("backing_file needs its format", "add backing_fmt=raw or backing_fmt=qcow2"))
        }
        (None, Some(_)) => Err(SpecError::new("backing_fmt goes with backing_file", "leave it out")),
    }
}

/// Checks what goes with `create`.
fn check_creation(file: &FileSpec) -> Result<(), SpecError> {
    let of_image =
        [("cluster_size", file.cluster_size.is_some()), ("backing_file", file.backing_file.is_some())];
    let of_image = of_image.into_iter().find(|(_, given)| *given).map(|(name, _)| name);
    let Some(size) = file.create else {
        let Some(option) = of_image else { return Ok(()) };
        let fix = "write size=10G,create,format=qcow2";
        return Err(SpecError::new(format!("{option} goes with create"), fix));
    };
    match (file.format, of_image) {
        (FileFormat::Probe, _) => {
            return Err(SpecError::new(
                "a file that is created has no content to detect a format by",
                "use format=raw or format=qcow2",
            ));
        }
        (FileFormat::Given(Format::Vmdk), _) => {
            return Err(SpecError::new(
                "vmdk images are not created",
                "use format=qcow2, or leave out create and size",
            ));
        }
        (FileFormat::Given(Format::Qcow2), _) => {
            if file.snapshot.is_some() {
                let why = "an image that is created has no snapshots";
                return Err(SpecError::new(why, "leave out snapshot, or create and size"));
            }
            if let Some(option) = file.raw_only() {
                let fix = "leave it out";
                return Err(SpecError::new(format!("{option} means nothing to a qcow2 image"), fix));
            }
            let checked = file.creation().map_or(Ok(()), |creation| creation.check());
            return checked
                .map_err(|why| SpecError::new(why.to_string(), "change size, cluster_size or backing_file"));
        }
        (_, Some(option)) => {
            let why = format!("{option} means nothing to a raw file");
            return Err(SpecError::new(why, "add format=qcow2, or leave it out"));
        }
        (_, None) => {}
    }
    if file.offset >= size {
        return Err(SpecError::new(
            "offset lies past the file that is to be created",
            "use a smaller offset",
        ));
    }
    Ok(())
}

/// `allow`, `none`, or files and folders with colons between them.
fn parse_backing(text: Option<String>) -> Result<Backing, SpecError> {
    let Some(text) = text else { return Ok(Backing::Beside) };
    match text.as_str() {
        "allow" => Ok(Backing::Any),
        "none" => Ok(Backing::None),
        list if list.split(':').any(str::is_empty) => Err(SpecError::new(
            "option backing has an empty path",
            "write backing=allow, none, or PATH:PATH:…",
        )),
        list => Ok(Backing::Listed(list.split(':').map(PathBuf::from).collect())),
    }
}

fn parse_ram(what: &str, items: impl Iterator<Item = String>) -> Result<RamSpec, SpecError> {
    let mut options = Options::new("ram", &["hugepages", "integrity"], items)?;
    let integrity = options.value("integrity", "t10")?;
    Ok(RamSpec { size: parse_size("ram", what)?, hugepages: options.flag("hugepages")?, integrity })
}

fn parse_bare(
    kind: &'static str,
    what: &str,
    items: impl Iterator<Item = String>,
) -> Result<Bytes, SpecError> {
    Options::new(kind, &[], items)?;
    size_or_default(kind, what)
}

impl StackSpec {
    /// The kind's word: `file`, `ram`, `null`, `zero`, `error`.
    pub fn kind(&self) -> &'static str {
        match self {
            StackSpec::File(_) => "file",
            StackSpec::Ram(_) => "ram",
            StackSpec::Null(_) => "null",
            StackSpec::Zero(_) => "zero",
            StackSpec::Error(_) => "error",
            StackSpec::Nbd(_) => "nbd",
            StackSpec::Table(_) => "table",
        }
    }

    /// The name of a device that is not given one: the file's without its last extension, with the number of
    /// a partition, or the kind.
    pub fn derived_name(&self) -> DeviceName {
        if let StackSpec::Nbd(nbd) = self {
            return nbd.derived_name();
        }
        let mut stem = match self {
            StackSpec::File(file) => file.path.file_stem().map(|stem| stem.to_string_lossy()),
            _ => None,
        };
        if let (StackSpec::File(FileSpec { part: Some(Selector::Number(number)), .. }), Some(stem)) =
            (self, &mut stem)
        {
            // As udev names its links to partitions.
            stem.to_mut().push_str(&format!("-part{number}"));
        }
        DeviceName::nearest(stem.as_deref().unwrap_or_default(), self.kind())
    }

    /// A relative path is taken from `base` on.
    #[must_use]
    pub fn rooted(mut self, base: &Path) -> StackSpec {
        match &mut self {
            StackSpec::File(file) => {
                file.path = base.join(&file.path);
                if let Backing::Listed(listed) = &mut file.backing {
                    listed.iter_mut().for_each(|entry| *entry = base.join(&*entry));
                }
            }
            StackSpec::Nbd(nbd) => nbd.rooted(base),
            StackSpec::Table(table) => table.base = base.join(&table.base),
            _ => {}
        }
        self
    }
}

impl fmt::Display for StackSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StackSpec::File(file) => write!(f, "{file}"),
            StackSpec::Ram(ram) => {
                write!(f, "ram:{}", ram.size)?;
                write_flag(f, ram.hugepages, "hugepages")?;
                match ram.integrity {
                    Some(integrity) => write!(f, ",integrity={integrity}"),
                    None => Ok(()),
                }
            }
            StackSpec::Null(null) => write!(f, "{null}"),
            StackSpec::Zero(size) => write!(f, "zero:{size}"),
            StackSpec::Error(size) => write!(f, "error:{size}"),
            StackSpec::Nbd(nbd) => write!(f, "{nbd}"),
            StackSpec::Table(table) => write!(f, "table: {table}"),
        }
    }
}

impl FileSpec {
    /// It is said to be an image of a format.
    pub fn is_image(&self) -> bool {
        matches!(self.format, FileFormat::Given(format) if format != Format::Raw)
    }

    /// It is said to be an image of a format, or its first bytes decide.
    pub fn may_be_image(&self) -> bool {
        self.is_image() || self.format == FileFormat::Probe
    }

    /// Whether the file would be refused by now as it may not be a raw disk. A file that cannot be read would not:
    /// opening it says more.
    pub fn is_refused_as_raw(&self) -> bool {
        matches!(images::why_not_raw(&self.path), Ok(Some(_)))
    }

    /// The image to create if the file is missing.
    pub fn creation(&self) -> Option<Creation> {
        let size = self.create.filter(|_| self.is_image())?;
        let (cluster_size, backing_file) = (self.cluster_size, self.backing_file.clone());
        Some(Creation { size, cluster_size, backing_file })
    }

    /// The first option that means something to raw files only.
    pub fn raw_only(&self) -> Option<&'static str> {
        let options = [
            ("offset", self.offset != Bytes::ZERO),
            ("sizelimit", self.sizelimit.is_some()),
            ("block", self.block.is_some()),
            ("direct=on", self.direct == Direct::On),
            ("autosize", self.autosize),
        ];
        options.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

impl fmt::Display for FileSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file:{}", Escaped(&self.path.to_string_lossy()))?;
        write_choice(f, "direct", self.direct, &DIRECT)?;
        if self.offset != Bytes::ZERO {
            write!(f, ",offset={}", self.offset)?;
        }
        if let Some(limit) = self.sizelimit {
            write!(f, ",sizelimit={limit}")?;
        }
        write_block(f, self.block)?;
        write_flag(f, self.ro, "ro")?;
        if let Some(size) = self.create {
            write!(f, ",size={size},create")?;
        }
        if let Some(size) = self.cluster_size {
            write!(f, ",cluster_size={size}")?;
        }
        if let Some((name, format)) = &self.backing_file {
            write!(f, ",backing_file={},backing_fmt={format}", Escaped(&name.to_string_lossy()))?;
        }
        write_flag(f, self.share, "share")?;
        write_choice(f, "format", self.format, &FORMAT)?;
        if let Some(snapshot) = &self.snapshot {
            write!(f, ",snapshot={}", Escaped(snapshot))?;
        }
        match &self.backing {
            Backing::Beside => {}
            Backing::Any => f.write_str(",backing=allow")?,
            Backing::None => f.write_str(",backing=none")?,
            Backing::Listed(listed) => {
                let listed: Vec<_> = listed.iter().map(|entry| entry.to_string_lossy()).collect();
                write!(f, ",backing={}", Escaped(&listed.join(":")))?;
            }
        }
        if let Some(part) = &self.part {
            write!(f, ",part={}", Escaped(&part.to_string()))?;
        }
        write_flag(f, self.autosize, "autosize")?;
        write_flag(f, self.autoclear, "autoclear")?;
        write_flag(f, self.partscan, "partscan")
    }
}

fn write_block(f: &mut fmt::Formatter<'_>, block: Option<u32>) -> fmt::Result {
    block.map_or(Ok(()), |block| write!(f, ",block={block}"))
}
