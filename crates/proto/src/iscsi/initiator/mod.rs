//! The initiator's side, for tests, simulations and benchmarks: login, and numbering of commands.
//!
//! *Invariants:* memory is bounded as at the target's side; no byte of a target causes a panic. There is no
//! error recovery: after a failure, the caller replaces the session by a new login.

mod login;
mod numbers;

pub use login::{Failure, LoggedIn, Login, Options, Stages, Step};
pub use numbers::CommandNumbers;
