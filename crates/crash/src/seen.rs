//! Which states need no check: those whose content was checked, or that differ from a checked one only in
//! chunks that its check did not read.

use crate::model::State;
use crate::view::View;
use std::collections::{HashMap, HashSet};
use std::io;

/// The most sets of chunks that a new state is compared for.
const SETS_MAX: usize = 24;
/// The most chunks of a set; a check that reads more is not compared.
pub const CHUNKS_MAX: usize = 4096;

/// Hashes of states whose check has begun.
#[derive(Default)]
pub struct Seen {
    /// By number of writes: the hash of the state in which they are present.
    prefixes: Vec<u128>,
    states: HashSet<(u128, usize)>,
}

impl Seen {
    /// Returns the hash of a state's content; 0 is the base's. The first hash of a late cut takes a look at
    /// every write before it; `None`: `go_on` has ended that.
    ///
    /// # Errors
    /// Reading the log or the base fails.
    pub fn hash(&mut self, view: &View, state: &State, go_on: &dyn Fn() -> bool) -> io::Result<Option<u128>> {
        let count = view.log().writes_before(state.cut) as usize;
        if self.prefixes.is_empty() {
            self.prefixes.push(0);
        }
        while self.prefixes.len() <= count {
            let write = self.prefixes.len() - 1;
            if write % 256 == 255 && !go_on() {
                return Ok(None);
            }
            let Some(change) = view.hash_of_write(write as u32, go_on)? else { return Ok(None) };
            self.prefixes.push(self.prefixes[write] ^ change);
        }
        Ok(view.hash_of_losses(state, go_on)?.map(|change| self.prefixes[count] ^ change))
    }

    /// Adds a state; returns whether its content, with its marks, is new. `None`: `go_on` has ended it, and the
    /// state was not added.
    ///
    /// # Errors
    /// Reading the log or the base fails.
    pub fn add(&mut self, view: &View, state: &State, go_on: &dyn Fn() -> bool) -> io::Result<Option<bool>> {
        let Some(hash) = self.hash(view, state, go_on)? else { return Ok(None) };
        Ok(Some(self.states.insert((hash, view.log().marks_before(state.cut).len()))))
    }
}

/// The chunks of the log that a check read, sorted.
pub type ReadSet = Vec<u64>;

/// Results of checks, by what they read.
#[derive(Default)]
pub struct Verdicts<T> {
    sets: Vec<Set<T>>,
}

struct Set<T> {
    chunks: ReadSet,
    hits: u64,
    results: HashMap<(u128, usize), T>,
}

impl<T: Clone> Verdicts<T> {
    /// Returns the result of a check that would read the same in this state.
    pub fn find(&mut self, view: &View, state: &State) -> Option<T> {
        let marks = view.log().marks_before(state.cut).len();
        for at in 0..self.sets.len() {
            let set = &mut self.sets[at];
            let origin = view.origin(state, &set.chunks);
            if let Some(result) = set.results.get(&(origin, marks)) {
                let result = result.clone();
                set.hits += 1;
                if at > 0 && set.hits > self.sets[at - 1].hits {
                    self.sets.swap(at, at - 1);
                }
                return Some(result);
            }
        }
        None
    }

    /// Adds the result of a check and the chunks that it read.
    pub fn add(&mut self, view: &View, state: &State, mut chunks: ReadSet, result: T) {
        chunks.retain(|chunk| view.is_touched(*chunk));
        chunks.sort_unstable();
        chunks.dedup();
        if chunks.len() > CHUNKS_MAX {
            return;
        }
        let key = (view.origin(state, &chunks), view.log().marks_before(state.cut).len());
        let at = match self.sets.iter().position(|set| set.chunks == chunks) {
            Some(at) => at,
            None => {
                if self.sets.len() == SETS_MAX {
                    // The last is one of the least useful.
                    self.sets.pop();
                }
                self.sets.push(Set { chunks, hits: 0, results: HashMap::new() });
                self.sets.len() - 1
            }
        };
        self.sets[at].results.insert(key, result);
    }
}
