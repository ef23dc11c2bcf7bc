//! Multipath: one disk that is reached in several ways, of which some may fail.
//!
//! Device-mapper's target of that name, with its words, states and selectors. [`Multipath`] is the shared part: which
//! paths work and which group is in use, told and changed without a lock. [`MultipathNode`] is a hardware queue's:
//! it chooses paths by counts of its own. [`MultipathLayer`] puts the two over a child for each path.

mod activation;
mod config;
mod failure;
mod node;
mod select;
mod shared;
mod state;

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod mp_6;
#[cfg(all(test, not(loom)))]
mod tests;

pub use activation::{Activation, Outcome};
pub use config::{Config, GroupConfig, PathConfig, QueueMode};
pub use failure::PathFailure;
pub use node::MultipathNode;
pub use select::{PathArgs, Report, SelectorArgs};
pub use shared::MultipathLayer;
pub(crate) use shared::kind;
pub use state::Multipath;
