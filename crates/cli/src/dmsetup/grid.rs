//! Layout of dmsetup's reports: columns, or with `--rows` one line for each field.

use super::Refusal;
use super::options::Options;
use crate::failure::print;

/// A column of a report.
#[derive(Debug)]
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) heading: &'static str,
    pub(super) width: usize,
    /// Numbers are right-aligned and sorted numerically.
    pub(super) is_number: bool,
}

pub(super) const fn text(name: &'static str, heading: &'static str, width: usize) -> Column {
    Column { name, heading, width, is_number: false }
}

pub(super) const fn number(name: &'static str, heading: &'static str, width: usize) -> Column {
    Column { name, heading, width, is_number: true }
}

/// Returns the columns that a list names; a list that starts with `+` extends the default columns.
pub(super) fn named(
    list: &str,
    default: &str,
    known: &'static [Column],
) -> Result<Vec<&'static Column>, Refusal> {
    let list = match list.strip_prefix('+') {
        Some(more) => format!("{default},{more}"),
        None => list.to_owned(),
    };
    let column = |name: &str| known.iter().find(|column| column.name == name);
    list.split(',').map(|name| column(name).ok_or_else(|| unknown(name, known))).collect()
}

pub(super) fn unknown(name: &str, known: &[Column]) -> Refusal {
    let lines = names(known).into_iter().chain([format!("Unrecognised field: {name}")]);
    Refusal::without_footer(lines.collect())
}

/// Returns a line for each column name.
pub(super) fn names(known: &[Column]) -> Vec<String> {
    known.iter().map(|column| format!("  {}", column.name)).collect()
}

/// Prints a report with one row for each device.
pub(super) fn show(options: &Options, fields: &[&Column], devices: &[Vec<String>]) {
    let prefixed = options.has("nameprefixes");
    let quote = if options.has("unquoted") { "" } else { "'" };
    let cell = |(column, value): (&&Column, &String)| match prefixed {
        true => format!("DM_{}={quote}{value}{quote}", column.name.to_uppercase()),
        false => value.clone(),
    };
    let has_headings = !options.has("noheadings");
    let headings: Vec<String> = fields.iter().map(|column| column.heading.to_owned()).collect();
    let cells = devices.iter().map(|values| fields.iter().zip(values).map(cell).collect());
    let rows: Vec<Vec<String>> = has_headings.then_some(headings).into_iter().chain(cells).collect();
    let separator = options.value("separator").or((!has_headings).then_some(":"));
    if options.has("rows") {
        // Each value has its own prefix.
        for at in 0..fields.len() {
            let line: Vec<&str> = rows.iter().map(|row| row[at].as_str()).collect();
            print(&format!("{}\n", line.join(separator.unwrap_or(" "))));
        }
        return;
    }
    let width = |(at, column): (usize, &&Column)| {
        rows.iter().map(|row| row[at].len()).max().unwrap_or(0).max(column.width)
    };
    let widths: Vec<usize> = fields.iter().enumerate().map(width).collect();
    for (at, row) in rows.iter().enumerate() {
        // Headings are left-aligned, above numbers, too.
        let is_heading = at == 0 && has_headings;
        let cells: Vec<String> = row
            .iter()
            .zip(fields)
            .zip(&widths)
            .map(|((cell, column), width)| {
                match (separator.is_none() && !prefixed, column.is_number && !is_heading) {
                    (false, _) => cell.clone(),
                    (true, true) => format!("{cell:>width$}"),
                    (true, false) => format!("{cell:<width$}"),
                }
            })
            .collect();
        print(&format!("{}\n", cells.join(separator.unwrap_or(" "))));
    }
}
