//! What came of it, as Markdown for people.

use super::{inside, outside};
use crate::figures::median;
use std::fmt::Write as _;

/// A null request as the goals have it, in nanoseconds.
const NULL_NS: f64 = 60.0;

/// All parts that were measured.
pub(super) struct Report {
    rounds: usize,
    seconds: f64,
    realtime: bool,
    pub(super) outside: Vec<Vec<outside::Series>>,
    pub(super) mutex: Vec<Vec<outside::Series>>,
    pub(super) inside: Vec<inside::Series>,
    pub(super) servers: Vec<Vec<outside::Series>>,
    pub(super) took_s: u64,
}

/// Median, least and greatest.
fn spread(values: &[f64], digits: usize) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{:.digits$} ({least:.digits$}..{greatest:.digits$})", median(values))
}

/// The rounds' own ratios.
fn ratios(own: &[f64], base: &[f64]) -> Vec<f64> {
    own.iter().zip(base).map(|(own, base)| own / base).collect()
}

impl Report {
    pub(super) fn new(rounds: usize, seconds: f64, realtime: bool) -> Report {
        let (outside, mutex, inside, servers) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Report { rounds, seconds, realtime, outside, mutex, inside, servers, took_s: 0 }
    }

    pub(super) fn page(&self) -> String {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let cpus = std::thread::available_parallelism().map_or(0, usize::from);
        let ahead = if self.realtime { ", in the real-time class" } else { "" };
        let Report { rounds, seconds, took_s, .. } = self;
        let mut text = format!(
            "Linux {}, {cpus} processors, {rounds} rounds of {seconds} s{ahead}; {took_s} s in all.\n",
            release.trim()
        );
        text += &rates("From outside, the program's own devices", &self.outside);
        text += &rates(
            "From outside, behind a server of the harness's own, with and without a mutex",
            &self.mutex,
        );
        text += &self.inside_table();
        text += &costs(&self.servers);
        text
    }

    fn inside_table(&self) -> String {
        let Some(base) = self.inside.first().map(|series| series.subject) else { return String::new() };
        let mut text = "\n### Inside one process\n\n| threads | stack | CPU ns a request | added ns | of a null \
                        request of 60 ns | million requests a second | : raw |\n|---|---|---|---|---|---|---|\n"
            .to_owned();
        for series in &self.inside {
            let raw = self.inside.iter().find(|raw| raw.threads == series.threads && raw.subject == base);
            let raw = raw.unwrap_or(series);
            let added: Vec<f64> =
                series.cpu_ns.iter().zip(&raw.cpu_ns).map(|(own, null)| own - null).collect();
            let _ = writeln!(
                text,
                "| {} | {} | {} | {:.1} | {:.2} | {} | {:.2} |",
                series.threads,
                series.subject.name(),
                spread(&series.cpu_ns, 1),
                median(&added),
                NULL_NS / (NULL_NS + median(&added)),
                spread(&series.mega_iops, 1),
                median(&ratios(&series.mega_iops, &raw.mega_iops)),
            );
        }
        text
    }
}

fn rates(title: &str, all: &[Vec<outside::Series>]) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "\n### {title}\n\n| reactors, connections | device | thousand requests a second | : raw null | server CPU us \
         a request | : raw null |\n|---|---|---|---|---|---|\n"
    );
    for series in all.iter().flat_map(|all| all.iter().map(|series| (series, &all[0]))) {
        let (series, raw) = series;
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.2} | {} | {:.2} |",
            series.threads,
            series.server.name(),
            spread(&series.kilo_iops, 0),
            median(&ratios(&series.kilo_iops, &raw.kilo_iops)),
            spread(&series.cpu_us, 2),
            median(&ratios(&series.cpu_us, &raw.cpu_us)),
        );
    }
    text
}

fn costs(all: &[Vec<outside::Series>]) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut text =
        "\n### NBD on both sides\n\n| reactors, connections | in front | thousand requests a second \
                    | : one path | CPU us a request | : one path |\n|---|---|---|---|---|---|\n"
            .to_owned();
    for series in all.iter().flat_map(|all| all.iter().map(|series| (series, &all[0]))) {
        let (series, direct) = series;
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.2} | {} | {:.2} |",
            series.threads,
            series.server.name(),
            spread(&series.kilo_iops, 0),
            median(&ratios(&series.kilo_iops, &direct.kilo_iops)),
            spread(&series.cpu_us, 2),
            median(&ratios(&series.cpu_us, &direct.cpu_us)),
        );
    }
    text
}
