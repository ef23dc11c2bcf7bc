//! The available schedulers, their parameters under the kernel's names, and the values in force.
//!
//! Values belong to a device. Each of its queues reads them in every turn that dispatches requests, so a
//! changed value takes effect in the next turn, without a pause. Source of names, units and defaults: the
//! kernel's block/mq-deadline.c and block/kyber-iosched.c.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A scheduling policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Batches in sector order, reads before writes; each request has a deadline.
    MqDeadline,
    /// Limits reads and writes in flight so that latencies stay within targets.
    Kyber,
}

impl Policy {
    /// All policies.
    pub const ALL: [Policy; 2] = [Policy::MqDeadline, Policy::Kyber];

    /// Returns the kernel's name of the policy.
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

/// A parameter of a scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Parameter {
    /// Deadline of a read after its arrival.
    ReadExpire,
    /// Deadline of a write after its arrival.
    WriteExpire,
    /// Number of batches of reads that may precede waiting writes.
    WritesStarved,
    /// Whether requests are also merged in front of others.
    FrontMerges,
    /// Number of requests in a batch.
    FifoBatch,
    /// Target latency of reads.
    ReadLatNsec,
    /// Target latency of writes.
    WriteLatNsec,
    /// Largest number of writes in the lists and in flight; later ones wait for admission. 0: the default.
    AsyncDepth,
    /// Largest number of requests that a queue has in flight at the device. The kernel's drivers set it under
    /// this name.
    QueueDepth,
    /// Restricts merging, as the kernel's queue attribute: 0, merge with any waiting request; 1, only with
    /// the last one inserted or merged into; 2, no merging.
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
/// The largest number of requests in a queue.
const DEPTH_MAX: u64 = 4096;

/// The row of each [`Parameter`]: name, unit, smallest and largest value, default. Times are in nanoseconds.
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

/// Returns whether any scheduler has a parameter of that name.
pub fn is_parameter(name: &str) -> bool {
    name == PRIO_AGING_EXPIRE || TABLE.iter().any(|row| row.1 == name)
}

/// A parameter of the kernel's mq-deadline that is rejected with a reason.
const PRIO_AGING_EXPIRE: &str = "prio_aging_expire";
/// Percentage of a queue's requests that may be writes under kyber (`KYBER_ASYNC_PERCENT`).
const KYBER_ASYNC_PERCENT: u64 = 75;

/// Error in a scheduler's options.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParameterError {
    /// No scheduler has this name.
    #[error("unknown scheduler \"{0}\" ({near}schedulers: none, mq-deadline, kyber)", near = near_policy(.0))]
    Policy(String),
    /// `prio_aging_expire`: requests have no priorities.
    #[error("prio_aging_expire has no meaning here: requests have no priorities (leave it out)")]
    Priorities,
    /// The scheduler has no such parameter.
    #[error("{0} has no parameter \"{1}\" ({near}parameters: {2})", near = options::did_you_mean(.1, .2.split(", ")))]
    Unknown(&'static str, String, String),
    /// A parameter was specified twice.
    #[error("{0} is specified twice (leave one out)")]
    Twice(&'static str),
    /// The value is invalid.
    #[error("{0} cannot be \"{1}\" (write {2})")]
    Value(&'static str, String, String),
}

fn near_policy(name: &str) -> String {
    options::did_you_mean(name, ["none"].into_iter().chain(Policy::ALL.map(Policy::name)))
}

/// A scheduler with the parameters that were specified: `mq-deadline,read_expire=100`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// The policy.
    pub policy: Policy,
    given: [Option<u64>; COUNT],
}

impl Choice {
    /// Creates a choice with default parameters.
    pub fn of(policy: Policy) -> Choice {
        Choice { policy, given: [None; COUNT] }
    }

    /// Sets a parameter. A number without a unit is in the kernel's unit: milliseconds, or nanoseconds for
    /// `_nsec`.
    ///
    /// # Errors
    /// The scheduler does not have the parameter, or the value is invalid.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), ParameterError> {
        let row = TABLE.iter().find(|row| row.1 == name && self.policy.has(row.0));
        let Some(&(parameter, name, unit, min, max, _)) = row else {
            if name == PRIO_AGING_EXPIRE && self.policy == Policy::MqDeadline {
                return Err(ParameterError::Priorities);
            }
            let parameters = self.parameters().map(|row| row.1).collect::<Vec<_>>().join(", ");
            return Err(ParameterError::Unknown(self.policy.name(), name.to_owned(), parameters));
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

    /// Returns the value of a parameter, which is its default if it was not specified.
    pub fn value(&self, parameter: Parameter) -> u64 {
        self.given[parameter as usize].unwrap_or(TABLE[parameter as usize].5)
    }

    /// Returns names and values of all parameters in the kernel's units. `requests` is the depth of the
    /// queues.
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

/// The values in force, shared by all queues of a device.
#[derive(Debug)]
pub(crate) struct Values {
    policy: Policy,
    values: [AtomicU64; COUNT],
    /// The largest depth of the device's queues; 0: the device has no queue yet.
    requests: AtomicU64,
}

/// A copy of the values for one turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Snapshot {
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

    pub(crate) fn snapshot(&self) -> Snapshot {
        let values = std::array::from_fn(|at| self.values[at].load(Relaxed));
        Snapshot { values, requests: self.requests(), policy: self.policy }
    }
}

impl Snapshot {
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
    fn defaults_and_units_are_the_kernels() {
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
    fn a_choice_is_parsed_and_formatted() {
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
    fn invalid_parameters_are_rejected_with_the_valid_ones() {
        for (text, part) in [
            ("bfq", "(schedulers: none, mq-deadline, kyber)"),
            ("mq-deadlin", "unknown scheduler \"mq-deadlin\" (did you mean mq-deadline? schedulers: none, "),
            ("kybr", "(did you mean kyber? "),
            (
                "mq-deadline,read_expir=5",
                "has no parameter \"read_expir\" (did you mean read_expire? parameters: ",
            ),
            (
                "kyber,read_expire=1",
                "parameters: read_lat_nsec, write_lat_nsec, async_depth, queue_depth, nomerges",
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
