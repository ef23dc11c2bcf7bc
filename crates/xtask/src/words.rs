//! Wording of comments and docs pages: a sentence must not open with a pronoun in place of the thing that it
//! is about.
//!
//! The rule applies to every tracked .rs and .md file. A comment of several lines is one text; a sentence
//! starts with it, after a blank line, a list marker, or a full stop.
//!
//! Code blocks of docs pages are skipped; comments after code on one line are not checked.

use crate::tidy::{File, Violation};

/// Openings that name nothing.
const OPENINGS: &[&str] = &["The same", "Who", "Whoever", "What is said", "That of", "Those that"];

/// Reports sentences of comments and docs pages with such an opening.
pub(crate) fn check(file: &File, found: &mut Vec<Violation>) {
    let is_rust = file.path.ends_with(".rs");
    if !(is_rust || file.path.ends_with(".md")) {
        return;
    }
    // Whether the next word starts a sentence, and whether the line is in a code block.
    let (mut starts, mut is_code) = (true, false);
    for (index, line) in file.text.lines().enumerate() {
        let text = match is_rust {
            true => comment(line),
            false => Some(line.trim().trim_start_matches(['#', '>', ' '])),
        };
        let text = text.unwrap_or_default();
        is_code ^= text.starts_with("```");
        if text.is_empty() || is_code {
            starts = true;
            continue;
        }
        let (item, is_item) = without_marker(text);
        if let Some(opening) = opening(item, starts || is_item) {
            let what = format!("a sentence that opens with \"{opening}\": name the thing that it is about");
            found.push(Violation::new(&file.path, index + 1, what));
        }
        starts = ends_sentence(text);
    }
}

/// The text of a line that is a comment; `None` for any other line.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']).trim())
}

/// A line without its list marker, and whether it had one.
fn without_marker(text: &str) -> (&str, bool) {
    let number = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let rest = match number.len() < text.len() {
        true => number.strip_prefix(". "),
        false => text.strip_prefix("- ").or_else(|| text.strip_prefix("* ")),
    };
    rest.map_or((text, false), |rest| (rest, true))
}

/// The first bad opening of a sentence in a line; `starts`: the line starts with a sentence.
fn opening(text: &str, starts: bool) -> Option<&'static str> {
    let breaks = text.match_indices(". ").map(|(at, _)| &text[at + 2..]);
    let mut sentences = starts.then_some(text).into_iter().chain(breaks);
    sentences.find_map(|sentence| OPENINGS.iter().copied().find(|opening| opens(sentence, opening)))
}

fn opens(sentence: &str, opening: &str) -> bool {
    let rest = sentence.trim_start_matches(['*', '_', '"', '(']).strip_prefix(opening);
    rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
}

fn ends_sentence(text: &str) -> bool {
    text.trim_end_matches(['*', '_', '`', '"', ')']).ends_with(['.', '?', '!'])
}
