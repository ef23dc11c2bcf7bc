//! The words of a line, read as the kernel reads them (`dm_shift_arg`, `dm_read_arg`, `dm_read_arg_group`).

use super::TargetError;

/// The words that are still to be read.
#[derive(Clone, Copy, Debug)]
pub struct Words<'a> {
    rest: &'a [&'a str],
}

impl<'a> Words<'a> {
    /// All of them.
    pub fn new(words: &'a [&'a str]) -> Words<'a> {
        Words { rest: words }
    }

    /// The next one.
    pub fn take_next(&mut self) -> Option<&'a str> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    /// A number within bounds.
    ///
    /// # Errors
    /// `error`, when it is none, or too small or large.
    pub fn number(&mut self, min: u32, max: u32, error: &'static str) -> Result<u32, TargetError> {
        let number = self.take_next().and_then(number).filter(|n| (min..=max).contains(n));
        number.ok_or(TargetError::new(error))
    }

    /// A count of words that must follow.
    ///
    /// # Errors
    /// `error`, when it is none, too large, or more than there are.
    pub fn count(&mut self, max: u32, error: &'static str) -> Result<usize, TargetError> {
        let count = self.number(0, max, error)? as usize;
        if count > self.rest.len() { Err(TargetError::new(error)) } else { Ok(count) }
    }

    /// The next `count`, which there must be.
    pub fn take(&mut self, count: usize) -> Words<'a> {
        let (taken, rest) = self.rest.split_at(count);
        self.rest = rest;
        Words { rest: taken }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rest.len()
    }

    /// None is left.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

/// As `sscanf("%u%c")` takes a word that is nothing but a number: digits alone, in the kernel.
pub fn number(word: &str) -> Option<u32> {
    if word.bytes().all(|byte| byte.is_ascii_digit()) { word.parse().ok() } else { None }
}

/// As `sscanf("%llu%c")` takes one of 64 bits: sectors, mostly.
pub fn long_number(word: &str) -> Option<u64> {
    if word.bytes().all(|byte| byte.is_ascii_digit()) { word.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_sscanf_reads_them() {
        assert_eq!((number("7"), number("007")), (Some(7), Some(7)));
        for word in ["", "+", "+7", "7x", " 7", "-1", "4294967296", "0x10"] {
            assert_eq!(number(word), None, "{word:?}");
        }
        assert_eq!(long_number("18446744073709551615"), Some(u64::MAX));
        assert_eq!(long_number("18446744073709551616"), None);
    }

    #[test]
    fn a_count_of_more_words_than_there_are_is_refused() {
        let mut words = Words::new(&["3", "a", "b"]);
        assert_eq!(words.count(8, "no").unwrap_err().text(), "no");
    }
}
