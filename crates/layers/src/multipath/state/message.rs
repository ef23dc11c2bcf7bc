//! The messages of `dmsetup message`.

use super::super::failure::PathFailure;
use super::Multipath;
use crate::dm::MessageError;
use std::sync::atomic::Ordering::{Acquire, Release};

impl Multipath {
    /// Handles a message of `dmsetup message`. `find` returns the paths, over all groups, that an argument
    /// names: all paths over that device.
    ///
    /// # Errors
    /// [`MessageError`]; nothing has changed.
    pub fn message(&self, arguments: &[&str], find: impl Fn(&str) -> Vec<usize>) -> Result<(), MessageError> {
        if self.suspended.load(Acquire) != 0 {
            return Err(MessageError::Busy);
        }
        let lower: Vec<String> = arguments.iter().map(|word| word.to_ascii_lowercase()).collect();
        let group = |word: &str| {
            let number: usize =
                word.parse().ok().filter(|_| !word.starts_with('+')).ok_or(MessageError::Invalid)?;
            if (1..=self.groups.len()).contains(&number) {
                Ok(number - 1)
            } else {
                Err(MessageError::Invalid)
            }
        };
        let named = |word: &str| {
            let paths = find(word);
            if paths.is_empty() { Err(unknown(word)) } else { Ok(paths) }
        };
        match (lower.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), arguments) {
            (["queue_if_no_path"], _) => self.set_queue_if_no_path(true),
            (["fail_if_no_path"], _) => self.set_queue_if_no_path(false),
            (["disable_group", _], [_, number]) => self.bypass(group(number)?, true),
            (["enable_group", _], [_, number]) => self.bypass(group(number)?, false),
            (["switch_group", _], [_, number]) => self.switch_group(group(number)?),
            (["fail_path", _], [_, path]) => {
                for path in named(path)? {
                    self.paths[path].failed_by_message.store(true, Release);
                    self.fail_path_for(path, PathFailure::Message);
                }
            }
            (["reinstate_path", _], [_, path]) => {
                named(path)?.into_iter().for_each(|path| _ = self.reinstate_path(path));
            }
            _ => return Err(MessageError::Invalid),
        }
        Ok(())
    }
}

/// Returns the error of a message about a path that the device does not have: `EINVAL` for a device number,
/// `ENOENT` for any other name.
fn unknown(path: &str) -> MessageError {
    let is_number = |half: &str| !half.is_empty() && half.bytes().all(|byte| byte.is_ascii_digit());
    match path.split_once(':') {
        Some((major, minor)) if is_number(major) && is_number(minor) => MessageError::Invalid,
        _ => MessageError::Errno(libc::ENOENT),
    }
}
