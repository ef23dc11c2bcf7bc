//! Details of one device, as lines: past intervals, operations, paths, layers, queues, exports, backend and
//! limits.

use super::columns::fit;
use super::numbers::{bytes, count, time};
use super::rows::{Operation, Past, Row};
use super::theme::Theme;
use crate::listing::stacked;
use engine::control::ClientSession;
use engine::tables::path_status::PathStatus;
use ratatui::text::{Line, Span};
use std::collections::BTreeMap;

/// Screen width from which lines are in two columns.
const WIDE: usize = 160;
/// Width of a limit and its value.
const LIMIT: usize = 39;
const BAR: usize = 20;
/// Width of the bar of a layer's share, and of all columns after its name.
const SHARE: usize = 10;
const LAYER_NUMBERS: usize = 8 + 9 + 7 + 2 + SHARE + 11;
/// Widths of the name of a sparkline and of its newest value.
const SPARK_NAME: usize = 8;
const SPARK_VALUE: usize = 9;

type Part = Vec<Line<'static>>;

/// Lines of the left column and, on a wide screen, of the right one.
pub(super) struct Lines {
    pub(super) left: Part,
    pub(super) right: Part,
    /// Index of the selected path's line, on the left.
    pub(super) picked: Option<usize>,
}

/// Returns the details of a device. `past`: its past intervals, oldest first.
pub(super) fn lines(
    row: &Row,
    past: impl DoubleEndedIterator<Item = Past> + Clone,
    picked: Option<&PathStatus>,
    width: usize,
    theme: Theme,
) -> Lines {
    let is_wide = width >= WIDE;
    let column = if is_wide { width / 2 - 1 } else { width };
    let mut left = summary(row, column, theme);
    left.extend(sparks(past, column, theme));
    left.extend(operations(row, theme));
    // The first path is after the title.
    let first = left.len() + 1;
    left.extend(paths(row, picked, column, theme));
    let picked = row.paths.iter().position(|path| picked.is_some_and(|picked| std::ptr::eq(picked, path)));
    left.extend(layers(row, column, theme));
    let mut right = queues(row, theme);
    right.extend(exports(row, column, theme));
    right.extend(sessions(row, column, theme));
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
    let stack = stacked(info);
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
                "{} IOPS  {:.0} % busy  {} in flight of {}  ",
                count(row.iops()),
                row.rates.busy_percent,
                row.in_flight,
                row.depth
            )),
            Span::styled(errors, if new > 0 { theme.bad() } else { theme.quiet() }),
        ]),
    ]
}

/// Sparklines of past intervals: a line for each value, over the whole width.
fn sparks(past: impl DoubleEndedIterator<Item = Past> + Clone, width: usize, theme: Theme) -> Part {
    let room = width.saturating_sub(SPARK_NAME + SPARK_VALUE);
    let line = |name: &str, of: fn(&Past) -> f64, text: fn(f64) -> String| {
        let newest = past.clone().next_back().map_or("-".into(), |past| text(of(&past)));
        Line::from(vec![
            Span::raw(format!("{name:<SPARK_NAME$}")),
            Span::styled(theme.spark(past.clone().map(|past| of(&past)), room), theme.key()),
            Span::raw(format!("{newest:>SPARK_VALUE$}")),
        ])
    };
    vec![
        line("IOPS", |past| past.iops, count),
        line("read", |past| past.read_bytes, |value| format!("{}/s", bytes(value))),
        line("write", |past| past.written_bytes, |value| format!("{}/s", bytes(value))),
        line("p99", |past| past.p99_ns, |value| if value > 0.0 { time(value as u64) } else { "-".into() }),
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
        lines.push(Line::styled("no request has completed yet", theme.quiet()));
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

/// Layers and backends with the part of the time that requests spent in each. The name of a backend is
/// followed by its path, URI or size, so that the paths of a multipath device can be distinguished.
fn layers(row: &Row, width: usize, theme: Theme) -> Part {
    let names = width.saturating_sub(LAYER_NUMBERS).max(24);
    let head = format!(
        "{:<names$}{:>8}{:>9}{:>7}  {:<SHARE$}{:>11}",
        "LAYER", "io/s", "await", "own", "", "in flight"
    );
    let mut lines = vec![title(&head, theme)];
    for (layer, share) in row.layers.iter().zip(&row.shares) {
        let indent = 2 * usize::from(layer.layer.depth);
        let name = format!("{:indent$}{} ", "", layer.layer.name);
        let label = fit(&layer.layer.label, names.saturating_sub(name.chars().count() + 1));
        let gap = names.saturating_sub(name.chars().count() + label.chars().count());
        let spent = if layer.per_second > 0.0 { time((layer.await_ms * 1e6) as u64) } else { "-".into() };
        lines.push(Line::from(vec![
            Span::raw(fit(&name, names)),
            Span::styled(label, theme.quiet()),
            Span::raw(format!(
                "{:gap$}{:>8}{:>9}{:>5.0} %  ",
                "",
                count(layer.per_second),
                spent,
                share * 100.0
            )),
            Span::styled(theme.bar(*share, SHARE), theme.key()),
            Span::raw(format!("{:>11}", layer.layer.in_flight)),
        ]));
    }
    lines
}

fn queues(row: &Row, theme: Theme) -> Part {
    let mut lines = vec![title("QUEUE  THREAD     RING        IN FLIGHT", theme)];
    for (number, queue) in row.info.queues.iter().enumerate() {
        let share = queue.in_flight as f64 / f64::from(queue.depth.max(1));
        lines.push(Line::from(vec![
            Span::raw(format!("{number:>5}  reactor-{:<3}{:<10}", queue.reactor, queue.engine)),
            Span::styled(theme.bar(share, BAR), theme.filled(share)),
            Span::raw(format!(" {} of {}", queue.in_flight, queue.depth)),
        ]));
    }
    if row.info.queues.is_empty() {
        lines.push(Line::styled("none: no client is connected", theme.quiet()));
    }
    lines
}

fn exports(row: &Row, width: usize, theme: Theme) -> Part {
    let mut lines = vec![title("EXPORT    CLIENTS", theme)];
    for export in &row.info.exports {
        let text = format!("{:<10}{:>7}  {}", export.kind, export.connections, export.address);
        lines.push(Line::raw(fit(&text, width)));
        // Sessions are shown on lines of their own.
        let details = export.details.iter().filter(|(key, _)| !key.starts_with("session "));
        let details = details.map(|(key, value)| format!("          {key}: {value}"));
        lines.extend(details.map(|text| Line::styled(fit(&text, width), theme.quiet())));
    }
    if row.info.exports.is_empty() {
        lines.push(Line::styled("none", theme.quiet()));
    }
    lines
}

/// Formats the sessions of initiators, each once even if every portal reports it.
fn sessions(row: &Row, width: usize, theme: Theme) -> Part {
    let all = row.info.exports.iter().flat_map(|export| &export.sessions);
    let all: BTreeMap<u16, &ClientSession> = all.map(|session| (session.number, session)).collect();
    if all.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![title("SESSION  CONN  BUSY  COMMANDS  READ   WRITTEN  INITIATOR", theme)];
    for (number, session) in all {
        let of = |name: &str| session.counts.get(name).copied().unwrap_or_default() as f64;
        let text = format!(
            "{number:>7}{:>6}{:>6}{:>10}{:>6}{:>10}  {}",
            session.connections.len(),
            count(of("in-progress")),
            count(of("commands")),
            bytes(of("bytes-read")),
            bytes(of("bytes-written")),
            session.initiator
        );
        lines.push(Line::raw(fit(&text, width)));
        let more = format!("         {}", more_of(session));
        lines.push(Line::styled(fit(&more, width), theme.quiet()));
    }
    lines
}

/// Returns the second line of a session: digests, user, reservation, failures, addresses.
fn more_of(session: &ClientSession) -> String {
    let mut words = vec![format!("digests {}", session.digests)];
    if !session.user.is_empty() {
        words.push(format!("user {}", session.user));
    }
    match (session.has_reservation, session.is_registered) {
        (true, _) => words.push("holds the reservation".to_owned()),
        (false, true) => words.push("registered".to_owned()),
        (false, false) => {}
    }
    for name in ["errors", "aborts", "rejects", "digest-errors", "waited"] {
        let value = session.counts.get(name).copied().unwrap_or_default();
        if value > 0 {
            words.push(format!("{name} {value}"));
        }
    }
    let addresses = session.connections.iter().map(|one| format!("{} at {}", one.peer, one.portal));
    words.extend(addresses);
    words.join(", ")
}

fn facts(row: &Row, width: usize, theme: Theme) -> Part {
    let mut lines = vec![title("BACKEND", theme)];
    let facts = row.info.backend.iter().map(|(key, value)| format!("{key}: {value}"));
    lines.extend(facts.map(|text| Line::raw(fit(&text, width))));
    lines
}

/// Limits that are set, in as many columns as fit.
fn limits(row: &Row, width: usize, theme: Theme) -> Part {
    let mut lines = vec![title("LIMITS (not 0)", theme)];
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
