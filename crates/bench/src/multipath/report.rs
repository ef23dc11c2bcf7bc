//! The report, as Markdown for people.

use super::{inside, outside};
use crate::figures::{median, ratio, spread};
use std::fmt::Write as _;

/// The time of a null request in the goals, in nanoseconds.
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

/// Formats median, least and greatest as a cell.
fn cell(values: &[f64], digits: usize) -> String {
    let (least, middle, greatest) = spread(values);
    format!("{middle:.digits$} ({least:.digits$}..{greatest:.digits$})")
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
        text += &beside("From outside, the program's own devices", "device", "raw null", &self.outside);
        let title = "From outside, behind a server of the harness's own, with and without a mutex";
        text += &beside(title, "device", "raw null", &self.mutex);
        text += &self.inside_table();
        text += &beside("NBD on both sides", "in front", "one path", &self.servers);
        text
    }

    /// Returns every measurement as a line of CSV. A name ends with the number of threads.
    pub(super) fn csv(&self) -> String {
        let mut text = "subject,job,round,iops,cpu_us\n".to_owned();
        let mut add =
            |job: &str, name: &str, threads: u16, rates: &[f64], unit: f64, cpu: &[f64], cpu_unit: f64| {
                for (round, (rate, cpu)) in rates.iter().zip(cpu).enumerate() {
                    let name = name.replace(", ", "/");
                    let (rate, cpu) = (rate * unit, cpu * cpu_unit);
                    let _ = writeln!(text, "{name}/{threads},{job},{round},{rate:.1},{cpu:.5}");
                }
            };
        let served = [("outside", &self.outside), ("mutex", &self.mutex), ("servers", &self.servers)];
        for (job, all) in served {
            for series in all.iter().flatten() {
                add(job, &series.server.name(), series.threads, &series.kilo_iops, 1e3, &series.cpu_us, 1.0);
            }
        }
        for series in &self.inside {
            add(
                "inside",
                &series.subject.name(),
                series.threads,
                &series.mega_iops,
                1e6,
                &series.cpu_ns,
                1e-3,
            );
        }
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
                cell(&series.cpu_ns, 1),
                median(&added),
                NULL_NS / (NULL_NS + median(&added)),
                cell(&series.mega_iops, 1),
                ratio(&series.mega_iops, &raw.mega_iops),
            );
        }
        text
    }
}

/// Returns a table of servers, each compared with the first of its list; `device` and `base` are their
/// headings.
fn beside(title: &str, device: &str, base: &str, all: &[Vec<outside::Series>]) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "\n### {title}\n\n| reactors, connections | {device} | thousand requests a second | : {base} | \
         CPU us a request | : {base} |\n|---|---|---|---|---|---|\n"
    );
    for (series, first) in all.iter().flat_map(|all| all.iter().map(|series| (series, &all[0]))) {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.2} | {} | {:.2} |",
            series.threads,
            series.server.name(),
            cell(&series.kilo_iops, 0),
            ratio(&series.kilo_iops, &first.kilo_iops),
            cell(&series.cpu_us, 2),
            ratio(&series.cpu_us, &first.cpu_us),
        );
    }
    text
}
