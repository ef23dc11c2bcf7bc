//! Log lines about what may happen thousands of times a second: one every ten seconds, and how often it was.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two lines.
const PAUSE: Duration = Duration::from_secs(10);

/// When the last line was written, and how many events there were since.
#[derive(Default, Debug)]
pub(crate) struct Rarely(Mutex<(Option<Instant>, u64)>);

impl Rarely {
    /// Something happened. `Some`: it is to be logged, with how often it happened since the last line.
    pub(crate) fn say(&self) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, count) = &mut *state;
        *count += 1;
        if last.is_some_and(|last| last.elapsed() < PAUSE) {
            return None;
        }
        *last = Some(Instant::now());
        Some(std::mem::take(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_of_many_is_said() {
        let rarely = Rarely::default();
        assert_eq!(rarely.say(), Some(1));
        assert_eq!([rarely.say(), rarely.say()], [None, None]);
        rarely.0.lock().unwrap().0 = Instant::now().checked_sub(PAUSE);
        assert_eq!(rarely.say(), Some(3));
    }
}
