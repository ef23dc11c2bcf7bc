//! The node of an image in one hardware queue.
//!
//! Requests are gathered and passed to the image's threads at the end of a turn. When the threads notify
//! the queue, it takes their completions at the end of its next turn. Data is copied to and from memory of
//! the node, one buffer for each tag.

use crate::pool::{Job, Pool, Returns};
use block::{Cookie, Data, Op, Request, Status};
use queue::{Cx, Node, NodeId, QueueWaker, Ring, Verdict};
use std::sync::Arc;

/// Buffers that are longer than this, in bytes, are freed after the request.
const KEPT_LEN: usize = 256 << 10;

/// The node of an image in one hardware queue.
pub struct ImageNode {
    pool: Pool,
    back: Arc<Returns>,
    /// The buffer of each tag; empty while a thread has it.
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
    pub(crate) fn new(pool: Pool, waker: QueueWaker) -> ImageNode {
        let back = Arc::new(Returns::new(waker));
        ImageNode { pool, back, memory: Box::default(), gathered: Vec::new(), done: Vec::new() }
    }
}

/// Returns the number of bytes of a request's memory that are read or written.
fn memory_len<R: Ring>(req: &Request, cx: &Cx<'_, R>) -> u64 {
    match req.op {
        Op::Read | Op::Write => req.len.0,
        Op::Extents => cx.segments(req.data, u64::MAX).map(|segment| u64::from(segment.len)).sum(),
        _ => 0,
    }
}

/// Calls `each` for every segment of the first `len` bytes of `data`, with the number of bytes before it.
fn each_segment<R: Ring>(
    data: Data,
    len: u64,
    cx: &mut Cx<'_, R>,
    mut each: impl FnMut(&mut R, block::Segment, usize),
) {
    let mut done = 0;
    while done < len {
        let rest = cx.advance(data, done);
        let Some(segment) = cx.segments(rest, len - done).next().filter(|segment| segment.len > 0) else {
            return;
        };
        each(cx.ring, segment, done as usize);
        done += u64::from(segment.len);
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
        if req.flags.contains(block::Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        if req.flags.contains(block::Flags::FAST_ZERO) {
            return Verdict::Up(Status::NotSupported);
        }
        let mut memory = std::mem::take(&mut self.memory[io.tag.index()]);
        let len = memory_len(req, cx);
        memory.resize(len as usize, 0);
        if req.op == Op::Write {
            each_segment(req.data, len, cx, |ring, segment, at| {
                memory[at..at + segment.len as usize].copy_from_slice(ring.bytes(segment));
            });
        }
        let (op, flags, back) = (req.op, req.flags, self.back.clone());
        self.gathered.push(Job { io, op, flags, offset: req.offset, len: req.len, memory, back });
        Verdict::Held
    }

    /// Completes a request that a thread has processed: data that was read is in our memory.
    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let memory = &mut self.memory[io.tag.index()];
        if result == 0 && matches!(req.op, Op::Read | Op::Extents) {
            each_segment(req.data, memory.len() as u64, cx, |ring, segment, at| {
                ring.bytes_mut(segment).copy_from_slice(&memory[at..at + segment.len as usize]);
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

    /// A request that a thread has started cannot be cancelled; it completes normally.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
