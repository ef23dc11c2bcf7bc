//! Device-mapper's tables: a line for each target, `start length kind arguments…`, in sectors.
//!
//! A text is read as dmsetup reads it: blank lines and lines that begin with `#` are left out, and so is what follows a
//! `#` in the arguments. Arguments are cut as the kernel cuts them: at white space, a backslash taking the next
//! character as it is. Whether the targets make sense together is the loader's matter.

use super::{PathSpec, SpecError};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Characters of a target's name, at most: the kernel's field has 16 bytes with the zero at its end.
const KIND_LEN_MAX: usize = 15;
/// Bytes of a table, at most.
const TABLE_LEN_MAX: usize = 1 << 20;

/// One target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LineSpec {
    /// Its first sector.
    pub start: u64,
    /// How many there are.
    pub len: u64,
    /// What it is.
    pub kind: String,
    /// Its arguments, as they were written.
    pub args: String,
    /// The line of the text, from 1.
    pub line: u32,
}

/// A table.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct TableSpec {
    /// The targets, in the order of the text.
    pub lines: Vec<LineSpec>,
    /// Where relative paths in it begin. Empty: where the process does.
    pub base: PathBuf,
    /// How the paths of its multipath targets are looked after.
    pub paths: PathSpec,
    /// The device is not to be written.
    pub read_only: bool,
    /// What the device is called besides its name; empty: nothing.
    pub uuid: String,
}

impl TableSpec {
    /// Relative paths are taken from there on.
    #[must_use]
    pub fn rooted(mut self, base: &Path) -> TableSpec {
        self.base = base.join(&self.base);
        self
    }

    /// The lines again.
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Every argument of every line.
    pub fn words(&self) -> impl Iterator<Item = String> {
        self.lines.iter().flat_map(LineSpec::words)
    }
}

impl LineSpec {
    /// The arguments one by one, as `dm_split_args` cuts them.
    pub fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut chars = self.args.chars().peekable();
        loop {
            while chars.next_if(|c| c.is_ascii_whitespace()).is_some() {}
            if chars.peek().is_none() {
                return words;
            }
            let mut word = String::new();
            while let Some(c) = chars.next_if(|c| !c.is_ascii_whitespace()) {
                match c {
                    '\\' => word.extend(chars.next()),
                    c => word.push(c),
                }
            }
            words.push(word);
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

/// One line; `None`: there is nothing on it.
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

/// A word as it has to be written in a table.
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
        assert_eq!(table.lines[0].words(), ["/dev/sda", "0"]);
        assert_eq!((table.lines[0].line, table.lines[1].line), (3, 4));
        assert_eq!((table.lines[1].start, table.lines[1].len, table.lines[1].words().len()), (8, 16, 0));
        assert_eq!(table.to_string(), "0 8 linear /dev/sda 0; 8 16 zero");
    }

    #[test]
    fn a_backslash_takes_the_next_character_as_it_is() {
        let table: TableSpec = r"0 8 linear file:a\ b\\c 0".parse().unwrap();
        assert_eq!(table.lines[0].words(), [r"file:a b\c", "0"]);
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
