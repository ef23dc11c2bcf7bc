//! `--layer 'kind,key=value,…'`.

use super::stack::DIRECT;
use super::{Direct, SpecError};
use block::{Bytes, LimitOverrides};
use layers::Words;
use layers::scheduler::Choice;
use options::{Escaped, Options};
use options::{write_choice, write_flag};
use partition::Selector;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// One layer of a stack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LayerSpec {
    /// Cuts requests to its limits, by the kernel's rules. The limits as `key=value,…` with the kernel's field
    /// names; never empty.
    Split(String),
    /// One partition of what stands below.
    Part(Selector),
    /// What is written goes to an overlay; what stands below is only read.
    Cow(CowSpec),
    /// One of the list of drivers ([`layers::drivers`]).
    Driver(Words),
    /// What orders and merges the requests of the whole device.
    Scheduler(Choice),
}

/// `cow,file=PATH`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CowSpec {
    /// The overlay.
    pub file: PathBuf,
    /// How it is opened.
    pub direct: Direct,
    /// Bytes of a chunk, of one that is made: a power of two.
    pub chunk: Option<Bytes>,
    /// How long the device is, of one that is made; `None`: as long as what stands below.
    pub size: Option<Bytes>,
    /// Make it if it is not there.
    pub create: bool,
}

/// A row of the help.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerRow {
    /// What stands before the first comma.
    pub name: &'static str,
    /// The words that there may be.
    pub usage: &'static str,
    /// What it does, in half a line.
    pub about: &'static str,
    /// Words that work.
    pub example: &'static str,
}

/// Layers that need more of the engine than a driver has: partition tables, overlays, the place of a scheduler.
const OWN: [LayerRow; 5] = [
    LayerRow {
        name: "split",
        usage: "split,LIMIT=N[,LIMIT=N...]",
        about: "cuts requests to queue limits, by the kernel's rules",
        example: "split,max_sectors=255",
    },
    LayerRow {
        name: "part",
        usage: "part,N|LABEL=NAME|PARTUUID=UUID",
        about: "one partition of what stands below",
        example: "part,2",
    },
    LayerRow {
        name: "cow",
        usage: "cow,file=PATH[,create[,size=SIZE][,chunk=4K..16M]][,direct=on|off|auto]",
        about: "an overlay takes what is written",
        example: "cow,file=overlay.img,create",
    },
    LayerRow {
        name: "mq-deadline",
        usage: "mq-deadline[,PARAMETER=VALUE...]",
        about: "the kernel's scheduler of that name",
        example: "mq-deadline,read_expire=100",
    },
    LayerRow {
        name: "kyber",
        usage: "kyber[,PARAMETER=VALUE...]",
        about: "the kernel's scheduler of that name",
        example: "kyber,read_lat_nsec=500000",
    },
];

/// Every layer there is, in the order of the help.
pub fn layer_rows() -> Vec<LayerRow> {
    let drivers = layers::drivers::rows().into_iter().map(|row| LayerRow {
        name: row.name,
        usage: row.usage,
        about: row.about,
        example: row.example,
    });
    let (below, schedulers) = OWN.split_at(3);
    below.iter().copied().chain(drivers).chain(schedulers.iter().copied()).collect()
}

/// There is no layer of that name.
fn unknown(kind: &str) -> SpecError {
    let rows = layer_rows();
    let near = options::nearest(kind, rows.iter().map(|row| row.name));
    if let Some(row) = rows.iter().find(|row| near == Some(row.name)) {
        let why = format!("there is no layer \"{kind}\": did you mean {}?", row.name);
        return SpecError::new(why, format!("for example {}", row.example));
    }
    let names: Vec<&str> = rows.iter().map(|row| row.name).collect();
    let fix = format!("there are {}; for example {}", names.join(", "), rows[0].example);
    SpecError::new(format!("there is no layer \"{kind}\""), fix)
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
            _ => match Words::read(&kind, items.collect()) {
                Some(words) => words.map(LayerSpec::Driver),
                None => Err(unknown(&kind)),
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
    let mut options = Options::new("cow", &["file", "direct", "chunk", "size", "create"], items)?;
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
        return Err(SpecError::new("chunk and size go with create", "an overlay that is there has its own"));
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
    /// A relative path is taken from `base` on.
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

/// How a partition is named.
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

/// Checks that a text is queue limits, at least one: `key=value,…`.
///
/// # Errors
/// A name or a value that is none.
pub fn check_limits(text: &str) -> Result<(), SpecError> {
    let fix = "write key=value with the kernel's names, for example max_sectors=255";
    match text.parse::<LimitOverrides>() {
        Ok(limits) if limits.is_empty() => Err(SpecError::new("there is no limit", fix)),
        Ok(_) => Ok(()),
        Err(why) => Err(SpecError::new(why.to_string(), fix)),
    }
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
