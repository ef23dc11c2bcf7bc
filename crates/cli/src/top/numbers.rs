//! Short forms of numbers.

/// Formats a count or a rate in at most five characters: `7`, `0.5`, `1234`, `12.3k`, `1.20M`.
pub(super) fn count(value: f64) -> String {
    scaled(value, 9999.5, 1000.0, &["", "k", "M", "G", "T"])
}

/// Formats bytes in at most five characters, with binary suffixes: `0`, `512`, `4.00K`, `12.3M`.
pub(super) fn bytes(value: f64) -> String {
    scaled(value, 999.5, 1024.0, &["", "K", "M", "G", "T", "P", "E"])
}

/// Formats three significant digits and a suffix; values below `plain` have no suffix.
fn scaled(value: f64, plain: f64, step: f64, suffixes: &[&str]) -> String {
    if value < plain {
        return if value > 0.0 && value < 9.95 && value.fract() >= 0.05 {
            format!("{value:.1}")
        } else {
            format!("{value:.0}")
        };
    }
    let (mut value, mut place) = (value / step, 1);
    while value >= 999.5 && place + 1 < suffixes.len() {
        value /= step;
        place += 1;
    }
    format!("{}{}", digits(value), suffixes[place])
}

fn digits(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// Formats a time in at most six characters: `830ns`, `12.3us`, `1.20ms`, `3.00s`.
pub(super) fn time(ns: u64) -> String {
    if ns < 1000 {
        return format!("{ns}ns");
    }
    let (mut value, mut place) = (ns as f64 / 1000.0, 0);
    while value >= 999.5 && place < 2 {
        value /= 1000.0;
        place += 1;
    }
    format!("{}{}", digits(value), ["us", "ms", "s"][place])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let counts = [0.0, 0.04, 0.5, 7.0, 12.4, 9999.0, 12_345.0, 999_600.0, 1_234_567.0].map(count);
        assert_eq!(counts, ["0", "0", "0.5", "7", "12", "9999", "12.3k", "1.00M", "1.23M"]);
        assert_eq!([0.0, 512.0, 4096.0, 1e9].map(bytes), ["0", "512", "4.00K", "954M"]);
        assert_eq!(
            [830, 12_345, 999_700, 1_200_000, 3_000_000_000].map(time),
            ["830ns", "12.3us", "1.00ms", "1.20ms", "3.00s"]
        );
        for power in 0..50 {
            for value in [1u64 << power, (1 << power) - 1, 3 << power.min(60)] {
                assert!(count(value as f64).len() <= 5 && bytes(value as f64).len() <= 5, "{value}");
                assert!(time(value).len() <= 6 || value > 999_000_000_000, "{value}");
            }
        }
    }
}
