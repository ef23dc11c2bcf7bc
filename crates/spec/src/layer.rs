//! `--layer 'kind,key=value,…'`.

use super::stack::DIRECT;
use super::targets::{DelaySpec, FlakeySpec, LogSpec};
use super::{Direct, SpecError};
use block::{Bytes, LimitOverrides};
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
    /// Requests are held for a while.
    Delay(DelaySpec),
    /// It works for some seconds, then fails for some.
    Flakey(FlakeySpec),
    /// What is written is logged.
    Log(LogSpec),
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

const KINDS: &str = "there are split, for example 'split,max_sectors=255', part, for example 'part,2', cow, for \
                     example 'cow,file=overlay.img,create', delay, for example 'delay,read=5ms', flakey, for \
                     example 'flakey,up=10,down=2', log, for example 'log,file=writes.log,size=1G,create', \
                     mq-deadline and kyber";

impl FromStr for LayerSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<LayerSpec, SpecError> {
        let mut items = options::split(text).into_iter();
        let kind = items.next().unwrap_or_default();
        match kind.as_str() {
            "split" => parse_split(items),
            "part" => parse_part(items),
            "cow" => parse_cow(items),
            "delay" => DelaySpec::parse(items).map(LayerSpec::Delay),
            "flakey" => FlakeySpec::parse(items).map(LayerSpec::Flakey),
            "log" => LogSpec::parse(items).map(LayerSpec::Log),
            "mq-deadline" | "kyber" => {
                text.parse().map(LayerSpec::Scheduler).map_err(|error| super::scheduler::refusal(&error))
            }
            _ => Err(SpecError::new(format!("there is no layer \"{kind}\" in this build"), KINDS)),
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
    pub fn rooted(mut self, base: &Path) -> LayerSpec {
        match &mut self {
            LayerSpec::Cow(cow) => cow.file = base.join(&cow.file),
            LayerSpec::Log(log) => log.file = base.join(&log.file),
            _ => {}
        }
        self
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
            LayerSpec::Delay(delay) => write!(f, "{delay}"),
            LayerSpec::Flakey(flakey) => write!(f, "{flakey}"),
            LayerSpec::Log(log) => write!(f, "{log}"),
            LayerSpec::Scheduler(choice) => write!(f, "{choice}"),
            LayerSpec::Part(selector) => write!(f, "part,{}", Escaped(&selector.to_string())),
        }
    }
}
