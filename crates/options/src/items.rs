//! Comma-separated items and the `key=value` options among them.

use crate::{Key, SpecError};
use std::fmt;
use std::str::FromStr;

/// Splits a text at single commas. A doubled comma stands for one comma within an item.
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

/// Formats a text with its commas doubled, so that [`split`] returns it as one item.
#[derive(Debug)]
pub struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, part) in self.0.split(',').enumerate() {
            f.write_str(if i == 0 { "" } else { ",," })?;
            f.write_str(part)?;
        }
        Ok(())
    }
}

/// The options of a description. A driver takes them one by one, by key.
#[derive(Debug)]
pub struct Options {
    kind: &'static str,
    known: Vec<&'static str>,
    given: Vec<(String, Option<String>)>,
}

impl Options {
    /// Parses items as options of a kind. `known` lists its options, as [`OptionRow`](crate::OptionRow)s or keys.
    ///
    /// # Errors
    /// A key is unknown or given twice.
    pub fn new<K: Key>(
        kind: &'static str,
        known: &[K],
        items: impl Iterator<Item = String>,
    ) -> Result<Options, SpecError> {
        let known: Vec<&'static str> = known.iter().map(Key::key).collect();
        let mut given: Vec<(String, Option<String>)> = Vec::new();
        for item in items {
            let (key, value) = match item.split_once('=') {
                Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
                None => (item, None),
            };
            if !known.iter().any(|known| *known == key) {
                return Err(unknown(kind, &known, &key));
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

    /// Returns the first option with that prefix that was given and not taken yet.
    pub fn given(&self, prefix: &str) -> Option<&str> {
        self.given.iter().map(|(key, _)| key.as_str()).find(|key| key.starts_with(prefix))
    }

    /// Takes an option without a value. Returns whether it was given.
    ///
    /// # Errors
    /// The option was given with a value.
    pub fn flag(&mut self, key: &str) -> Result<bool, SpecError> {
        match self.take(key) {
            None => Ok(false),
            Some((_, None)) => Ok(true),
            Some((_, Some(_))) => {
                Err(SpecError::new(format!("option {key} takes no value"), format!("write {key} alone")))
            }
        }
    }

    /// Takes an option with a value. Returns the value as text; `None` if the option was not given.
    ///
    /// # Errors
    /// The option was given without a value.
    pub fn text(&mut self, key: &str) -> Result<Option<String>, SpecError> {
        match self.take(key) {
            None => Ok(None),
            Some((_, Some(value))) if !value.is_empty() => Ok(Some(value)),
            Some(_) => {
                Err(SpecError::new(format!("option {key} needs a value"), format!("write {key}=VALUE")))
            }
        }
    }

    /// Takes an option with a value and parses it. The message of an error shows `example` as a valid value.
    ///
    /// # Errors
    /// The option was given without a value, or with one that does not parse.
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

    /// Takes an option whose value is one of several words.
    ///
    /// # Errors
    /// The option was given without a value, or with another word.
    pub fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Result<Option<T>, SpecError> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        match choices.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let words: Vec<_> = choices.iter().map(|choice| choice.0).collect();
                Err(SpecError::new(
                    format!("option {key} does not know \"{text}\""),
                    format!(
                        "{}use one of {}",
                        crate::did_you_mean(&text, words.iter().copied()),
                        words.join(", ")
                    ),
                ))
            }
        }
    }
}

fn unknown(kind: &str, known: &[&str], key: &str) -> SpecError {
    if key.is_empty() {
        return SpecError::new(
            "an item between two commas is empty",
            "write a comma that belongs to a path twice: ,,",
        );
    }
    let fix = match known {
        [] => format!("{kind} has no options"),
        _ => format!("{kind} has {}; a comma within a path is written twice", known.join(", ")),
    };
    let meant = match crate::nearest::nearest(key, known.iter().copied()) {
        Some(near) => format!(": did you mean {near}?"),
        None => String::new(),
    };
    SpecError::new(format!("{kind} has no option \"{key}\"{meant}"), fix)
}
