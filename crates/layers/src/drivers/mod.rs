//! The list of drivers: the layers that `--layer` accepts. A new driver adds a line here.

mod driver;
mod throttle;

pub use driver::{Driver, DriverFile, LayerOptions, Row};

use crate::Layer;
use crate::dm::{DelayOptions, FlakeyOptions, LogOptions};
use block::Profile;
use driver::read;
use queue::Ring;
use std::sync::Arc;
use throttle::Throttle;

macro_rules! list {
    ($($driver:ty),* $(,)?) => {
        /// Returns all drivers, in the order of the help.
        pub fn rows() -> Vec<Row> {
            vec![$(Row::of::<$driver>()),*]
        }

        /// Creates the layer of a driver from options that the driver has validated.
        pub(crate) fn layer<R: Ring>(
            name: &str,
            text: &str,
            below: &[Profile],
        ) -> Result<Arc<dyn Layer<R>>, String> {
            $(if name == <$driver>::NAME {
                return read::<$driver>(text).map_err(|why| why.to_string())?.layer(below);
            })*
            unreachable!("{name} is not a driver")
        }
    };
}

list!(DelayOptions, FlakeyOptions, LogOptions, Throttle);

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a seeded generator of numbers below a bound.
    fn numbers() -> impl FnMut(u64) -> u64 {
        let mut random = fastrand::Rng::with_seed(1);
        move |below| random.u64(..below.max(1))
    }

    #[test]
    fn every_driver_has_help_and_parses_its_own_output() {
        let mut below = numbers();
        for row in rows() {
            assert!(row.usage.starts_with(row.name) && row.example.starts_with(row.name), "{row:?}");
            assert!(!row.about.is_empty() && row.about.len() <= 60, "{row:?}");
            for option in row.options {
                assert!(row.usage.contains(&format!(",{}", option.key)), "{row:?} {option:?}");
            }
            let example: Vec<String> = options::split(row.example).into_iter().skip(1).collect();
            let options =
                LayerOptions::read(row.name, example).expect("it is in the list").expect("the example works");
            assert_eq!(options.name(), row.name);
            for _ in 0..200 {
                let random = LayerOptions::random(&row, &mut below);
                let items = options::split(&random.to_string()).into_iter().skip(1).collect();
                assert_eq!(
                    LayerOptions::read(row.name, items).expect("a driver").expect("valid options"),
                    random
                );
            }
        }
        let mut names: Vec<_> = rows().iter().map(|row| row.name).collect();
        names.dedup();
        assert_eq!(names.len(), rows().len());
        assert!(LayerOptions::read("nothing", Vec::new()).is_none());
    }

    #[test]
    fn one_option_can_be_changed_and_an_invalid_one_is_rejected() {
        let options =
            LayerOptions::read("delay", vec!["read=5ms".into()]).expect("a driver").expect("valid options");
        let changed =
            options.with("write", "1s").and_then(|options| options.with("read", "7ms")).expect("they fit");
        assert_eq!(changed.to_string(), "delay,read=7ms,write=1s");
        assert!(options.with("read", "soon").is_err() && options.with("rate", "1").is_err());
    }
}
