//! Layers that users name: `--layer NAME,KEY=VALUE`. Each is one row of the [list](super).
//!
//! A driver is the words of a layer, read and checked: it writes itself back as the shortest text that reads as itself, and
//! makes the layer. Whoever parses a command line, shows help, completes words or draws a random stack goes through the
//! [rows](Row), and knows no layer by name.

use crate::Layer;
use block::{Bytes, Profile};
use options::{Options, SpecError};
use queue::Ring;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The words of a layer.
pub trait Driver: fmt::Display + Sized {
    /// What stands before the first comma.
    const NAME: &'static str;
    /// Every key, in the order in which messages list them.
    const KEYS: &'static [&'static str];
    /// The words that there may be, as `--help` shows them: `delay[,read=TIME][,write=TIME]`.
    const USAGE: &'static str;
    /// What it does, in half a line.
    const ABOUT: &'static str;
    /// Words that work, for help and messages.
    const EXAMPLE: &'static str;

    /// It stands on files of its own.
    const HAS_FILES: bool = false;
    /// It fails requests that what is below would carry out.
    const FAILS: bool = false;

    /// Read the options.
    ///
    /// # Errors
    /// What is wrong with them, and what to write instead.
    fn read(options: Options) -> Result<Self, SpecError>;

    /// Words for the simulation. `below(n)` is a random number less than `n`.
    fn random(below: &mut dyn FnMut(u64) -> u64) -> Self;

    /// Files that it stands on besides what is below it, each a raw device of its own.
    fn files(&self) -> Vec<DriverFile> {
        Vec::new()
    }

    /// The same with relative paths taken from `base` on.
    #[must_use]
    fn rooted(self, base: &Path) -> Self {
        let _ = base;
        self
    }

    /// The layer. `below`: what stands below it, then its files.
    ///
    /// # Errors
    /// What of these it does not take.
    fn layer<R: Ring>(&self, below: &[Profile]) -> Result<Arc<dyn Layer<R>>, String>;
}

/// A file of a layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DriverFile {
    /// Where it is.
    pub path: PathBuf,
    /// Make it, of this size, if it is not there.
    pub create: Option<Bytes>,
}

/// A driver, as the list has it.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// [`Driver::NAME`].
    pub name: &'static str,
    /// [`Driver::KEYS`].
    pub keys: &'static [&'static str],
    /// [`Driver::USAGE`].
    pub usage: &'static str,
    /// [`Driver::ABOUT`].
    pub about: &'static str,
    /// [`Driver::EXAMPLE`].
    pub example: &'static str,
    /// [`Driver::HAS_FILES`].
    pub has_files: bool,
    /// [`Driver::FAILS`].
    pub fails: bool,
    read: fn(Vec<String>) -> Result<String, SpecError>,
    files: fn(&str) -> Result<Vec<DriverFile>, SpecError>,
    rooted: fn(&str, &Path) -> Result<String, SpecError>,
    random: fn(&mut dyn FnMut(u64) -> u64) -> String,
}

/// The words of a driver from a whole text, its name included.
pub(super) fn read<D: Driver>(text: &str) -> Result<D, SpecError> {
    from_items(options::split(text).into_iter().skip(1).collect())
}

fn from_items<D: Driver>(items: Vec<String>) -> Result<D, SpecError> {
    D::read(Options::new(D::NAME, D::KEYS, items.into_iter())?)
}

impl Row {
    pub(super) fn of<D: Driver>() -> Row {
        Row {
            name: D::NAME,
            keys: D::KEYS,
            usage: D::USAGE,
            about: D::ABOUT,
            example: D::EXAMPLE,
            has_files: D::HAS_FILES,
            fails: D::FAILS,
            read: |items| from_items::<D>(items).map(|words| words.to_string()),
            files: |text| read::<D>(text).map(|words| words.files()),
            rooted: |text, base| read::<D>(text).map(|words| words.rooted(base).to_string()),
            random: |below| D::random(below).to_string(),
        }
    }
}

/// A layer that was named, and whose options fit each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Words {
    name: &'static str,
    /// The shortest text for it.
    text: String,
}

impl Words {
    /// Read the items after the name. `None`: there is no such driver.
    ///
    /// # Errors
    /// What is wrong with them, and what to write instead.
    pub fn read(name: &str, items: Vec<String>) -> Option<Result<Words, SpecError>> {
        let row = super::rows().into_iter().find(|row| row.name == name)?;
        Some((row.read)(items).map(|text| Words { name: row.name, text }))
    }

    /// Random ones of a driver.
    pub fn random(row: &Row, below: &mut dyn FnMut(u64) -> u64) -> Words {
        Words { name: row.name, text: (row.random)(below) }
    }

    /// Its driver's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    fn row(&self) -> Row {
        let mut rows = super::rows().into_iter();
        rows.find(|row| row.name == self.name).expect("only a row makes words")
    }

    /// Files that it stands on besides what is below it.
    pub fn files(&self) -> Vec<DriverFile> {
        (self.row().files)(&self.text).expect("they were read before")
    }

    /// A relative path is taken from `base` on.
    #[must_use]
    pub fn rooted(self, base: &Path) -> Words {
        let text = (self.row().rooted)(&self.text, base).expect("they were read before");
        Words { text, ..self }
    }

    /// The same with another value for an option; without one, `value` is empty.
    ///
    /// # Errors
    /// It has no such option, or the options do not fit each other then.
    pub fn with(&self, key: &str, value: &str) -> Result<Words, SpecError> {
        let is_other = |item: &String| item.split('=').next() != Some(key);
        let mut items: Vec<String> =
            options::split(&self.text).into_iter().skip(1).filter(is_other).collect();
        items.push(if value.is_empty() { key.to_owned() } else { format!("{key}={value}") });
        (self.row().read)(items).map(|text| Words { text, ..*self })
    }

    /// The layer. `below`: what stands below it, then its files.
    ///
    /// # Errors
    /// What of these it does not take.
    pub fn layer<R: Ring>(&self, below: &[Profile]) -> Result<Arc<dyn Layer<R>>, String> {
        super::layer(self.name, &self.text, below)
    }
}

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
