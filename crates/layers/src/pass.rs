//! A layer that does nothing: what the price of a layer is measured with.

use block::{Cookie, Request, Status};
use queue::{Cx, Node, NodeId, Ring, Verdict};

/// Hands every request down, and up again.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    child: NodeId,
}

impl Pass {
    /// One above `child`.
    pub fn new(child: NodeId) -> Pass {
        Pass { child }
    }
}

impl<R: Ring> Node<R> for Pass {
    fn submit(&mut self, _: Cookie, _: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        Verdict::Down(self.child)
    }

    fn end_io(&mut self, _: Cookie, _: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        Verdict::Up(status)
    }
}
