//! The list of layers that users name. A new one is a line here.

mod driver;
mod throttle;

pub use driver::{Driver, DriverFile, Row, Words};

use crate::Layer;
use crate::dm::{DelayWords, FlakeyWords, LogWords};
use block::Profile;
use driver::read;
use queue::Ring;
use std::sync::Arc;
use throttle::Throttle;

macro_rules! list {
    ($($driver:ty),* $(,)?) => {
        /// All of them, in the order of the help.
        pub fn rows() -> Vec<Row> {
            vec![$(Row::of::<$driver>()),*]
        }

        /// The layer of a driver, from a text that it has read before.
        pub(crate) fn layer<R: Ring>(
            name: &str,
            text: &str,
            below: &[Profile],
        ) -> Result<Arc<dyn Layer<R>>, String> {
            $(if name == <$driver>::NAME {
                return read::<$driver>(text).map_err(|why| why.to_string())?.layer(below);
            })*
            unreachable!("{name} is no driver")
        }
    };
}

list!(DelayWords, FlakeyWords, LogWords, Throttle);

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a seeded generator of numbers below a bound: each run is the same.
    fn numbers() -> impl FnMut(u64) -> u64 {
        let mut random = fastrand::Rng::with_seed(1);
        move |below| random.u64(..below.max(1))
    }

    #[test]
    fn every_driver_has_what_help_needs_and_reads_what_it_writes() {
        let mut below = numbers();
        for row in rows() {
            assert!(row.usage.starts_with(row.name) && row.example.starts_with(row.name), "{row:?}");
            assert!(!row.about.is_empty() && row.about.len() <= 60, "{row:?}");
            for key in row.keys {
                assert!(row.usage.contains(&format!(",{key}")), "{row:?} {key}");
            }
            let example: Vec<String> = options::split(row.example).into_iter().skip(1).collect();
            let words =
                Words::read(row.name, example).expect("it is in the list").expect("the example works");
            assert_eq!(words.name(), row.name);
            for _ in 0..200 {
                let random = Words::random(&row, &mut below);
                let items = options::split(&random.to_string()).into_iter().skip(1).collect();
                assert_eq!(Words::read(row.name, items).expect("a driver").expect("words that fit"), random);
            }
        }
        let mut names: Vec<_> = rows().iter().map(|row| row.name).collect();
        names.dedup();
        assert_eq!(names.len(), rows().len());
        assert!(Words::read("nothing", Vec::new()).is_none());
    }

    #[test]
    fn an_option_of_words_can_be_changed_and_a_wrong_one_is_refused() {
        let words = Words::read("delay", vec!["read=5ms".into()]).expect("a driver").expect("words");
        let changed =
            words.with("write", "1s").and_then(|words| words.with("read", "7ms")).expect("they fit");
        assert_eq!(changed.to_string(), "delay,read=7ms,write=1s");
        assert!(words.with("read", "soon").is_err() && words.with("rate", "1").is_err());
    }
}
