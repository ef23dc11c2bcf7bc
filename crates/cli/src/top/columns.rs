//! Columns of the list of devices: which of them fit, and their cells.
//!
//! The terminal and the batch mode have the same columns; the terminal adds bars and colours.

use super::numbers::{bytes, count, time};
use super::rows::Row;
use crate::listing::stacked;
use engine::control::Latency;

/// Emphasis of a cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tone {
    Plain,
    /// No activity: shown dimmed.
    Quiet,
    /// A failure.
    Bad,
}

/// Content of a cell.
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) tone: Tone,
    /// Filled part of a bar before the text, from 0 to 1; `None`: no bar.
    pub(super) bar: Option<f64>,
}

impl Cell {
    fn new(text: String, is_quiet: bool) -> Cell {
        Cell { text, tone: if is_quiet { Tone::Quiet } else { Tone::Plain }, bar: None }
    }
}

/// A column of the list.
pub(super) struct Column {
    pub(super) title: &'static str,
    /// Width in characters, including the blank before it; 0: the remaining width of the line.
    pub(super) width: usize,
    /// Screen width from which the column is shown.
    from_width: usize,
    /// Whether the cells are left-aligned.
    pub(super) left: bool,
    pub(super) cell: fn(&Row) -> Cell,
}

const fn right(title: &'static str, width: usize, from_width: usize, cell: fn(&Row) -> Cell) -> Column {
    Column { title, width, from_width, left: false, cell }
}

/// Width of the queue's bar.
pub(super) const BAR: usize = 5;
/// Smallest width of names.
const NAME_MIN: usize = 12;

/// All columns except the name, which comes first. The name takes the remaining width, as does the stack at
/// the end.
const COLUMNS: [Column; 20] = [
    right("IOPS", 6, 0, |row| number(count(row.iops()), row.iops())),
    right("r/s", 6, 130, |row| number(count(row.rates.reads), row.rates.reads)),
    right("w/s", 6, 130, |row| number(count(row.rates.writes), row.rates.writes)),
    right("d/s", 6, 150, |row| number(count(row.rates.discards), row.rates.discards)),
    right("f/s", 6, 150, |row| number(count(row.rates.flushes), row.rates.flushes)),
    right("READ/s", 8, 40, |row| number(bytes(row.rates.read_bytes), row.rates.read_bytes)),
    right("WRITE/s", 8, 40, |row| number(bytes(row.rates.written_bytes), row.rates.written_bytes)),
    right("p50", 7, 60, |row| percentile(row, |latency| latency.p50_ns)),
    right("p90", 7, 110, |row| percentile(row, |latency| latency.p90_ns)),
    right("p99", 7, 40, |row| percentile(row, |latency| latency.p99_ns)),
    right("p99.9", 7, 95, |row| percentile(row, |latency| latency.p999_ns)),
    right("max", 7, 110, |row| percentile(row, |latency| latency.max_ns)),
    right("QUEUE", 11, 70, queue),
    right("aqu-sz", 7, 150, |row| number(count(row.rates.queued), row.rates.queued)),
    right("BUSY%", 7, 70, |row| number(count(row.rates.busy_percent), row.rates.busy_percent)),
    right("PATHS", 6, 76, paths),
    right("ERRORS", 8, 50, |row| {
        let (all, new) = row.errors;
        let tone = if new > 0 { Tone::Bad } else { Tone::Plain };
        if all == 0 { Cell::new("0".into(), true) } else { Cell { text: count(all as f64), tone, bar: None } }
    }),
    right("CLIENTS", 8, 140, |row| {
        let clients: u64 = row.info.exports.iter().map(|export| export.connections).sum();
        number(clients.to_string(), clients as f64)
    }),
    right("SIZE", 7, 120, |row| Cell::new(bytes(row.info.size as f64), false)),
    Column { title: "STACK", width: 0, from_width: 140, left: true, cell: stack },
];

fn number(text: String, value: f64) -> Cell {
    Cell::new(text, value <= 0.0)
}

fn percentile(row: &Row, of: fn(&Latency) -> u64) -> Cell {
    let value = row.percentile(of);
    Cell::new(value.map_or("-".into(), time), value.is_none())
}

fn queue(row: &Row) -> Cell {
    let share = if row.depth > 0 { (row.in_flight as f64 / row.depth as f64).min(1.0) } else { 0.0 };
    Cell { bar: Some(share), ..number(count(row.in_flight as f64), row.in_flight as f64) }
}

fn paths(row: &Row) -> Cell {
    let (up, all) = (row.paths_up(), row.paths.len());
    if all == 0 {
        return Cell::new("-".into(), true);
    }
    Cell { text: format!("{up}/{all}"), tone: if up < all { Tone::Bad } else { Tone::Plain }, bar: None }
}

fn stack(row: &Row) -> Cell {
    Cell::new(stacked(&row.info), false)
}

/// Returns the columns that fit a width, and the widths of names and of stacks.
pub(super) fn columns(width: usize) -> (Vec<&'static Column>, usize, usize) {
    let columns: Vec<&Column> = COLUMNS.iter().filter(|column| column.from_width <= width).collect();
    let taken: usize = columns.iter().map(|column| column.width).sum();
    let left = width.saturating_sub(taken).max(NAME_MIN);
    let has_stack = columns.iter().any(|column| column.width == 0);
    if has_stack {
        let name = (left / 3).clamp(NAME_MIN, 32);
        (columns, name, left.saturating_sub(name))
    } else {
        (columns, left, 0)
    }
}

/// Cuts text to a width; `+` marks a cut. Control characters become `?`.
pub(super) fn fit(text: &str, width: usize) -> String {
    let printable = |c: char| if c.is_control() { '?' } else { c };
    if text.chars().count() <= width {
        return text.chars().map(printable).collect();
    }
    let cut = text.chars().map(printable).take(width.saturating_sub(1));
    cut.chain((width > 0).then_some('+')).collect()
}
