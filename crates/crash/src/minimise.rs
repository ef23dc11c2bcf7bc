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
        let pieces: Vec<Vec<Piece>> = best.lost.chunks(len).map(<[Piece]>::to_vec).collect();
        let rest = |without: &[Piece]| {
            let lost = best.lost.iter().filter(|piece| !without.contains(piece)).copied().collect();
            State { cut: best.cut, lost }
        };
        let alone = pieces.iter().map(|part| State { cut: best.cut, lost: part.clone() });
        let without = pieces.iter().map(|part| rest(part));
        let candidates: Vec<State> =
            if parts == 2 { alone.collect() } else { alone.chain(without).collect() };
        let subsets = pieces.len();
        for (at, candidate) in candidates.into_iter().enumerate() {
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
