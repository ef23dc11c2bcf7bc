//! `top -b`: a page of text for each interval, for scripts.

use super::columns::columns;
use super::model::Model;

/// Line width with room for every column.
const WIDTH: usize = 200;

/// Returns a page: time and numbers of devices and processes, a header, a line for each device, an empty
/// line.
pub(super) fn page(model: &Model) -> String {
    let mut text = format!(
        "blockyard top - {}, {} devices, {} processes, {} not answering\n",
        model.clock,
        model.rows.len(),
        model.processes,
        model.silent
    );
    let (columns, _, _) = columns(WIDTH);
    let names = model.rows.iter().map(|row| row.info.name.chars().count());
    let width = names.max().unwrap_or(0).max(12);
    text += &format!("{:<width$}", "DEVICE");
    for column in &columns {
        // The stack is last and is not cut.
        text +=
            &format!("{:>width$}", if column.left { " STACK" } else { column.title }, width = column.width);
    }
    text.push('\n');
    for row in &model.rows {
        text += &format!("{:<width$}", row.info.name);
        for column in &columns {
            let cell = (column.cell)(row);
            let blank = if column.left { " " } else { "" };
            text += &format!("{blank}{:>width$}", cell.text, width = column.width);
        }
        if row.silent {
            text += "  (does not answer: last known values)";
        }
        text.push('\n');
    }
    text.push('\n');
    text
}
