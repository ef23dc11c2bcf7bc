//! The report of a run: a table for the terminal, CSV and JSON for programs, markdown for docs/benchmarks.

use std::fmt::Write;
use std::path::Path;

use serde_json::json;

use super::facts::Facts;
use super::options::Options;
use super::servers::{self, Kind};
use super::{Error, Result, Series, median};
use crate::figures::ratio;

/// A round is called disturbed if other programs used more than this share of the processors.
const FOREIGN_MAX: f64 = 0.05;

/// A finished run.
pub(super) struct Report<'a> {
    /// The options of the run.
    pub(super) options: &'a Options,
    /// The jobs' measurements.
    pub(super) series: &'a [Series],
    /// The servers' further costs.
    pub(super) facts: &'a [Facts],
    /// Whether the run was in the real-time class.
    pub(super) realtime: bool,
}

/// Median, least and greatest.
struct Spread {
    median: f64,
    least: f64,
    greatest: f64,
}

impl Spread {
    fn of(values: &[f64]) -> Self {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Self { median: median(values), least, greatest }
    }

    fn show(&self, digits: usize) -> String {
        format!("{:.digits$} ({:.digits$}..{:.digits$})", self.median, self.least, self.greatest)
    }
}

impl Series {
    fn rates(&self) -> Vec<f64> {
        self.samples.iter().map(super::Sample::rate).collect()
    }

    fn costs(&self) -> Vec<f64> {
        self.samples.iter().map(super::Sample::cost).collect()
    }

    /// Returns the median of the rounds; `None` if the client does not measure it.
    fn read_p99_us(&self) -> Option<f64> {
        let times: Option<Vec<f64>> = self.samples.iter().map(|sample| sample.read_p99_us).collect();
        times.as_deref().map(median)
    }
}

const HEAD: [&str; 10] = [
    "storage",
    "job",
    "server",
    "op/s (least..greatest)",
    "MB/s",
    "read p99 us",
    "server CPU us/op",
    "op/s : nbdkit",
    "CPU : nbdkit",
    "op/s : baseline",
];
const FACTS_HEAD: [&str; 10] = [
    "storage",
    "server",
    "ready ms",
    "RSS/PSS KiB ready",
    "RSS/PSS KiB loaded",
    "idle us in 2 s (wakes)",
    "lone 4k read: CPU us",
    "its latency us",
    "1000 unread 128k: KiB",
    "calls/op lean, fio",
];

impl Report<'_> {
    fn beside(&self, series: &Series, kind: Kind) -> Option<&Series> {
        self.series.iter().find(|other| {
            other.kind == kind && other.storage == series.storage && other.job.name == series.job.name
        })
    }

    /// Returns the headings: images are compared with another server than files.
    fn head(&self) -> [&'static str; 10] {
        let mut head = HEAD;
        if !self.series.is_empty() && self.series.iter().all(|series| series.storage.is_image()) {
            (head[7], head[8]) = ("op/s : qemu-nbd", "CPU : qemu-nbd");
        } else if self.series.iter().any(|series| series.storage.is_image()) {
            (head[7], head[8]) = ("op/s : nbdkit, images : qemu-nbd", "CPU : that server");
        }
        head
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = Vec::new();
        for series in self.series {
            let (rates, costs) = (series.rates(), series.costs());
            let against = |kind, of: fn(&Series) -> Vec<f64>| {
                let other = self.beside(series, kind).map(|other| ratio(&of(series), &of(other)));
                other.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"))
            };
            rows.push(vec![
                series.storage.name().into(),
                series.job.name.into(),
                series.kind.name().into(),
                Spread::of(&rates).show(0),
                format!("{:.0}", median(&rates) * f64::from(series.job.block) / 1e6),
                series.read_p99_us().map_or_else(|| "-".into(), |time| format!("{time:.0}")),
                Spread::of(&costs).show(2),
                against(series.storage.peer(), Series::rates),
                against(series.storage.peer(), Series::costs),
                against(Kind::Baseline, Series::rates),
            ]);
        }
        rows
    }

    fn facts_rows(&self) -> Vec<Vec<String>> {
        let calls = |calls: Option<f64>| calls.map_or_else(|| "-".into(), |calls| format!("{calls:.2}"));
        let row = |facts: &Facts| {
            vec![
                facts.storage.name().into(),
                facts.kind.name().into(),
                format!("{:.1}", facts.ready_ms),
                format!("{}/{}", facts.at_ready.rss_kib, facts.at_ready.pss_kib),
                format!("{}/{}", facts.after_load.rss_kib, facts.after_load.pss_kib),
                format!("{:.0} ({})", facts.idle_us, facts.idle_waits),
                format!("{:.1}", facts.lone_us),
                format!("{:.0}", facts.lone_latency_us),
                facts.unread_kib.to_string(),
                format!("{}, {}", calls(facts.syscalls_lean), calls(facts.syscalls_fio)),
            ]
        };
        self.facts.iter().map(row).collect()
    }

    /// Returns reasons to doubt the figures.
    fn warnings(&self) -> Vec<String> {
        let samples = || self.series.iter().flat_map(|series| &series.samples);
        let disturbed = samples().filter(|sample| sample.foreign > FOREIGN_MAX).count();
        let mut warnings = Vec::new();
        if disturbed > 0 {
            let worst = samples().map(|sample| sample.foreign).fold(0.0, f64::max);
            warnings.push(format!(
                "warning: in {disturbed} of {} rounds others used more than {:.0} % of the processors (at most {:.0} %): \
                 run it again on a quiet machine",
                samples().count(),
                FOREIGN_MAX * 100.0,
                worst * 100.0
            ));
        }
        if self.options.rounds < 5 && !self.series.is_empty() {
            warnings.push("warning: fewer than 5 rounds: not for publication".into());
        }
        warnings
    }

    fn setting(&self) -> String {
        let Options { rounds, seconds, connections, depth, size, seed, .. } = self.options;
        let class = if self.realtime { "real-time round robin" } else { "normal" };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut versions: Vec<String> =
            self.options.servers.iter().map(|kind| servers::version(*kind)).collect();
        versions.dedup();
        format!(
            "{rounds} rounds of {seconds} s, {connections} connections, depth {depth}, {} MiB, seed {seed}, \
             {processors} processors, scheduling class {class}, Linux {}; {}",
            size >> 20,
            kernel.trim(),
            versions.join("; ")
        )
    }

    /// Returns the table for the terminal.
    pub(super) fn table(&self) -> String {
        let mut text = format!("{}\n", self.setting());
        if !self.series.is_empty() {
            text += &aligned(&self.head(), &self.rows());
        }
        if !self.facts.is_empty() {
            text += "\n";
            text += &aligned(&FACTS_HEAD, &self.facts_rows());
        }
        for warning in self.warnings() {
            text += &format!("\n{warning}\n");
        }
        text
    }

    /// Writes nbd.csv, nbd.json and nbd.md into `folder`.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(Error::at(folder))?;
        for (name, text) in [("nbd.csv", self.csv()), ("nbd.json", self.json()), ("nbd.md", self.markdown())]
        {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(Error::at(&path))?;
        }
        Ok(())
    }

    /// Returns one line for each round.
    fn csv(&self) -> String {
        let mut text = String::from(
            "storage,job,server,round,count,seconds,rate,server_cpu_us_per_op,client_cpu_s,foreign\n",
        );
        for series in self.series {
            for (round, sample) in series.samples.iter().enumerate() {
                let _ = writeln!(
                    text,
                    "{},{},{},{},{},{:.6},{:.1},{:.4},{:.4},{:.4}",
                    series.storage.name(),
                    series.job.name,
                    series.kind.name(),
                    round + 1,
                    sample.count,
                    sample.seconds,
                    sample.rate(),
                    sample.cost(),
                    sample.client_cpu,
                    sample.foreign
                );
            }
        }
        text
    }

    fn json(&self) -> String {
        let series: Vec<_> = self
            .series
            .iter()
            .map(|series| {
                json!({
                    "storage": series.storage.name(), "job": series.job.name, "server": series.kind.name(),
                    "block": series.job.block, "rates": series.rates(), "server_cpu_us_per_op": series.costs(),
                    "rate": median(&series.rates()), "cost": median(&series.costs()),
                    "read_p99_us": series.read_p99_us(),
                    "foreign": series.samples.iter().map(|sample| sample.foreign).collect::<Vec<_>>(),
                })
            })
            .collect();
        let facts: Vec<_> = self
            .facts
            .iter()
            .map(|facts| {
                json!({
                    "storage": facts.storage.name(), "server": facts.kind.name(), "ready_ms": facts.ready_ms,
                    "rss_kib_ready": facts.at_ready.rss_kib, "pss_kib_ready": facts.at_ready.pss_kib,
                    "rss_kib_loaded": facts.after_load.rss_kib, "pss_kib_loaded": facts.after_load.pss_kib,
                    "idle_us": facts.idle_us, "idle_wakes": facts.idle_waits, "lone_cpu_us": facts.lone_us,
                    "lone_latency_us": facts.lone_latency_us, "unread_kib": facts.unread_kib,
                    "syscalls_per_op_lean": facts.syscalls_lean, "syscalls_per_op_fio": facts.syscalls_fio,
                })
            })
            .collect();
        let all = json!({
            "setting": self.setting(), "warnings": self.warnings(), "series": series, "facts": facts,
        });
        format!("{all:#}\n")
    }

    /// Returns the text for docs/benchmarks/nbd.md.
    fn markdown(&self) -> String {
        let mut text = format!("{}\n\n", self.setting());
        for warning in self.warnings() {
            text += &format!("{warning}\n\n");
        }
        text += &piped(&self.head(), &self.rows());
        if !self.facts.is_empty() {
            text += "\n";
            text += &piped(&FACTS_HEAD, &self.facts_rows());
        }
        text
    }
}

fn aligned(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].len());
        cells.chain([head[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("{}\n", padded.join("  ").trim_end())
    };
    let mut text = line(&mut head.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

fn piped(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut text = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
    for row in rows {
        text += &format!("| {} |\n", row.join(" | "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_is_taken_round_by_round() {
        // The second round was slow for both, which does not change the ratio.
        assert_eq!(ratio(&[200.0, 20.0, 200.0], &[100.0, 10.0, 100.0]), 2.0);
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![vec!["a".to_owned(), "1".to_owned()], vec!["longer".to_owned(), "2".to_owned()]];
        assert_eq!(aligned(&["x", "y"], &rows), "x       y\na       1\nlonger  2\n");
    }
}
