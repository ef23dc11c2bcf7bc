//! Statistics over the rounds of a measurement.

/// Returns the median: for an even number of values, the mean of the two in the middle; for none, NaN.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[length / 2],
        length => f64::midpoint(sorted[length / 2 - 1], sorted[length / 2]),
    }
}

/// Returns the least value, the median and the greatest value.
pub(crate) fn spread(values: &[f64]) -> (f64, f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (least, median(values), greatest)
}

/// Returns the median of the ratios of each round, which removes drift during a run; NaN if no round has
/// both values.
pub(crate) fn ratio(own: &[f64], peer: &[f64]) -> f64 {
    median(&own.iter().zip(peer).map(|(own, peer)| own / peer).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_the_mean_of_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
        assert_eq!(spread(&[3.0, 1.0, 2.5]), (1.0, 2.5, 3.0));
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_ratios() {
        assert_eq!(ratio(&[100.0, 300.0, 300.0], &[200.0, 300.0, 600.0]), 0.5);
        assert_eq!(ratio(&[100.0, 300.0], &[200.0]), 0.5);
        assert!(ratio(&[], &[200.0]).is_nan());
    }
}
