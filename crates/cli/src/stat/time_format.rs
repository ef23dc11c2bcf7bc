//! Date and time of a report in iostat's format: the date in the JSON document, and the time for `-t`.
//!
//! As for iostat, `S_TIME_FORMAT=ISO` in the environment selects ISO 8601; the default is iostat's format in
//! the C locale. Times are in the local time zone.

use jiff::Zoned;

/// The format of dates and times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TimeFormat {
    C,
    Iso,
}

impl TimeFormat {
    /// Returns the format that the environment selects.
    pub(super) fn of_environment() -> TimeFormat {
        TimeFormat::named(std::env::var("S_TIME_FORMAT").ok().as_deref())
    }

    fn named(format: Option<&str>) -> TimeFormat {
        if format == Some("ISO") { TimeFormat::Iso } else { TimeFormat::C }
    }

    /// Returns today's date.
    pub(super) fn date(self) -> String {
        self.date_of(&Zoned::now())
    }

    /// Returns the current date and time.
    pub(super) fn timestamp(self) -> String {
        self.timestamp_of(&Zoned::now())
    }

    fn date_of(self, now: &Zoned) -> String {
        let format = if self == TimeFormat::Iso { "%Y-%m-%d" } else { "%m/%d/%y" };
        now.strftime(format).to_string()
    }

    fn timestamp_of(self, now: &Zoned) -> String {
        let format = if self == TimeFormat::Iso { "%Y-%m-%dT%H:%M:%S%z" } else { "%m/%d/%y %H:%M:%S" };
        now.strftime(format).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_times_have_iostats_formats() {
        let zone = jiff::tz::TimeZone::fixed(jiff::tz::offset(2));
        let now = jiff::Timestamp::UNIX_EPOCH.to_zoned(zone);
        assert_eq!(
            (TimeFormat::C.date_of(&now), TimeFormat::Iso.date_of(&now)),
            ("01/01/70".into(), "1970-01-01".into())
        );
        assert_eq!(TimeFormat::C.timestamp_of(&now), "01/01/70 02:00:00");
        assert_eq!(TimeFormat::Iso.timestamp_of(&now), "1970-01-01T02:00:00+0200");
        let named = [Some("ISO"), Some("iso"), None].map(TimeFormat::named);
        assert_eq!(named, [TimeFormat::Iso, TimeFormat::C, TimeFormat::C]);
    }
}
