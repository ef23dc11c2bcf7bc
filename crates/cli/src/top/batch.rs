//! `top -b`: the same as text, a page a look, for scripts.

use super::columns::columns;
use super::model::Model;

/// Wide enough for every column.
const WIDTH: usize = 200;

/// A page: what time it is and how much there is, a header, a line a device, an empty line.
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
        // The stack comes last and may be as long as it is.
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
            text += "  (does not answer: as it was)";
        }
        text.push('\n');
    }
    text.push('\n');
    text
}
