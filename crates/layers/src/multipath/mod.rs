//! Multipath: one disk that is reached over several paths, some of which may fail.
//!
//! Device-mapper's target `multipath`, with its arguments, states and path selectors. [`Multipath`] is the
//! shared part: which paths are active and which priority group is current, read and changed without a lock.
//! [`MultipathNode`] belongs to a hardware queue and chooses paths by its own counts. [`MultipathLayer`] is
//! the target over one child for each path.

mod activation;
mod config;
mod failure;
mod node;
mod select;
pub(crate) mod shared;
mod state;

#[cfg(all(test, not(loom)))]
mod activation_tests;
#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

pub use activation::{Activation, Outcome};
pub use config::{Config, GroupConfig, PathConfig, QueueMode};
pub use failure::PathFailure;
pub use node::MultipathNode;
pub use select::{PathArgs, Report, SelectorArgs};
pub use shared::MultipathLayer;
pub use state::Multipath;
