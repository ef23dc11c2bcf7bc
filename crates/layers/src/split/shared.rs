//! The shared part of `split`: limits to be set over those of what stands below.

use crate::{Layer, Split};
use block::{Bytes, LimitOverrides, LimitsError, Profile};
use queue::{Node, NodeId, Ring};

/// Holds a device to limits of the user's choice.
#[derive(Clone, Debug)]
pub struct SplitLayer {
    wanted: LimitOverrides,
}

impl SplitLayer {
    /// With these set; every other limit is that of the child. None may be beyond that.
    pub fn new(wanted: LimitOverrides) -> SplitLayer {
        SplitLayer { wanted }
    }
}

impl<R: Ring> Layer<R> for SplitLayer {
    fn name(&self) -> &'static str {
        "split"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let below = &below[0];
        // It is the same device's queue, and no device of its own over another.
        let mut limits = below.limits.clone();
        self.wanted.apply_over(&mut limits)?;
        // What is split fills parts of one buffer, which lent memory is not.
        Ok(Profile { limits, lends: false, bytewise: false, ..below.clone() })
    }

    fn spares(&self, depth: u16) -> u16 {
        Split::children(depth)
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    fn begins(&self, _: usize) -> Option<Bytes> {
        Some(Bytes::ZERO)
    }

    fn node(&self, whole: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(Split::new(&whole.limits, below[0]))
    }
}
