//! The shared part of `multipath` as a layer: what a device is that has all these ways to it.

use super::{Multipath, MultipathNode};
use crate::Layer;
use block::{Abilities, Fact, LimitsError, Profile, QueueLimits, Sectors};
use queue::{Node, NodeId, Ring};
use std::sync::Arc;

/// Multipath over one child for each path, in order over all groups.
#[derive(Clone)]
pub struct MultipathLayer(pub Arc<Multipath>);

impl<R: Ring> Layer<R> for MultipathLayer {
    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut limits = QueueLimits::stacking();
        let mut whole = below[0].clone();
        for path in below {
            // All paths start at the same sector of the same disk.
            let _ = limits.stack(&path.limits, Sectors(0));
            whole.size = whole.size.min(path.size);
            whole.read_only |= path.read_only;
            whole.abilities = both(whole.abilities, path.abilities);
            whole.bytewise &= path.bytewise;
            whole.lends &= path.lends;
            whole.in_place &= path.in_place;
            whole.sparse &= path.sparse;
            whole.opaque &= path.opaque;
        }
        limits.validate()?;
        Ok(Profile { limits, ..whole })
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(MultipathNode::new(self.0.clone(), below))
    }

    fn describe(&self) -> Vec<Fact> {
        let paths = self.0.config().path_count();
        vec![("multipath", format!("{} of {paths} paths work", self.0.valid()))]
    }
}

/// What can be counted on whichever path is taken.
fn both(a: Abilities, b: Abilities) -> Abilities {
    Abilities {
        flush: a.flush && b.flush,
        fua: a.fua && b.fua,
        discard: a.discard && b.discard,
        write_zeroes: a.write_zeroes && b.write_zeroes,
        fast_zero: a.fast_zero && b.fast_zero,
        rotational: a.rotational || b.rotational,
    }
}
