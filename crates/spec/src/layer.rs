//! `--layer NAME,OPTION,…`: the layers of a stack.

use super::stack::DIRECT;
use super::{Direct, SpecError};
use block::{Bytes, LimitOverrides, ParseLimitsError, QueueLimits};
use layers::LayerOptions;
use layers::scheduler::{Choice, Policy};
use options::{Escaped, OptionRow, Options};
use options::{write_choice, write_flag};
use partition::Selector;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// One layer of a stack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LayerSpec {
    /// Splits requests to queue limits, by the kernel's rules. The text contains the limits as
    /// `key=value,…` with the kernel's field names; never empty.
    Split(String),
    /// One partition of the device below.
    Part(Selector),
    /// An overlay that takes the writes; the device below is only read.
    Cow(CowSpec),
    /// A layer of the list of drivers ([`layers::drivers`]).
    Driver(LayerOptions),
    /// The scheduler, which orders and merges the requests of the whole device.
    Scheduler(Choice),
}

/// An overlay: `cow,file=PATH`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CowSpec {
    /// The file of the overlay.
    pub file: PathBuf,
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// The chunk size of an overlay that is created, a power of two.
    pub chunk: Option<Bytes>,
    /// The size of an overlay that is created; `None`: that of the device below.
    pub size: Option<Bytes>,
    /// Whether the overlay is created if it is missing.
    pub create: bool,
}

/// A layer, as users see it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerRow {
    /// The name, before the first comma.
    pub name: &'static str,
    /// The name with all options.
    pub usage: &'static str,
    /// The purpose, in half a line.
    pub about: &'static str,
    /// A layer that parses.
    pub example: &'static str,
    /// Every option, in the order of the help. Empty for layers whose arguments are not options of their own.
    pub options: &'static [OptionRow],
}

const COW_OPTIONS: &[OptionRow] = &[
    OptionRow::value("file", "PATH", "", "the overlay; required"),
    OptionRow::value("direct", "on|off|auto", "auto", "bypass the page cache of the overlay, or use it"),
    OptionRow::value("chunk", "4K..16M", "64K", "the unit that an overlay that is created copies"),
    OptionRow::value("size", "SIZE", "that of the device below", "the size of an overlay that is created"),
    OptionRow::flag("create", "create the overlay if it is missing"),
];

/// Layers that the engine handles specially, not in the list of drivers: partition tables, overlays, the
/// scheduler's position.
const OWN: [LayerRow; 5] = [
    LayerRow {
        name: "split",
        usage: "split,LIMIT=N[,LIMIT=N...]",
        about: "cuts requests to queue limits, by the kernel's rules",
        example: "split,max_sectors=255",
        options: &[],
    },
    LayerRow {
        name: "part",
        usage: "part,N|LABEL=NAME|PARTUUID=UUID",
        about: "one partition of the device below",
        example: "part,2",
        options: &[],
    },
    LayerRow {
        name: "cow",
        usage: "cow,file=PATH[,create[,size=SIZE][,chunk=4K..16M]][,direct=on|off|auto]",
        about: "an overlay takes the writes",
        example: "cow,file=overlay.img,create",
        options: COW_OPTIONS,
    },
    LayerRow {
        name: "mq-deadline",
        usage: "mq-deadline[,PARAMETER=VALUE...]",
        about: "the kernel's scheduler of that name",
        example: "mq-deadline,read_expire=100",
        options: Policy::MqDeadline.options(),
    },
    LayerRow {
        name: "kyber",
        usage: "kyber[,PARAMETER=VALUE...]",
        about: "the kernel's scheduler of that name",
        example: "kyber,read_lat_nsec=500000",
        options: Policy::Kyber.options(),
    },
];

/// Returns all layers, in the order of the help.
pub fn layer_rows() -> Vec<LayerRow> {
    let drivers = layers::drivers::rows().into_iter().map(|row| LayerRow {
        name: row.name,
        usage: row.usage,
        about: row.about,
        example: row.example,
        options: row.options,
    });
    let (below, schedulers) = OWN.split_at(3);
    below.iter().copied().chain(drivers).chain(schedulers.iter().copied()).collect()
}

/// Returns the error for an unknown layer, with the nearest name as a suggestion.
pub fn unknown_layer(kind: &str) -> SpecError {
    let rows = layer_rows();
    let names: Vec<&str> = rows.iter().map(|row| row.name).collect();
    let near = options::did_you_mean(kind, names.iter().copied());
    SpecError::new(format!("unknown layer \"{kind}\""), format!("{near}layers: {}", names.join(", ")))
}

impl FromStr for LayerSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<LayerSpec, SpecError> {
        let mut items = options::split(text).into_iter();
        let kind = items.next().unwrap_or_default();
        match kind.as_str() {
            "split" => parse_split(items),
            "part" => parse_part(items),
            "cow" => parse_cow(items),
            "mq-deadline" | "kyber" => {
                text.parse().map(LayerSpec::Scheduler).map_err(|error| super::scheduler::refusal(&error))
            }
            _ => match LayerOptions::read(&kind, items.collect()) {
                Some(words) => words.map(LayerSpec::Driver),
                None => Err(unknown_layer(&kind)),
            },
        }
    }
}

fn parse_split(items: impl Iterator<Item = String>) -> Result<LayerSpec, SpecError> {
    let limits: Vec<String> = items.collect();
    if limits.is_empty() {
        return Err(SpecError::new("split has no limit to split by", "for example split,max_sectors=255"));
    }
    let limits = limits.join(",");
    check_limits(&limits)?;
    Ok(LayerSpec::Split(limits))
}

fn parse_part(mut items: impl Iterator<Item = String>) -> Result<LayerSpec, SpecError> {
    match (items.next(), items.next()) {
        (Some(selector), None) => parse_selector(&selector).map(LayerSpec::Part),
        _ => Err(SpecError::new("part names one partition", PART_FIX)),
    }
}

fn parse_cow(items: impl Iterator<Item = String>) -> Result<LayerSpec, SpecError> {
    let mut options = Options::new("cow", COW_OPTIONS, items)?;
    let Some(file) = options.text("file")? else {
        return Err(SpecError::new(
            "cow has no file for its overlay",
            "for example cow,file=overlay.img,create",
        ));
    };
    let cow = CowSpec {
        file: file.into(),
        direct: options.choice("direct", &DIRECT)?.unwrap_or_default(),
        chunk: options.value("chunk", "64K")?,
        size: options.value("size", "10G")?,
        create: options.flag("create")?,
    };
    if !cow.create && (cow.chunk.is_some() || cow.size.is_some()) {
        return Err(SpecError::new("chunk and size go with create", "an existing overlay has its own"));
    }
    if cow.chunk.is_some_and(|chunk| !chunk.0.is_power_of_two() || !(4096..=16 << 20).contains(&chunk.0)) {
        return Err(SpecError::new("a chunk cannot have that size", "use 4K, 8K, 16K … 16M"));
    }
    if cow.size.is_some_and(|size| size.0 == 0 || !size.is_aligned(512)) {
        return Err(SpecError::new("a device cannot have that size", "use a multiple of 512"));
    }
    Ok(LayerSpec::Cow(cow))
}

impl LayerSpec {
    /// Returns the layer with relative paths resolved against `base`.
    #[must_use]
    pub fn rooted(self, base: &Path) -> LayerSpec {
        match self {
            LayerSpec::Cow(cow) => LayerSpec::Cow(CowSpec { file: base.join(&cow.file), ..cow }),
            LayerSpec::Driver(words) => LayerSpec::Driver(words.rooted(base)),
            other => other,
        }
    }
}

impl fmt::Display for CowSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cow,file={}", Escaped(&self.file.to_string_lossy()))?;
        write_choice(f, "direct", self.direct, &DIRECT)?;
        if let Some(chunk) = self.chunk {
            write!(f, ",chunk={chunk}")?;
        }
        if let Some(size) = self.size {
            write!(f, ",size={size}")?;
        }
        write_flag(f, self.create, "create")
    }
}

const PART_FIX: &str = "for example part,2 or part,LABEL=root or part,PARTUUID=…";

/// Parses the name of a partition.
pub(super) fn parse_selector(text: &str) -> Result<Selector, SpecError> {
    match text.parse() {
        Ok(Selector::Number(0)) => Err(SpecError::new("partitions are numbered from 1", PART_FIX)),
        Ok(Selector::Uuid(name) | Selector::Label(name)) if name.is_empty() => {
            Err(SpecError::new("part names no partition", PART_FIX))
        }
        Ok(selector) => Ok(selector),
        Err(never) => match never {},
    }
}

/// Checks that a text holds queue limits, at least one: `key=value,…`.
///
/// # Errors
/// The text is empty, or a name or value is invalid.
pub fn check_limits(text: &str) -> Result<(), SpecError> {
    let fix = "write key=value with the kernel's names, for example max_sectors=255";
    match text.parse::<LimitOverrides>() {
        Ok(limits) if limits.is_empty() => Err(SpecError::new("there is no limit", fix)),
        Ok(_) => Ok(()),
        Err(ParseLimitsError::UnknownName { name }) => Err(unknown_limit(&name)),
        Err(why) => Err(SpecError::new(why.to_string(), fix)),
    }
}

/// Returns the error for an unknown limit, with the nearest name as a suggestion.
pub fn unknown_limit(name: &str) -> SpecError {
    let known =
        QueueLimits::FIELDS.iter().filter(|field| field.why_fixed().is_none()).map(|field| field.name);
    let near = options::did_you_mean(name, known);
    SpecError::new(format!("unknown limit \"{name}\""), format!("{near}blockyard help limits lists them"))
}

impl fmt::Display for LayerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerSpec::Split(limits) => write!(f, "split,{limits}"),
            LayerSpec::Cow(cow) => write!(f, "{cow}"),
            LayerSpec::Driver(words) => write!(f, "{words}"),
            LayerSpec::Scheduler(choice) => write!(f, "{choice}"),
            LayerSpec::Part(selector) => write!(f, "part,{}", Escaped(&selector.to_string())),
        }
    }
}
