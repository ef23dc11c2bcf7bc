//! Argument parsing with the kernel's rules (`dm_shift_arg`, `dm_read_arg`, `dm_read_arg_group`).

use super::TargetError;

/// The arguments of a table line that are not parsed yet.
#[derive(Clone, Copy, Debug)]
pub struct Args<'a> {
    rest: &'a [&'a str],
}

impl<'a> Args<'a> {
    /// Creates a parser at the first of `args`.
    pub fn new(args: &'a [&'a str]) -> Args<'a> {
        Args { rest: args }
    }

    /// Takes the next argument (`dm_shift_arg`).
    pub fn take_next(&mut self) -> Option<&'a str> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    /// Takes a number within bounds (`dm_read_arg`).
    ///
    /// # Errors
    /// `error` if the argument is missing, not a number, or out of bounds.
    pub fn number(&mut self, min: u32, max: u32, error: &'static str) -> Result<u32, TargetError> {
        let number = self.take_next().and_then(parse_u32).filter(|n| (min..=max).contains(n));
        number.ok_or(TargetError::new(error))
    }

    /// Takes the number of arguments of a group that follows (`dm_read_arg_group`).
    ///
    /// # Errors
    /// `error` if the argument is not a number, is more than `max`, or is more than the arguments that are
    /// left.
    pub fn count(&mut self, max: u32, error: &'static str) -> Result<usize, TargetError> {
        let count = self.number(0, max, error)? as usize;
        if count > self.rest.len() { Err(TargetError::new(error)) } else { Ok(count) }
    }

    /// Takes the next `count` arguments.
    ///
    /// # Panics
    /// If fewer arguments are left.
    pub fn take(&mut self, count: usize) -> Args<'a> {
        let (taken, rest) = self.rest.split_at(count);
        self.rest = rest;
        Args { rest: taken }
    }

    /// Returns the number of arguments that are left.
    pub fn len(&self) -> usize {
        self.rest.len()
    }

    /// Returns whether no argument is left.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

/// Parses an argument that consists of decimal digits only, as the kernel's `sscanf("%u%c")` does.
pub fn parse_u32(word: &str) -> Option<u32> {
    if word.bytes().all(|byte| byte.is_ascii_digit()) { word.parse().ok() } else { None }
}

/// Parses an argument of 64 bits, usually sectors, as the kernel's `sscanf("%llu%c")` does.
pub fn parse_u64(word: &str) -> Option<u64> {
    if word.bytes().all(|byte| byte.is_ascii_digit()) { word.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_parsed_as_the_kernels_sscanf_does() {
        assert_eq!((parse_u32("7"), parse_u32("007")), (Some(7), Some(7)));
        for word in ["", "+", "+7", "7x", " 7", "-1", "4294967296", "0x10"] {
            assert_eq!(parse_u32(word), None, "{word:?}");
        }
        assert_eq!(parse_u64("18446744073709551615"), Some(u64::MAX));
        assert_eq!(parse_u64("18446744073709551616"), None);
    }

    #[test]
    fn a_count_of_more_arguments_than_are_left_is_refused() {
        let mut args = Args::new(&["3", "a", "b"]);
        assert_eq!(args.count(8, "no").unwrap_err().text(), "no");
    }
}
