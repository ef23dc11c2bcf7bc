//! Plans of faults: which calls of a file system fail, hang or are executed only in part.

use std::time::Duration;

/// Calls that can fail.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Call {
    /// Reads of data.
    Read,
    /// Writes of data.
    Write,
    /// `fallocate`: punching, zeroing, allocating.
    Fallocate,
    /// A change of the size.
    Truncate,
    /// fsync or fdatasync.
    Sync,
    /// Opening a file that exists.
    Open,
    /// Creating a file.
    Create,
}

/// The outcome of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The call is executed.
    Do,
    /// The call fails with this error number.
    Fail(i32),
    /// The call is executed after this time.
    Hang(Duration),
    /// Half of the call is executed, where that can be reported.
    Short,
}

/// A plan: a call with a number, and a count of calls after it, have the fault.
#[derive(Clone, Debug)]
pub struct Faults {
    /// Number of calls so far, of the counted kinds.
    pub calls: u64,
    /// Number of the first call with the fault, from 0.
    pub first: u64,
    /// Number of calls with the fault.
    pub count: u64,
    /// The fault.
    pub verdict: Verdict,
    /// Kinds that are counted; empty: all.
    pub kinds: Vec<Call>,
    /// Calls that had the fault, in order.
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
    /// Returns a plan for call number `first` and the `count - 1` calls after it.
    pub fn at(first: u64, count: u64, verdict: Verdict) -> Faults {
        Faults { first, count, verdict, ..Faults::default() }
    }

    /// Restricts the plan to calls of these kinds.
    #[must_use]
    pub fn only(mut self, kinds: &[Call]) -> Faults {
        self.kinds = kinds.to_vec();
        self
    }

    /// Counts a call and returns its outcome.
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
