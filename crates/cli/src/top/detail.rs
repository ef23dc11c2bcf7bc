//! All about one device, as lines: what its requests do, its paths, where its stack spends their time, its queues, how it
//! is reached and its limits.

use super::columns::fit;
use super::numbers::{bytes, count, time};
use super::rows::{Operation, Row};
use super::theme::Theme;
use engine::path_status::PathStatus;
use ratatui::text::{Line, Span};

/// From so many letters on, there are two columns of lines.
const WIDE: usize = 160;
/// A limit and its value.
const LIMIT: usize = 39;
const BAR: usize = 20;

type Part = Vec<Line<'static>>;

/// The lines on the left and, where there is room, those on the right.
pub(super) struct Lines {
    pub(super) left: Part,
    pub(super) right: Part,
    /// That of the path that is picked out, on the left.
    pub(super) picked: Option<usize>,
}

/// All there is to say of a device.
pub(super) fn lines(row: &Row, picked: Option<&PathStatus>, width: usize, theme: Theme) -> Lines {
    let is_wide = width >= WIDE;
    let column = if is_wide { width / 2 - 1 } else { width };
    let mut left = summary(row, column, theme);
    left.extend(operations(row, theme));
    // Behind a title.
    let first = left.len() + 1;
    left.extend(paths(row, picked, column, theme));
    let picked = row.paths.iter().position(|path| picked.is_some_and(|picked| std::ptr::eq(picked, path)));
    left.extend(layers(row, theme));
    let mut right = queues(row, theme);
    right.extend(exports(row, column, theme));
    right.extend(facts(row, column, theme));
    right.extend(limits(row, column, theme));
    if !is_wide {
        left.append(&mut right);
    }
    Lines { left, right, picked: picked.map(|at| first + at) }
}

fn title(text: &str, theme: Theme) -> Line<'static> {
    Line::styled(text.to_owned(), theme.head())
}

fn summary(row: &Row, width: usize, theme: Theme) -> Part {
    let info = &row.info;
    let layers = info.layers.iter().rev().map(|layer| format!("{layer} > "));
    let stack: String = layers.chain([info.stack.clone()]).collect();
    let state = match (row.silent, info.read_only) {
        (true, _) => "  its process does not answer",
        (false, true) => "  read-only",
        (false, false) => "",
    };
    let name = fit(&info.name, width / 2);
    let head = format!(
        "  {}  {} a block  process {}{state}",
        bytes(info.size as f64),
        info.logical_block_size,
        info.pid
    );
    let (all, new) = row.errors;
    let errors = format!("errors: {}, {} of them new", count(all as f64), count(new as f64));
    vec![
        Line::from(vec![Span::styled(name, theme.head()), Span::raw(head)]),
        Line::styled(fit(&stack, width), theme.quiet()),
        Line::from(vec![
            Span::raw(format!(
                "{} IOPS  {:.0} % busy  {} under way of {}  ",
                count(row.iops()),
                row.rates.busy_percent,
                row.in_flight,
                row.depth
            )),
            Span::styled(errors, if new > 0 { theme.bad() } else { theme.quiet() }),
        ]),
    ]
}

fn operations(row: &Row, theme: Theme) -> Part {
    let head = format!(
        "{:<14}{:>7}{:>9}{:>8}{:>8}{:>8}{:>8}{:>8}",
        "OPERATION", "io/s", "bytes/s", "p50", "p90", "p99", "p99.9", "max"
    );
    let mut lines = vec![title(&head, theme)];
    let line = |Operation { name, ios, bytes: moved, latency }: &Operation| {
        let of = |ns| if latency.count() > 0 { time(ns) } else { "-".into() };
        format!(
            "{:<14}{:>7}{:>9}{:>8}{:>8}{:>8}{:>8}{:>8}",
            name,
            count(*ios),
            bytes(*moved),
            of(latency.p50_ns),
            of(latency.p90_ns),
            of(latency.p99_ns),
            of(latency.p999_ns),
            of(latency.max_ns)
        )
    };
    lines.extend(row.operations.iter().map(|operation| Line::raw(line(operation))));
    if row.operations.is_empty() {
        lines.push(Line::styled("no request has ended yet", theme.quiet()));
    }
    lines
}

fn paths(row: &Row, picked: Option<&PathStatus>, width: usize, theme: Theme) -> Part {
    if row.paths.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![title("  PATH   GROUP        FAILURES", theme)];
    for path in &row.paths {
        let group = match path.group_state {
            'A' => "in use",
            'D' => "disabled",
            _ => "enabled",
        };
        let (state, style) = if path.works { ("up", theme.good()) } else { ("down", theme.bad()) };
        let is_picked = picked.is_some_and(|picked| std::ptr::eq(picked, path));
        let mark = if is_picked { ">" } else { " " };
        let rest = format!(" {:>2} {group:<9}{:>9}  ", path.group, path.fails);
        let name = fit(&path.name, width.saturating_sub(30));
        lines.push(Line::from(vec![
            Span::raw(format!("{mark} ")),
            Span::styled(format!("{state:<6}"), style),
            Span::raw(rest),
            Span::styled(name, if is_picked { theme.selected() } else { theme.quiet() }),
        ]));
    }
    lines
}

fn layers(row: &Row, theme: Theme) -> Part {
    let head =
        format!("{:<24}{:>8}{:>9}{:>7}  {:<BAR$}{:>10}", "LAYER", "io/s", "await", "own", "", "under way");
    let mut lines = vec![title(&head, theme)];
    for (layer, share) in row.layers.iter().zip(&row.shares) {
        let name = format!("{:indent$}{}", "", layer.layer.name, indent = 2 * usize::from(layer.layer.depth));
        let spent = if layer.per_second > 0.0 { time((layer.await_ms * 1e6) as u64) } else { "-".into() };
        lines.push(Line::from(vec![
            Span::raw(format!(
                "{:<24}{:>8}{:>9}{:>5.0} %  ",
                fit(&name, 24),
                count(layer.per_second),
                spent,
                share * 100.0
            )),
            Span::styled(theme.bar(*share, BAR), theme.key()),
            Span::raw(format!("{:>10}", layer.layer.in_flight)),
        ]));
    }
    lines
}

fn queues(row: &Row, theme: Theme) -> Part {
    let mut lines = vec![title("QUEUE  THREAD     RING        UNDER WAY", theme)];
    for (number, queue) in row.info.queues.iter().enumerate() {
        let share = queue.in_flight as f64 / f64::from(queue.depth.max(1));
        lines.push(Line::from(vec![
            Span::raw(format!("{number:>5}  reactor-{:<3}{:<10}", queue.reactor, queue.engine)),
            Span::styled(theme.bar(share, BAR), theme.filled(share)),
            Span::raw(format!(" {} of {}", queue.in_flight, queue.depth)),
        ]));
    }
    if row.info.queues.is_empty() {
        lines.push(Line::styled("none: nobody is connected", theme.quiet()));
    }
    lines
}

fn exports(row: &Row, width: usize, theme: Theme) -> Part {
    let mut lines = vec![title("EXPORT    CLIENTS", theme)];
    for export in &row.info.exports {
        let text = format!("{:<10}{:>7}  {}", export.kind, export.connections, export.address);
        lines.push(Line::raw(fit(&text, width)));
        let details = export.details.iter().map(|(key, value)| format!("          {key}: {value}"));
        lines.extend(details.map(|text| Line::styled(fit(&text, width), theme.quiet())));
    }
    if row.info.exports.is_empty() {
        lines.push(Line::styled("none", theme.quiet()));
    }
    lines
}

fn facts(row: &Row, width: usize, theme: Theme) -> Part {
    let mut lines = vec![title("BACKEND", theme)];
    let facts = row.info.backend.iter().map(|(key, value)| format!("{key}: {value}"));
    lines.extend(facts.map(|text| Line::raw(fit(&text, width))));
    lines
}

/// In as many columns as there is room for; those that are 0 are left out.
fn limits(row: &Row, width: usize, theme: Theme) -> Part {
    let mut lines = vec![title("LIMITS (those that are not 0)", theme)];
    let limits = row.info.limits.iter().filter(|(_, value)| **value > 0);
    let cells: Vec<String> = limits
        .map(|(key, value)| format!("{key} {value:>width$}", width = (LIMIT - 2).saturating_sub(key.len())))
        .collect();
    let across = (width / LIMIT).max(1);
    for cells in cells.chunks(across) {
        lines.push(Line::raw(cells.join(" ")));
    }
    lines
}
