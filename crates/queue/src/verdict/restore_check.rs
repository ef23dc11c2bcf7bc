//! Checks in debug builds that a node restores a request before it completes it, as [`Node`](crate::Node)
//! requires. Otherwise a node above that sends the request down again would access other sectors.
//!
//! Empty in release builds.

use crate::{DEPTH_MAX, NodeId};
use block::{Request, Status};

#[cfg(debug_assertions)]
use block::Op;

/// A request as it entered each node on its path.
#[derive(Clone, Copy)]
pub(super) struct RestoreCheck {
    #[cfg(debug_assertions)]
    arrived: [Request; DEPTH_MAX],
}

impl RestoreCheck {
    pub(super) const NEW: RestoreCheck = RestoreCheck {
        #[cfg(debug_assertions)]
        arrived: [Request::flush(); DEPTH_MAX],
    };

    /// Records the request as it enters the node at that depth.
    #[inline]
    pub(super) fn enters(&mut self, depth: u8, req: &Request) {
        #[cfg(debug_assertions)]
        {
            self.arrived[usize::from(depth)] = *req;
        }
        #[cfg(not(debug_assertions))]
        let _ = (depth, req);
    }

    /// Checks the request as the node at that depth of its path completes it.
    ///
    /// # Panics
    /// In debug builds, if the node has not restored it.
    #[inline]
    pub(super) fn leaves(&self, depth: u8, req: &Request, status: Status, path: &[NodeId; DEPTH_MAX]) {
        #[cfg(debug_assertions)]
        {
            let before = &self.arrived[usize::from(depth)];
            let moved = req.op == Op::ZoneAppend && status.is_ok();
            // A zero-copy read may name memory of the node.
            let borrowed = matches!(req.op, Op::Read | Op::Prefetch);
            assert!(
                req.op == before.op
                    && req.len == before.len
                    && req.flags == before.flags
                    && (moved || req.offset == before.offset)
                    && (borrowed || req.data == before.data),
                "node {} changed a request that leaves it with {status:?}: {before:?} became {req:?}",
                path[usize::from(depth)].0
            );
        }
        #[cfg(not(debug_assertions))]
        let _ = (depth, req, status, path);
    }
}
