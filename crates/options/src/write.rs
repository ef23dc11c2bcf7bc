//! Options as a driver writes them back.

use std::fmt;

/// `,WORD` if it is so.
///
/// # Errors
/// Those of the writer.
pub fn write_flag(f: &mut fmt::Formatter<'_>, is: bool, word: &str) -> fmt::Result {
    if is { write!(f, ",{word}") } else { Ok(()) }
}

/// `,KEY=WORD` for one of several choices, unless it is the default.
///
/// # Errors
/// Those of the writer.
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
