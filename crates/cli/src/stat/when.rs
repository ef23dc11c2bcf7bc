//! When a report was made, in the words of iostat: its day in the JSON document, its time where `-t` asks for that.
//!
//! `S_TIME_FORMAT=ISO` in the environment asks for ISO 8601, as of iostat; else it is what iostat writes in the C locale.
//! Times are those of the local time zone.

use jiff::Zoned;

/// In which form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Clock {
    C,
    Iso,
}

impl Clock {
    /// What the environment asks for.
    pub(super) fn of_environment() -> Clock {
        Clock::named(std::env::var("S_TIME_FORMAT").ok().as_deref())
    }

    fn named(format: Option<&str>) -> Clock {
        if format == Some("ISO") { Clock::Iso } else { Clock::C }
    }

    /// The day, as now.
    pub(super) fn date(self) -> String {
        self.date_of(&Zoned::now())
    }

    /// Day and time, as now.
    pub(super) fn timestamp(self) -> String {
        self.timestamp_of(&Zoned::now())
    }

    fn date_of(self, now: &Zoned) -> String {
        let format = if self == Clock::Iso { "%Y-%m-%d" } else { "%m/%d/%y" };
        now.strftime(format).to_string()
    }

    fn timestamp_of(self, now: &Zoned) -> String {
        let format = if self == Clock::Iso { "%Y-%m-%dT%H:%M:%S%z" } else { "%m/%d/%y %H:%M:%S" };
        now.strftime(format).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_times_are_written_as_iostat_writes_them() {
        let zone = jiff::tz::TimeZone::fixed(jiff::tz::offset(2));
        let now = jiff::Timestamp::UNIX_EPOCH.to_zoned(zone);
        assert_eq!(
            (Clock::C.date_of(&now), Clock::Iso.date_of(&now)),
            ("01/01/70".into(), "1970-01-01".into())
        );
        assert_eq!(Clock::C.timestamp_of(&now), "01/01/70 02:00:00");
        assert_eq!(Clock::Iso.timestamp_of(&now), "1970-01-01T02:00:00+0200");
        let named = [Some("ISO"), Some("iso"), None].map(Clock::named);
        assert_eq!(named, [Clock::Iso, Clock::C, Clock::C]);
    }
}
