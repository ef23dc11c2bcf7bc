//! Times in descriptions: a whole number with `ns`, `us`, `ms`, `s`, `m` or `h`.

use crate::SpecError;
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;
/// The units with their length in nanoseconds. Times are formatted in the first four.
const UNITS: [(&str, u64); 6] =
    [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", SECOND), ("m", 60 * SECOND), ("h", 3600 * SECOND)];
/// The longest unit in which times are formatted: a second.
const FORMATTED: usize = 4;

/// Parses a time: `10us`, `5ms`, `2m`, `0`.
///
/// # Errors
/// The unit is missing (except for 0) or unknown, the number has a fraction, or the time is above 2^64 ns.
pub fn parse_time(text: &str) -> Result<Duration, SpecError> {
    let error = |why: &str| SpecError::new(format!("\"{text}\" is not a time: {why}"), "for example 10us");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits_end);
    let number: u64 = number.parse().map_err(|_| error("it is not a whole number with a unit"))?;
    let (_, scale) = UNITS
        .iter()
        .find(|(word, _)| *word == unit)
        .ok_or_else(|| error("the unit is not ns, us, ms, s, m or h"))?;
    number.checked_mul(*scale).map(Duration::from_nanos).ok_or_else(|| error("it is too long"))
}

/// Formats a time exactly, in the largest unit up to seconds of which it is a multiple: `1500us`, `120s`.
pub fn format_time(time: Duration) -> String {
    let nanos = time.as_nanos();
    let mut units = UNITS[..FORMATTED].iter().rev();
    let (unit, scale) =
        units.find(|(_, scale)| nanos.is_multiple_of(u128::from(*scale))).unwrap_or(&UNITS[0]);
    if nanos == 0 { "0".to_owned() } else { format!("{}{unit}", nanos / u128::from(*scale)) }
}
