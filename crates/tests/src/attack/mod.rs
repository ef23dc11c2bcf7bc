//! Attacks on the optimised binary: `./x soak attack [PART] [OPTIONS]`, and a short form among the tests.
//!
//! Each part draws everything from seeds that it prints, counts its work, and ends with one line of figures.
//! Each has a canary: a seeded fault that it must find.

pub mod clock;
pub mod cuts;
pub mod daemon;
pub mod fault;
pub mod faults;
pub mod hostile;
pub mod kills;
pub mod load;
pub mod mutate;
pub mod options;
pub mod recorder;
pub mod rounds;
pub mod stores;
pub mod story;
pub mod wire;

use std::fmt;

/// Figures and findings of a part.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    /// Figures, in the order in which they are printed.
    pub figures: Vec<(&'static str, u64)>,
    /// Findings, each with the command that replays it.
    pub findings: Vec<String>,
    /// Number of findings that were counted but not kept.
    pub more: u64,
}

/// Most findings that are kept with their text.
const KEPT: usize = 40;

impl Tally {
    /// Adds to a figure.
    pub fn count(&mut self, name: &'static str, by: u64) {
        match self.figures.iter_mut().find(|(figure, _)| *figure == name) {
            Some((_, figure)) => *figure += by,
            None => self.figures.push((name, by)),
        }
    }

    /// Returns a figure.
    pub fn figure(&self, name: &str) -> u64 {
        self.figures.iter().find(|(figure, _)| *figure == name).map_or(0, |(_, figure)| *figure)
    }

    /// Reports a finding: counts it by its kind and prints it at once.
    pub fn find(&mut self, kind: &'static str, what: String) {
        self.count(kind, 1);
        if self.findings.len() < KEPT {
            println!("FOUND {kind}: {what}");
            self.findings.push(what);
        } else {
            self.more += 1;
        }
    }

    /// Adds the figures and findings of another tally, which were printed before.
    pub fn add(&mut self, other: Tally) {
        for (name, figure) in other.figures {
            self.count(name, figure);
        }
        self.more += other.more;
        self.findings.extend(other.findings);
    }

    /// Returns whether there are no findings.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty() && self.more == 0
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, figure)) in self.figures.iter().enumerate() {
            write!(f, "{}{name} {figure}", if index > 0 { " " } else { "" })?;
        }
        Ok(())
    }
}

/// Runs work that may panic because a server broke the protocol or closed the connection: that is a finding,
/// not the end of the run.
///
/// # Errors
/// The error that `work` returned, or the message of its panic.
pub fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(text.unwrap_or_default())
    })
}

/// A part of the attack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// kill -9 amid writes.
    Kills,
    /// Power cuts.
    Cuts,
    /// Calls that fail.
    Faults,
    /// Misbehaving clients.
    Clients,
    /// Misbehaving servers.
    Servers,
    /// Changed sessions.
    Sessions,
    /// Changed files.
    Images,
}

impl Part {
    /// All parts, in the order in which they run.
    pub const ALL: [Part; 7] =
        [Part::Kills, Part::Cuts, Part::Faults, Part::Clients, Part::Servers, Part::Sessions, Part::Images];

    /// Returns the part's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Part::Kills => "kills",
            Part::Cuts => "cuts",
            Part::Faults => "faults",
            Part::Clients => "clients",
            Part::Servers => "servers",
            Part::Sessions => "sessions",
            Part::Images => "images",
        }
    }

    /// Returns the part with a name.
    pub fn named(name: &str) -> Option<Part> {
        Part::ALL.into_iter().find(|part| part.name() == name)
    }

    /// Returns all names, for a message.
    pub fn names() -> String {
        Part::ALL.map(Part::name).join(", ")
    }

    /// Returns the number of units of work of a full run.
    pub fn count(self) -> u64 {
        match self {
            Part::Kills => 2000,
            Part::Cuts => 10_000,
            Part::Faults => 3000,
            Part::Clients | Part::Servers => 1000,
            Part::Sessions => 100_000,
            Part::Images => 12_500,
        }
    }

    /// Returns the number of units of work of a run with the canary.
    pub fn canary_count(self) -> u64 {
        match self {
            Part::Kills => 100,
            Part::Cuts => 200,
            Part::Faults => 120,
            Part::Clients | Part::Servers => 2,
            Part::Sessions => 100,
            Part::Images => 40,
        }
    }

    /// Runs the part.
    pub fn run(self, options: &options::Options) -> Tally {
        match self {
            Part::Kills => kills::run(options),
            Part::Cuts => cuts::run(options),
            Part::Faults => faults::run(options),
            Part::Clients => hostile::clients::run(options),
            Part::Servers => hostile::servers::run(options),
            Part::Sessions => mutate::sessions::run(options),
            Part::Images => mutate::images::run(options),
        }
    }
}
