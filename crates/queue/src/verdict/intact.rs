//! Checks in debug builds that nodes keep the first promise of [`Node`](crate::Node): a request leaves a node upwards as
//! it arrived there. A node above that sends it down again would reach other sectors otherwise.
//!
//! Costs nothing in release builds.

use crate::NodeId;
use block::{Request, Status};

#[cfg(debug_assertions)]
use crate::DEPTH_MAX;
#[cfg(debug_assertions)]
use block::Op;

/// What a request was when it entered each of the nodes that have it.
#[derive(Clone, Copy)]
pub(super) struct Intact {
    #[cfg(debug_assertions)]
    arrived: [Request; DEPTH_MAX],
}

impl Intact {
    pub(super) const NEW: Intact = Intact {
        #[cfg(debug_assertions)]
        arrived: [Request::flush(); DEPTH_MAX],
    };

    /// The request enters the node at that depth.
    #[inline]
    pub(super) fn enters(&mut self, depth: u8, req: &Request) {
        #[cfg(debug_assertions)]
        {
            self.arrived[usize::from(depth)] = *req;
        }
        #[cfg(not(debug_assertions))]
        let _ = (depth, req);
    }

    /// The request leaves `node`, at that depth, upwards.
    ///
    /// # Panics
    /// In debug builds, when the node has not restored it.
    #[inline]
    pub(super) fn leaves(&self, depth: u8, req: &Request, status: Status, node: NodeId) {
        #[cfg(debug_assertions)]
        {
            let before = &self.arrived[usize::from(depth)];
            let moved = req.op == Op::ZoneAppend && status.is_ok();
            // A read may come up with borrowed memory.
            let borrowed = matches!(req.op, Op::Read | Op::Prefetch);
            assert!(
                req.op == before.op
                    && req.len == before.len
                    && req.flags == before.flags
                    && (moved || req.offset == before.offset)
                    && (borrowed || req.data == before.data),
                "node {} changed a request that leaves it with {status:?}: {before:?} became {req:?}",
                node.0
            );
        }
        #[cfg(not(debug_assertions))]
        let _ = (depth, req, status, node);
    }
}
