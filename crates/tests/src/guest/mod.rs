//! Tests that need a kernel of their own, for devices of the kernel.
//!
//! They are entries of a table, [`tests`], and not `#[test]` functions, because a test here may leave a task
//! in uninterruptible sleep: each runs as a process of its own with a time limit ([`runner`]), so that one
//! that hangs is named and the others still run. `./x guest --suite` runs them in a guest; they change the
//! machine's devices, so no other program may use them.
//!
//! A test panics to fail. A test that the kernel does not support is [`Skip`]ped, with the reason.

pub mod disk;
pub mod dm;
pub mod dmsetup;
pub mod iscsi;
pub mod multipath;
pub mod nbd_client;
pub mod nbd_device;
pub mod runner;
pub mod ublk;
pub mod writer;

use std::fmt;

/// The reason why a test cannot run here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Skip(pub String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The result of a test that does not fail.
pub type Done = Result<(), Skip>;

/// A test: an entry of the table.
#[derive(Clone, Copy)]
pub struct Test {
    /// `GROUP/NAME`. A test that checks the same as one of the kernel's selftests or blktests has its name.
    pub name: &'static str,
    /// A line about what it checks.
    pub what: &'static str,
    /// When it runs.
    pub when: When,
    /// The test itself.
    pub run: fn() -> Done,
}

/// When a test runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// Always: a few seconds, emulated.
    Always,
    /// Except with `--quick`: rows of a feature that another row tests as well, and those that take longest.
    Full,
    /// In long runs only.
    Soak,
}

/// Creates a test that always runs.
pub const fn test(name: &'static str, what: &'static str, run: fn() -> Done) -> Test {
    Test { name, what, when: When::Always, run }
}

/// Creates a test that runs except with `--quick`.
pub const fn full(name: &'static str, what: &'static str, run: fn() -> Done) -> Test {
    Test { name, what, when: When::Full, run }
}

/// Creates a test for long runs.
pub const fn soak(name: &'static str, what: &'static str, run: fn() -> Done) -> Test {
    Test { name, what, when: When::Soak, run }
}

/// Returns all tests, in the order in which they run.
pub fn tests() -> Vec<Test> {
    [
        ublk::tests(),
        nbd_client::TESTS.to_vec(),
        nbd_device::TESTS.to_vec(),
        dm::TESTS.to_vec(),
        dmsetup::TESTS.to_vec(),
        multipath::TESTS.to_vec(),
        iscsi::tests(),
    ]
    .concat()
}
