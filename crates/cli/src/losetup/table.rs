//! losetup's output: columns as a table, raw, or as JSON, and the old format with one line for each device.

use super::Refusal;
use super::rows::Row;
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use unicode_width::UnicodeWidthStr;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Style {
    Table,
    Raw,
    Json,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Column {
    Name,
    AutoClear,
    BackFile,
    BackIno,
    BackMajMin,
    BackMaj,
    BackMin,
    MajMin,
    Maj,
    Min,
    Offset,
    PartScan,
    Reference,
    ReadOnly,
    SizeLimit,
    Dio,
    LogSec,
}

/// The value of a cell.
enum Cell {
    Text(OsString),
    Number(u64),
    Flag(bool),
    Empty,
}

impl Column {
    /// The default columns.
    pub(super) const DEFAULT: [Column; 8] = [
        Column::Name,
        Column::SizeLimit,
        Column::Offset,
        Column::AutoClear,
        Column::ReadOnly,
        Column::BackFile,
        Column::Dio,
        Column::LogSec,
    ];

    /// All columns, in the order of `--output-all`.
    pub(super) const ALL: [Column; 17] = [
        Column::Name,
        Column::AutoClear,
        Column::BackFile,
        Column::BackIno,
        Column::BackMajMin,
        Column::BackMaj,
        Column::BackMin,
        Column::MajMin,
        Column::Maj,
        Column::Min,
        Column::Offset,
        Column::PartScan,
        Column::Reference,
        Column::ReadOnly,
        Column::SizeLimit,
        Column::Dio,
        Column::LogSec,
    ];

    /// Returns the column's name and description.
    pub(super) fn named(self) -> (&'static str, &'static str) {
        match self {
            Column::Name => ("NAME", "loop device name"),
            Column::AutoClear => ("AUTOCLEAR", "autoclear flag set"),
            Column::BackFile => ("BACK-FILE", "device backing file"),
            Column::BackIno => ("BACK-INO", "backing file inode number"),
            Column::BackMajMin => ("BACK-MAJ:MIN", "backing file major:minor device number"),
            Column::BackMaj => ("BACK-MAJ", "backing file major device number"),
            Column::BackMin => ("BACK-MIN", "backing file minor device number"),
            Column::MajMin => ("MAJ:MIN", "loop device major:minor number"),
            Column::Maj => ("MAJ", "loop device major number"),
            Column::Min => ("MIN", "loop device minor number"),
            Column::Offset => ("OFFSET", "offset from the beginning"),
            Column::PartScan => ("PARTSCAN", "partscan flag set"),
            Column::Reference => ("REF", "loop device reference string"),
            Column::ReadOnly => ("RO", "read-only device"),
            Column::SizeLimit => ("SIZELIMIT", "size limit of the file in bytes"),
            Column::Dio => ("DIO", "access backing file with direct-io"),
            Column::LogSec => ("LOG-SEC", "logical sector size in bytes"),
        }
    }

    fn is_left_aligned(self) -> bool {
        let left = [Column::Name, Column::BackFile, Column::BackMajMin, Column::MajMin, Column::Reference];
        left.contains(&self)
    }

    /// Parses a list of column names in any case: `NAME,RO`, or `+RO` to extend the default columns.
    pub(super) fn list(names: &str) -> Result<Vec<Column>, Refusal> {
        let (mut columns, names) = match names.strip_prefix('+') {
            Some(more) => (Column::DEFAULT.to_vec(), more),
            None => (Vec::new(), names),
        };
        // As in losetup, an empty name fails without a message.
        if names.is_empty() {
            return Err(Refusal::plain(String::new()));
        }
        let mut rest = names;
        while !rest.is_empty() {
            let (name, after) = match rest.split_once(',') {
                // A comma at the end belongs to the last name, which then is unknown.
                Some((name, after)) if !after.is_empty() || name.is_empty() => (name, after),
                _ => (rest, ""),
            };
            if name.is_empty() {
                return Err(Refusal::plain(String::new()));
            }
            let known = Column::ALL.into_iter().find(|column| column.named().0.eq_ignore_ascii_case(name));
            // As in losetup, the message has the rest of the list.
            columns.push(known.ok_or_else(|| Refusal::plain(format!("unknown column: {rest}")))?);
            rest = after;
        }
        Ok(columns)
    }

    fn cell(self, row: &Row) -> Cell {
        let number = |value: Option<u64>| value.map_or(Cell::Empty, Cell::Number);
        let text = |value: Option<String>| value.map_or(Cell::Empty, |text| Cell::Text(text.into()));
        let file = || row.back_file.clone().map_or(Cell::Empty, Cell::Text);
        // The widths are losetup's.
        match self {
            Column::Name => Cell::Text(row.name.clone().into()),
            Column::AutoClear => Cell::Flag(row.autoclear),
            Column::BackFile => file(),
            Column::BackIno => number(row.back.map(|back| back.inode)),
            Column::BackMajMin => {
                text(row.back.map(|back| format!("{:8}:{:<3}", back.device.0, back.device.1)))
            }
            Column::BackMaj => number(row.back.map(|back| back.device.0.into())),
            Column::BackMin => number(row.back.map(|back| back.device.1.into())),
            Column::MajMin => text(row.device.map(|(major, minor)| format!("{major:3}:{minor:<3}"))),
            Column::Maj => number(row.device.map(|device| device.0.into())),
            Column::Min => number(row.device.map(|device| device.1.into())),
            Column::Offset => number(row.offset),
            Column::PartScan => Cell::Flag(row.partscan),
            Column::Reference => file(),
            Column::ReadOnly => Cell::Flag(row.read_only),
            Column::SizeLimit => number(row.sizelimit),
            Column::Dio => Cell::Flag(row.dio),
            Column::LogSec => Cell::Number(row.block.into()),
        }
    }
}

impl Cell {
    fn text(self) -> OsString {
        match self {
            Cell::Text(text) => text,
            Cell::Number(number) => number.to_string().into(),
            Cell::Flag(flag) => u8::from(flag).to_string().into(),
            Cell::Empty => OsString::new(),
        }
    }

    fn json(self) -> Value {
        match self {
            // JSON cannot hold other bytes.
            Cell::Text(text) => text.to_string_lossy().into(),
            Cell::Number(number) => number.into(),
            Cell::Flag(flag) => flag.into(),
            Cell::Empty => Value::Null,
        }
    }
}

/// Formats rows. Returns an empty text without rows, except in JSON. `utf8`: the locale is UTF-8.
pub(super) fn listing(rows: &[Row], columns: &[Column], style: Style, headings: bool, utf8: bool) -> String {
    if style == Style::Json {
        return json(rows, columns);
    }
    if rows.is_empty() {
        return String::new();
    }
    let written = |cell: OsString| match style {
        Style::Raw => raw(&cell),
        _ => printable(&cell, utf8),
    };
    let head = columns.iter().map(|column| column.named().0.to_owned()).collect();
    let cells =
        rows.iter().map(|row| columns.iter().map(|column| written(column.cell(row).text())).collect());
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(cells).collect();
    // Columns are at least as wide as their headings, even if those are not shown.
    let width = |column: usize| lines.iter().map(|line| line[column].width()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let shown = &lines[usize::from(!headings)..];
    match style {
        Style::Raw => shown.iter().map(|cells| cells.join(" ") + "\n").collect(),
        _ => table(shown, columns, &widths),
    }
}

/// Escapes a cell for programs: one word of visible ASCII.
fn raw(cell: &OsStr) -> String {
    let mut text = String::new();
    for &byte in cell.as_bytes() {
        match byte {
            b'\\' => text.push_str("\\x5c"),
            byte if byte.is_ascii_graphic() => text.push(byte.into()),
            byte => hexadecimal(&mut text, byte),
        }
    }
    text
}

/// Escapes a cell for terminals: control characters and characters outside the locale are written in
/// hexadecimal, as is the backslash of text that looks like such an escape.
fn printable(cell: &OsStr, utf8: bool) -> String {
    let mut text = String::new();
    for chunk in cell.as_bytes().utf8_chunks() {
        for (at, c) in chunk.valid().char_indices() {
            let is_shown = !c.is_control() && (utf8 || c.is_ascii());
            match is_shown && !chunk.valid()[at..].starts_with("\\x") {
                true => text.push(c),
                false => {
                    c.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| hexadecimal(&mut text, byte));
                }
            }
        }
        chunk.invalid().iter().for_each(|&byte| hexadecimal(&mut text, byte));
    }
    text
}

fn hexadecimal(text: &mut String, byte: u8) {
    let _ = write!(text, "\\x{byte:02x}");
}

fn table(lines: &[Vec<String>], columns: &[Column], widths: &[usize]) -> String {
    let mut text = String::new();
    for line in lines {
        for (number, (cell, (column, &width))) in line.iter().zip(columns.iter().zip(widths)).enumerate() {
            let last = number + 1 == columns.len();
            // Characters may be two columns wide.
            let gap = " ".repeat(width.saturating_sub(cell.width()));
            let _ = match (column.is_left_aligned(), last) {
                // The last column is not padded.
                (true, true) => write!(text, "{cell}"),
                (true, false) => write!(text, "{cell}{gap} "),
                (false, true) => write!(text, "{gap}{cell}"),
                (false, false) => write!(text, "{gap}{cell} "),
            };
        }
        text.push('\n');
    }
    text
}

fn json(rows: &[Row], columns: &[Column]) -> String {
    let mut text = String::from("{\n   \"loopdevices\": [");
    for (number, row) in rows.iter().enumerate() {
        text.push_str(if number == 0 { "\n      {" } else { ",{" });
        for (number, column) in columns.iter().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            let name = column.named().0.to_ascii_lowercase();
            let _ = write!(text, "{comma}\n         \"{name}\": {}", column.cell(row).json());
        }
        text.push_str("\n      }");
    }
    if rows.is_empty() {
        text.push('\n');
    }
    text.push_str("\n   ]\n}\n");
    text
}

/// Formats a device in the old format of `losetup -a`, with the file's name unescaped.
pub(super) fn old_format(row: &Row) -> Vec<u8> {
    let mut text = format!("{}: ", row.name).into_bytes();
    let file = row.back_file.as_deref().unwrap_or_default();
    text.extend(match row.back {
        Some(back) => format!("[{:04}]:{} (", back.number(), back.inode).into_bytes(),
        None => b"[]: (".to_vec(),
    });
    text.extend(file.as_bytes());
    text.push(b')');
    if let Some(offset) = row.offset.filter(|&offset| offset > 0) {
        text.extend(format!(", offset {offset}").bytes());
    }
    if let Some(limit) = row.sizelimit.filter(|&limit| limit > 0) {
        text.extend(format!(", sizelimit {limit}").bytes());
    }
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losetup::rows::BackingFile;
    use std::os::unix::ffi::OsStringExt;

    fn rows() -> Vec<Row> {
        let row = Row {
            name: "/dev/loop0".to_owned(),
            back_file: Some("/tmp/b c.img".into()),
            back: Some(BackingFile { device: (254, 0), inode: 77 }),
            device: Some((7, 0)),
            offset: Some(4096),
            sizelimit: Some(0),
            autoclear: false,
            partscan: true,
            read_only: true,
            dio: false,
            block: 512,
            ours: None,
        };
        let unbound = Row {
            name: "/dev/loop12".to_owned(),
            back_file: None,
            back: None,
            offset: None,
            sizelimit: None,
            partscan: false,
            read_only: false,
            ..row.clone()
        };
        vec![row, unbound]
    }

    #[test]
    fn tables_have_losetups_columns_and_spacing() {
        assert_eq!(
            listing(&rows(), &Column::DEFAULT, Style::Table, true, true),
            "NAME        SIZELIMIT OFFSET AUTOCLEAR RO BACK-FILE    DIO LOG-SEC\n\
             /dev/loop0          0   4096         0  1 /tmp/b c.img   0     512\n\
             /dev/loop12                          0  0                0     512\n"
        );
        assert_eq!(
            listing(&rows()[..1], &Column::list("+maj:min").unwrap(), Style::Raw, false, true),
            "/dev/loop0 0 4096 0 1 /tmp/b\\x20c.img 0 512 \\x20\\x207:0\\x20\\x20\n"
        );
        assert_eq!(listing(&[], &Column::DEFAULT, Style::Table, true, true), "");
    }

    #[test]
    fn json_has_losetups_types_and_indentation() {
        let columns = [Column::Name, Column::BackMajMin, Column::Offset, Column::ReadOnly];
        assert_eq!(
            listing(&rows(), &columns, Style::Json, true, true),
            r#"{
   "loopdevices": [
      {
         "name": "/dev/loop0",
         "back-maj:min": "     254:0  ",
         "offset": 4096,
         "ro": true
      },{
         "name": "/dev/loop12",
         "back-maj:min": null,
         "offset": null,
         "ro": false
      }
   ]
}
"#
        );
        assert_eq!(listing(&[], &columns, Style::Json, true, true), "{\n   \"loopdevices\": [\n\n   ]\n}\n");
    }

    #[test]
    fn the_old_format_shows_offset_and_limit_if_set() {
        let mut row = rows().remove(0);
        assert_eq!(old_format(&row), b"/dev/loop0: [65024]:77 (/tmp/b c.img), offset 4096\n");
        (row.offset, row.sizelimit) = (Some(0), Some(1024));
        assert_eq!(old_format(&row), b"/dev/loop0: [65024]:77 (/tmp/b c.img), sizelimit 1024\n");
    }

    #[test]
    fn file_names_are_escaped_for_terminals() {
        let shown = |name: &[u8], style, utf8| {
            let row = Row { back_file: Some(OsString::from_vec(name.to_vec())), ..rows().remove(0) };
            listing(&[row], &[Column::BackFile, Column::ReadOnly], style, false, utf8)
        };
        assert_eq!(shown(b"/a\x1b[31m\nb\x7f", Style::Table, true), "/a\\x1b[31m\\x0ab\\x7f  1\n");
        assert_eq!(shown("/\u{85}".as_bytes(), Style::Table, true), "/\\xc2\\x85  1\n");
        assert_eq!(shown("/漢 ü.img".as_bytes(), Style::Table, true), "/漢 ü.img  1\n");
        assert_eq!(shown("/ü".as_bytes(), Style::Table, false), "/\\xc3\\xbc  1\n");
        assert_eq!(shown(b"/\xe9\\x20", Style::Table, true), "/\\xe9\\x5cx20  1\n");
        assert_eq!(shown("/ü b\\".as_bytes(), Style::Raw, true), "/\\xc3\\xbc\\x20b\\x5c 1\n");
    }

    #[test]
    fn wide_characters_are_padded_by_their_width() {
        let wide = Row { back_file: Some("/漢字".into()), ..rows().remove(0) };
        let narrow = Row { back_file: Some("/abcdef".into()), ..rows().remove(0) };
        let columns = [Column::BackFile, Column::ReadOnly];
        assert_eq!(
            listing(&[wide, narrow], &columns, Style::Table, true, true),
            "BACK-FILE RO\n/漢字      1\n/abcdef    1\n"
        );
    }
}
