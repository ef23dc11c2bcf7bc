//! `kind:what,key=value,…`: the backend at the bottom of a stack.

use super::layer::parse_selector;
use super::{DeviceName, NbdSpec, ProgramSpec, SpecError, TableSpec};
use super::{backend, null, rbd};
use ::rbd::RbdSpec;
use backends::{CustomSpec, Direct, FileSpec, NullSpec, RamSpec};
use block::Bytes;
use images::{Backing, Creation, Format};
use options::{Escaped, OptionRow, Options, split, write_choice, write_flag};
use partition::Selector;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The size of `null:`, `zero:` and `error:` where none is given: null_blk's default, 250 GiB.
pub const SIZE_DEFAULT: Bytes = Bytes::gib(250);

/// The backend of a device, or the table of its targets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StackSpec {
    /// A regular file or a block device.
    File(DiskFileSpec),
    /// Memory.
    Ram(RamSpec),
    /// Requests complete without I/O, and data is dropped unless an option stores it.
    Null(NullSpec),
    /// Reads return zeroes, and writes are dropped. The value is the size.
    Zero(Bytes),
    /// Every request fails. The value is the size.
    Error(Bytes),
    /// An export of an NBD server.
    Nbd(NbdSpec),
    /// An image of a Ceph cluster.
    Rbd(RbdSpec),
    /// A program that speaks the exec protocol.
    Exec(ProgramSpec),
    /// nbdkit with a plugin.
    Nbdkit(ProgramSpec),
    /// A driver in this program, which has no textual description.
    Custom(CustomSpec),
    /// Device-mapper targets over other stacks.
    Table(TableSpec),
}

impl StackSpec {
    /// Returns whether the contents outlive the process that serves them.
    pub fn survives(&self) -> bool {
        match self {
            StackSpec::Ram(_) => false,
            StackSpec::Null(null) => !null.memory_backed,
            _ => true,
        }
    }

    /// Returns the stack opened for reading only, where a kind has that option and the stack is not created.
    #[must_use]
    pub fn for_reading(&self) -> StackSpec {
        let mut stack = self.clone();
        match &mut stack {
            StackSpec::File(disk) if disk.file.create.is_none() => disk.file.ro = true,
            StackSpec::Nbd(server) => server.ro = true,
            StackSpec::Exec(program) | StackSpec::Nbdkit(program) => program.ro = true,
            StackSpec::Rbd(image) if image.create.is_none() => {
                // The exclusive lock is for writers.
                (image.read_only, image.exclusive) = (true, false);
            }
            _ => {}
        }
        stack
    }
}

/// The format of a disk in a file.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum FileFormat {
    /// No format was given: a raw disk. The file is refused if it starts like an image, and clients cannot write the start
    /// of one, so that no program that opens the file later without a format mistakes it for an image.
    #[default]
    Unspecified,
    /// The format is detected by the first bytes, which is safe only for files that no client has written.
    Probe,
    /// The given format, whatever the first bytes are.
    Given(Format),
}

/// `file:PATH,…`: a file, the format of the disk in it, and automatic actions of the device.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct DiskFileSpec {
    /// The file as the backend opens it.
    pub file: FileSpec,
    /// The cluster size of an image that is created, in bytes; `None`: the format's default.
    pub cluster_size: Option<u32>,
    /// The backing file of an image that is created, as the image refers to it, and its format.
    pub backing_file: Option<(PathBuf, Format)>,
    /// The partition to serve; `None`: the whole disk.
    pub part: Option<Selector>,
    /// The format of the disk.
    pub format: FileFormat,
    /// The internal snapshot of a qcow2 image to serve, by its id or name.
    pub snapshot: Option<String>,
    /// The files to which an image may refer.
    pub backing: Backing,
    /// Whether the device grows when the file grows.
    pub autosize: bool,
    /// Whether the device is removed when its last client disconnects.
    pub autoclear: bool,
    /// Whether the kernel scans its block device for partitions.
    pub partscan: bool,
}

const FORMAT: [(&str, FileFormat); 4] = [
    ("raw", FileFormat::Given(Format::Raw)),
    ("qcow2", FileFormat::Given(Format::Qcow2)),
    ("vmdk", FileFormat::Given(Format::Vmdk)),
    ("probe", FileFormat::Probe),
];
pub(super) const DIRECT: [(&str, Direct); 3] =
    [("auto", Direct::Auto), ("on", Direct::On), ("off", Direct::Off)];
impl FromStr for StackSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<StackSpec, SpecError> {
        let mut items = split(text).into_iter();
        let first = items.next().unwrap_or_default();
        let Some((kind, what)) = first.split_once(':') else {
            let fix = if first.contains(['/', '.']) {
                format!("for a file write file:{first}")
            } else {
                format!("backends: {}", backend::usages())
            };
            return Err(SpecError::new(format!("\"{first}\" has no kind"), fix));
        };
        match backend::row(kind) {
            Some(row) => (row.parse)(what, items.collect()),
            None => Err(backend::unknown(kind)),
        }
    }
}

fn parse_size(kind: &str, what: &str) -> Result<Bytes, SpecError> {
    let size: Bytes =
        what.parse().map_err(|why| SpecError::new(format!("{why}"), format!("for example {kind}:1G")))?;
    checked_size(kind, size)
}

pub(super) fn checked_size(what: &str, size: Bytes) -> Result<Bytes, SpecError> {
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

/// The options of `file:`.
pub(super) const FILE_OPTIONS: &[OptionRow] = &[
    OptionRow::value(
        "direct",
        "on|off|auto",
        "auto",
        "bypass the page cache, or use it; auto bypasses it for block devices",
    ),
    OptionRow::value("offset", "SIZE", "0", "where the device begins in the file"),
    OptionRow::value(
        "sizelimit",
        "SIZE",
        "the rest of the file",
        "the largest part of the file that the device covers",
    ),
    OptionRow::value("block", "512..64K", "512, or what the file needs", "the logical block size"),
    OptionRow::flag("ro", "read-only"),
    OptionRow::value("size", "SIZE", "", "the size of the file that is created; with create"),
    OptionRow::flag("create", "create the file if it is missing; with size"),
    OptionRow::value("cluster_size", "512..2M", "64K", "the cluster size of a qcow2 image that is created"),
    OptionRow::value("backing_file", "NAME", "none", "the backing file of a qcow2 image that is created"),
    OptionRow::value("backing_fmt", "raw|qcow2", "", "its format, required with backing_file"),
    OptionRow::flag("share", "let others write to the file at the same time"),
    OptionRow::flag("sync", "each write is durable when it completes: no volatile write cache"),
    OptionRow::value("part", "N|LABEL=NAME|PARTUUID=UUID", "", "serve one partition"),
    OptionRow::value(
        "format",
        "raw|qcow2|vmdk|probe",
        "raw, and images are refused",
        "the image format; probe detects it by the first bytes",
    ),
    OptionRow::value("snapshot", "ID|NAME", "", "serve an internal snapshot of a qcow2 image, read-only"),
    OptionRow::value(
        "backing",
        "allow|none|PATH[:PATH...]",
        "those in its folder",
        "the files that an image may name",
    ),
    OptionRow::flag("autosize", "grow the device when the file grows"),
    OptionRow::flag("autoclear", "remove the device when its last client disconnects"),
    OptionRow::flag("partscan", "the kernel scans for partitions (loop, ublk, nbd)"),
];

pub(super) fn parse_file(what: &str, items: impl Iterator<Item = String>) -> Result<DiskFileSpec, SpecError> {
    let mut options = Options::new("file", FILE_OPTIONS, items)?;
    if what.is_empty() {
        return Err(SpecError::new("file: has no path", "write file:PATH"));
    }
    let mut file = DiskFileSpec {
        file: FileSpec {
            path: PathBuf::from(what),
            direct: options.choice("direct", &DIRECT)?.unwrap_or_default(),
            offset: options.value("offset", "1M")?.unwrap_or_default(),
            sizelimit: options.value("sizelimit", "2G")?,
            block: block_size(&mut options)?,
            ro: options.flag("ro")?,
            share: options.flag("share")?,
            sync: options.flag("sync")?,
            ..FileSpec::default()
        },
        cluster_size: cluster_size(&mut options)?,
        backing_file: backing_file(&mut options)?,
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
    if file.file.sync && file.is_image() {
        return Err(SpecError::new("sync is for raw files", "leave it out, or leave out format"));
    }
    if file.file.sizelimit == Some(Bytes::ZERO) {
        return Err(SpecError::new("sizelimit is 0", "leave it out for the whole file"));
    }
    match (options.flag("create")?, size) {
        (true, None) => return Err(SpecError::new("create needs a size", "write size=10G,create")),
        (false, Some(_)) => {
            return Err(SpecError::new("size goes with create", "to use part of a file, write sizelimit"));
        }
        (true, Some(_)) if file.file.ro => {
            return Err(SpecError::new("a file cannot be created read-only", "leave out ro or create"));
        }
        (_, size) => file.file.create = size.map(|size| checked_size("a file", size)).transpose()?,
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

/// Takes the backing file of a new image. Its format is required, since it is never detected.
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

/// Checks the options that depend on `create`.
fn check_creation(file: &DiskFileSpec) -> Result<(), SpecError> {
    let of_image =
        [("cluster_size", file.cluster_size.is_some()), ("backing_file", file.backing_file.is_some())];
    let of_image = of_image.into_iter().find(|(_, given)| *given).map(|(name, _)| name);
    let Some(size) = file.file.create else {
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
    if file.file.offset >= size {
        return Err(SpecError::new(
            "offset lies past the file that is to be created",
            "use a smaller offset",
        ));
    }
    Ok(())
}

/// Parses `allow`, `none`, or files and folders separated by colons.
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

/// The options of `ram:`.
pub(super) const RAM_OPTIONS: &[OptionRow] = &[
    OptionRow::flag("hugepages", "ask the kernel for huge pages"),
    OptionRow::value("integrity", "t10|ip|nvme|BYTES", "none", "keep integrity data beside every 512 bytes"),
];

pub(super) fn parse_ram(what: &str, items: impl Iterator<Item = String>) -> Result<RamSpec, SpecError> {
    let mut options = Options::new("ram", RAM_OPTIONS, items)?;
    let integrity = options.value("integrity", "t10")?;
    Ok(RamSpec { size: parse_size("ram", what)?, hugepages: options.flag("hugepages")?, integrity })
}

/// Returns a RAM disk of that size: the simulation has no huge pages, and sends no integrity data.
pub(super) fn random_ram(size: Bytes, _below: &mut dyn FnMut(u64) -> u64) -> StackSpec {
    StackSpec::Ram(RamSpec { size, hugepages: false, integrity: None })
}

pub(super) fn parse_bare(
    kind: &'static str,
    what: &str,
    items: impl Iterator<Item = String>,
) -> Result<Bytes, SpecError> {
    Options::new(kind, &[] as &[OptionRow], items)?;
    size_or_default(kind, what)
}

impl StackSpec {
    /// Returns the name of the kind, such as `file`, `ram` or `null`.
    pub fn kind(&self) -> &'static str {
        match self {
            StackSpec::File(_) => "file",
            StackSpec::Ram(_) => "ram",
            StackSpec::Null(_) => "null",
            StackSpec::Zero(_) => "zero",
            StackSpec::Error(_) => "error",
            StackSpec::Nbd(_) => "nbd",
            StackSpec::Rbd(_) => "rbd",
            StackSpec::Exec(_) => "exec",
            StackSpec::Nbdkit(_) => "nbdkit",
            StackSpec::Custom(_) => "driver",
            StackSpec::Table(_) => "table",
        }
    }

    /// Returns the name for a device without a given one: the file's name without its last extension, with
    /// the number of a partition; or the kind.
    pub fn derived_name(&self) -> DeviceName {
        if let StackSpec::Nbd(nbd) = self {
            return nbd.derived_name();
        }
        if let StackSpec::Exec(program) | StackSpec::Nbdkit(program) = self {
            return program.derived_name(self.kind());
        }
        let mut stem = match self {
            StackSpec::File(file) => file.file.path.file_stem().map(|stem| stem.to_string_lossy()),
            StackSpec::Rbd(spec) => Some(spec.image.as_str().into()),
            _ => None,
        };
        if let (StackSpec::File(DiskFileSpec { part: Some(Selector::Number(number)), .. }), Some(stem)) =
            (self, &mut stem)
        {
            // The suffix of udev's links to partitions.
            stem.to_mut().push_str(&format!("-part{number}"));
        }
        DeviceName::nearest(stem.as_deref().unwrap_or_default(), self.kind())
    }

    /// Returns the stack with relative paths resolved against `base`.
    #[must_use]
    pub fn rooted(mut self, base: &Path) -> StackSpec {
        match &mut self {
            StackSpec::File(file) => {
                file.file.path = base.join(&file.file.path);
                if let Backing::Listed(listed) = &mut file.backing {
                    listed.iter_mut().for_each(|entry| *entry = base.join(&*entry));
                }
            }
            StackSpec::Nbd(nbd) => nbd.rooted(base),
            StackSpec::Exec(program) | StackSpec::Nbdkit(program) => program.rooted(base),
            StackSpec::Rbd(spec) => {
                spec.conf.as_mut().into_iter().for_each(|conf| *conf = base.join(&*conf));
            }
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
            StackSpec::Null(spec) => null::write(f, spec),
            StackSpec::Zero(size) => write!(f, "zero:{size}"),
            StackSpec::Error(size) => write!(f, "error:{size}"),
            StackSpec::Nbd(nbd) => write!(f, "{nbd}"),
            StackSpec::Rbd(spec) => rbd::write(f, spec),
            StackSpec::Exec(program) | StackSpec::Nbdkit(program) => program.write(f, self.kind()),
            StackSpec::Custom(custom) => write!(f, "driver:{}", Escaped(&custom.name)),
            StackSpec::Table(table) => write!(f, "table: {table}"),
        }
    }
}

impl DiskFileSpec {
    /// Returns whether the given format is that of an image.
    pub fn is_image(&self) -> bool {
        matches!(self.format, FileFormat::Given(format) if format != Format::Raw)
    }

    /// Returns whether the given format is that of an image or is detected.
    pub fn may_be_image(&self) -> bool {
        self.is_image() || self.format == FileFormat::Probe
    }

    /// Reads the first bytes of the file and returns whether it would be refused as a raw disk. Returns
    /// `false` for a file that cannot be read: the error of opening it is clearer.
    pub fn is_refused_as_raw(&self) -> bool {
        matches!(images::why_not_raw(&self.file.path), Ok(Some(_)))
    }

    /// Returns the properties of the image to create if the file is missing; `None`: no image is created.
    pub fn creation(&self) -> Option<Creation> {
        let size = self.file.create.filter(|_| self.is_image())?;
        let (cluster_size, backing_file) = (self.cluster_size, self.backing_file.clone());
        Some(Creation { size, cluster_size, backing_file })
    }

    /// Returns the first option that only raw files have.
    pub fn raw_only(&self) -> Option<&'static str> {
        let options = [
            ("offset", self.file.offset != Bytes::ZERO),
            ("sizelimit", self.file.sizelimit.is_some()),
            ("block", self.file.block.is_some()),
            ("direct=on", self.file.direct == Direct::On),
            ("autosize", self.autosize),
        ];
        options.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

impl fmt::Display for DiskFileSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file:{}", Escaped(&self.file.path.to_string_lossy()))?;
        write_choice(f, "direct", self.file.direct, &DIRECT)?;
        if self.file.offset != Bytes::ZERO {
            write!(f, ",offset={}", self.file.offset)?;
        }
        if let Some(limit) = self.file.sizelimit {
            write!(f, ",sizelimit={limit}")?;
        }
        write_block(f, self.file.block)?;
        write_flag(f, self.file.ro, "ro")?;
        if let Some(size) = self.file.create {
            write!(f, ",size={size},create")?;
        }
        if let Some(size) = self.cluster_size {
            write!(f, ",cluster_size={size}")?;
        }
        if let Some((name, format)) = &self.backing_file {
            write!(f, ",backing_file={},backing_fmt={format}", Escaped(&name.to_string_lossy()))?;
        }
        write_flag(f, self.file.share, "share")?;
        write_flag(f, self.file.sync, "sync")?;
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
