//! The report, as a table for people and a line for each run for programs.

use std::fmt::Write;

use super::Row;
use super::jobs::Sample;
use crate::figures::{median, ratio, spread};
use crate::fio;

fn of(row: &Row, value: impl Fn(&fio::Run) -> f64) -> Vec<f64> {
    row.samples.iter().map(|sample| value(&sample.run)).collect()
}

/// Returns the table of one job.
pub(super) fn table(job: &str, rows: &[Row]) -> String {
    let mut text = format!(
        "{job:16} {:>26} {:>8} {:>8} {:>10} {:>10}   {}\n",
        "kIOPS (least..greatest)", "p50 us", "p99 us", "machine", "server", "beside"
    );
    for row in rows.iter().filter(|row| row.job == job && !row.samples.is_empty()) {
        let (least, middle, greatest) = spread(&of(row, |sample| sample.rate / 1000.0));
        let rate = format!("{middle:.1} ({least:.1}..{greatest:.1})");
        let server: Vec<f64> = row.samples.iter().filter_map(|sample| sample.run.server_us).collect();
        let server = if server.is_empty() { "-".into() } else { format!("{:.2}", median(&server)) };
        let peer = row
            .subject
            .peer
            .and_then(|name| rows.iter().find(|other| other.job == job && other.subject.name == name));
        let beside = peer.map(|peer| {
            let times = ratio(&of(row, |sample| sample.rate), &of(peer, |sample| sample.rate));
            (times, peer.subject.name)
        });
        // The peer may have been left out of the run.
        let beside = beside.filter(|(times, _)| !times.is_nan());
        let beside = beside.map(|(times, name)| format!("{times:.2} x {name}"));
        let _ = writeln!(
            text,
            "{:16} {rate:>26} {:8.1} {:8.1} {:10.2} {server:>10}   {}",
            row.subject.name,
            median(&of(row, |sample| sample.p50_us)),
            median(&of(row, |sample| sample.p99_us)),
            median(&of(row, |sample| sample.machine_us)),
            beside.unwrap_or_default()
        );
    }
    text
}

/// Returns every run as a line of CSV.
pub(super) fn csv(rows: &[Row]) -> String {
    let mut text =
        "subject,job,round,iops,bytes,p50_us,p99_us,machine_us,server_us,switches,requests_per_mib,\
                    wait_ms\n"
            .to_owned();
    for row in rows {
        for (round, sample) in row.samples.iter().enumerate() {
            let Sample { run, requests_per_mib, wait_ms } = sample;
            let fio::Run { rate, bytes, p50_us, p99_us, machine_us, server_us, switches, .. } = run;
            let server = server_us.map_or(String::new(), |us| format!("{us:.3}"));
            let (name, job) = (row.subject.name, row.job);
            let _ = writeln!(
                text,
                "{name},{job},{round},{rate:.1},{bytes:.0},{p50_us:.2},{p99_us:.2},{machine_us:.3},{server},\
                 {switches:.3},{requests_per_mib:.2},{wait_ms:.4}"
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::subjects::SUBJECTS;
    use super::*;

    fn row(name: &str, rates: &[f64]) -> Row {
        let subject = SUBJECTS.iter().find(|subject| subject.name == name).expect("a row");
        let run = |rate: &f64| fio::Run { rate: *rate, server_us: Some(1.5), ..fio::Run::default() };
        let sample = |rate: &f64| Sample { run: run(rate), ..Sample::default() };
        Row { subject, job: "randread-32", samples: rates.iter().map(sample).collect() }
    }

    #[test]
    fn a_row_is_compared_with_its_peer_round_by_round() {
        let rows = [row("rublk-null", &[1000.0, 2000.0, 4000.0]), row("null", &[1500.0, 3000.0, 4000.0])];
        let text = table("randread-32", &rows);
        assert!(text.contains("1.50 x rublk-null"), "{text}");
        assert!(text.contains("3.0 (1.5..4.0)"), "{text}");
    }

    #[test]
    fn a_row_that_was_left_out_is_not_in_the_table() {
        let text = table("randread-32", &[row("null", &[])]);
        assert_eq!(text.lines().count(), 1);
        assert_eq!(csv(&[row("null", &[5.0])]).lines().count(), 2);
    }
}
