//! Options of a run of a part: `--seed=N --count=N --seconds=N --workers=N --store=NAME,… --canary`.

use super::stores::Store;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The first seed; each unit of work has the next one.
    pub seed: u64,
    /// Units of work: kills, crash states, sessions.
    pub count: u64,
    /// Time at which the run ends, even if its work is not done.
    pub until: Option<Instant>,
    /// Number of units of work at a time.
    pub workers: usize,
    /// Only these stores; empty: all.
    pub only: Vec<Store>,
    /// Whether the canary is active, a seeded fault that must be found.
    pub canary: bool,
    /// Number of crash states of one recording.
    pub each: u64,
}

/// The command line, for messages.
pub const USAGE: &str = "usage: ./x soak attack [PART...] [--seed=N] [--count=N] [--seconds=N] [--workers=N] \
[--store=NAME,…] [--canary]";

impl Options {
    /// Creates options for a number of units, with a fresh seed that is short enough to be typed.
    pub fn new(count: u64) -> Options {
        let seed = RandomState::new().hash_one(0) % 1_000_000_000;
        Options { seed, count, until: None, workers: 2, only: Vec::new(), canary: false, each: 96 }
    }

    /// Returns the options with another number of units.
    #[must_use]
    pub fn with_count(&self, count: u64) -> Options {
        Options { count, ..self.clone() }
    }

    /// Returns the options with this number of crash states of one recording.
    #[must_use]
    pub fn each(&self, each: u64) -> Options {
        Options { each, ..self.clone() }
    }

    /// Parses one option of a command line.
    ///
    /// # Errors
    /// The option is unknown, or its value is invalid.
    pub fn take(&mut self, word: &str) -> Result<(), String> {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let number = || value.parse::<u64>().map_err(|_| format!("{word}: a number is needed; {USAGE}"));
        match name {
            "--seed" => self.seed = number()?,
            "--count" => self.count = number()?,
            "--seconds" => self.until = Some(Instant::now() + Duration::from_secs(number()?)),
            "--workers" => self.workers = number()?.clamp(1, 64) as usize,
            "--store" => {
                let names = || Store::ALL.map(Store::name).join(", ");
                for name in value.split(',') {
                    let store = Store::named(name);
                    let store =
                        store.ok_or_else(|| format!("unknown store \"{name}\"; there are: {}", names()))?;
                    self.only.push(store);
                }
            }
            "--canary" => self.canary = true,
            _ => return Err(format!("unknown option \"{word}\"; {USAGE}")),
        }
        Ok(())
    }

    /// Returns whether the time is up.
    pub fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Returns the selected stores whose tools are installed.
    pub fn stores(&self) -> Vec<Store> {
        let wanted = |store: &Store| {
            (self.only.is_empty() || self.only.contains(store))
                && store.tool().is_none_or(|tool| crate::tools::find(tool).is_some())
        };
        Store::ALL.into_iter().filter(wanted).collect()
    }

    /// Creates a folder for the files of this run, in memory if possible.
    pub fn scratch(&self) -> std::io::Result<tempfile::TempDir> {
        // Paths of sockets have at most 107 bytes.
        let shm = std::path::Path::new("/dev/shm");
        let dir = if shm.is_dir() { shm.to_owned() } else { "/tmp".into() };
        tempfile::Builder::new().prefix("by-").tempdir_in(dir)
    }
}
