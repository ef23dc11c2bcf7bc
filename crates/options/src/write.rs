//! Formatting of options.

use std::fmt;

/// Writes `,WORD` if the flag is set.
///
/// # Errors
/// Errors of the formatter.
pub fn write_flag(f: &mut fmt::Formatter<'_>, is: bool, word: &str) -> fmt::Result {
    if is { write!(f, ",{word}") } else { Ok(()) }
}

/// Writes `,KEY=WORD` for a choice that is not the default.
///
/// # Errors
/// Errors of the formatter.
pub fn write_choice<T: Copy + PartialEq + Default>(
    f: &mut fmt::Formatter<'_>,
    key: &str,
    value: T,
    choices: &[(&str, T)],
) -> fmt::Result {
    match choices.iter().find(|choice| choice.1 == value && value != T::default()) {
        Some((word, _)) => write!(f, ",{key}={word}"),
        None => Ok(()),
    }
}
