//! One request to several children: each gets a copy, and the request ends when all of them have, with the first error.
//!
//! For flushes, which every device of a stack must see, and for whoever writes everything twice. Belongs to a node.

use block::{Cookie, Request, Status};
use queue::{ChildKind, Cx, NodeId, Ring, Verdict};

#[derive(Clone, Copy)]
struct Open {
    left: u32,
    status: Status,
}

/// What of a node's requests is at several children.
#[derive(Default)]
pub struct Fan {
    /// By tag; without meaning for a request that is not fanned out.
    open: Box<[Open]>,
}

impl Fan {
    /// In the node's `attach`.
    pub fn attach(&mut self, tags: usize) {
        self.open = vec![Open { left: 0, status: Status::Ok }; tags].into();
    }

    /// Send copies of `req` to these children, as made by `make` from the child's place among them. The node needs as
    /// many spare children as there are here, at least, or it is never done.
    pub fn start<R: Ring>(
        &mut self,
        io: Cookie,
        children: &[NodeId],
        cx: &mut Cx<'_, R>,
        mut make: impl FnMut(usize) -> Request,
    ) -> Verdict {
        if children.is_empty() {
            return Verdict::Up(Status::Ok);
        }
        if cx.spare_children() < children.len() {
            return Verdict::Blocked;
        }
        self.open[io.tag.index()] = Open { left: children.len() as u32, status: Status::Ok };
        for (place, &child) in children.iter().enumerate() {
            let spawned = cx.spawn(io, child, ChildKind::Copy, make(place));
            debug_assert!(spawned.is_ok(), "a spare child was seen");
        }
        Verdict::Held
    }

    /// In the node's `child_end`.
    pub fn end(&mut self, io: Cookie, status: Status) -> Verdict {
        let open = &mut self.open[io.tag.index()];
        open.left -= 1;
        if open.status.is_ok() {
            open.status = status;
        }
        if open.left == 0 { Verdict::Up(open.status) } else { Verdict::Held }
    }
}
