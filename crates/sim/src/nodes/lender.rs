//! A device in the ring's own memory, which lends its memory to whoever takes any.

use block::{Bytes, Cookie, Data, Extent, Flags, Op, Request, Segment, Status};
use queue::{Cx, Node, Ring, Verdict};

/// Memory that answers in place. What it lends is not the borrower's to write to: whoever sends such a
/// read down again without putting its data back spoils the device, and the model sees it.
pub struct Lender {
    memory: Segment,
}

impl Lender {
    /// A device in `memory`, which outlives every request and is zeroes at first.
    pub fn new(memory: Segment) -> Lender {
        Lender { memory }
    }

    /// Copy between the request's memory and the device's.
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
            Op::Read if req.flags.has(Flags::MAY_LEND) => req.data = Data::One(own),
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
