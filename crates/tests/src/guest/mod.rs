//! Tests that need a kernel of their own: devices that the host's kernel shows.
//!
//! They are a table, [`tests`], and not `#[test]` functions, because a test here may leave a task that no signal
//! ends: each runs as a process of its own with a time limit ([`runner`]), so that one that hangs is named and the others
//! still run. `./x guest --suite` runs them in a guest; they take and break what they find, so nothing else may.
//!
//! A test panics to fail. What the kernel at hand cannot do is [`Skip`]ped, with the reason.

pub mod disk;
pub mod dm;
pub mod dmsetup;
pub mod multipath;
pub mod nbd_client;
pub mod nbd_device;
pub mod runner;
pub mod ublk;
pub mod writer;

use std::fmt;

/// Why a test cannot run here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Skip(pub String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a test comes to, if it does not fail.
pub type Done = Result<(), Skip>;

/// One row of the table.
#[derive(Clone, Copy)]
pub struct Test {
    /// `GROUP/NAME`. Where the kernel's selftests or blktests have one of that purpose, it has their name.
    pub name: &'static str,
    /// What it checks, in a line.
    pub what: &'static str,
    /// When it is to run.
    pub when: When,
    /// What it does.
    pub run: fn() -> Done,
}

/// When a test runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// Always: a few seconds, emulated.
    Always,
    /// In long runs only.
    Soak,
}

/// A row that always runs.
pub const fn test(name: &'static str, what: &'static str, run: fn() -> Done) -> Test {
    Test { name, what, when: When::Always, run }
}

/// A row for long runs.
pub const fn soak(name: &'static str, what: &'static str, run: fn() -> Done) -> Test {
    Test { name, what, when: When::Soak, run }
}

/// All of them, in the order in which they run.
pub fn tests() -> Vec<Test> {
    [
        ublk::tests(),
        nbd_client::TESTS.to_vec(),
        nbd_device::TESTS.to_vec(),
        dm::TESTS.to_vec(),
        dmsetup::TESTS.to_vec(),
        multipath::TESTS.to_vec(),
    ]
    .concat()
}
