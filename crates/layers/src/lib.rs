//! Layers: nodes that change I/O on its way to a backend.
//!
//! Each is one file (or one folder) behind one small structure, and knows neither what stands above it nor
//! what stands below: only its child's number in the stack.
//!
//! *Invariant:* a layer names no file, socket or export.

#![forbid(unsafe_code)]

pub mod cow;
pub mod dm;
pub mod drivers;
mod layer;
pub mod multipath;
mod pass;
mod pieces;
pub mod scheduler;
mod split;
#[cfg(test)]
mod testing;
mod window;

pub use cow::{Cow, CowLayer};
pub use drivers::Words;
pub use layer::Layer;
pub use pass::Pass;
pub use split::{Split, SplitLayer};
pub use window::{Window, WindowLayer};
