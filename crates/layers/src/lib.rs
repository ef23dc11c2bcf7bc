//! Layers: nodes that transform I/O on its way to a backend.
//!
//! Each layer is one file (or one folder) behind one small structure. A layer knows neither the nodes above
//! it nor the kind of node below it, only its children's node ids.
//!
//! *Invariant:* a layer refers to no file, socket or export.

#![forbid(unsafe_code)]

pub mod cow;
pub mod dm;
pub mod drivers;
mod layer;
pub mod multipath;
mod pass;
pub mod scheduler;
mod split;
mod split_requests;
#[cfg(test)]
mod testing;
mod window;

pub use cow::{Cow, CowLayer};
pub use drivers::LayerOptions;
pub use layer::Layer;
pub use pass::Pass;
pub use split::{Split, SplitLayer};
pub use window::{Window, WindowLayer};
