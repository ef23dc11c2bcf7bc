//! A layer that changes nothing: benchmarks measure the cost of a layer with it.

use block::{Cookie, Request, Status};
use queue::{Cx, Node, NodeId, Ring, Verdict};

/// Passes every request down, and its status up.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    child: NodeId,
}

impl Pass {
    /// Creates a node over `child`.
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
