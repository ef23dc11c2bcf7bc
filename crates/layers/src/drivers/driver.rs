//! Layers that users name: `--layer NAME,KEY=VALUE`. Each is one row of the [list](super).
//!
//! A driver holds the parsed options of a layer. It formats itself as the shortest text that parses to the
//! same options, and creates the layer. The command line, help and the simulation use the [rows](Row) and
//! name no layer.

use crate::Layer;
use block::{Bytes, Profile};
use options::{OptionRow, Options, SpecError};
use queue::Ring;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The options of a layer.
pub trait Driver: fmt::Display + Sized {
    /// The name before the first comma.
    const NAME: &'static str;
    /// Every option, in the order in which help and messages list them.
    const OPTIONS: &'static [OptionRow];
    /// All options, as `--help` shows them: `delay[,read=TIME][,write=TIME]`.
    const USAGE: &'static str;
    /// A description of at most 60 characters.
    const ABOUT: &'static str;
    /// A valid example, for help and messages.
    const EXAMPLE: &'static str;

    /// Whether the layer fails requests that the device below would complete.
    const FAILS: bool = false;

    /// Parses the options.
    ///
    /// # Errors
    /// An option is invalid, or two contradict each other; the message suggests a correction.
    fn read(options: Options) -> Result<Self, SpecError>;

    /// Returns random options for the simulation. `below(n)` returns a random number less than `n`.
    fn random(below: &mut dyn FnMut(u64) -> u64) -> Self;

    /// Returns the files that the layer uses besides the device below it, each a raw device of its own.
    fn files(&self) -> Vec<DriverFile> {
        Vec::new()
    }

    /// Returns these options with relative paths resolved against `base`.
    #[must_use]
    fn rooted(self, base: &Path) -> Self {
        let _ = base;
        self
    }

    /// Creates the layer. `below` has the profiles of the device below it, then of its files.
    ///
    /// # Errors
    /// The layer does not work over these profiles; the message says why.
    fn layer<R: Ring>(&self, below: &[Profile]) -> Result<Arc<dyn Layer<R>>, String>;
}

/// A file of a layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DriverFile {
    /// The path as given, or resolved by [`Driver::rooted`].
    pub path: PathBuf,
    /// The size with which a missing file is created; `None`: the file must exist.
    pub create: Option<Bytes>,
}

/// A driver's row in the list: its constants and functions, without the type.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// [`Driver::NAME`].
    pub name: &'static str,
    /// [`Driver::OPTIONS`].
    pub options: &'static [OptionRow],
    /// [`Driver::USAGE`].
    pub usage: &'static str,
    /// [`Driver::ABOUT`].
    pub about: &'static str,
    /// [`Driver::EXAMPLE`].
    pub example: &'static str,
    /// [`Driver::FAILS`].
    pub fails: bool,
    read: fn(Vec<String>) -> Result<String, SpecError>,
    files: fn(&str) -> Result<Vec<DriverFile>, SpecError>,
    rooted: fn(&str, &Path) -> Result<String, SpecError>,
    random: fn(&mut dyn FnMut(u64) -> u64) -> String,
}

/// Parses the full text of a layer, with its name.
pub(super) fn read<D: Driver>(text: &str) -> Result<D, SpecError> {
    from_items(options::split(text).into_iter().skip(1).collect())
}

fn from_items<D: Driver>(items: Vec<String>) -> Result<D, SpecError> {
    D::read(Options::new(D::NAME, D::OPTIONS, items.into_iter())?)
}

impl Row {
    pub(super) fn of<D: Driver>() -> Row {
        Row {
            name: D::NAME,
            options: D::OPTIONS,
            usage: D::USAGE,
            about: D::ABOUT,
            example: D::EXAMPLE,
            fails: D::FAILS,
            read: |items| from_items::<D>(items).map(|options| options.to_string()),
            files: |text| read::<D>(text).map(|options| options.files()),
            rooted: |text, base| read::<D>(text).map(|options| options.rooted(base).to_string()),
            random: |below| D::random(below).to_string(),
        }
    }

    /// Returns whether the layer uses files besides the device below it.
    pub fn has_files(&self) -> bool {
        !(self.files)(self.example).expect("the example works").is_empty()
    }
}

/// The validated options of a layer, with its driver's name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerOptions {
    name: &'static str,
    /// The shortest text that parses to these options, the name included.
    text: String,
}

impl LayerOptions {
    /// Parses the options of the driver `name`. Returns `None` if the driver does not exist.
    ///
    /// # Errors
    /// An option is invalid, or two contradict each other; the message suggests a correction.
    pub fn read(name: &str, items: Vec<String>) -> Option<Result<LayerOptions, SpecError>> {
        let row = super::rows().into_iter().find(|row| row.name == name)?;
        Some((row.read)(items).map(|text| LayerOptions { name: row.name, text }))
    }

    /// Returns random options for a driver.
    pub fn random(row: &Row, below: &mut dyn FnMut(u64) -> u64) -> LayerOptions {
        LayerOptions { name: row.name, text: (row.random)(below) }
    }

    /// Returns the driver's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    fn row(&self) -> Row {
        let mut rows = super::rows().into_iter();
        rows.find(|row| row.name == self.name).expect("only a row creates options")
    }

    /// Returns the files that the layer uses besides the device below it.
    pub fn files(&self) -> Vec<DriverFile> {
        (self.row().files)(&self.text).expect("they were parsed before")
    }

    /// Returns these options with relative paths resolved against `base`.
    #[must_use]
    pub fn rooted(self, base: &Path) -> LayerOptions {
        let text = (self.row().rooted)(&self.text, base).expect("they were parsed before");
        LayerOptions { text, ..self }
    }

    /// Returns these options with one changed. `value` is empty for an option without a value.
    ///
    /// # Errors
    /// The driver has no such option, or the options contradict each other.
    pub fn with(&self, key: &str, value: &str) -> Result<LayerOptions, SpecError> {
        let is_other = |item: &String| item.split('=').next() != Some(key);
        let mut items: Vec<String> =
            options::split(&self.text).into_iter().skip(1).filter(is_other).collect();
        items.push(if value.is_empty() { key.to_owned() } else { format!("{key}={value}") });
        (self.row().read)(items).map(|text| LayerOptions { text, ..*self })
    }

    /// Creates the layer. `below` has the profiles of the device below it, then of its files.
    ///
    /// # Errors
    /// The layer does not work over these profiles; the message says why.
    pub fn layer<R: Ring>(&self, below: &[Profile]) -> Result<Arc<dyn Layer<R>>, String> {
        super::layer(self.name, &self.text, below)
    }
}

impl fmt::Display for LayerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
