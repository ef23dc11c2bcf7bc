//! Suggestions for misspelt words ("did you mean").

/// Returns the candidate that is nearest to a word, or `None` if none is near enough. A candidate is near enough if it starts
/// with the word, or differs from it by one edit (a letter changed, added, removed, or swapped with its neighbour); words of
/// six letters or more may differ by two.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = if word.chars().count() >= 6 { 2 } else { 1 };
    let begins = |candidate: &str| word.len() >= 3 && candidate.starts_with(word);
    let scored = candidates.into_iter().map(|candidate| {
        let steps = if begins(candidate) { 1 } else { distance(word, candidate) };
        (steps, candidate)
    });
    scored.filter(|(steps, _)| *steps <= most).min_by_key(|(steps, _)| *steps).map(|(_, candidate)| candidate)
}

/// Returns `did you mean NAME? `, to stand before a list of the candidates; empty if none is near enough.
pub fn did_you_mean<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, candidates).map_or(String::new(), |near| format!("did you mean {near}? "))
}

/// Returns the edit distance of two words: letters changed, added, removed, or swapped with a neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = change.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_word_finds_the_nearest_candidate() {
        let words = ["throttle", "delay", "flakey", "log", "kyber", "mq-deadline"];
        for (slip, meant) in [
            ("throtle", "throttle"),
            ("dleay", "delay"),
            ("flaky", "flakey"),
            ("deley", "delay"),
            ("mq-d", "mq-deadline"),
        ] {
            assert_eq!(nearest(slip, words), Some(meant), "{slip}");
        }
        for other in ["", "raid", "lag of", "cache", "l"] {
            assert_eq!(nearest(other, words), None, "{other}");
        }
    }
}
