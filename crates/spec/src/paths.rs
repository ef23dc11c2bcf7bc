//! How the paths of a multipath table are looked after: what multipathd does beside the kernel.

use super::SpecError;
use options::{Options, split};
use options::{format_time, parse_time};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// When the first group with a path is gone back to.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Failback {
    /// When somebody says so.
    #[default]
    Manual,
    /// When it has had a path for so long; 0: at once.
    After(Duration),
}

/// `checker=on|off|TIME,checker_max=TIME,failback=manual|immediate|TIME,no_path_timeout=TIME`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathSpec {
    /// How often a path that failed is read from; `None`: never. Twice as long after each attempt that fails.
    pub checker: Option<Duration>,
    /// And at most so long.
    pub checker_max: Duration,
    /// Going back.
    pub failback: Failback,
    /// How long requests are kept while there is no path; `None`: for ever. The kernel's
    /// `queue_if_no_path_timeout_secs`.
    pub no_path_timeout: Option<Duration>,
}

/// Between two attempts when nothing is said, and at most: multipathd begins with 5 s.
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

impl FromStr for PathSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<PathSpec, SpecError> {
        const KNOWN: &[&str] = &["checker", "checker_max", "failback", "no_path_timeout"];
        let mut options = Options::new("multipath", KNOWN, split(text).into_iter())?;
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
    fn what_is_read_is_written_again() {
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
