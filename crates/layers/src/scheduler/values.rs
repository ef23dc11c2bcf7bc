//! Which schedulers there are, their parameters under the kernel's names, and the values that are in force.
//!
//! Values belong to a device and are read by all of its queues, at every turn that has something to start: one that
//! is changed is heeded from the next turn on, without a pause. Source of names, units and defaults: the kernel's
//! block/mq-deadline.c and block/kyber-iosched.c.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Each request has a deadline; else reads go before writes, in batches in the order of sectors.
    MqDeadline,
    /// So many reads and writes at the device at once as keep to the latencies that are aimed at.
    Kyber,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 2] = [Policy::MqDeadline, Policy::Kyber];

    /// The kernel's name.
    pub const fn name(self) -> &'static str {
        match self {
            Policy::MqDeadline => "mq-deadline",
            Policy::Kyber => "kyber",
        }
    }

    fn has(self, parameter: Parameter) -> bool {
        use Parameter::*;
        match parameter {
            ReadExpire | WriteExpire | WritesStarved | FrontMerges | FifoBatch => self == Policy::MqDeadline,
            ReadLatNsec | WriteLatNsec => self == Policy::Kyber,
            AsyncDepth | QueueDepth | Nomerges => true,
        }
    }
}

/// What can be set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Parameter {
    /// How long a read waits at most before it goes before others.
    ReadExpire,
    /// The same of writes.
    WriteExpire,
    /// How often reads may go before writes that wait.
    WritesStarved,
    /// Whether requests are merged to the beginning of others, too.
    FrontMerges,
    /// Requests of a batch.
    FifoBatch,
    /// The latency that reads are to keep to.
    ReadLatNsec,
    /// The latency that writes are to keep to.
    WriteLatNsec,
    /// Writes that the scheduler has in hand at once; those that come after stand in line before it. 0: the default.
    AsyncDepth,
    /// Requests that a queue has at the device at once. The kernel's drivers say it, which calls it the same.
    QueueDepth,
    /// With what requests are merged: 0, whatever they touch; 1, only with what came or was merged last; 2, nothing. The
    /// kernel's attribute of a queue.
    Nomerges,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    Milliseconds,
    Nanoseconds,
    Number,
}

const COUNT: usize = 10;
const MS: u64 = 1_000_000;
const DAY_NS: u64 = 86_400_000 * MS;
/// As many requests as a queue can have.
const DEPTH_MAX: u64 = 4096;

/// By [`Parameter`]: name, unit, smallest and largest value, default. Times in nanoseconds.
const TABLE: [(Parameter, &str, Unit, u64, u64, u64); COUNT] = [
    (Parameter::ReadExpire, "read_expire", Unit::Milliseconds, 0, DAY_NS, 500 * MS),
    (Parameter::WriteExpire, "write_expire", Unit::Milliseconds, 0, DAY_NS, 5000 * MS),
    (Parameter::WritesStarved, "writes_starved", Unit::Number, 0, 1 << 31, 2),
    (Parameter::FrontMerges, "front_merges", Unit::Number, 0, 1, 1),
    (Parameter::FifoBatch, "fifo_batch", Unit::Number, 0, 1 << 31, 16),
    (Parameter::ReadLatNsec, "read_lat_nsec", Unit::Nanoseconds, 1, DAY_NS, 2 * MS),
    (Parameter::WriteLatNsec, "write_lat_nsec", Unit::Nanoseconds, 1, DAY_NS, 10 * MS),
    (Parameter::AsyncDepth, "async_depth", Unit::Number, 0, DEPTH_MAX, 0),
    (Parameter::QueueDepth, "queue_depth", Unit::Number, 1, DEPTH_MAX, 32),
    (Parameter::Nomerges, "nomerges", Unit::Number, 0, 2, 0),
];

/// Whether that is the name of a parameter, of whichever scheduler.
pub fn is_parameter(name: &str) -> bool {
    name == PRIO_AGING_EXPIRE || TABLE.iter().any(|row| row.1 == name)
}

/// A parameter of the kernel's that is refused with its reason.
const PRIO_AGING_EXPIRE: &str = "prio_aging_expire";
/// Percent of a queue's requests that may be writes that kyber has in hand (`KYBER_ASYNC_PERCENT`).
const KYBER_ASYNC_PERCENT: u64 = 75;

/// What is wrong with a scheduler's description.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParameterError {
    /// Such a scheduler there is not.
    #[error("there is no scheduler \"{0}\" (there are none, mq-deadline and kyber)")]
    Policy(String),
    /// Requests have none.
    #[error("prio_aging_expire has no meaning here: requests have no priorities (leave it out)")]
    Priorities,
    /// It has no such parameter.
    #[error("{0} has no parameter \"{1}\" (there are {2})")]
    Unknown(&'static str, String, String),
    /// It has one, and not twice.
    #[error("{0} is given twice (leave one out)")]
    Twice(&'static str),
    /// The value.
    #[error("{0} cannot be \"{1}\" (write {2})")]
    Value(&'static str, String, String),
}

/// A scheduler with the parameters that were given: `mq-deadline,read_expire=100`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Which.
    pub policy: Policy,
    given: [Option<u64>; COUNT],
}

impl Choice {
    /// One with nothing but defaults.
    pub fn of(policy: Policy) -> Choice {
        Choice { policy, given: [None; COUNT] }
    }

    /// Give a parameter a value, as it is written: plain numbers have the kernel's unit, milliseconds or nanoseconds.
    ///
    /// # Errors
    /// What the scheduler does not have, and values that it cannot have.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), ParameterError> {
        let row = TABLE.iter().find(|row| row.1 == name && self.policy.has(row.0));
        let Some(&(parameter, name, unit, min, max, _)) = row else {
            if name == PRIO_AGING_EXPIRE && self.policy == Policy::MqDeadline {
                return Err(ParameterError::Priorities);
            }
            let there_are = self.parameters().map(|row| row.1).collect::<Vec<_>>().join(", ");
            return Err(ParameterError::Unknown(self.policy.name(), name.to_owned(), there_are));
        };
        let number = parse(value, unit).filter(|number| (min..=max).contains(number));
        let number = number.ok_or_else(|| {
            let how = match unit {
                Unit::Milliseconds => "milliseconds, or a time such as 250ms, up to a day".to_owned(),
                Unit::Nanoseconds => "nanoseconds, or a time such as 2ms, up to a day".to_owned(),
                Unit::Number => format!("a number from {min} to {max}"),
            };
            ParameterError::Value(name, value.to_owned(), how)
        })?;
        self.given[parameter as usize] = Some(number);
        Ok(())
    }

    fn parameters(&self) -> impl Iterator<Item = &'static (Parameter, &'static str, Unit, u64, u64, u64)> {
        let policy = self.policy;
        TABLE.iter().filter(move |row| policy.has(row.0))
    }

    /// The value in force.
    pub fn value(&self, parameter: Parameter) -> u64 {
        self.given[parameter as usize].unwrap_or(TABLE[parameter as usize].5)
    }

    /// All parameters that it has, in the kernel's units. `requests`: those that a queue may have.
    pub(crate) fn shown(&self, requests: u64) -> Vec<(&'static str, String)> {
        let show = |row: &(Parameter, &'static str, Unit, u64, u64, u64)| {
            let value = match (row.0, self.value(row.0)) {
                (Parameter::AsyncDepth, 0) => async_depth(self.policy, 0, requests),
                (_, value) => value,
            };
            (row.1, show(value, row.2))
        };
        self.parameters().map(show).collect()
    }
}

fn show(value: u64, unit: Unit) -> String {
    match unit {
        Unit::Milliseconds if value.is_multiple_of(MS) => (value / MS).to_string(),
        Unit::Milliseconds => format!("{value}ns"),
        Unit::Nanoseconds | Unit::Number => value.to_string(),
    }
}

fn parse(text: &str, unit: Unit) -> Option<u64> {
    let plain = match unit {
        Unit::Milliseconds => MS,
        Unit::Nanoseconds | Unit::Number => 1,
    };
    let suffixes: &[(&str, u64)] = match unit {
        Unit::Number => &[],
        _ => &[("ns", 1), ("us", 1000), ("ms", MS), ("s", 1000 * MS)],
    };
    let with = suffixes.iter().find_map(|(suffix, scale)| Some((text.strip_suffix(suffix)?, *scale)));
    let (digits, scale) = with.unwrap_or((text, plain));
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(scale)
}

fn async_depth(policy: Policy, wanted: u64, requests: u64) -> u64 {
    match (wanted, policy) {
        (0, Policy::MqDeadline) => requests,
        (0, Policy::Kyber) => (requests * KYBER_ASYNC_PERCENT / 100).max(1),
        _ => wanted,
    }
}

impl FromStr for Choice {
    type Err = ParameterError;

    fn from_str(text: &str) -> Result<Choice, ParameterError> {
        let mut items = text.split(',');
        let name = items.next().unwrap_or_default();
        let policy = Policy::ALL.into_iter().find(|policy| policy.name() == name);
        let mut choice = Choice::of(policy.ok_or_else(|| ParameterError::Policy(name.to_owned()))?);
        for item in items {
            let (name, value) = item.split_once('=').unwrap_or((item, ""));
            let before = choice.given;
            choice.set(name, value)?;
            let twice = TABLE.iter().find(|row| row.1 == name && before[row.0 as usize].is_some());
            if let Some(row) = twice {
                return Err(ParameterError::Twice(row.1));
            }
        }
        Ok(choice)
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.policy.name())?;
        for row in TABLE {
            if let Some(value) = self.given[row.0 as usize] {
                write!(f, ",{}={}", row.1, show(value, row.2))?;
            }
        }
        Ok(())
    }
}

/// The values in force, for all queues of a device.
#[derive(Debug)]
pub(crate) struct Values {
    policy: Policy,
    values: [AtomicU64; COUNT],
    /// Requests that a queue may have: the most of any that was made. 0: there was none.
    requests: AtomicU64,
}

/// The same as one turn has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    values: [u64; COUNT],
    requests: u64,
    policy: Policy,
}

impl Values {
    pub(crate) fn new(choice: &Choice) -> Values {
        let values = std::array::from_fn(|at| AtomicU64::new(choice.value(TABLE[at].0)));
        Values { policy: choice.policy, values, requests: AtomicU64::new(0) }
    }

    pub(crate) fn set(&self, choice: &Choice) {
        for (row, value) in TABLE.iter().zip(&self.values) {
            value.store(choice.value(row.0), Relaxed);
        }
    }

    pub(crate) fn set_requests(&self, requests: u16) {
        self.requests.fetch_max(requests.into(), Relaxed);
    }

    pub(crate) fn requests(&self) -> u64 {
        match self.requests.load(Relaxed) {
            0 => DEPTH_MAX,
            requests => requests,
        }
    }

    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    pub(crate) fn now(&self) -> Now {
        let values = std::array::from_fn(|at| self.values[at].load(Relaxed));
        Now { values, requests: self.requests(), policy: self.policy }
    }
}

impl Now {
    pub(crate) fn get(&self, parameter: Parameter) -> u64 {
        self.values[parameter as usize]
    }

    pub(crate) fn async_depth(&self) -> u64 {
        async_depth(self.policy, self.get(Parameter::AsyncDepth), self.requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_the_kernels_in_its_units() {
        let shown = |text: &str| {
            let shown = text.parse::<Choice>().unwrap().shown(128);
            shown.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            shown("mq-deadline"),
            "read_expire=500 write_expire=5000 writes_starved=2 front_merges=1 fifo_batch=16 async_depth=128 \
             queue_depth=32 nomerges=0"
        );
        assert_eq!(
            shown("kyber"),
            "read_lat_nsec=2000000 write_lat_nsec=10000000 async_depth=96 queue_depth=32 nomerges=0"
        );
    }

    #[test]
    fn a_choice_is_read_and_written_again() {
        for (text, again) in [
            ("kyber", "kyber"),
            ("mq-deadline,read_expire=100,fifo_batch=1", "mq-deadline,read_expire=100,fifo_batch=1"),
            ("mq-deadline,write_expire=2s", "mq-deadline,write_expire=2000"),
            ("kyber,read_lat_nsec=5ms,queue_depth=8", "kyber,read_lat_nsec=5000000,queue_depth=8"),
        ] {
            let choice: Choice = text.parse().unwrap();
            assert_eq!(choice.to_string(), again);
            assert_eq!(again.parse::<Choice>(), Ok(choice));
        }
    }

    #[test]
    fn what_a_scheduler_does_not_have_is_refused_with_what_it_has() {
        for (text, part) in [
            ("bfq", "none, mq-deadline and kyber"),
            (
                "kyber,read_expire=1",
                "there are read_lat_nsec, write_lat_nsec, async_depth, queue_depth, nomerges",
            ),
            ("mq-deadline,prio_aging_expire=1", "no priorities"),
            ("mq-deadline,front_merges=2", "a number from 0 to 1"),
            ("kyber,nomerges=3", "a number from 0 to 2"),
            ("mq-deadline,read_expire=fast", "milliseconds"),
            ("mq-deadline,fifo_batch", "fifo_batch cannot be \"\""),
            ("mq-deadline,fifo_batch=1,fifo_batch=2", "twice"),
            ("kyber,read_lat_nsec=0", "nanoseconds"),
            ("kyber,queue_depth=18446744073709551616", "a number from 1 to 4096"),
        ] {
            let error = text.parse::<Choice>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
