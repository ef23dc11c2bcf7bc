//! Which calls of a file system fail, hang or do only a part.

use std::time::Duration;

/// Calls that can fail.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Call {
    /// Of data.
    Read,
    /// Of data.
    Write,
    /// Punching, zeroing, allocating.
    Fallocate,
    /// Another size.
    Truncate,
    /// fsync or fdatasync.
    Sync,
    /// Of a file that exists.
    Open,
    /// Of a new one.
    Create,
}

/// The outcome of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The call is done.
    Do,
    /// The call fails with this error number.
    Fail(i32),
    /// The call is done after this time.
    Hang(Duration),
    /// Half of it is done, where that can be reported.
    Short,
}

/// A plan: the call with a number, and as many after it as wanted, do not go as they should.
#[derive(Clone, Debug)]
pub struct Faults {
    /// Calls so far, of the kinds that are counted.
    pub calls: u64,
    /// The number of the first that is touched, from 0.
    pub first: u64,
    /// How many are touched.
    pub count: u64,
    /// The outcome of these calls.
    pub verdict: Verdict,
    /// Which kinds are counted; empty: all.
    pub kinds: Vec<Call>,
    /// The calls that were touched, in order.
    pub fired: Vec<Call>,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults {
            calls: 0,
            first: u64::MAX,
            count: 0,
            verdict: Verdict::Do,
            kinds: Vec::new(),
            fired: Vec::new(),
        }
    }
}

impl Faults {
    /// The call with the number `first` and the `count - 1` that follow it.
    pub fn at(first: u64, count: u64, verdict: Verdict) -> Faults {
        Faults { first, count, verdict, ..Faults::default() }
    }

    /// Counts and touches only calls of these kinds.
    #[must_use]
    pub fn only(mut self, kinds: &[Call]) -> Faults {
        self.kinds = kinds.to_vec();
        self
    }

    /// Counts a call and says what becomes of it.
    pub fn judge(&mut self, call: Call) -> Verdict {
        if !self.kinds.is_empty() && !self.kinds.contains(&call) {
            return Verdict::Do;
        }
        let number = self.calls;
        self.calls += 1;
        if number < self.first || number - self.first >= self.count {
            return Verdict::Do;
        }
        self.fired.push(call);
        self.verdict
    }
}
