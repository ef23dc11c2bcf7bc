//! Items between commas, and `key=value` options among them.

use crate::SpecError;
use std::fmt;
use std::str::FromStr;

/// Splits at single commas; a doubled comma is one that belongs to the item.
pub fn split(text: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c == ',' && rest.next_if_eq(&',').is_none() {
            items.push(String::new());
        } else if let Some(item) = items.last_mut() {
            item.push(c);
        }
    }
    items
}

/// A text with its commas doubled, so that [`split`] leaves it whole.
#[derive(Debug)]
pub struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, piece) in self.0.split(',').enumerate() {
            f.write_str(if i == 0 { "" } else { ",," })?;
            f.write_str(piece)?;
        }
        Ok(())
    }
}

/// The options that follow the first item. They are taken one by one; what is left is unknown.
#[derive(Debug)]
pub struct Options {
    kind: &'static str,
    known: &'static [&'static str],
    given: Vec<(String, Option<String>)>,
}

impl Options {
    /// From the items after the first. `known`: every key of this kind, for messages.
    ///
    /// # Errors
    /// A key is unknown, or given twice.
    pub fn new(
        kind: &'static str,
        known: &'static [&'static str],
        items: impl Iterator<Item = String>,
    ) -> Result<Options, SpecError> {
        let mut given: Vec<(String, Option<String>)> = Vec::new();
        for item in items {
            let (key, value) = match item.split_once('=') {
                Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
                None => (item, None),
            };
            if !known.contains(&key.as_str()) {
                return Err(unknown(kind, known, &key));
            }
            if given.iter().any(|(other, _)| *other == key) {
                return Err(SpecError::new(format!("option {key} is given twice"), "leave one out"));
            }
            given.push((key, value));
        }
        Ok(Options { kind, known, given })
    }

    fn take(&mut self, key: &str) -> Option<(String, Option<String>)> {
        debug_assert!(self.known.contains(&key), "{} does not list {key}", self.kind);
        let at = self.given.iter().position(|(given, _)| given == key)?;
        Some(self.given.swap_remove(at))
    }

    /// An option that was given, not yet taken, and begins with `prefix`.
    pub fn given(&self, prefix: &str) -> Option<&str> {
        self.given.iter().map(|(key, _)| key.as_str()).find(|key| key.starts_with(prefix))
    }

    /// An option that stands alone: whether it is there.
    ///
    /// # Errors
    /// It has a value.
    pub fn flag(&mut self, key: &str) -> Result<bool, SpecError> {
        match self.take(key) {
            None => Ok(false),
            Some((_, None)) => Ok(true),
            Some((_, Some(_))) => {
                Err(SpecError::new(format!("option {key} takes no value"), format!("write {key} alone")))
            }
        }
    }

    /// The text of an option that has a value.
    ///
    /// # Errors
    /// It has none.
    pub fn text(&mut self, key: &str) -> Result<Option<String>, SpecError> {
        match self.take(key) {
            None => Ok(None),
            Some((_, Some(value))) if !value.is_empty() => Ok(Some(value)),
            Some(_) => {
                Err(SpecError::new(format!("option {key} needs a value"), format!("write {key}=VALUE")))
            }
        }
    }

    /// The value of an option that has one, parsed. `example`: a value, for messages.
    ///
    /// # Errors
    /// It has none, or one that does not parse.
    pub fn value<T: FromStr<Err: fmt::Display>>(
        &mut self,
        key: &str,
        example: &str,
    ) -> Result<Option<T>, SpecError> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        text.parse().map(Some).map_err(|why| {
            SpecError::new(format!("option {key}: {why}"), format!("for example {key}={example}"))
        })
    }

    /// One of several words.
    ///
    /// # Errors
    /// It has none, or another.
    pub fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Result<Option<T>, SpecError> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        match choices.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let words: Vec<_> = choices.iter().map(|choice| choice.0).collect();
                Err(SpecError::new(
                    format!("option {key} does not know \"{text}\""),
                    format!("use one of {}", words.join(", ")),
                ))
            }
        }
    }
}

fn unknown(kind: &str, known: &[&str], key: &str) -> SpecError {
    if key.is_empty() {
        return SpecError::new(
            "there is nothing between two commas",
            "write a comma that belongs to a path twice: ,,",
        );
    }
    let fix = match known {
        [] => format!("{kind} has no options"),
        _ => format!("{kind} has {}; a comma within a path is written twice", known.join(", ")),
    };
    let meant = match crate::nearest(key, known.iter().copied()) {
        Some(near) => format!(": did you mean {near}?"),
        None => String::new(),
    };
    SpecError::new(format!("{kind} has no option \"{key}\"{meant}"), fix)
}
