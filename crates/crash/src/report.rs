//! Findings: explanations of lost writes, summaries as text and JSON, and a timeline as HTML.

mod html;

pub use html::timeline;

use crate::log::{Kind, Log};
use crate::model::{Piece, State, WHOLE};
use crate::view::View;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// A lost write, or a lost part of one, explained.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lost {
    /// The number of the write in the log.
    pub write: u32,
    /// The atomic unit of it that is lost; `None`: all of it.
    pub unit: Option<u32>,
    /// `write`, `discard` or `write of zeroes`.
    pub kind: String,
    /// The first lost byte of the device.
    pub offset: u64,
    /// The number of lost bytes.
    pub len: u64,
    /// When it was submitted, in nanoseconds since the start.
    pub time_ns: u64,
    /// The process that submitted it, if it is known.
    pub process: Option<String>,
    /// The file that the block belongs to, if that could be found out.
    pub file: Option<String>,
    /// Why the model permits its loss.
    pub why: String,
}

/// A state that failed its check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Finding {
    /// Its name: the run and a number.
    pub id: String,
    /// The number of events of the log before the cut.
    pub cut: u32,
    /// When the cut happened, in nanoseconds since the start.
    pub time_ns: u64,
    /// The marks before the cut.
    pub marks: usize,
    /// The last mark before the cut.
    pub last_mark: Option<String>,
    /// The lost writes; empty: everything up to the cut is present.
    pub lost: Vec<Lost>,
    /// How the check ended.
    pub outcome: String,
    /// The end of the check's output.
    pub output: String,
    /// Failing states that have this cause, with this one.
    pub states: u64,
}

impl Finding {
    /// Returns its state.
    pub fn state(&self) -> State {
        let piece = |lost: &Lost| Piece { write: lost.write, unit: lost.unit.unwrap_or(WHOLE) };
        State::new(self.cut, self.lost.iter().map(piece).collect())
    }

    /// Returns its explanation in sentences.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{}: the check {} after a power cut at {} (event {}).\n",
            self.id,
            self.outcome,
            seconds(self.time_ns),
            self.cut
        );
        match &self.last_mark {
            Some(mark) => {
                let _ = writeln!(text, "  {} marks had been made; the last: {mark}", self.marks);
            }
            None => text.push_str("  No mark had been made.\n"),
        }
        if self.lost.is_empty() {
            text.push_str("  Nothing is lost: every write that was submitted is present.\n");
        }
        for lost in &self.lost {
            let _ = writeln!(text, "  lost: {}", lost.text());
        }
        if self.states > 1 {
            let _ = writeln!(text, "  {} failing states have this cause.", self.states);
        }
        let lines = self.output.lines().filter(|line| !line.trim().is_empty());
        for line in lines.rev().take(6).collect::<Vec<_>>().into_iter().rev() {
            let _ = writeln!(text, "  | {line}");
        }
        text
    }
}

impl Lost {
    fn text(&self) -> String {
        let part = self.unit.map_or(String::new(), |unit| format!(", unit {unit}"));
        let by = self.process.as_ref().map_or(String::new(), |name| format!(" by {name}"));
        let of = self.file.as_ref().map_or(String::new(), |name| format!(", in {name}"));
        format!(
            "{} {}{part}: {} bytes at {:#x}{of}, submitted at {}{by}; {}",
            self.kind,
            self.write,
            self.len,
            self.offset,
            seconds(self.time_ns),
            self.why
        )
    }
}

/// The result of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// The name of the run.
    pub run: String,
    /// The variant of the model.
    pub model: String,
    /// The atomic write in bytes.
    pub atomic: u64,
    /// The size of the volatile cache in bytes; `None`: unbounded.
    pub cache: Option<u64>,
    /// The seed of random subsets.
    pub seed: u64,
    /// Writes of the log.
    pub writes: usize,
    /// Flushes of the log.
    pub flushes: usize,
    /// Marks of the log.
    pub marks: usize,
    /// States generated.
    pub generated: u64,
    /// States whose check ran, without those of minimising.
    pub checked: u64,
    /// States whose content had been checked already.
    pub equal: u64,
    /// States that differ from a checked one only in blocks that its check did not read.
    pub unread: u64,
    /// States that failed.
    pub failed: u64,
    /// States that failed, and passed when they were checked again.
    pub unstable: u64,
    /// Checks that did not end before their deadline, and ended when they had more time.
    pub slow: u64,
    /// Checks that ran to minimise failing states.
    pub minimising: u64,
    /// Seconds of exploring.
    pub seconds: f64,
    /// Why exploring ended.
    pub ended: String,
    /// The finding.
    pub findings: Vec<Finding>,
}

impl Summary {
    /// Returns states decided a minute.
    pub fn per_minute(&self) -> f64 {
        if self.seconds > 0.0 { self.generated as f64 * 60.0 / self.seconds } else { 0.0 }
    }

    /// Returns checks run a minute.
    pub fn checks_per_minute(&self) -> f64 {
        let checks = self.checked + self.minimising;
        if self.seconds > 0.0 { checks as f64 * 60.0 / self.seconds } else { 0.0 }
    }

    /// Returns the summary as a table.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let mut row = |name: &str, value: String| {
            let _ = writeln!(text, "{name:<12} {value}");
        };
        row("run", self.run.clone());
        let cache = self.cache.map_or(String::new(), |bytes| format!(", cache of {bytes} bytes"));
        row("model", format!("{}, atomic writes of {} bytes{cache}", self.model, self.atomic));
        row("log", format!("{} writes, {} flushes, {} marks", self.writes, self.flushes, self.marks));
        row("states", self.generated.to_string());
        row("  checked", format!("{} ({:.0} checks a minute)", self.checked, self.checks_per_minute()));
        row("  equal", format!("{} (content already checked)", self.equal));
        row("  unread", format!("{} (differ only in blocks that the check never reads)", self.unread));
        row("failed", self.failed.to_string());
        if self.unstable > 0 {
            row("  unstable", format!("{} (passed when checked again)", self.unstable));
        }
        if self.slow > 0 {
            row(
                "  slow",
                format!("{} (ended only with more time than the deadline: a busy machine?)", self.slow),
            );
        }
        row("findings", self.findings.len().to_string());
        row("ended", format!("{}, after {:.1} s (seed {})", self.ended, self.seconds, self.seed));
        text
    }
}

/// Formats a time since the start.
fn seconds(ns: u64) -> String {
    format!("{:.6} s", ns as f64 / 1e9)
}

/// Explains what is lost in a state.
pub fn explain(view: &View, state: &State) -> Vec<Lost> {
    let log = view.log();
    state.lost.iter().map(|piece| lost(view, log, state.cut, *piece)).collect()
}

fn lost(view: &View, log: &Log, cut: u32, piece: Piece) -> Lost {
    let write = &log.writes[piece.write as usize];
    let (offset, end) = view.range(piece);
    let why = match write.completed.filter(|at| *at < cut) {
        None => "it was in flight".to_owned(),
        Some(done) => {
            let mut later =
                log.flushes.iter().filter(|flush| flush.submitted > done && flush.submitted < cut);
            match later.next() {
                Some(_) => "it completed, but the flush after it had not completed".to_owned(),
                None => "it completed, but no flush was submitted between that and the cut".to_owned(),
            }
        }
    };
    let process = log.processes.get(&write.pid).map(|name| format!("{name} (process {})", write.pid));
    Lost {
        write: piece.write,
        unit: (piece.unit != WHOLE).then_some(piece.unit),
        kind: match write.kind {
            Kind::Data => "write",
            Kind::Discard => "discard",
            Kind::Zeroes => "write of zeroes",
        }
        .to_owned(),
        offset,
        len: end - offset,
        time_ns: write.time_ns,
        process,
        file: None,
        why,
    }
}
