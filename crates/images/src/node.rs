//! An image as one hardware queue sees it.
//!
//! What is asked for is gathered and handed to the image's threads at the end of a turn; what they have done is taken at the
//! end of the turn for which they nudged the queue. A request's data moves through memory of the node, kept by tag.

use crate::pool::{Job, Nudge, Pool, Returns};
use block::{Cookie, Data, Op, Request, Status};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

/// Memory longer than that is not kept for the next request.
const KEPT_LEN: usize = 256 << 10;

/// The node.
pub struct ImageNode {
    pool: Pool,
    back: Arc<Returns>,
    /// By tag: memory, while no thread has it.
    memory: Box<[Vec<u8>]>,
    gathered: Vec<Job>,
    done: Vec<(Cookie, i64, Vec<u8>)>,
}

impl std::fmt::Debug for ImageNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageNode").field("gathered", &self.gathered.len()).finish_non_exhaustive()
    }
}

impl ImageNode {
    pub(crate) fn new(pool: Pool, nudge: Nudge) -> ImageNode {
        let back = Arc::new(Returns::new(nudge));
        ImageNode { pool, back, memory: Box::default(), gathered: Vec::new(), done: Vec::new() }
    }
}

/// Bytes of memory that a request names, of which something is read or written.
fn memory_len<R: Ring>(req: &Request, cx: &Cx<'_, R>) -> u64 {
    match req.op {
        Op::Read | Op::Write => req.len.0,
        Op::Extents => cx.segments(req.data, u64::MAX).map(|piece| u64::from(piece.len)).sum(),
        _ => 0,
    }
}

/// Call `each` for every piece of the first `len` bytes of `data`, with how many bytes came before it.
fn each_piece<R: Ring>(
    data: Data,
    len: u64,
    cx: &mut Cx<'_, R>,
    mut each: impl FnMut(&mut R, block::Segment, usize),
) {
    let mut done = 0;
    while done < len {
        let rest = cx.advance(data, done);
        let Some(piece) = cx.segments(rest, len - done).next().filter(|piece| piece.len > 0) else { return };
        each(cx.ring, piece, done as usize);
        done += u64::from(piece.len);
    }
}

impl<R: Ring> Node<R> for ImageNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.memory = (0..tags).map(|_| Vec::new()).collect();
        self.gathered.reserve(tags);
        self.done.reserve(tags);
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.op.is_special() {
            return Verdict::Up(Status::NotSupported);
        }
        if req.op == Op::Prefetch {
            return Verdict::Up(Status::Ok);
        }
        if req.flags.has(block::Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        if req.flags.has(block::Flags::FAST_ZERO) {
            return Verdict::Up(Status::NotSupported);
        }
        let mut memory = std::mem::take(&mut self.memory[io.tag.index()]);
        let len = memory_len(req, cx);
        memory.resize(len as usize, 0);
        if req.op == Op::Write {
            each_piece(req.data, len, cx, |ring, piece, at| {
                memory[at..at + piece.len as usize].copy_from_slice(ring.bytes(piece));
            });
        }
        let (op, flags, back) = (req.op, req.flags, self.back.clone());
        self.gathered.push(Job { io, op, flags, offset: req.offset, len: req.len, memory, back });
        Verdict::Held
    }

    /// A thread is done with it: what it read is in our memory.
    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let memory = &mut self.memory[io.tag.index()];
        if result == 0 && matches!(req.op, Op::Read | Op::Extents) {
            each_piece(req.data, memory.len() as u64, cx, |ring, piece, at| {
                ring.bytes_mut(piece).copy_from_slice(&memory[at..at + piece.len as usize]);
            });
        }
        if memory.capacity() > KEPT_LEN {
            *memory = Vec::new();
        }
        Verdict::Up(Status::from_result(result, 0))
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        let mut done = std::mem::take(&mut self.done);
        self.back.take(&mut done);
        for (io, result, memory) in done.drain(..) {
            self.memory[io.tag.index()] = memory;
            cx.resume(io, result);
        }
        self.done = done;
        if !self.gathered.is_empty() {
            self.pool.submit(&mut self.gathered);
        }
    }

    /// What a thread has begun it finishes.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
