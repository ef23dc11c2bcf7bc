//! A device in the ring's memory that supports zero-copy reads.

use block::{Bytes, Cookie, Data, Extent, Flags, Op, Request, Segment, Status};
use queue::{Cx, Node, Ring, Verdict};

/// Memory that completes requests inline. The memory of a zero-copy read must not be written to: a node that
/// sends such a read down again without restoring its data corrupts the device, which the model detects.
pub struct Lender {
    memory: Segment,
}

impl Lender {
    /// Creates a device in `memory`, which must outlive every request and be zeroed.
    pub fn new(memory: Segment) -> Lender {
        Lender { memory }
    }

    /// Copies between the request's memory and the device's.
    fn copy<R: Ring>(&self, req: &Request, own: Segment, cx: &mut Cx<'_, R>) {
        let pieces: Vec<Segment> = cx.segments(req.data, req.len.0).collect();
        let mut done = 0;
        for piece in pieces {
            let part = own.slice(done, piece.len);
            let (from, into) = if req.op == Op::Read { (part, piece) } else { (piece, part) };
            let bytes = cx.ring.bytes(from).to_vec();
            cx.ring.bytes_mut(into).copy_from_slice(&bytes);
            done += piece.len;
        }
    }
}

impl<R: Ring> Node<R> for Lender {
    fn submit(&mut self, _: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let own = self.memory.slice(req.offset.0 as u32, req.len.0 as u32);
        match req.op {
            Op::Read if req.flags.contains(Flags::ZERO_COPY) => req.data = Data::One(own),
            Op::Read | Op::Write => self.copy(req, own, cx),
            Op::Discard | Op::WriteZeroes => cx.ring.bytes_mut(own).fill(0),
            Op::Extents => {
                let Data::One(memory) = req.data else { return Verdict::Up(Status::Invalid) };
                let extent = Extent { len: Bytes(req.len.0), hole: false, zero: false };
                let bytes = cx.ring.bytes_mut(memory);
                bytes.fill(0);
                bytes[..Extent::RECORD_LEN].copy_from_slice(&extent.to_record());
            }
            Op::Flush | Op::Prefetch => {}
            _ => return Verdict::Up(Status::NotSupported),
        }
        Verdict::Up(Status::Ok)
    }
}
