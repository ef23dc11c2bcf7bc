//! Options that all measurements share.

use std::process::ExitCode;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Runs one measurement from its command line to its exit status: 2 for unknown options.
pub(crate) fn command<O>(
    name: &str,
    usage: &str,
    arguments: &[String],
    parse: impl FnOnce(&[String]) -> Result<O>,
    run: impl FnOnce(&O) -> Result<()>,
) -> ExitCode {
    if arguments.iter().any(|word| word == "--help") {
        print!("{usage}");
        return ExitCode::SUCCESS;
    }
    let options = match parse(arguments) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("bench {name}: {}\n\n{usage}", error.0);
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench {name}: {}", error.0);
            ExitCode::FAILURE
        }
    }
}

/// Parses the value of a numeric option.
pub(crate) fn number<T: FromStr>(name: &str, value: &str) -> Result<T> {
    value.parse().map_err(|_| Error(format!("{name} {value}: not a number")))
}

/// Parses a number that is at least 1.
pub(crate) fn count(name: &str, value: &str) -> Result<u32> {
    let number = value.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| Error(format!("{name} {value}: a number from 1")))
}

/// Returns every entry of `all` whose name begins with one of the comma-separated `words`, or equals one that
/// begins with `=`.
pub(crate) fn chosen<T: Copy>(
    name: &str,
    words: &str,
    all: &[T],
    name_of: impl Fn(&T) -> &'static str,
) -> Result<Vec<T>> {
    let is_meant = |word: &str, one: &T| match word.strip_prefix('=') {
        Some(word) => name_of(one) == word,
        None => name_of(one).starts_with(word),
    };
    for word in words.split(',') {
        if word.is_empty() || !all.iter().any(|one| is_meant(word, one)) {
            let known: Vec<&str> = all.iter().map(&name_of).collect();
            return Err(Error(format!("{name} {word}: none of {}", known.join(" "))));
        }
    }
    let is_chosen = |one: &&T| words.split(',').any(|word| is_meant(word, one));
    Ok(all.iter().filter(is_chosen).copied().collect())
}

/// Calls `set` with each option of a command line whose options all have a value.
pub(crate) fn each(arguments: &[String], mut set: impl FnMut(&str, &str) -> Result<()>) -> Result<()> {
    let mut arguments = arguments.iter();
    while let Some(word) = arguments.next() {
        let value = arguments.next().ok_or_else(|| Error(format!("{word} needs a value")))?;
        set(word, value)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [&str; 3] = ["null", "null-direct", "ram"];

    #[test]
    fn entries_are_selected_by_prefix() {
        let begin = |words| chosen("--jobs", words, &ALL, |name| name);
        assert_eq!(begin("null").expect("known"), ["null", "null-direct"]);
        assert_eq!(begin("r,null-").expect("known"), ["null-direct", "ram"]);
        assert_eq!(begin("=null,ram").expect("known"), ["null", "ram"]);
        for words in ["", "null,", "disk", "=nul", "="] {
            assert!(begin(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn a_count_is_at_least_1() {
        assert_eq!(count("--rounds", "3").expect("a number"), 3);
        for value in ["0", "-1", "many"] {
            assert!(count("--rounds", value).is_err(), "{value}");
        }
        let words = ["--rounds".to_owned()];
        assert!(each(&words, |_, _| Ok(())).is_err(), "an option without its value");
    }
}
