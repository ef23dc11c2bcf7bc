//! The shared part of a layer: created once per device by the control plane, and shared by the nodes of all
//! queues.

use block::{Bytes, Fact, LimitsError, Profile, QueueLimits, Sectors};
use queue::{Node, NodeId, Ring};

/// A layer as the control plane sees it. Like a backend, a layer has two parts: this one, which derives the
/// layer's profile from its children's, and a node for each hardware queue.
///
/// A layer has one child or several; profiles and node ids of children are always passed in the same order.
pub trait Layer<R: Ring>: Send + Sync {
    /// Returns the name shown in listings.
    fn name(&self) -> &'static str {
        "layer"
    }

    /// Returns the profile of the stack that ends in this layer, given its children's profiles.
    ///
    /// # Errors
    /// [`LimitsError`]: the resulting limits contradict each other.
    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError>;

    /// Returns how many child requests a node of a queue with `depth` tags may have in flight; 0 if it spawns
    /// none.
    fn child_requests(&self, depth: u16) -> u16 {
        let _ = depth;
        0
    }

    /// Returns whether the nodes read or write the data of requests. A layer that returns `false` passes
    /// references to data only, so it also works with memory that only the kernel can access.
    fn accesses_data(&self) -> bool {
        true
    }

    /// Returns whether the nodes pass [`Op::CompareAndWrite`](block::Op::CompareAndWrite) to their only child.
    /// The operation is not sent to stacks with any other layer.
    fn passes_compare_and_write(&self) -> bool {
        false
    }

    /// Returns the offset in this layer at which child number `child` begins, if requests reach the child
    /// with unchanged addresses counted from there. Traces then treat the two as one device. Returns `None`
    /// for layers that remap addresses, and for layers that complete requests themselves (`flakey`).
    fn child_start(&self, _child: usize) -> Option<Bytes> {
        None
    }

    /// Creates the node of one hardware queue. `whole` is the result of [`profile`](Layer::profile).
    fn node(&self, whole: &Profile, below: &[NodeId]) -> Box<dyn Node<R>>;

    /// Changes the options of a running layer to `options`, a text that its driver has validated. Returns
    /// `false` if the layer cannot change while it runs; the caller then replaces it by a new layer.
    fn change(&self, options: &str) -> bool {
        let _ = options;
        false
    }

    /// Returns the facts that `show` lists, in order.
    fn describe(&self) -> Vec<Fact> {
        Vec::new()
    }
}

/// Returns the limits of a layer over one child whose data begins at `start` of that child, before the
/// layer's own limits are applied. A misaligned `start` shows in `alignment_offset`.
pub(crate) fn stacked(below: &QueueLimits, start: Sectors) -> QueueLimits {
    let mut limits = QueueLimits::stacking();
    let _ = limits.stack(below, start);
    // One child has one set of zones. Layers that stack several devices set these limits themselves.
    limits.max_open_zones = below.max_open_zones;
    limits.max_active_zones = below.max_active_zones;
    limits
}
