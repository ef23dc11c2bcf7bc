//! Nodes for simulated stacks: correct nodes with difficult behaviour.
//!
//! Each node is as small as possible. The nodes are for tests, so none is optimised for speed.

mod file;
mod lender;
mod spawning;

pub use file::PlainFile;
pub use lender::Lender;
pub use spawning::{Chop, Mirror};

use crate::Rng;
use block::{Bytes, Cookie, Data, Op, Request, Status};
use queue::{Cx, Node, NodeId, Ring, Verdict};

#[cfg(test)]
mod tests;

/// Delays requests for a random time before they go down.
pub struct Delay {
    child: NodeId,
    rng: Rng,
    chance: u32,
}

impl Delay {
    /// Creates a node that delays `chance` permille of requests by up to 2 ms.
    pub fn new(child: NodeId, rng: Rng, chance: u32) -> Delay {
        Delay { child, rng, chance }
    }
}

impl<R: Ring> Node<R> for Delay {
    fn submit(&mut self, io: Cookie, _: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if !self.rng.chance(self.chance) {
            return Verdict::Down(self.child);
        }
        cx.timer(io, cx.now().after(self.rng.below(2_000_000)));
        Verdict::Held
    }

    fn reap(&mut self, _: Cookie, _: &mut Request, result: i64, _: &mut Cx<'_, R>) -> Verdict {
        match result {
            0 => Verdict::Down(self.child),
            _ => Verdict::Up(Status::from_result(result, 0)),
        }
    }
}

/// Reports `Busy` at random, before requests go down and after they come up.
pub struct Jam {
    child: NodeId,
    rng: Rng,
    chance: u32,
    /// By tag: the memory of a request, restored before it starts over.
    data: Vec<Data>,
}

impl Jam {
    /// Creates a node that is busy in `chance` permille of cases.
    pub fn new(child: NodeId, rng: Rng, chance: u32) -> Jam {
        Jam { child, rng, chance, data: Vec::new() }
    }
}

impl<R: Ring> Node<R> for Jam {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.data = vec![Data::NONE; tags];
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        self.data[io.tag.index()] = req.data;
        if self.rng.chance(self.chance) { Verdict::Busy } else { Verdict::Down(self.child) }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        if !self.rng.chance(self.chance / 4) {
            return Verdict::Up(status);
        }
        req.data = self.data[io.tag.index()];
        Verdict::Busy
    }
}

/// Fails requests at random: before they go down, or after they have completed.
pub struct Flaky {
    child: NodeId,
    rng: Rng,
    chance: u32,
}

impl Flaky {
    /// Creates a node that fails `chance` permille of requests in each direction.
    pub fn new(child: NodeId, rng: Rng, chance: u32) -> Flaky {
        Flaky { child, rng, chance }
    }

    fn status(&mut self) -> Status {
        *self.rng.pick(&[Status::IoError, Status::Transport, Status::Medium, Status::Resource, Status::Again])
    }
}

impl<R: Ring> Node<R> for Flaky {
    fn submit(&mut self, _: Cookie, _: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        if self.rng.chance(self.chance) { Verdict::Up(self.status()) } else { Verdict::Down(self.child) }
    }

    fn end_io(&mut self, _: Cookie, _: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        Verdict::Up(if self.rng.chance(self.chance) { self.status() } else { status })
    }
}

/// Retries failed requests a few times, except flushes: a second flush cannot restore what a failed one lost.
pub struct Retry {
    child: NodeId,
    times: u32,
    /// By tag: number of retries, and the memory of the request.
    used: Vec<(u32, Data)>,
}

impl Retry {
    /// Creates a node that retries each request up to `times` times.
    pub fn new(child: NodeId, times: u32) -> Retry {
        Retry { child, times, used: Vec::new() }
    }
}

impl<R: Ring> Node<R> for Retry {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.used = vec![(0, Data::NONE); tags];
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        self.used[io.tag.index()] = (0, req.data);
        Verdict::Down(self.child)
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        let (used, data) = &mut self.used[io.tag.index()];
        if status.is_ok() || !status.is_path_error() || req.op == Op::Flush || *used == self.times {
            return Verdict::Up(status);
        }
        *used += 1;
        req.data = *data;
        Verdict::Down(self.child)
    }
}

/// Moves every request by a fixed offset on the device below.
pub struct Shift {
    child: NodeId,
    by: Bytes,
}

impl Shift {
    /// Creates a node whose byte 0 is byte `by` of the device below.
    pub fn new(child: NodeId, by: Bytes) -> Shift {
        Shift { child, by }
    }
}

impl<R: Ring> Node<R> for Shift {
    fn submit(&mut self, _: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        if req.op != Op::Flush {
            req.offset = req.offset + self.by;
        }
        Verdict::Down(self.child)
    }

    fn end_io(&mut self, _: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        if req.op != Op::Flush {
            req.offset = req.offset - self.by;
        }
        Verdict::Up(status)
    }
}
