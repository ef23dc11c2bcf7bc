//! `--multipath OPTION,…`: tests of a multipath table's paths and failback, which multipathd does for the
//! kernel.

use super::SpecError;
use options::{OptionRow, Options, split};
use options::{format_time, parse_time};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The time at which I/O returns to the first path group with a working path.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Failback {
    /// Only when a message requests it.
    #[default]
    Manual,
    /// After the group has had a working path for this time; 0: at once.
    After(Duration),
}

/// Settings of the path checker and of failback.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathSpec {
    /// The first interval of test reads from a failed path, doubled after each failure; `None`: no tests.
    pub checker: Option<Duration>,
    /// The longest interval.
    pub checker_max: Duration,
    /// The time at which I/O returns to the first path group.
    pub failback: Failback,
    /// How long requests wait while no path works; `None`: without end. The kernel's
    /// `queue_if_no_path_timeout_secs`.
    pub no_path_timeout: Option<Duration>,
}

/// The default of `checker`: multipathd starts with 5 s.
const CHECKER: Duration = Duration::from_secs(1);
const CHECKER_MAX: Duration = Duration::from_secs(20);
const CHECKER_MIN: Duration = Duration::from_millis(10);

impl Default for PathSpec {
    fn default() -> PathSpec {
        PathSpec {
            checker: Some(CHECKER),
            checker_max: CHECKER_MAX,
            failback: Failback::Manual,
            no_path_timeout: None,
        }
    }
}

/// The options of `--multipath`.
pub const MULTIPATH_OPTIONS: &[OptionRow] = &[
    OptionRow::value(
        "checker",
        "on|off|TIME",
        "on",
        "how often a failed path is tested; on: every second at first",
    ),
    OptionRow::value(
        "checker_max",
        "TIME",
        "20s",
        "the longest interval of tests; it doubles after each failure",
    ),
    OptionRow::value(
        "failback",
        "manual|immediate|TIME",
        "manual",
        "when to return to the first path group: at once, or after it has had a path for so long",
    ),
    OptionRow::value("no_path_timeout", "TIME", "never", "fail requests that wait for a path for so long"),
];

impl FromStr for PathSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<PathSpec, SpecError> {
        let mut options = Options::new("multipath", MULTIPATH_OPTIONS, split(text).into_iter())?;
        let time = |text: Option<String>| text.map(|text| parse_time(&text)).transpose();
        let mut spec = PathSpec::default();
        match options.text("checker")?.as_deref() {
            None | Some("on") => {}
            Some("off") => spec.checker = None,
            Some(text) => spec.checker = Some(parse_time(text)?.max(CHECKER_MIN)),
        }
        let least = spec.checker.unwrap_or_default();
        spec.checker_max = time(options.text("checker_max")?)?.unwrap_or(CHECKER_MAX).max(least);
        match options.text("failback")?.as_deref() {
            None | Some("manual") => {}
            Some("immediate") => spec.failback = Failback::After(Duration::ZERO),
            Some(text) => spec.failback = Failback::After(parse_time(text)?),
        }
        spec.no_path_timeout = time(options.text("no_path_timeout")?)?.filter(|time| !time.is_zero());
        Ok(spec)
    }
}

impl fmt::Display for PathSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.checker {
            None => f.write_str("checker=off")?,
            Some(time) => {
                write!(f, "checker={},checker_max={}", format_time(time), format_time(self.checker_max))?
            }
        }
        match self.failback {
            Failback::Manual => f.write_str(",failback=manual")?,
            Failback::After(Duration::ZERO) => f.write_str(",failback=immediate")?,
            Failback::After(time) => write!(f, ",failback={}", format_time(time))?,
        }
        match self.no_path_timeout {
            None => Ok(()),
            Some(time) => write!(f, ",no_path_timeout={}", format_time(time)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_settings_parse_back_from_their_text() {
        for text in [
            "checker=1s,checker_max=20s,failback=manual",
            "checker=off,failback=immediate",
            "checker=50ms,checker_max=1s,failback=5s,no_path_timeout=3s",
        ] {
            let spec: PathSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            assert_eq!(spec.to_string().parse::<PathSpec>().unwrap(), spec);
        }
        assert_eq!("checker=on".parse::<PathSpec>().unwrap(), PathSpec::default());
        assert!("checker=fast".parse::<PathSpec>().is_err() && "speed=1".parse::<PathSpec>().is_err());
    }
}
