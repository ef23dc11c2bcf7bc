//! Log-linear latency histograms from 1 ns to 137 s, with sixteen buckets per power of two, so a bucket is at
//! most 6.25 % wide. One thread writes them with plain stores; any thread reads them.

use block::Op;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// `log2` of the buckets per power of two.
const SUB_BITS: u32 = 4;
/// Values from 2^37 ns (137 s) on share the last bucket.
const TOP_BIT: u32 = 37;

/// Number of buckets.
pub const BUCKETS: usize = ((TOP_BIT - SUB_BITS) as usize + 1) << SUB_BITS;

/// Returns the bucket of a value. The first 16 buckets hold one value each. After that, the highest set bit
/// selects the power of two and the next four bits the bucket within it. 1000 ns: highest bit 9, next bits
/// 1111.
#[inline]
pub(crate) fn bucket_of(value: u64) -> usize {
    let value = value.min((1 << TOP_BIT) - 1);
    let shift = (value | ((2 << SUB_BITS) - 1)).ilog2() - SUB_BITS;
    ((shift as usize) << SUB_BITS) + (value >> shift) as usize
}

/// Returns the smallest value of a bucket.
pub fn bucket_floor(bucket: usize) -> u64 {
    let sub = 1usize << SUB_BITS;
    if bucket < 2 * sub {
        return bucket as u64;
    }
    let shift = bucket / sub - 1;
    ((bucket - shift * sub) as u64) << shift
}

/// Histograms of one thread, one for each operation. The counters of all operations for one bucket are
/// adjacent, so requests of equal latency are counted in one cache line, whatever their operation.
#[derive(Debug)]
pub(crate) struct Histograms {
    rows: Box<[[AtomicU64; Op::COUNT]; BUCKETS]>,
}

impl Default for Histograms {
    fn default() -> Self {
        let empty = || [const { AtomicU64::new(0) }; Op::COUNT];
        let rows: Box<[_]> = std::iter::repeat_with(empty).take(BUCKETS).collect();
        let Ok(rows) = rows.try_into() else { unreachable!("there are as many rows as buckets") };
        Histograms { rows }
    }
}

impl Histograms {
    /// Returns the counters of a value, by operation. Only the owning thread may change them.
    #[inline]
    pub(crate) fn row(&self, value: u64) -> &[AtomicU64; Op::COUNT] {
        &self.rows[bucket_of(value)]
    }

    pub(crate) fn add_to(&self, op: usize, counts: &mut Counts) {
        for (sum, row) in counts.0.iter_mut().zip(self.rows.iter()) {
            *sum += row[op].load(Relaxed);
        }
    }
}

/// A copy of one histogram, or the sum of several.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Counts(Box<[u64; BUCKETS]>);

impl Default for Counts {
    fn default() -> Self {
        Counts(Box::new([0; BUCKETS]))
    }
}

impl Counts {
    /// Returns how many values were counted.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the value below which `fraction` of the counted values lie, as the middle of its bucket; 0 if
    /// none was counted.
    pub fn quantile(&self, fraction: f64) -> u64 {
        let rank = (self.total() as f64 * fraction).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.0.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return (bucket_floor(bucket) + bucket_floor(bucket + 1) - 1) / 2;
            }
        }
        0
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &Counts) {
        for (sum, count) in self.0.iter_mut().zip(other.0.iter()) {
            *sum += count;
        }
    }

    /// Returns the buckets that are not empty, as their smallest value and count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().enumerate().filter(|(_, count)| **count > 0).map(|(i, count)| (bucket_floor(i), *count))
    }
}

impl FromIterator<(u64, u64)> for Counts {
    /// Creates a histogram from the result of [`Counts::buckets`].
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(buckets: I) -> Counts {
        let mut counts = Counts::default();
        buckets.into_iter().for_each(|(floor, count)| counts.0[bucket_of(floor)] += count);
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_bucket_and_buckets_are_narrow() {
        let mut value = 0u64;
        while value < 1 << TOP_BIT {
            let bucket = bucket_of(value);
            let (floor, next) = (bucket_floor(bucket), bucket_floor(bucket + 1));
            assert!(floor <= value && value < next, "{value} in {bucket}: {floor}..{next}");
            assert!(next - floor <= (floor / 16).max(1), "{bucket}");
            value = value + value / 7 + 1;
        }
    }

    #[test]
    fn the_last_bucket_holds_all_larger_values() {
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(bucket_of((1 << TOP_BIT) - 1), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_within_a_bucket() {
        let histograms = Histograms::default();
        for value in 1..=10_000u64 {
            histograms.row(value * 100)[1].fetch_add(1, Relaxed);
        }
        let mut counts = Counts::default();
        histograms.add_to(1, &mut counts);
        assert_eq!(counts.total(), 10_000);
        for (fraction, exact) in [(0.5, 500_000.0), (0.99, 990_000.0), (1.0, 1_000_000.0)] {
            let got = counts.quantile(fraction) as f64;
            assert!((got - exact).abs() / exact < 0.0625, "{fraction}: {got}");
        }
        assert_eq!(Counts::default().quantile(0.5), 0);
        assert_eq!(counts.buckets().collect::<Counts>(), counts);
    }
}
