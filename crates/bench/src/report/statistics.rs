//! A test whether two sets of rounds differ: Mann and Whitney's, exact, two-sided.
//!
//! The probability is the share of all divisions of the values into two sets of these sizes in which one
//! set's ranks are at least as extreme as those measured. The test assumes no form of the distribution;
//! benchmark rounds are not normally distributed.

/// Returns the probability that two sets of the same distribution differ as much as these or more; 1 if one is empty.
///
/// Source: H. B. Mann, D. R. Whitney, "On a test of whether one of two random variables is stochastically larger than
/// the other", 1947. Ties get their mean rank; the distribution is that of the ranks with ties.
pub(super) fn mann_whitney(first: &[f64], second: &[f64]) -> f64 {
    let (a, b) = (first.len(), second.len());
    if a == 0 || b == 0 {
        return 1.0;
    }
    let mut all: Vec<(f64, bool)> = first.iter().map(|value| (*value, true)).collect();
    all.extend(second.iter().map(|value| (*value, false)));
    all.sort_by(|x, y| x.0.total_cmp(&y.0));
    // Ranks are doubled, so that mean ranks of ties are whole numbers.
    let mut ranks = vec![0_usize; all.len()];
    let mut from = 0;
    while from < all.len() {
        let to = (from..all.len()).take_while(|&at| all[at].0 == all[from].0).last().unwrap_or(from);
        ranks[from..=to].fill(from + to + 2);
        from = to + 1;
    }
    let measured: usize =
        ranks.iter().zip(&all).filter(|(_, (_, is_first))| *is_first).map(|(rank, _)| rank).sum();
    // `ways[count][sum]`: the number of ways to choose `count` of the ranks seen so far with that sum.
    let total: usize = ranks.iter().sum();
    let mut ways = vec![vec![0.0_f64; total + 1]; a + 1];
    ways[0][0] = 1.0;
    for &rank in &ranks {
        for count in (1..=a).rev() {
            let (fewer, more) = ways.split_at_mut(count);
            for sum in (rank..=total).rev() {
                more[0][sum] += fewer[count - 1][sum - rank];
            }
        }
    }
    // The expected sum of ranks, times `a + b` so that it is a whole number.
    let expected = total * a;
    let distance = |sum: usize| (sum * (a + b)).abs_diff(expected);
    let counts = &ways[a];
    let all_ways: f64 = counts.iter().sum();
    let extreme: f64 = counts
        .iter()
        .enumerate()
        .filter(|(sum, _)| distance(*sum) >= distance(measured))
        .map(|(_, ways)| ways)
        .sum();
    extreme / all_ways
}

/// Returns which of these probabilities are significant together: Holm's method, which keeps the probability of one or
/// more false finds below `level`.
pub(super) fn holm(probabilities: &[f64], level: f64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|x, y| probabilities[*x].total_cmp(&probabilities[*y]));
    let mut found = vec![false; probabilities.len()];
    for (done, at) in order.iter().enumerate() {
        if probabilities[*at] > level / (probabilities.len() - done) as f64 {
            break;
        }
        found[*at] = true;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_the_published_tables() {
        let near =
            |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-9, "{found} is not {wanted}");
        // Of 3 and 3 values wholly apart: 2 of 20 ways. Of 5 and 5: 2 of 252.
        near(mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]), 0.1);
        near(mann_whitney(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]), 2.0 / 252.0);
        // U = 1 of 3 and 4: 4 of 35 ways.
        near(mann_whitney(&[1.0, 2.0, 4.0], &[3.0, 5.0, 6.0, 7.0]), 4.0 / 35.0);
    }

    #[test]
    fn equal_sets_do_not_differ() {
        assert_eq!(mann_whitney(&[5.0; 4], &[5.0; 4]), 1.0);
        assert_eq!(mann_whitney(&[1.0, 4.0], &[2.0, 3.0]), 1.0);
        assert_eq!(mann_whitney(&[], &[1.0]), 1.0);
    }

    #[test]
    fn many_comparisons_need_smaller_probabilities() {
        assert_eq!(holm(&[0.01, 0.04, 0.03], 0.05), [true, false, false]);
        assert_eq!(holm(&[0.01, 0.02, 0.04], 0.05), [true, true, true]);
        assert_eq!(holm(&[], 0.05), Vec::<bool>::new());
    }
}
