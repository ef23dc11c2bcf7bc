//! Device-mapper's tables: a line for each target, `start length kind arguments…`, in sectors.
//!
//! A text is parsed as dmsetup does it: blank lines, lines that start with `#`, and arguments after a `#` are ignored.
//! Arguments are split as the kernel splits them: at white space, where a backslash escapes the next character. The loader
//! checks whether the targets fit together.

use super::{PathSpec, SpecError};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The longest name of a target: the kernel's field has 16 bytes with the terminating zero.
const KIND_LEN_MAX: usize = 15;
/// The longest table, in bytes.
const TABLE_LEN_MAX: usize = 1 << 20;

/// A line of a table: one target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LineSpec {
    /// The first sector.
    pub start: u64,
    /// The number of sectors.
    pub len: u64,
    /// The name of the target.
    pub kind: String,
    /// The arguments, as the user wrote them.
    pub args: String,
    /// The line of the text, from 1.
    pub line: u32,
}

/// A table.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct TableSpec {
    /// The targets, in the order of the text.
    pub lines: Vec<LineSpec>,
    /// The folder that relative paths start from. Empty: the current directory of the process.
    pub base: PathBuf,
    /// Settings of the path checker, for multipath targets.
    pub paths: PathSpec,
    /// Whether the device is read-only.
    pub read_only: bool,
    /// The UUID of the device; empty: none.
    pub uuid: String,
}

impl TableSpec {
    /// Returns the table with relative paths resolved against `base`.
    #[must_use]
    pub fn rooted(mut self, base: &Path) -> TableSpec {
        self.base = base.join(&self.base);
        self
    }

    /// Formats the table as text.
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Returns all arguments of all lines.
    pub fn arguments(&self) -> impl Iterator<Item = String> {
        self.lines.iter().flat_map(LineSpec::arguments)
    }
}

impl LineSpec {
    /// Returns the arguments, split as the kernel's `dm_split_args` does it.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        let mut chars = self.args.chars().peekable();
        loop {
            while chars.next_if(|c| c.is_ascii_whitespace()).is_some() {}
            if chars.peek().is_none() {
                return arguments;
            }
            let mut word = String::new();
            while let Some(c) = chars.next_if(|c| !c.is_ascii_whitespace()) {
                match c {
                    '\\' => word.extend(chars.next()),
                    c => word.push(c),
                }
            }
            arguments.push(word);
        }
    }
}

impl FromStr for TableSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<TableSpec, SpecError> {
        if text.len() > TABLE_LEN_MAX {
            return Err(SpecError::new(
                format!("a table of {} bytes is too long", text.len()),
                "it may have a MiB",
            ));
        }
        let mut lines = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            lines.extend(read_line(line, number)?);
        }
        if lines.is_empty() {
            return Err(SpecError::new(
                "no targets specified",
                "write START LENGTH KIND ARGUMENTS, in sectors",
            ));
        }
        Ok(TableSpec { lines, ..TableSpec::default() })
    }
}

/// Parses a line; `None`: it is empty.
fn read_line(text: &str, number: u32) -> Result<Option<LineSpec>, SpecError> {
    let text = text.trim_matches(|c: char| c.is_ascii_whitespace());
    if text.is_empty() || text.starts_with('#') {
        return Ok(None);
    }
    let mut rest = text;
    let mut field = || {
        rest = rest.trim_start();
        let (word, after) = rest.split_at(rest.find(|c: char| c.is_ascii_whitespace()).unwrap_or(rest.len()));
        rest = after;
        word
    };
    let (start, len, kind) = (field().parse(), field().parse(), field());
    let (Ok(start), Ok(len), false) = (start, len, kind.is_empty()) else {
        return Err(SpecError::new(
            format!("Invalid format on line {number} of the table"),
            "write START LENGTH KIND ARGUMENTS, in sectors",
        ));
    };
    if kind.len() > KIND_LEN_MAX {
        let why = format!("line {number}: \"{kind}\" is longer than a target's name can be");
        return Err(SpecError::new(why, format!("{KIND_LEN_MAX} characters")));
    }
    let args = rest.split('#').next().unwrap_or_default().trim().to_owned();
    Ok(Some(LineSpec { start, len, kind: kind.to_owned(), args, line: number }))
}

impl fmt::Display for LineSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.start, self.len, self.kind)?;
        if self.args.is_empty() { Ok(()) } else { write!(f, " {}", self.args) }
    }
}

impl fmt::Display for TableSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, line) in self.lines.iter().enumerate() {
            write!(f, "{}{line}", if number > 0 { "; " } else { "" })?;
        }
        Ok(())
    }
}

/// Escapes an argument for a table.
pub fn escaped_word(word: &str) -> String {
    let mut text = String::with_capacity(word.len());
    for c in word.chars() {
        if c.is_ascii_whitespace() || c == '\\' {
            text.push('\\');
        }
        text.push(c);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_dmsetup_reads_them() {
        let text = "\n  # a comment\n0 8 linear /dev/sda 0   # the first\n\t8  16\tzero\n";
        let table: TableSpec = text.parse().unwrap();
        assert_eq!(table.lines.len(), 2);
        assert_eq!(table.lines[0].arguments(), ["/dev/sda", "0"]);
        assert_eq!((table.lines[0].line, table.lines[1].line), (3, 4));
        assert_eq!((table.lines[1].start, table.lines[1].len, table.lines[1].arguments().len()), (8, 16, 0));
        assert_eq!(table.to_string(), "0 8 linear /dev/sda 0; 8 16 zero");
    }

    #[test]
    fn a_backslash_takes_the_next_character_as_it_is() {
        let table: TableSpec = r"0 8 linear file:a\ b\\c 0".parse().unwrap();
        assert_eq!(table.lines[0].arguments(), [r"file:a b\c", "0"]);
        assert_eq!(escaped_word(r"file:a b\c"), r"file:a\ b\\c");
    }

    #[test]
    fn what_is_no_line_is_named_by_its_number() {
        for text in ["0 8", "0 x zero", "-1 8 zero", "linear 0 8", "0 99999999999999999999 zero"] {
            let error = format!("# first\n{text}").parse::<TableSpec>().unwrap_err();
            assert_eq!(error.why, "Invalid format on line 2 of the table", "{text}");
        }
        assert!("".parse::<TableSpec>().unwrap_err().why.starts_with("no targets"));
        assert!("0 8 averyverylongname".parse::<TableSpec>().unwrap_err().why.contains("longer"));
    }
}
