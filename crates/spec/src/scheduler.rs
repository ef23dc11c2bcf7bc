//! `--scheduler NAME[,PARAMETER=VALUE…]`: the scheduler of a device.

use super::{LayerSpec, SpecError};
use layers::scheduler::{Choice, ParameterError};

/// Parses a scheduler: `mq-deadline,read_expire=100`, or `none`, for which it returns `None`.
///
/// # Errors
/// The scheduler or a parameter is unknown, or a value is invalid.
pub fn parse_scheduler(text: &str) -> Result<Option<Choice>, SpecError> {
    if text == "none" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|error| refusal(&error))
}

/// Splits a scheduler's error into the problem and the correction.
pub(super) fn refusal(error: &ParameterError) -> SpecError {
    let text = error.to_string();
    match text.strip_suffix(')').and_then(|text| text.rsplit_once(" (")) {
        Some((why, fix)) => SpecError::new(why, fix),
        None => SpecError::new(text, "see blockyard serve --help"),
    }
}

/// Returns the layers of a device with another scheduler, or none. It is placed below the splits at the top, since the kernel
/// splits first, and above all other layers.
pub fn with_scheduler(layers: &[LayerSpec], choice: Option<Choice>) -> Vec<LayerSpec> {
    let mut all: Vec<_> =
        layers.iter().filter(|layer| !matches!(layer, LayerSpec::Scheduler(_))).cloned().collect();
    if let Some(choice) = choice {
        let at = all.iter().rposition(|layer| !matches!(layer, LayerSpec::Split(_))).map_or(0, |at| at + 1);
        all.insert(at, LayerSpec::Scheduler(choice));
    }
    all
}

/// Returns the scheduler among the layers of a device.
pub fn scheduler_of(layers: &[LayerSpec]) -> Option<Choice> {
    layers.iter().find_map(|layer| match layer {
        LayerSpec::Scheduler(choice) => Some(*choice),
        _ => None,
    })
}

/// Returns what is wrong with the position of schedulers among layers; `None` if nothing is.
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
    fn a_scheduler_is_placed_below_the_topmost_splits() {
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
    fn a_scheduler_below_other_layers_is_refused() {
        assert!(misplaced(&layers(&["kyber", "delay,read=1ms"])).is_some_and(|why| why.contains("below")));
        assert!(misplaced(&layers(&["kyber", "mq-deadline"])).is_some_and(|why| why.contains("two")));
        let error = parse_scheduler("bfq").unwrap_err();
        assert_eq!(error.to_string(), "unknown scheduler \"bfq\" (schedulers: none, mq-deadline, kyber)");
    }
}
