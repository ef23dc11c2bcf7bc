//! `--scheduler NAME[,PARAMETER=VALUE…]`: what orders and merges the requests of a device.

use super::{LayerSpec, SpecError};
use layers::scheduler::{Choice, ParameterError};

/// A scheduler, or none: `none`, `mq-deadline,read_expire=100`.
///
/// # Errors
/// What there is not.
pub fn parse_scheduler(text: &str) -> Result<Option<Choice>, SpecError> {
    if text == "none" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|error| refusal(&error))
}

/// The same error with what to do about it apart.
pub(super) fn refusal(error: &ParameterError) -> SpecError {
    let text = error.to_string();
    match text.strip_suffix(')').and_then(|text| text.rsplit_once(" (")) {
        Some((why, fix)) => SpecError::new(why, fix),
        None => SpecError::new(text, "see blockyard serve --help"),
    }
}

/// The layers of a device with this scheduler in place of the one that there is: it stands above all but splits at
/// the top, as the kernel splits first.
pub fn with_scheduler(layers: &[LayerSpec], choice: Option<Choice>) -> Vec<LayerSpec> {
    let mut all: Vec<_> =
        layers.iter().filter(|layer| !matches!(layer, LayerSpec::Scheduler(_))).cloned().collect();
    if let Some(choice) = choice {
        let at = all.iter().rposition(|layer| !matches!(layer, LayerSpec::Split(_))).map_or(0, |at| at + 1);
        all.insert(at, LayerSpec::Scheduler(choice));
    }
    all
}

/// The scheduler among the layers of a device.
pub fn scheduler_of(layers: &[LayerSpec]) -> Option<Choice> {
    layers.iter().find_map(|layer| match layer {
        LayerSpec::Scheduler(choice) => Some(*choice),
        _ => None,
    })
}

/// What is wrong with where schedulers stand among layers, if anything.
pub fn misplaced(layers: &[LayerSpec]) -> Option<&'static str> {
    let scheduler = layers.iter().position(|layer| matches!(layer, LayerSpec::Scheduler(_)))?;
    let above = &layers[scheduler + 1..];
    if above.iter().any(|layer| matches!(layer, LayerSpec::Scheduler(_))) {
        return Some("it has two schedulers (leave one out)");
    }
    let buried = above.iter().any(|layer| !matches!(layer, LayerSpec::Split(_)));
    buried.then_some("its scheduler stands below other layers (name it after them; only splits go above it)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(texts: &[&str]) -> Vec<LayerSpec> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn a_scheduler_stands_above_all_but_splits_at_the_top() {
        let before = layers(&["split,max_sectors=8", "delay,read=1ms", "split,max_sectors=255"]);
        let kyber = with_scheduler(&before, parse_scheduler("kyber").unwrap());
        let names: Vec<String> = kyber.iter().map(ToString::to_string).collect();
        assert_eq!(names[1..], ["delay,read=1ms", "kyber", "split,max_sectors=255"]);
        assert_eq!(misplaced(&kyber), None);
        let other = with_scheduler(&kyber, parse_scheduler("mq-deadline,fifo_batch=4").unwrap());
        assert_eq!(other[2].to_string(), "mq-deadline,fifo_batch=4");
        assert_eq!(with_scheduler(&other, parse_scheduler("none").unwrap()), before);
        assert_eq!(scheduler_of(&other), "mq-deadline,fifo_batch=4".parse().ok());
    }

    #[test]
    fn one_that_stands_elsewhere_is_refused() {
        assert!(misplaced(&layers(&["kyber", "delay,read=1ms"])).is_some_and(|why| why.contains("below")));
        assert!(misplaced(&layers(&["kyber", "mq-deadline"])).is_some_and(|why| why.contains("two")));
        let error = parse_scheduler("bfq").unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is no scheduler \"bfq\" (there are none, mq-deadline and kyber)"
        );
    }
}
