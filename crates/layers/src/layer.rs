//! The shared part of a layer: what is made once, on the control plane, for all its queues.

use block::{Bytes, Fact, LimitsError, Profile, QueueLimits, Sectors};
use queue::{Node, NodeId, Ring};

/// A layer as the control plane sees it. Like a backend it has two parts: this one, which says what the
/// layer makes of what stands below it, and a node for each hardware queue.
///
/// A layer has one child or several; it is always given their facts and their numbers in the same order.
pub trait Layer<R: Ring>: Send + Sync {
    /// Its name in listings.
    fn name(&self) -> &'static str {
        "layer"
    }

    /// What the whole is, given what each child is.
    ///
    /// # Errors
    /// Limits that contradict each other.
    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError>;

    /// How many child requests a node may have under way in a queue of that depth. 0: it spawns none.
    fn spares(&self, depth: u16) -> u16 {
        let _ = depth;
        0
    }

    /// Whether its nodes look at the data of requests. One that hands data on by name alone can be given memory that
    /// only the kernel can reach.
    fn looks_at_data(&self) -> bool {
        true
    }

    /// Where the child of that number begins in this, if requests reach it with the addresses that they came with, which
    /// it counts from there: to a trace, the two are then one device. `None` of a layer that moves requests, and of one
    /// that ends them itself, as `flakey` does: that they ended shows at its own device.
    fn begins(&self, _child: usize) -> Option<Bytes> {
        None
    }

    /// The node of one hardware queue. `whole`: what [`profile`](Layer::profile) said.
    fn node(&self, whole: &Profile, below: &[NodeId]) -> Box<dyn Node<R>>;

    /// Go on with other words for its options, which its driver has read. Whether it can: another layer is put in its place
    /// if not.
    fn change(&self, words: &str) -> bool {
        let _ = words;
        false
    }

    /// What `show` says about it, in order.
    fn describe(&self) -> Vec<Fact> {
        Vec::new()
    }
}

/// The limits of a layer over one child whose data begins at `start` of it, before the layer's own are set.
/// Whether blocks still line up stands in them.
pub(crate) fn stacked(below: &QueueLimits, start: Sectors) -> QueueLimits {
    let mut limits = QueueLimits::stacking();
    let _ = limits.stack(below, start);
    // Over one child the zones are the same; whoever stacks devices of several kinds has to say what holds.
    limits.max_open_zones = below.max_open_zones;
    limits.max_active_zones = below.max_active_zones;
    limits
}
