//! The initiator's side, for tests, simulations and benchmarks: a login, and the numbering of commands.
//!
//! *Invariants:* bounded like the target's side; no byte of a target causes a panic. It does not recover from
//! errors: a session that fails is replaced by a new login of the caller.

mod login;
mod numbers;

pub use login::{Failure, LoggedIn, Login, Options, Stages, Step};
pub use numbers::CommandNumbers;
