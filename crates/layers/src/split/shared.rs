//! The shared part of `split`: limits that the user sets below those of the device.

use crate::{Layer, Split};
use block::{Bytes, LimitOverrides, LimitsError, Profile};
use queue::{Node, NodeId, Ring};

/// A layer that enforces queue limits set by the user.
#[derive(Clone, Debug)]
pub struct SplitLayer {
    wanted: LimitOverrides,
}

impl SplitLayer {
    /// Creates the layer. Limits that `wanted` omits are the child's; none may exceed the child's.
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
        // The limits apply to the device's own queue: no device is stacked on another, so nothing is stacked.
        let mut limits = below.limits.clone();
        self.wanted.apply_over(&mut limits)?;
        // Children of a split read fill parts of one buffer, so a backend cannot answer them zero-copy.
        Ok(Profile { limits, zero_copy_reads: false, bytewise: false, ..below.clone() })
    }

    fn child_requests(&self, depth: u16) -> u16 {
        Split::children(depth)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn passes_compare_and_write(&self) -> bool {
        true
    }

    fn child_start(&self, _: usize) -> Option<Bytes> {
        Some(Bytes::ZERO)
    }

    fn node(&self, whole: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(Split::new(&whole.limits, below[0]))
    }
}
