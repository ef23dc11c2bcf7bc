//! The report as Markdown.

use std::fmt::Write;

use super::results::{Figure, Results};
use super::tables::{Chart, Order, Role, TABLES, Table, Verdict};
use crate::figures::{median, ratio, spread};

/// Columns of a table: their name in the figures, the heading, the divisor, digits.
pub(super) const COLUMNS: [(&str, &str, f64, usize); 9] = [
    ("bytes", "MiB/s", 1048576.0, 0),
    ("p99_us", "p99, us", 1.0, 0),
    ("machine_us", "CPU of the machine, us a request", 1.0, 2),
    ("server_us", "CPU of the server, us a request", 1.0, 2),
    ("cpu_us", "CPU, us a request", 1.0, 3),
    ("switches", "context switches a request", 1.0, 2),
    ("sectors", "sectors a request", 1.0, 0),
    ("requests_per_mib", "requests a MiB", 1.0, 1),
    ("wait_ms", "wait, ms", 1.0, 3),
];

/// Returns a figure with thousands separated by commas.
pub(super) fn grouped(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    let (whole, rest) =
        text.split_once('.').map_or((text.as_str(), String::new()), |(a, b)| (a, format!(".{b}")));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |whole| ("-", whole));
    let mut out = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    format!("{sign}{out}{rest}")
}

/// Returns median, least and greatest of the drawn column.
pub(super) fn cell(chart: &Chart, figure: &Figure) -> String {
    let (scale, digits) = unit(chart);
    let (least, middle, greatest) = spread(&figure.values(chart.column));
    let [least, middle, greatest] = [least, middle, greatest].map(|value| grouped(value / scale, digits));
    format!("{middle} ({least}..{greatest})")
}

/// Returns the divisor and the digits of the drawn column.
pub(super) fn unit(chart: &Chart) -> (f64, usize) {
    match chart.column {
        "bytes" => (1048576.0, 0),
        _ => (1.0, 0),
    }
}

/// Returns the heading of the drawn column.
pub(super) fn heading(chart: &Chart) -> &'static str {
    match chart.column {
        "bytes" => "MiB/s",
        "cached_mib" => "MiB",
        _ => "IOPS",
    }
}

pub(super) fn role(role: Role) -> &'static str {
    match role {
        Role::Original => "original",
        Role::Alternative => "alternative",
        Role::Ours => "Blockyard",
    }
}

fn column_name(column: &str) -> &str {
    match column {
        "iops" => "requests a second",
        "bytes" => "bytes a second",
        "p99_us" => "99th percentile of the latency",
        "requests_per_mib" => "requests a MiB",
        "wait_ms" => "wait",
        "switches" => "context switches a request",
        other => other,
    }
}

/// Returns the sentence about an order of lines that the text found.
pub(super) fn judged(results: &Results, chart: &Chart, order: &Order) -> String {
    let name =
        |subject| chart.lines.iter().find(|line| line.subject == subject).map_or(subject, |line| line.name);
    let claim = format!("{} above {} in {}", name(order.more), name(order.less), column_name(order.column));
    match chart.verdict(results, order) {
        Verdict::Reproduced(times) => format!("{claim}: reproduced ({times:.2} times)"),
        Verdict::NotReproduced(times) => format!("{claim}: not reproduced ({times:.2} times)"),
        Verdict::NotMeasured => format!("{claim}: not measured"),
    }
}

/// Returns why a chart has no figures.
pub(super) fn missing(results: &Results, chart: &Chart) -> String {
    let why = results.errors.iter().find(|(part, _)| part == chart.part).map(|(_, why)| why.as_str());
    let is_quick = results.machine.get("extent").is_some_and(|extent| extent == "quick");
    let of_part = || results.figures.iter().filter(|figure| figure.part == chart.part);
    let lacks_job = of_part().next().is_some() && of_part().all(|figure| figure.job != chart.job);
    let why = why.or_else(|| (is_quick && lacks_job).then_some("--quick leaves it out"));
    let why = why.or_else(|| chart.left_out(results).first().map(|(_, why)| *why));
    format!("Not measured: {}.", why.unwrap_or("this part was left out"))
}

/// Returns the ratio of the drawn column to that of the first measured line.
pub(super) fn beside(chart: &Chart, figure: &Figure, first: &Figure) -> Option<f64> {
    let times = ratio(&figure.values(chart.column), &first.values(chart.column));
    (chart.column != "cached_mib" && times.is_finite()).then_some(times)
}

/// Returns the columns that a line of the chart has.
pub(super) fn columns_of(results: &Results, chart: &Chart) -> Vec<(&'static str, &'static str, f64, usize)> {
    let has = |name: &str| {
        let mut figures = chart.lines.iter().filter_map(|line| chart.figure(results, line));
        name != chart.column && figures.any(|figure| !figure.values(name).is_empty())
    };
    COLUMNS.into_iter().filter(|(name, ..)| has(name)).collect()
}

/// Returns the whole page.
pub(super) fn page(results: &Results) -> String {
    let mut text = "# Five texts on virtual block devices, measured again\n\n".to_owned();
    for (name, value) in &results.machine {
        let _ = writeln!(text, "- {name}: {value}");
    }
    text += "\nA figure is the median of the rounds (least..greatest); a ratio is the median of the rounds' own, to the \
             first line of its table. *Guest* marks a kernel of its own under emulation, where ratios hold and rates \
             do not.\n";
    for table in TABLES {
        text += &one(results, table);
    }
    text
}

fn one(results: &Results, table: &Table) -> String {
    let mut text = format!("\n## {}\n\n{}\n\n| published | |\n|---|---|\n", table.title, table.origin);
    for line in table.published {
        let _ = writeln!(text, "| {} | {} |", line.name, line.figure);
    }
    for chart in table.charts {
        let guest = if chart.is_in_guest() { " (guest)" } else { "" };
        let _ = write!(text, "\n### {}{guest}\n\n", chart.title);
        let measured: Vec<_> =
            chart.lines.iter().filter_map(|line| Some((line, chart.figure(results, line)?))).collect();
        let Some((_, first)) = measured.first() else {
            let _ = writeln!(text, "{}", missing(results, chart));
            continue;
        };
        let columns = columns_of(results, chart);
        let headings: String = columns.iter().map(|(_, heading, ..)| format!(" {heading} |")).collect();
        let _ = writeln!(text, "| | | {} | : first |{headings}", heading(chart));
        let _ = writeln!(text, "|---|---|---|---|{}", "---|".repeat(columns.len()));
        for (line, figure) in &measured {
            let times =
                beside(chart, figure, first).map_or_else(|| "-".to_owned(), |times| format!("{times:.2}"));
            let _ =
                write!(text, "| {} | {} | {} | {times} |", line.name, role(line.role), cell(chart, figure));
            for (name, _, scale, digits) in &columns {
                let values = figure.values(name);
                let value =
                    if values.is_empty() { "-".into() } else { grouped(median(&values) / scale, *digits) };
                let _ = write!(text, " {value} |");
            }
            text.push('\n');
        }
        for (line, why) in chart.left_out(results) {
            let why = why.replace('|', r"\|");
            let blank = " - |".repeat(columns.len() + 1);
            let _ = writeln!(text, "| {} | {} | not measured: {why} |{blank}", line.name, role(line.role));
        }
        let _ = write!(text, "\n{}", chart.note);
        for order in chart.orders {
            let _ = write!(text, " {}.", judged(results, chart, order));
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::results::example;
    use super::*;

    #[test]
    fn a_chart_has_its_lines_ratios_and_verdicts() {
        let text = page(&example());
        assert!(text.contains("| LIO fileio, tcm_loop | original | 45 (40..50) | 0.42 | 20 | - |"), "{text}");
        assert!(
            text.contains("kernel loop, buffered above LIO fileio, tcm_loop in requests a second: reproduced (2.50 times)."),
            "{text}"
        );
        assert!(text.contains("Not measured: it was left out."), "{text}");
        assert!(
            text.contains(
                "| LIO fileio, tcm_loop | original | 45 (40..50) | 0.42 | 20 | - |\n| Blockyard, file"
            ),
            "no line for a subject without a reason"
        );
        assert!(text.contains("Not measured: this part was left out."), "{text}");
    }

    #[test]
    fn a_subject_that_was_left_out_has_its_reason() {
        let mut results = example();
        let chart = "### The text's job on iSCSI targets (guest)\n\n";
        assert!(page(&results).contains(&format!("{chart}Not measured: tgtd is <not> installed.")));
        let figure = results.figures[0].clone();
        results.figures.push(Figure { subject: "iscsi-file".into(), ..figure });
        let text = page(&results);
        results.machine.insert("extent".into(), "quick".into());
        assert!(!super::page(&results).contains("--quick leaves it out"), "no part lacks a job");
        results.figures.push(Figure { part: "servers".into(), job: "none".into(), ..Figure::default() });
        assert!(
            super::page(&results).contains("Not measured: --quick leaves it out."),
            "a part without a job"
        );
        let line = "| tgtd file, iSCSI | alternative | not measured: tgtd is <not> installed | - | - |";
        assert!(text.contains(line), "{text}");
        let page = super::super::html::page(&results);
        assert!(page.contains("not measured: tgtd is &lt;not&gt; installed</td></tr>"), "{page}");
    }

    #[test]
    fn thousands_are_separated() {
        assert_eq!(
            [grouped(1234567.4, 0), grouped(-1234.56, 1), grouped(999.0, 0)],
            ["1,234,567", "-1,234.6", "999"]
        );
    }
}
