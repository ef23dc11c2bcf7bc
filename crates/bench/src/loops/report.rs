//! What came of it, as Markdown for people and a line for each run for everything else.

use std::fmt::Write;

use super::jobs::Sample;
use super::subjects::Running;
use super::{Options, Row};
use crate::figures::median;

/// Whom the ratios are against.
const PEERS: [&str; 3] = ["loop-buffered", "nbdfuse", "qemu"];

fn of(row: &Row, value: impl Fn(&Sample) -> f64) -> f64 {
    median(&row.samples.iter().map(value).collect::<Vec<_>>())
}

/// The median of the rounds' own ratios.
fn ratio(row: &Row, peer: &Row) -> f64 {
    let pairs = row.samples.iter().zip(&peer.samples);
    median(&pairs.map(|(own, other)| own.rate / other.rate).collect::<Vec<_>>())
}

/// The whole report.
pub(super) fn page(options: &Options, running: &[Running], rows: &[Row]) -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let mut text = format!(
        "Linux {}, {cpus} processors, {} rounds of {} s, images of {} MiB in {}.\n\n",
        release.trim(),
        options.rounds,
        options.seconds,
        options.size >> 20,
        options.folder.display()
    );
    text += "| job | device | op/s (least..greatest) | MB/s | p99 us | machine us/op | server us/op | switches/op \
             | cache MiB | : loop | : nbdfuse | : qemu |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n";
    for job in &options.jobs {
        for row in rows.iter().filter(|row| row.job == job.name) {
            let rates = row.samples.iter().map(|sample| sample.rate);
            let (least, greatest) = (rates.clone().fold(f64::INFINITY, f64::min), rates.fold(0.0, f64::max));
            let server = row.samples.iter().map(|sample| sample.server_us).collect::<Option<Vec<_>>>();
            let server = server.map_or_else(|| "-".to_owned(), |us| format!("{:.2}", median(&us)));
            let against = PEERS.map(|name| {
                let peer = rows.iter().find(|other| other.job == job.name && other.subject == name);
                peer.map_or_else(|| "-".to_owned(), |peer| format!("{:.2}", ratio(row, peer)))
            });
            let _ = writeln!(
                text,
                "| {} | {} | {:.0} ({least:.0}..{greatest:.0}) | {:.0} | {:.0} | {:.2} | {server} | {:.2} | {:.0} | {} |",
                row.job,
                row.subject,
                of(row, |sample| sample.rate),
                of(row, |sample| sample.bytes / 1e6),
                of(row, |sample| sample.p99_us),
                of(row, |sample| sample.machine_us),
                of(row, |sample| sample.switches),
                of(row, |sample| sample.cached_mib),
                against.join(" | ")
            );
        }
    }
    text += "\n| device | attached in ms |\n|---|---|\n";
    for one in running {
        let _ = writeln!(text, "| {} | {:.1} |", one.name, one.attach.as_secs_f64() * 1e3);
    }
    text
}

/// Every run on a line.
pub(super) fn csv(rows: &[Row]) -> String {
    let mut text = "device,job,round,iops,bytes,p99_us,machine_us,server_us,switches,cached_mib\n".to_owned();
    for row in rows {
        for (round, sample) in row.samples.iter().enumerate() {
            let Sample { rate, bytes, p99_us, machine_us, server_us, switches, cached_mib } = sample;
            let server = server_us.map_or(String::new(), |us| format!("{us:.3}"));
            let (name, job) = (row.subject, row.job);
            let _ = writeln!(
                text,
                "{name},{job},{round},{rate:.1},{bytes:.0},{p99_us:.1},{machine_us:.3},{server},{switches:.3},{cached_mib:.1}"
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_the_middle_of_the_rounds_own() {
        let row = |subject: &'static str, rates: &[f64]| Row {
            subject,
            job: "read-1m",
            samples: rates.iter().map(|rate| Sample { rate: *rate, ..Sample::default() }).collect(),
        };
        let (own, peer) = (row("ours", &[100.0, 300.0, 300.0]), row("loop-buffered", &[200.0, 300.0, 600.0]));
        assert_eq!(ratio(&own, &peer), 0.5);
        assert_eq!(csv(&[own]).lines().count(), 4);
    }
}
