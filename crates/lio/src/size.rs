//! Sizes as targetcli reads and prints them: `10G`, `10GB`, `10GiB`, `10.0GiB`.

const UNITS: [char; 4] = ['k', 'm', 'g', 't'];

/// Parses a size. Units are powers of 1024.
///
/// # Errors
/// rtslib's message.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("Cannot interpret size, wrong format: {text}");
    let lower = text.to_lowercase().replace('i', "");
    let plain = lower.strip_suffix('b').unwrap_or(&lower);
    let unit = plain.chars().last().and_then(|last| UNITS.iter().position(|unit| *unit == last));
    let digits = if unit.is_some() { &plain[..plain.len() - 1] } else { plain };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let power = unit.map_or(0, |unit| unit as u32 + 1);
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << (10 * power)).ok_or_else(wrong)
}

/// Formats a size.
pub fn format(size: u64) -> String {
    const NAMES: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if size < 1024 {
        return format!("{size} bytes");
    }
    let mut number = size as f64 / 1024.0;
    let mut names = NAMES.into_iter();
    let mut name = names.next().unwrap_or_default();
    for next in names {
        if number < 1024.0 {
            break;
        }
        number /= 1024.0;
        name = next;
    }
    format!("{number:.1}{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, size) in [
            ("512", 512),
            ("512B", 512),
            ("1k", 1 << 10),
            ("10G", 10 << 30),
            ("1GB", 1 << 30),
            ("1gB", 1 << 30),
            ("1GiB", 1 << 30),
            ("2T", 2 << 40),
        ] {
            assert_eq!(parse(text), Ok(size), "{text}");
        }
        for text in ["", "G", "1P", "-1", "1.5G", "99999999999T", "1Ki1", "é"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_have_one_digit_after_the_point() {
        for (size, text) in [
            (512, "512 bytes"),
            (1024, "1.0KiB"),
            (10 << 30, "10.0GiB"),
            (1536 << 20, "1.5GiB"),
            (1 << 60, "1.0EiB"),
        ] {
            assert_eq!(format(size), text);
        }
    }
}
