//! Copies one request to several children. The request completes when all of them have, with the first error.
//!
//! Nodes use it for flushes, which every device must receive, and for writes to several devices.

use block::{Cookie, Request, Status};
use queue::{ChildKind, Cx, NodeId, Ring, Verdict};

#[derive(Clone, Copy)]
struct Open {
    left: u32,
    status: Status,
}

/// The requests of a node that are in flight at several children.
#[derive(Default)]
pub struct FanOut {
    /// The state of each request, by tag; unused for a request that is not fanned out.
    open: Box<[Open]>,
}

impl FanOut {
    /// Allocates the state for `tags` requests. Call it in the node's `attach`.
    pub fn attach(&mut self, tags: usize) {
        self.open = vec![Open { left: 0, status: Status::Ok }; tags].into();
    }

    /// Sends a request to each of these children; `request` returns the request for a child's index. The node
    /// must be allowed at least as many child requests as `children` has entries, or the request is blocked
    /// forever.
    pub fn start<R: Ring>(
        &mut self,
        io: Cookie,
        children: &[NodeId],
        cx: &mut Cx<'_, R>,
        mut request: impl FnMut(usize) -> Request,
    ) -> Verdict {
        if children.is_empty() {
            return Verdict::Up(Status::Ok);
        }
        if cx.spare_children() < children.len() {
            return Verdict::Blocked;
        }
        self.open[io.tag.index()] = Open { left: children.len() as u32, status: Status::Ok };
        for (index, &child) in children.iter().enumerate() {
            let spawned = cx.spawn(io, child, ChildKind::Copy, request(index));
            debug_assert!(spawned.is_ok(), "the spare children were counted");
        }
        Verdict::Held
    }

    /// Counts a completed child. Call it in the node's `child_end`.
    pub fn end(&mut self, io: Cookie, status: Status) -> Verdict {
        let open = &mut self.open[io.tag.index()];
        open.left -= 1;
        if open.status.is_ok() {
            open.status = status;
        }
        if open.left == 0 { Verdict::Up(open.status) } else { Verdict::Held }
    }
}
