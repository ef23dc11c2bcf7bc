//! Formats of a log line: text, `key=value` pairs, or a JSON object.

use super::{Level, Line};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use std::borrow::Cow;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// A format of lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// `2024-02-29 13:34:56.000 warning: device: message, key value: reason`, in local time.
    Text,
    /// `time=… level=warn message="…" key=value`.
    KeyValue,
    /// One object for each line.
    Json,
}

/// Formats a line, with its line end.
pub(crate) fn text(format: Format, line: &Line) -> String {
    match format {
        Format::Text => plain(line, &TimeZone::system()),
        Format::KeyValue => words(line),
        Format::Json => object(line),
    }
}

/// Fields with the reason of an event: the text format ends with them.
const REASONS: [&str; 4] = ["reason", "error", "why", "loss"];

fn plain(line: &Line, zone: &TimeZone) -> String {
    let level = match line.level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        _ => "debug",
    };
    let mut text = format!("{} {level}: ", local_time(line.at, zone));
    for (_, device) in line.fields.iter().filter(|(name, _)| *name == "device") {
        let _ = write!(text, "{}: ", visible(&device.text));
    }
    text += &visible(&line.message);
    for (name, value) in line.fields.iter().filter(|(name, _)| *name != "device" && !REASONS.contains(name)) {
        let _ = write!(text, ", {name} {}", visible(&value.text));
    }
    for (_, reason) in line.fields.iter().filter(|(name, _)| REASONS.contains(name)) {
        let _ = write!(text, ": {}", visible(&reason.text));
    }
    text + "\n"
}

/// Formats local date and time to the millisecond.
fn local_time(at: SystemTime, zone: &TimeZone) -> String {
    let at = Timestamp::try_from(at).unwrap_or(Timestamp::UNIX_EPOCH);
    at.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M:%S%.3f").to_string()
}

/// Formats a warning about a device by a process that writes to the log file of another one.
pub(crate) fn warning(device: &str, message: &str) -> String {
    plain(&Line::new(Level::WARN, message, vec![("device", device.into())]), &TimeZone::system())
}

/// Escapes control characters, which could end the line or control a terminal.
fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(shown).collect::<String>().into()
}

pub(super) fn level(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        _ => "debug",
    }
}

/// Returns the value, quoted if it is not a single word.
fn word(value: &str) -> String {
    let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '=' | '\\');
    if !value.is_empty() && value.chars().all(is_plain) { value.to_owned() } else { format!("{value:?}") }
}

fn words(line: &Line) -> String {
    let mut text =
        format!("time={} level={} message={}", time(line.at), level(line.level), word(&line.message));
    for (name, value) in &line.fields {
        let _ = write!(text, " {name}={}", word(&value.text));
    }
    text + "\n"
}

fn object(line: &Line) -> String {
    let mut object = serde_json::Map::new();
    for (name, value) in &line.fields {
        // Numbers stay numbers; a device named 7 stays a text.
        let number = if value.is_number { value.text.parse::<serde_json::Number>().ok() } else { None };
        let value = number.map_or_else(|| value.text.as_str().into(), Into::into);
        object.insert((*name).to_owned(), value);
    }
    object.insert("time".to_owned(), time(line.at).into());
    object.insert("level".to_owned(), level(line.level).into());
    object.insert("message".to_owned(), line.message.as_str().into());
    format!("{}\n", serde_json::Value::Object(object))
}

/// Formats a time in UTC to the microsecond, after RFC 3339.
fn time(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86400, since.as_secs() % 86400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let micros = since.subsec_micros();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Returns year, month and day of a day counted from 1970-01-01. The computation starts years in March, so
/// that a leap day is the last one of a year: 146,097 days are 400 years.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let is_next = month >= 10;
    (era * 400 + year + u64::from(is_next), if is_next { month - 9 } else { month + 3 }, day)
}

#[cfg(test)]
mod tests {
    use super::super::Value;
    use super::*;
    use std::time::Duration;

    fn line() -> Line {
        Line {
            at: UNIX_EPOCH + Duration::from_micros(1_709_210_096_000_007),
            level: Level::WARN,
            message: "slow request".to_owned(),
            fields: vec![
                ("device", "7".into()),
                ("sector", Value::number(8)),
                ("path", "file:0 21ms".into()),
            ],
        }
    }

    #[test]
    fn lines_are_formatted_as_text_pairs_or_json() {
        let zone = TimeZone::fixed(jiff::tz::offset(2));
        assert_eq!(
            plain(&line(), &zone),
            "2024-02-29 14:34:56.000 warning: 7: slow request, sector 8, path file:0 21ms\n"
        );
        let mut why = line();
        why.fields.insert(0, ("reason", "its connection failed".into()));
        (why.at, why.level) = (UNIX_EPOCH + Duration::from_millis(1_709_210_096_078), Level::INFO);
        assert_eq!(
            plain(&why, &zone),
            "2024-02-29 14:34:56.078 info: 7: slow request, sector 8, path file:0 21ms: its connection failed\n"
        );
        assert_eq!(
            text(Format::KeyValue, &line()),
            "time=2024-02-29T12:34:56.000007Z level=warn message=\"slow request\" device=7 sector=8 path=\"file:0 21ms\"\n"
        );
        let object: serde_json::Value = serde_json::from_str(&text(Format::Json, &line())).expect("JSON");
        assert_eq!((&object["level"], &object["sector"]), (&"warn".into(), &8.into()));
        assert_eq!(object["device"], "7", "a name");
        assert_eq!(object["time"], "2024-02-29T12:34:56.000007Z");
    }

    #[test]
    fn values_with_line_ends_are_escaped() {
        let mut line = line();
        line.message = "a\rb".to_owned();
        line.fields = vec![("why", "first\nlevel=error\x1b[2J\u{9b}".into())];
        for format in [Format::Text, Format::KeyValue, Format::Json] {
            let text = text(format, &line);
            assert_eq!(text.lines().count(), 1, "{format:?}");
            assert!(format == Format::Json || !text.trim_end().contains(char::is_control), "{text:?}");
        }
        let expected = "2024-02-29 12:34:56.000 warning: a\\rb: first\\nlevel=error\\u{1b}[2J\\u{9b}\n";
        assert_eq!(plain(&line, &TimeZone::UTC), expected);
    }

    #[test]
    fn days_are_converted_to_dates() {
        for (days, expected) in [
            (0, (1970, 1, 1)),
            (59, (1970, 3, 1)),
            (11_016, (2000, 2, 29)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ] {
            assert_eq!(date(days), expected, "{days}");
        }
    }
}
