//! The report, as Markdown for people and a line for each run for programs.

use std::fmt::Write;

use super::jobs::Sample;
use super::subjects::Running;
use super::{Options, Row};
use crate::figures::{median, ratio, spread};
use crate::fio;

/// The subjects of the ratios.
const PEERS: [&str; 3] = ["loop-buffered", "nbdfuse", "qemu"];

fn of(row: &Row, value: impl Fn(&Sample) -> f64) -> f64 {
    median(&row.samples.iter().map(value).collect::<Vec<_>>())
}

fn rates(row: &Row) -> Vec<f64> {
    row.samples.iter().map(|sample| sample.run.rate).collect()
}

/// Returns the whole report.
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
            let (least, rate, greatest) = spread(&rates(row));
            let server = row.samples.iter().map(|sample| sample.run.server_us).collect::<Option<Vec<_>>>();
            let server = server.map_or_else(|| "-".to_owned(), |us| format!("{:.2}", median(&us)));
            let against = PEERS.map(|name| {
                let peer = rows.iter().find(|other| other.job == job.name && other.subject == name);
                peer.map_or_else(|| "-".to_owned(), |peer| format!("{:.2}", ratio(&rates(row), &rates(peer))))
            });
            let _ = writeln!(
                text,
                "| {} | {} | {rate:.0} ({least:.0}..{greatest:.0}) | {:.0} | {:.0} | {:.2} | {server} | {:.2} | {:.0} | {} |",
                row.job,
                row.subject,
                of(row, |sample| sample.run.bytes / 1e6),
                of(row, |sample| sample.run.p99_us),
                of(row, |sample| sample.run.machine_us),
                of(row, |sample| sample.run.switches),
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

/// Returns every run as a line of CSV.
pub(super) fn csv(rows: &[Row]) -> String {
    let mut text = "device,job,round,iops,bytes,p99_us,machine_us,server_us,switches,cached_mib\n".to_owned();
    for row in rows {
        for (round, sample) in row.samples.iter().enumerate() {
            let Sample { run, cached_mib } = sample;
            let fio::Run { rate, bytes, p99_us, machine_us, server_us, switches, .. } = run;
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
    fn every_round_has_a_line() {
        let row = Row { subject: "ours", job: "read-1m", samples: vec![Sample::default(); 3] };
        assert_eq!(csv(&[row]).lines().count(), 4);
    }
}
