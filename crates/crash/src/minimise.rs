//! Reduces the lost pieces of a failing state to fewest (delta debugging).

use crate::model::{Piece, State};
use crate::view::View;

/// Returns a state that fails with as few lost pieces as were found. `fails` checks a state, or returns
/// `None` when no more checks are wanted; the best state so far is returned then.
///
/// The result is 1-minimal unless the checks ended early: it passes with any one of the lost pieces present.
pub fn minimise(view: &View, state: &State, mut fails: impl FnMut(&State) -> Option<bool>) -> State {
    let mut best = state.clone();
    let mut parts = 2_usize;
    // First the state without losses: then the workload's order is wrong, not what was lost.
    let full = State::all_present(state.cut);
    if best.lost.is_empty() {
        return best;
    }
    match fails(&full) {
        None => return best,
        Some(true) => return full,
        Some(false) => {}
    }
    while best.lost.len() > 1 {
        parts = parts.min(best.lost.len());
        let len = best.lost.len().div_ceil(parts);
        let mut reduced = false;
        let subsets = best.lost.len().div_ceil(len);
        // First each part alone, then all but each; one after the other, as all of them would take much memory.
        let candidate_of = |lost: &[Piece], at: usize| {
            let part = at % subsets * len..(at % subsets * len + len).min(lost.len());
            if at < subsets { lost[part].to_vec() } else { [&lost[..part.start], &lost[part.end..]].concat() }
        };
        let count = if parts == 2 { subsets } else { 2 * subsets };
        for at in 0..count {
            let candidate = State { cut: best.cut, lost: candidate_of(&best.lost, at) };
            if candidate.lost.len() >= best.lost.len() || view.allows(&candidate).is_err() {
                continue;
            }
            match fails(&candidate) {
                None => return best,
                Some(true) => {
                    best = candidate;
                    parts = if at < subsets { 2 } else { (parts - 1).max(2) };
                    reduced = true;
                    break;
                }
                Some(false) => {}
            }
        }
        if !reduced {
            if parts >= best.lost.len() {
                break;
            }
            parts = (parts * 2).min(best.lost.len());
        }
    }
    best
}
