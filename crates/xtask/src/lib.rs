//! The tasks of `./x`, once the machine has what they need.
//!
//! `commands` runs other programs and counts results; `programs` runs test programs side by side, `flakes`
//! under load; `foreign` and `user_mode_linux` fetch test programs of other releases; `tidy` checks the rules of the source tree,
//! `crate_rules` the dependencies between crates, and `words` the wording of comments; `guest` runs a job on
//! a real kernel, and `ceph` a cluster. Nothing here is linked into the product.
#![forbid(unsafe_code)]

pub mod ceph;
pub mod commands;
pub mod crate_rules;
pub mod flakes;
pub mod folders;
pub mod foreign;
pub mod guest;
pub mod package;
mod programs;
mod sanitizers;
pub mod tidy;
pub mod user_mode_linux;
mod words;
